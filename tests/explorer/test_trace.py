"""What a page is given of a trace: every step can be told again from the columns, and nothing is there twice."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st


def told(columns):
    """The steps and calls of the columns, put together again."""
    words, of_calls, of_steps = columns["words"], columns["calls"], columns["steps"]
    at = 0
    for number, count in enumerate(of_calls["steps"]):
        request = of_calls["request"][number]
        steps = []
        for step in range(at, at + count):
            kind = columns["kinds"][of_steps["kind"][step]]
            steps.append((words[of_steps["subject"][step]], words[of_steps["slots"][step]], tuple(kind),
                          tuple(columns["acts"][of_steps["acts"][step]]), columns["actTimes"].get(step)))  # fmt: skip
        at += count
        texts = tuple(words[of_calls[name][number]] for name in ("name", "arguments", "result"))
        times = (of_calls["began"][number], of_calls["took"][number])
        yield texts, None if request < 0 else words[request], times, steps


def test_every_step_can_be_told_again(make):
    calls = list(make.story())
    found = list(told(make.trace(calls).columns()))
    assert len(found) == len(calls)
    for call, (texts, request, _, steps) in zip(calls, found, strict=True):
        assert texts == (call.name, call.arguments, call.result)
        assert request == call.request
        for step, (subject, slots, kind, acts, _) in zip(call.steps, steps, strict=True):
            assert (subject, slots) == (step.subject, step.slots)
            assert kind == (step.machine, step.row, step.event, step.source, step.target, tuple(step.guards.items()),
                            step.outcome, step.failed, step.ended, tuple(step.ran))  # fmt: skip
            assert acts == tuple((act.verb, act.digest, act.slot, act.failed, act.nth) for act in step.acts)


def test_times_are_counted_from_the_first_call_and_given_in_microseconds(make):
    calls = [
        make.call(name="one", steps=[make.step()], began=5_000, took=1_250),
        make.call(name="two", steps=[make.step(), make.step()], began=7_500, took=80, act_times={1: [300, 40]}),
        make.call(name="three", steps=[]),
    ]
    found = list(told(make.trace(calls).columns()))
    assert [times for _, _, times, _ in found] == [(0, 1.2), (2.5, 0.1), (-1, -1)]
    assert [steps[-1][4] if steps else None for _, _, _, steps in found] == [None, [0.3, 0.0], None]


def test_what_happens_again_costs_four_numbers(make):
    short, long = (len(json.dumps(make.trace(make.life("r1", rounds=rounds)).columns())) for rounds in (1_000, 2_000))
    steps = 4 * 1_000
    assert (long - short) / steps < 30


def test_different_things_are_kept_apart(make):
    """A step that differs in any field is another kind; a number that is a text somewhere else is not that text."""
    plain = make.step(guards={"a": True}, ran=["x"])
    others = [
        make.step(guards={"a": False}, ran=["x"]), make.step(guards={"b": True}, ran=["x"]), make.step(ran=["x"]),
        make.step(guards={"a": True}), make.step(guards={"a": True}, ran=["x"], failed="x"),
        make.step(guards={"a": True}, ran=["x"], ended="x"), make.step(guards={"a": True}, ran=["x"], row=1),
    ]  # fmt: skip
    columns = make.trace([make.call(name="c", steps=[plain, *others, plain])]).columns()
    numbers = columns["steps"]["kind"]
    assert numbers[0] == numbers[-1]
    assert len(set(numbers)) == len(others) + 1


texts = st.text(max_size=8)


@given(st.lists(st.tuples(texts, texts, st.lists(texts, max_size=3), st.none() | texts), max_size=12))
def test_any_text_survives(make, fields):
    steps = [make.step(subject=one, event=two, ran=ran, failed=failed) for one, two, ran, failed in fields]
    columns = json.loads(json.dumps(make.trace([make.call(name="c", steps=steps)]).columns()))
    ((_, _, _, found),) = told({**columns, "actTimes": {}})
    assert [(one[0], one[2][2], one[2][9], one[2][7]) for one in found] == [tuple(field) for field in fields]
