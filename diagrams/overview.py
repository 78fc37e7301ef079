"""All machines on one screen, and how they are coupled.

A box is a machine with its phases or states. A solid arrow is an event that one machine offers to another: when, and
what it does there. A dotted arrow leads from a machine that follows the steps of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from context_cache.diagrams.dot import digraph
from context_cache.diagrams.labels import COUPLE, MUTED, QUIET
from context_cache.diagrams.markup import cell, escaped, font, identifier, ranges, table_label, tooltip
from context_cache.diagrams.table import Table, as_table
from context_cache.machines import MachineSpec

__all__ = ["overview_dot"]


def overview_dot(sources: Iterable[MachineSpec | Table]) -> str:
    """A digraph of the machines, in the order given. Ends with a newline; stable to the byte."""
    tables = [as_table(source) for source in sources]
    by_name = {table.name: table for table in tables}
    legend = [
        cell(font("<B>machines and their couplings</B>", size=14)),
        cell(font("when an event is offered, and what it does in the other machine", size=9, colour=MUTED)),
    ]
    body = [*table_label("label=", legend, ";"), "rankdir=LR;", "ranksep=0.6;"]
    for table in tables:
        body += _machine(table)
    for table in tables:
        if table.follows in by_name:
            ends = f"m_{identifier(table.follows)} -> m_{identifier(table.name)}"
            body.append(f'{ends} [style=dotted, dir=back, color="{MUTED}", label="follows"];')
        for machine in by_name:
            lines = [
                _coupling(table, by_name[machine], name)
                for name in table.couplings
                if name.partition(".")[0] == machine
            ]
            if lines:
                head = f'm_{identifier(table.name)} -> m_{identifier(machine)} [color="{COUPLE}", label='
                body += table_label(head, lines, "];")
    return digraph("overview", body)


def _machine(table: Table) -> list[str]:
    rows = [
        cell(font(f"<B>{escaped(table.name)}</B>", size=12)),
        cell(font(f"{_count(len(table.states), 'state')}, {_count(len(table.rows), 'row')}", size=9, colour=MUTED)),
        "<HR/>",
    ]
    groups: dict[str, list[str]] = {}
    for state in table.states:
        groups.setdefault(state.phase or state.name, []).append(state.name)
    for group, names in groups.items():
        more = font(f" {_count(len(names), 'state')}", colour=MUTED) if len(names) > 1 else ""
        rows.append(cell(f"{escaped(group)}{more}"))
    tip = tooltip(f"{table.name}: {', '.join(state.name for state in table.states)}")
    head = f'm_{identifier(table.name)} [fillcolor="{QUIET}", color="{MUTED}", tooltip={tip}, label='
    return table_label(head, rows, "];")


def _coupling(table: Table, other: Table, name: str) -> str:
    event = name.partition(".")[2]
    rows = [row.row for row in table.rows if any(step.name == name for step in row.every_step)]
    states = [state.name for state in table.states if any(step.name == name for step in state.on_enter)]
    when = [f"rows {ranges(rows)}"] if rows else []
    if states:
        when.append(f"entering {_listed(states)}")
    moves = [(row.source, row.target) for row in other.rows if row.event == event and row.source != row.target]
    does = ", ".join(f"{source} → {target}" for source, target in dict.fromkeys(moves))
    cells = (f"<B>{escaped(name)}</B>", escaped(does), font(escaped("; ".join(when)), colour=MUTED))
    return "<TR>" + "".join(f'<TD ALIGN="LEFT" CELLPADDING="3">{text}</TD>' for text in cells) + "</TR>"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} states"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
