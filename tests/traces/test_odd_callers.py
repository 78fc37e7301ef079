"""Callers that do what they should not, lose what they hold or are interrupted: what is written and how it replays."""

from __future__ import annotations

import gc
import json
import threading
import warnings

import numpy as np
import pytest

from context_cache.coordinator import (
    BatchAdvance,
    ContextCacheBatchAdmission,
    ContractViolation,
    DecodingKvHeadroom,
    Status,
)
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.replay import replay
from context_cache.machines import Step

PLAIN = "conformance/test_failure_injection.py"


def calls(path):
    return [record for record in map(json.loads, path.read_bytes().splitlines()) if record["line"] != "step"][1:]


@pytest.fixture
def h(recorded, harness_class, tmp_path):
    return recorded(tmp_path / "t", harness_class)


@pytest.fixture
def written(h, tmp_path, replay_equal):
    """Close the recorder, replay, and give the calls that were written."""

    def end():
        h.recorder.close()
        assert h.recorder.failure is None
        replay_equal(tmp_path / "t")
        return calls(tmp_path / "t")

    return end


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_a_call_from_another_thread_leaves_no_trace(h, written):
    """It was refused at the door: the coordinator has not seen it. C119: nor has a call out of a call."""
    handle = h.begin(h.T(5))
    refused = []

    def intrude(call):
        try:
            call()
        except ContractViolation as error:
            refused.append(str(error))

    def during():
        for call in (lambda: h.coordinator.shutdown(), lambda: h.finish(handle), lambda: h.coordinator.metrics()):
            intrude(call)
            thread = threading.Thread(target=intrude, args=(call,))
            thread.start()
            thread.join()

    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.sync.before = during
    handle.close()
    h.sync.before = None
    assert len(refused) >= 4
    assert all("another call" in text for text in refused)
    assert handle.state == "released"
    assert [call["line"] for call in written()] == ["begin_request", "prepare_prefill", "close"]


def test_a_handle_closed_during_a_call_is_closed_before_the_next_one(h, written):
    first, second = h.begin(h.T(5)), h.begin([7, 7], 1)
    h.run_prefill(second)
    assert h.prepare_decode(second).status is h.OK
    h.sync.before = first.close
    assert h.finish(second) is h.OK
    h.sync.before = None
    assert first.state == "admitted"
    h.begin([8, 8], 2).close()
    names = [(call["line"], call.get("request")) for call in written()]
    assert names[-4:] == [("finish", "r2"), ("close", "r1"), ("begin_request", None), ("close", "r3")]


def test_an_orphan_is_a_close_before_the_call_that_reaped_it(h, written):
    """Also when that call only looks, which leaves no record of its own (C107)."""
    for look in (False, True):
        handle = h.begin(h.T(5), 0, keep=False)
        name = handle.id
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del handle
            gc.collect()
        if look:
            h.coordinator.metrics()
            assert h.coordinator.inspect(name).state == "released"
        h.begin([9], 1).close()
    names = [(call["line"], call.get("request")) for call in written()]
    assert names == [
        ("begin_request", None), ("close", "r1"), ("begin_request", None), ("close", "r2"),
        ("begin_request", None), ("close", "r3"), ("begin_request", None), ("close", "r4"),
    ]  # fmt: skip


def test_questions_leave_no_record(h, written):
    """C107: asked three times each, also in a way that is refused."""
    handle = h.begin(h.T(5))
    h.run_prefill(handle)
    for _ in range(3):
        h.coordinator.metrics()
        h.coordinator.inspect("r1")
        h.seq(handle)
        assert h.coordinator.state
        assert h.coordinator.execution_holder is None
        assert handle.state
        assert handle.valid
        with pytest.raises(ContractViolation):
            h.coordinator.inspect("r9")
        with pytest.raises(ContractViolation):
            h.seq(handle, 7)
    handle.close()
    handle.close()
    assert [call["line"] for call in written()] == [
        "begin_request", "prepare_prefill", "finalize_prefill_publication", "close"
    ]  # fmt: skip


