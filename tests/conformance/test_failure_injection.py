"""Scenario 121: for every public call, fail each device action and each drain; nothing leaks, nothing is freed early.

``CALLS`` names a situation, the call that is made in it, and the state that the row of the request table leads to when
a device action of the row raises. How many actions and drains a call has is found out by a run without faults, so a new
action is covered the day it is added.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import (
    ContextCacheManager,
    ContextCacheSequenceAdvance,
    ContractViolation,
    InvariantViolation,
    ResourceDemand,
)

B_TOKENS = [51, 52, 53, 54, 55]
JOINER = [1, 2, 3, 4, 5, 6, 7, 8, 701]


class Call(NamedTuple):
    setup: Callable[[Any], Any]  # harness -> handle
    call: Callable[[Any, Any], Any]
    after_error: str  # state of the request after a DeviceError
    raises: bool = True
    poisons: bool = False  # a DeviceError here was a row that could not be cleared
    actions: int = 1  # at least


# ---- situations ------------------------------------------------------------


def admitted(h):
    return h.begin(h.T(8), 0)


def prefilling(h):
    handle = admitted(h)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    return handle


def settled(h):
    handle = admitted(h)
    h.run_prefill(handle)
    return handle


def batch(h):
    handle = h.begin_batch([h.T(5), h.T(6)], [0, 2])
    h.run_prefill(handle)
    return handle


def not_the_view(h):
    handle = settled(h)
    other = h.begin(B_TOKENS, 1)
    h.run_prefill(other)
    return handle


def seating(h):
    handle = settled(h)
    assert h.admit(handle, JOINER, 2).status is h.OK
    h.seat(2)
    return handle


def seating_two(h):
    handle = seating(h)
    assert h.admit(handle, [61, 62], 1).status is h.OK
    h.seat(3)
    return handle


def decoding(h):
    handle = settled(h)
    assert h.prepare_decode(handle, 5).status is h.OK
    return handle


def decode_retry(h):
    handle = settled(h)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, 5)
    h.heal()
    return handle


def compacting(h):
    handle = batch(h)
    assert h.begin_compaction(handle, [-1, 0]) is h.OK
    return handle


def compacting_all(h):
    handle = batch(h)
    assert h.begin_compaction(handle, [-1, -1]) is h.OK
    return handle


def compacting_with_a_joiner(h):
    handle = seating(h)
    assert h.begin_compaction(handle, [-1, 0]) is h.OK
    return handle


def broken(h):
    handle = admitted(h)
    h.fail(2)
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(handle)
    h.heal()
    return handle


def finishing(h):
    handle = settled(h)
    assert h.prepare_decode(handle, 12).status is h.REQUEST_FAILED
    assert handle.state == "finishing"
    return handle


def finishing_retry(h):
    handle = decode_retry(h)
    assert h.prepare_decode(handle, 12).status is h.REQUEST_FAILED
    assert handle.state == "finishing_retry"
    return handle


def quarantined(h):
    handle = prefilling(h)
    h.sync.fail = True
    h.drop(handle)
    h.sync.fail = False
    return handle


# ---- calls ------------------------------------------------------------


def prepare_prefill(h, handle):
    return h.coordinator.prepare_prefill(handle)


def admit(h, handle):
    return h.admit(handle, JOINER, 2).status


def admit_another(h, handle):
    return h.admit(handle, [61, 62], 1).status


def retract(h, handle):
    return h.coordinator.retract_sequence_admission(handle)


def prepare_decode(h, handle):
    return h.prepare_decode(handle, 5).status


def begin_compaction(h, handle):
    return h.begin_compaction(handle, [-1, *range(h.size(handle) - 1)])


def compact(h, handle):
    return h.coordinator.compact_batch(handle)


def finish(h, handle):
    return h.finish(handle)


def drop(h, handle):
    return h.drop(handle)


def shutdown(h, handle):
    return h.coordinator.shutdown()


LIVE = (settled, prefilling, seating, decoding, decode_retry, compacting, broken, finishing, finishing_retry)
CALLS = {
    "prepare_prefill": Call(admitted, prepare_prefill, "broken", actions=2),
    "admit, settled": Call(settled, admit, "settled"),
    "admit, not the view": Call(not_the_view, admit, "settled", actions=2),
    "admit, seating": Call(seating, admit_another, "seating"),
    "retract": Call(seating, retract, "settled", raises=False, poisons=True),
    "retract, another waits": Call(seating_two, retract, "seating", raises=False, poisons=True),
    "prepare_decode, settled": Call(settled, prepare_decode, "decode_retry"),
    "prepare_decode, not the view": Call(not_the_view, prepare_decode, "decode_retry", actions=2),
    "prepare_decode, seating": Call(seating, prepare_decode, "decode_retry"),
    "prepare_decode, again": Call(decode_retry, prepare_decode, "decode_retry"),
    "begin_compaction, settled": Call(batch, begin_compaction, "broken"),
    "begin_compaction, not the view": Call(not_the_view, begin_compaction, "broken", actions=2),
    "begin_compaction, seating": Call(seating, begin_compaction, "broken"),
    "compact_batch": Call(compacting, compact, "broken", actions=2),
    "compact_batch, joiner survives": Call(compacting_with_a_joiner, compact, "broken", actions=2),
    "compact_batch, nobody survives": Call(compacting_all, compact, "broken", actions=2),
    "shutdown": Call(quarantined, shutdown, "released", raises=False),
    **{f"finish, {s.__name__}": Call(s, finish, "released", raises=False, poisons=True) for s in LIVE},
    **{f"drop, {s.__name__}": Call(s, drop, "released", raises=False, poisons=True) for s in LIVE},
}
WITHOUT_ACTIONS = {
    "finish, admitted": Call(admitted, finish, "released"),
    "drop, admitted": Call(admitted, drop, "released"),
}


def clean_run(harness, case):
    """A run without faults: how many verbs and drains has the call?"""
    h = harness()
    handle = case.setup(h)
    start = len(h.recording.log)
    case.call(h, handle)
    made = list(h.recording.log[start:])
    h.check()
    h.end_everything()
    return len(made) - made.count("drain"), made.count("drain")


def watch(h, handle):
    """From now on no page that is held may be let go before the device has been waited for."""
    held = h.all_active()
    waited = []

    def before():
        if not waited:
            now = h.all_active()
            for page, count in held.items():
                assert now.get(page, 0) >= count, f"page {page} was released before the drain"
        waited.append(True)

    h.sync.before = before
    return waited


@pytest.mark.parametrize("name", WITHOUT_ACTIONS)
def test_a_request_that_was_never_bound_needs_no_device(harness, name):
    """Scenario 121 and 40.17: only the release."""
    assert clean_run(harness, WITHOUT_ACTIONS[name]) == (0, 0)


@pytest.mark.parametrize("partly", [False, True], ids=["not enqueued", "enqueued all the same"])
@pytest.mark.parametrize("end", ["good drain", "failed drain first"])
@pytest.mark.parametrize("name", CALLS)
def test_each_device_action_may_fail(harness, name, end, partly):
    """Scenario 121. The state is the one the table names; afterwards everything ends and nothing leaks.

    How much a failing action had enqueued is unknown to the host (00.1), so both extremes are played.
    """
    case = CALLS[name]
    actions, _ = clean_run(harness, case)
    assert actions >= case.actions
    for action in range(1, actions + 1):
        h = harness(partly=partly)
        handle = case.setup(h)
        was = str(handle.state)
        poisoned_before = h.coordinator.state == "poisoned"
        waited = watch(h, handle)
        free_before = set(h.free())
        h.fail(action)
        if case.raises:
            with pytest.raises(DeviceError):
                case.call(h, handle)
        else:
            answer = case.call(h, handle)
            if case.call is finish:
                assert answer is h.POISONED
            elif case.call is retract:
                assert answer is False
        h.backend.disarm()
        where = f"action {action} of {actions}"
        assert handle.state == case.after_error, where
        expected = "closed" if case.call is shutdown else "poisoned" if poisoned_before or case.poisons else "serving"
        assert h.coordinator.state == expected, where
        if set(h.free()) - free_before and was in h.OUTSTANDING | {"quarantined"}:
            assert waited, f"{where}: pages were freed without a drain"
        if case.after_error in ("broken", "decode_retry"):
            assert handle.valid
            holder = handle.id if case.after_error == "decode_retry" else None
            assert h.coordinator.execution_holder == holder, where
        h.check()

        if handle.valid and end == "failed drain first":
            watch(h, handle)
            h.sync.fail = True
            h.drop(handle)
            if case.after_error == "settled":
                assert handle.state == "released"
            else:
                assert handle.state == "quarantined", where
                assert h.coordinator.state == "poisoned"
            h.check()
        h.end_everything()


DRAINING = sorted(
    name
    for name, case in CALLS.items()
    if case.call in (compact, retract, shutdown)
    or (case.call in (finish, drop) and case.setup not in (settled, finishing))
)


@pytest.mark.parametrize("name", DRAINING)
def test_each_drain_may_fail(harness, name):
    """Scenario 121. A failed drain withholds the whole request, no device call follows; shutdown releases it."""
    case = CALLS[name]
    _, drains = clean_run(harness, case)
    assert drains == 1
    h = harness()
    handle = case.setup(h)
    held = h.all_active()
    h.mark()
    h.sync.fail = True
    answer = case.call(h, handle)
    if case.call is retract:
        assert answer is False
    elif case.call is not drop:
        assert answer is h.POISONED
    verbs = h.log
    assert verbs[-1] == "drain", "a device call follows a failed drain"
    assert handle.state == ("poisoned" if case.call is shutdown else "quarantined")
    assert not handle.valid
    assert h.coordinator.state == "poisoned"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.length_view is None
    assert h.all_active() == held, "nothing is released"
    h.check()

    rows = [h.row(slot) for slot in range(3)]
    assert h.coordinator.shutdown() is h.POISONED
    assert handle.state == "poisoned"
    assert h.all_active() == held
    assert [h.row(slot) for slot in range(3)] == rows
    h.sync.fail = False
    h.mark()
    assert h.coordinator.shutdown() is h.OK
    assert h.log[0] == "drain"
    assert handle.state == "released"
    h.end_everything()
    assert [h.device_row(slot) for slot in range(3)] == [[-1] * 4] * 3


@pytest.mark.parametrize("name", ["admit, settled", "admit, not the view", "admit, seating"])
def test_the_drain_of_a_joiner_that_could_not_be_bound_may_fail(harness, name):
    """Scenario 121 and 50.1 (a): the joiner's lease is withheld with the request."""
    case = CALLS[name]
    actions, _ = clean_run(harness, case)
    for action in range(1, actions + 1):
        h = harness()
        handle = case.setup(h)
        held = h.all_active()
        h.fail(action)
        h.sync.fail = True
        with pytest.raises(DeviceError):
            case.call(h, handle)
        assert handle.state == "quarantined"
        assert sum(h.all_active().values()) > sum(held.values())
        h.check()
        h.end_everything()


