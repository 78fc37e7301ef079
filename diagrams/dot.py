"""DOT text of a drawing: the form that is committed, compared line by line, and laid out by an engine.

Written here and not by a library, so that a bare installation can write it and its bytes do not depend on a library's
version. A changed row of the table changes the lines of the text that name it, and one more if it is in the key of a
large table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from context_cache.diagrams.drawing import FAILURE, Arc, Drawing, Edge, Node, Shared, draw
from context_cache.diagrams.labels import BUSY, COUPLE, MUTED, PALE, QUIET, STROKE, Labels
from context_cache.diagrams.markup import FONT, Names, identifier, quoted, ranges, table_label, tooltip
from context_cache.diagrams.overlay import NOTHING, Overlay
from context_cache.diagrams.table import Table
from context_cache.machines import MachineSpec

__all__ = ["digraph", "to_dot", "together"]

_INK = "#24292f"
_BOX = f'labelloc=t, fontsize=14, style="rounded,filled", color="{MUTED}", fillcolor="#f6f8fa"'


def to_dot(source: MachineSpec | Table | Drawing, overlay: Overlay = NOTHING, *, named: bool = False) -> str:
    """A digraph of the drawing. Ends with a newline; stable to the byte.

    named: with the ids by which a page finds states, arrows and labels; see ``explorer.page``.
    """
    writer = _Writer(source if isinstance(source, Drawing) else draw(source), overlay, named=named)
    direction = ["rankdir=LR;"] if writer.drawing.sideways else []
    legend = table_label("label=", writer.labels.legend(), ";")
    return digraph(writer.drawing.name, [*direction, *legend, *writer.body()])


def together(pictures: Sequence[tuple[Drawing, Overlay]], title: str) -> str:
    """Several drawings in one digraph, each in a box of its own with its own legend."""
    lines = []
    for number, (drawing, overlay) in enumerate(pictures):
        writer = _Writer(drawing, overlay, prefix=f"d{number}_")
        lines += [f"subgraph cluster_{number} {{", f'graph [style=rounded, color="{PALE}", labelloc=b];']
        lines += table_label("label=", writer.labels.legend(), ";")
        lines += [*writer.body(), "}"]
    return digraph(title, [f"label={quoted(title)};", "fontsize=16;", "labelloc=t;", *lines])


def digraph(name: str, body: Sequence[str]) -> str:
    """The frame of every picture: the fonts and the distances."""
    return "\n".join((
        f"digraph {quoted(name)} {{",
        f'graph [compound=true, ranksep=0.45, nodesep=0.3, fontname="{FONT}", fontsize=8, labelloc=b, pad=0.2];',
        f'node [shape=box, style="rounded,filled", fontname="{FONT}", fontsize=8, margin="0.1,0.05"];',
        f'edge [fontname="{FONT}", fontsize=8, arrowsize=0.7];',
        *body,
        "}",
        "",
    ))  # fmt: skip


class _Writer:
    """The statements of one drawing; ``prefix`` keeps its identifiers apart from those of others in a digraph."""

    def __init__(self, drawing: Drawing, overlay: Overlay, prefix: str = "", *, named: bool = False) -> None:
        self.drawing, self.overlay, self.prefix = drawing, overlay, prefix
        self.names = Names() if named else None
        self.labels = Labels(drawing, overlay, self.names)

    def body(self) -> list[str]:
        """Boxes in table order, phases around theirs, then the arrows."""
        drawing = self.drawing
        lines: list[str] = []
        for node in drawing.nodes:
            if node.initial:
                lines += self._start(node)
        for phase in dict.fromkeys(node.phase for node in drawing.nodes):
            inside = [line for node in drawing.nodes if node.phase == phase for line in self._node(node)]
            if phase in drawing.phases:
                for shared in drawing.shared:
                    inside += self._shared_box(shared) if shared.phase == phase else []
                head = f"graph [label={quoted(phase)}, {_BOX}];"
                inside = [f"subgraph {self._cluster(phase)} {{", head, *inside, "}"]
            lines += inside
        lines += [self._shared_arrow(shared) for shared in drawing.shared]
        for edge in drawing.edges:
            lines += self._edge(edge)
        for machine in dict.fromkeys(arc.machine for arc in drawing.arcs):
            colour = self._couple(*(arc.source for arc in drawing.arcs if arc.machine == machine))
            fill = QUIET if colour == PALE else "#f5edff"
            lines.append(
                f'{self._machine(machine)} [shape=component, style=filled, fillcolor="{fill}", color="{colour}", '
                f'fontcolor="{PALE if colour == PALE else _INK}", fontsize=11, '
                f"tooltip={tooltip(f'the machine {machine}')}, label={quoted(machine)}];"
            )
        lines += [self._arc(arc) for arc in drawing.arcs]
        return lines

    def _state(self, name: str) -> str:
        return f"{self.prefix}s_{identifier(name)}"

    def _cluster(self, phase: str) -> str:
        return f"cluster_{self.prefix}p_{identifier(phase)}"

    def _start(self, node: Node) -> list[str]:
        start, tip = f"{self.prefix}start", 'tooltip="the initial state"'
        return [
            f'{start} [shape=circle, label="", width=0.14, fixedsize=true, fillcolor="{_INK}", {tip}];',
            f"{start} -> {self._state(node.name)} [{tip}];",
        ]

    def _node(self, node: Node) -> list[str]:
        mark = self.overlay.states.get(node.name)
        pale = self.overlay.fade and mark is None
        fill = BUSY if node.outstanding and not pale else QUIET
        attributes = [
            *([f"id={quoted(f'state-{node.name}')}"] if self.names else []),
            f'fillcolor="{mark.colour if mark and mark.colour else fill}"',
            f'color="{PALE if pale else MUTED}"',
            f"tooltip={tooltip(node.meaning or node.name)}",
            *(["peripheries=2"] if node.final else []),
            *(["penwidth=3"] if mark and mark.last else []),
        ]
        return table_label(f"{self._state(node.name)} [{', '.join(attributes)}, label=", self.labels.state(node), "];")

    def _shared_box(self, shared: Shared) -> list[str]:
        colour = self._stroke_colour(FAILURE, self._marked(shared))
        head = f'{self.prefix}f_{shared.id} [color="{colour}", style="rounded,dashed", tooltip={_tip(shared)}'
        return table_label(f"{head}, label=", self.labels.shared(shared), "];")

    def _shared_arrow(self, shared: Shared) -> str:
        # Not inside the phase: an arrow written there would draw its target into the box.
        ends = f"{self.prefix}f_{shared.id} -> {self._state(shared.target)}"
        stroke = self._named(shared.rows, {shared.cause: shared.rows}) + self._stroke(FAILURE, self._marked(shared))
        return f"{ends} [{stroke}, tooltip={_tip(shared)}];"

    def _marked(self, shared: Shared) -> bool:
        return bool(self.overlay.of_rows(shared.rows, shared.cause))

    def _edge(self, edge: Edge) -> list[str]:
        source, target, cut = edge.source, edge.target, ""
        # An arrow of a whole phase is tied to one of its states and cut off at the border of the box.
        if edge.from_phase:
            source, cut = self._middle(edge.source), f", ltail={self._cluster(edge.source)}"
        if edge.to_phase:
            target, cut = self._middle(edge.target), f"{cut}, lhead={self._cluster(edge.target)}"
        # Among pale lines an arrow has the colour of those that are not.
        marked = [line for line in edge.lines if self.labels.line_marks(line)] if self.overlay.fade else []
        kinds = {line.kind for line in marked or edge.lines}
        kind = next(kind for kind in (FAILURE, "wait", "enqueue", "host") if kind in kinds)
        marks = self.labels.edge_marks(edge)
        stroke = self._stroke(kind, bool(marks)) + (", penwidth=3" if any(mark.last for mark in marks) else "")
        rows = sorted({row for line in edge.lines for row in line.rows})
        tip = tooltip(f"{edge.source} to {edge.target}: rows {ranges(rows)}")
        ends = f"{self._state(source)} -> {self._state(target)}"
        causes: dict[str, list[int]] = {}
        for line in edge.lines:
            if line.kind == FAILURE:
                causes.setdefault(line.text, []).extend(line.rows)
        head = f"{ends} [{self._named(rows, causes)}{stroke}{cut}, tooltip={tip}, labeltooltip={tip}, label="
        return table_label(head, [row for line in edge.lines for row in self.labels.line(line)], "];")

    def _named(self, rows: Iterable[int], causes: Mapping[str, Iterable[int]]) -> str:
        """The id of an arrow; ``causes`` are the failures that take it, with the rows that fail so."""
        if self.names is None:
            return ""
        ways = ["-".join((*cause.split(), *map(str, failing))) for cause, failing in causes.items()]
        return f'id="{self.names.of("rows", rows)}", ' + (f'class="{" ".join(("failure", *ways))}", ' if ways else "")

    def _middle(self, phase: str) -> str:
        inside = [node.name for node in self.drawing.nodes if node.phase == phase]
        return inside[len(inside) // 2]

    def _stroke_colour(self, kind: str, marked: bool) -> str:
        return PALE if self.overlay.fade and not marked else STROKE[kind]

    def _stroke(self, kind: str, marked: bool) -> str:
        return f'color="{self._stroke_colour(kind, marked)}"' + (", style=dashed" if kind == FAILURE else "")

    def _couple(self, *sources: str) -> str:
        """The colour of what entering these states does: as pale as all of them are."""
        pale = self.overlay.fade and not any(source in self.overlay.states for source in sources)
        return PALE if pale else COUPLE

    def _machine(self, name: str) -> str:
        return f"{self.prefix}m_{identifier(name)}"

    def _arc(self, arc: Arc) -> str:
        tip = tooltip(f"entering {arc.source} offers {arc.event} to the machine {arc.machine}")
        colour = self._couple(arc.source)
        line = f'style=dotted, color="{colour}", fontcolor="{colour}", fontsize=9, tooltip={tip}, labeltooltip={tip}'
        return f"{self._state(arc.source)} -> {self._machine(arc.machine)} [{line}, label={quoted(arc.event)}];"


def _tip(shared: Shared) -> str:
    return tooltip(f"{shared.cause}: rows {ranges(shared.rows)}, from {', '.join(shared.sources)}")
