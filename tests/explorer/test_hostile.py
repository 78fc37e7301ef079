"""A trace that somebody else wrote, in a real browser: its texts are shown, and nothing in them happens."""

from __future__ import annotations

import pytest

OWNED = "document.title='owned'"
HOSTILE = (
    f"</script><script>{OWNED}</script>",
    f'<img src=x onerror="{OWNED}">',
    f"\"'><svg onload={OWNED}>",
    "<!--<script>",
    "javascript:alert(1)//{{data}}${1}",
    "\u2028 \u2029 \u202eesrever",
    "__proto__",
    "constructor",
    "\"] [id='search'",
    "x" * 200,
)
PLACES = (
    "#requests [aria-selected=true] .name", "#timeline .name", "#notes p", "#facts dd", "#details .event .name",
    "#details .guards .name", "#details .ran li", "#details .acts .name", "#details .acts code", "#details .call .name",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_every_text_of_a_trace_is_shown_as_it_is(explorer, make, text):
    """Shown in every place where a trace's words go: list, timeline, details, notes, head; and searched for."""
    step = make.step(
        subject=text, event=text, source=text, target=f"{text}!", guards={text: True}, ran=[text], failed=text,
        acts=[make.act(text, digest=text, failed=text, nth=1)], slots=text, outcome=text, ended=text,
    )  # fmt: skip
    call = make.call(name=text, request=text, arguments=text, result=text, steps=[step])
    page = explorer(make.trace([call, *make.life("r1")], name=text, notes=[text]))
    page.js("[...document.querySelectorAll('#requests [role=option]')].at(-2).click()")
    for place in PLACES:
        assert text in page.texts(place)[0], place
    assert page.js("return document.title").endswith(": lifecycles")
    assert page.all("img") == page.all("#details svg") == page.all("main script") == []
    page.find("#search").send_keys(text[:20])
    assert text in page.subjects


def test_names_of_objects_are_no_machines(explorer, make):
    """A map and not an object finds a machine: ``constructor`` is none."""
    step = make.step(machine="constructor", source="toString", target="valueOf", row=3)
    page = explorer(make.trace([make.call(name="c", steps=[step])]))
    assert page.text("#details .whose") == "constructor r1"
    assert "not known" in page.text("#details")


@pytest.mark.parametrize("row", [-1, -(2**31), 2**31 - 1, 10**6])
def test_rows_that_no_table_has_light_nothing(explorer, make, row):
    page = explorer(make.trace([make.call(name="c", steps=[make.step(row=row)])]))
    assert page.lit == ["state-admitted"]
    page.click("#views [data-view=rows]")
    assert page.all("#view-rows [aria-current]") == []
