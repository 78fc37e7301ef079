"""The explorer in a real browser: clicked through, searched, filtered, lit, read in the dark and on a narrow screen."""

from __future__ import annotations

import pytest

from context_cache.machines import ALL_MACHINES, EXECUTION, REQUEST


@pytest.fixture
def story(explorer, make):
    return explorer(make.trace(make.story()))


def test_a_trace_opens_at_the_first_step_of_the_first_request(story):
    assert story.subjects == ["everything", "coordinator", "r1", "r2", "r3"]
    assert story.find("#requests [aria-selected=true] .name").text == "r1"
    assert story.events[:3] == ["begin_request", "prepare_prefill", "finalize_prefill"]
    assert story.step == 1
    assert "flavour" in story.text("#facts")
    assert story.text("#position") == "1 of 8"


def test_choosing_a_request_shows_its_steps_alone(story):
    story.choose("r3")
    assert story.events == ["begin_request", "prepare_prefill", "finish"]
    assert story.text("#timeline-title").startswith("Steps of r3")
    assert "r3" in story.text("#details .whose")


def test_a_step_that_is_clicked_is_told_in_full(story):
    story.all("#timeline [role=option]")[1].click()
    assert story.step == 3
    assert story.text("#details .event .name") == "prepare_prefill"
    assert story.texts("#details .headline .state") == ["admitted", "prefilling"]
    assert "bind_rows" in story.texts("#details .ran li")
    assert story.texts("#details .acts .name") == ["upload_base_rows", "reset_base_lengths"]
    assert story.texts("#details .acts code") == ["38e69255", "0a1b2c3d"]
    assert story.texts("#details .acts .took") == ["1.2 \u00b5s", "0.7 \u00b5s"]
    held = story.texts("#details .pairs dd")
    assert "pages" in held
    assert "pages, rows, token" in held
    assert "1.50 ms" in held


def test_guards_say_whether_they_held(story):
    story.all("#timeline [role=option]")[4].click()
    guards = story.texts("#details .guards li")
    assert any("joiner_waits" in guard and "does not hold" in guard for guard in guards), guards


def test_steps_of_one_call_lead_to_each_other(story):
    story.all("#timeline [role=option]")[1].click()
    siblings = story.all("#details .sibling")
    assert [sibling.get_attribute("aria-current") for sibling in siblings] == [None, "step"]
    siblings[0].click()
    assert story.text("#details .whose") == "execution coordinator"
    assert story.find("#machines [aria-selected=true]").text == "execution"
    assert story.find("#requests [aria-selected=true] .name").text == "coordinator"


def test_previous_next_first_and_last(story):
    story.click("#next")
    assert story.text("#position") == "2 of 8"
    story.click("#last")
    assert story.text("#position") == "8 of 8"
    assert story.find("#next").get_attribute("aria-disabled") == "true"
    story.click("#next")
    assert story.text("#position") == "8 of 8"
    story.click("#previous")
    assert story.text("#position") == "7 of 8"
    story.click("#first")
    assert story.text("#position") == "1 of 8"
    assert story.find("#previous").get_attribute("aria-disabled") == "true"


def test_the_strip_leads_to_any_step(story):
    story.js(
        "const scrub = document.getElementById('scrub'); scrub.value = 5; scrub.dispatchEvent(new Event('input'))"
    )
    assert story.text("#position") == "6 of 8"
    assert "complete_decode_step" not in story.find("#scrub").get_attribute("aria-label")
    assert "of 8" in story.find("#scrub").get_attribute("aria-valuetext")


def test_state_and_arrow_of_the_step_are_lit(story, make):
    story.all("#timeline [role=option]")[1].click()
    state, arrow = sorted(story.lit, key=lambda name: name.startswith("rows-"))
    assert state == "state-prefilling"
    numbers = arrow.split("--")[0].split("-")[1:]
    assert str(make.find("prepare_prefill", "admitted")) in numbers
    assert story.js("return document.querySelector('#canvas .node.from').id") == "state-admitted"
    assert "prefilling is lit" in story.find("#canvas svg").get_attribute("aria-label")
    green = story.js("return getComputedStyle(document.querySelector('#canvas .edge.lit path')).stroke")
    story.click("#next")
    assert green != story.js("return getComputedStyle(document.querySelector('#canvas .edge:not(.lit) path')).stroke")


