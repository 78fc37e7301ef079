"""Records in words, and the two sides of a difference next to each other: plain text, for reports and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen

from context_cache.coordinator.traces.format import Act, CallRecord, StepRecord

if TYPE_CHECKING:
    from context_cache.coordinator.traces.replay import Difference
    from context_cache.coordinator.types import RequestView

__all__ = [
    "LISTED_MAX",
    "Pages",
    "Sides",
    "call_text",
    "difference_text",
    "field_texts",
    "printable",
    "short",
    "sides_of",
    "step_text",
]

LISTED_MAX = 8
"""Longer lists of numbers are shown by their ends."""


def call_text(record: CallRecord) -> str:
    """One line: the call, its request, its arguments and how it ended."""
    fields = msgspec.to_builtins(record)
    name = fields.pop("line")
    request, raised, status = (fields.pop(key, None) for key in ("request", "raised", "status"))
    fields.pop("identity", None)
    shown = ", ".join(f"{key}={short(value)}" for key, value in fields.items() if value not in (None, [], False))
    ended = f" raised {raised}" if raised else f" -> {status}" if status else ""
    return printable(f"{name}{f' of {request}' if request else ''}{f' ({shown})' if shown else ''}{ended}")


def step_text(step: StepRecord) -> str:
    """One line: who went from where to where, by which row, doing what."""
    guards = ", ".join(name if held else f"not {name}" for name, held in step.guards.items())
    did = " / ".join(step.ran)
    bad = "" if step.outcome == "done" else f"  {step.outcome}{f' at {step.failed}' if step.failed else ''}"
    return printable(
        f"{step.machine} {step.subject}: {step.source} --{step.event}{f' [{guards}]' if guards else ''}--> "
        f"{step.target}{f' / {did}' if did else ''}{bad}"
    )


def field_texts(record: StepRecord | CallRecord | None) -> dict[str, str]:
    """The fields that say something, in words."""
    if record is None:
        return {}
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return {name: short(value) for name, value in values.items() if value not in (None, [], {}, "")}


@frozen
class Pages:
    """A request as it was: what it was, a row of words (slot, row, epoch, pages) for each sequence, and how many more
    sequences it had."""

    words: str
    rows: tuple[tuple[str, str, str, str], ...]
    more: int


@frozen
class Sides:
    """A difference in words.

    call: the call. what: which record of it is not as recorded. rows: (field, recorded, now), ``-`` where a side does
    not have it. only: the side that has the record at all, ``recorded`` or ``now``; None: both. before: the request
    before the call.
    """

    call: str
    what: str
    rows: tuple[tuple[str, str, str], ...]
    only: str | None
    before: Pages | None


def sides_of(difference: Difference) -> Sides:
    """What is to be said of a difference, however it is laid out."""
    what = "the call" if difference.step is None else f"step {difference.step}"
    one, other = field_texts(difference.expected), field_texts(difference.actual)
    return Sides(
        f"call {difference.call}: {call_text(difference.record)}",
        f"{what} (line {difference.line}) is not as recorded:",
        tuple((name, one.get(name, "-"), other.get(name, "-")) for name in dict.fromkeys((*one, *other))),
        "now" if difference.expected is None else "recorded" if difference.actual is None else None,
        None if difference.before is None else _pages_of(difference.before),
    )


def _pages_of(view: RequestView) -> Pages:
    shown = list(zip(view.residents, view.base_pages, strict=True))
    return Pages(
        f"before the call: request {view.id} was {view.state} ({view.phase})",
        tuple(
            (str(slot), str(resident.slot), str(resident.epoch), short(list(pages)))
            for slot, (resident, pages) in enumerate(shown[:LISTED_MAX])
        ),
        max(0, len(shown) - LISTED_MAX),
    )


def difference_text(difference: Difference) -> str:
    """The call, the two sides, and the request before the call."""
    sides = sides_of(difference)
    lines = [sides.call, sides.what]
    if sides.only is not None:
        lines.append(f"  only {'recorded' if sides.only == 'recorded' else 'made now'}:")
    for name, left, right in sides.rows:
        if left == right:
            lines.append(f"    {name:8} {left}")
        else:
            lines += [f"  * {name:8} recorded {left}", f"    {'':8} now      {right}"]
    before = sides.before
    if before is not None:
        lines.append(before.words)
        lines += [f"  slot {slot}: row {row}, epoch {epoch}, pages {pages}" for slot, row, epoch, pages in before.rows]
        if before.more:
            lines.append(f"  and {before.more} more sequences")
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would obey instead of show. A trace may come from anywhere."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def short(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, list) and len(value) > LISTED_MAX and all(isinstance(item, int) for item in value):
        return f"{value[0]}, {value[1]}, ... {value[-1]} ({len(value)} in all)"
    if isinstance(value, list):
        return ", ".join(f"({short(item)})" if isinstance(item, dict) else short(item) for item in value) or "-"
    if isinstance(value, Act):
        failed = f" failed: {value.failed}" if value.failed else ""
        return printable(f"{value.verb}{f' {value.digest}' if value.digest else ''}{failed}")
    if isinstance(value, dict):
        return ", ".join(f"{printable(str(key))}={short(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return f"[{', '.join(short(item) for item in value)}]"
    if isinstance(value, msgspec.Struct):
        return short(msgspec.to_builtins(value))
    return printable(str(value))
