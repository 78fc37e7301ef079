"""What ``draw --html`` does: a page of lifecycles, and of a trace if one is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from context_cache.coordinator.cli.arguments import check_output
from context_cache.coordinator.cli.output import CannotWrite, write_file
from context_cache.coordinator.cli.progress import LateProgress
from context_cache.coordinator.traces.explore import calls_of, facts_of
from context_cache.coordinator.traces.files import timings_of
from context_cache.coordinator.traces.header import changed_machines
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.timings import TimedTrace
from context_cache.diagrams.dot import to_dot
from context_cache.diagrams.engines import render
from context_cache.diagrams.explorer import ExplorerTrace, explorer_page
from context_cache.diagrams.pictures import MACHINES
from context_cache.machines import MachineSpec

__all__ = ["STEPS_MAX", "CannotExplore", "write_html"]

STEPS_MAX: Final = 400_000
"""The rest of a longer trace is left out, and counted: no browser scrolls a list that is much longer."""


class CannotExplore(Exception):
    """The page cannot be made of what was given. The message is one sentence."""


def write_html(
    out: Path | str,
    machine_names: Sequence[str],
    trace_path: Path | None,
    *,
    engine: str | None = None,
    steps_max: int = STEPS_MAX,
) -> None:
    """Write the page, whole or not at all; an unusable ``out`` is refused before anything is read.

    machine_names: the machines to show; none: all of them. engine: what lays the pictures out, see ``engines.render``.
    Raises CannotExplore, Unusable, and what ``engines.render`` raises.
    """
    for name in machine_names:
        if name not in MACHINES:
            raise CannotExplore(f"--html shows machines, and {name!r} is none; choose from {', '.join(MACHINES)}")
    _check_place(out, trace_path)
    machines = [MACHINES[name] for name in dict.fromkeys(machine_names)] or list(MACHINES.values())

    def drawn(spec: MachineSpec) -> str:
        return render(to_dot(spec, named=True), "svg", engine).decode()

    trace = None if trace_path is None else _read(trace_path, steps_max)
    try:
        write_file(Path(out), explorer_page(machines, trace, drawn).encode(), "--html")
    except CannotWrite as error:
        raise CannotExplore(str(error)) from None


def _check_place(out: Path | str, trace_path: Path | None) -> None:
    """Raise CannotExplore if no page can lie there, Unusable if it would replace the trace or a part of it."""
    place = os.fspath(out)
    if place in ("", os.curdir):
        raise CannotExplore("--html needs the name of a file, and what was given is none")
    if place == "-":
        raise CannotExplore("--html writes a file and not to the standard output; name a file")
    if place.endswith(("/", os.sep)) or os.path.isdir(place):
        raise CannotExplore(f"--html {place}: a folder cannot be written as a page; name a file in it")
    check_output(place, "--html", [] if trace_path is None else [os.fspath(trace_path)], makes_folders=True)


def _read(path: Path, steps_max: int) -> ExplorerTrace:
    try:
        with _opened(path) as source, LateProgress("bytes", os.path.getsize(path)) as progress:
            header = source.header
            trace = ExplorerTrace(path.name, facts_of(header))
            left_out = read = 0

            def done(size: int) -> None:
                nonlocal read
                read += size
                progress(read)

            for call in calls_of(source, done=done):
                if left_out or trace.steps + len(call.steps) > steps_max:
                    left_out += len(call.steps)
                else:
                    trace.add(call)
    except TraceError as error:
        raise CannotExplore(f"--trace {path}: {error}") from None
    except OSError as error:
        raise CannotExplore(f"--trace {path}: cannot be read ({error.strerror or error}); name another file") from None
    trace.notes += [
        f"The trace was recorded with another table of {name}; numbers of its rows may mean other rows here."
        for name in changed_machines(header)
    ]
    if left_out:
        trace.notes.append(f"Only the first {trace.steps:,} of {trace.steps + left_out:,} steps are shown.")
    if source.torn:
        trace.notes.append("The trace ends in the middle of a call, which is left out.")
    return trace


def _opened(path: Path) -> TraceReader | TimedTrace:
    return TimedTrace(path) if os.path.exists(timings_of(path)) else TraceReader(path)
