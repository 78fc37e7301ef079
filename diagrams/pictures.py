"""Every picture that there is, by name and format; and the ones that are committed, held to the tables.

Committed in ``rendered/`` are DOT (compared byte for byte), JSON (the same, and what ``diff`` reads) and SVG (for the
pages; it names the digest of the DOT text that it was drawn from, which is always compared, and its bytes are where the
program that drew it is installed in the same version, for another may lay it out otherwise).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from context_cache.diagrams.dot import to_dot
from context_cache.diagrams.drawing import Drawing, draw
from context_cache.diagrams.engines import FORMATS as LAID_OUT
from context_cache.diagrams.engines import digest, drawn_from, pure_version, render
from context_cache.diagrams.markdown import to_markdown
from context_cache.diagrams.mermaid import to_mermaid
from context_cache.diagrams.overlay import NOTHING, Overlay
from context_cache.diagrams.overview import overview_dot
from context_cache.diagrams.phases import draw_phases
from context_cache.machines import ALL_MACHINES, REQUEST, MachineSpec, document

__all__ = [
    "COMMITTED",
    "FORMATS",
    "MACHINES",
    "NAMES",
    "PictureError",
    "committed",
    "drawn_elsewhere",
    "file_name",
    "formats_of",
    "picture",
    "stale_files",
    "to_json",
]

MACHINES: Final = {spec.name: spec for spec in ALL_MACHINES}
PHASES: Final = f"{REQUEST.name}-phases"
OVERVIEW: Final = "overview"
NAMES: Final = (*MACHINES, PHASES, OVERVIEW)
FORMATS: Final = ("dot", *LAID_OUT, "mermaid", "markdown", "json")
COMMITTED: Final = ("dot", "json", "svg")
SUFFIXES: Final = {"mermaid": "mmd", "markdown": "md"}
"""Where a format's name is not the suffix of its files."""


class PictureError(ValueError):
    """There is no such picture. The message says which there are."""


def file_name(name: str, format: str) -> str:
    """Where a picture is written: its name and the suffix of the format."""
    return f"{name}.{SUFFIXES.get(format, format)}"


def formats_of(name: str) -> tuple[str, ...]:
    """The formats that a picture has: the overview is no table, and the phases are no machine."""
    if name in MACHINES:
        return FORMATS
    return ("dot", *LAID_OUT) if name == OVERVIEW else ("dot", *LAID_OUT, "mermaid")


def picture(
    name: str, format: str, *, around: str | None = None, overlay: Overlay = NOTHING, engine: str | None = None
) -> bytes:
    """One picture as the bytes of a file. Raises :class:`PictureError`, or what ``engines.render`` raises."""
    if name not in NAMES:
        raise PictureError(f"there is no picture {name!r}; choose from {', '.join(NAMES)}")
    if format not in formats_of(name):
        raise PictureError(f"{name} is not drawn as {format}; choose from {', '.join(formats_of(name))}")
    if format == "json":
        return to_json(MACHINES[name]).encode()
    if format == "markdown":
        return to_markdown(MACHINES[name]).encode()
    if format == "mermaid":
        return to_mermaid(_drawing(name, around)).encode()
    dot = overview_dot(ALL_MACHINES) if name == OVERVIEW else to_dot(_drawing(name, around), overlay)
    return dot.encode() if format == "dot" else render(dot, format, engine)


def to_json(spec: MachineSpec) -> str:
    """``machines.document`` as text: one state or row a line, so that a changed row is a changed line."""
    plain = document(spec)
    lists = {key: plain.pop(key) for key in ("states", "rows")}
    lines = [f" {json.dumps(key)}: {_compact(value)}" for key, value in plain.items()]
    for key, items in lists.items():
        inside = ",\n".join(f"  {_compact(item)}" for item in items)
        lines.append(f" {json.dumps(key)}: [\n{inside}\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stale_files(folder: Path) -> list[tuple[str, str]]:
    """(file, what) for each committed file that is not what the tables say: ``changed``, ``missing``, ``left over``."""
    wanted = set()
    stale = []
    for name, format in committed():
        path = folder / file_name(name, format)
        wanted.add(path.name)
        if not path.is_file():
            stale.append((path.name, "missing"))
        elif not _current(name, format, path.read_bytes()):
            stale.append((path.name, "changed"))
    # Hidden files are notes of a system or an editor to itself.
    others = (path.name for path in folder.glob("*") if not path.name.startswith("."))
    stale += sorted((name, "left over") for name in others if name not in wanted)
    return stale


def drawn_elsewhere(folder: Path) -> int:
    """How many of the committed SVGs cannot be compared byte by byte here."""
    paths = [folder / file_name(name, format) for name, format in committed() if format == "svg"]
    return sum(_elsewhere(path.read_bytes()) for path in paths if path.is_file())


def committed() -> Iterator[tuple[str, str]]:
    """(name, format) of every committed file."""
    for name in NAMES:
        for format in COMMITTED:
            if format in formats_of(name):
                yield name, format


def _current(name: str, format: str, found: bytes) -> bool:
    if format != "svg" or not _elsewhere(found):
        return found == picture(name, format)
    drawn = drawn_from(found)
    return drawn is not None and drawn[1] == digest(picture(name, "dot"))


def _elsewhere(svg: bytes) -> bool:
    """Whether the program that drew it is not installed here, or in another version."""
    installed, drawn = pure_version(), drawn_from(svg)
    # What does not say who drew it was not drawn by us, so it is compared, and differs.
    return installed is None or (drawn is not None and drawn[0] != installed)


def _drawing(name: str, around: str | None) -> Drawing:
    return draw_phases(REQUEST) if name == PHASES else draw(MACHINES[name], around=around)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
