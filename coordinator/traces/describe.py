"""Records in words, and the two sides of a difference next to each other: plain text, for reports and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from context_cache.coordinator.traces.format import Act, CallRecord, StepRecord

if TYPE_CHECKING:
    from context_cache.coordinator.traces.replay import Difference
    from context_cache.coordinator.types import RequestView

__all__ = ["LISTED_MAX", "call_text", "difference_text", "field_texts", "short", "step_text"]

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
    return f"{name}{f' of {request}' if request else ''}{f' ({shown})' if shown else ''}{ended}"


def step_text(step: StepRecord) -> str:
    """One line: who went from where to where, by which row, doing what."""
    guards = ", ".join(name if held else f"not {name}" for name, held in step.guards.items())
    did = " / ".join(step.ran)
    bad = "" if step.outcome == "done" else f"  {step.outcome}{f' at {step.failed}' if step.failed else ''}"
    return (
        f"{step.machine} {step.subject}: {step.source} --{step.event}{f' [{guards}]' if guards else ''}--> "
        f"{step.target}{f' / {did}' if did else ''}{bad}"
    )


def field_texts(record: StepRecord | CallRecord | None) -> dict[str, str]:
    """The fields that say something, in words."""
    if record is None:
        return {}
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return {name: short(value) for name, value in values.items() if value not in (None, [], {}, "")}


def difference_text(difference: Difference) -> str:
    """The call, the two sides, and the request before the call."""
    what = "the call" if difference.step is None else f"step {difference.step}"
    lines = [
        f"call {difference.call}: {call_text(difference.record)}",
        f"{what} (line {difference.line}) is not as recorded:",
    ]
    one, other = field_texts(difference.expected), field_texts(difference.actual)
    if difference.expected is None or difference.actual is None:
        there = "recorded" if difference.actual is None else "made now"
        lines.append(f"  only {there}:")
    for name in dict.fromkeys((*one, *other)):
        left, right = one.get(name, "-"), other.get(name, "-")
        if left == right:
            lines.append(f"    {name:8} {left}")
        else:
            lines += [f"  * {name:8} recorded {left}", f"    {'':8} now      {right}"]
    if difference.before is not None:
        lines += request_lines(difference.before)
    return "\n".join(lines)


def request_lines(view: RequestView) -> list[str]:
    """A request, its rows and pages."""
    lines = [f"before the call: request {view.id} was {view.state} ({view.phase})"]
    for slot, (resident, pages) in enumerate(zip(view.residents, view.base_pages, strict=True)):
        if slot == LISTED_MAX:
            lines.append(f"  and {len(view.residents) - slot} more sequences")
            break
        lines.append(f"  slot {slot}: row {resident.slot}, epoch {resident.epoch}, pages {short(list(pages))}")
    return lines


def short(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, list) and len(value) > LISTED_MAX and all(isinstance(item, int) for item in value):
        return f"{value[0]}, {value[1]}, ... {value[-1]} ({len(value)} in all)"
    if isinstance(value, list):
        return ", ".join(f"({short(item)})" if isinstance(item, dict) else short(item) for item in value) or "-"
    if isinstance(value, Act):
        failed = f" failed: {value.failed}" if value.failed else ""
        return f"{value.verb}{f' {value.digest}' if value.digest else ''}{failed}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={short(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return f"[{', '.join(short(item) for item in value)}]"
    if isinstance(value, msgspec.Struct):
        return short(msgspec.to_builtins(value))
    return str(value)
