"""Mermaid text of a drawing, for pages that render it in place (a review, a wiki)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from context_cache.diagrams.drawing import Drawing, Edge, Node, Shared, draw
from context_cache.diagrams.markup import identifier, printable
from context_cache.diagrams.table import Table
from context_cache.machines import MachineSpec

__all__ = ["to_mermaid"]

_Arrow: TypeAlias = tuple[str, str, list[str], bool]
"""Source, target, labels, whether only an error goes this way."""


def to_mermaid(source: MachineSpec | Table | Drawing) -> str:
    """A flowchart of states and events: phases are boxes, failures are dashed. Ends with a newline; stable to the byte.

    Guards, steps and rows that stay in their state are left to the table: Mermaid has no room for them.
    """
    drawing = source if isinstance(source, Drawing) else draw(source)
    lines = ["flowchart LR"]
    lines += _nodes(drawing)
    arrows: list[_Arrow] = [(_shared_id(shared), _id(shared.target), [], True) for shared in drawing.shared]
    arrows += [_arrow(edge) for edge in drawing.edges]
    for source_id, target_id, labels, failure in arrows:
        label = f"|{_quoted('<br>'.join(_escaped(text) for text in labels), escape=False)}|" if labels else ""
        lines.append(f"    {source_id} {'-.->' if failure else '-->'}{label} {target_id}")
    failures = [str(index) for index, (*_, failure) in enumerate(arrows) if failure]
    if failures:
        lines.append(f"    linkStyle {','.join(failures)} stroke:#c0392b,color:#c0392b")
    return "\n".join(lines) + "\n"


def _nodes(drawing: Drawing) -> list[str]:
    alone = [node for node in drawing.nodes if node.phase not in drawing.phases]
    lines = [f"    {_box(node)}" for node in alone]
    for phase in drawing.phases:
        lines.append(f"    subgraph {_phase_id(phase)} [{_quoted(phase)}]")
        lines += [f"        {_box(node)}" for node in drawing.nodes if node.phase == phase]
        lines += [f"        {_shared_box(shared)}" for shared in drawing.shared if shared.phase == phase]
        lines.append("    end")
    return lines


def _box(node: Node) -> str:
    # Round ends mark where a life begins and ends.
    left, right = ("([", "])") if node.initial or node.final else ("(", ")")
    return f"{_id(node.name)}{left}{_quoted(node.name)}{right}"


def _shared_box(shared: Shared) -> str:
    label = f"{_escaped(shared.cause)}<br>{shared.share}"
    return f"{_shared_id(shared)}{{{{{_quoted(label, escape=False)}}}}}"


def _arrow(edge: Edge) -> _Arrow:
    source = _phase_id(edge.source) if edge.from_phase else _id(edge.source)
    target = _phase_id(edge.target) if edge.to_phase else _id(edge.target)
    return source, target, _unique(line.text for line in edge.lines), edge.failure


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _id(name: str) -> str:
    return f"s_{identifier(name)}"


def _phase_id(name: str) -> str:
    return f"p_{identifier(name)}"


def _shared_id(shared: Shared) -> str:
    return f"f_{shared.id}"


def _escaped(text: str) -> str:
    # Mermaid knows no escape inside quotes; its entity codes survive anything.
    coded = "".join(f"#{ord(c)};" if c in '"<>&#\\`' else c for c in printable(text))
    return coded.replace("\n", "<br>")


def _quoted(text: str, *, escape: bool = True) -> str:
    return f'"{_escaped(text) if escape else text}"'
