"""What changed between two versions of a machine's table: states and rows, not lines of text.

Rows are matched by source, event and guards, never by number, so an inserted row is one added row. The order of states,
of rows and of a row's guards is layout and no difference; the order of its steps is behaviour. How states are described
is wording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final, TypeVar

from attrs import frozen

from context_cache.diagrams.table import Step, Table, TableRow, TableState

__all__ = ["MachineChange", "RowChange", "StateChange", "compare", "compare_all", "row_text"]

_WORDS: Final = ("meaning", "holds", "region")
_ENDS: Final = (
    ("on_failure", "a device error"),
    ("on_drain_failure", "a failed drain"),
    ("on_publish_failure", "a failed publication"),
)
_Item = TypeVar("_Item")


@frozen
class StateChange:
    """A state that is in both versions. ``said``: what changed in what it does; ``wording``: in how it is described."""

    old: TableState
    new: TableState
    said: tuple[str, ...]
    wording: tuple[str, ...]


@frozen
class RowChange:
    """A row that is in both versions. ``said``: what changed, one phrase each."""

    old: TableRow
    new: TableRow
    said: tuple[str, ...]


@frozen
class MachineChange:
    """One machine; ``old`` or ``new`` is None when it was added or removed."""

    old: Table | None
    new: Table | None
    said: tuple[str, ...] = ()
    states_added: tuple[TableState, ...] = ()
    states_removed: tuple[TableState, ...] = ()
    states_changed: tuple[StateChange, ...] = ()
    rows_added: tuple[TableRow, ...] = ()
    rows_removed: tuple[TableRow, ...] = ()
    rows_changed: tuple[RowChange, ...] = ()

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def table(self) -> Table:
        """The newest version that there is."""
        table = self.old if self.new is None else self.new
        assert table is not None, "a change has at least one version"
        return table

    @property
    def kind(self) -> str:
        """``added``, ``removed``, ``changed``, ``wording`` (nothing else changed) or ``same``."""
        if self.old is None or self.new is None:
            return "added" if self.old is None else "removed"
        states = self.states_added or self.states_removed or any(change.said for change in self.states_changed)
        if self.said or states or self.rows_added or self.rows_removed or self.rows_changed:
            return "changed"
        return "wording" if self.states_changed else "same"


def compare_all(old: Mapping[str, Table], new: Mapping[str, Table]) -> tuple[MachineChange, ...]:
    """Every machine that differs, in the order of ``new``, then those that are gone."""
    changes = [compare(old.get(name), table) for name, table in new.items()]
    changes += [compare(table, None) for name, table in old.items() if name not in new]
    return tuple(change for change in changes if change.kind != "same")


def compare(old: Table | None, new: Table | None) -> MachineChange:
    """One machine in two versions; one of them may be missing."""
    if new is None or old is None:
        return MachineChange(old, new)
    said = [
        f"{what} {_named(after)}, was {_named(before)}"
        for what, before, after in (
            ("name", old.name, new.name), ("initial state", old.initial, new.initial),
            ("follows", old.follows, new.follows),
        )
        if before != after
    ]  # fmt: skip
    before, after = ({state.name: state for state in table.states} for table in (old, new))
    states = (_state_change(before[name], after[name]) for name in after if name in before)
    pairs = _matched(old.rows, new.rows)
    kept, gone = {mine.row for _, mine in pairs}, {theirs.row for theirs, _ in pairs}
    rows = (RowChange(theirs, mine, tuple(_row_changes(theirs, mine))) for theirs, mine in pairs)
    return MachineChange(
        old, new, tuple(said),
        tuple(state for name, state in after.items() if name not in before),
        tuple(state for name, state in before.items() if name not in after),
        tuple(change for change in states if change.said or change.wording),
        tuple(row for row in new.rows if row.row not in kept),
        tuple(row for row in old.rows if row.row not in gone),
        tuple(sorted((change for change in rows if change.said), key=lambda change: change.new.row)),
    )  # fmt: skip


def row_text(row: TableRow) -> str:
    """A row as one line, the way the tables and recorded steps write it."""
    guards = f" [{', '.join(row.guards)}]" if row.guards else ""
    return f"{row.source} --{row.event}{guards}--> {row.target}"


def _matched(old: Sequence[TableRow], new: Sequence[TableRow]) -> list[tuple[TableRow, TableRow]]:
    """(old, new) pairs: first those with the same source, event and guards, then by what else they share."""
    pairs: list[tuple[TableRow, TableRow]] = []
    left = {row.row: row for row in old}
    same: dict[tuple[str, str, frozenset[str]], list[TableRow]] = {}
    for row in old:
        same.setdefault((row.source, row.event, frozenset(row.guards)), []).append(row)
    unmatched = []
    for mine in new:
        alike = same.get((mine.source, mine.event, frozenset(mine.guards)))
        if alike:
            pairs.append((alike.pop(0), mine))
            del left[pairs[-1][0].row]
        else:
            unmatched.append(mine)
    # Guards changed: of the rows for one event in one state, those that still lead to the same place or do the same.
    candidates = [
        (-_likeness(theirs, mine), theirs.row, mine.row, theirs, mine)
        for mine in unmatched
        for theirs in left.values()
        if _likeness(theirs, mine)
    ]
    taken: set[int] = set()
    for _, theirs_row, mine_row, theirs, mine in sorted(candidates, key=lambda candidate: candidate[:3]):
        if theirs_row in left and mine_row not in taken:
            pairs.append((theirs, mine))
            del left[theirs_row]
            taken.add(mine_row)
    return pairs


def _likeness(theirs: TableRow, mine: TableRow) -> int:
    """0: two different rows."""
    if (theirs.source, theirs.event) != (mine.source, mine.event):
        return 0
    same = 4 * (theirs.target == mine.target) + 2 * (theirs.steps == mine.steps and bool(mine.steps))
    return same and same + bool(set(theirs.guards) & set(mine.guards))


def _state_change(old: TableState, new: TableState) -> StateChange:
    said = []
    if old.phase != new.phase:
        said.append(f"phase {_named(new.phase)}, was {_named(old.phase)}")
    if old.outstanding != new.outstanding:
        said.append("device work is outstanding" if new.outstanding else "device work is no longer outstanding")
    if old.final != new.final:
        said.append("is final" if new.final else "is no longer final")
    said += _steps_changes("on entry", old.on_enter, new.on_enter)
    wording = [
        f"{word} {_named(getattr(new, word))}, was {_named(getattr(old, word))}"
        for word in _WORDS
        if getattr(old, word) != getattr(new, word)
    ]
    return StateChange(old, new, tuple(said), tuple(wording))


def _row_changes(old: TableRow, new: TableRow) -> Iterable[str]:
    if old.target != new.target:
        yield f"leads to {new.target}, was {old.target}"
    if set(old.guards) != set(new.guards):
        # All of them have to hold, so their order is layout.
        order = {guard: at for at, guard in enumerate(new.guards)}
        before = sorted(old.guards, key=lambda guard: order.get(guard, len(order)))
        yield from _list_changes("guards", before, new.guards, ", ")
    yield from _steps_changes("steps", old.steps, new.steps)
    for name, what in _ENDS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{what} leads to {after or 'nowhere'}, was {before or 'nowhere'}"
    yield from _steps_changes("after a device error", old.failure_steps, new.failure_steps)
    yield from _steps_changes("after a failed publication", old.publish_failure_steps, new.publish_failure_steps)
    if old.work_ended != new.work_ended:
        yield f"device work ended {_named(new.work_ended)}, was {_named(old.work_ended)}"
    if old.hot != new.hot:
        yield "is hot" if new.hot else "is no longer hot"


def _steps_changes(what: str, old: Sequence[Step], new: Sequence[Step]) -> Iterable[str]:
    yield from _list_changes(what, [step.name for step in old], [step.name for step in new], " / ")
    kinds = {step.name: step.kind for step in old}
    for step in dict.fromkeys(new):
        if kinds.get(step.name, step.kind) != step.kind:
            yield f"{what}: {step.name} is of kind {step.kind}, was {kinds[step.name]}"


def _list_changes(what: str, old: Sequence[str], new: Sequence[str], between: str) -> Iterable[str]:
    if list(old) == list(new):
        return
    if sorted(old) == sorted(new):
        yield f"{what} reordered: {between.join(new)}, was {between.join(old)}"
        return
    parts = []
    for tag, start, end, to_start, to_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag in ("delete", "replace"):
            parts.append(f"- {between.join(old[start:end])}")
        if tag in ("insert", "replace"):
            place = f" after {new[to_start - 1]}" if to_start else " first" if len(new) > to_end - to_start else ""
            parts.append(f"+ {between.join(new[to_start:to_end])}{place}")
    yield f"{what}: {'; '.join(parts)}"


def _named(value: str | None) -> str:
    return repr(value) if value else "none"
