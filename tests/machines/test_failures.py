"""For every row of the request table: fail each step that can fail, and look where the request ends.

The script of a call counts verbs, so a test is a row and the number of the verb that fails. ``failure_steps`` (a joiner
that could not be bound leaves in order) go on counting where the steps stopped.
"""

from __future__ import annotations

import pytest

from context_cache.backends.base import DeviceError, DrainResult
from context_cache.machines import (
    REQUEST,
    Couple,
    DeviceAction,
    Drain,
    Ending,
    HostStep,
    LifecycleError,
    ListRecorder,
    MachineSpec,
    Runner,
    State,
    Subject,
    Transition,
)

DEVICE_VERBS = frozenset(
    "upload_base_rows upload_draft_rows reset_base_lengths reset_draft_lengths install_base_lengths "
    "install_draft_lengths compact_base_lengths compact_draft_lengths copy_mapping clear_resident_state zero_recurrent "
    "restore_recurrent restore_partial restore_hidden capture_recurrent capture_partial capture_hidden".split()
)
FREEING = frozenset("release release_joiner retire retire_reservations release_hit_pins".split())
PUBLISHING = frozenset({"publish", "publish_frozen"})
FAULT = "cudaErrorLaunchFailure"
RUNNER = Runner(REQUEST)  # shared, as all requests of a coordinator share one: nothing may be left over from a failure


def own_steps(steps):
    return [step for step in steps if not isinstance(step, Couple)]


def cases(wanted, *, of=lambda row: row.steps):
    """(row, number of the verb) for every step that is ``wanted``."""
    return [
        pytest.param(
            row, number, id=f"{row.number}-{row.transition.source}-{row.transition.event}-{number}-{step.name}"
        )
        for row in REQUEST.rows
        for number, step in enumerate(own_steps(of(row.transition)))
        if wanted(step)
    ]


def is_action(step):
    return isinstance(step, DeviceAction) and not step.clears


def is_clearing(step):
    return isinstance(step, DeviceAction) and step.clears


def is_drain(step):
    return isinstance(step, Drain)


def is_publishing(step):
    return isinstance(step, HostStep) and step.publishes


ROWS_WITH_FAILURE_STEPS = [
    pytest.param(row, number, id=f"{row.number}-{row.transition.source}-{number}-{step.name}")
    for row in REQUEST.rows
    if row.transition.failure_steps
    for number, step in enumerate(own_steps(row.transition.steps))
    if is_action(step)
]


def verbs(steps):
    """What the log says of steps: a step and its verb have one name, but for the uploads of cleared rows."""
    cleared = {"upload_cleared_rows": "upload_base_rows", "upload_cleared_draft_rows": "upload_draft_rows"}
    return [cleared.get(step.name, step.name) for step in steps]


def up_to(steps, number):
    """The steps before the ``number``-th one that is no coupling, couplings included."""
    return steps[: steps.index(own_steps(steps)[number])] if number < len(own_steps(steps)) else steps


def entry(state):
    return REQUEST.by_state[state].on_enter


class Run:
    """One firing of ``row`` with a script: what was raised, where the subject is, what was done, what was recorded."""

    def __init__(self, row, make_call, script):
        item = row.transition
        facts = dict.fromkeys(REQUEST.choices[item.source, item.event].names, False)
        facts.update({guard.name: guard.wanted for guard in item.guards})
        recorder = ListRecorder()
        self.runner = RUNNER
        self.runner.recorder = recorder
        self.subject = Subject("r1", item.source)
        self.call = make_call(REQUEST, facts, script)
        self.raised = self.ending = None
        try:
            self.ending = self.runner.fire(self.subject, item.event, self.call)
        except BaseException as error:
            self.raised = error
        self.runner.recorder = None
        self.state, self.log, self.steps = self.subject.state, self.call.log, recorder.steps

    @property
    def step(self):
        (step,) = self.steps
        return step


def device_error(verb="verb"):
    return DeviceError(verb, "s", FAULT)


# ---- a device action fails -------------------------------------------------


