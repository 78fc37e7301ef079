"""``context-cache diff``: what changed in the lifecycles, as text for a commit message and as one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from context_cache.coordinator.cli.drawing import ENGINES

if TYPE_CHECKING:
    from context_cache.coordinator.cli.revisions import Side
    from context_cache.diagrams.changes import MachineChange

__all__ = ["diff_command"]

_SUFFIXES: Final = ("dot", "svg", "png", "pdf")


def diff_command() -> click.Command:
    """The command; built on demand so that ``--help`` of the others need not import it."""
    return _diff


@click.command("diff")
@click.argument("old", default="HEAD")
@click.argument("new", required=False)
@click.option("-o", "--output", metavar="FILE",
              help="Also draw it: added green, removed red, changed yellow. The suffix is the format: dot, svg, png or "
              "pdf.")
@click.option("--engine", type=click.Choice(ENGINES), help="What lays the picture out; see draw.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def _diff(old: str, new: str | None, output: str | None, engine: str | None, as_json: bool) -> None:
    """Compare the lifecycle tables of OLD and NEW: git revisions, or JSON files from `draw --format json`.

    Without NEW the files of the working tree are compared (diagrams/rendered/*.json), and without OLD the commit that
    is checked out. Rows are matched by state, event and guards, so an inserted row is one added row; the order of rows
    is no difference, and how states are described is called wording. Exit 0 if nothing differs, 1 if something does,
    2 if a side cannot be read.

    \b
    Examples:
      context-cache diff main
      context-cache diff main~3 main -o changes.svg
      context-cache diff old/request.json diagrams/rendered/request.json
    """
    from context_cache.coordinator.cli.app import Unusable
    from context_cache.coordinator.cli.arguments import check_inputs, check_output
    from context_cache.coordinator.cli.output import CannotWrite, write_file
    from context_cache.coordinator.cli.revisions import SideError, read_side
    from context_cache.diagrams.change_pages import changes_dot, changes_text
    from context_cache.diagrams.engines import DrawingFailed, EngineMissing, render
    from context_cache.diagrams.table import TableError

    format = Path(output).suffix.removeprefix(".") if output is not None else ""
    if output is not None and format not in _SUFFIXES:
        raise Unusable(f"-o {output}: the format is the suffix of the name; choose one of .{', .'.join(_SUFFIXES)}")
    files = [name for name in (old, new) if name is not None and name.endswith(".json")]
    check_inputs(*files, advice="name two tables or two revisions")
    if output is not None:
        check_output(output, "-o", files, makes_folders=True)
    try:
        sides = read_side(old), read_side(new)
        changes = _compare(*sides)
        title = f"{sides[0].title} to {sides[1].title}"
        if output is not None and changes:
            dot = changes_dot(changes, title)
            write_file(Path(output), dot.encode() if format == "dot" else render(dot, format, engine))
    except (SideError, TableError, EngineMissing, DrawingFailed, CannotWrite) as error:
        raise Unusable(str(error)) from None
    if as_json:
        click.echo(json.dumps(_plain(changes, sides)))
    else:
        click.echo(changes_text(changes) if changes else f"no difference from {title}")
    if output is not None and not changes:
        click.echo(f"context-cache: nothing differs, so {output} was not written", err=True)
    if changes:
        click.get_current_context().exit(1)


def _compare(old: Side, new: Side) -> tuple[MachineChange, ...]:
    from context_cache.diagrams.changes import compare, compare_all

    if old.file and new.file:
        # One machine each, whatever they are called: a new name is a change of it.
        (before,), (after,) = old.tables.values(), new.tables.values()
        change = compare(before, after)
        return () if change.kind == "same" else (change,)
    before_tables, after_tables = old.tables, new.tables
    for side in (old, new):
        if side.file:
            before_tables = {name: table for name, table in before_tables.items() if name in side.tables}
            after_tables = {name: table for name, table in after_tables.items() if name in side.tables}
    return compare_all(before_tables, after_tables)


def _plain(changes: Sequence[MachineChange], sides: tuple[Side, Side]) -> dict[str, Any]:
    """``behaviour`` is false when only wording differs."""
    return {
        "old": sides[0].title,
        "new": sides[1].title,
        "different": bool(changes),
        "behaviour": any(change.kind != "wording" for change in changes),
        "machines": [_plain_machine(change) for change in changes],
    }


def _plain_machine(change: MachineChange) -> dict[str, Any]:
    from attrs import asdict

    return {
        "name": change.name,
        "is": change.kind,
        "changed": list(change.said),
        "states_added": [state.name for state in change.states_added],
        "states_removed": [state.name for state in change.states_removed],
        "states_changed": [
            {"name": state.new.name, "changed": list(state.said)} for state in change.states_changed if state.said
        ],
        "rows_added": [asdict(row) for row in change.rows_added],
        "rows_removed": [asdict(row) for row in change.rows_removed],
        "rows_changed": [
            {"row": pair.new.row, "was_row": pair.old.row, "event": pair.new.event, "source": pair.new.source,
             "changed": list(pair.said)}
            for pair in change.rows_changed
        ],
        "wording": [
            {"name": state.new.name, "changed": list(state.wording)} for state in change.states_changed if state.wording
        ],
    }  # fmt: skip
