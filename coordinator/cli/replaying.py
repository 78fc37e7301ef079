"""``context-cache replay``: a recorded trace done again, compared, looked at, or made small."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from attrs import asdict
from rich.console import Console

from context_cache.backends import BackendUnavailable
from context_cache.coordinator.cli.app import DoesNotHold, Unusable
from context_cache.coordinator.cli.arguments import FiniteRange, check_inputs, check_output
from context_cache.coordinator.cli.progress import LateProgress
from context_cache.coordinator.cli.sides import print_call, print_difference
from context_cache.coordinator.traces.perfetto import write_perfetto
from context_cache.coordinator.traces.reader import Group, TraceError
from context_cache.coordinator.traces.replay import Difference, ReplayResult, replay
from context_cache.coordinator.traces.shrink import Shrunk, shrink

__all__ = ["replay_command"]

_MIB = 2**20


@click.command("replay")
@click.argument("trace", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--backend", type=click.Choice(["host", "cupy"]), default="host", show_default=True,
              help="Where to do it again, whatever it was recorded on.")
@click.option("--until", type=click.IntRange(0), metavar="N", help="Only the first N calls.")
@click.option("--step", "by_step", is_flag=True,
              help="Show each call and its transitions; on a terminal, wait for Enter after each.")
@click.option("--memory", type=FiniteRange(min=0, min_open=True), default=8.0, show_default=True, metavar="GIB",
              help="Most host memory that the trace may ask for.")
@click.option("--shrink", "shrinking", is_flag=True,
              help="Leave out requests, calls and tokens as long as it fails in the same way, and write what is left.")
@click.option("--seconds", type=FiniteRange(min=0), default=60.0, show_default=True, metavar="S",
              help="With --shrink: take the smallest trace found after this long.")
@click.option("--perfetto", type=click.Path(dir_okay=False), metavar="OUT",
              help="Instead of replaying: write the trace with its times as a picture for ui.perfetto.dev.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE",
              help="With --shrink: where to write.  [default: FILE with .min before its suffix]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def replay_command(
    trace: str,
    backend: str,
    until: int | None,
    by_step: bool,
    memory: float,
    shrinking: bool,
    seconds: float,
    perfetto: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Make the calls of a recorded trace again, on a fresh coordinator, and compare every transition.

    Exit 0: all came out as recorded. 1: something differs; the first difference is shown. 2: FILE is not usable.
    Recorded failures are repeated where they happened. With --shrink a failing trace is made small and written, ready
    to be committed as a test.

    \b
    Examples:
      context-cache run --trace t.jsonl
      context-cache replay t.jsonl
      context-cache replay t.jsonl --until 20 --step
      context-cache replay t.jsonl --perfetto t.perfetto.json
      context-cache replay broken.jsonl --shrink -o tests/traces/broken.jsonl
    """
    if output is not None and not shrinking:
        raise Unusable("--output says where a shrunk trace goes; add --shrink")
    if shrinking and (until is not None or by_step):
        raise Unusable("--shrink replays the whole trace many times; leave --until and --step out")
    if perfetto is not None and (shrinking or until is not None or by_step):
        raise Unusable("--perfetto draws the trace as it was recorded; leave --shrink, --until and --step out")
    if by_step and as_json:
        raise Unusable("--step shows every call and --json prints one object; choose one of them")
    check_inputs(trace)
    # What is replayed may fail on purpose a thousand times; the comparison says all there is to say.
    log = logging.getLogger("context_cache")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        if perfetto is not None:
            _draw(trace, perfetto, as_json)
        elif shrinking:
            _shrink(trace, output, backend, memory, seconds, as_json)
        else:
            _replay(trace, backend, until, by_step, memory, as_json)
    except TraceError as error:
        raise Unusable(f"{trace}: {error}") from None
    except BackendUnavailable as error:
        raise Unusable(f"--backend {backend}: {error}") from None
    except OSError as error:
        # What has no name of a file is the output, which is not ours.
        if error.filename is None:
            raise
        reason = error.strerror or error
        raise Unusable(f"{error.filename} cannot be read ({reason}); name a trace that can be read") from None
    finally:
        log.setLevel(level)


