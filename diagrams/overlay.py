"""What a run, a coverage count or a diff adds to a picture: marks on rows, failures and states, by number and name.

The drawing stays the one of the table. A renderer takes an overlay as an optional argument, shows a mark beside the row
number or the state's name that it belongs to, and ignores marks for rows and states that the picture does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

__all__ = ["NOTHING", "Mark", "Overlay"]


@frozen
class Mark:
    """What is said of one row, failure or state.

    count:  how often; shown as ``xn``.
    text:   a word or two beside the number or name.
    colour: ``#rrggbb`` for the number's or state's background; empty leaves it as it is.
    last:   this is where things stand: drawn bold.
    number: stands in the place of the row's number, for a row that the table does not have (any more).
    """

    count: int | None = None
    text: str = ""
    colour: str = ""
    last: bool = False
    number: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in ("" if self.count is None else f"x{self.count}", self.text) if part)

    def beside(self, rows: str) -> str:
        """The number of a row, or the range of several, with what is said of it."""
        return f"{self.number or rows} {self}".rstrip()


@frozen
class Overlay:
    """Marks of one picture.

    rows:     by row number.
    states:   by name.
    failures: by (row number, cause), with the causes of ``TableRow.failures``.
    title:    a line under the machine's name.
    fade:     what has no mark is drawn pale.
    """

    rows: Mapping[int, Mark] = field(factory=dict)
    states: Mapping[str, Mark] = field(factory=dict)
    failures: Mapping[tuple[int, str], Mark] = field(factory=dict)
    title: str = ""
    fade: bool = False

    def of_rows(self, rows: Iterable[int], cause: str = "") -> tuple[tuple[int, Mark], ...]:
        """The marked ones among the rows, or among their failures of one cause, in the order given."""
        if cause:
            pairs = ((row, self.failures.get((row, cause))) for row in rows)
        else:
            pairs = ((row, self.rows.get(row)) for row in rows)
        return tuple((row, mark) for row, mark in pairs if mark is not None)


NOTHING = Overlay()
"""No mark at all."""
