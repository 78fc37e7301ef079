"""Firing events: which row, what is refused, what is recorded, and what a subject is. Failures: ``test_failures``."""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transitions import Machine

from context_cache.backends.base import DeviceError
from context_cache.machines import (
    ALL_MACHINES,
    EXECUTION,
    REQUEST,
    VIEW,
    Couple,
    DeviceAction,
    Ending,
    EventRefused,
    HostStep,
    LifecycleError,
    ListRecorder,
    MachineSpec,
    Runner,
    State,
    Subject,
    Transition,
)

# A step and the verb behind it have one name, but for these pairs.
VERBS = {"upload_cleared_rows": "upload_base_rows", "upload_cleared_draft_rows": "upload_draft_rows"}

UNDECLARED = [
    pytest.param(spec, state, event, id=f"{spec.name}-{state}-{event}")
    for spec in ALL_MACHINES
    for state, event in spec.undeclared_pairs()
]
OUTCOMES = [
    pytest.param(spec, state, event, mask, id=f"{spec.name}-{state}-{event}-{mask}")
    for spec in ALL_MACHINES
    for (state, event), choice in spec.choices.items()
    for mask in range(len(choice.rows))
]


def rows_that_want(spec, state, event, facts):
    """Straight from the table: the rows of (state, event) whose guards all hold as wanted."""
    return [
        (number, row)
        for number, row in enumerate(spec.transitions)
        if (row.source, row.event) == (state, event) and all(facts[g.name] == g.wanted for g in row.guards)
    ]


def verbs_of(steps):
    return [VERBS.get(step.name, step.name) for step in steps]


class Shouting:
    """A recorder that raises, after it has been told some steps."""

    def __init__(self, patience: int = 0) -> None:
        self.patience, self.told = patience, 0

    def record(self, step) -> None:
        self.told += 1
        if self.told > self.patience:
            raise OSError("disk full")


# ---- refused ---------------------------------------------------------------


@pytest.mark.parametrize(("spec", "state", "event"), UNDECLARED)
def test_an_undeclared_event_is_refused_and_changes_nothing(spec, state, event, make_call):
    """C103: the caller learns who refused what, in which state, and what would have been accepted."""
    recorder = ListRecorder()
    runner, subject, call = Runner(spec, recorder), Subject("s1", state), make_call(spec)
    with pytest.raises(EventRefused) as caught:
        runner.fire(subject, event, call)
    error = caught.value
    assert isinstance(error, LifecycleError)
    assert (error.machine, error.subject, error.state, error.event) == (spec.name, "s1", state, event)
    assert error.accepted == spec.accepted(state)
    assert error.refused_by == ()
    assert str(error).startswith(f"{spec.name} s1: {event!r} is not accepted in {state!r} (accepted: ")
    assert all(name in str(error) for name in error.accepted)
    assert "the state is final" in str(error) or error.accepted
    assert subject.state == state
    assert call.log == []
    (step,) = recorder.steps
    assert (step.subject, step.machine, step.event, step.row) == ("s1", spec.name, event, -1)
    assert (step.source, step.target, step.outcome, step.ran) == (state, state, "refused", ())
    assert (step.guards, step.failed, step.work_ended) == ((), None, None)
    assert runner.declares(state, event) is False
    assert runner.pick(state, event, call) is None
    assert runner.offer(subject, event, call) is False
    assert (subject.state, call.log, len(recorder.steps)) == (state, [], 1)


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_an_event_that_no_machine_knows_is_refused(spec, make_call):
    """C111: an unknown event name is an error, also when it is the name of a state, a method or another's event."""
    other = "take" if spec is REQUEST else "prepare_decode_step"
    foreign = [other] if other not in spec.events else []
    for event in ("launch", "trigger", "state", spec.initial, f"to_{spec.initial}", *foreign):
        subject = Subject("s1", spec.initial)
        with pytest.raises(EventRefused, match=f"'{event}' is not accepted in '{spec.initial}'"):
            Runner(spec).fire(subject, event, make_call(spec))
        assert subject.state == spec.initial