@pytest.mark.parametrize(("row", "number"), cases(is_action))
def test_a_device_error_leads_to_the_failure_state_and_is_raised_again(row, number, make_call):
    """C104, C118: the state never claims what the failed action did not do, and the caller hears of it.

    Later steps of the row must not run: an upload after a failed length action would work on lengths nobody knows.
    """
    item, error = row.transition, device_error()
    run = Run(row, make_call, {number: error})
    before = up_to(item.steps, number)
    failing = own_steps(item.steps)[number]
    assert run.raised is error
    assert run.state == item.on_failure
    after = (*item.failure_steps, *entry(item.on_failure))
    assert run.log == verbs((*before, failing, *after))
    step = run.step
    assert step.ran == tuple(one.name for one in (*before, *after))
    assert (step.outcome, step.failed) == ("failed", failing.name)
    assert (step.source, step.target, step.row) == (item.source, item.on_failure, row.number)
    assert step.work_ended != "by_runtime_sync"
    if not any(is_drain(one) for one in (*before, *after)):
        assert step.work_ended is None
    published = [name for name in run.log if name in PUBLISHING]
    assert published == [step.name for step in before if is_publishing(step)]
    assert "withhold" not in run.log


@pytest.mark.parametrize(("row", "number"), cases(is_action))
def test_after_a_device_error_nothing_was_freed_without_proof(row, number, make_call):
    """Pages of the request stay; the joiner's go back only after the drain of its way out.

    Reserved snapshot slots stay too: the copies before the one that failed may still be writing them.
    """
    log = Run(row, make_call, {number: device_error()}).log
    assert not {"release", "retire", "retire_reservations"} & set(log)
    if "release_joiner" in log:
        assert "drain" in log[: log.index("release_joiner")]


@pytest.mark.parametrize(("row", "number"), cases(is_action))
def test_after_a_device_error_the_request_can_still_end(row, number, make_call):
    """C118, C102: the row is over. Where work is outstanding, the end drains first."""
    run = Run(row, make_call, {number: device_error()})
    call = make_call(REQUEST)
    assert run.runner.fire(run.subject, "finish", call) is Ending.DONE
    assert (call.log[0] == "drain") == REQUEST.by_state[run.state].outstanding
    assert run.subject.state == "released"


# ---- a clearing upload fails -----------------------------------------------


@pytest.mark.parametrize(("row", "number"), cases(is_clearing))
def test_a_failed_clearing_upload_is_reported_and_keeps_nothing(row, number, make_call):
    """C106: the device was proven quiet, so the pages go back; who has to know (the coordinator) is told.

    It could go wrong in two ways: the row stops, and pages are lost for ever, or the error is swallowed unseen.
    """
    error, item = device_error(), row.transition
    run = Run(row, make_call, {number: error})
    assert run.raised is None
    assert run.ending is Ending.DONE
    assert run.call.clearing_errors == [error]
    assert run.state == item.target
    assert run.log == verbs((*item.steps, *entry(item.target)))
    assert (run.step.outcome, run.step.failed) == ("done", None)
    assert {"release", "release_joiner"} & set(run.log)


@pytest.mark.parametrize(
    "row", [row for row in REQUEST.rows if sum(map(is_clearing, row.transition.steps)) > 1], ids=lambda row: row.number
)
def test_both_clearing_uploads_may_fail(row, make_call):
    """The draft's rows are tried although those of the base failed, and the pages of both go back."""
    item = row.transition
    errors = {number: device_error(step.name) for number, step in enumerate(own_steps(item.steps)) if is_clearing(step)}
    run = Run(row, make_call, errors)
    assert (run.raised, run.ending, run.state) == (None, Ending.DONE, item.target)
    assert [error.verb for error in run.call.clearing_errors] == ["upload_cleared_rows", "upload_cleared_draft_rows"]
    assert run.log == verbs((*item.steps, *entry(item.target)))
    assert "release" in run.step.ran
    assert not {"upload_cleared_rows", "upload_cleared_draft_rows"} & set(run.step.ran)


