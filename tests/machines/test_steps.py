"""Recorded steps are data: compared by value, readable, the same in every run."""

from __future__ import annotations

import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.backends.base import DeviceError, DrainResult
from context_cache.machines import (
    ALL_MACHINES,
    REQUEST,
    EventRefused,
    Firing,
    ListRecorder,
    Runner,
    Step,
    Subject,
    compare_steps,
)

FIRING = Firing(
    machine="request", row=3, event="finalize_prefill", source="prefilling", target="settled", guards=(),
    outcome="done", work_ended="by_runtime_sync",
)  # fmt: skip
STEP = Step("r1", FIRING, ran=("apply_advances", "publish"), slots=(0, 1))


def test_equal_facts_make_equal_steps():
    twin = Step("r1", attrs.evolve(FIRING), ran=("apply_advances", "publish"), slots=(0, 1))
    assert twin == STEP
    assert hash(twin) == hash(STEP)


@pytest.mark.parametrize("field", ["machine", "row", "event", "source", "target", "guards", "outcome", "work_ended"])
def test_a_step_shows_its_firing_and_differs_when_that_differs(field):
    changed = {"row": 4, "guards": (("joiner_waits", True),), "work_ended": None}.get(field, "else")
    other = attrs.evolve(STEP, firing=attrs.evolve(FIRING, **{field: changed}))
    assert getattr(STEP, field) == getattr(FIRING, field)
    assert getattr(other, field) == changed
    assert other != STEP


@pytest.mark.parametrize(
    ("field", "changed"),
    [("subject", "r2"), ("ran", ("publish", "apply_advances")), ("slots", (1, 0)), ("failed", "publish")],
)
def test_steps_differ_in_each_fact_of_their_own(field, changed):
    assert attrs.evolve(STEP, **{field: changed}) != STEP


@pytest.mark.parametrize("value", [STEP, FIRING])
def test_a_recorded_value_cannot_be_changed(value):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.machine = "else"


# ---- reading ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (STEP, "request r1: prefilling --finalize_prefill--> settled / apply_advances / publish"),
        (
            Step("r2", attrs.evolve(FIRING, guards=(("lit", True), ("warm", False)))),
            "request r2: prefilling --finalize_prefill [lit, not warm]--> settled",
        ),
        (
            Step("r1", attrs.evolve(FIRING, outcome="publish_failed"), ("apply_advances",), (0,), "publish"),
            "request r1: prefilling --finalize_prefill--> settled / apply_advances (publish_failed at publish)",
        ),
        (
            Step("r1", attrs.evolve(FIRING, row=-1, target="prefilling", outcome="refused", work_ended=None)),
            "request r1: prefilling --finalize_prefill--> prefilling (refused)",
        ),
    ],
    ids=["done", "guards", "failed", "refused"],
)
def test_a_step_reads_as_a_row(step, text):
    assert str(step) == text


def life(scripted_call) -> tuple[list[Step], list[BaseException]]:
    """A life with all that is recorded: done, refused (by state, by guards), failed, publish failed, drain failed."""
    recorder, errors = ListRecorder(), []
    runner, subject = Runner(REQUEST, recorder), Subject("r1", "new")
    decode = {"growth_possible": True, "view_current": True, "only_sequence": False}
    for event, facts, script in (
        ("begin_request", {}, {}),
        ("finalize_prefill", {}, {}),
        ("prepare_prefill", {}, {}),
        ("enqueue_prefill_captures", {"plain_checkpoint": True}, {}),
        ("finalize_prefill", {"frozen_policy": False}, {2: ValueError("full")}),
        ("admit_sequence", {"view_current": True}, {}),
        ("prepare_decode_step", decode | {"growth_possible": False, "only_sequence": True}, {}),
        ("prepare_decode_step", decode, {1: DeviceError("upload_rows", "s", "fault")}),
        ("prepare_decode_step", decode, {}),
        ("complete_decode_step", {"captures_planned": True, "joiner_waits": False}, {5: DrainResult(ok=False)}),
        ("shutdown", {}, {}),
    ):
        try:
            runner.fire(subject, event, scripted_call(facts, script))
        except Exception as error:
            errors.append(error)
    return recorder.steps, errors


def test_two_runs_of_one_script_are_equal_and_show_no_object_ids(scripted_call):
    """An id or an address in a trace would make every committed trace differ from the next run."""
    (one, errors), (other, _) = life(scripted_call), life(scripted_call)
    assert compare_steps(one, other) is None
    assert repr(one) == repr(other)
    assert [step.outcome for step in one] == [
        "done", "refused", "done", "done", "publish_failed", "done", "refused", "failed", "done", "drain_failed",
        "done",
    ]  # fmt: skip
    for text in (repr(one), *map(str, one), *map(str, errors), *map(repr, errors)):
        assert " at 0x" not in text
        assert "object at" not in text
        assert "lambda" not in text


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_a_spec_prints_without_object_ids(spec):
    for text in (repr(spec), *(str(row) for row in spec.transitions)):
        assert "0x" not in text
        assert "lambda" not in text


def test_a_refusal_travels_between_processes(scripted_call):
    with pytest.raises(EventRefused) as caught:
        Runner(REQUEST).fire(Subject("r1", "new"), "finish", scripted_call())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert (copy.subject, copy.state, copy.event, copy.accepted) == ("r1", "new", "finish", ("begin_request",))


# ---- comparing -------------------------------------------------------------


def steps(*subjects: str) -> list[Step]:
    return [attrs.evolve(STEP, subject=subject) for subject in subjects]


def test_equal_lists_have_no_difference():
    assert compare_steps([], []) is None
    assert compare_steps(steps("r1", "r2"), iter(steps("r1", "r2"))) is None


def test_the_first_difference_is_the_one_reported():
    found = compare_steps(steps("r1", "r2", "r3"), steps("r1", "x", "y"))
    assert found is not None
    assert (found.index, found.expected.subject, found.actual.subject) == (1, "r2", "x")
    assert str(found).startswith("step 1: expected request r2: ")
    assert ", got request x: " in str(found)


def test_a_run_that_goes_on_too_long_is_a_difference():
    found = compare_steps(steps("r1"), steps("r1", "r2"))
    assert found is not None
    assert (found.index, found.expected, found.actual.subject) == (1, None, "r2")
    assert "expected no further step, got request r2" in str(found)


def test_a_run_that_stops_early_is_a_difference():
    found = compare_steps(steps("r1", "r2"), steps("r1"))
    assert found is not None
    assert (found.index, found.expected.subject, found.actual) == (1, "r2", None)
    assert str(found).endswith(", got nothing")


def test_comparing_does_not_read_past_the_difference():
    """The actual side may be a run in progress; it is not driven further than needed."""

    def run():
        yield from steps("x")
        pytest.fail("read past the difference")

    found = compare_steps(steps("r1", "r2"), run())
    assert found is not None
    assert found.index == 0


names = st.lists(st.sampled_from("abc"), max_size=5)


@given(names, names)
def test_a_difference_is_found_exactly_where_the_lists_part(one, other):
    expected, actual = steps(*one), steps(*other)
    found = compare_steps(expected, actual)
    if one == other:
        assert found is None
        return
    assert found is not None
    assert one[: found.index] == other[: found.index]
    assert found.expected == (expected[found.index] if found.index < len(one) else None)
    assert found.actual == (actual[found.index] if found.index < len(other) else None)
    assert found.expected != found.actual