def test_the_same_question_asked_again_gets_its_own_answer(recorded, harness_class, tmp_path, replay_equal):
    """C127: equal calls with different answers are written one by one, and answered in order when replayed."""
    h = recorded(tmp_path / "t", lambda: harness_class(pages=8, enforce_min_pool=False))

    def ask():
        result = h.try_begin([h.sequence_admission([5] * 13, 1)])
        if result.admission is not None:
            result.admission.request.close()
        return result.status.name

    answers = [ask()]
    others = [h.begin(h.T(13), 0), h.begin([6] * 13, 2)]
    answers += [ask(), ask()]
    others[0].close()
    answers.append(ask())
    h.poison(0)
    answers.append(ask())
    assert answers == ["OK", "REQUEST_FAILED", "REQUEST_FAILED", "OK", "POISONED"]
    h.recorder.close()
    replay_equal(tmp_path / "t")
    asked = [call for call in calls(tmp_path / "t") if call["line"] == "begin_request"]
    tokens = asked[0]["sequences"][0]["tokens"][1]
    assert [call["status"] for call in asked if call["sequences"][0]["resident"][0] == 1] == answers
    assert tokens == 13


# ---- handles ---------------------------------------------------------------------------------------------------------


def every_call(h, handle):
    """Every call on a request, with arguments that fit in form."""
    c, tensor = h.coordinator, h.mapping_tensor()
    one = [h.advance(5, 6)]
    return {
        "admit_sequence": lambda: h.admit(handle, [1, 2], 2),
        "prepare_prefill": lambda: c.prepare_prefill(handle),
        "enqueue_prefill_captures": lambda: c.enqueue_prefill_captures(handle),
        "finalize_prefill_publication": lambda: c.finalize_prefill_publication(handle, one),
        "finalize_sequence_admission": lambda: c.finalize_sequence_admission(handle, 0, one[0]),
        "retract_sequence_admission": lambda: c.retract_sequence_admission(handle),
        "prepare_decode_step": lambda: c.prepare_decode_step(handle, DecodingKvHeadroom(1, 0)),
        "complete_decode_step": lambda: c.complete_decode_step(handle, one),
        "begin_batch_compaction": lambda: c.begin_batch_compaction(handle, [0], 1, tensor),
        "compact_batch": lambda: c.compact_batch(handle),
        "publish_hybrid_mtp_endpoint": lambda: c.publish_hybrid_mtp_endpoint(handle, 0, 4, tensor, 0),
        "restore_hybrid_mtp_boundary_hidden": lambda: c.restore_hybrid_mtp_boundary_hidden(handle, 0, tensor, 0),
        "finish": lambda: c.finish(handle),
    }


@pytest.mark.parametrize("poisoned", [False, True], ids=["serving", "poisoned"])
@pytest.mark.parametrize("who", ["foreign", "released", "quarantined", "none", "text", "live"])
def test_every_call_on_any_handle_replays(h, harness, written, suite, who, poisoned):
    if poisoned or who == "quarantined":
        other = h.poison(2)
    match who:
        case "foreign":
            handle = harness().begin(h.T(5))
        case "released" | "live":
            handle = h.begin(h.T(5)) if h.coordinator.state == "serving" else other
            if who == "released":
                handle.close()
        case "quarantined":
            handle = other
        case "none":
            handle = None
        case "text":
            handle = "r1"
    made = []
    for name, call in every_call(h, handle).items():
        made.append(name)
        try:
            call()
        except ContractViolation:
            made[-1] = name
    h.abandon()
    found = [call.get("call", call["line"]) for call in written()]
    at = found.index(made[0])
    if who != "live":
        assert found[at : at + len(made)] == made


STRANGE = [None, 5, -1, "x", b"x", 1.5, [], {}, object(), [[1]], [None], {"a": 1}, np.zeros((2, 2)), np.array([1.5]),
           2**70, True, iter([1]), lambda: None]  # fmt: skip


