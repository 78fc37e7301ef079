"""Mermaid text of a drawing, for pages that render it in place (a README, a review)."""

from __future__ import annotations

from context_cache.diagrams.drawing import Drawing, Edge, draw
from context_cache.machines import MachineSpec

__all__ = ["to_mermaid"]


def to_mermaid(spec: MachineSpec) -> str:
    """A left-to-right flowchart: phases are boxes, failures are dashed. Ends with a newline; stable to the byte."""
    drawing = draw(spec)
    lines = ["flowchart LR"]
    lines += _nodes(drawing)
    failures = []
    for index, edge in enumerate(drawing.edges):
        lines.append(f"    {_arrow(edge)}")
        if edge.failure:
            failures.append(str(index))
    if failures:
        lines.append(f"    linkStyle {','.join(failures)} stroke:#c0392b,color:#c0392b")
    return "\n".join(lines) + "\n"


def _nodes(drawing: Drawing) -> list[str]:
    alone = [node for node in drawing.nodes if node.phase not in drawing.phases]
    lines = [f"    {_box(node.name, node.initial, node.final)}" for node in alone]
    for phase in drawing.phases:
        lines.append(f"    subgraph {_phase_id(phase)} [{_quoted(phase)}]")
        lines += [f"        {_box(node.name, False, node.final)}" for node in drawing.nodes if node.phase == phase]
        lines.append("    end")
    return lines


def _box(name: str, initial: bool, final: bool) -> str:
    # Round ends mark where a life begins and ends.
    left, right = ("([", "])") if initial or final else ("(", ")")
    return f"{_id(name)}{left}{_quoted(name)}{right}"


def _arrow(edge: Edge) -> str:
    source = _phase_id(edge.source) if edge.from_phase else _id(edge.source)
    label = _quoted("<br>".join(_escaped(text) for text in edge.labels), escape=False)
    return f"{source} {'-.->' if edge.failure else '-->'}|{label}| {_id(edge.target)}"


def _id(name: str) -> str:
    # Underscores are spelled too, so that two names can never meet in one id.
    plain = (c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in name)
    return "s_" + "".join(plain)


def _phase_id(name: str) -> str:
    return "p" + _id(name)[1:]


def _escaped(text: str) -> str:
    # Mermaid knows no escape inside quotes; its entity codes survive anything.
    coded = "".join(f"#{ord(c)};" if c in '"<>&#\\`' else c for c in text)
    return coded.replace("\n", "<br>")


def _quoted(text: str, *, escape: bool = True) -> str:
    return f'"{_escaped(text) if escape else text}"'
