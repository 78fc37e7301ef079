"""``context-cache bench``: the budgets, measured."""

from __future__ import annotations

import json
import platform

import click

__all__ = ["bench_command"]


def bench_command() -> click.Command:
    """The command; built on demand so that ``--help`` of the others need not import it."""
    return _bench


@click.command("bench")
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@click.option(
    "--repeats",
    type=click.IntRange(3, 1000),
    default=9,
    show_default=True,
    metavar="N",
    help="Runs behind each median.",
)
@click.option(
    "--backend",
    type=click.Choice(["host", "cupy", "auto"]),
    default="host",
    show_default=True,
    help="Where the pages live; auto takes the best one that works here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def _bench(cases: tuple[str, ...], repeats: int, backend: str, as_json: bool) -> None:
    """Measure the coordinator: hash, admit, decode, publish, evict, events, record (default:
    all).

    Times are medians in microseconds; budgets are ratios within one run. Budgets that were set on another machine are
    scaled by the floors measured here. Always exits 0: a slow machine is no error.

    \b
    Example:
      context-cache bench decode events
    """
    from context_cache.backends import BackendUnavailable, DeviceError
    from context_cache.coordinator.cli.app import DoesNotHold, Unusable
    from context_cache.coordinator.cli.bench.cases import CASES, ScaledBudgets, bench_floors
    from context_cache.coordinator.cli.bench.measure import Bench
    from context_cache.coordinator.cli.progress import LateProgress

    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise click.UsageError(f"there is no case {unknown[0]!r}; choose from {', '.join(CASES)}")
    chosen = [name for name in CASES if name in cases or not cases]
    bench, scaled = Bench(backend), ScaledBudgets()
    try:
        with LateProgress("measurements", len(chosen) + 1) as progress:
            bench_floors(bench, scaled, repeats)
            for done, name in enumerate(chosen, start=1):
                progress(done)
                CASES[name](bench, scaled, repeats)
    except BackendUnavailable as error:
        raise Unusable(f"--backend {backend}: {error}") from None
    except DeviceError as error:
        raise DoesNotHold(f"the device failed: {error}") from None
    if as_json:
        machine = {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "backend": backend,
            "repeats": repeats,
        }
        click.echo(json.dumps({"machine": machine, **bench.to_json()}))
        return
    from context_cache.coordinator.cli.bench.table import print_bench

    print_bench(bench)
