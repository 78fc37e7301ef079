"""A recorded call and a recorded step as a person reads them, and the two sides of a difference."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from context_cache.coordinator.traces.format import Act, CallRecord, StepRecord
from context_cache.coordinator.traces.reader import Group
from context_cache.coordinator.traces.replay import Difference
from context_cache.coordinator.types import RequestView

__all__ = ["call_text", "print_call", "print_difference", "step_text"]

_LISTED_MAX = 8


def call_text(record: CallRecord) -> str:
    """One line: the call, its request, its arguments and how it ended."""
    fields = msgspec.to_builtins(record)
    name = fields.pop("line")
    request = fields.pop("request", None)
    raised = fields.pop("raised", None)
    status = fields.pop("status", None)
    fields.pop("identity", None)
    shown = ", ".join(f"{key}={_short(value)}" for key, value in fields.items() if value not in (None, [], False))
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


def print_call(console: Console, group: Group) -> None:
    """A call with its steps."""
    console.print(Text(f"{group.number:>6}  {call_text(group.record)}", style="bold"), soft_wrap=True)
    for found in group.steps():
        style = "" if found.step.outcome == "done" else "red"
        console.print(Text(f"        {found.number:>6}  {step_text(found.step)}", style=style), soft_wrap=True)


def print_difference(console: Console, difference: Difference) -> None:
    """The two sides next to each other, and the request as it was before the call."""
    console.print(Text(f"call {difference.call}: {call_text(difference.record)}", style="bold"), soft_wrap=True)
    what = "the call" if difference.step is None else f"step {difference.step}"
    console.print(f"{what} (line {difference.line}) is not as recorded:")
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "recorded", "now"):
        table.add_column(column, overflow="fold", style="dim" if not column else None)
    one, other = _fields(difference.expected), _fields(difference.actual)
    if difference.expected is None:
        table.add_row("*", "", "no further step", "")
    if difference.actual is None:
        table.add_row("*", "", "", "no further step")
    for name in dict.fromkeys((*one, *other)):
        left, right = one.get(name, "-"), other.get(name, "-")
        differs = left != right
        style = "bold red" if differs else ""
        table.add_row("*" if differs else "", name, Text(left, style=style), Text(right, style=style))
    console.print(table)
    if difference.before is not None:
        _print_request(console, difference.before)


def _print_request(console: Console, view: RequestView) -> None:
    console.print(Text(f"before the call: request {view.id} was {view.state} ({view.phase})", style="bold"))
    table = Table(box=None, pad_edge=False)
    for column in ("slot", "row", "epoch", "pages"):
        table.add_column(column, justify="right" if column != "pages" else "left", overflow="fold")
    shown = list(zip(view.residents, view.base_pages, strict=True))
    for slot, (resident, pages) in enumerate(shown[:_LISTED_MAX]):
        table.add_row(str(slot), str(resident.slot), str(resident.epoch), _short(list(pages)))
    console.print(table)
    if len(shown) > _LISTED_MAX:
        console.print(f"and {len(shown) - _LISTED_MAX} more sequences")


def _fields(record: StepRecord | CallRecord | None) -> dict[str, str]:
    if record is None:
        return {}
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return {name: _short(value) for name, value in values.items() if value not in (None, [], {}, "")}


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > _LISTED_MAX and all(isinstance(item, int) for item in value):
        return f"{value[0]}, {value[1]}, ... {value[-1]} ({len(value)} in all)"
    if isinstance(value, list):
        return ", ".join(f"({_short(item)})" if isinstance(item, dict) else _short(item) for item in value) or "-"
    if isinstance(value, Act):
        failed = f" failed: {value.failed}" if value.failed else ""
        return f"{value.verb}{f' {value.digest}' if value.digest else ''}{failed}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_short(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return f"[{', '.join(_short(item) for item in value)}]"
    if isinstance(value, msgspec.Struct):
        return _short(msgspec.to_builtins(value))
    return str(value)