def test_a_refusal_by_guards_names_each_guard_that_said_no(make_call):
    facts = {"growth_possible": False, "view_current": True, "only_sequence": True}
    recorder, call = ListRecorder(), make_call(REQUEST, facts)
    subject = Subject("r1", "seating")
    with pytest.raises(EventRefused) as caught:
        Runner(REQUEST, recorder).fire(subject, "prepare_decode_step", call)
    assert caught.value.refused_by == ("growth_possible", "not view_current", "not only_sequence")
    assert " because of growth_possible, not view_current, not only_sequence (accepted: " in str(caught.value)
    assert (subject.state, call.log) == ("seating", [])
    (step,) = recorder.steps
    assert (step.outcome, step.guards, step.row) == ("refused", tuple(facts.items()), -1)


def test_a_refusal_travels_as_a_value(make_call):
    with pytest.raises(EventRefused) as caught:
        Runner(EXECUTION).fire(Subject("c", "held"), "undo_take", make_call(EXECUTION, {"took_token": False}))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.refused_by) == (str(caught.value), ("took_token",))


# ---- picking a row ---------------------------------------------------------


@pytest.mark.parametrize(("spec", "state", "event", "mask"), OUTCOMES)
def test_both_ways_of_picking_a_row_agree_with_the_table(spec, state, event, mask, make_call):
    """The dictionary that serves hot rows and ``transitions`` must be one machine.

    Three runs of one event: as ``fire`` decides, by the library, and by the dictionary (``offer``). Each must end in
    the target of the only row that the table has for this outcome, having run its steps, and record the same step. It
    could go wrong by the order of rows, a negated guard, or a state that one of them commits and the other does not.
    """
    choice = spec.choices[state, event]
    facts = dict(choice.outcomes[mask])
    wanting = rows_that_want(spec, state, event, facts)
    assert len(wanting) <= 1, "two rows for one outcome"
    runs = []
    for way in ("fire", "library", "dictionary"):
        recorder = ListRecorder()
        runner, subject, call = Runner(spec, recorder), Subject("s1", state), make_call(spec, facts)
        answer: object
        try:
            if way == "fire":
                answer = runner.fire(subject, event, call)
            elif way == "library":
                answer = runner.fire_by_library(subject, event, call, choice, choice.mask(call))
            else:
                answer = Ending.DONE if runner.offer(subject, event, call) else "skipped"
        except EventRefused as error:
            answer = error.args
        runs.append((answer, subject.state, call.log, recorder.steps))
    if not wanting:
        said_no = tuple(
            dict.fromkeys(
                str(guard)
                for row in spec.transitions
                if (row.source, row.event) == (state, event)
                for guard in row.guards
                if facts[guard.name] != guard.wanted
            )
        )
        assert runs[0] == runs[1]
        assert runs[0][0] == (spec.name, "s1", state, event, spec.accepted(state), said_no)
        assert said_no, "refused, and no guard said no"
        (refused,) = runs[0][3]
        assert (refused.outcome, refused.guards, refused.target) == ("refused", tuple(facts.items()), state)
        assert runs[2] == ("skipped", state, [], [])
        return
    ((number, row),) = wanting
    assert runs[0] == runs[1] == runs[2]
    answer, end, log, (step,) = runs[0]
    ran = (*row.steps, *spec.by_state[row.target].on_enter)
    assert (answer, end) == (Ending.DONE, row.target)
    assert log == verbs_of(ran)
    assert step.ran == tuple(one.name for one in ran)
    assert (step.row, step.source, step.target, step.outcome) == (number, state, row.target, "done")
    assert step.guards == tuple(facts.items())
    assert step.slots == make_call(spec).slots
    assert step.failed is None
    assert step.work_ended == ("drained" if "drain" in step.ran else row.work_ended)
    runner = Runner(spec)
    assert runner.pick(state, event, make_call(spec, facts)).number == number
    assert runner.declares(state, event)