def test_an_error_lights_the_way_of_the_error(story):
    story.choose("r2")
    story.all("#timeline [role=option]")[2].click()
    assert "state-broken" in story.lit
    arrows = story.js("return [...document.querySelectorAll('#canvas .edge.lit')].map(one => one.classList.value)")
    assert arrows
    assert all("failure" in classes for classes in arrows)
    assert story.text("#details .headline .problem") == "failed at upload_base_rows"
    assert "DeviceError at use 1" in story.text("#details .acts")
    assert "Not reached" in story.text("#details .idle")


def test_a_refused_event_lights_its_state_and_no_arrow(story):
    story.choose("r2")
    story.all("#timeline [role=option]")[1].click()
    assert story.lit == ["state-admitted"]
    assert "No row fired" in story.text("#details")


def test_other_machines_show_where_they_stood_at_that_time(story):
    story.all("#timeline [role=option]")[1].click()
    story.click("#machine-execution")
    assert story.lit == ["state-held"]
    story.click("#machine-view")
    assert story.lit == ["state-none"]
    story.click("#machine-request")
    assert "state-prefilling" in story.lit


def test_before_its_first_step_a_machine_stands_in_its_initial_state(story):
    assert story.step == 1
    for spec in ALL_MACHINES:
        story.click(f"#machine-{spec.name}")
        if spec.name != "request":
            assert story.lit == ([] if spec.follows else [f"state-{spec.initial}"])


def test_a_machine_that_follows_another_says_why_nothing_is_lit(explorer, make):
    page, plain = explorer(make.trace(make.story())), "#picture-note"
    for spec in ALL_MACHINES:
        page.click(f"#machine-{spec.name}")
        assert page.find(plain).is_displayed() is (spec.follows is not None)
        if spec.follows:
            assert f"Follows the steps of {spec.follows}" in page.text(plain)
    page = explorer()
    page.click("#machine-sequence")
    assert not page.find(plain).is_displayed()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("r2", ["r2"]), ("R3", ["r3"]), ("broken", ["r2"]), ("finish", ["r1", "r2", "r3"]),
        ("finish drain_failed", ["r3"]), ("upload_base", ["r1", "r2", "r3"]), ("hold_token", ["coordinator"]),
        ("nothing like this", []),
    ],
)  # fmt: skip
def test_searching_finds_requests_by_what_happened_to_them(story, query, found):
    story.find("#search").send_keys(query)
    assert story.subjects == found
    assert story.find("#requests-empty").is_displayed() is (not found)


def test_only_refused_and_failed_steps(story):
    assert "1" in story.text("#only-refused")
    assert "2" in story.text("#only-failed")
    story.click("#only-failed")
    assert story.subjects == ["everything", "r2", "r3"]
    story.choose("everything")
    assert story.events == ["prepare_prefill", "finish"]
    assert story.find("#only-failed").get_attribute("aria-pressed") == "true"
    story.click("#only-refused")
    assert story.events == ["prepare_decode_step", "prepare_prefill", "finish"]
    story.click("#only-failed")
    assert story.events == ["prepare_decode_step"]
    story.click("#only-refused")
    assert len(story.events) > 3


def test_the_table_counts_rows_and_shows_their_steps(story, make):
    row = make.find("prepare_decode_step", "settled", "decoding")
    story.click("#views [data-view=rows]")
    button = story.find(f"#view-rows tr[data-row='{row}'] button")
    assert button.text == "2"
    button.click()
    story.choose("everything")
    assert story.events == ["prepare_decode_step", "prepare_decode_step"]
    assert story.find(f"#view-rows tr[data-row='{row}']").get_attribute("aria-current") == "true"
    story.click("#only-place")
    assert len(story.events) > 2
    assert not story.find("#only-place").is_displayed()


