"""What a trace or a coverage says of a picture: marks on the rows, failures and states of each machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import define, evolve, field

from context_cache.coordinator.cli.app import Unusable
from context_cache.coordinator.cli.covering import coverage_of
from context_cache.coordinator.traces.header import changed_machines
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.recorder import timings_of
from context_cache.coordinator.traces.timings import median_durations
from context_cache.diagrams import Mark, Overlay
from context_cache.machines import ALL_MACHINES
from context_cache.machines.step import DONE

if TYPE_CHECKING:
    from context_cache.coordinator.traces.format import StepRecord

__all__ = ["FIRING", "coverage_overlays", "trace_overlays"]

FIRING: Final = tuple(spec.name for spec in ALL_MACHINES if spec.follows is None)
"""The machines that fire events, and so have something to be marked."""

_NEVER: Final = "#ff8a80"
_LAST: Final = "#7ee787"
_CAUSES: Final = {"failed": "device error", "drain_failed": "drain failed", "publish_failed": "publish failed"}
_LISTED_MAX: Final = 3


def coverage_overlays(path: str) -> dict[str, Overlay]:
    """Rows that never fired and failures that were never taken, red, by machine. Raises Unusable."""
    coverage = coverage_of(path)
    rows: dict[str, dict[int, Mark]] = {name: {} for name in FIRING}
    failures: dict[str, dict[tuple[int, str], Mark]] = {name: {} for name in FIRING}
    for need in coverage.missing():
        machine, kind, *rest = need.fact
        if kind == "row":
            rows[machine][int(rest[0])] = Mark(colour=_NEVER)
        elif kind == "failure":
            failures[machine][int(rest[0]), _CAUSES[rest[1]]] = Mark(colour=_NEVER)
    title = f"coverage {os.path.basename(path)}: red was never taken"
    return {name: Overlay(rows=rows[name], failures=failures[name], title=title) for name in FIRING}


@define
class _Seen:
    """What one machine did."""

    rows: Counter[int] = field(factory=Counter)
    order: dict[int, list[int]] = field(factory=dict)
    failures: Counter[tuple[int, str]] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)
    visited: set[str] = field(factory=set)
    last: StepRecord | None = None

    def add(self, number: int, step: StepRecord) -> None:
        """Take one step. One that failed took another way than its row, and is counted there."""
        self.last = step
        if step.row < 0:
            self.refused[step.source] += 1
            return
        self.visited |= {step.source, step.target}
        if step.outcome in _CAUSES:
            self.failures[step.row, _CAUSES[step.outcome]] += 1
            return
        self.rows[step.row] += 1
        self.order.setdefault(step.row, []).append(number)


def trace_overlays(path: str, request: str | None, until: int | None) -> dict[str, Overlay]:
    """Counts, order, refusals, the last step and median durations of a trace, by machine.

    request: only its steps, with the numbers of the steps at which a row fired. until: only steps up to this number.
    Raises Unusable.
    """
    try:
        seen, steps, requests, changed = _read(path, request, until)
        durations = median_durations(path) if os.path.exists(timings_of(path)) else {}
    except TraceError as error:
        raise Unusable(f"--trace {path}: {error}") from None
    except OSError as error:
        raise Unusable(f"--trace {path}: {error.strerror}; name a trace that can be read") from None
    if request is not None and request not in requests:
        known = f"r1 to r{len(requests)}" if requests else "none"
        raise Unusable(f"--request {request}: the trace has no such request; it has {known}")
    if until is not None and until > steps:
        raise Unusable(f"--step {until}: the trace has {steps} steps; choose one from 1 to {steps}")
    parts = [f"trace {os.path.basename(path)}", request or "", "" if until is None else f"up to step {until}"]
    title = ", ".join(part for part in parts if part)
    if durations:
        title += "; times are medians of the whole trace"
    if changed:
        title += f"; recorded with another table of {', '.join(changed)}, whose rows may mean others here"
    return {
        name: _overlay(seen[name], {row: took for (machine, row), took in durations.items() if machine == name}, title,
                       numbered=request is not None)
        for name in FIRING
    }  # fmt: skip


def _read(
    path: str, request: str | None, until: int | None
) -> tuple[dict[str, _Seen], int, set[str], tuple[str, ...]]:
    seen = {name: _Seen() for name in FIRING}
    requests: set[str] = set()
    steps = 0
    with TraceReader(path) as reader:
        for group in reader.groups():
            for found in group.steps():
                steps, step = found.number, found.step
                if step.machine == "request":
                    requests.add(step.subject)
                if step.machine not in seen:
                    raise TraceError(
                        f"line {found.line}: a step of {step.machine}, which fires no events; the line was edited"
                    )
                wanted = request is None or step.subject == request
                if wanted and (until is None or found.number <= until):
                    seen[step.machine].add(found.number, step)
        changed = changed_machines(reader.header)
    return seen, steps, requests, changed


def _overlay(seen: _Seen, durations: Mapping[int, int], title: str, *, numbered: bool) -> Overlay:
    rows = {
        row: Mark(count=count, text=_row_text(seen.order[row] if numbered else [], durations.get(row)))
        for row, count in seen.rows.items()
    }
    failures = {place: Mark(count=count) for place, count in seen.failures.items()}
    states = {state: Mark() for state in seen.visited}
    states |= {state: Mark(text=f"refused x{count}") for state, count in seen.refused.items()}
    if seen.last is not None:
        last = seen.last
        place = (last.row, _CAUSES.get(last.outcome, ""))
        if place in failures:
            failures[place] = evolve(failures[place], colour=_LAST, last=True)
        elif last.row in rows:
            rows[last.row] = evolve(rows[last.row], colour=_LAST, last=True)
        states[last.target] = evolve(states.get(last.target, Mark()), colour=_LAST, last=True)
        if last.outcome != DONE:
            title += f"; the last step was {last.outcome.replace('_', ' ')}"
    return Overlay(rows=rows, states=states, failures=failures, title=title, fade=True)


def _row_text(order: list[int], nanoseconds: int | None) -> str:
    parts: list[str] = []
    if order:
        shown = " ".join(f"#{number}" for number in order[:_LISTED_MAX])
        parts.append(shown if len(order) <= _LISTED_MAX else f"{shown} ... #{order[-1]}")
    if nanoseconds is not None:
        parts.append(f"med {nanoseconds / 1000:.3g} us")
    return " ".join(parts)
