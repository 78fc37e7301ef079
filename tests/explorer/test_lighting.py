"""What of the picture and of the tables is lit at a step: the one way that it took, and no other that its row has."""

from __future__ import annotations

import pytest

from context_cache.diagrams.markup import identifier
from context_cache.machines import REQUEST

CAUSES = {"failed": "device error", "drain_failed": "drain failed", "publish_failed": "publish failed"}
LIT = """
return {
  arrows: [...document.querySelectorAll("#canvas .edge.lit")]
    .map((one) => [one.querySelector("title").textContent.split("->")[1], one.classList.contains("failure")]),
  labels: [...document.querySelectorAll("#canvas [id*='label-'].lit")].map((one) => one.id.split("--")[1]),
}
"""


def ends(row):
    """(outcome, target) of every way out of a row of the request's table."""
    failures = zip(CAUSES, (row.on_failure, row.on_drain_failure, row.on_publish_failure), strict=True)
    return [("done", row.target), *((outcome, end) for outcome, end in failures if end is not None)]


def steps_of(make, numbers):
    return [
        make.row(number, outcome=outcome) for number in numbers for outcome, _ in ends(REQUEST.transitions[number])
    ]


@pytest.mark.parametrize("number", [4, 40, 46, 48])
def test_a_step_lights_the_one_way_that_it_took(explorer, make, number):
    row, steps = REQUEST.transitions[number], steps_of(make, [number])
    assert len(steps) > 2
    page = explorer(make.trace([make.call(name="c", steps=steps)]))
    for step in steps:
        failing = step.target != row.target
        lit = page.js(LIT)
        moved = [] if step.target == row.source else [[f"s_{identifier(step.target)}", failing]]
        assert lit["arrows"] == moved, step
        (label,) = lit["labels"]
        cause = CAUSES.get(step.outcome, "").replace(" ", "-")
        assert label.startswith(f"failure-{cause}-") if failing else "failure" not in label
        page.click("#next")


def test_no_step_of_any_row_lights_two_ways(explorer, make):
    steps = steps_of(make, range(len(REQUEST.transitions)))
    page = explorer(make.trace([make.call(name="c", steps=steps)]))
    for step in steps:
        lit = page.js(LIT)
        assert len(lit["arrows"]) == (step.source != step.target), step
        assert len(lit["labels"]) == 1, step
        page.js("document.getElementById('next').click()")


def test_a_way_out_that_fails_again_lights_where_it_ended(explorer, make):
    """A device error whose drain failed too, and an error that nobody foresaw: the state says which way it went."""
    row = REQUEST.transitions[46]
    again = make.row(46, outcome="failed")
    twice = make.step(row=46, event=row.event, source=row.source, target=row.on_drain_failure, outcome="failed")
    raised = make.step(row=46, event=row.event, source=row.source, target=row.on_failure, outcome="raised")
    page = explorer(make.trace([make.call(name="c", steps=[again, twice, raised])]))
    for step in (again, twice, raised):
        assert page.js(LIT)["arrows"] == [[f"s_{identifier(step.target)}", True]]
        page.click("#next")


def test_of_a_folded_arrow_only_the_words_of_the_row_are_lit(explorer, make):
    """The arrow of the row has more than one row on it; of its texts those of the row are in another colour."""
    arrows = "[...document.querySelectorAll('#canvas .edge.lit')]"
    folded = 0
    page = explorer(make.trace([make.call(name="c", steps=[make.row(number) for number in range(40, 50)])]))
    for number in range(40, 50):
        words = page.js(
            f"const groups = {{}}; for (const arrow of {arrows}) {{ let label = null;"
            "for (const one of arrow.querySelectorAll('[id*=label-], [id*=label-] ~ text')) {"
            "  if (one.nodeName !== 'text') label = one.id.split('label-')[1].split('--')[0].split('-');"
            "  else (groups[label] ??= []).push(getComputedStyle(one).fill + getComputedStyle(one).opacity); } }"
            "return groups"
        )
        if len(words) > 1:
            folded += 1
            (own,) = [looks for rows, looks in words.items() if str(number) in rows.split(",")]
            others = [look for rows, looks in words.items() if str(number) not in rows.split(",") for look in looks]
            assert len(set(own)) == 1
            assert own[0] not in others
        page.click("#next")
    assert folded


@pytest.mark.parametrize(("view", "place"), [("rows", "data-row='40'"), ("states", "data-state='settled'")])
def test_the_current_row_of_a_table_is_green_when_done_and_red_when_failed(explorer, make, view, place):
    def ground():
        return page.js("return getComputedStyle(document.querySelector(arguments[0])).backgroundColor", current)

    current = f"#view-{view} tr[{place}][aria-current=true]"
    steps = [make.row(40), make.row(40, outcome="publish_failed")]
    page = explorer(make.trace([make.call(name="c", steps=steps)]))
    page.emulate(prefers_reduced_motion="reduce")
    page.click(f"#views [data-view={view}]")
    green = ground()
    page.click("#next")
    red = ground()
    assert red != green
    page.click("#previous")
    assert ground() == green
