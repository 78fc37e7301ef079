"""What ``draw --html`` does: a page of lifecycles, and of a trace if one is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from context_cache.coordinator.cli.progress import LateProgress
from context_cache.coordinator.traces.explore import calls_of, facts_of
from context_cache.coordinator.traces.header import changed_machines
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.diagrams.explorer import ExplorerTrace, write_explorer
from context_cache.machines import ALL_MACHINES, MachineSpec

__all__ = ["STEPS_MAX", "CannotExplore", "write_html"]

STEPS_MAX: Final = 500_000
"""A page with more is too large for a browser to be fluid with; the rest of a longer trace is left out, and counted."""


class CannotExplore(Exception):
    """The page cannot be made of what was given. The message is one sentence."""


def write_html(
    out: Path,
    machine_names: Sequence[str],
    trace_path: Path | None,
    *,
    svg_of: Callable[[MachineSpec], str],
    steps_max: int = STEPS_MAX,
) -> ExplorerTrace | None:
    """Write the page; returns what it knows of the trace.

    machine_names: the machines to show; none: all of them. svg_of: draws one, see ``diagrams.explorer.page``.
    Raises CannotExplore, and whatever ``svg_of`` raises.
    """
    known = {spec.name: spec for spec in ALL_MACHINES}
    for name in machine_names:
        if name not in known:
            raise CannotExplore(f"there is no machine {name!r}; choose from {', '.join(known)}")
    machines = [known[name] for name in dict.fromkeys(machine_names)] or list(ALL_MACHINES)
    trace = None if trace_path is None else _read(trace_path, steps_max)
    try:
        write_explorer(out, machines, trace, svg_of)
    except OSError as error:
        raise CannotExplore(
            f"{out} cannot be written ({error.strerror or error}); name another file with --html"
        ) from None
    return trace


def _read(path: Path, steps_max: int) -> ExplorerTrace:
    try:
        with TraceReader(path) as reader, LateProgress("bytes", os.path.getsize(path)) as progress:
            trace = ExplorerTrace(path.name, facts_of(reader.header))
            left_out = read = 0

            def done(size: int) -> None:
                nonlocal read
                read += size
                progress(read)

            for call in calls_of(reader, done=done):
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
        for name in changed_machines(reader.header)
    ]
    if left_out:
        trace.notes.append(f"Only the first {trace.steps:,} of {trace.steps + left_out:,} steps are shown.")
    if reader.torn:
        trace.notes.append("The trace ends in the middle of a call, which is left out.")
    return trace