def _replay(trace: str, backend: str, until: int | None, by_step: bool, memory: float, as_json: bool) -> None:
    console = Console()
    size = max(1, os.stat(trace).st_size // _MIB)
    done = 0

    def seen(group: Group, actual: list[bytes]) -> None:
        nonlocal done
        done += sum(len(line) for line in group.raw)
        progress(done // _MIB)
        if by_step:
            print_call(console, group)
            _wait()

    with LateProgress("MiB", size) as progress:
        result = replay(trace, backend=backend, until=until, bytes_max=int(memory * 2**30), seen=seen)
    _report(trace, backend, result, console, as_json)


def _report(trace: str, backend: str, result: ReplayResult, console: Console, as_json: bool) -> None:
    difference = result.difference
    if as_json:
        click.echo(json.dumps(_as_json(trace, backend, result)))
    elif difference is not None:
        print_difference(console, difference)
    if result.torn:
        click.echo(f"context-cache: {trace}: the last call is incomplete and was left out", err=True)
    if result.changed_machines and difference is not None:
        click.echo(
            f"context-cache: the tables of {', '.join(result.changed_machines)} are not those that were recorded",
            err=True,
        )
    if result.unrepeatable is not None:
        raise Unusable(
            f"{trace}: call {result.calls + 1} was ended from outside by {result.unrepeatable}, which cannot be "
            f"repeated; the {result.calls} calls before it are equal, replay them alone with --until {result.calls}"
        )
    if difference is not None:
        where = f"call {difference.call}" if difference.step is None else f"step {difference.step}"
        raise DoesNotHold(f"{trace}: {where} (line {difference.line}) is not as recorded")
    if not as_json:
        console.print(f"{result.calls} calls and {result.steps} transitions, all as recorded.")


def _as_json(trace: str, backend: str, result: ReplayResult) -> dict[str, Any]:
    return {
        "trace": trace,
        "backend": backend,
        "equal": result.equal,
        "calls": result.calls,
        "steps": result.steps,
        "torn": result.torn,
        "unrepeatable": result.unrepeatable,
        "changed_machines": list(result.changed_machines),
        "difference": None if result.difference is None else _difference_json(result.difference),
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "call": difference.call,
        "line": difference.line,
        "step": difference.step,
        "fields": list(difference.fields),
        "record": msgspec.to_builtins(difference.record),
        "expected": None if difference.expected is None else msgspec.to_builtins(difference.expected),
        "actual": None if difference.actual is None else msgspec.to_builtins(difference.actual),
    }


def _wait() -> None:
    if sys.stdin.isatty() and sys.stdout.isatty():
        answer = click.prompt("Enter: next call, q: stop", default="", show_default=False, prompt_suffix=" ")
        if answer.strip().lower().startswith("q"):
            raise click.exceptions.Exit(0)


def _draw(trace: str, out: str, as_json: bool) -> None:
    check_output(out, "--perfetto", [trace], direct=True)
    try:
        drawn = write_perfetto(trace, out)
    except OSError as error:
        if _is_of(trace, error):
            raise
        raise Unusable(f"{out} cannot be written ({error.strerror}); choose another place with --perfetto") from None
    if as_json:
        click.echo(json.dumps({"output": out, **asdict(drawn)}))
        return
    click.echo(f"{out}: {drawn.steps} transitions of {drawn.calls} calls; open it in https://ui.perfetto.dev")
    if drawn.untimed:
        click.echo(f"context-cache: the last {drawn.untimed} calls have no times and were left out", err=True)


def _shrink(
    trace: str, output: str | None, backend: str, memory: float, seconds: float, as_json: bool
) -> None:
    path = Path(trace)
    out = Path(output) if output is not None else path.with_name(f"{path.stem}.min{path.suffix}")
    check_output(str(out), "--output", [trace], trace=True)
    try:
        with LateProgress("seconds", max(1, int(seconds))) as progress:
            shrunk = shrink(
                path, out, backend=backend, bytes_max=int(memory * 2**30), seconds=seconds, progress=progress
            )
    except OSError as error:
        if _is_of(trace, error):
            raise
        reason = error.strerror or error
        raise Unusable(f"{out} cannot be written ({reason}); choose another place with --output") from None
    if as_json:
        click.echo(json.dumps(_shrunk_json(shrunk, out)))
        return
    kind = "replays differently" if shrunk.differs else "fails"
    console = Console()
    console.print(f"{out} {kind} in the same way: {shrunk.symptom}", markup=False, soft_wrap=True)
    for what, (before, after) in (
        ("calls", shrunk.calls), ("requests", shrunk.requests), ("tokens", shrunk.tokens),
    ):  # fmt: skip
        console.print(f"  {what:10} {before:>12,} -> {after:,}")


def _is_of(trace: str, error: OSError) -> bool:
    """Whether it was the trace that could not be read."""
    named = error.filename
    return isinstance(named, str | os.PathLike) and os.path.realpath(named) == os.path.realpath(trace)


def _shrunk_json(shrunk: Shrunk, out: Path) -> dict[str, Any]:
    return {
        "output": str(out),
        "differs": shrunk.differs,
        "symptom": shrunk.symptom,
        "calls": list(shrunk.calls),
        "requests": list(shrunk.requests),
        "tokens": list(shrunk.tokens),
        "tries": shrunk.tries,
    }
