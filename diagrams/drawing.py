"""From a machine's table to a picture, without a picture yet: nodes, edges, and the lines that they say.

Everything comes from the table, in table order, so that two processes draw the same bytes. No row is lost, but a table
of ninety rows would be unreadable with an arrow each, so rows are folded:

* Rows between the same two states are one arrow; each row is a line of it.
* Rows that stay in their state are lines inside the state's box.
* An event that leads every state of a phase to the same place is one arrow, from the phase; one that leads three or
  more of its states to states of another phase is one arrow between the phases, and each says in its box where to.
  Such an arrow has a line for each list of steps, which says from which states it is where there are several.
* A failure that three or more states of a phase share is one arrow, from a small box in the phase that says so; the
  states that can fail so have a line inside their box.
* In a large table a list of steps is replaced by a letter, and the key says what the letter stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from attrs import field, frozen

from context_cache.diagrams.markup import identifier
from context_cache.diagrams.table import Step, Table, TableRow, as_table
from context_cache.machines import MachineSpec

__all__ = ["FAILURE", "Also", "Arc", "Drawing", "Edge", "Line", "Node", "Shared", "draw", "kind_of"]

FAILURE: Final = "failure"
_SHARED_BY: Final = 3
"""So many states of a phase with one way to fail are worth one common arrow."""
_ROWS_IN_FULL: Final = 24
"""A larger table has letters for its lists of steps."""


@frozen
class Also:
    """A failure of a row that leads to the same state as its success does; ``steps``: what is done after it."""

    row: int
    cause: str
    steps: tuple[Step, ...] = ()


@frozen
class Line:
    """One line of an arrow or of a state's box: what these rows have in common.

    text:    the event, or the cause of a failure.
    kind:    what the rows ask of the device at most (``host``, ``enqueue``, ``wait``), or ``failure``.
    steps:   what each of the rows does, or does after the failure.
    also:    failures that lead to the same state as success does.
    to:      set inside a box only: the state that a folded row or failure leads to.
    sources: where the arrow starts at a phase and other states of it do something else: the states that do this.
    ended:   ``TableRow.work_ended``.
    """

    rows: tuple[int, ...]
    text: str
    kind: str
    guards: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    also: tuple[Also, ...] = ()
    to: str = ""
    sources: tuple[str, ...] = ()
    ended: str = ""


@frozen
class Node:
    """A state. ``phase`` is the group it stands in, ``lines`` what it says of rows that stay in it.

    ``partly``: for several states in one box, how many of them have device work outstanding, in words.
    """

    name: str
    phase: str
    region: str
    meaning: str
    holds: str
    outstanding: bool
    initial: bool
    final: bool
    entry: tuple[Step, ...]
    lines: tuple[Line, ...]
    partly: str = ""


@frozen
class Edge:
    """One arrow between states; ``from_phase`` and ``to_phase`` say that an end is a phase.

    ``failure``: only an error goes this way.
    """

    source: str
    target: str
    lines: tuple[Line, ...]
    failure: bool
    from_phase: bool = False
    to_phase: bool = False


@frozen
class Shared:
    """A failure that several states of a phase have in common: one arrow for all of them."""

    phase: str
    target: str
    cause: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    total: int

    @property
    def share(self) -> str:
        """How many states of the phase have it, in words."""
        return "in every state" if len(self.sources) == self.total else f"in {len(self.sources)} of {self.total} states"

    @property
    def id(self) -> str:
        """An identifier of its own."""
        return "__".join(identifier(part) for part in (self.phase, self.target, self.cause))


@frozen
class Arc:
    """Entering a state offers an event to another machine."""

    source: str
    machine: str
    event: str


@frozen
class Drawing:
    """What a renderer needs, in table order. ``phases`` are those drawn as boxes, ``note`` stands beside the name.

    ``sideways``: from left to right, which suits one state with its neighbours.
    """

    name: str
    note: str
    phases: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    shared: tuple[Shared, ...]
    arcs: tuple[Arc, ...]
    keys: dict[tuple[Step, ...], str]
    sideways: bool = False

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every line of the arrows, then of the boxes."""
        return (*(line for edge in self.edges for line in edge.lines), *(x for node in self.nodes for x in node.lines))


def kind_of(steps: Iterable[Step]) -> str:
    """What a list of steps asks of the device at most: ``host`` (nothing), ``enqueue``, or ``wait``."""
    kinds = {step.kind for step in steps}
    if "wait" in kinds:
        return "wait"
    return "enqueue" if kinds & {"enqueue", "clear"} else "host"


def draw(source: MachineSpec | Table, *, around: str | None = None) -> Drawing:
    """The drawing of a machine; with ``around``, of the rows that lead to or from that state, and nothing folded."""
    return _Folding(as_table(source), around).drawing()