@pytest.mark.parametrize("name", ["admit, settled", "admit, not the view", "admit, seating"])
def test_the_clearing_of_a_joiner_that_could_not_be_bound_may_fail(harness, name):
    """Scenario 121 and 50.1 (a): the joiner is released, the request is as before, the coordinator is poisoned.

    When the install of the lengths fails, the row may never have become dirty; then there is nothing to clear.
    """
    case = CALLS[name]
    actions, _ = clean_run(harness, case)
    h = harness()
    handle = case.setup(h)
    held = h.all_active()
    h.fail(actions, actions + 1)
    with pytest.raises(DeviceError):
        case.call(h, handle)
    assert handle.state == case.after_error
    assert h.coordinator.state == "poisoned"
    assert h.all_active() == held
    h.check()
    h.end_everything()


def test_a_lost_handle_meets_a_failing_clearing_upload(harness, caplog):
    """Scenario 121 for the reaping of an orphan: released, poisoned, and the reaping call answers POISONED."""
    h = harness()
    handle = h.begin(h.T(5), 0, keep=False)
    h.run_prefill(handle)
    with caplog.at_level(logging.CRITICAL), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del handle
        gc.collect()
    h.fail(1)
    assert h.try_begin([h.sequence_admission(B_TOKENS, 1)]).status is h.POISONED
    h.heal()
    assert h.coordinator.state == "poisoned"
    assert h.all_active() == {}
    assert h.table.dirty_rows == (0,)
    h.end_everything()