def test_hot_pairs_do_not_go_through_the_library_and_others_do(make_call, monkeypatch):
    asked = []
    by_library = Runner.fire_by_library

    def watched(self, subject, event, *rest):
        asked.append(event)
        return by_library(self, subject, event, *rest)

    monkeypatch.setattr(Runner, "fire_by_library", watched)
    for (state, event), choice in REQUEST.choices.items():
        for mask in [mask for mask, row in enumerate(choice.rows) if row is not None]:
            Runner(REQUEST).fire(Subject("r1", state), event, make_call(REQUEST, dict(choice.outcomes[mask])))
    assert set(asked) == {row.event for row in REQUEST.transitions if not row.hot}
    assert not {row.event for row in REQUEST.transitions if row.hot} & set(asked)


@pytest.mark.parametrize(("spec", "state", "event", "mask"), [p for p in OUTCOMES if p.values[0].follows is None])
def test_each_guard_is_looked_at_once_and_before_anything_runs(spec, state, event, mask, make_call):
    """A guard asked twice could answer twice differently, and one asked after a step would see its effects."""
    choice = spec.choices[state, event]
    facts = dict(choice.outcomes[mask])
    call = make_call(spec, facts)
    call.script[0] = lambda: seen.append(list(call.looked))
    seen: list[list[str]] = []
    try:
        Runner(spec).fire(Subject("s1", state), event, call)
    except EventRefused:
        assert call.log == []
    assert sorted(call.looked) == sorted(facts)
    assert seen in ([], [call.looked])


@pytest.mark.parametrize(("spec", "state", "event", "mask"), [p for p in OUTCOMES if p.values[0].follows is None])
def test_a_question_changes_nothing(spec, state, event, mask, make_call):
    """C107: ``pick`` asked three times: the same answer, no verb, no step recorded, and guards alone were asked."""
    choice, recorder = spec.choices[state, event], ListRecorder()
    facts = dict(choice.outcomes[mask])
    call, runner = make_call(spec, facts), Runner(spec, recorder)
    answers = [runner.pick(state, event, call) for _ in range(3)]
    assert answers[0] is answers[1] is answers[2] is choice.rows[mask]
    assert sorted(call.looked) == sorted([*facts] * 3)
    assert (call.log, recorder.steps) == ([], [])


def test_a_question_whose_guard_raises_changes_nothing(make_call):
    """C107: the preparation of a question is broken (a fact is missing); three times, and the subject is as before."""
    recorder, subject, runner = ListRecorder(), Subject("r1", "settled"), None
    runner = Runner(REQUEST, recorder)
    call = make_call(REQUEST, {"growth_possible": True})
    for ask in (
        lambda: runner.pick("settled", "prepare_decode_step", call),
        lambda: runner.fire(subject, "prepare_decode_step", call),
        lambda: runner.offer(subject, "prepare_decode_step", call),
    ):
        with pytest.raises(AttributeError, match="view_current"):
            ask()
    assert (subject.state, call.log, recorder.steps) == ("settled", [], [])
    runner.fire(subject, "finish", make_call(REQUEST))
    assert subject.state == "released"


# ---- steps -----------------------------------------------------------------


def test_a_device_action_that_enqueued_nothing_is_not_said_to_have_run(make_call):
    """Uploads of rows that are not dirty are no actions."""
    idle = {"upload_base_rows", "upload_draft_rows", "restore_partial"}
    recorder, call = ListRecorder(), make_call(REQUEST, idle=idle)
    Runner(REQUEST, recorder).fire(Subject("r1", "admitted"), "prepare_prefill", call)
    Runner(REQUEST, recorder).fire(Subject("r1", "settled"), "finish", call)
    assert idle < set(call.log)
    assert not idle & set(recorder.steps[0].ran)
    assert recorder.steps[1].ran == ("unbind_rows", "release", "execution.give_back", "view.forget")


