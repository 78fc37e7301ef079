"""Fires events: picks the row, runs its steps, commits the state, records one step.

Ordinary rows are picked by a ``transitions.Machine`` that is built from the spec: guards are its conditions, the row
is its transition, and our :class:`_RowTransition` runs the steps where ``transitions`` would only change the state. It
has no callbacks, no queue and no automatic transitions, and all subjects share one machine: a subject is any
:class:`Subject`, compared by identity, with nothing bound to it. Pairs with a ``hot`` row are picked by the dictionary
of the same spec; a test holds both ways to the same answer.

``on_failure`` is for device errors only. Anything else that a step raises is a bug: it is not caught, and because a
state with outstanding work is entered before its row's first step, the subject still drains at its end of life.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

from transitions import EventData, Machine
from transitions.core import Transition as _LibraryTransition

from context_cache.backends.base import DeviceError, DrainResult
from context_cache.machines.spec import Choice, Couple, MachineSpec, Row
from context_cache.machines.step import DONE, Firing, Recorder, RecorderSwitch

__all__ = ["Call", "Ending", "EventRefused", "LifecycleError", "Runner", "Subject"]


class LifecycleError(Exception):
    """Base of what a runner raises."""


class EventRefused(LifecycleError):
    """The event is not declared for the state, or every guard said no. Nothing ran, nothing changed.

    refused_by: the guards that kept each candidate row from firing; empty when the state has no row for the event.
    """

    def __init__(
        self, machine: str, subject: str, state: str, event: str, accepted: tuple[str, ...], refused_by: tuple[str, ...]
    ) -> None:
        super().__init__(machine, subject, state, event, accepted, refused_by)
        self.machine, self.subject, self.state, self.event = machine, subject, state, event
        self.accepted, self.refused_by = accepted, refused_by

    def __str__(self) -> str:
        accepted = ", ".join(self.accepted) or "nothing, the state is final"
        reason = f" because of {', '.join(self.refused_by)}" if self.refused_by else ""
        return (
            f"{self.machine} {self.subject}: {self.event!r} is not accepted in {self.state!r}{reason} "
            f"(accepted: {accepted})"
        )


class Subject:
    """Whatever has a life. ``state`` can be read by anyone and is written by the runner alone."""

    __slots__ = ("__weakref__", "_in_row", "_state", "id")

    def __init__(self, subject_id: str, initial: str) -> None:
        self.id = subject_id
        self._state = initial
        self._in_row = False

    @property
    def state(self) -> str:
        """Name of the current state."""
        return self._state


class Call(Protocol):
    """What the runner needs of a call object; guards and steps need more, as their tables say."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Logical slots that the call touches."""

    def couple(self, machine: str, event: str) -> bool:
        """Offer an event to another machine; whether a row took it."""

    def clearing_failed(self, error: DeviceError) -> None:
        """A clearing upload raised; the row goes on."""


class Ending(enum.Enum):
    """How a fired row ended, when it did not raise."""

    DONE = "done"
    DRAIN_FAILED = "drain_failed"


class _ActionFailed(Exception):
    """Internal: unwinds a row after a device action raised. Only actions are expected to; a host step is not."""

    def __init__(self, step: str, error: DeviceError) -> None:
        super().__init__(step, error)
        self.step, self.error = step, error


class _DrainFailed(Exception):
    """Internal: unwinds a row after a failed drain."""

    def __init__(self, step: str, result: DrainResult) -> None:
        super().__init__(step, result)
        self.step, self.result = step, result


class _PublishFailed(Exception):
    """Internal: unwinds a row after publishing raised."""

    def __init__(self, step: str, error: BaseException, drained: bool) -> None:
        super().__init__(step, error)
        self.step, self.error, self.drained = step, error, drained


class _Fire:
    """One event on its way through ``transitions``."""

    __slots__ = ("call", "choice", "ending", "mask", "subject")

    def __init__(self, subject: Subject, call: Call, choice: Choice, mask: int) -> None:
        self.subject, self.call, self.choice, self.mask = subject, call, choice, mask
        self.ending = Ending.DONE


