"""A machine's phases alone: what a life goes through, before one looks at the states.

States of one phase are one box that names them. Its rows between phases are arrows, its rows within the phase are lines
in the box; guards and steps are left to the whole picture.
"""

from __future__ import annotations

from context_cache.diagrams.drawing import FAILURE, Drawing, Edge, Line, Node, kind_of
from context_cache.diagrams.table import Table, TableRow, as_table
from context_cache.machines import MachineSpec

__all__ = ["draw_phases"]


def draw_phases(source: MachineSpec | Table) -> Drawing:
    """A drawing whose states are the phases of the machine; a state without a phase stands for itself."""
    table = as_table(source)
    group_of = {state.name: state.phase or state.name for state in table.states}
    edges: dict[tuple[str, str, bool], dict[str, list[TableRow]]] = {}
    for row in table.rows:
        source_group = group_of[row.source]
        edges.setdefault((source_group, group_of[row.target], False), {}).setdefault(row.event, []).append(row)
        for cause, end in row.failures:
            # A failure that stays in its phase is a matter of the states.
            if group_of[end] not in (source_group, group_of[row.target]):
                edges.setdefault((source_group, group_of[end], True), {}).setdefault(cause, []).append(row)
    nodes = []
    for group in dict.fromkeys(group_of.values()):
        members = [state for state in table.states if group_of[state.name] == group]
        names = [state.name for state in members]
        busy = sum(state.outstanding for state in members)
        nodes.append(
            Node(
                group, group, "" if len(members) == 1 else f"{len(members)} states",
                "; ".join(f"{state.name}: {state.meaning}" for state in members),
                ", ".join(dict.fromkeys(state.holds for state in members if state.holds)) if len(members) == 1 else "",
                busy == len(members),
                table.initial in names, all(state.final for state in members), (),
                _lines(edges.get((group, group, False), {})),
                f"work outstanding in {busy} of {len(members)}" if 0 < busy < len(members) else "",
            )
        )  # fmt: skip
    arrows = (
        Edge(start, end, _lines(lines, failure=failure), failure)
        for (start, end, failure), lines in edges.items()
        if start != end
    )
    return Drawing(f"{table.name}: phases", "", (), tuple(nodes), tuple(arrows), (), (), {})


def _lines(events: dict[str, list[TableRow]], *, failure: bool = False) -> tuple[Line, ...]:
    lines = []
    for text, rows in events.items():
        kind = FAILURE if failure else kind_of(step for row in rows for step in row.steps)
        lines.append(Line(tuple(row.row for row in rows), text, kind))
    return tuple(lines)
