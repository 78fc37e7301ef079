"""``context-cache coverage``: what traces and coverage files say of the lifecycles, added up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from context_cache.coordinator.cli.app import DoesNotHold, Unusable
from context_cache.coordinator.cli.arguments import FiniteRange, check_inputs, check_output
from context_cache.coordinator.cli.output import CannotWrite, write_file
from context_cache.coordinator.testing.coverage import FORMAT, Coverage, CoverageError, needs
from context_cache.coordinator.traces.reader import TraceError, TraceReader

__all__ = ["coverage_command", "coverage_of"]

_HEAD_BYTES = 4096


@click.command("coverage")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="OUT", help="Write the sum, to be drawn.")
@click.option("--fail-under", type=FiniteRange(0, 100), metavar="PERCENT", help="Exit 1 below this.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def coverage_command(files: tuple[str, ...], output: str | None, fail_under: float | None, as_json: bool) -> None:
    """Add up which rows, guard outcomes and failure paths were taken, and list what never was.

    FILE is a recorded trace, or what pytest --lifecycle-coverage-file=FILE wrote. An event that was offered and not
    taken is in no trace, so traces alone leave some guards open.

    \b
    Examples:
      context-cache coverage t.jsonl
      pytest --lifecycle-coverage-file=coverage.json && context-cache coverage coverage.json t.jsonl
    """
    if output is not None:
        check_output(output, "--output", files, direct=True)
    total = Coverage()
    for name in files:
        total.merge(coverage_of(name))
    if output is not None:
        _write(Path(output), total.to_json() + "\n")
    missing, wanted, percent = total.missing(), len(needs()), total.percent()
    if as_json:
        click.echo(json.dumps({
            "files": list(files), "needed": wanted, "taken": wanted - len(missing), "percent": percent,
            "missing": [need.words for need in missing],
        }))  # fmt: skip
    else:
        for need in missing:
            click.echo(f"never taken: {need.words}")
        taken = wanted - len(missing)
        click.echo(f"{taken} of {wanted} rows, guard outcomes and failure paths were taken ({percent:.1f} %)")
    if fail_under is not None and percent < fail_under:
        raise DoesNotHold(f"{percent:.1f} % of the lifecycles were taken, less than --fail-under {fail_under:g}")


def _write(out: Path, text: str) -> None:
    """Whole or not at all; a pipe or a device is written as it is."""
    try:
        if out.exists() and not out.is_file():
            out.write_text(text, encoding="utf-8")
        else:
            write_file(out, text.encode(), "--output")
    except CannotWrite as error:
        raise Unusable(str(error)) from None
    except OSError as error:
        raise Unusable(f"{out} cannot be written ({error.strerror}); choose another place with --output") from None


def coverage_of(name: str) -> Coverage:
    """What a trace or a coverage file has seen. Raises Unusable."""
    check_inputs(name, advice="name a trace or a coverage file")
    try:
        with open(name, "rb") as file:
            head = file.read(_HEAD_BYTES)
        if FORMAT.encode() in head:
            return Coverage.from_json(Path(name).read_text(encoding="utf-8"))
        return _of_trace(name)
    except (CoverageError, TraceError) as error:
        raise Unusable(f"{name}: {error}") from None
    except UnicodeDecodeError:
        raise Unusable(f"{name}: it is no UTF-8 text; write it with: pytest --lifecycle-coverage-file=FILE") from None
    except OSError as error:
        raise Unusable(f"{os.fspath(name)}: {error.strerror}; name a trace or a coverage file") from None


def _of_trace(name: str) -> Coverage:
    coverage = Coverage()
    with TraceReader(name) as reader:
        for group in reader.groups():
            for found in group.steps():
                step = found.step
                coverage.add(
                    step.machine, step.row, step.event, (step.source, step.target), step.guards.items(), step.outcome
                )
    return coverage