# ---- publishing raises -----------------------------------------------------------------------------------------------


class PublishRaises(ContextCacheManager):
    """A manager whose n-th publication from now on raises, before it has changed anything."""

    countdown = 0
    error: Exception = RuntimeError("publish")

    def publish(self, lease, hashes, resident_length):
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error
        return super().publish(lease, hashes, resident_length)


@pytest.fixture
def seam(harness):
    manager = PublishRaises(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    return harness(manager=manager), manager


def test_a_publication_that_raises_at_prefill_costs_only_its_slot(seam):
    """Scenario 121, 40.18 and 50.1: the other slot is published, the request is settled, the first error is raised."""
    h, manager = seam
    handle = h.begin_batch([h.T(5), B_TOKENS])
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    manager.countdown = 1
    with pytest.raises(RuntimeError, match="publish"):
        h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle))
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.state == "serving"
    assert [h.committed(handle, slot) for slot in (0, 1)] == [5, 5]
    assert [h.seq(handle, slot).published_full_block_count for slot in (0, 1)] == [0, 1]
    assert h.records() == {1: [2]}
    h.decode(handle, 903, 904)
    h.check()
    h.end_everything()


def test_a_publication_that_raises_in_a_step_leaves_the_step_done(seam):
    """Scenario 121 for complete_decode_step: settled, the ledger is advanced, a published slot stays published."""
    h, manager = seam
    handle = h.begin_batch([h.T(7), [51, 52, 53, 54, 55, 56, 57]])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    manager.countdown = 2
    with pytest.raises(RuntimeError, match="publish"):
        h.complete(handle, 903, 904, completed=[0, 1])
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert [h.committed(handle, slot) for slot in (0, 1)] == [8, 8]
    assert [h.seq(handle, slot).published_full_block_count for slot in (0, 1)] == [2, 1]
    h.check()
    h.end_everything()


