"""What a picture says in words: the boxes of states, the lines of arrows, the legend; and the colours for them.

A row's number stands on the colour of what the row asks of the device. An overlay's marks stand beside the numbers and
names that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Final

from context_cache.diagrams.drawing import FAILURE, Drawing, Edge, Line, Node, Shared
from context_cache.diagrams.markup import Names, cell, escaped, font, ranges
from context_cache.diagrams.overlay import Mark, Overlay
from context_cache.diagrams.table import Step

__all__ = ["BUSY", "COUPLE", "MUTED", "PALE", "QUIET", "STROKE", "Labels"]

MUTED: Final = "#57606a"
PALE: Final = "#afb8c1"
BUSY: Final = "#fff8dc"
"""A state with device work outstanding."""
QUIET: Final = "#ffffff"
COUPLE: Final = "#8250df"
STROKE: Final = {"host": "#57606a", "enqueue": "#0969da", "wait": "#bc4c00", FAILURE: "#cf222e"}
_BADGE: Final = {"host": "#eaeef2", "enqueue": "#cfe4fb", "wait": "#ffd8a8", FAILURE: "#ffdcd9"}
_STEP: Final = {
    "host": "#24292f",
    "publish": "#24292f",
    "enqueue": "#0550ae",
    "clear": "#0550ae",
    "wait": "#953800",
    "couple": COUPLE,
}
_SHORT: Final = 2
"""So many steps stand behind the event; more begin a line of their own."""
_WIDTH: Final = 48
_ENDED: Final = {"by_runtime_sync": "runtime has synchronised", "drained": "drained"}
"""How the device work of a row ended, in words."""
_KINDS: Final = (
    ("host", "host only"),
    ("enqueue", "enqueues device work"),
    ("wait", "waits for the device"),
    (FAILURE, "only after an error, dashed"),
)


class Labels:
    """The rows of the label tables of one drawing under one overlay; ``names``: for labels that can be found."""

    def __init__(self, drawing: Drawing, overlay: Overlay, names: Names | None = None) -> None:
        self.drawing, self.overlay, self.names = drawing, overlay, names

    def state(self, node: Node) -> list[str]:
        """Name, what is held, what entering does, and the rows that stay."""
        mark = self.overlay.states.get(node.name)
        pale = self.overlay.fade and mark is None
        muted = _ink(MUTED, pale)
        said = f" {mark}" if mark and str(mark) else ""
        name = font(f"<B>{escaped(node.name)}</B>{escaped(said)}", size=11)
        if node.region not in ("", node.name):
            name += font(f" {escaped(node.region)}", colour=muted)
        rows = [cell(name, span=2)]
        busy = "work outstanding" if node.outstanding else node.partly
        held = " · ".join(part for part in (node.holds, busy) if part)
        if held:
            rows.append(cell(font(escaped(held), size=9, colour=muted), span=2))
        inside = []
        if node.entry:
            entry = font("entry / ", colour=muted) + _steps(node.entry, pale=pale)
            inside.append(cell(font(entry, colour=_ink(None, pale)), span=2))
        inside += [row for line in node.lines for row in self.line(line, state=node.name)]
        return [*rows, "<HR/>", *inside] if inside else rows

    def shared(self, shared: Shared) -> list[str]:
        """The small box of a failure that several states have in common."""
        marks = dict(self.overlay.of_rows(shared.rows, shared.cause))
        colour = _ink(STROKE[FAILURE], self.overlay.fade and not marks)
        rows = [cell(font("<BR/>".join((escaped(shared.cause), shared.share)), size=9, colour=colour))]
        groups: dict[str, list[int]] = {}
        for row in marks:
            groups.setdefault(marks[row].colour, []).append(row)
        for background, marked in groups.items():
            # Red words on a mark that is red could not be read.
            text = font(escaped(_badge(marked, marks)), size=9, colour=None if background else colour)
            rows.append(f'<TR><TD BGCOLOR="{background}">{text}</TD></TR>' if background else cell(text))
        return rows

    def line(self, line: Line, *, state: str = "") -> list[str]:
        """Row numbers, event, guards and steps; ``state`` is the one whose box the line stands in.

        One table row, or several where the overlay has different colours for the rows of the line, or none for some.
        """
        table_rows = []
        for background, pale, rows, badge in self._badges(line.rows, dict(self.marks(line)), line.kind):
            words = self._words(line, state, pale)
            name = "" if self.names is None else self._name(self.names, line, rows)
            table_rows.append(_badged(badge, words, background, pale, name))
        for cause in dict.fromkeys(also.cause for also in line.also):
            marks = dict(self.overlay.of_rows(line.rows, cause))
            words = font(f"{escaped(cause)}: the same way", colour=STROKE[FAILURE])
            for background, pale, _, badge in self._badges(marks, marks, FAILURE):
                table_rows.append(_badged(badge, words, background, pale))
        return table_rows

    def _badges(
        self, rows: Iterable[int], marks: Mapping[int, Mark], kind: str
    ) -> Iterator[tuple[str, bool, list[int], str]]:
        """(background, pale, rows, text) for the rows of a line that look alike."""
        groups: dict[tuple[str, bool], list[int]] = {}
        for row in rows:
            pale = self.overlay.fade and row not in marks
            groups.setdefault((marks[row].colour if row in marks else "", pale), []).append(row)
        for (colour, pale), alike in groups.items():
            yield colour or (QUIET if pale else _BADGE[kind]), pale, alike, _badge(alike, marks)

    def _name(self, names: Names, line: Line, rows: list[int]) -> str:
        # A cell gets a group with its id only if it looks like a link, and a target without an address leads nowhere.
        mark = "-".join(("failure", *line.text.split(), "")) if line.kind == FAILURE else ""
        return f' ID="{names.of("label", rows, mark)}" TARGET="_self"'

    def _words(self, line: Line, state: str, pale: bool) -> str:
        red = _ink(STROKE[FAILURE], pale)
        if line.kind == FAILURE:
            words = font(escaped(line.text), colour=red)
        else:
            words = font(f"<B>{escaped(line.text)}</B>", colour=_ink(None, pale))
        if line.guards:
            words += font(f" [{escaped(', '.join(line.guards))}]", colour=_ink(MUTED, pale))
        if line.to:
            where = ": stays" if line.to == state else f" → {escaped(line.to)}"
            words += font(where, colour=red if line.kind == FAILURE else _ink(None, pale))
        if line.ended:
            words += font(f" ({escaped(_ENDED.get(line.ended, line.ended))})", colour=_ink(MUTED, pale))
        for cause, steps in dict.fromkeys((also.cause, also.steps) for also in line.also):
            faded = self.overlay.fade and not self.overlay.of_rows(line.rows, cause)
            after = self._named(steps, faded) if steps else ""
            words += font(f" (also if {escaped(cause)}{after})", colour=_ink(STROKE[FAILURE], faded))
        if line.steps:
            words += self._run(line.steps, pale)
        if line.sources:
            words += font(_from(line.sources), colour=_ink(MUTED, pale))
        return words

    def marks(self, line: Line) -> tuple[tuple[int, Mark], ...]:
        """The overlay's marks for the rows of a line."""
        return self.overlay.of_rows(line.rows, line.text if line.kind == FAILURE else "")

    def edge_marks(self, edge: Edge) -> list[Mark]:
        """The overlay's marks for the lines of an arrow."""
        return [mark for line in edge.lines for mark in self.line_marks(line)]

    def line_marks(self, line: Line) -> list[Mark]:
        """The overlay's marks for the rows of a line and for the failures that it names."""
        places = [(line.rows, cause) for cause in dict.fromkeys(also.cause for also in line.also)]
        also = [mark for rows, cause in places for _, mark in self.overlay.of_rows(rows, cause)]
        return [*(mark for _, mark in self.marks(line)), *also]

    def legend(self) -> list[str]:
        """The machine's name, what the colours mean, and the lists of steps that letters stand for."""
        drawing = self.drawing
        title = font(f"<B>{escaped(drawing.name)}</B>", size=14)
        if drawing.note:
            title += font(f" {escaped(drawing.note)}", size=9, colour=MUTED)
        rows = [cell(title)]
        if self.overlay.title:
            rows.append(cell(font(escaped(self.overlay.title), size=11)))
        used = {line.kind for line in drawing.lines}
        if used <= {"host", FAILURE} and not any(line.steps for line in drawing.lines):
            # Where no row has steps, there is nothing to say about what they ask of the device.
            used -= {"host"}
        used |= {FAILURE for _ in drawing.shared}
        samples = [(_BADGE[kind], text) for kind, text in _KINDS if kind in used]
        if any(node.outstanding for node in drawing.nodes):
            samples.append((BUSY, "state with device work outstanding"))
        boxes = "".join(f'<TD BGCOLOR="{colour}">{font(text, size=9)}</TD>' for colour, text in samples)
        if boxes:
            rows.append(_nested(f"<TR>{boxes}</TR>", spacing=4, padding=3))
        if drawing.keys:
            rows += ["<HR/>", _nested("\n".join(["", *self._key(), ""]))]
        return rows

    def _key(self) -> list[str]:
        """What the letters stand for, in two columns that are read downwards."""
        cells = [
            f'<TD><B>{letter}</B></TD><TD ALIGN="LEFT">{_steps(run)}</TD>' for run, letter in self.drawing.keys.items()
        ]
        half = (len(cells) + 1) // 2
        pairs = zip_longest(cells[:half], cells[half:], fillvalue="<TD></TD><TD></TD>")
        return [f"<TR>{left}{right}</TR>" for left, right in pairs]

    def _run(self, steps: tuple[Step, ...], pale: bool) -> str:
        if steps in self.drawing.keys or len(steps) <= _SHORT:
            return font(self._named(steps, pale), colour=_ink(None, pale))
        lines = f'<BR ALIGN="LEFT"/>/ {_steps(steps, pale=pale, width=_WIDTH)}'
        return font(f'{lines}<BR ALIGN="LEFT"/>', colour=_ink(None, pale))

    def _named(self, steps: tuple[Step, ...], pale: bool) -> str:
        keys = self.drawing.keys
        return f" / {f'<B>{keys[steps]}</B>' if steps in keys else _steps(steps, pale=pale)}"


