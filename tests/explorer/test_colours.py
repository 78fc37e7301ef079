"""The page in the colours that a reader has chosen for everything: what is chosen or current can still be told."""

from __future__ import annotations

import pytest

LOOK = """
const probe = document.body.appendChild(document.createElement("i"));
probe.style.color = "Highlight";
const highlight = getComputedStyle(probe).color;
probe.remove();
const marked = (one) => {
  const style = getComputedStyle(one);
  return style.borderLeftStyle === "solid" && style.borderLeftColor === highlight
    || style.outlineStyle === "solid" && style.outlineColor === highlight;
};
const shown = [...document.querySelectorAll(arguments[0])].filter((one) => one.checkVisibility());
return [arguments[1], `:not(${arguments[1]})`].map((which) => shown.filter((one) => one.matches(which)).map(marked));
"""


@pytest.fixture
def story(explorer, make):
    page = explorer(make.trace(make.story()))
    page.choose("r2")
    page.press("n")
    page.emulate(forced_colors="active", prefers_reduced_motion="reduce")
    return page


def press(page, selector):
    """Without the mouse, which has a border of its own to give to what it is over."""
    page.js("document.querySelector(arguments[0]).click(); document.activeElement.blur()", selector)


@pytest.mark.parametrize(
    ("view", "ones", "chosen"),
    [
        ("picture", "#requests [role=option]", "[aria-selected=true]"),
        ("picture", "#timeline [role=option]", "[aria-selected=true]"),
        ("picture", "#machines button", "[aria-selected=true]"),
        ("picture", "#views button", "[aria-pressed=true]"),
        ("picture", ".zoom button", "[aria-pressed=true]"),
        ("picture", ".sibling", "[aria-current]"),
        ("rows", "#view-rows tbody tr", "[aria-current=true]"),
        ("states", "#view-states tbody tr", "[aria-current=true]"),
    ],
)
def test_what_is_chosen_has_a_border_of_its_own_in_forced_colours(story, view, ones, chosen):
    story.choose("r3")
    story.press("]", "[")
    press(story, f"#views [data-view={view}]")
    marked, others = story.js(LOOK, ones, chosen)
    assert len(marked) == 1
    assert all(marked)
    assert not any(others)


def test_a_pressed_filter_has_a_border_of_its_own_in_forced_colours(story):
    press(story, "#only-failed")
    assert story.js(LOOK, ".toggle", "[aria-pressed=true]") == [[True], [False]]
