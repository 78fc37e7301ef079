"""A machine's table as Markdown: the reference that a reviewer reads beside the picture."""

from __future__ import annotations

from collections.abc import Iterable

from context_cache.machines import MachineSpec, Transition

__all__ = ["to_markdown"]


def to_markdown(spec: MachineSpec) -> str:
    """States and rows in table order; rows are numbered as recorded steps number them. Stable to the byte."""
    lines = [f"## {spec.name}", ""]
    if spec.follows:
        lines += [f"Follows the steps of `{spec.follows}`; its rows have none of their own.", ""]
    lines += _table(
        ("state", "meaning", "holds", "kind"),
        (
            (
                _code(state.name),
                state.meaning,
                state.holds,
                ", ".join(_marks(state.name == spec.initial, state.final, state.outstanding)),
            )
            for state in spec.states
        ),
    )
    lines.append("")
    lines += _table(
        ("row", "state", "event", "guards", "steps", "next", "failures"),
        (
            (
                str(number),
                _code(row.source),
                _code(row.event),
                ", ".join(str(guard) for guard in row.guards),
                " / ".join(step.name for step in row.steps),
                _code(row.target),
                _failures(row),
            )
            for number, row in enumerate(spec.transitions)
        ),
    )
    return "\n".join(lines) + "\n"


def _marks(initial: bool, final: bool, outstanding: bool) -> list[str]:
    marks = (("initial", initial), ("final", final), ("work outstanding", outstanding))
    return [name for name, holds in marks if holds]


def _failures(row: Transition) -> str:
    parts = []
    if row.on_failure is not None:
        extra = f" after {' / '.join(step.name for step in row.failure_steps)}" if row.failure_steps else ""
        parts.append(f"device error: {_code(row.on_failure)}{extra}")
    if row.on_drain_failure is not None:
        parts.append(f"drain: {_code(row.on_drain_failure)}")
    if row.on_publish_failure is not None:
        parts.append(f"publish: {_code(row.on_publish_failure)}")
    return "; ".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return lines


def _code(name: str) -> str:
    return f"`{name}`"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
