"""Names and texts in a picture: whatever a label holds is shown as it is and never becomes markup or an attribute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = [
    "FONT",
    "Names",
    "cell",
    "escaped",
    "font",
    "identifier",
    "printable",
    "quoted",
    "ranges",
    "table_label",
    "tooltip",
]

FONT: Final = "Helvetica"
"""The only sans serif that both engines measure without looking for it on the machine."""

_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
# The engines expand \\N, \\G and the like in every label, also in HTML-like ones, and twice in the tooltip of a node.
_IN_LABELS: Final = {**_ENTITIES, "\\": "&#92;&#92;"}
_IN_TOOLTIPS: Final = {**_ENTITIES, "\\": "&#92;&#92;&#92;&#92;", "\n": "\\n"}


def printable(text: str) -> str:
    """``text`` with what no XML document may hold, and no terminal should get, replaced by something visible."""
    return "".join(_visible(c) for c in text)


def _visible(c: str) -> str:
    code = ord(c)
    if c in "\n\t":
        return c
    if code < 0x20 or code == 0x7F:
        # Control characters have pictures of their own in Unicode.
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    return "\ufffd" if 0x80 <= code < 0xA0 or 0xD800 <= code <= 0xDFFF or code & 0xFFFE == 0xFFFE else c


def escaped(text: str) -> str:
    """``text`` inside an HTML-like label."""
    return "".join("<BR/>" if c == "\n" else _IN_LABELS.get(c, c) for c in printable(text))


def quoted(text: str) -> str:
    """``text`` as the plain label of something, in DOT's quotes."""
    return '"' + "".join("\\n" if c == "\n" else _IN_LABELS.get(c, c) for c in printable(text)) + '"'


def tooltip(text: str) -> str:
    """``text`` as a tooltip, in DOT's quotes."""
    return '"' + "".join(_IN_TOOLTIPS.get(c, c) for c in printable(text)) + '"'


def identifier(name: str) -> str:
    """An identifier that two names never share, whatever they hold; letters and digits are kept."""
    # Underscores are spelled too, so that two names can never meet in one identifier.
    return "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in name)


class Names:
    """Ids of one picture, each given once: what it is, the rows that it stands for, and a number of its own."""

    def __init__(self) -> None:
        self._given = 0

    def of(self, what: str, rows: Iterable[int], mark: str = "") -> str:
        """``what-3-7--mark1``."""
        self._given += 1
        return f"{what}-{'-'.join(map(str, rows))}--{mark}{self._given}"


def font(markup: str, *, size: int | None = None, colour: str | None = None) -> str:
    """A font around ready markup; empty markup stays empty, which the engines insist on."""
    attributes = f' POINT-SIZE="{size}"' if size else ""
    attributes += f' COLOR="{colour}"' if colour else ""
    return f"<FONT{attributes}>{markup}</FONT>" if markup and attributes else markup


def cell(markup: str, *, span: int = 1) -> str:
    """A table row of one cell."""
    columns = f' COLSPAN="{span}"' if span > 1 else ""
    return f"<TR><TD{columns}>{markup}</TD></TR>"


def table_label(before: str, rows: Iterable[str], after: str) -> list[str]:
    """A statement with a table as its label, one table row a line, so that a changed row changes one line."""
    return [f'{before}<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="1" CELLPADDING="1">', *rows, f"</TABLE>>{after}"]


def ranges(numbers: Iterable[int]) -> str:
    """``1, 2, 3, 7`` as ``1-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
