"""What a state machine *is* here: frozen values that refuse nonsense when they are built.

A machine is a table. One row (:class:`Transition`) has an event, a source, a target, guards, one ordered tuple of
steps, and the states that its failures lead to. Nothing in this module runs anything; ``runner`` does.

Rule 1: every change of state is a row. There is no "go to" that is not written down.
Rule 2: guards only look. What a row does, it does in its steps, in the order of the tuple.
Rule 3: a row names the end of every failure that its steps can have, and no other.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, TypeAlias

from attrs import field, frozen

from context_cache.backends.base import DrainResult
from context_cache.machines.step import DONE, Firing

__all__ = [
    "Choice",
    "Couple",
    "DeviceAction",
    "Drain",
    "Guard",
    "HostStep",
    "MachineSpec",
    "Not",
    "Row",
    "SpecError",
    "State",
    "Step",
    "Transition",
    "each",
]


class SpecError(ValueError):
    """A machine's table contradicts itself. Raised while the table is built, that is at import."""


@frozen
class Guard:
    """A fact about a planned call that holds or not. It only looks.

    ``holds`` gets the call object that was planned for the event and returns a bool; it must not change anything
    and must have an answer for every call of the events it guards.
    """

    name: str
    holds: Callable[[Any], bool] = field(repr=False)

    @property
    def guard(self) -> Guard:
        return self

    @property
    def wanted(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.name


@frozen
class Not:
    """The opposite of a guard."""

    guard: Guard

    @property
    def name(self) -> str:
        return self.guard.name

    @property
    def wanted(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"not {self.guard.name}"


@frozen
class HostStep:
    """Work on the host. It was planned before, so it cannot fail; a ``publishes`` step may, and the row says where to.

    ``run`` gets the call object. A step that had nothing to do returns False and is not recorded.
    """

    name: str
    run: Callable[[Any], bool | None] = field(repr=False)
    publishes: bool = False
    waits: ClassVar[bool] = False


@frozen
class DeviceAction:
    """Work for the device: enqueued, never waited for.

    ``run`` gets the call object and returns whether anything was enqueued (an upload without dirty rows is no
    action). ``clears`` marks the upload of cleared rows at an end of life: the device is already known to be quiet
    then, so its failure does not keep the pages; it poisons the coordinator and the row goes on.
    """

    name: str
    run: Callable[[Any], bool] = field(repr=False)
    clears: bool = False


@frozen
class Drain:
    """Wait until everything enqueued has ended. The only step that waits for the device."""

    name: str
    run: Callable[[Any], DrainResult] = field(repr=False)


@frozen
class Couple:
    """Offer an event to another machine. It is taken when that machine has a row for it, and skipped otherwise."""

    machine: str
    event: str

    @property
    def name(self) -> str:
        return f"{self.machine}.{self.event}"


Step: TypeAlias = HostStep | DeviceAction | Drain | Couple


@frozen
class State:
    """One state. ``holds`` is what a subject owns in it, in words for the drawing.

    phase:        the group a reader meets in the picture.
    region:       the part of its phase, where a phase has parts; words for the drawing.
    outstanding:  device work may be pending. Such a state is entered *before* the first step of a row that leads to
                  it, so that whatever interrupts the row, the end of life drains. All others are entered after the
                  last step.
    final:        no row leaves it.
    on_enter:     couplings and host steps run whenever the state is entered, by success or by failure.
    """

    name: str
    meaning: str
    phase: str = ""
    region: str = ""
    holds: str = ""
    outstanding: bool = False
    final: bool = False
    on_enter: tuple[Couple | HostStep, ...] = ()


@frozen(kw_only=True)
class Transition:
    """One row of a table. See ``docs/architecture.md``, section 3, for the fields."""

    event: str
    source: str
    target: str
    guards: tuple[Guard | Not, ...] = ()
    steps: tuple[Step, ...] = ()
    on_failure: str | None = None
    on_drain_failure: str | None = None
    on_publish_failure: str | None = None
    failure_steps: tuple[Step, ...] = ()
    publish_failure_steps: tuple[HostStep, ...] = ()
    work_ended: str | None = None
    hot: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """Every state this row can lead to, the target first."""
        failures = (self.on_failure, self.on_drain_failure, self.on_publish_failure)
        return (self.target, *(state for state in failures if state is not None))

    def __str__(self) -> str:
        guards = f" [{', '.join(str(guard) for guard in self.guards)}]" if self.guards else ""
        return f"{self.source} --{self.event}{guards}--> {self.target}"


def each(sources: Iterable[str], *, target: str | None = None, **fields: Any) -> tuple[Transition, ...]:
    """The same row from several sources. ``target=None`` means that the state stays as it is."""
    return tuple(Transition(source=source, target=target or source, **fields) for source in sources)


_Plan: TypeAlias = tuple[tuple[int, Any, str], ...]


class Row:
    """A row as the runner wants it: its number, and its steps with a code instead of a type test.

    plan:  (code, callable or couple, name) of everything that happens when the row ends well: its steps, the commit of
           its target, and what entering the target brings. A target with outstanding work is committed first.
    light: only host steps that cannot fail.
    """

    HOST: Final = 0
    ACTION: Final = 1
    COUPLE: Final = 2
    DRAIN: Final = 3
    PUBLISH: Final = 4
    CLEARING: Final = 5
    COMMIT: Final = 6

    __slots__ = ("entry_plans", "failure_plan", "light", "number", "plan", "publish_failure_plan", "transition")

    def __init__(self, number: int, transition: Transition, states: dict[str, State]) -> None:
        self.number = number
        self.transition = transition
        self.failure_plan = _plan(transition.failure_steps)
        self.publish_failure_plan = _plan(transition.publish_failure_steps)
        self.entry_plans = {end: _plan(states[end].on_enter) for end in transition.ends}
        target = states[transition.target]
        steps, entry = _plan(transition.steps), self.entry_plans[transition.target]
        commit: _Plan = ((Row.COMMIT, None, transition.target),)
        self.plan = (*commit, *steps, *entry) if target.outstanding else (*steps, *commit, *entry)
        self.light = not target.outstanding and not entry and all(code == Row.HOST for code, _, _ in steps)


def _plan(steps: Iterable[Step]) -> _Plan:
    plan: list[tuple[int, Any, str]] = []
    for step in steps:
        match step:
            case HostStep():
                plan.append((Row.PUBLISH if step.publishes else Row.HOST, step.run, step.name))
            case DeviceAction():
                plan.append((Row.CLEARING if step.clears else Row.ACTION, step.run, step.name))
            case Drain():
                plan.append((Row.DRAIN, step.run, step.name))
            case Couple():
                plan.append((Row.COUPLE, step, step.name))
    return tuple(plan)


class Choice:
    """All rows of one (state, event), picked by a bit mask of the guards' outcomes.

    ``guards`` fixes the order of the bits; ``rows[mask]`` is the row, or None where no row wants that outcome;
    ``firings[mask]`` is what is recorded of it when it ends well and did not drain.
    """

    __slots__ = ("candidates", "firings", "guards", "hot", "names", "outcomes", "rows", "tests")

    def __init__(self, machine: str, candidates: tuple[Row, ...]) -> None:
        self.candidates = candidates
        guards: dict[str, Guard] = {}
        for row in candidates:
            for guard in row.transition.guards:
                guards.setdefault(guard.name, guard.guard)
        self.guards = tuple(guards.values())
        self.names = tuple(guards)
        self.tests = tuple((1 << bit, guard.holds) for bit, guard in enumerate(self.guards))
        self.rows = tuple(self._row_for(mask) for mask in range(1 << len(self.guards)))
        self.outcomes = tuple(
            tuple((name, bool(mask >> bit & 1)) for bit, name in enumerate(self.names))
            for mask in range(1 << len(self.guards))
        )
        self.firings = tuple(
            _firing(machine, self.rows[mask] or candidates[0], self.outcomes[mask]) for mask in range(len(self.rows))
        )
        self.hot = any(row.transition.hot for row in candidates)

    def mask(self, call: object) -> int:
        """Evaluate each guard once."""
        mask = 0
        for bit, holds in self.tests:
            if holds(call):
                mask |= bit
        return mask

    def _row_for(self, mask: int) -> Row | None:
        outcome = {name: bool(mask >> bit & 1) for bit, name in enumerate(self.names)}
        for row in self.candidates:
            if all(outcome[guard.name] == guard.wanted for guard in row.transition.guards):
                return row
        return None


def _firing(machine: str, row: Row, guards: tuple[tuple[str, bool], ...]) -> Firing:
    item = row.transition
    return Firing(machine, row.number, item.event, item.source, item.target, guards, DONE, item.work_ended)


def _exclusive(one: Transition, other: Transition) -> bool:
    wanted = {guard.name: guard.wanted for guard in one.guards}
    return any(wanted.get(guard.name, guard.wanted) != guard.wanted for guard in other.guards)


@frozen
class MachineSpec:
    """A machine: name, initial state, states, rows. Refuses a table that contradicts itself.

    ``follows`` names the machine whose steps this one mirrors (the sequence table follows the request table): its
    rows have no steps of their own, so they may name failure states without them.

    Raises :class:`SpecError` for: two states of one name; rows that name unknown states; an unknown initial state;
    an unreachable state; a row out of a final state; a state that no row leaves and that is not final; two rows of
    one (state, event) whose guards do not exclude each other; a guard or step name with two meanings; a failure
    state without a step that can fail, or the reverse.
    """

    name: str
    initial: str
    states: tuple[State, ...]
    transitions: tuple[Transition, ...]
    follows: str | None = None
    by_state: dict[str, State] = field(init=False, repr=False, eq=False)
    rows: tuple[Row, ...] = field(init=False, repr=False, eq=False)
    choices: dict[tuple[str, str], Choice] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        self._check_states()
        for transition in self.transitions:
            self._check_row(transition)
        self._check_names()
        self._check_paths()
        by_state = {state.name: state for state in self.states}
        object.__setattr__(self, "by_state", by_state)
        rows = tuple(Row(number, transition, by_state) for number, transition in enumerate(self.transitions))
        object.__setattr__(self, "rows", rows)
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.transition.source, row.transition.event), []).append(row)
        for (source, event), group in groups.items():
            self._check_group(source, event, group)
        object.__setattr__(self, "choices", {pair: Choice(self.name, tuple(group)) for pair, group in groups.items()})

    @property
    def events(self) -> tuple[str, ...]:
        """Every event, in the order of its first row."""
        return tuple(dict.fromkeys(row.event for row in self.transitions))

    def accepted(self, state: str) -> tuple[str, ...]:
        """The events that have a row from ``state``, in table order."""
        return tuple(dict.fromkeys(row.event for row in self.transitions if row.source == state))

    def undeclared_pairs(self) -> tuple[tuple[str, str], ...]:
        """Every (state, event) that no row declares: states x events minus the table."""
        return tuple(
            (state.name, event)
            for state in self.states
            for event in self.events
            if (state.name, event) not in self.choices
        )

    def _check_states(self) -> None:
        for name, count in Counter(state.name for state in self.states).items():
            if count > 1:
                raise SpecError(f"{self.name}: state {name!r} is declared {count} times; keep one")
        if self.initial not in {state.name for state in self.states}:
            raise SpecError(f"{self.name}: the initial state {self.initial!r} is not declared; add it to the states")

    def _check_row(self, row: Transition) -> None:
        known = {state.name: state for state in self.states}
        for end in (row.source, *row.ends):
            if end not in known:
                raise SpecError(
                    f"{self.name}: {row} names {end!r}, which is not declared; add State({end!r}, ...) or fix the row"
                )
        if known[row.source].final:
            raise SpecError(f"{self.name}: {row} leaves {row.source!r}, which is final; drop the row or the final mark")
        names = [guard.name for guard in row.guards]
        if len(names) != len(set(names)):
            raise SpecError(f"{self.name}: {row} names one guard twice, so it could never or always fire; keep one")
        if self.follows is None:
            self._check_failures(row)
        elif row.steps or row.failure_steps or row.publish_failure_steps:
            raise SpecError(f"{self.name}: {row} has steps, but {self.name} only follows {self.follows}; drop them")

    def _check_failures(self, row: Transition) -> None:
        steps = (*row.steps, *row.failure_steps)
        can_fail = any(isinstance(step, DeviceAction) and not step.clears for step in row.steps)
        can_stay_busy = any(isinstance(step, Drain) for step in steps)
        can_refuse = any(isinstance(step, HostStep) and step.publishes for step in steps)
        for possible, end, what, attribute in (
            (can_fail, row.on_failure, "a device action", "on_failure"),
            (can_stay_busy, row.on_drain_failure, "a drain", "on_drain_failure"),
            (can_refuse, row.on_publish_failure, "a publishing step", "on_publish_failure"),
        ):
            if possible and end is None:
                raise SpecError(f"{self.name}: {row} has {what} but no {attribute}; say where its failure leads")
            if end is not None and not possible:
                raise SpecError(f"{self.name}: {row} has {attribute}={end!r} but not {what} that could fail; drop it")
        for step in row.failure_steps:
            if (isinstance(step, DeviceAction) and not step.clears) or (isinstance(step, HostStep) and step.publishes):
                raise SpecError(
                    f"{self.name}: {row} does {step.name!r} after a failure, which could fail again without a state to "
                    "go to; use host steps, a drain and clearing actions only"
                )
        if row.publish_failure_steps and row.on_publish_failure is None:
            raise SpecError(f"{self.name}: {row} has publish_failure_steps but no on_publish_failure; name the state")
        for host_step in row.publish_failure_steps:
            if not isinstance(host_step, HostStep) or host_step.publishes:
                raise SpecError(
                    f"{self.name}: {row} does {host_step.name!r} after publishing failed, which could fail again; use "
                    "host steps that cannot"
                )
        if row.failure_steps and row.on_failure is None:
            raise SpecError(f"{self.name}: {row} has failure_steps but no on_failure; name the state or drop the steps")

    def _check_names(self) -> None:
        meanings: dict[str, object] = {}
        for row in self.transitions:
            guards = (guard.guard for guard in row.guards)
            for named in (*guards, *row.steps, *row.failure_steps, *row.publish_failure_steps):
                if meanings.setdefault(named.name, named) != named:
                    raise SpecError(f"{self.name}: {named.name!r} in {row} means two things; give one another name")
        for state in self.states:
            for step in state.on_enter:
                if isinstance(step, HostStep) and step.publishes:
                    raise SpecError(f"{self.name}: entering {state.name!r} publishes, which could fail; do it in a row")
                if meanings.setdefault(step.name, step) != step:
                    raise SpecError(
                        f"{self.name}: {step.name!r} on entering {state.name!r} means two things; give one another name"
                    )

    def _check_paths(self) -> None:
        reached = {self.initial}
        while True:
            more = {end for row in self.transitions if row.source in reached for end in row.ends} - reached
            if not more:
                break
            reached |= more
        for state in self.states:
            if state.name not in reached:
                raise SpecError(
                    f"{self.name}: no row leads to {state.name!r} from {self.initial!r}; add one or drop the state"
                )
            if not state.final and not any(row.source == state.name for row in self.transitions):
                raise SpecError(f"{self.name}: no event leaves {state.name!r}; add a row or mark it final")

    def _check_group(self, source: str, event: str, group: list[Row]) -> None:
        for one, other in itertools.combinations(group, 2):
            if not _exclusive(one.transition, other.transition):
                raise SpecError(
                    f"{self.name}: rows {one.number} and {other.number} both answer {event!r} in {source!r}; "
                    "give one a guard g and the other Not(g)"
                )
