"""The explorer's page: one file without a reference to another, so it opens from disk and can be attached to a report.

Whoever draws the pictures is handed in (``svg_of``), because the page only needs these of an SVG:

* the group of a state has the id ``state-NAME``;
* the group of an arrow has an id that begins with ``rows-N-N-...``, the numbers of the rows that are folded into it;
  what follows after ``--`` keeps ids apart and has no meaning. A way that only an error takes has ``failure`` among its
  classes, and for each cause one that says which rows take it after such an error: ``device-error-N-N``,
  ``drain-failed-N``, ``publish-failed-N``;
* a label that belongs to rows, inside an arrow or a state, may be in a group whose id begins with ``label-N-N-...``,
  again with anything after ``--``, which begins with ``failure-`` and the cause (``failure-drain-failed-``) where the
  label is about an error. The texts that follow the group, up to the next one, are lit with it. ``a_`` before an id is
  Graphviz's own and is read over.

What has no such id is shown and never lit. Colours are taken from the picture and turned around for dark screens.

Everything in a trace is text that somebody else may have written. It goes into the page as JSON in which no ``<`` is
left, and from there into text nodes; the page's policy lets no script run but its own and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any, Final

from context_cache.diagrams.explorer.trace import ExplorerTrace
from context_cache.machines import MachineSpec, document

__all__ = ["explorer_page"]

_ASSETS: Final = "context_cache.diagrams.explorer"
_SCRIPTS: Final = ("data.js", "state.js", "lists.js", "picture.js", "tables.js", "details.js", "player.js", "main.js")
"""In this order they are one script."""
_STYLES: Final = ("machine.css", "explorer.css")
"""The last ends with what narrow screens and a reader's own colours change in both."""
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")
_UNSAFE: Final = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def explorer_page(
    machines: Iterable[MachineSpec], trace: ExplorerTrace | None, svg_of: Callable[[MachineSpec], str]
) -> str:
    """The whole page: the machines, each with picture and table, and what the trace did in them, if one is given.

    svg_of: the picture of a machine, as described at the top of this module; an empty text shows the table alone.
    """
    data = {
        "machines": [{**document(spec), "svg": _drawn(svg_of(spec))} for spec in machines],
        "trace": None if trace is None else trace.columns(),
    }
    script = "(() => {\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": f"default-src 'none'; script-src 'sha256-{hashed}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "title": "Lifecycles" if trace is None else html.escape(f"{_printable(trace.name)}: lifecycles"),
        "style": "\n".join(_asset(name) for name in _STYLES),
        "data": _embedded(data),
        "script": script,
    }
    # One pass over the template alone: what is put in is never looked at for places.
    return _PLACE.sub(lambda place: parts[place[1]], _asset("template.html"))


def _asset(name: str) -> str:
    return files(_ASSETS).joinpath("assets", name).read_text(encoding="utf-8")


def _printable(name: str) -> str:
    """A file's name may have characters in it that no page can hold, or that turn a line around."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


def _drawn(svg: str) -> str:
    """The element alone: a page has a head already."""
    return svg[max(svg.find("<svg"), 0) :]


def _embedded(data: Any) -> str:
    """JSON that can stand in a script element: ASCII, and without the characters that could end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(_UNSAFE)
