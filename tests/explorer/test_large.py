"""A trace of 50,000 steps: as many elements as for a small one, and no pause. Times are reported, not judged."""

from __future__ import annotations

import pytest

REQUESTS, ROUNDS = 400, 30


def calls(make):
    """About 50,000 steps of 400 requests; every fiftieth ends on a device error."""
    prefill = make.find("prepare_prefill", "admitted")
    for number in range(REQUESTS):
        yield from make.life(f"r{number + 1}", rounds=ROUNDS)
        if number % 50 == 0:
            yield make.call(name="prepare_prefill", request=f"r{number + 1}",
                            steps=[make.row(prefill, subject=f"r{number + 1}", outcome="failed")])  # fmt: skip


@pytest.fixture
def large(explorer, make):
    trace = make.trace(calls(make))
    assert trace.steps >= 50_000
    page = explorer(trace)
    page.steps = trace.steps
    return page


def elements(page, selector):
    return page.js("return document.querySelectorAll(arguments[0]).length", selector)


def test_there_are_no_more_elements_than_fit_on_the_screen(large):
    page = large
    everything = elements(page, "*") - elements(page, "svg *")
    assert everything < 1_000
    page.choose("everything")
    for share in (0.0, 0.31, 0.77, 1.0):
        page.js(
            "const list = document.getElementById('timeline'); list.scrollTop = arguments[0] * list.scrollHeight", share
        )
        page.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert 5 < elements(page, "#timeline [role=option]") < 60
        assert elements(page, "#requests [role=option]") < 60
    assert page.events[-1] == "finish"
    page.click("#last")
    assert page.step == page.steps
    assert elements(page, "*") - elements(page, "svg *") < 1_000


def test_search_and_filters_reach_all_of_it(large):
    large.click("#only-failed")
    assert len(large.subjects) == 1 + REQUESTS // 50
    large.choose("everything")
    assert large.text("#timeline-count").startswith(f"{REQUESTS // 50} of ")
    large.click("#only-failed")
    large.find("#search").send_keys("r399")
    assert large.subjects == ["r399"]


def test_how_long_it_takes(large, record_property):
    page = large
    page.choose("everything")
    took = {"load_ms": page.js("return performance.getEntriesByName('explorer')[0].duration")}
    took["step_ms"] = page.js(
        "const began = performance.now(); for (let i = 0; i < 200; i++) document.getElementById('next').click();"
        "return (performance.now() - began) / 200"
    )
    took["scroll_ms"] = page.driver.execute_async_script(
        "const done = arguments[0], list = document.getElementById('timeline');"
        "let turns = 0; const began = performance.now();"
        "const turn = () => { list.scrollTop += 4000; turns++ < 60 ? requestAnimationFrame(turn)"
        " : done((performance.now() - began) / 60); }; turn()"
    )
    took["filter_ms"] = page.js(
        "const began = performance.now(); document.getElementById('only-failed').click();"
        "document.getElementById('only-failed').click(); return (performance.now() - began) / 2"
    )
    for name, value in took.items():
        record_property(name, round(value, 2))
        print(f"{name} {value:.2f}")
