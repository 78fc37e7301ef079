"""A recorded call and a recorded step as a person reads them, and the two sides of a difference."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from context_cache.coordinator.traces.describe import Pages, call_text, sides_of, step_text
from context_cache.coordinator.traces.reader import Group
from context_cache.coordinator.traces.replay import Difference

__all__ = ["print_call", "print_difference"]


def print_call(console: Console, group: Group) -> None:
    """A call with its steps."""
    console.print(Text(f"{group.number:>6}  {call_text(group.record)}", style="bold"), soft_wrap=True)
    for found in group.steps():
        style = "" if found.step.outcome == "done" else "red"
        console.print(Text(f"        {found.number:>6}  {step_text(found.step)}", style=style), soft_wrap=True)


def print_difference(console: Console, difference: Difference) -> None:
    """The two sides next to each other, and the request as it was before the call."""
    sides = sides_of(difference)
    console.print(Text(sides.call, style="bold"), soft_wrap=True)
    console.print(sides.what)
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "recorded", "now"):
        table.add_column(column, overflow="fold", style="dim" if not column else None)
    if sides.only == "now":
        table.add_row("*", "", "no further step", "")
    if sides.only == "recorded":
        table.add_row("*", "", "", "no further step")
    for name, left, right in sides.rows:
        differs = left != right
        style = "bold red" if differs else ""
        table.add_row("*" if differs else "", name, Text(left, style=style), Text(right, style=style))
    console.print(table)
    if sides.before is not None:
        _print_request(console, sides.before)


def _print_request(console: Console, before: Pages) -> None:
    console.print(Text(before.words, style="bold"))
    table = Table(box=None, pad_edge=False)
    for column in ("slot", "row", "epoch", "pages"):
        table.add_column(column, justify="right" if column != "pages" else "left", overflow="fold")
    for row in before.rows:
        table.add_row(*row)
    console.print(table)
    if before.more:
        console.print(f"and {before.more} more sequences")
