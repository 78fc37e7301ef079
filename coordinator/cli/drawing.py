"""``context-cache draw``: the lifecycles as pictures and tables, and the check of the committed ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from attrs import evolve

if TYPE_CHECKING:
    from context_cache.diagrams import Overlay

__all__ = ["ENGINES", "draw_command"]

ENGINES: Final = ("pure", "dot")
"""What can be asked to lay a picture out; said here for `--help`, which loads no diagrams."""

_STATE_FORMATS: Final = {
    "--around": ("dot", "svg", "png", "pdf", "mermaid"),
    "--state": ("dot", "svg", "png", "pdf"),
}
"""The formats that an option about one state has a meaning for: a table is always whole."""


def draw_command() -> click.Command:
    """The command; built on demand so that ``--help`` of the others need not import it."""
    return _draw


@click.command("draw")
@click.argument("machines", nargs=-1, metavar="[MACHINE]...")
@click.option("-o", "--output", metavar="DIR",
              help="Folder to write to; it is made if need be. - is standard output, for one picture.  [default: .]")
@click.option("--format", "formats", multiple=True, metavar="FORMAT",
              help="dot, svg, png, pdf, mermaid, markdown or json; may be given several times.  [default: dot, json, "
              "svg]")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False),
              help="Write one page with the machines and, with --trace, a recorded run to step through; it opens from "
              "disk.")
@click.option("--around", metavar="STATE", help="Only this state and the rows that lead to or from it, in full.")
@click.option("--state", "highlight", metavar="STATE", help="Highlight this state.")
@click.option("--trace", metavar="FILE", type=click.Path(dir_okay=False),
              help="Lay a recorded trace over the pictures: counts, refusals, where things stood, median durations.")
@click.option("--request", metavar="ID", help="With --trace: only this request, with the numbers of its steps.")
@click.option("--step", type=click.IntRange(1), metavar="N", help="With --trace: only the steps up to this one.")
@click.option("--coverage", metavar="FILE", type=click.Path(dir_okay=False),
              help="Paint what was never taken red: a trace, or what pytest --lifecycle-coverage-file=FILE wrote.")
@click.option("--engine", type=click.Choice(ENGINES),
              help="What lays pictures out: graphviz-pure, which comes with the extra draw, or the system's dot.  "
              "[default: pure where it is installed]")
@click.option("--check", is_flag=True,
              help="Write nothing; exit 1 if the committed pictures in DIR differ from the tables.  [default: "
              "diagrams/rendered]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")  # fmt: skip
def _draw(
    machines: tuple[str, ...],
    output: str | None,
    formats: tuple[str, ...],
    html: str | None,
    around: str | None,
    highlight: str | None,
    trace: str | None,
    request: str | None,
    step: int | None,
    coverage: str | None,
    engine: str | None,
    check: bool,
    as_json: bool,
) -> None:
    """Draw lifecycles from their tables: MACHINE is one of request, sequence, capture, coordinator, execution, view,
    request-phases or overview (default: all). Nothing has to run for it.

    Files are named after the picture and its format. They are written whole, and all of them or none.

    \b
    Examples:
      context-cache draw -o pictures --format svg --format png
      context-cache draw request --around settled --format pdf
      context-cache draw request --format mermaid -o -
      context-cache draw request --trace t.jsonl --request r3 --format svg
      context-cache draw --coverage coverage.json --format png
      context-cache draw --html explorer.html --trace t.jsonl
      context-cache draw --check
    """
    from context_cache.coordinator.cli.app import DoesNotHold, Unusable
    from context_cache.coordinator.cli.arguments import check_inputs, check_output
    from context_cache.coordinator.cli.output import CannotWrite, write_files
    from context_cache.coordinator.cli.progress import LateProgress
    from context_cache.diagrams.engines import DrawingFailed, EngineMissing
    from context_cache.diagrams.pictures import PictureError, picture

    if check:
        if machines or formats or html or around or highlight or trace or request or step or coverage or engine:
            raise Unusable("--check looks at all committed pictures; leave MACHINE and all options but -o away")
        folder = _committed_folder(output)
        stale, elsewhere = _stale(folder)
        if as_json:
            listed = [{"file": file, "is": what} for file, what in stale]
            click.echo(json.dumps({"folder": str(folder), "stale": listed, "not_compared_to_the_byte": elsewhere}))
        elif not stale:
            click.echo(f"{folder}: every picture is what its table says{_but(elsewhere)}")
        if stale:
            names = ", ".join(f"{file} ({what})" for file, what in stale)
            delete = "delete what is left over and " if any(what == "left over" for _, what in stale) else ""
            raise DoesNotHold(f"{folder} differs from the tables: {names}; {delete}run: {_redraw(folder)}")
        return

    if html is not None:
        if output or formats or around or highlight or request or step or coverage:
            raise Unusable("--html writes one page; leave all options but --trace, --engine and --json away")
        if trace is not None:
            check_inputs(trace, option="--trace", advice="name another file")
        _write_html(html, machines, trace, engine)
        click.echo(json.dumps({"written": [html]}) if as_json else html)
        return

    overlays = _overlays(trace, request, step, coverage)
    try:
        if overlays:
            _can_be_marked(machines, formats, overlays)
            machines, formats = machines or tuple(overlays), formats or ("svg",)
        wanted = _wanted(machines, formats, around, highlight)
        made: list[tuple[str, bytes]] = []
        with LateProgress("pictures", len(wanted)) as progress:
            for name, format in wanted:
                overlay = _overlay(overlays.get(name), highlight)
                content = picture(name, format, around=around, overlay=overlay, engine=engine)
                made.append((_file(name, format, around, highlight), content))
                progress(len(made))
    except (PictureError, EngineMissing, DrawingFailed) as error:
        raise Unusable(str(error)) from None
    if output == "-":
        if len(made) != 1 or as_json:
            raise Unusable(
                f"standard output takes one picture and this makes {len(made)}; name one MACHINE and one --format, "
                "without --json"
            )
        click.echo(made[0][1], nl=False)
        return
    paths = [Path(output or ".") / file for file, _ in made]
    for path in paths:
        check_output(str(path), "-o", [name for name in (trace, coverage) if name is not None], makes_folders=True)
    try:
        write_files(dict(zip(paths, (content for _, content in made), strict=True)))
    except CannotWrite as error:
        raise Unusable(str(error)) from None
    if as_json:
        click.echo(json.dumps({"written": [str(path) for path in paths]}))
    else:
        for path in paths:
            click.echo(path)


def _write_html(html: str, machines: Sequence[str], trace: str | None, engine: str | None) -> None:
    from context_cache.coordinator.cli.app import Unusable
    from context_cache.coordinator.cli.exploring import CannotExplore, write_html
    from context_cache.diagrams.engines import DrawingFailed, EngineMissing

    try:
        write_html(html, machines, None if trace is None else Path(trace), engine=engine)
    except (CannotExplore, DrawingFailed, EngineMissing) as error:
        raise Unusable(str(error)) from None


def _committed_folder(output: str | None) -> Path:
    """What ``--check`` looks at: DIR, else the checkout that one stands in, else what was installed."""
    from context_cache.coordinator.cli.app import Unusable

    if output is None:
        here = Path("diagrams", "rendered")
        if here.is_dir():
            return here
        import context_cache.diagrams

        return Path(context_cache.diagrams.__file__).parent / "rendered"
    folder = Path(output)
    if not folder.is_dir():
        raise Unusable(f"{output} is no folder; name the one with the committed pictures, usually diagrams/rendered")
    return folder


def _redraw(folder: Path) -> str:
    """What makes the committed pictures again; in a checkout there is a page beside them, made by the same command."""
    here = Path("dev").is_file() and folder.resolve() == Path("diagrams", "rendered").resolve()
    return "./dev draw" if here else f"context-cache draw -o {folder}"


def _but(elsewhere: int) -> str:
    if not elsewhere:
        return ""
    which = "1 SVG names its text and was" if elsewhere == 1 else f"{elsewhere} SVGs name their text and were"
    return f"; {which} not compared to the byte, for the graphviz-pure that drew them is not installed"


def _stale(folder: Path) -> tuple[list[tuple[str, str]], int]:
    from context_cache.coordinator.cli.app import Unusable
    from context_cache.diagrams.pictures import drawn_elsewhere, stale_files

    try:
        return stale_files(folder), drawn_elsewhere(folder)
    except OSError as error:
        raise Unusable(f"{error.filename or folder} cannot be read ({error.strerror}); make it readable") from None


def _wanted(
    machines: Sequence[str], formats: Sequence[str], around: str | None, highlight: str | None
) -> list[tuple[str, str]]:
    """(picture, format) pairs in the order asked for; raises PictureError for what does not exist."""
    from context_cache.diagrams.pictures import COMMITTED, FORMATS, NAMES, PictureError, formats_of

    _known("format", formats, FORMATS)
    _known("machine or picture", machines, NAMES)
    names = tuple(dict.fromkeys(machines)) or NAMES
    able: tuple[str, ...] = FORMATS
    for option, state in (("--around", around), ("--state", highlight)):
        if state is not None:
            names = _with_state(names, state, option)
            able = _STATE_FORMATS[option]
            for format in formats:
                if format not in able:
                    raise PictureError(f"{option} changes no {format}; choose from {', '.join(able)}")
    for name in machines:
        for format in formats:
            if format not in formats_of(name):
                raise PictureError(f"{name} is not drawn as {format}; choose from {', '.join(formats_of(name))}")
    chosen = tuple(dict.fromkeys(formats)) or tuple(format for format in COMMITTED if format in able)
    return [(name, format) for name in names for format in chosen if format in formats_of(name)]


def _known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    from context_cache.diagrams.pictures import PictureError

    for word in given:
        if word not in known:
            raise PictureError(f"there is no {what} {word!r}; choose from {', '.join(known)}")


def _with_state(names: Sequence[str], state: str, option: str) -> tuple[str, ...]:
    """Those of the pictures that are machines with such a state."""
    from context_cache.diagrams.pictures import MACHINES, PictureError

    machines = [name for name in names if name in MACHINES]
    if not machines:
        raise PictureError(
            f"{option} needs a machine, and {', '.join(names)} is none; choose from {', '.join(MACHINES)}"
        )
    having = tuple(name for name in machines if state in MACHINES[name].by_state)
    if not having:
        known = ", ".join(dict.fromkeys(known for name in machines for known in MACHINES[name].by_state))
        raise PictureError(f"{option}: {', '.join(machines)} has no state {state!r}; choose from {known}")
    return having


def _file(name: str, format: str, around: str | None, highlight: str | None) -> str:
    from context_cache.diagrams.pictures import file_name

    marks = [f"-{word}-{state}" for word, state in (("around", around), ("at", highlight)) if state is not None]
    return file_name(name + "".join(marks), format)


def _overlays(trace: str | None, request: str | None, step: int | None, coverage: str | None) -> dict[str, Overlay]:
    """What is laid over each machine's picture. Raises Unusable."""
    from context_cache.coordinator.cli.app import Unusable
    from context_cache.coordinator.cli.arguments import check_inputs

    if trace is None and (request is not None or step is not None):
        raise Unusable("--request and --step choose from a trace; add --trace FILE")
    if trace is not None and coverage is not None:
        raise Unusable("--trace and --coverage both colour the rows; draw one after the other")
    if trace is None and coverage is None:
        return {}
    if trace is not None:
        check_inputs(trace, option="--trace")
    from context_cache.coordinator.cli.overlaying import coverage_overlays, trace_overlays

    return coverage_overlays(coverage) if coverage is not None else trace_overlays(trace or "", request, step)


def _can_be_marked(machines: Sequence[str], formats: Sequence[str], overlays: Mapping[str, Overlay]) -> None:
    """Raises PictureError for pictures that have no rows of their own, and formats that show no marks."""
    from context_cache.diagrams.pictures import PictureError

    for name in machines:
        if name not in overlays:
            raise PictureError(f"{name} fires no events, so nothing was recorded of it; choose from {_names(overlays)}")
    for format in formats:
        if format not in _STATE_FORMATS["--state"]:
            raise PictureError(f"{format} shows no marks; choose from {', '.join(_STATE_FORMATS['--state'])}")


def _names(overlays: Mapping[str, Overlay]) -> str:
    return ", ".join(overlays)


def _overlay(found: Overlay | None, highlight: str | None) -> Overlay:
    from context_cache.diagrams import Mark, Overlay

    overlay = Overlay() if found is None else found
    if highlight is None:
        return overlay
    mark = evolve(overlay.states.get(highlight, Mark()), colour="#7ee787", last=True)
    return evolve(overlay, states={**overlay.states, highlight: mark})
