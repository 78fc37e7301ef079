"""Which rows, guard outcomes and failure paths of the lifecycles were taken.

Needed are, of every machine that fires events of its own: each row; each guard of each (state, event) both ways; and
of each row each failure that it has a state for. The tables that only follow another one (sequence, capture) have no
events and are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from attrs import define, field, frozen

from context_cache.machines import ALL_MACHINES, Firing, MachineSpec, RecorderSwitch, Step, Transition
from context_cache.machines.step import DONE

__all__ = ["COUNTED", "FORMAT", "Coverage", "CoverageError", "Need", "needs"]

FORMAT: Final = "context-cache-coverage"
_WRITE_ONE: Final = "write one with: pytest --lifecycle-coverage-file=FILE"
COUNTED: Final = tuple(spec for spec in ALL_MACHINES if spec.follows is None)

_BY_DRAIN: Final = {
    (spec.name, number, row.on_drain_failure)
    for spec in COUNTED
    for number, row in enumerate(spec.transitions)
    if row.on_drain_failure not in (None, row.on_failure, row.on_publish_failure)
}
"""Ends of rows that only a failed drain leads to."""

Fact: TypeAlias = tuple[str, ...]
"""(machine, kind, ...) of something that was seen or is needed."""


class CoverageError(Exception):
    """A file that is no coverage. One sentence."""


@frozen(order=True)
class Need:
    """Something that has to be seen: the fact, and how a person calls it."""

    fact: Fact
    words: str = field(order=False)


def needs() -> tuple[Need, ...]:
    """Everything that has to be seen, in table order."""
    found: list[Need] = []
    for spec in COUNTED:
        for number, row in enumerate(spec.transitions):
            found.append(Need((spec.name, "row", str(number)), f"{spec.name} row {number}: {row}"))
            for outcome, state in _failures(row):
                found.append(
                    Need(
                        (spec.name, "failure", str(number), outcome),
                        f"{spec.name} row {number} {outcome.replace('_', ' ')}: {row.source} --{row.event}--> {state}",
                    )
                )
        found += _guard_needs(spec)
    return tuple(found)


def _failures(row: Transition) -> list[tuple[str, str]]:
    kinds = (
        ("failed", row.on_failure), ("drain_failed", row.on_drain_failure), ("publish_failed", row.on_publish_failure),
    )  # fmt: skip
    return [(outcome, state) for outcome, state in kinds if state is not None]


def _guard_needs(spec: MachineSpec) -> list[Need]:
    return [
        Need(
            (spec.name, "guard", state, event, name, str(outcome)),
            f"{spec.name} guard {name} {'held' if outcome else 'not held'}: {event} in {state}",
        )
        for (state, event), choice in spec.choices.items()
        for name in choice.names
        for outcome in (True, False)
    ]


@define(eq=False)
class Coverage:
    """What was seen so far. A ``machines.Witness``; equal to itself alone, as witnesses are."""

    seen: set[Fact] = field(factory=set)
    # Most steps were seen before; one look-up is enough for them. Those of rows that went well share few firings, which
    # are kept so that no other one has their id. An event that was refused has a new one each time.
    _known: dict[int, Firing] = field(factory=dict, repr=False)
    _unusual: set[Firing] = field(factory=set, repr=False)

    def saw(self, switch: RecorderSwitch, step: Step) -> None:
        firing = step.firing
        if firing.outcome == DONE:
            if id(firing) in self._known:
                return
            self._known[id(firing)] = firing
        elif firing in self._unusual:
            return
        else:
            self._unusual.add(firing)
        self.add(step.machine, step.row, step.event, (step.source, step.target), step.guards, step.outcome)

    def add(
        self,
        machine: str,
        row: int,
        event: str,
        ends: tuple[str, str],
        guards: Iterable[tuple[str, bool]],
        outcome: str,
    ) -> None:
        """Note one step by its parts. ends: where it came from and where it went."""
        source, target = ends
        if row >= 0:
            self.seen.add((machine, "row", str(row)))
        if outcome in ("failed", "drain_failed", "publish_failed"):
            self.seen.add((machine, "failure", str(row), outcome))
            if (machine, row, target) in _BY_DRAIN:
                # An action failed, and then the drain of the way out did.
                self.seen.add((machine, "failure", str(row), "drain_failed"))
        for name, held in guards:
            self.seen.add((machine, "guard", source, event, name, str(held)))

    def merge(self, other: Coverage) -> None:
        """Add what another one has seen."""
        self.seen |= other.seen

    def missing(self) -> tuple[Need, ...]:
        """What is needed and was not seen, in table order."""
        return tuple(need for need in needs() if need.fact not in self.seen)

    def percent(self) -> float:
        """How much of what is needed was seen."""
        wanted = needs()
        return 100 * (len(wanted) - len(self.missing())) / len(wanted)

    def to_json(self) -> str:
        """One line, the same for the same facts."""
        return json.dumps({"format": FORMAT, "version": 1, "seen": sorted(self.seen)})

    @classmethod
    def from_json(cls, text: str) -> Coverage:
        """Raises CoverageError for anything that :meth:`to_json` did not write."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CoverageError(f"it is no JSON ({error}); {_WRITE_ONE}") from None
        facts = data.get("seen") if isinstance(data, dict) and data.get("format") == FORMAT else None
        if not isinstance(facts, list) or data.get("version") != 1:
            raise CoverageError(f"it is no {FORMAT} of version 1; {_WRITE_ONE}")
        for fact in facts:
            if not isinstance(fact, list) or not all(isinstance(part, str) for part in fact):
                raise CoverageError("it holds something that is no fact; write it again")
        return cls({tuple(fact) for fact in facts})