class _RowTransition(_LibraryTransition):  # type: ignore[misc, unused-ignore]
    """A transition of the library that runs our row instead of callbacks."""

    row: Row
    runner: Runner

    def execute(self, event_data: EventData) -> bool:
        if not self._eval_conditions(event_data):
            return False
        fire: _Fire = next(iter(event_data.args))
        fire.ending = self.runner._run(fire.subject, self.row, fire.call, fire.choice, fire.mask)
        return True


class _RowMachine(Machine):  # type: ignore[misc, unused-ignore]
    transition_cls = _RowTransition


def _bit(bit: int) -> Any:
    def looked_up(event_data: EventData) -> bool:
        return bool(next(iter(event_data.args)).mask & bit)

    return looked_up


class Runner:
    """Drives all subjects of one spec.

    ``fire`` returns how the row ended. It raises :class:`EventRefused` when no row takes the event, the
    ``DeviceError`` of a row that failed (its failure state is committed), whatever publishing raised (likewise), and
    an interrupt that came during a drain (likewise).
    """

    def __init__(self, spec: MachineSpec, recorder: Recorder | RecorderSwitch | None = None) -> None:
        self.spec = spec
        self._switch = recorder if isinstance(recorder, RecorderSwitch) else RecorderSwitch(recorder)
        self._choices = spec.choices
        self._firings: dict[tuple[int, int, str, str, str | None], Firing] = {}
        self._machine = self._build(spec)

    @property
    def recorder(self) -> Recorder | None:
        """Where steps go; None: nowhere, or switched off."""
        return self._switch.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._switch.recorder = recorder

    def fire(self, subject: Subject, event: str, call: Call) -> Ending:
        """Fire ``event`` for ``subject``."""
        choice = self._choices.get((subject._state, event))
        if choice is None:
            raise self.refuse(subject, event)
        mask = choice.mask(call)
        if choice.hot:
            row = choice.rows[mask]
            if row is None:
                raise self.refuse(subject, event, choice, mask)
            return self._run(subject, row, call, choice, mask)
        return self.fire_by_library(subject, event, call, choice, mask)

    def fire_by_library(self, subject: Subject, event: str, call: Call, choice: Choice, mask: int) -> Ending:
        """The same, the row picked by ``transitions`` (public for the test that compares both ways)."""
        fire = _Fire(subject, call, choice, mask)
        if not self._machine.events[event].trigger(subject, fire):
            raise self.refuse(subject, event, choice, mask)
        return fire.ending

    def offer(self, subject: Subject, event: str, call: Call) -> bool:
        """Fire if a row takes the event, otherwise leave everything as it is; whether one did."""
        choice = self._choices.get((subject._state, event))
        if choice is None:
            return False
        mask = choice.mask(call)
        row = choice.rows[mask]
        if row is None:
            self._switch.declined(subject.id, self.spec.name, event, subject._state, choice.outcomes[mask])
            return False
        if row.light:
            self._run_light(subject, row, call, choice, mask)
        else:
            self._run(subject, row, call, choice, mask)
        return True

    def declares(self, state: str, event: str) -> bool:
        """Whether the table has a row for (state, event), whatever its guards."""
        return (state, event) in self._choices

    def pick(self, state: str, event: str, call: Call) -> Row | None:
        """The row that ``fire`` would run; asks the guards and changes nothing."""
        choice = self._choices.get((state, event))
        return None if choice is None else choice.rows[choice.mask(call)]

    def refuse(self, subject: Subject, event: str, choice: Choice | None = None, mask: int = 0) -> EventRefused:
        """Record the refusal and build its error; it names the guards that each candidate row wanted otherwise."""
        refused_by: dict[str, None] = {}
        outcome: tuple[tuple[str, bool], ...] = ()
        if choice is not None:
            outcome = choice.outcomes[mask]
            held = dict(outcome)
            for row in choice.candidates:
                for guard in row.transition.guards:
                    if held[guard.name] != guard.wanted:
                        refused_by.setdefault(str(guard))
        state = subject._state
        if self._switch.active:
            firing = Firing(self.spec.name, -1, event, state, state, outcome, "refused", None)
            self._switch.note((subject.id, firing, (), (), None))
        return EventRefused(self.spec.name, subject.id, state, event, self.spec.accepted(state), tuple(refused_by))

    def _build(self, spec: MachineSpec) -> Machine:
        machine = _RowMachine(
            model=None,
            states=[state.name for state in spec.states],
            initial=spec.initial,
            auto_transitions=False,
            send_event=True,
            model_attribute="_state",
            queued=False,
        )
        bits = {
            pair: {name: 1 << bit for bit, name in enumerate(choice.names)} for pair, choice in spec.choices.items()
        }
        for row in spec.rows:
            item = row.transition
            known = bits[item.source, item.event]
            machine.add_transition(
                item.event,
                item.source,
                item.target,
                conditions=[_bit(known[guard.name]) for guard in item.guards if guard.wanted],
                unless=[_bit(known[guard.name]) for guard in item.guards if not guard.wanted],
            )
            added = machine.events[item.event].transitions[item.source][-1]
            assert isinstance(added, _RowTransition)
            added.row, added.runner = row, self
        return machine

    def _run_light(self, subject: Subject, row: Row, call: Call, choice: Choice, mask: int) -> None:
        """A row of host steps that cannot fail: nothing to unwind."""
        if subject._in_row:
            raise self._reentered(subject, row)
        subject._in_row = True
        try:
            ran: list[str] = []
            for code, run, name in row.plan:
                if code:  # Row.COMMIT, the only other code in a light row
                    self._commit(subject, name, choice)
                elif run(call) is not False:
                    ran.append(name)
            if self._switch.active:
                self._switch.note((subject.id, choice.firings[mask], ran, call.slots, None))
        except BaseException:
            self._note(subject, row, call, choice, mask, (), "raised", None, None)
            raise
        finally:
            subject._in_row = False

    def _reentered(self, subject: Subject, row: Row) -> LifecycleError:
        return LifecycleError(
            f"{self.spec.name} {subject.id}: {row.transition.event!r} was fired from inside one of its own rows; "
            "fire it after the row has ended"
        )

    def _run(self, subject: Subject, row: Row, call: Call, choice: Choice, mask: int) -> Ending:
        """Run the steps of ``row`` and commit the state it ends in."""
        if subject._in_row:
            raise self._reentered(subject, row)
        item = row.transition
        subject._in_row = True
        ran: list[str] = []
        raised: BaseException | None = None
        ending = Ending.DONE
        try:
            try:
                drained = self._walk(row.plan, subject, call, choice, ran)
                if not self._switch.active:
                    return ending
                if not drained:
                    self._switch.note((subject.id, choice.firings[mask], ran, call.slots, None))
                    return ending
                outcome, failed = DONE, None
                ended: str | None = "drained"
            except _ActionFailed as failure:
                raised, failed = failure.error, failure.step
                interrupt, drained = self._after_error(subject, row, call, choice, ran)
                raised = interrupt or raised
                outcome, ended = "failed", "drained" if drained else None
            except _DrainFailed as failure:
                assert item.on_drain_failure is not None
                raised, failed = failure.result.interrupt, failure.step
                ending = Ending.DRAIN_FAILED
                self._enter(subject, row, item.on_drain_failure, call, choice, ran)
                outcome, ended = "drain_failed", None
            except _PublishFailed as failure:
                assert item.on_publish_failure is not None
                raised, failed = failure.error, failure.step
                self._walk(row.publish_failure_plan, subject, call, choice, ran)
                self._enter(subject, row, item.on_publish_failure, call, choice, ran)
                outcome, ended = "publish_failed", "drained" if failure.drained else item.work_ended
            except BaseException as error:
                # A bug or an interrupt. It is passed on as it is; but device work may be half enqueued, so a row that
                # has a failure state takes it, and no later call can believe that the row had ended well.
                raised, failed, ended, outcome = error, None, None, "raised"
                if item.on_failure is not None:
                    _, drained = self._after_error(subject, row, call, choice, ran)
                    ended = "drained" if drained else None
            self._note(subject, row, call, choice, mask, ran, outcome, failed, ended)
        except BaseException:
            # Interrupted while the failure was dealt with; the trace says where that left the subject.
            self._note(subject, row, call, choice, mask, ran, "raised", None, None)
            raise
        finally:
            subject._in_row = False
        # Outside the except blocks, so that the error keeps its own cause and context.
        if raised is not None:
            raise raised
        return ending

    def _walk(
        self, plan: tuple[tuple[int, Any, str], ...], subject: Subject, call: Call, choice: Choice, ran: list[str]
    ) -> bool:
        """Run steps in order, noting in ``ran`` those that did something; whether a drain succeeded."""
        drained = False
        for code, run, name in plan:
            if code == 0:  # Row.HOST
                if run(call) is not False:
                    ran.append(name)
            elif code == 1:  # Row.ACTION
                try:
                    acted = run(call)
                except DeviceError as error:
                    raise _ActionFailed(name, error) from None
                if acted:
                    ran.append(name)
            elif code == 2:  # Row.COUPLE
                couple: Couple = run
                if call.couple(couple.machine, couple.event):
                    ran.append(name)
            elif code == 6:  # Row.COMMIT
                if choice.hot:
                    subject._state = name
                else:
                    self._machine.set_state(name, subject)
            elif code == 3:  # Row.DRAIN
                result: DrainResult = run(call)
                if not result.ok:
                    raise _DrainFailed(name, result)
                drained = True
                ran.append(name)
            elif code == 4:  # Row.PUBLISH
                try:
                    run(call)
                except BaseException as error:
                    raise _PublishFailed(name, error, drained) from None
                ran.append(name)
            else:  # Row.CLEARING
                try:
                    if run(call):
                        ran.append(name)
                except DeviceError as error:
                    call.clearing_failed(error)
        return drained

    def _commit(self, subject: Subject, state: str, choice: Choice) -> None:
        if choice.hot:
            subject._state = state
        else:
            self._machine.set_state(state, subject)

    def _after_error(
        self, subject: Subject, row: Row, call: Call, choice: Choice, ran: list[str]
    ) -> tuple[BaseException | None, bool]:
        """Do what is left to do, enter the failure state: an interrupt that came meanwhile, and whether it drained."""
        end = row.transition.on_failure
        assert end is not None
        interrupt: BaseException | None = None
        drained = False
        if row.failure_plan:
            try:
                drained = self._walk(row.failure_plan, subject, call, choice, ran)
            except _DrainFailed as failure:
                end = row.transition.on_drain_failure
                assert end is not None
                interrupt = failure.result.interrupt
        self._enter(subject, row, end, call, choice, ran)
        return interrupt, drained

    def _enter(self, subject: Subject, row: Row, end: str, call: Call, choice: Choice, ran: list[str]) -> None:
        self._commit(subject, end, choice)
        self._walk(row.entry_plans[end], subject, call, choice, ran)

    def _note(
        self,
        subject: Subject,
        row: Row,
        call: Call,
        choice: Choice,
        mask: int,
        ran: Sequence[str],
        outcome: str,
        failed: str | None,
        work_ended: str | None,
    ) -> None:
        if not self._switch.active:
            return
        firing = self._firing(row, choice, mask, outcome, work_ended, subject)
        self._switch.note((subject.id, firing, ran, call.slots, failed))

    def _firing(
        self, row: Row, choice: Choice, mask: int, outcome: str, work_ended: str | None, subject: Subject
    ) -> Firing:
        """The shared part of a step, one for each way in which a row can end. ``subject`` has ended already."""
        target = subject._state
        key = (row.number, mask, outcome, target, work_ended)
        firing = self._firings.get(key)
        if firing is None:
            item = row.transition
            firing = self._firings[key] = Firing(
                self.spec.name, row.number, item.event, item.source, target, choice.outcomes[mask], outcome, work_ended
            )
        return firing