def _ink(colour: str | None, pale: bool) -> str | None:
    return PALE if pale else colour


def _badged(badge: str, words: str, background: str, pale: bool, name: str = "") -> str:
    number = font(escaped(badge), colour=_ink(None, pale))
    return f'<TR><TD{name} BGCOLOR="{background}">{number}</TD><TD ALIGN="LEFT">{words}</TD></TR>'


def _badge(rows: Iterable[int], marks: Mapping[int, Mark]) -> str:
    """Row numbers with what is said of them; rows of which the same is said, and nothing counted, share a range."""
    parts: list[tuple[Mark | None, list[int]]] = []
    for row in rows:
        mark = marks.get(row)
        if parts and _shares(parts[-1][0], mark):
            parts[-1][1].append(row)
        else:
            parts.append((mark, [row]))
    return ", ".join(ranges(alike) if mark is None else mark.beside(ranges(alike)) for mark, alike in parts)


def _shares(one: Mark | None, other: Mark | None) -> bool:
    """Whether two rows beside each other need no words of their own."""
    marks = [mark for mark in (one, other) if mark is not None]
    if any(mark.number or mark.count is not None for mark in marks):
        return False
    return str(one or "") == str(other or "")


def _from(states: Iterable[str]) -> str:
    """The states of a phase that a line is about, on lines of their own."""
    text, used = '<BR ALIGN="LEFT"/>from ', 0
    for at, name in enumerate(states):
        if at:
            text += ", "
        if used > _WIDTH:
            text, used = f'{text}<BR ALIGN="LEFT"/>', 0
        text += escaped(name)
        used += len(name) + 2
    return f'{text}<BR ALIGN="LEFT"/>'


def _steps(steps: Iterable[Step], *, pale: bool = False, width: int | None = None) -> str:
    """The names in order; after ``width`` characters a new line begins: wide labels make wide pictures."""
    text, used = "", 0
    for step in steps:
        if text:
            text += " / "
        if width is not None and used > width:
            text, used = f'{text}<BR ALIGN="LEFT"/>', 0
        text += font(escaped(step.name), colour=_ink(_STEP[step.kind], pale))
        used += len(step.name) + 3
    return text


def _nested(rows: str, *, spacing: int = 1, padding: int = 1) -> str:
    return cell(f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="{spacing}" CELLPADDING="{padding}">{rows}</TABLE>')
