"""A machine's table as Markdown: the reference that a reviewer reads beside the picture."""

from __future__ import annotations

import re
from collections.abc import Iterable

from context_cache.diagrams.markup import printable
from context_cache.diagrams.table import Step, Table, TableRow, TableState, as_table
from context_cache.machines import MachineSpec

__all__ = ["to_markdown"]


def to_markdown(source: MachineSpec | Table) -> str:
    """States and rows in table order; rows are numbered as recorded steps number them. Stable to the byte."""
    table = as_table(source)
    lines = [f"## {_text(table.name)}", ""]
    if table.follows:
        lines += [f"Follows the steps of {_code(table.follows)}; its rows have none of their own.", ""]
    grouped = any(state.phase or state.region for state in table.states)
    groups = ("phase", "region") if grouped else ()
    lines += _grid(
        ("state", *groups, "meaning", "holds", "kind", "on entry"),
        (
            (
                _code(state.name),
                *((_text(state.phase), _text(state.region)) if grouped else ()),
                _text(state.meaning),
                _text(state.holds),
                ", ".join(_marks(state, table.initial)),
                _steps(state.on_enter),
            )
            for state in table.states
        ),
    )
    lines.append("")
    ends = any(row.work_ended for row in table.rows)
    lines += _grid(
        ("row", "state", "event", "guards", "steps", "next", "failures", *(("device work ended",) if ends else ())),
        (
            (
                str(row.row),
                _code(row.source),
                _code(row.event),
                _text(", ".join(row.guards)),
                _steps(row.steps),
                _code(row.target),
                _failures(row),
                *((_text(row.work_ended or ""),) if ends else ()),
            )
            for row in table.rows
        ),
    )
    return "\n".join(lines) + "\n"


def _marks(state: TableState, initial: str) -> list[str]:
    marks = (("initial", state.name == initial), ("final", state.final), ("work outstanding", state.outstanding))
    return [name for name, holds in marks if holds]


def _failures(row: TableRow) -> str:
    parts = []
    for cause, end in row.failures:
        steps = row.failure_steps_of(cause)
        parts.append(f"{cause}: {_code(end)}{f' after {_steps(steps)}' if steps else ''}")
    return "; ".join(parts)


def _steps(steps: Iterable[Step]) -> str:
    return " / ".join(_text(step.name) for step in steps)


def _grid(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return lines


def _code(name: str) -> str:
    # A code span has no escapes, so a name that would need one is spelled with entities.
    return f"`{name}`" if re.fullmatch(r"[\w.:-]+", name) else f"<code>{_text(name)}</code>"


def _text(text: str) -> str:
    """Text of a cell: whatever Markdown would read as markup, a column's end or a line's end is an entity."""
    coded = "".join(f"&#{ord(c)};" if c in '\\`*[]<>&|#~!"$\n\t' else c for c in printable(text))
    # An underscore inside a word is no markup, and every name here has some.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", "&#95;", coded)
