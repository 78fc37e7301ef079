"""The page as a file: one, complete, closed to everything outside, and with a trace in it that is only data."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re

import pytest

from context_cache.diagrams.explorer import explorer_page
from context_cache.machines import ALL_MACHINES, REQUEST

SVG = "<svg viewBox='0 0 9 9' xmlns='http://www.w3.org/2000/svg'><text>\u2192</text></svg>"
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "]]>\"'`${1}&amp;{{data}}",
    "\u2028\u2029\x00\x1b[31m",
    "\u202eesrever\u202c",
    "\U0001f600\ud800",
    "__proto__",
)


class Elements(html.parser.HTMLParser):
    """What a browser would find: every element with its attributes, and the text of scripts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self.open = [], {}, False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open = True

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            at = len(self.found) - 1
            self.texts[at] = self.texts.get(at, "") + data

    def inside(self, tag):
        return [(attributes, self.texts.get(at, "")) for at, (name, attributes) in enumerate(self.found) if name == tag]


def page_of(trace=None, svg=SVG):
    return explorer_page(ALL_MACHINES, trace, lambda spec: svg)


def embedded(page):
    (text,) = [text for attributes, text in Elements(page).inside("script") if attributes.get("id") == "explorer-data"]
    return json.loads(text)


def test_one_file_refers_to_nothing_outside(make):
    page = page_of(make.trace(make.story()))
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "action", "data", "srcset", "xlink:href", "poster"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    assert "@import" not in page
    assert "url(" not in page
    addresses = set(re.findall(r"https?:[^\s\"'\\<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_only_the_script_of_the_page_may_run():
    page = page_of()
    scripts = [text for attributes, text in Elements(page).inside("script") if "type" not in attributes]
    (policy,) = [attributes["content"] for attributes, _ in Elements(page).inside("meta")
                 if attributes.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect" not in policy


def test_the_script_makes_no_markup_of_text():
    """Whatever a trace says gets into the page as text nodes."""
    (script,) = [text for attributes, text in Elements(page_of()).inside("script") if "type" not in attributes]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc",
                "createContextualFragment", "setHTMLUnsafe", "fetch(", "XMLHttpRequest", "import("):  # fmt: skip
        assert way not in script


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_data(make, text):
    step = make.step(subject=text, event=text, guards={text: True}, ran=[text], acts=[make.act(text)], slots=text)
    call = make.call(name=text, request=text, arguments=text, result=text, steps=[step])
    trace = make.trace([call], name=text, notes=[text])
    page = page_of(trace)
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(page_of(make.trace([]))).found]
    assert not set(page) & {"\u2028", "\u2029", "\u202e", "\x00", "\ud800"}
    assert embedded(page)["trace"]["notes"] == [text]
    assert text in embedded(page)["trace"]["words"]


def test_the_page_has_every_machine_as_its_document(make):
    machines = embedded(page_of())["machines"]
    assert [machine["name"] for machine in machines] == [spec.name for spec in ALL_MACHINES]
    assert [row["row"] for row in machines[0]["rows"]] == list(range(len(REQUEST.transitions)))
    assert all(machine["svg"] == SVG for machine in machines)
    assert embedded(page_of())["trace"] is None


def test_the_head_of_a_picture_is_left_out():
    head = '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://elsewhere/svg11.dtd">\n'
    assert {machine["svg"] for machine in embedded(page_of(svg=head + SVG))["machines"]} == {SVG}


def test_the_title_names_the_trace(make):
    assert "<title>a &lt;b&gt;: lifecycles</title>" in page_of(make.trace([], name="a <b>"))
    assert "<title>Lifecycles</title>" in page_of()


def test_two_pages_of_one_trace_are_equal(make):
    assert page_of(make.trace(make.story())) == page_of(make.trace(make.story()))
