"""Search, filters and the way to the next trouble: the reader is never left at a place that is not there."""

from __future__ import annotations

import pytest


@pytest.fixture
def story(explorer, make):
    return explorer(make.trace(make.story()))


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver.common.keys").Keys


def current(page):
    return page.text("#requests [aria-selected=true] .name")


def active(page, box):
    """What the keys stand at in a list, as a screen reader is told it."""
    option = page.find(f"#{box}").get_attribute("aria-activedescendant")
    return page.text(f"#{option} .name")


def test_only_requests_are_counted_as_requests(story):
    assert story.subjects == ["everything", "coordinator", "r1", "r2", "r3"]
    assert story.text("#requests-count") == "3"
    story.find("#search").send_keys("hold_token")
    assert story.subjects == ["coordinator"]
    assert story.text("#requests-count") == "0"


def test_enter_goes_to_what_was_found(story, keys):
    story.press("/", "r", "3", keys.ENTER)
    assert story.focus == "requests"
    assert story.text("#timeline-title").startswith("Steps of r3")
    assert current(story) == "r3"
    assert active(story, "requests") == "r3"


def test_enter_stays_at_the_current_request_if_it_was_found(story, keys):
    story.choose("r2")
    story.press("/", "f", "i", "n", "i", "s", "h", keys.ENTER)
    assert current(story) == "r2"


def test_enter_stays_in_the_search_when_nothing_was_found(story, keys):
    story.press("/", "q", "q", "q", keys.ENTER)
    assert story.focus == "search"
    assert story.text("#timeline-title").startswith("Steps of r1")


def test_a_list_that_has_the_focus_says_where_its_keys_begin(story, keys):
    """Nothing is chosen in it, because what is chosen was not found; the first is where an arrow leads."""
    story.press("/", "r", "3", keys.TAB, keys.TAB, keys.TAB)
    assert story.focus == "requests"
    assert active(story, "requests") == "r3"
    assert not story.all("#requests [aria-selected=true]")
    story.press(keys.ENTER)
    assert current(story) == "r3"


def test_a_filter_that_the_current_request_does_not_pass_moves_to_the_first_that_does(story):
    story.click("#only-failed")
    assert current(story) == "r2"
    assert story.events == ["prepare_prefill"]
    assert story.text("#position") == "1 of 1"
    story.click("#only-failed")
    assert current(story) == "r2"
    story.choose("r1")
    story.click("#only-refused")
    assert current(story) == "r2"
    assert story.text("#details .badge") == "refused"


def test_a_filter_leaves_a_request_that_passes(story):
    story.choose("r3")
    story.click("#only-failed")
    assert current(story) == "r3"


def test_a_filter_that_nothing_passes_says_so_everywhere(explorer, make):
    page = explorer(make.trace(make.life("r1")))
    page.click("#only-refused")
    assert page.subjects == ["everything"]
    assert current(page) == "everything"
    assert page.find("#requests-empty").is_displayed()
    assert page.find("#timeline-empty").is_displayed()
    assert page.text("#details-body") == "No step has what is asked for."
    page.click("#only-refused")
    assert page.events[0] == "begin_request"


def test_trouble_is_sought_in_the_next_request_too(story):
    story.click("#trouble")
    assert current(story) == "r2"
    assert story.text("#details .badge") == "refused"
    story.press("n")
    assert story.text("#details .badge") == "failed"
    story.press("n")
    assert current(story) == "r3"
    assert story.text("#details .badge") == "drain failed"
    story.press("p")
    assert current(story) == "r2"
    assert story.text("#details .badge") == "failed"


def test_where_no_trouble_is_left_the_page_says_so_in_sight(story):
    assert not story.find("#told").is_displayed()
    story.press("p")
    assert story.find("#told").text == "No earlier step of r1 or of an earlier request was refused or failed."
    assert current(story) == "r1"
    assert story.text("#position") == "1 of 8"
    story.press("]")
    assert not story.find("#told").is_displayed()
    story.choose("everything")
    story.click("#last")
    story.click("#trouble")
    assert story.find("#told").text == "No later step was refused or failed."


def test_trouble_that_a_filter_hides_is_not_gone_to(story):
    story.choose("r2")
    story.click("#only-refused")
    story.press("n")
    assert current(story) == "r2"
    assert "No later step of r2" in story.text("#told")