@pytest.mark.parametrize(("row", "number"), cases(is_clearing))
@pytest.mark.parametrize("bug", [AssertionError("bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
def test_only_device_errors_of_a_clearing_upload_are_tolerated(row, number, bug, make_call):
    run = Run(row, make_call, {number: bug})
    assert run.raised is bug
    assert run.call.clearing_errors == []
    assert "release" not in run.log


# ---- a drain fails ---------------------------------------------------------


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt(), SystemExit(3)], ids=["busy", "interrupt", "exit"])
@pytest.mark.parametrize(("row", "number"), cases(is_drain))
def test_a_failed_drain_withholds_everything(row, number, interrupt, make_call):
    """No step follows a failed drain, least of all a device call or a release (C105 for the interrupt).

    An interrupt that came while waiting has to wait for the failure state to be committed, and is raised then; were it
    raised at once, a request whose device may still be reading could be ended as if nothing were the matter.
    """
    item = row.transition
    run = Run(row, make_call, {number: DrainResult(ok=False, cause="busy", interrupt=interrupt)})
    before, drain = up_to(item.steps, number), own_steps(item.steps)[number]
    assert run.raised is interrupt
    assert run.ending is (Ending.DRAIN_FAILED if interrupt is None else None)
    assert run.state == item.on_drain_failure
    assert run.log == verbs((*before, drain, *entry(item.on_drain_failure)))
    after = run.log[run.log.index("drain") + 1 :]
    assert not DEVICE_VERBS & set(after)
    assert not (FREEING | PUBLISHING | {"unbind_rows", "unbind_joiner"}) & set(after)
    assert "coordinator.drain_failed" in after
    assert "withhold" in after
    step = run.step
    assert (step.outcome, step.failed, step.target) == ("drain_failed", drain.name, item.on_drain_failure)
    assert step.ran == tuple(one.name for one in (*before, *entry(item.on_drain_failure)))
    assert step.work_ended is None


def test_a_drain_fails_into_quarantine_from_live_states_and_into_poison_at_shutdown():
    for row in REQUEST.transitions:
        if any(is_drain(step) for step in (*row.steps, *row.failure_steps)):
            assert row.on_drain_failure == ("poisoned" if row.event == "shutdown" else "quarantined")


@pytest.mark.parametrize("state", ["quarantined", "poisoned"])
def test_a_later_shutdown_may_succeed(state, make_call):
    runner, subject = Runner(REQUEST), Subject("r1", state)
    failing = make_call(REQUEST, {}, {0: DrainResult(ok=False)})
    assert runner.fire(subject, "shutdown", failing) is Ending.DRAIN_FAILED
    assert (subject.state, "release" in failing.log) == ("poisoned", False)
    call = make_call(REQUEST)
    assert runner.fire(subject, "shutdown", call) is Ending.DONE
    assert (subject.state, call.log[:1], "release" in call.log) == ("released", ["drain"], True)


# ---- publishing fails ------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [ValueError("full"), DeviceError("copy", "s", FAULT), AssertionError("books"), LifecycleError("late")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(("row", "number"), cases(is_publishing))
def test_a_failed_publication_leads_to_its_state_and_is_raised_again(row, number, error, make_call):
    """The advances are applied and stay; the device is as quiet as after a publication that went well.

    What was to follow (a mapping, a way out) does not: pages go back, and are mapped, only once the endpoint is told.
    Reservations of captures go back all the same; their copies have ended, and nobody will publish them any more.
    """
    item = row.transition
    run = Run(row, make_call, {number: error})
    before, failing = up_to(item.steps, number), own_steps(item.steps)[number]
    after = (*item.publish_failure_steps, *entry(item.on_publish_failure))
    assert run.raised is error
    assert run.state == item.on_publish_failure
    assert run.log == verbs((*before, failing, *after))
    step = run.step
    assert (step.outcome, step.failed, step.target) == ("publish_failed", failing.name, item.on_publish_failure)
    assert step.ran == tuple(one.name for one in (*before, *after))
    if not any(map(is_drain, before)):
        assert step.work_ended == item.work_ended
    told = run.log[run.log.index(failing.name) + 1 :]
    assert not (DEVICE_VERBS | PUBLISHING | {"drain", "release", "retire", "release_joiner", "withhold"}) & set(told)


@pytest.mark.parametrize(
    ("row", "number"), [param for param in cases(is_publishing) if any(map(is_drain, param.values[0].transition.steps))]
)
def test_work_that_was_drained_before_a_failed_publication_is_recorded_as_drained(row, number, make_call):
    """The drain went well, and the request is where nothing is outstanding because of it; the trace has to say so."""
    run = Run(row, make_call, {number: ValueError("full")})
    assert "drain" in run.step.ran
    assert run.step.work_ended == "drained"


@pytest.mark.parametrize(("row", "number"), cases(is_publishing))
def test_a_failed_publication_ends_as_the_kind_of_the_step_says(row, number, make_call):
    """An endpoint of this step: the step has ended, as if published. A frozen one: it is still owed."""
    item = row.transition
    run = Run(row, make_call, {number: ValueError("full")})
    if own_steps(item.steps)[number].name == "publish":
        assert run.state == item.target
        assert ("apply_advances" in run.log) != (item.event == "publish_mtp_endpoint")
    else:
        assert run.state.endswith("_frozen")
        assert not REQUEST.by_state[run.state].outstanding, "it was drained, or had nothing outstanding"
        retry = make_call(REQUEST)
        assert run.runner.fire(run.subject, "finish", retry) is Ending.DONE
        assert retry.log[0] == "publish_frozen"
        assert run.subject.state == "released"


@pytest.mark.parametrize(("row", "number"), cases(is_publishing))
def test_after_a_failed_publication_the_request_can_still_end(row, number, make_call):
    run = Run(row, make_call, {number: ValueError("full")})
    call = make_call(REQUEST)
    assert run.runner.fire(run.subject, "drop", call) is Ending.DONE
    assert (call.log[0] == "drain") == REQUEST.by_state[run.state].outstanding
    assert not PUBLISHING & set(call.log)
    assert run.subject.state == "released"


AFTER_PUBLISHING = [param for param in cases(is_publishing) if param.values[0].transition.publish_failure_steps]


@pytest.mark.parametrize("bug", [AssertionError("bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
@pytest.mark.parametrize(("row", "number"), AFTER_PUBLISHING)
def test_a_bug_after_a_failed_publication_is_not_caught(row, number, bug, make_call):
    """The reservations may not have gone back, so the end of life has to drain before it releases them."""
    run = Run(row, make_call, {number: ValueError("full"), number + 1: bug})
    assert run.log[-1] == "retire_reservations"
    assert run.raised is bug
    assert REQUEST.by_state[run.state].outstanding
    call = make_call(REQUEST)
    assert run.runner.fire(run.subject, "drop", call) is Ending.DONE
    assert call.log[0] == "drain"


# ---- several kinds in one row ----------------------------------------------


def test_rows_with_several_kinds_of_failure_are_among_the_cases():
    """The loops above would pass without them; these are the rows whose failures are easiest to mix up."""
    kinds = {}
    for row in REQUEST.transitions:
        ends = {"DE": row.on_failure, "drain": row.on_drain_failure, "publish": row.on_publish_failure}
        found = frozenset(kind for kind, end in ends.items() if end is not None)
        kinds.setdefault(found, set()).add((row.source, row.event))
    assert kinds[frozenset({"DE", "drain", "publish"})] == {
        ("prefilling", "publish_mtp_endpoint"),
        ("decoding", "complete_decode_step"),
        ("prefill_frozen", "begin_batch_compaction"),
    }
    assert kinds[frozenset({"DE", "publish"})] == {("settled_frozen", "begin_batch_compaction")}
    assert kinds[frozenset({"drain", "publish"})] == {
        (f"{state}_frozen", "finish")
        for state in ("prefill", "decoding", "decode_retry", "finishing_prefill", "finishing_retry")
    }
    assert kinds[frozenset({"DE", "drain"})] == {
        ("settled", "admit_sequence"), ("seating", "admit_sequence"), ("compacting", "compact_batch"),
    }  # fmt: skip


@pytest.mark.parametrize(("row", "number"), cases(is_drain))
def test_of_two_failures_in_one_row_only_the_first_happens(row, number, make_call):
    """The drain fails and everything after it would fail too: nothing after it is asked, so it alone counts."""
    busy = DrainResult(ok=False)
    alone = Run(row, make_call, {number: busy})
    done = number + 1 + len(own_steps(entry(row.transition.on_drain_failure)))
    both = Run(row, make_call, {number: busy, **dict.fromkeys(range(done, done + 20), device_error())})
    assert both.raised is None
    assert both.log == alone.log
    assert (both.state, both.step) == (alone.state, alone.step)
    assert both.call.clearing_errors == []


# ---- failures while a joiner leaves ---------------------------------------


def way_out(row, number, name):
    """Number of the verb that the failure step ``name`` is, when verb ``number`` of the row has failed."""
    names = [step.name for step in own_steps(row.transition.failure_steps)]
    return number + 1 + names.index(name)


def test_only_admit_sequence_has_something_left_to_do_after_a_device_error():
    assert {row.event for row in REQUEST.transitions if row.failure_steps} == {"admit_sequence"}
    # Two sources; a view that is current (one action) or not (two more, for the base and for the draft).
    assert len(ROWS_WITH_FAILURE_STEPS) == 8


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt()], ids=["busy", "interrupt"])
@pytest.mark.parametrize(("row", "number"), ROWS_WITH_FAILURE_STEPS)
def test_the_drain_of_a_joiner_that_leaves_fails(row, number, interrupt, make_call):
    """Then the whole request is quarantined, the joiner's lease included; the drain's interrupt goes before the error.

    It could go wrong by going on to unbind and release the joiner, whose pages the device may be reading.
    """
    error = device_error()
    busy = DrainResult(ok=False, cause="busy", interrupt=interrupt)
    run = Run(row, make_call, {number: error, way_out(row, number, "drain"): busy})
    assert run.raised is (error if interrupt is None else interrupt)
    assert run.state == "quarantined"
    after = run.log[run.log.index("drain") + 1 :]
    assert after == verbs(entry("quarantined"))
    assert "release_joiner" not in run.log
    assert (run.step.outcome, run.step.failed) == ("failed", own_steps(row.transition.steps)[number].name)
    assert (run.step.target, run.step.work_ended) == ("quarantined", None)
    assert "unbind_joiner" not in run.step.ran
    assert "withhold" in run.step.ran


@pytest.mark.parametrize(("row", "number"), ROWS_WITH_FAILURE_STEPS)
def test_clearing_the_row_of_a_joiner_that_leaves_fails(row, number, make_call):
    """The joiner is released all the same, the request is where it was, the first error is the one raised."""
    error, second = device_error("first"), device_error("second")
    run = Run(row, make_call, {number: error, way_out(row, number, "upload_cleared_rows"): second})
    assert run.raised is error
    assert run.call.clearing_errors == [second]
    assert run.state == row.transition.source
    assert "release_joiner" in run.log
    assert "execution.undo_take" in run.log
    assert run.step.outcome == "failed"


@pytest.mark.parametrize(("row", "number"), ROWS_WITH_FAILURE_STEPS)
@pytest.mark.parametrize("name", ["unbind_joiner", "upload_cleared_rows", "release_joiner"])
def test_a_bug_while_a_joiner_leaves_is_not_caught(row, number, name, make_call):
    bug = AssertionError("bug")
    run = Run(row, make_call, {number: device_error(), way_out(row, number, name): bug})
    assert run.raised is bug
    assert run.state == "seating", "entered first, so that the end of life drains"
    call = make_call(REQUEST)
    run.runner.fire(run.subject, "drop", call)
    assert call.log[0] == "drain"


@pytest.mark.parametrize(("row", "number"), ROWS_WITH_FAILURE_STEPS)
def test_a_bug_while_a_joiner_leaves_is_recorded_where_it_left_the_request(row, number, make_call):
    """C108: the request went from settled to seating, so the trace has to hold that step."""
    bug = AssertionError("bug")
    run = Run(row, make_call, {number: device_error(), way_out(row, number, "release_joiner"): bug})
    assert (run.raised, run.state) == (bug, "seating")
    assert [(step.source, step.target) for step in run.steps] == [(row.transition.source, "seating")]


# ---- anything else is a bug ------------------------------------------------


@pytest.mark.parametrize("bug", [AssertionError("bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
@pytest.mark.parametrize(("row", "number"), cases(lambda step: not is_publishing(step)))
def test_what_is_no_device_error_is_not_caught(row, number, bug, make_call):
    """A broken assert goes up as it is, and no later step of the row runs.

    It could go wrong by leaving the state of success: the next call would believe that the device work was enqueued. So
    a row with a failure state takes it, way out of a joiner included; any other row leaves its source (or the
    outstanding target that it entered first), and the request can be ended safely in all cases.
    """
    item = row.transition
    run = Run(row, make_call, {number: bug})
    assert run.raised is bug
    outstanding = REQUEST.by_state[item.target].outstanding
    assert run.state == (item.on_failure or (item.target if outstanding else item.source))
    ran = (*up_to(item.steps, number), own_steps(item.steps)[number])
    left = (*item.failure_steps, *REQUEST.by_state[run.state].on_enter) if item.on_failure else ()
    assert run.log == verbs((*ran, *left))
    if run.state not in ("new", "quarantined", "poisoned"):
        call = make_call(REQUEST)
        assert run.runner.fire(run.subject, "drop", call) is Ending.DONE
        assert (call.log[0] == "drain") == REQUEST.by_state[run.state].outstanding


@pytest.mark.parametrize(("row", "number"), cases(is_publishing))
def test_an_interrupt_while_publishing_ends_the_step_and_propagates(row, number, make_call):
    """C105. The advances are applied already, so the step has ended; repeating it would be refused."""
    interrupt = KeyboardInterrupt()
    item = row.transition
    run = Run(row, make_call, {number: interrupt})
    assert run.raised is interrupt
    assert run.state == item.on_publish_failure
    ran = (*up_to(item.steps, number), own_steps(item.steps)[number])
    assert run.log == verbs((*ran, *item.publish_failure_steps, *entry(item.on_publish_failure)))


@pytest.mark.parametrize(
    "row", [row for row in REQUEST.rows if own_steps(row.transition.steps)], ids=lambda r: r.number
)
def test_whatever_interrupts_a_row_that_used_the_device_the_end_of_life_drains(row, make_call):
    """The rule of all tables, for an interrupt at every step: was a device verb called, then a drain precedes release.

    Clearing uploads do not count: the device was proven quiet before them, and they write only the table.
    """
    for number in range(len(own_steps(row.transition.steps))):
        run = Run(row, make_call, {number: KeyboardInterrupt()})
        actions = [step.name for step in own_steps(row.transition.steps)[: number + 1] if is_action(step)]
        if actions:
            drained = "drain" in run.log
            assert REQUEST.by_state[run.state].outstanding or drained, f"number {number}, after {actions[-1]}"
        if "drain" in run.log:
            # An action after the drain is new work: a mapping copy behind a frozen endpoint.
            late = [step.name for step in up_to(row.transition.steps, number) if is_action(step)]
            late = [name for name in late if name in run.log[run.log.index("drain") :]]
            assert not late or REQUEST.by_state[run.state].outstanding


# ---- a row is run the same way whatever surrounds it -----------------------

KINDS = {
    "device action": (DeviceAction("send", lambda call: call.do("copy_mapping")), {"on_failure": "hurt"}),
    "publishing": (HostStep("tell", lambda call: call.do("publish"), publishes=True), {"on_publish_failure": "hurt"}),
    "publishing, with steps left to do": (
        HostStep("tell", lambda call: call.do("publish"), publishes=True),
        {
            "on_publish_failure": "hurt",
            "publish_failure_steps": (
                HostStep("idle", lambda call: False),
                HostStep("tidy", lambda call: call.do("release")),
            ),
        },
    ),
    "drain": (Drain("wait", lambda call: call.do("drain")), {"on_drain_failure": "hurt"}),
}


@pytest.mark.parametrize("way", ["fire", "offer"])
@pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_row_that_can_fail_takes_its_failure_state(kind, hot, way, make_call):
    """One step, plain states, nothing on entering: a kind of row that tempts a runner to take a short cut."""
    step, failure = KINDS[kind]
    spec = MachineSpec(
        name="small",
        initial="whole",
        states=(State("whole", "before"), State("done", "after", final=True), State("hurt", "failed", final=True)),
        transitions=(Transition(event="go", source="whole", target="done", steps=(step,), hot=hot, **failure),),
    )
    recorder, subject = ListRecorder(), Subject("s1", "whole")
    runner = Runner(spec, recorder)
    error = DrainResult(ok=False) if kind == "drain" else device_error()
    raised = None
    try:
        getattr(runner, way)(subject, "go", make_call(spec, {}, {0: error}))
    except DeviceError as caught:
        raised = caught
    assert raised is (None if kind == "drain" else error)
    assert subject.state == "hurt"
    (recorded,) = recorder.steps
    ran = tuple(one.name for one in failure.get("publish_failure_steps", ()) if one.name != "idle")
    assert (recorded.target, recorded.failed, recorded.ran) == ("hurt", step.name, ran)
