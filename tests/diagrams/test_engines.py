"""Pictures: every machine in every format without a system Graphviz, labels that survive, one sentence if it fails."""

import os
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pypdfium2
import pytest

from context_cache.diagrams import draw, engines, to_dot, to_markdown, to_mermaid
from context_cache.diagrams.engines import DrawingFailed, EngineMissing, render
from context_cache.diagrams.overview import overview_dot
from context_cache.diagrams.phases import draw_phases
from context_cache.diagrams.pictures import NAMES, picture
from context_cache.machines import ALL_MACHINES, REQUEST, State, Transition
from context_cache.machines import MachineSpec as Spec

PURE = Path(sys.executable).parent / "graphviz-pure"
PICTURES = {
    **{spec.name: to_dot(spec) for spec in ALL_MACHINES},
    "request-phases": to_dot(draw_phases(REQUEST)),
    "overview": overview_dot(ALL_MACHINES),
    "around": to_dot(draw(REQUEST, around="settled")),
}


@pytest.fixture
def no_path(monkeypatch):
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def dot_on_path(monkeypatch, tmp_path):
    """A ``dot`` that is graphviz-pure under the other name: here it matters how it is called, not what it draws."""
    script = tmp_path / "dot"
    script.write_text(f'#!/bin/sh\nexec "{PURE}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script


def svg_text(svg):
    """What a reader sees: the text elements, a space between them."""
    root = ET.fromstring(svg)
    return " ".join("".join(found.itertext()) for found in root.iter("{http://www.w3.org/2000/svg}text"))


def pdf_text(pdf):
    with pypdfium2.PdfDocument(pdf) as document:
        assert len(document) == 1
        page = document[0].get_textpage()
        return page.get_text_range().replace("\r", "")


def squeezed(text):
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("format", engines.FORMATS)
def test_every_picture_is_drawn_without_a_system_graphviz(name, format, no_path):
    """C123. The layout program comes with the extra and is found without a PATH."""
    picture = render(PICTURES[name], format)
    assert picture.startswith({"svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}[format])
    assert picture == render(PICTURES[name], format), "two runs differ"


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_svg_and_pdf_show_every_state_and_event(spec, no_path):
    dot = to_dot(spec)
    for shown in (svg_text(render(dot, "svg")), pdf_text(render(dot, "pdf"))):
        for word in (*(state.name for state in spec.states), *spec.events):
            assert squeezed(word) in squeezed(shown), word


def test_odd_labels_survive_in_svg(odd, nasty, no_path):
    """C120, C121, C122. Read back from the picture: state, event, guard and step, each as it was written."""
    text = svg_text(render(to_dot(odd(nasty)), "svg"))
    shown = nasty.replace("\x07", "␇")
    for label in (shown, f"[{shown}?]", f"[not {shown}?]", f"{shown}!"):
        assert squeezed(label) in squeezed(text)
    # Machine, phase, state, what it holds, two events, two guards, a step: each place has escapes of its own.
    assert squeezed(text).count(squeezed(shown)) == 9


def test_odd_labels_survive_as_tooltips(odd, nasty, no_path):
    root = ET.fromstring(render(to_dot(odd(nasty)), "svg"))
    tips = {tip for found in root.iter() if (tip := found.get("{http://www.w3.org/1999/xlink}title")) is not None}
    assert squeezed(nasty.replace("\x07", "␇")) in {squeezed(tip) for tip in tips}


def test_odd_labels_survive_in_pdf(odd, nasty, no_path):
    """What the fonts of a PDF lack is spelled out: nothing is lost silently."""
    text = squeezed(pdf_text(render(to_dot(odd(nasty)), "pdf")))
    spelled = "".join(f"U+{ord(c):04X}" if c in "日本語␇" else c for c in nasty.replace("\x07", "␇"))
    assert squeezed(spelled) in text


def test_odd_labels_are_drawn_as_png(odd, nasty, no_path):
    assert render(to_dot(odd(nasty)), "png").startswith(b"\x89PNG")


def test_text_fits_the_boxes_that_were_measured_for_it(no_path):
    """The engine measures only fonts it knows; with another one every box would be cut for Times."""
    done = subprocess.run([PURE, "-Tsvg"], input=to_dot(REQUEST).encode(), capture_output=True, check=True)
    assert b"metrics" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_stays_readable_on_a_page(name, no_path):
    """Wider than this its smallest text, 8 points, is not legible on a screen; the request has 1550 by 2045 points."""
    svg = picture(name, "svg")
    width, height = (float(number) for number in re.search(rb'viewBox="0.00 0.00 (\S+) (\S+)"', svg).groups())
    assert width <= 1800
    assert height <= 2400
    sizes = {float(size) for size in re.findall(rb'font-size="([\d.]+)"', svg)}
    assert min(sizes) >= 8


def test_the_system_dot_is_used_when_asked_for(dot_on_path):
    assert b"<svg" in render(PICTURES["view"], "svg", "dot")
    assert render(PICTURES["view"], "png", "dot").startswith(b"\x89PNG")


def test_the_system_dot_is_used_when_the_pure_one_is_missing(dot_on_path, monkeypatch):
    monkeypatch.setattr(engines, "_pure_program", lambda: None)
    assert b"Drawn by graphviz-pure" not in render(PICTURES["view"], "svg")


@pytest.mark.parametrize("engine", [None, "pure", "dot"])
def test_without_any_program_one_sentence_says_what_to_install(engine, no_path, monkeypatch):
    """C123. The texts still work."""
    monkeypatch.setattr(engines, "_pure_program", lambda: None)
    with pytest.raises(EngineMissing) as caught:
        render(PICTURES["view"], "svg", engine)
    message = str(caught.value)
    assert "\n" not in message
    assert "install" in message
    assert "dot, mermaid, markdown and json need no program" in message
    assert engine == "dot" or message.startswith("an SVG needs")
    assert all(to_text(REQUEST) for to_text in (to_dot, to_mermaid, to_markdown))


def test_a_pdf_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "svglib.svglib", None)
    with pytest.raises(EngineMissing, match=r"svglib.*pip install 'context-cache-coordinator\[draw\]'"):
        render(PICTURES["view"], "pdf")
    assert render(PICTURES["view"], "svg")


@pytest.mark.parametrize("engine", ["pure", "dot"])
def test_a_layout_program_that_fails_is_one_sentence(engine, dot_on_path):
    with pytest.raises(DrawingFailed) as caught:
        render("digraph {", "svg", engine)
    assert re.fullmatch(r"(graphviz-pure|dot) drew nothing: \w.*syntax error.*", str(caught.value))


def test_a_program_that_cannot_be_started_is_one_sentence(monkeypatch, tmp_path):
    broken = tmp_path / "graphviz-pure"
    broken.write_text("not a program")
    monkeypatch.setattr(engines, "_pure_program", lambda: str(broken))
    with pytest.raises(EngineMissing, match="cannot be started"):
        render(PICTURES["view"], "svg")


def test_the_library_and_its_requests_never_need_a_program_or_a_drawing_library():
    """C123. Neither importing nor drawing text may load what only pictures need."""
    code = (
        "import sys, context_cache.coordinator, context_cache.diagrams as d, context_cache.machines as m\n"
        "d.to_dot(m.REQUEST); d.to_mermaid(m.REQUEST); d.to_markdown(m.REQUEST)\n"
        "print([name for name in ('graphviz', 'svglib', 'reportlab', 'click', 'subprocess') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PATH": ""}, capture_output=True, text=True, check=True
    )
    assert "graphviz" not in done.stdout
    assert "svglib" not in done.stdout
    assert "reportlab" not in done.stdout


def test_a_large_table_is_still_drawn(no_path):
    states = (*(State(f"s{n}", "m", phase=f"p{n // 20}") for n in range(200)), State("end", "m", final=True))
    rows = [Transition(event="e", source=f"s{n}", target=f"s{n + 1}") for n in range(199)]
    rows += [Transition(event="stop", source=f"s{n}", target="end") for n in range(200)]
    spec = Spec(name="large", initial="s0", states=states, transitions=tuple(rows))
    assert "s199" in svg_text(render(to_dot(spec), "svg"))