def test_a_coupling_that_no_machine_takes_is_skipped(make_call):
    recorder = ListRecorder()
    call = make_call(REQUEST, refuses={"execution.take", "view.start_lengths"})
    Runner(REQUEST, recorder).fire(Subject("r1", "admitted"), "prepare_prefill", call)
    assert call.log[0] == "execution.take"
    ran = [name for name in call.log if name not in call.refuses]
    assert recorder.steps[0].ran == tuple(ran)
    assert {"view.claim", "bind_rows"} < set(ran)


def test_verbs_get_what_their_call_planned(make_call):
    facts = {"survivors_remain": True, "joiner_waits": False, "view_current": False, "captures_planned": True}
    call = make_call(REQUEST, facts)
    for state, event in (
        ("admitted", "prepare_prefill"), ("prefilling", "publish_mtp_endpoint"), ("prefilling", "restore_mtp_boundary"),
        ("settled", "begin_batch_compaction"), ("compacting", "compact_batch"),
    ):  # fmt: skip
        Runner(REQUEST).fire(Subject("r1", state), event, call)

    def got(verb, *wanted):
        assert len(call.arguments[verb]) == len(wanted)
        return all(one is other for one, other in zip(call.arguments[verb], wanted, strict=True))

    assert got("reset_base_lengths", call.lengths)
    assert got("reset_draft_lengths", call.draft_lengths)
    assert got("install_base_lengths", call.lengths)
    assert got("install_draft_lengths", call.draft_lengths)
    assert got("copy_mapping", call.mapping, call.mapping_tensor)
    assert call.arguments["compact_base_lengths"] == (call.mapping_tensor, 3, 2)
    assert call.arguments["compact_draft_lengths"] == (call.mapping_tensor, 3, 2)
    assert got("clear_resident_state", call.retired_residents)
    for verb in ("zero_recurrent", "restore_recurrent", "restore_partial"):
        assert got(verb, call.restores)
    for verb in ("capture_recurrent", "capture_partial"):
        assert got(verb, call.captures)
    for verb in ("capture_hidden", "restore_hidden"):
        assert got(verb, call.hidden)


@pytest.mark.parametrize(("state", "event", "mask"), [p.values[1:] for p in OUTCOMES if p.values[0] is REQUEST])
def test_an_unpaired_request_does_the_same_without_the_draft(state, event, mask, make_call):
    """Its deployment may have no draft tables at all: not one draft action may reach the device, nor its record."""
    choice, ends = REQUEST.choices[state, event], []
    if choice.rows[mask] is None:
        return
    for paired in (True, False):
        recorder, subject = ListRecorder(), Subject("r1", state)
        call = make_call(REQUEST, dict(choice.outcomes[mask]), paired=paired)
        assert Runner(REQUEST, recorder).fire(subject, event, call) is Ending.DONE
        ends.append((subject.state, call.log, recorder.steps[0].ran))
    (paired_end, paired_log, paired_ran), (end, log, ran) = ends
    assert end == paired_end
    assert log == [verb for verb in paired_log if "draft" not in verb]
    assert ran == tuple(name for name in paired_ran if "draft" not in name)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("way", ["fire", "offer"])
@pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize(
    "entered", [(), (Couple("view", "forget"),)], ids=["host steps only", "a coupling on entering"]
)
def test_a_host_step_that_had_nothing_to_do_is_not_said_to_have_run(entered, hot, way, recorded, make_call):
    """It returns False. True and None are the same answer: it did its work."""
    steps = (
        HostStep("idle", lambda call: False), HostStep("busy", lambda call: True), HostStep("plain", lambda call: None),
    )  # fmt: skip
    spec = MachineSpec(
        name="small",
        initial="before",
        states=(State("before", "not yet"), State("after", "done", final=True, on_enter=entered)),
        transitions=(Transition(event="go", source="before", target="after", steps=steps, hot=hot),),
    )
    recorder, subject = ListRecorder(), Subject("s1", "before")
    assert getattr(Runner(spec, recorder if recorded else None), way)(subject, "go", make_call(spec))
    assert subject.state == "after"
    ran = ("busy", "plain", *(couple.name for couple in entered))
    assert [step.ran for step in recorder.steps] == ([ran] if recorded else [])


