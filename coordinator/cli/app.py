"""The commands of ``context-cache``.

Rule 1: standard output carries the result and nothing else; progress, warnings and errors go to standard error.
Rule 2: exit 0 is done, 1 means that the thing checked does not hold, 2 that arguments or a file are not usable. What
the user got wrong is one sentence, never a traceback; a traceback is a bug of ours.
Rule 3: a command imports what it needs when it runs, so that ``--help`` stays quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, Final

import click

__all__ = ["DoesNotHold", "Unusable", "command_line"]

_INT32_MAX: Final = 2**31 - 1


class Unusable(click.ClickException):
    """Arguments or a file that cannot be used: exit 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        from context_cache.coordinator.traces.describe import printable

        # A message may quote a file, and a file may come from anywhere.
        click.echo(f"context-cache: {printable(self.message)}", file=file or sys.stderr)


class DoesNotHold(Unusable):
    """The command ran and what it checks does not hold: exit 1."""

    exit_code = 1


def _bench() -> click.Command:
    from context_cache.coordinator.cli.bench import bench_command

    return bench_command()


def _replay() -> click.Command:
    from context_cache.coordinator.cli.replaying import replay_command

    return replay_command


def _coverage() -> click.Command:
    from context_cache.coordinator.cli.covering import coverage_command

    return coverage_command


def _draw() -> click.Command:
    from context_cache.coordinator.cli.drawing import draw_command

    return draw_command()


def _diff() -> click.Command:
    from context_cache.coordinator.cli.diffing import diff_command

    return diff_command()


_LATE: Final[dict[str, Callable[[], click.Command]]] = {
    "bench": _bench,
    "coverage": _coverage,
    "diff": _diff,
    "draw": _draw,
    "replay": _replay,
}
"""Commands that are imported only when they are asked for."""