def test_a_state_that_is_clicked_in_the_picture_shows_the_steps_into_it(story):
    story.choose("everything")
    story.js(
        "document.querySelector('#canvas [id=state-broken]').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert story.events == ["prepare_prefill"]
    assert "into broken" in story.text("#only-place")


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_every_machine_has_picture_rows_and_states(explorer, spec):
    page = explorer()
    page.click(f"#machine-{spec.name}")
    assert len(page.all("#canvas .node[id^='state-']")) == len(spec.states)
    page.click("#views [data-view=rows]")
    assert page.texts("#view-rows tbody th") == [str(number) for number in range(len(spec.transitions))]
    page.click("#views [data-view=states]")
    assert page.texts("#view-states tbody th .state") == [state.name for state in spec.states]
    told = page.texts("#view-states tbody tr")
    for state, text in zip(spec.states, told, strict=True):
        assert state.meaning in text
        assert state.holds in text
        assert ("initial" in text) >= (state.name == spec.initial)
        assert ("outstanding" in text) >= state.outstanding


def test_without_a_trace_there_are_the_machines_alone(explorer):
    page = explorer()
    assert not page.find("#requests").is_displayed()
    assert not page.find("#details").is_displayed()
    assert not page.find("#next").is_displayed()
    page.press("n", "[", "f", "/", "v")
    assert page.find("#view-rows").is_displayed()


def test_a_trace_without_a_step_is_no_trouble(explorer, make):
    page = explorer(make.trace([make.call(name="shutdown", request=None, steps=[])], notes=["It ends early."]))
    assert page.texts("#notes p") == ["It ends early.", "The trace has no steps."]
    for place in ("#requests", "#timeline", "#only-refused", "#only-failed", "#details", "#next", "#scrub", "#follow"):
        assert not page.find(place).is_displayed(), place
    for button in page.all("button"):
        assert button.accessible_name or not button.is_displayed()
    page.press("n", "]")
    page.click("#machine-view")
    assert page.find("#canvas svg").is_displayed()


def test_a_picture_without_names_is_shown_and_never_lit(explorer, make, picture):
    page = explorer(make.trace(make.story()), svg_of=lambda spec: picture(spec).replace(' id="', ' data-id="'))
    page.click("#next")
    assert page.find("#canvas svg").is_displayed()
    assert page.lit == []


@pytest.mark.parametrize("svg", ["", "no picture at all", "<svg", "<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_without_a_picture_the_page_says_so(explorer, make, svg):
    page = explorer(make.trace(make.story()), svg_of=lambda spec: svg)
    assert "no picture" in page.text("#canvas")
    page.click("#next")
    assert page.text("#position") == "2 of 8"


def test_steps_of_a_machine_that_is_not_shown_are_told_all_the_same(explorer, make):
    page = explorer(make.trace(make.story()), machines=[EXECUTION])
    assert page.texts("#machines button") == ["execution"]
    page.click("#next")
    assert page.text("#details .event .name") == "prepare_prefill"


def test_a_label_of_a_row_is_lit_by_itself(explorer, make):
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 90 90'><g class='graph'>"
        "<g id='state-admitted' class='node'><path d='M0 0h9v9z'/>"
        "<g id='a_label-0-1--x'><text>1</text></g><g id='label-1--failure-device-error-x'><text>2</text></g></g>"
        "<g id='state-prefilling' class='node'><path d='M0 20h9v9z'/></g>"
        "<g id='rows-1-7--y' class='edge'><path d='M0 9v9'/><g id='label-1--y'><text>1</text></g>"
        "<g id='label-7--y'><text>7</text></g></g></g></svg>"
    )
    page = explorer(make.trace(make.life("r1")), machines=[REQUEST], svg_of=lambda spec: svg)
    page.click("#next")
    lit = page.js("return [...document.querySelectorAll('#canvas .lit')].map(one => one.id)")
    assert lit == ["state-prefilling", "rows-1-7--y", "label-1--y"]


def test_the_address_names_the_step(explorer, make):
    page = explorer(make.trace(make.story()), at="#step-4")
    assert page.step == 4
    assert page.find("#requests [aria-selected=true] .name").text == "coordinator"
    assert page.text("#details .whose") == "execution coordinator"
    page.js("location.hash = '#step-1'")
    wait_until(page, lambda: page.step == 1)


@pytest.mark.parametrize("at", ["#step-0", "#step-999999", "#step-x", "#<script>"])
def test_an_address_that_names_no_step_is_read_over(explorer, make, at):
    assert explorer(make.trace(make.story()), at=at).step == 1


def test_sizes_of_the_picture(story):
    def width():
        return story.js("return document.querySelector('#canvas svg').getBoundingClientRect().width")

    before = width()
    story.click("#zoom-in")
    assert width() == pytest.approx(before * 1.25, rel=0.01)
    story.click("#zoom-out")
    assert width() == pytest.approx(before, rel=0.01)
    story.click("#zoom-fit")
    assert width() <= story.js("return document.querySelector('#canvas').clientWidth")


def test_following_keeps_the_lit_state_in_sight(story):
    for _ in range(7):
        story.click("#next")
        inside = story.js(
            "const box = document.querySelector('#canvas').getBoundingClientRect();"
            "const lit = document.querySelector('#canvas .node.lit').getBoundingClientRect();"
            "return lit.left >= box.left - 1 && lit.right <= box.right + 1 && lit.top >= box.top - 1"
            " && lit.bottom <= box.bottom + 1"
        )
        assert inside


def test_in_the_dark_page_and_picture_are_dark(story):
    def colours():
        return story.js(
            "const of = (selector, property) => getComputedStyle(document.querySelector(selector))[property];"
            "return [of('body', 'color'), of('.panel', 'backgroundColor'), of('#canvas .node:not(.lit) path', 'fill'),"
            " of('#canvas .node:not(.lit) text', 'fill')]"
        )

    light = [brightness(colour) for colour in colours()]
    story.emulate(prefers_color_scheme="dark")
    dark = [brightness(colour) for colour in colours()]
    ink, paper, box, label = light
    assert ink < 0.3 < 0.8 < min(paper, box)
    assert label < 0.3
    ink, paper, box, label = dark
    assert max(paper, box) < 0.4 < 0.7 < ink
    assert label > 0.7


def brightness(colour):
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (red + green + blue) / 765


FAINT = """
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([red, green, blue]) => [red, green, blue].map((part) => part / 255)
  .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
const paper = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = colour(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] > 0.99) return found;
  }
  return [255, 255, 255];
};
const faint = [];
for (const element of document.querySelectorAll("body *:not(svg *)")) {
  const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!words || !element.checkVisibility() || element.closest("[aria-disabled=true], .unseen")) continue;
  const [one, other] = [light(colour(getComputedStyle(element).color)), light(paper(element))].sort((a, b) => b - a);
  if ((one + 0.05) / (other + 0.05) < 4.5) faint.push(`${element.className} ${element.textContent}`);
}
return faint;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["picture", "rows", "states"])
def test_every_word_stands_out_from_its_ground(story, scheme, view):
    """At least 4.5 to 1, as the accessibility guidelines (WCAG 2, 1.4.3) want it of text."""
    story.emulate(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    story.click(f"#views [data-view={view}]")
    story.choose("everything")
    for _ in range(2):
        assert story.js(FAINT) == []
        story.press("n")
    story.click("#only-failed")
    story.click("#only-refused")
    assert story.js(FAINT) == []


def test_a_faint_word_is_noticed(story):
    story.js("document.getElementById('position').style.color = '#999'")
    assert story.js(FAINT) == ["position 1 of 8"]


@pytest.mark.parametrize("width", [320, 400, 800, 1000, 1280])
def test_nothing_is_cut_off_on_a_narrow_screen(explorer, make, width):
    page = explorer(make.trace(make.story()), size=(width, 800))
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.find("#next").is_displayed()
    page.click("#next")
    page.press("p")
    assert page.find("#told").is_displayed()
    assert page.js("return document.documentElement.scrollWidth") <= width
    page.js("document.getElementById('details').scrollIntoView()")
    assert page.find("#details .event").is_displayed()
    assert page.js("return document.getElementById('requests').clientHeight") > 100


def wait_until(page, holds):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page.driver, 10).until(lambda _: holds())