@pytest.mark.parametrize(("state", "event", "mask"), [p.values[1:] for p in OUTCOMES if p.values[0] is REQUEST])
def test_a_state_with_outstanding_work_is_entered_before_the_first_step(state, event, mask, make_call):
    """And every other state after the last one: whatever interrupts the row, the end of life drains.

    A reader of the state during the row (another thread, C116) sees this state and no third one.
    """
    choice = REQUEST.choices[state, event]
    row = choice.rows[mask]
    if row is None:
        return
    own = [step for step in row.transition.steps if not isinstance(step, Couple)]
    subject, seen = Subject("r1", state), []
    script = dict.fromkeys(range(len(own)), lambda: seen.append(subject.state))
    Runner(REQUEST).fire(subject, event, make_call(REQUEST, dict(choice.outcomes[mask]), script))
    target = row.transition.target
    assert seen == [target if REQUEST.by_state[target].outstanding else state] * len(own)
    assert subject.state == target


# ---- one subject, many subjects -------------------------------------------


@pytest.mark.parametrize(
    ("state", "event", "number", "inner"),
    [
        ("admitted", "prepare_prefill", 0, "finish"),
        ("decoding", "complete_decode_step", 0, "finish"),
        ("settled", "finish", 1, "drop"),
        ("decoding", "drop", 1, "drop"),
    ],
    ids=["library, entered first", "hot", "way out", "drained"],
)
@pytest.mark.parametrize("way", ["fire", "offer"])
def test_an_event_from_inside_a_row_of_the_same_subject_is_refused(state, event, number, inner, way, make_call):
    """C119: no half-made state is ever a source. The outer row ends as if nothing had been asked; nothing is queued."""
    recorder, subject, refusals = ListRecorder(), Subject("r1", state), []
    runner = Runner(REQUEST, recorder)

    def ask():
        with pytest.raises(LifecycleError, match=f"request r1: '{inner}' was fired from inside") as caught:
            getattr(runner, way)(subject, inner, make_call(REQUEST))
        refusals.append(caught.value)

    facts = {"captures_planned": False, "joiner_waits": False}
    call = make_call(REQUEST, facts, {number: ask})
    assert runner.fire(subject, event, call) is Ending.DONE
    assert len(refusals) == 1
    assert not isinstance(refusals[0], EventRefused)
    assert [step.event for step in recorder.steps] == [event]
    (target,) = {row.target for _, row in rows_that_want(REQUEST, state, event, facts)}
    assert subject.state == target
    assert recorder.steps[0].target == target


REGION_ROWS = [
    pytest.param(spec, row, id=f"{spec.name}-{row}") for spec in (EXECUTION, VIEW) for row in spec.transitions
]


def region_facts(spec, row):
    facts = dict.fromkeys(spec.choices[row.source, row.event].names, False)
    return facts | {guard.name: guard.wanted for guard in row.guards}


@pytest.mark.parametrize("way", ["fire", "offer"])
@pytest.mark.parametrize(("spec", "row"), REGION_ROWS)
def test_rows_without_device_steps_are_no_less_guarded_against_events_from_inside(spec, row, way, make_call):
    """C119: such rows have nothing to unwind and may take a shorter way; it must refuse, and end, like the long one."""
    recorder, subject, refusals = ListRecorder(), Subject("c", row.source), []
    runner, facts = Runner(spec, recorder), region_facts(spec, row)

    def ask():
        for inner in ("fire", "offer"):
            with pytest.raises(LifecycleError, match=f"{spec.name} c: '{row.event}' was fired from inside"):
                getattr(runner, inner)(subject, row.event, make_call(spec, facts))
            refusals.append(inner)

    assert getattr(runner, way)(subject, row.event, make_call(spec, facts, {0: ask}))
    assert refusals == ["fire", "offer"]
    assert subject.state == row.target
    assert [step.event for step in recorder.steps] == [row.event]
    following = spec.accepted(row.target)[0]
    assert runner.offer(
        subject, following, make_call(spec, dict.fromkeys(spec.choices[row.target, following].names, True))
    )