@pytest.mark.parametrize("state", ["admitted", "prefilling", "settled", "seating", "decoding", "compacting"])
def test_arguments_of_nonsense_types_replay(h, written, suite, state):
    """They are refused and change nothing; what can be written down is, what cannot is a call without arguments."""
    handle = getattr(suite(PLAIN), state)(h)
    c, tensor, fine = h.coordinator, h.mapping_tensor(), DecodingKvHeadroom(1, 0)
    admission = h.sequence_admission([1, 2], 1)
    batch = ContextCacheBatchAdmission((admission,))
    before = handle.state
    for value in STRANGE:
        for call in (
            lambda value=value: c.begin_request(value, fine, h.stream),
            lambda value=value: c.begin_request(batch, value, h.stream),
            lambda value=value: c.begin_request(batch, fine, value),
            lambda value=value: c.admit_sequence(handle, value, fine),
            lambda value=value: c.admit_sequence(handle, admission, value),
            lambda value=value: c.finalize_prefill_publication(handle, value),
            lambda value=value: c.finalize_sequence_admission(handle, value, h.advance(1, 2)),
            lambda value=value: c.finalize_sequence_admission(handle, 0, value),
            lambda value=value: c.prepare_decode_step(handle, value),
            lambda value=value: c.complete_decode_step(handle, value),
            lambda value=value: c.begin_batch_compaction(handle, value, 1, tensor),
            lambda value=value: c.begin_batch_compaction(handle, [0], value, tensor),
            lambda value=value: c.begin_batch_compaction(handle, [0, 1], 2, value),
            lambda value=value: c.publish_hybrid_mtp_endpoint(handle, value, 1, tensor, 0),
            lambda value=value: c.publish_hybrid_mtp_endpoint(handle, 0, 1, value, 0),
            lambda value=value: c.restore_hybrid_mtp_boundary_hidden(handle, 0, value, 0),
            lambda value=value: c.restore_hybrid_mtp_boundary_hidden(handle, 0, tensor, value),
            lambda: c.prepare_decode_step(handle),
            lambda: c.finish(),
            lambda: c.finish(handle, 1, 2, 3),
            lambda: c.begin_request(),
            lambda: c.shutdown(handle),
            lambda: c.shutdown(1, 2),
        ):
            with pytest.raises((ContractViolation, TypeError)):
                call()
        assert handle.state == before
    written()


@pytest.mark.parametrize("form", ["list", "tuple", "int32", "int64", "arrays", "keywords"])
def test_one_call_in_any_form_is_one_record(recorded, harness_class, tmp_path, replay_equal, form):
    """C128: how the arguments were passed is incidental."""
    data = []
    for name in ("list", form):
        path = tmp_path / name
        h = recorded(path, harness_class)
        handle = h.begin_batch([h.T(5), [7, 8, 9]])
        h.run_prefill(handle)
        assert h.prepare_decode(handle).status is h.OK
        h.synchronize()
        advances, completed, options = [h.advance(3, 6), h.advance(4, 4)], [1], {}
        match name:
            case "tuple":
                advances, completed = tuple(advances), (1,)
            case "int32" | "int64":
                completed = np.array([1], name)
            case "arrays":
                advances = BatchAdvance.one_token_each(np.array([3, 4], np.int32), np.array([6, 4], np.int32))
            case "keywords":
                options = {"publishable_completed_slots": completed, "advances": advances}
        if options:
            assert h.coordinator.complete_decode_step(handle, **options) is h.OK
        else:
            assert h.coordinator.complete_decode_step(handle, advances, completed) is h.OK
        assert h.begin_compaction(handle, [-1, 0]) is h.OK
        assert h.coordinator.compact_batch(handle) is h.OK
        handle.close()
        h.recorder.close()
        replay_equal(path)
        data.append(path.read_bytes())
    assert data[0] == data[1]


# ---- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RuntimeError])
@pytest.mark.parametrize("place", ["rows", "ledger"])
def test_an_interrupt_between_two_actions_cannot_be_repeated(
    recorded, harness_class, tmp_path, monkeypatch, error, place
):
    """It came from outside: the replay says so, and that everything before it is equal."""
    path = tmp_path / "t"
    h = recorded(path, harness_class)
    first = h.begin(h.T(5))
    h.run_prefill(first)
    h.decode(first, 4)
    second = h.begin([8, 9], 1)
    target = {"rows": (type(h.coordinator._core.rows), "bind"), "ledger": (type(h.manager), "release")}[place]

    def interrupted(*arguments, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*target, interrupted)
        with pytest.raises(error):
            h.coordinator.prepare_prefill(second) if place == "rows" else h.finish(first)
    h.recorder.close()
    result = replay(path)
    assert not result.equal
    assert result.unrepeatable == error.__name__
    assert result.difference is None
    assert result.calls == len(calls(path)) - 1


