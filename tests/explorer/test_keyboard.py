"""The explorer without a mouse, and as a screen reader hears it."""

from __future__ import annotations

import pytest


@pytest.fixture
def story(explorer, make):
    return explorer(make.trace(make.story()))


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver.common.keys").Keys


def test_arrows_go_through_the_steps(story, keys):
    story.press(keys.ARROW_RIGHT)
    assert story.text("#position") == "2 of 8"
    story.press(keys.ARROW_RIGHT, keys.ARROW_RIGHT, keys.ARROW_LEFT)
    assert story.text("#position") == "3 of 8"
    story.press(keys.END)
    assert story.text("#position") == "8 of 8"
    story.press(keys.HOME)
    assert story.text("#position") == "1 of 8"


def test_arrows_in_the_search_field_move_its_cursor(story, keys):
    story.press("/", "r", "2", keys.ARROW_LEFT, keys.ARROW_LEFT, "x")
    assert story.find("#search").get_attribute("value") == "xr2"
    assert story.text("#position") == "1 of 8"


def test_a_search_is_made_and_its_find_chosen_without_a_mouse(story, keys):
    story.press("/", "b", "r", "o", "k", "e", "n", keys.ENTER)
    assert story.focus == "requests"
    story.press(keys.HOME)
    assert story.text("#details .subject") == "r2"
    story.press("n")
    assert story.text("#details .badge") == "refused"
    story.press("n")
    assert story.text("#details .badge") == "failed"
    story.press("p")
    assert story.text("#details .badge") == "refused"


def test_the_list_of_requests_is_gone_through_with_the_arrows(story, keys):
    story.js("document.getElementById('requests').focus()")
    story.press(keys.ARROW_DOWN)
    assert story.find("#requests [aria-selected=true] .name").text == "r2"
    assert story.focus == "requests"
    active = story.find("#requests").get_attribute("aria-activedescendant")
    assert story.find(f"#{active}").get_attribute("aria-selected") == "true"
    story.press(keys.HOME)
    assert story.find("#requests [aria-selected=true] .name").text == "everything"


def test_the_list_of_steps_is_gone_through_with_the_arrows(story, keys):
    story.js("document.getElementById('timeline').focus()")
    story.press(keys.ARROW_DOWN, keys.ARROW_DOWN)
    assert story.text("#position") == "3 of 8"
    option = story.find("#timeline [aria-selected=true]")
    assert (option.get_attribute("aria-posinset"), option.get_attribute("aria-setsize")) == ("3", "8")
    assert option.get_attribute("aria-current") == "true"


def test_brackets_change_the_request(story):
    story.press("]")
    assert story.find("#requests [aria-selected=true] .name").text == "r2"
    story.press("[", "[")
    assert story.find("#requests [aria-selected=true] .name").text == "coordinator"


def test_tabs_of_the_machines_follow_the_arrows(story, keys):
    story.js("document.querySelector('#machines [aria-selected=true]').focus()")
    story.press(keys.ARROW_RIGHT)
    assert story.focus == "machine-sequence"
    assert story.text("#position") == "1 of 8"
    story.press(keys.ARROW_LEFT, keys.ARROW_LEFT)
    assert story.focus == "machine-view"
    assert [tab.get_attribute("tabindex") for tab in story.all("#machines [role=tab]")] == ["-1"] * 5 + ["0"]


def test_everything_can_be_reached_with_the_tab_key_and_shows_its_focus(story, keys):
    wanted = {"help-open", "search", "only-refused", "only-failed", "requests", "timeline", "machine-request", "canvas",
              "zoom-out", "zoom-in", "zoom-fit", "follow", "first", "previous", "next", "last", "trouble",
              "scrub"}  # fmt: skip
    reached = set()
    for _ in range(60):
        story.press(keys.TAB)
        if story.focus in wanted:
            shown = story.js(
                "const style = getComputedStyle(document.activeElement.id === 'scrub'"
                " ? document.activeElement.parentElement : document.activeElement); return style.outlineStyle"
            )
            assert shown != "none", story.focus
            reached.add(story.focus)
    assert reached == wanted


def test_buttons_work_with_space_and_enter(story, keys):
    story.js("document.getElementById('next').focus()")
    story.press(keys.SPACE)
    assert story.text("#position") == "2 of 8"
    story.press(keys.ENTER)
    assert story.text("#position") == "3 of 8"


def test_the_focus_stays_where_it_is_while_steps_change(story, keys):
    story.js("document.getElementById('next').focus()")
    for _ in range(12):
        story.press(keys.ENTER)
    assert story.focus == "next"
    assert story.text("#position") == "8 of 8"


def test_the_list_of_keys_opens_and_closes(story, keys):
    story.press("?")
    assert story.find("#help").is_displayed()
    story.press(keys.ARROW_RIGHT)
    assert story.text("#position") == "1 of 8"
    story.press(keys.ESCAPE)
    assert not story.find("#help").is_displayed()


def test_single_letters_can_be_switched_off(story, keys):
    """Whoever speaks to a computer must not step through a trace by saying a word."""
    story.press("?")
    story.click("#letters")
    story.press(keys.ESCAPE)
    story.press("]", "v", "?")
    assert story.find("#requests [aria-selected=true] .name").text == "r1"
    assert story.find("#view-picture").is_displayed()
    story.press(keys.ARROW_RIGHT)
    assert story.text("#position") == "2 of 8"


def test_a_change_of_step_is_read_out(story, keys):
    from selenium.webdriver.support.ui import WebDriverWait

    story.press(keys.ARROW_RIGHT)
    wanted = "Step 2 of 8: r1 prepare_prefill, admitted to prefilling, done"
    WebDriverWait(story.driver, 10).until(lambda _: story.text("#announcer") == wanted)
    assert story.find("#announcer").get_attribute("aria-live") == "polite"


def test_everything_that_can_be_used_has_a_name(story):
    used = "button, input, section, aside, [role=listbox], [role=tablist], [role=tabpanel], [role=group], [role=img]"
    for element in story.all(used):
        if element.is_displayed():
            assert element.accessible_name, element.get_attribute("outerHTML")
