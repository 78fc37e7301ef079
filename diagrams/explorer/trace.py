"""What the page knows of a trace: columns of small numbers, and every text once.

A trace of 50,000 steps is 50,000 times one of a few hundred things that can happen, to one of a few hundred subjects.
So the page is given each thing once and per step four numbers, which keeps the file small and is quick to parse.

The protocols below say what a step and a call must have; the records of the trace format have it as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

__all__ = ["ExplorerTrace", "ShownAct", "ShownCall", "ShownStep"]

_ABSENT = -1


class ShownAct(Protocol):
    """One thing asked of the device."""

    @property
    def verb(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def failed(self) -> str | None: ...
    @property
    def nth(self) -> int | None: ...


class ShownStep(Protocol):
    """One row that fired, was refused or failed. ``row`` is -1 where no row fired, ``slots`` are ranges as text."""

    @property
    def machine(self) -> str: ...
    @property
    def subject(self) -> str: ...
    @property
    def row(self) -> int: ...
    @property
    def event(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def guards(self) -> Mapping[str, bool]: ...
    @property
    def ran(self) -> Sequence[str]: ...
    @property
    def acts(self) -> Sequence[ShownAct]: ...
    @property
    def slots(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def failed(self) -> str | None: ...
    @property
    def ended(self) -> str | None: ...


class ShownCall(Protocol):
    """One public call and the steps that it caused.

    request:   id of the request that it was made on, if any.
    arguments: in words. result: the status or the error, in words.
    began, took: nanoseconds, ``began`` of any clock; None: not known.
    act_times: for each of the steps (by its place in ``steps``) that has them, the nanoseconds of its acts.
    """

    @property
    def name(self) -> str: ...
    @property
    def request(self) -> str | None: ...
    @property
    def arguments(self) -> str: ...
    @property
    def result(self) -> str: ...
    @property
    def steps(self) -> Sequence[ShownStep]: ...
    @property
    def began(self) -> int | None: ...
    @property
    def took(self) -> int | None: ...
    @property
    def act_times(self) -> Mapping[int, Sequence[int]]: ...


@define
class _Numbers:
    """Every different value once, by number."""

    values: list[Any] = field(factory=list)
    _known: dict[Hashable, int] = field(factory=dict)

    def of(self, key: Hashable, value: Any) -> int:
        number = self._known.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


@define
class ExplorerTrace:
    """A trace on its way into a page; calls are added in their order, and nothing of them is kept but numbers.

    name: what the page calls it. facts: (label, value) pairs for its head. notes: sentences that a reader has to know,
    may be added to until the page is written.
    """

    name: str
    facts: Sequence[tuple[str, str]] = ()
    notes: list[str] = field(factory=list)
    steps: int = field(init=False, default=0)
    _words: _Numbers = field(init=False, factory=_Numbers)
    _kinds: _Numbers = field(init=False, factory=_Numbers)
    _acts: _Numbers = field(init=False, factory=_Numbers)
    _of_calls: dict[str, list[int | float]] = field(init=False)
    _of_steps: dict[str, list[int]] = field(init=False)
    _act_times: dict[int, list[float]] = field(init=False, factory=dict)
    _zero: int | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        names = ("name", "request", "arguments", "result", "steps", "began", "took")
        self._of_calls = {name: [] for name in names}
        self._of_steps = {name: [] for name in ("kind", "subject", "acts", "slots")}

    def add(self, call: ShownCall) -> None:
        """The next call of the trace, with its steps."""
        columns = self._of_calls
        columns["name"].append(self._word(call.name))
        columns["request"].append(_ABSENT if call.request is None else self._word(call.request))
        columns["arguments"].append(self._word(call.arguments))
        columns["result"].append(self._word(call.result))
        columns["steps"].append(len(call.steps))
        if self._zero is None:
            self._zero = call.began
        began = None if call.began is None or self._zero is None else call.began - self._zero
        columns["began"].append(_microseconds(began))
        columns["took"].append(_microseconds(call.took))
        for place, times in call.act_times.items():
            self._act_times[self.steps + place] = [_microseconds(time) for time in times]
        for step in call.steps:
            self._add(step)

    def columns(self) -> dict[str, Any]:
        """As JSON values; ``assets/data.js`` reads them."""
        return {
            "name": self.name,
            "facts": [list(fact) for fact in self.facts],
            "notes": self.notes,
            "words": self._words.values,
            "kinds": self._kinds.values,
            "acts": self._acts.values,
            "calls": self._of_calls,
            "steps": self._of_steps,
            "actTimes": self._act_times,
        }

    def _add(self, step: ShownStep) -> None:
        guards, ran = tuple(step.guards.items()), tuple(step.ran)
        kind = (
            step.machine, step.row, step.event, step.source, step.target, guards, step.outcome, step.failed, step.ended,
            ran,
        )  # fmt: skip
        acts = tuple((act.verb, act.digest, act.slot, act.failed, act.nth) for act in step.acts)
        columns = self._of_steps
        columns["kind"].append(self._kinds.of(kind, kind))
        columns["subject"].append(self._word(step.subject))
        columns["acts"].append(self._acts.of(acts, acts))
        columns["slots"].append(self._word(step.slots))
        self.steps += 1

    def _word(self, text: str) -> int:
        return self._words.of(text, text)


def _microseconds(nanoseconds: int | None) -> float:
    """With a tenth; -1 where there is none, as everywhere in the columns."""
    return _ABSENT if nanoseconds is None else round(nanoseconds / 1000, 1)
