"""A recorded call and a recorded step as a person reads them, and the two sides of a difference."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from context_cache.coordinator.traces.describe import LISTED_MAX, call_text, field_texts, short, step_text
from context_cache.coordinator.traces.reader import Group
from context_cache.coordinator.traces.replay import Difference
from context_cache.coordinator.types import RequestView

__all__ = ["print_call", "print_difference"]

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
    one, other = field_texts(difference.expected), field_texts(difference.actual)
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
    for slot, (resident, pages) in enumerate(shown[:LISTED_MAX]):
        table.add_row(str(slot), str(resident.slot), str(resident.epoch), short(list(pages)))
    console.print(table)
    if len(shown) > LISTED_MAX:
        console.print(f"and {len(shown) - LISTED_MAX} more sequences")