class _Commands(click.Group):
    """Knows the late commands by name."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *_LATE])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        late = _LATE.get(name)
        return super().get_command(context, name) if late is None else late()


@click.group("context-cache", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="context-cache-coordinator", prog_name="context-cache")
def command_line() -> None:
    """Own the life of requests in a paged context cache: run workloads through it and measure it, record what happened
    and do it again, draw its lifecycles and compare them.

    \b
    Examples:
      context-cache run --trace t.jsonl
      context-cache replay t.jsonl
      context-cache draw request --format png
    """


@command_line.command()
@click.argument("workload", required=False, metavar="[WORKLOAD]")
@click.option("--flavour", default="vanilla", show_default=True, metavar="NAME",
              help="Model state and drafts: vanilla, eagle, draft, shared-kv, hybrid, recurrent or hybrid-mtp. All but "
              "vanilla run static batches.")
@click.option("--verify/--no-verify", default=None,
              help="Compare what sequences hold with a cold computation.  [default: only for the shipped workload]")
@click.option("--snapshot-slots", type=click.IntRange(1, 2**20), metavar="N",
              help="Slots for checkpoints of hybrid, recurrent and hybrid-mtp.  [default: 2 x max-batch + 64]")
@click.option("--backend", type=click.Choice(["host", "cupy", "auto"]), default="host", show_default=True,
              help="Where the pages live; auto takes the best one that works here.")
@click.option("--pages", type=click.IntRange(1), metavar="N",
              help="Pages in the pool.  [default: 4 x max-batch x pages of a row]")
@click.option("--page-size", type=click.IntRange(1, 65_536), default=128, show_default=True, metavar="TOKENS",
              help="Tokens of a page.")
@click.option("--max-batch", type=click.IntRange(1, 65_536), metavar="N",
              help="Sequences that run together; 1 finishes a request before the next lookup.  [default: 32; 1 for "
              "hybrid-mtp]")
@click.option("--max-records", type=click.IntRange(1, _INT32_MAX), metavar="N",
              help="Cached endpoints to keep.  [default: as many as the pages allow]")
@click.option("--max-new-tokens", type=click.IntRange(1, _INT32_MAX), metavar="N",
              help="Cap the output of each request; 1 means no decode step.")
@click.option("--row-tokens", type=click.IntRange(1, _INT32_MAX), metavar="TOKENS",
              help="Length of a page-table row.  [default: the longest request]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Run only the first N requests.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, metavar="N",
              help="Seed of the tokens that the embedded model emits.")
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE",
              help="Record calls and transitions in FILE, to be replayed; beside it FILE.tokens and FILE.timings.")
@click.option("--redact", is_flag=True, help="With --trace: keep no token ids; prefixes are known by ordinals alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def run(
    workload: str | None,
    flavour: str,
    verify: bool | None,
    snapshot_slots: int | None,
    backend: str,
    pages: int | None,
    page_size: int,
    max_batch: int | None,
    max_records: int | None,
    max_new_tokens: int | None,
    row_tokens: int | None,
    limit: int | None,
    seed: int,
    trace: str | None,
    redact: bool,
    as_json: bool,
) -> None:
    """Run WORKLOAD through the coordinator and report reuse, cost and leaks.

    WORKLOAD is a JSON Lines file, one request a line: token_ids or text and max_new_tokens (optionally lookup_policy,
    commit_policy, tenant, arrival), or the Mooncake trace format (timestamp, input_length, output_length, hash_ids).
    Without it the shipped workload runs; - is standard input. With --verify, and for every flavour but vanilla, the
    embedded model writes a state for each token through the page tables and reads it back; otherwise it computes
    nothing and emits deterministic tokens. Exit 1 if a page or snapshot slot leaked, or if something that a sequence
    reused, held or generated is not what a cold run computes: the first difference is named by request, position and
    page.

    \b
    Examples:
      context-cache run
      context-cache run requests.jsonl --pages 4096 --max-batch 8
      context-cache run trace.jsonl --limit 1000 --json
      context-cache run trace.jsonl --flavour hybrid --verify --limit 300
    """
    from context_cache.backends import BackendUnavailable, DeviceError
    from context_cache.coordinator.cli.arguments import check_output
    from context_cache.coordinator.cli.flavours import FlavourError, check_options
    from context_cache.coordinator.cli.progress import LateProgress
    from context_cache.coordinator.cli.report import print_report
    from context_cache.coordinator.cli.scheduler import RunFailed, run_workload
    from context_cache.coordinator.cli.sizing import SizeError, size_run
    from context_cache.coordinator.cli.workload import WorkloadError, read_workload
    from context_cache.coordinator.cli.workloads import shipped_workload
    from context_cache.coordinator.traces import TraceRecorder

    if redact and trace is None:
        raise Unusable("--redact says what a trace leaves out, and there is none; add --trace FILE")
    if trace is not None:
        check_output(trace, "--trace", [] if workload is None else [workload], trace=True)
    try:
        kind, batch, slots = check_options(
            flavour, max_batch=max_batch, pages=pages, snapshot_slots=snapshot_slots
        )
        if workload is None:
            with shipped_workload() as path:
                requests = read_workload(path, name="shipped workload")
        else:
            requests = read_workload(workload)
        requests = requests.cut(limit=limit, max_new_tokens=max_new_tokens)
        size = size_run(
            requests, page_size=page_size, max_batch=batch, pages=pages, row_tokens=row_tokens, headroom=kind.width,
            paged=kind.has_attention,
        )  # fmt: skip
    except (FlavourError, WorkloadError, SizeError) as error:
        raise Unusable(str(error)) from None
    recorder = None
    if trace is not None:
        try:
            recorder = TraceRecorder(trace, redact=redact, seed=seed)
        except OSError as error:
            raise Unusable(f"{trace} cannot be written ({error.strerror}); choose another place with --trace") from None
    try:
        with ExitStack() as ends, LateProgress("requests", len(requests.requests)) as progress:
            if recorder is not None:
                ends.callback(recorder.close)
            report = run_workload(
                requests,
                size,
                flavour=kind,
                backend=backend,
                max_records=max_records,
                snapshot_slots=slots,
                seed=seed,
                verify=workload is None if verify is None else verify,
                progress=progress,
                recorder=recorder,
            )
    except BackendUnavailable as error:
        raise Unusable(f"--backend {backend}: {error}") from None
    except MemoryError:
        if not size.pages:
            raise Unusable(
                f"{batch} sequences and {slots} snapshot slots do not fit into memory; choose fewer with --max-batch "
                "and --snapshot-slots"
            ) from None
        raise Unusable(f"{size.pages} pages do not fit into memory; choose fewer with --pages") from None
    except DeviceError as error:
        raise DoesNotHold(f"the device failed: {error}") from None
    except RunFailed as error:
        raise DoesNotHold(str(error)) from None

    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        from rich.console import Console

        print_report(report, Console())
        if recorder is not None:
            click.echo(
                f"{recorder.steps} transitions recorded in {trace}; replay them with: context-cache replay {trace}"
            )
    if recorder is not None and recorder.failure is not None:
        raise DoesNotHold(f"--trace {trace}: recording stopped before the end of the run: {recorder.failure}")
    if report.leaked_pages:
        raise DoesNotHold(
            f"{report.leaked_pages} pages leaked: after the last request they were neither free nor in a record; "
            "this is a bug, please report it with the workload and the options"
        )
