"""A diff of tables for people: text for a commit message, and one picture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from attrs import evolve

from context_cache.diagrams.changes import MachineChange, row_text
from context_cache.diagrams.dot import to_dot, together
from context_cache.diagrams.drawing import FAILURE, Drawing, Edge, Line, draw
from context_cache.diagrams.markup import printable
from context_cache.diagrams.overlay import Mark, Overlay
from context_cache.diagrams.table import Step, Table, TableRow

__all__ = ["changes_dot", "changes_text"]

_ADDED: Final = "#7ee787"
_REMOVED: Final = "#ff9492"
_CHANGED: Final = "#f2cc60"


def changes_text(changes: Iterable[MachineChange]) -> str:
    """One paragraph a machine: ``+`` added, ``-`` removed, ``~`` changed. Empty when nothing changed."""
    return "\n".join(_one_line(line) for change in changes for line in _machine_text(change))


def changes_dot(changes: Sequence[MachineChange], title: str) -> str:
    """One picture: what was added is green, removed red, changed yellow, and the rest pale."""
    pictures = [_picture(change) for change in changes]
    return to_dot(*pictures[0]) if len(pictures) == 1 else together(pictures, title)


def _one_line(text: str) -> str:
    """Names come from files, and a terminal obeys what it is told."""
    return printable(text).replace("\n", "\u240a").replace("\t", "\u2409")


def _machine_text(change: MachineChange) -> list[str]:
    if change.kind in ("added", "removed"):
        size = f"{len(change.table.states)} states, {len(change.table.rows)} rows"
        return [f"{change.name}: machine {change.kind} ({size})"]
    lines = [f"{change.name}: {_summary(change)}"]
    lines += [f"  ~ {said}" for said in change.said]
    lines += [f"  + state {state.name}: {state.meaning}" for state in change.states_added]
    lines += [f"  - state {state.name}: {state.meaning}" for state in change.states_removed]
    for state in change.states_changed:
        lines += [f"  ~ state {state.new.name}: {said}" for said in state.said]
    lines += [f"  + row {row.row}: {row_text(row)}{_steps(row.steps)}" for row in change.rows_added]
    lines += [f"  - row {row.row}: {row_text(row)}{_steps(row.steps)}" for row in change.rows_removed]
    for pair in change.rows_changed:
        lines += [f"  ~ row {pair.new.row}: {row_text(pair.new)}", *(f"      {said}" for said in pair.said)]
    for state in change.states_changed:
        lines += [f"  wording only: state {state.new.name}: {said}" for said in state.wording]
    return lines


def _summary(change: MachineChange) -> str:
    counts = [
        (len(change.states_added), "state", "added"),
        (len(change.states_removed), "state", "removed"),
        (sum(bool(state.said) for state in change.states_changed), "state", "changed"),
        (len(change.rows_added), "row", "added"),
        (len(change.rows_removed), "row", "removed"),
        (len(change.rows_changed), "row", "changed"),
    ]
    said = [f"{count} {what if count == 1 else f'{what}s'} {done}" for count, what, done in counts if count]
    return ", ".join(said) or ("wording only" if change.kind == "wording" else "changed")


def _steps(steps: Iterable[Step]) -> str:
    return "".join(f" / {step.name}" for step in steps)


def _picture(change: MachineChange) -> tuple[Drawing, Overlay]:
    """Both versions in one drawing: the new table and what is gone from the old one, with marks on all that differs."""
    if change.new is None or change.old is None:
        mark = Mark(text=change.kind, colour=_REMOVED if change.new is None else _ADDED)
        return draw(change.table), _everywhere(change.table, mark)
    rows: dict[int, Mark] = {row.row: Mark(text="added", colour=_ADDED) for row in change.rows_added}
    failures = {
        (row.row, cause): Mark(text="added", colour=_ADDED) for row in change.rows_added for cause, _ in row.failures
    }
    gone = [(row, "removed") for row in change.rows_removed]
    lost: list[tuple[TableRow, str, str]] = []
    for pair in change.rows_changed:
        old, new = pair.old, pair.new
        rows[new.row] = Mark(text="changed", colour=_CHANGED)
        for cause, end in new.failures:
            if (cause, end) not in old.failures or old.failure_steps_of(cause) != new.failure_steps_of(cause):
                failures[new.row, cause] = Mark(text="changed", colour=_CHANGED)
        if old.target != new.target:
            gone.append((_without(old, new.failures), "until now"))
        else:
            lost += [(old, cause, end) for cause, end in old.failures if (cause, end) not in new.failures]
    merged = list(change.new.rows)
    for row, text in gone:
        mark = Mark(text=text, colour=_REMOVED, number=f"old {row.row}")
        rows[len(merged)] = mark
        failures.update({(len(merged), cause): mark for cause, _ in row.failures})
        merged.append(evolve(row, row=len(merged)))
    states = {state.name: Mark(text="added", colour=_ADDED) for state in change.states_added}
    states |= {state.name: Mark(text="removed", colour=_REMOVED) for state in change.states_removed}
    for state in change.states_changed:
        # Another description is said and not painted: it changes nothing that happens.
        states[state.new.name] = Mark(text="changed", colour=_CHANGED) if state.said else Mark(text="wording")
    if change.old.initial != change.new.initial:
        for name, text in ((change.new.initial, "initial now"), (change.old.initial, "initial until now")):
            mark = states.get(name, Mark())
            states[name] = evolve(mark, text=", ".join(filter(None, (mark.text, text))), colour=mark.colour or _CHANGED)
    table = evolve(change.new, rows=tuple(merged), states=(*change.new.states, *change.states_removed))
    drawing = draw(table)
    # A row that still leads to the same state, but one of its failures no longer does: that arrow alone is an old one.
    arrows = []
    for number, (row, cause, end) in enumerate(lost, start=len(merged)):
        failures[number, cause] = Mark(text="until now", colour=_REMOVED, number=f"old {row.row}")
        arrows.append(Edge(row.source, end, (Line((number,), cause, FAILURE),), failure=True))
    overlay = Overlay(rows, states, failures, title="\n".join((_summary(change), *change.said)), fade=True)
    return evolve(drawing, edges=(*drawing.edges, *arrows)), overlay


def _without(row: TableRow, failures: Collection[tuple[str, str]]) -> TableRow:
    """The row with only those of its failures that are not among ``failures``."""
    kept = {cause: end for cause, end in row.failures if (cause, end) not in failures}
    return evolve(
        row,
        on_failure=kept.get("device error"),
        on_drain_failure=kept.get("drain failed"),
        on_publish_failure=kept.get("publish failed"),
    )


def _everywhere(table: Table, mark: Mark) -> Overlay:
    return Overlay(
        rows={row.row: mark for row in table.rows},
        states={state.name: mark for state in table.states},
        failures={(row.row, cause): mark for row in table.rows for cause, _ in row.failures},
        title=f"machine {mark.text}",
    )