def test_an_interrupt_of_a_drain_is_repeated(h, written):
    """It has an action to belong to."""
    handle = h.begin(h.T(5))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.sync.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        h.finish(handle)
    h.sync.error = None
    assert handle.state == "quarantined"
    assert h.coordinator.shutdown() is Status.OK
    found = written()
    assert [call.get("raised") for call in found] == [None, None, "KeyboardInterrupt", None]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_replay_itself_is_raised(small_trace, harness, monkeypatch, error):
    """Forbidden: that it is taken for a difference between the trace and what happens."""

    def interrupted(*arguments, **options):
        raise error

    monkeypatch.setattr(type(harness().coordinator._core.rows), "bind", interrupted)
    with pytest.raises(error):
        replay(small_trace)


# ---- recording changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("redact", [False, True], ids=["tokens", "redacted"])
def test_recording_changes_nothing(recorded, harness_class, script, tmp_path, redact):
    """As C124 for drawings: the same results, books, verbs and steps with and without a recorder that writes."""

    class Both(TraceRecorder):
        """Writes, and keeps the steps as well."""

        def __init__(self, path):
            super().__init__(path, redact=redact)
            self.seen, write = [], self.take

            def take(parts):
                self.seen.append(Step(parts[0], parts[1], tuple(parts[2]), parts[3], parts[4]))
                write(parts)

            self.take = take

    plain = harness_class(pages=8, enforce_min_pool=False)
    script(plain)
    recorder = Both(tmp_path / "t")
    watched = recorded(recorder, lambda: harness_class(pages=8, enforce_min_pool=False))
    script(watched)
    assert recorder.seen == plain.recorder.steps
    for look in (
        lambda h: h.plain(h.manager.dump()),
        lambda h: h.counters(),
        lambda h: list(h.recording.log),
        lambda h: [(one.id, one.state, one.valid) for one in h.handles],
    ):
        assert look(watched) == look(plain)


def test_a_trace_has_every_change_of_state(h, tmp_path, script):
    """C108: for each subject a step begins where the one before it ended."""
    for prompt in ([1, 2, 3], [4, 5]):
        handle = h.begin(prompt, 0)
        h.run_prefill(handle)
        h.decode(handle, 9)
        h.finish(handle)
    h.poison(1)
    h.coordinator.shutdown()
    h.recorder.close()
    at = {}
    for record in map(json.loads, (tmp_path / "t").read_bytes().splitlines()[1:]):
        if record["line"] == "step":
            subject = (record["machine"], record["subject"])
            assert at.get(subject, record["source"]) == record["source"], record
            at[subject] = record["target"]
    assert at["request", "r1"] == at["request", "r2"] == at["request", "r3"] == "released"
    assert at["coordinator", "coordinator"] == "closed"


def test_a_row_is_done_before_what_it_leads_to(h, tmp_path):
    """C119: couplings stand in the order in which they ended, each once."""
    handle = h.begin(h.T(4))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    handle.close()
    h.recorder.close()
    records = [json.loads(line) for line in (tmp_path / "t").read_bytes().splitlines()]
    at = next(i for i, record in enumerate(records) if record["line"] == "prepare_prefill")
    steps = []
    while records[at + 1 + len(steps)]["line"] == "step":
        steps.append(records[at + 1 + len(steps)])
    assert [(step["machine"], step["event"]) for step in steps] == [
        ("execution", "take"), ("view", "start_lengths"), ("view", "claim"), ("request", "prepare_prefill")
    ]  # fmt: skip
    couplings = [name for name in steps[-1]["ran"] if "." in name]
    assert couplings == ["execution.take", "view.start_lengths", "view.claim"]
