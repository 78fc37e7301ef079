"""What happened, as data. One :class:`Step` for each row fired, refused or failed; no clocks, no ids of objects.

A step is small because most of it is known before the row runs: everything but the subject, the steps that ran and
the slots touched belongs to the :class:`Firing`, of which there is one for each (row, guard outcome, outcome).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

from attrs import field, frozen

__all__ = [
    "DONE",
    "Difference",
    "Firing",
    "ListRecorder",
    "PartsRecorder",
    "Recorder",
    "RecorderSwitch",
    "Step",
    "StepParts",
    "Witness",
    "compare_steps",
    "witnessed_by",
]

DONE = "done"

_log = logging.getLogger("context_cache.machines")


@frozen
class Firing:
    """The part of a step that its row, the guards' outcome and the ending decide.

    row:        number of the row in its table, -1 for a refused event.
    guards:     (name, outcome) of every guard looked at.
    outcome:    ``done``, ``refused``, ``failed`` (a device error), ``drain_failed`` or ``publish_failed``.
    work_ended: how outstanding device work was resolved: ``drained``, ``by_runtime_sync`` or None.
    """

    machine: str
    row: int
    event: str
    source: str
    target: str
    guards: tuple[tuple[str, bool], ...]
    outcome: str
    work_ended: str | None


@frozen
class Step:
    """One recorded step of one subject.

    ran:    names of the steps that ran, in order; couplings that were taken as ``machine.event``.
    slots:  logical slots touched.
    failed: name of the step that failed, or None.
    """

    subject: str
    firing: Firing
    ran: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    failed: str | None = None

    @property
    def machine(self) -> str:
        return self.firing.machine

    @property
    def row(self) -> int:
        return self.firing.row

    @property
    def event(self) -> str:
        return self.firing.event

    @property
    def source(self) -> str:
        return self.firing.source

    @property
    def target(self) -> str:
        return self.firing.target

    @property
    def guards(self) -> tuple[tuple[str, bool], ...]:
        return self.firing.guards

    @property
    def outcome(self) -> str:
        return self.firing.outcome

    @property
    def work_ended(self) -> str | None:
        return self.firing.work_ended

    def __str__(self) -> str:
        guards = ", ".join(name if outcome else f"not {name}" for name, outcome in self.guards)
        text = f"{self.machine} {self.subject}: {self.source} --{self.event}"
        text += f" [{guards}]" if guards else ""
        text += f"--> {self.target}"
        text += f" / {' / '.join(self.ran)}" if self.ran else ""
        return text if self.outcome == DONE else f"{text} ({self.outcome}{f' at {self.failed}' if self.failed else ''})"


class Recorder(Protocol):
    """Where steps go. A recorder that raises is switched off and logged; it never stops a request."""

    def record(self, step: Step) -> None:
        """Take one step."""


StepParts: TypeAlias = "tuple[str, Firing, Sequence[str], tuple[int, ...], str | None]"
"""Subject, firing, ran, slots, failed: what a step is made of. Nobody changes any of it afterwards."""


@runtime_checkable
class PartsRecorder(Protocol):
    """A recorder that takes the parts of a step, which costs less than a step; recording is on the way of a decode."""

    @property
    def take(self) -> Callable[[StepParts], None]:
        """Takes the parts of one step; must not raise."""


class Witness(Protocol):
    """Sees the steps of every runner of this process, beside their recorders: a tool of tests."""

    def saw(self, switch: RecorderSwitch, step: Step) -> None:
        """Take one step; ``switch`` tells one coordinator from another. Must not raise.

        An offered event that no row took is shown too, with the outcome ``declined``; recorders are not told of it.
        """


_witnesses: list[Witness] = []


@contextmanager
def witnessed_by(witness: Witness) -> Iterator[None]:
    """Let ``witness`` see the steps of every switch that is made from here on, until the block ends."""
    _witnesses.append(witness)
    try:
        yield
    finally:
        # By identity: what compares equal may be another one.
        _witnesses[:] = [one for one in _witnesses if one is not witness]


class RecorderSwitch:
    """One recorder for several runners. If it raises it is switched off for all of them: a trace has no holes.

    active: whether anybody listens; what would be recorded need not be put together otherwise.
    note:   hands the parts of a step on. A recorder that raises costs the trace, never a request.
    """

    __slots__ = ("__weakref__", "_recorder", "_witnesses", "active", "note")

    note: Callable[[StepParts], None]

    def __init__(self, recorder: Recorder | None) -> None:
        self._witnesses = tuple(_witnesses)
        self.recorder = recorder

    @property
    def recorder(self) -> Recorder | None:
        """Where steps go; None: nowhere, or switched off."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.active = recorder is not None or bool(self._witnesses)
        quick = isinstance(recorder, PartsRecorder) and not self._witnesses
        self.note = recorder.take if quick and isinstance(recorder, PartsRecorder) else self._note

    def declined(
        self, subject: str, machine: str, event: str, state: str, guards: tuple[tuple[str, bool], ...]
    ) -> None:
        """An offered event was not taken. Nothing happened, so only witnesses hear of it."""
        for witness in self._witnesses:
            witness.saw(self, Step(subject, Firing(machine, -1, event, state, state, guards, "declined", None)))

    def _note(self, parts: StepParts) -> None:
        subject, firing, ran, slots, failed = parts
        step = Step(subject, firing, tuple(ran), slots, failed)
        for witness in self._witnesses:
            witness.saw(self, step)
        recorder = self._recorder
        try:
            if isinstance(recorder, PartsRecorder):
                recorder.take(parts)
            elif recorder is not None:
                recorder.record(step)
        except Exception:
            self.recorder = None
            _log.exception("%s %s: the recorder raised and is switched off", firing.machine, subject)


@frozen
class ListRecorder:
    """Keeps every step in a list."""

    steps: list[Step] = field(factory=list)

    def record(self, step: Step) -> None:
        self.steps.append(step)


@frozen
class Difference:
    """The first place where two step lists part. A side that has ended is None."""

    index: int
    expected: Step | None
    actual: Step | None

    def __str__(self) -> str:
        return f"step {self.index}: expected {self.expected or 'no further step'}, got {self.actual or 'nothing'}"


def compare_steps(expected: Sequence[Step], actual: Iterable[Step]) -> Difference | None:
    """The first difference, or None when both lists are equal."""
    index = 0
    for step in actual:
        wanted = expected[index] if index < len(expected) else None
        if wanted != step:
            return Difference(index, wanted, step)
        index += 1
    return Difference(index, expected[index], None) if index < len(expected) else None