@pytest.mark.parametrize("way", ["fire", "offer"])
@pytest.mark.parametrize("bug", [AssertionError("bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
@pytest.mark.parametrize(("spec", "row"), REGION_ROWS)
def test_a_bug_in_a_row_without_device_steps_leaves_its_source(spec, row, bug, way, make_call):
    recorder, subject = ListRecorder(), Subject("c", row.source)
    runner, call = Runner(spec, recorder), make_call(spec, region_facts(spec, row), {0: bug})
    with pytest.raises(type(bug)) as caught:
        getattr(runner, way)(subject, row.event, call)
    assert caught.value is bug
    assert subject.state == row.source
    assert [(step.outcome, step.target) for step in recorder.steps] == [("raised", row.source)]
    assert getattr(runner, way)(subject, row.event, make_call(spec, region_facts(spec, row)))
    assert subject.state == row.target


def test_one_subjects_row_may_drive_another_subject(make_call):
    """C101: r1's row ends r2 and then fails; r2 has ended all the same, and r1 alone goes to its failure state."""
    recorder = ListRecorder()
    runner, r1, r2 = Runner(REQUEST, recorder), Subject("r1", "admitted"), Subject("r2", "decoding")
    broken = DeviceError("upload_rows", "s", "fault")
    call = make_call(REQUEST, {}, {0: lambda: runner.fire(r2, "drop", make_call(REQUEST)), 1: broken})
    with pytest.raises(DeviceError):
        runner.fire(r1, "prepare_prefill", call)
    assert (r1.state, r2.state) == ("broken", "released")
    assert [(step.subject, step.outcome) for step in recorder.steps] == [("r2", "done"), ("r1", "failed")]


def test_a_cancelled_row_blocks_nobody(make_call):
    """C102: a BaseException leaves r1's row; r2 and then r1 are served as usual."""
    runner, r1, r2 = Runner(REQUEST), Subject("r1", "admitted"), Subject("r2", "admitted")
    with pytest.raises(KeyboardInterrupt):
        runner.fire(r1, "prepare_prefill", make_call(REQUEST, {}, {0: KeyboardInterrupt()}))
    assert runner.fire(r2, "prepare_prefill", make_call(REQUEST)) is Ending.DONE
    call = make_call(REQUEST)
    assert runner.fire(r1, "drop", call) is Ending.DONE
    assert call.log[0] == "drain"
    assert (r1.state, r2.state) == ("released", "prefilling")


def test_a_state_cannot_be_assigned():
    """C108: no way to a state but a row; there are no generated go-straight-to triggers either."""
    subject = Subject("r1", "new")
    with pytest.raises(AttributeError):
        subject.state = "released"
    with pytest.raises(AttributeError):
        subject.to_released()
    with pytest.raises(AttributeError):
        subject.finish()
    assert subject.state == "new"
    assert not [event for event in Runner(REQUEST)._machine.events if event.startswith("to_")]


class Clashing(Subject):
    """A subject with methods named like events, states and the library's own."""

    __slots__ = ()

    def finish(self) -> str:
        return "mine"

    release = drop = released = trigger = may_finish = is_released = finish


def test_nothing_is_bound_to_a_subject(make_call):
    """C109, C110: the library would bind ``trigger``, ``finish``, ``is_released``; slots forbid it, clashes hide it."""
    subject = Clashing("r1", "settled")
    before = dir(subject)
    Runner(REQUEST).fire(subject, "finish", make_call(REQUEST))
    assert subject.state == "released"
    assert dir(subject) == before
    assert subject.finish() == subject.release() == subject.trigger() == "mine"
    assert not hasattr(subject, "__dict__")
    with pytest.raises(AttributeError):
        subject.anything = 1


def test_subjects_are_compared_by_identity():
    """Two requests of one id (of two coordinators) are two requests."""
    one, other = Subject("r1", "new"), Subject("r1", "new")
    assert one != other
    assert len({one, other}) == 2


LIFE = (
    ("begin_request", {}),
    ("prepare_prefill", {}),
    ("finalize_prefill", {"frozen_policy": False}),
    ("prepare_decode_step", {"growth_possible": True, "view_current": True, "only_sequence": False}),
    ("complete_decode_step", {"captures_planned": False, "joiner_waits": False}),
    ("finish", {}),
)


def test_all_subjects_share_one_machine(make_call):
    """C113: the cost of a request is flat: its last life makes exactly as many Python calls as its tenth.

    Counted, not timed. A state graph built for each subject, or a list of subjects that is searched, would show.
    """
    runner = Runner(REQUEST, ListRecorder())

    def live(number):
        subject = Subject(f"r{number}", "new")
        for event, facts in LIFE:
            runner.fire(subject, event, make_call(REQUEST, facts))
        assert subject.state == "released"

    def calls_of(number):
        count = itertools.count()

        def counting(frame, event, argument):
            if event in ("call", "c_call"):
                next(count)

        previous = sys.getprofile()
        gc.collect()
        gc.disable()  # a collection in between would be counted with its callbacks
        sys.setprofile(counting)
        try:
            live(number)
        finally:
            gc.enable()
            sys.setprofile(previous)
        return next(count)

    def machines():
        gc.collect()
        return sum(issubclass(type(thing), Machine) for thing in gc.get_objects())

    live(0)
    early, known = calls_of(10), machines()
    for number in range(11, 500):
        live(number)
    assert calls_of(500) == early
    assert machines() == known
    assert runner._machine.models == []


def test_ended_subjects_are_not_kept(make_call):
    """C114: neither ordinary ends nor errors that went through the library keep a subject alive."""
    runner, alive = Runner(REQUEST), []
    for number in range(300):
        subject = Subject(f"r{number}", "admitted")
        alive.append(weakref.ref(subject))
        script = {} if number % 3 else {1: DeviceError("upload_rows", "s", "fault")}
        try:
            runner.fire(subject, "prepare_prefill", make_call(REQUEST, {}, script))
            runner.fire(subject, "begin_request", make_call(REQUEST))
        except (DeviceError, EventRefused):
            runner.fire(subject, "drop", make_call(REQUEST))
        assert subject.state == "released"
    del subject
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


# ---- recorders -------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 2])
def test_a_recorder_that_raises_is_switched_off_and_stops_nothing(patience, make_call, caplog):
    """A trace is worth less than a request."""
    recorder, subject = Shouting(patience), Subject("r1", "new")
    runner = Runner(REQUEST, recorder)
    with caplog.at_level(logging.ERROR, logger="context_cache"):
        for event, facts in LIFE:
            assert runner.fire(subject, event, make_call(REQUEST, facts)) is Ending.DONE
    assert subject.state == "released"
    assert recorder.told == patience + 1, "it was asked again"
    assert runner.recorder is None
    (entry,) = caplog.records
    assert "request r1: the recorder raised and is switched off" in entry.getMessage()
    assert entry.exc_info is not None


def test_a_recorder_that_raises_hides_neither_a_refusal_nor_a_failure(make_call):
    subject = Subject("r1", "admitted")
    with pytest.raises(EventRefused):
        Runner(REQUEST, Shouting()).fire(subject, "finalize_prefill", make_call(REQUEST))
    error = DeviceError("upload_rows", "s", "fault")
    with pytest.raises(DeviceError) as caught:
        Runner(REQUEST, Shouting()).fire(subject, "prepare_prefill", make_call(REQUEST, {}, {1: error}))
    assert caught.value is error
    assert subject.state == "broken"


@pytest.mark.parametrize(("spec", "state", "event", "mask"), OUTCOMES)
def test_a_run_does_not_depend_on_being_recorded(spec, state, event, mask, make_call):
    facts = dict(spec.choices[state, event].outcomes[mask])
    ends = []
    for recorder in (None, ListRecorder()):
        subject, call = Subject("s1", state), make_call(spec, facts)
        ends.append((Runner(spec, recorder).offer(subject, event, call), subject.state, call.log))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_what_was_recorded_before_does_not_colour_a_step(spec, make_call):
    """Parts of a step are shared between steps; one runner that has seen every outcome must say what a new one says."""
    shared = ListRecorder()
    old = Runner(spec, shared)
    for _ in range(2):
        for (state, event), choice in spec.choices.items():
            for mask, row in enumerate(choice.rows):
                if row is None:
                    continue
                facts, fresh = dict(choice.outcomes[mask]), ListRecorder()
                for runner in (old, Runner(spec, fresh)):
                    assert runner.offer(Subject("s1", state), event, make_call(spec, facts))
                assert shared.steps[-1] == fresh.steps[-1]
                assert shared.steps[-1].guards == choice.outcomes[mask]


# ---- any sequence of events ------------------------------------------------


FACTS = sorted({guard.name for row in REQUEST.transitions for guard in row.guards})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(REQUEST.events),
            st.fixed_dictionaries({name: st.booleans() for name in FACTS}),
            st.integers(0, 5),
        ),
        max_size=25,
    )
)
def test_a_trace_holds_every_change_and_leads_to_the_same_state(scripted_call, history):
    """C108: any events, any facts, device errors anywhere: each step starts where the last one of the trace ended."""
    recorder, subject = ListRecorder(), Subject("r1", "new")
    runner = Runner(REQUEST, recorder)
    for event, facts, place in history:
        row = runner.pick(subject.state, event, scripted_call(facts))
        own = [] if row is None else [step for step in row.transition.steps if not isinstance(step, Couple)]
        script = {}
        if place < len(own) and isinstance(own[place], DeviceAction):
            script = {place: DeviceError(own[place].name, "s", "fault")}
        try:
            runner.fire(subject, event, scripted_call(facts, script))
        except EventRefused:
            assert row is None
        except DeviceError:
            assert script
    state = "new"
    for step in recorder.steps:
        assert step.source == state
        state = step.target
    assert state == subject.state
    assert len(recorder.steps) == len(history)


def test_a_device_error_from_a_host_step_is_a_bug_like_any_other(make_call):
    """Only device actions may fail. It is recorded as raised, and blames no step."""
    recorder, subject = ListRecorder(), Subject("r1", "admitted")
    odd = DeviceError("upload_rows", "s", "not from an action")
    with pytest.raises(DeviceError) as caught:
        Runner(REQUEST, recorder).fire(subject, "prepare_prefill", make_call(REQUEST, {}, {0: odd}))
    assert caught.value is odd
    assert subject.state == "broken"
    assert [(step.outcome, step.failed) for step in recorder.steps] == [("raised", None)]


def test_an_interrupted_row_is_recorded_where_it_left_its_subject(make_call):
    """C108. A trace without it would show the next step starting where no step had ended."""
    recorder, subject = ListRecorder(), Subject("r1", "settled")
    facts = {"growth_possible": True, "view_current": True, "only_sequence": False}
    with pytest.raises(KeyboardInterrupt):
        Runner(REQUEST, recorder).fire(
            subject, "prepare_decode_step", make_call(REQUEST, facts, {0: KeyboardInterrupt()})
        )
    step = recorder.steps[-1]
    assert (step.source, step.target, step.outcome) == ("settled", subject.state, "raised")