@pytest.mark.parametrize("others", [0, 1])
def test_a_publication_that_raises_for_a_joiner_leaves_it_finalised(seam, others):
    """Scenario 121 for finalize_sequence_admission: settled, or seating while another joiner waits."""
    h, manager = seam
    handle = seating_two(h) if others else seating(h)
    manager.countdown = 1
    with pytest.raises(RuntimeError, match="publish"):
        h.coordinator.finalize_sequence_admission(handle, 1, ContextCacheSequenceAdvance((702,), 9))
    assert handle.state == ("seating" if others else "settled")
    assert h.committed(handle, 1) == 9
    h.check()
    h.end_everything()


def test_a_broken_invariant_poisons_and_is_raised(seam):
    """00.1 and 50.3: internal metadata is corrupt, so no new admissions; the process lives on."""
    h, manager = seam
    handle = h.begin(h.T(5))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    manager.error, manager.countdown = InvariantViolation("a page is lost"), 1
    with pytest.raises(InvariantViolation):
        h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle))
    assert h.coordinator.state == "poisoned"
    assert handle.state == "settled"
    assert h.try_begin([h.sequence_admission(B_TOKENS, 1)]).status is h.POISONED
    assert h.finish(handle) is h.OK


def test_an_error_that_is_not_of_the_device_is_not_turned_into_a_state(harness):
    """00.1: what is no device error is raised as it is, and the request is where it was."""
    h = harness()
    handle = settled(h)
    assert h.prepare_decode(handle).status is h.OK
    with pytest.raises((TypeError, ContractViolation)):
        h.coordinator.complete_decode_step(handle, object(), ())
    assert handle.state == "decoding"
    assert h.coordinator.complete_decode_step(handle, [ContextCacheSequenceAdvance((902,), 9)], ()) is h.OK