_Groups: TypeAlias = dict[tuple[str, str, str, tuple[str, ...]], list[TableRow]]


@frozen
class _Folding:
    """One table on its way to a drawing."""

    table: Table
    around: str | None
    phase_of: dict[str, str] = field(init=False)
    members: dict[str, list[str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "phase_of", {state.name: state.phase for state in self.table.states})
        members: dict[str, list[str]] = {}
        for state in self.table.states:
            members.setdefault(state.phase, []).append(state.name)
        object.__setattr__(self, "members", members)

    @property
    def whole(self) -> bool:
        return self.around is None

    def drawing(self) -> Drawing:
        keyed = self.whole and len(self.table.rows) > _ROWS_IN_FULL
        ways, together, moves = self._ways(), *self._between_phases()
        failures = self._failures()
        shared = self._shared(failures)
        folded = {(source, item.target, item.cause) for item in shared for source in item.sources}
        gone = {row.row for rows in (*together.values(), *moves.values()) for row in rows}
        edges: dict[tuple[str, str, bool], list[Line]] = {}
        for row in self.table.rows:
            pair = (row.source, row.target)
            if pair in ways and row.row not in gone and row.source != row.target and (*pair, False) not in edges:
                own = [other for other in ways[pair] if other.row not in gone]
                edges[*pair, False] = [_line([other]) for other in own]
        for (source, target, cause), rows in failures.items():
            if source != target and (source, target, cause) not in folded:
                edges.setdefault((source, target, True), []).extend(_failure_lines(rows, cause))
        arrows = [Edge(source, target, tuple(lines), failure) for (source, target, failure), lines in edges.items()]
        common: dict[tuple[str, str, bool], list[Line]] = {}
        for to_phase, groups in ((False, together), (True, moves)):
            for (phase, end, *_), rows in groups.items():
                common.setdefault((phase, end, to_phase), []).extend(_lines_by_steps(rows))
        arrows += [
            Edge(phase, end, tuple(lines), failure=False, from_phase=True, to_phase=to_phase)
            for (phase, end, to_phase), lines in common.items()
        ]
        moved = {row.row for rows in moves.values() for row in rows}
        nodes = tuple(self._nodes(ways, failures, folded, moved))
        return Drawing(
            self.table.name,
            self._note(),
            tuple(phase for phase in self.members if self._is_box(phase)),
            nodes,
            tuple(arrows),
            shared,
            self._arcs({node.name for node in nodes}),
            self._keys(nodes, arrows) if keyed else {},
            sideways=not self.whole,
        )

    def _note(self) -> str:
        if self.around is not None:
            return f"around {self.around}"
        return f"follows the steps of {self.table.follows}" if self.table.follows else ""

    def _nodes(
        self,
        ways: dict[tuple[str, str], list[TableRow]],
        failures: dict[tuple[str, str, str], list[TableRow]],
        folded: set[tuple[str, str, str]],
        moved: set[int],
    ) -> Iterator[Node]:
        drawn = {self.around, *(end for pair in ways for end in pair)}
        drawn |= {end for source, target, _ in failures for end in (source, target)}
        for state in self.table.states:
            if not self.whole and state.name not in drawn:
                continue
            lines = [_line([row]) for row in ways.get((state.name, state.name), [])]
            lines += [
                _line([row], to=row.target) for row in self.table.rows if row.source == state.name and row.row in moved
            ]
            lines += [
                line
                for (source, target, cause), rows in failures.items()
                if source == state.name and (target == source or (source, target, cause) in folded)
                for line in _failure_lines(rows, cause, to=target)
            ]
            yield Node(
                state.name, state.phase, state.region, state.meaning, state.holds, state.outstanding,
                state.name == self.table.initial, state.final, state.on_enter, tuple(lines),
            )  # fmt: skip

    def _shows(self, source: str, target: str) -> bool:
        return self.whole or self.around in (source, target)

    def _is_box(self, phase: str) -> bool:
        return self.whole and bool(phase) and len(self.members[phase]) > 1

    def _ways(self) -> dict[tuple[str, str], list[TableRow]]:
        """Rows by (source, target), in order of first appearance."""
        found: dict[tuple[str, str], list[TableRow]] = {}
        for row in self.table.rows:
            if self._shows(row.source, row.target):
                found.setdefault((row.source, row.target), []).append(row)
        return found

    def _between_phases(self) -> tuple[_Groups, _Groups]:
        """Rows by (phase, end, event, guards): the end is a state that all of the phase reach, or another phase."""
        to_state: _Groups = {}
        to_phase: _Groups = {}
        for row in self.table.rows:
            phase, end = self.phase_of[row.source], self.phase_of[row.target]
            if self._is_box(phase) and phase != end:
                to_state.setdefault((phase, row.target, row.event, row.guards), []).append(row)
                if self._is_box(end):
                    to_phase.setdefault((phase, end, row.event, row.guards), []).append(row)
        together = {
            group: rows
            for group, rows in to_state.items()
            if {row.source for row in rows} == set(self.members[group[0]])
        }
        moves = {
            group: rows
            for group, rows in to_phase.items()
            if len(rows) >= _SHARED_BY and len({row.target for row in rows}) > 1
        }
        return together, moves

    def _failures(self) -> dict[tuple[str, str, str], list[TableRow]]:
        """Rows by (source, end, cause); a failure that ends where success does is said on the row's own line."""
        found: dict[tuple[str, str, str], list[TableRow]] = {}
        for row in self.table.rows:
            for cause, end in row.failures:
                if end != row.target and self._shows(row.source, end):
                    found.setdefault((row.source, end, cause), []).append(row)
        return found

    def _shared(self, failures: dict[tuple[str, str, str], list[TableRow]]) -> tuple[Shared, ...]:
        groups: dict[tuple[str, str, str], dict[str, list[TableRow]]] = {}
        for (source, target, cause), rows in failures.items():
            if source != target and self.whole and self.phase_of[source]:
                groups.setdefault((self.phase_of[source], target, cause), {})[source] = rows
        return tuple(
            Shared(
                phase, target, cause, tuple(name for name in self.members[phase] if name in sources),
                tuple(sorted(row.row for rows in sources.values() for row in rows)), len(self.members[phase]),
            )
            for (phase, target, cause), sources in groups.items()
            if len(sources) >= _SHARED_BY
        )  # fmt: skip

    def _arcs(self, drawn: set[str]) -> tuple[Arc, ...]:
        offers: dict[str, list[str]] = {}
        for state in self.table.states:
            for step in state.on_enter:
                if step.kind == "couple" and state.name in drawn:
                    offers.setdefault(step.name, []).append(state.name)
        arcs = []
        for name, states in offers.items():
            # What most states do when they are entered is said in their boxes; what few do is an event of its own.
            if len(states) < _SHARED_BY:
                machine, _, event = name.partition(".")
                arcs += [Arc(state, machine, event) for state in states]
        return tuple(arcs)

    def _keys(self, nodes: Iterable[Node], edges: Iterable[Edge]) -> dict[tuple[Step, ...], str]:
        lines = [line for edge in edges for line in edge.lines] + [line for node in nodes for line in node.lines]
        shown = [line.steps for line in lines] + [also.steps for line in lines for also in line.also]
        long = {run for run in shown if len(run) > 1}
        runs = (run for row in self.table.rows for run in (row.steps, row.failure_steps, row.publish_failure_steps))
        ordered = dict.fromkeys(run for run in runs if run in long)
        return {run: _letters(number) for number, run in enumerate(ordered)}


def _line(rows: Sequence[TableRow], *, to: str = "", sources: tuple[str, ...] = ()) -> Line:
    """One line for rows of one event, with the same guards and steps."""
    first = rows[0]
    also = (
        Also(row.row, cause, row.failure_steps_of(cause))
        for row in rows
        for cause, end in row.failures
        if end == row.target
    )
    return Line(
        tuple(sorted(row.row for row in rows)), first.event, kind_of(first.steps), first.guards, first.steps,
        tuple(also), to, sources, first.work_ended or "",
    )  # fmt: skip


def _lines_by_steps(rows: Iterable[TableRow]) -> Iterator[Line]:
    """The rows of one event of a phase: a line for all that do the same."""
    groups: dict[tuple[tuple[Step, ...], str | None], list[TableRow]] = {}
    for row in rows:
        groups.setdefault((row.steps, row.work_ended), []).append(row)
    for alike in groups.values():
        yield _line(alike, sources=tuple(dict.fromkeys(row.source for row in alike)) if len(groups) > 1 else ())


def _failure_lines(rows: Iterable[TableRow], cause: str, to: str = "") -> Iterator[Line]:
    """The rows of one failure: a line for all after which the same is done."""
    groups: dict[tuple[Step, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(row.failure_steps_of(cause), []).append(row.row)
    for steps, numbers in groups.items():
        yield Line(tuple(numbers), cause, FAILURE, steps=steps, to=to)


def _letters(number: int) -> str:
    """A, B, ... Z, AA, AB and so on."""
    text = ""
    while number >= 0:
        text = chr(ord("A") + number % 26) + text
        number = number // 26 - 1
    return text
