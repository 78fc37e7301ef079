"""What must not be lost when a call is interrupted or misused: pages, rows, states, and the error itself.

First faults and interrupts (of events, of verbs, between a lease and the ledger, in publishing, in releasing), then
arguments of the wrong kind: each is refused as a ContractViolation, and nothing has changed.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from contextlib import contextmanager

import numpy as np
import pytest

from context_cache.backends import DeviceError, FaultyBackend
from context_cache.coordinator import (
    BatchAdvance,
    BlockHasher,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheManager,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractViolation,
    DecodingKvHeadroom,
    HashChain,
    InvariantViolation,
    KVPageTable,
    ResidentRef,
    ResourceDemand,
    TokenStateContract,
)
from context_cache.coordinator import admitting as admitting_module
from context_cache.coordinator.ledger import Ledger
from context_cache.coordinator.testing import check_invariants

FULLY = TokenStateContract.FULLY_COMMITTED
JOINER = [61, 62, 63]
ERRORS = [KeyboardInterrupt, MemoryError, RuntimeError]
ONE = DecodingKvHeadroom(1)


class Seam(ContextCacheManager):
    """A manager that raises at chosen publications and releases, counted from 1 since ``arm``.

    late: a release does its work before it raises.
    """

    def __init__(self, pages=12):
        super().__init__(ResourceDemand(base_kv_pages=pages), 4, max_records=16)
        self.arm()

    def arm(self, *, publish=None, release=None, late=False):
        self.published = self.released = 0
        self.at_publish, self.at_release, self.late = publish or {}, release or {}, late

    def publish(self, lease, hashes, resident_length):
        self.published += 1
        if self.published in self.at_publish:
            raise self.at_publish[self.published]
        return super().publish(lease, hashes, resident_length)

    def release(self, lease):
        self.released += 1
        error = self.at_release.get(self.released)
        if error is None or self.late:
            super().release(lease)
        if error is not None:
            raise error


@pytest.fixture
def seam(harness):
    manager = Seam()
    return harness(manager=manager), manager


@contextmanager
def raising(backend, verb, error, *, enqueued=False):
    """The next time ``verb`` is asked for, it raises ``error`` from a cause; perhaps its work is enqueued first."""
    plain, left = backend.verb, [True]

    def patched(name, stream, enqueue):
        if name != verb or not left:
            plain(name, stream, enqueue)
            return
        left.clear()
        if enqueued:
            enqueue()
        raise error from ValueError("the cause")

    backend.verb = patched
    try:
        yield
    finally:
        del backend.verb
    assert not left, f"{verb} was not asked for"


def settled(h, count=5, resident=0):
    handle = h.begin(h.T(count), resident)
    h.run_prefill(handle)
    return handle


def batch(h, *lengths):
    handle = h.begin_batch([[100 * slot + token for token in h.T(n)] for slot, n in enumerate(lengths)])
    h.run_prefill(handle)
    return handle


def seating(h):
    handle = settled(h)
    assert h.admit(handle, JOINER, 2).status is h.OK
    h.seat(2)
    return handle


def decoding(h):
    handle = settled(h)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    return handle


def prefilling(h):
    handle = h.begin(h.T(5), 0)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def lose(h, *residents):
    """Settled requests whose handles are gone, all at once; their ids."""
    handles = [h.begin([81, 82, 83 + slot], slot, keep=False) for slot in residents]
    for handle in handles:
        h.run_prefill(handle)
    names = [handle.id for handle in handles]
    del handle, handles
    gc.collect()
    return names


# ---- an event that cannot be recorded --------------------------------------------------------------------------------


def test_a_row_whose_upload_has_no_event_stays_dirty_when_it_is_set_back(new_backend):
    """The device may have the new row by now: that the host row is the last one known proves nothing."""
    backend = FaultyBackend(new_backend())
    stream = backend.new_stream()
    table = KVPageTable(max_batch=2, max_pages_per_seq=3, num_pages=6, backend=backend)
    table.set_row(0, [1])
    assert table.upload(stream)
    assert table.dirty_rows == ()
    table.set_row(0, [2])
    backend.fail_events = True
    with pytest.raises(DeviceError):
        table.upload(stream)
    backend.fail_events = False
    table.set_row(0, [1])
    assert table.dirty_rows == (0,)
    backend.synchronize(stream)
    assert table.device_rows()[0, 0].tolist() == [2, -1, -1]
    assert table.upload(stream)
    backend.synchronize(stream)
    assert table.device_rows()[0, 0].tolist() == [1, -1, -1]
    assert table.dirty_rows == ()


@pytest.mark.parametrize("clearing", ["not enqueued", "enqueued"])
def test_the_row_of_a_joiner_whose_upload_has_no_event_is_not_believed_clean(h, clearing):
    """The joiner's row was enqueued, its event failed, and the row is empty again as it was before."""
    handle = settled(h)
    held = h.all_active()
    h.backend.fail_events = True
    h.fail(*([2] if clearing == "not enqueued" else []))
    h.mark()
    with pytest.raises(DeviceError):
        h.admit(handle, JOINER, 2)
    assert h.log[0] == "upload_rows", "the row was enqueued before its event failed"
    assert handle.state == "settled"
    assert h.size(handle) == 1
    assert h.all_active() == held
    assert h.row(2) == h.empty_row
    assert 2 in h.table.dirty_rows
    if clearing == "not enqueued":
        assert h.device_row(2) != h.empty_row
    assert h.coordinator.state == "poisoned"
    h.check()
    h.backend.fail_events = False
    h.heal()
    assert h.finish(handle) is h.OK
    assert h.table.dirty_rows == ()
    assert h.device_row(2) == h.empty_row
    h.end_everything()


def test_steps_without_events_are_retried_until_no_staging_is_left_and_the_request_still_ends(h, monkeypatch):
    """Each attempt loses a staging buffer. A ring without any raises DeviceError, which the row knows how to take."""
    handle = settled(h)

    def record_event(stream):
        raise DeviceError("record_event", stream.name, "gone")

    monkeypatch.setattr(h.backend, "record_event", record_event)
    causes = []
    for _ in range(12):
        with pytest.raises(DeviceError) as caught:
            h.prepare_decode(handle, 5)
        assert handle.state == "decode_retry"
        causes.append(caught.value.verb)
        h.check()
    assert causes[0] == "record_event"
    assert causes[-1] == "staging"
    assert h.finish(handle) is h.POISONED
    assert handle.state == "released"
    assert h.all_active() == {}
    monkeypatch.undo()
    h.end_everything()
    assert h.finish(handle) is h.OK


def test_a_step_is_prepared_once_events_work_again(h):
    """A drain is not needed as long as a buffer is left; the row that was enqueued twice is the right one."""
    handle = settled(h)
    h.backend.fail_events = True
    for _ in range(3):
        with pytest.raises(DeviceError):
            h.prepare_decode(handle, 5)
        assert handle.state == "decode_retry"
    h.backend.fail_events = False
    assert h.prepare_decode(handle, 5).status is h.OK
    h.check_device_rows()
    assert h.complete(handle, 902) is h.OK
    h.end_everything()


# ---- an interrupt inside a verb --------------------------------------------------------------------------------------


def prepare_decode(h, handle):
    h.prepare_decode(handle, 5)


def prepare_prefill(h, handle):
    h.coordinator.prepare_prefill(handle)


def begin_compaction(h, handle):
    h.begin_compaction(handle, [-1, 0])


def compact(h, handle):
    h.coordinator.compact_batch(handle)


def admit(h, handle):
    h.admit(handle, JOINER, 2)


def two(h):
    return batch(h, 5, 6)


def compacting(h):
    handle = two(h)
    assert h.begin_compaction(handle, [-1, 0]) is h.OK
    return handle


def not_the_view(h):
    handle = settled(h)
    settled(h, 3, 1)
    return handle


INSIDE = {
    "a step's rows": (settled, prepare_decode, "upload_rows", "decode_retry"),
    "a step's lengths": (not_the_view, prepare_decode, "reset_lengths", "decode_retry"),
    "a prefill's rows": (lambda h: h.begin(h.T(5), 0), prepare_prefill, "upload_rows", "broken"),
    "a prefill's lengths": (lambda h: h.begin(h.T(5), 0), prepare_prefill, "reset_lengths", "broken"),
    "a mapping": (two, begin_compaction, "upload_mapping", "broken"),
    "a compaction's rows": (compacting, compact, "upload_rows", "broken"),
    "a compaction's lengths": (compacting, compact, "compact_lengths", "broken"),
    "a joiner's row": (settled, admit, "upload_rows", "settled"),
    "a joiner's lengths": (not_the_view, admit, "reset_lengths", "settled"),
}


@pytest.mark.parametrize("enqueued", [False, True], ids=["not enqueued", "enqueued"])
@pytest.mark.parametrize("kind", [*ERRORS, DeviceError])
@pytest.mark.parametrize("name", INSIDE)
def test_whatever_a_verb_raises_leads_to_the_failure_state_and_is_raised_unchanged(h, name, kind, enqueued):
    setup, call, verb, state = INSIDE[name]
    handle = setup(h)
    held, size = h.all_active(), h.size(handle)
    error = DeviceError(verb, "main", "gone") if kind is DeviceError else kind("in a verb")
    with raising(h.backend, verb, error, enqueued=enqueued), pytest.raises(kind) as caught:
        call(h, handle)
    assert caught.value is error
    assert isinstance(error.__cause__, ValueError)
    assert handle.state == state
    assert h.coordinator.state == "serving"
    assert h.coordinator.execution_holder == (handle.id if state == "decode_retry" else None)
    if call is admit:
        assert h.size(handle) == size
        assert h.all_active() == held
    h.check()
    if state == "decode_retry":
        assert h.prepare_decode(handle, 5).status is h.OK
        h.check_device_rows()
        assert h.complete(handle, 902) is h.OK
    elif call is admit:
        assert h.admit(handle, JOINER, 2).status is h.OK
        h.check_device_rows()
    assert h.finish(handle) is h.OK
    assert handle.state == "released"
    h.end_everything()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_interrupted_admission_beside_another_joiner_leaves_that_one(h, kind):
    handle = seating(h)
    error = kind("in a verb")
    with raising(h.backend, "upload_rows", error), pytest.raises(kind) as caught:
        h.admit(handle, [71, 72], 1)
    assert caught.value is error
    assert handle.state == "seating"
    assert h.size(handle) == 2
    h.check()
    assert h.coordinator.finalize_sequence_admission(handle, 1, h.advance(702, 3)) is h.OK
    h.decode(handle, 902, 703)
    h.end_everything()


# ---- memory ends between a lease and the ledger ----------------------------------------------------------------------


def failing_at(function, number, *, late):
    """``function``, but the n-th call raises MemoryError; late: after its work."""
    calls = []

    def call(*arguments, **options):
        calls.append(None)
        if len(calls) == number and not late:
            raise MemoryError
        result = function(*arguments, **options)
        if len(calls) == number:
            raise MemoryError
        return result

    return call


PLACES = {
    "hashes": (HashChain, "fork"),
    "ledger": (Ledger, "open"),
    "request": (admitting_module, "Request"),
    "handle": (admitting_module, "RequestHandle"),
    "joiner": (admitting_module, "JoinCall"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("place", "number"), [("hashes", 1), ("hashes", 2), ("ledger", 1), ("ledger", 2), ("request", 1), ("handle", 1)]
)
def test_a_request_that_memory_did_not_suffice_for_leaves_nothing(h, monkeypatch, place, number, late):
    free = h.free()
    prompts = [h.T(5), [51, 52, 53, 54, 55, 56]]
    owner, name = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_at(getattr(owner, name), number, late=late))
        with pytest.raises(MemoryError):
            h.begin_batch(prompts)
    gc.collect()
    check_invariants(h.coordinator)
    assert sorted(h.free()) == sorted(free)
    assert h.all_active() == {}
    assert h.coordinator.request_ids == ()
    assert h.metrics()["active_requests"] == 0
    handle = h.begin_batch(prompts)
    h.run_prefill(handle)
    h.end_everything()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", ["hashes", "ledger", "joiner"])
@pytest.mark.parametrize("setup", [settled, seating, not_the_view])
def test_a_joiner_that_memory_did_not_suffice_for_leaves_nothing(h, monkeypatch, setup, place, late):
    handle = setup(h)
    state, size, held, free = handle.state, h.size(handle), h.all_active(), sorted(h.free())
    ids, resident = h.coordinator.request_ids, 1 if setup is seating else 2
    owner, name = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_at(getattr(owner, name), 1, late=late))
        with pytest.raises(MemoryError):
            h.admit(handle, [71, 72, 73, 74, 75], resident)
    assert (handle.state, h.size(handle)) == (state, size)
    assert h.coordinator.request_ids == ids
    assert h.all_active() == held
    assert sorted(h.free()) == free
    check_invariants(h.coordinator)
    h.check()
    assert h.admit(handle, [71, 72, 73, 74, 75], resident).status is h.OK
    h.check_device_rows()
    h.end_everything()


# ---- publishing is interrupted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_the_publication_of_a_prefill_settles_the_request(seam, kind):
    h, manager = seam
    handle = prefilling(h)
    error = kind("publishing")
    manager.arm(publish={1: error})
    with pytest.raises(kind) as caught:
        h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle))
    assert caught.value is error
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.state == "serving"
    assert (h.committed(handle), h.seq(handle).token_count) == (5, 6)
    h.check()
    h.decode(handle, 902)
    h.end_everything()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_the_publication_of_a_step_settles_the_request(seam, kind):
    h, manager = seam
    handle = batch(h, 7, 5)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    error = kind("publishing")
    manager.arm(publish={1: error})
    with pytest.raises(kind) as caught:
        h.complete(handle, 903, 904, completed=[0])
    assert caught.value is error
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert [h.committed(handle, slot) for slot in (0, 1)] == [8, 6]
    assert h.seq(handle).state == "terminal"
    h.check()
    h.decode(handle, None, 905)
    h.end_everything()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_the_publication_of_a_joiner_seats_it(seam, kind):
    h, manager = seam
    handle = settled(h)
    assert h.admit(handle, [61, 62, 63, 64, 65], 2).status is h.OK
    h.seat(2)
    error = kind("publishing")
    manager.arm(publish={1: error})
    with pytest.raises(kind) as caught:
        h.coordinator.finalize_sequence_admission(handle, 1, h.advance(702, 5))
    assert caught.value is error
    assert handle.state == "settled"
    assert h.seq(handle, 1).state == "seated"
    h.check()
    h.decode(handle, 902, 703)
    h.end_everything()


@pytest.mark.parametrize("call", ["prefill", "step"])
@pytest.mark.parametrize("order", [(ValueError, InvariantViolation), (InvariantViolation, ValueError)])
def test_a_broken_invariant_is_raised_before_any_other_error_of_the_same_publication(seam, caplog, order, call):
    """The other error is logged, the slots without one are published, the coordinator admits nothing more."""
    h, manager = seam
    errors = [kind("publishing a slot") for kind in order]
    handle = h.begin_batch([[100 * slot + token for token in h.T(7)] for slot in range(3)])
    if call == "step":
        h.run_prefill(handle)
        assert h.prepare_decode(handle).status is h.OK
    else:
        assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    manager.arm(publish={1: errors[0], 2: errors[1]})

    def complete():
        if call == "step":
            h.complete(handle, 911, 912, 913, completed=[0, 1, 2])
        else:
            h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle))

    with caplog.at_level(logging.ERROR), pytest.raises(InvariantViolation) as caught:
        complete()
    broken, other = sorted(errors, key=lambda error: isinstance(error, ValueError))
    assert caught.value is broken
    assert other in [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert h.coordinator.state == "poisoned"
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.seq(handle, 2).published_full_block_count == (2 if call == "step" else 1)
    assert h.try_begin([h.sequence_admission([1, 2], 1)]).status is h.POISONED
    h.check()
    assert h.finish(handle) is h.OK
    h.end_everything()


# ---- the end is interrupted ------------------------------------------------------------------------------------------

AFTERWARDS = {
    "another call": lambda h, handle: h.coordinator.metrics(),
    "close again": lambda h, handle: handle.close(),
    "finish": lambda h, handle: h.finish(handle),
    "shutdown": lambda h, handle: h.coordinator.shutdown(),
}


@pytest.mark.parametrize("kind", [InvariantViolation, RuntimeError])
@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize("setup", [settled, two, prefilling, decoding, seating])
def test_closing_a_handle_raises_nothing_and_is_tried_again(seam, caplog, setup, afterwards, kind):
    h, manager = seam
    handle = setup(h)
    manager.arm(release={1: kind("a page is lost")})
    with caplog.at_level(logging.ERROR):
        handle.close()
    assert any(handle.id in record.getMessage() and record.exc_info for record in caplog.records)
    assert h.coordinator.state == ("poisoned" if kind is InvariantViolation else "serving")
    assert h.coordinator.request_ids == (handle.id,)
    AFTERWARDS[afterwards](h, handle)
    assert handle.state == "released"
    assert h.coordinator.request_ids == ()
    assert h.all_active() == {}
    check_invariants(h.coordinator)
    h.end_everything()


@pytest.mark.parametrize("kind", [InvariantViolation, RuntimeError])
def test_reaping_a_lost_handle_raises_nothing_and_is_tried_again(seam, caplog, kind):
    h, manager = seam
    with caplog.at_level(logging.CRITICAL):
        (name,) = lose(h, 1)
    manager.arm(release={1: kind("a page is lost")})
    with caplog.at_level(logging.ERROR):
        h.coordinator.metrics()
    assert any(name in record.getMessage() and record.exc_info for record in caplog.records)
    assert h.coordinator.state == ("poisoned" if kind is InvariantViolation else "serving")
    assert h.coordinator.request_ids == (name,)
    h.coordinator.metrics()
    assert h.coordinator.request_ids == ()
    assert h.coordinator.inspect(name).state == "released"
    assert h.all_active() == {}
    check_invariants(h.coordinator)
    h.end_everything()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_one_lost_handle_that_cannot_be_reaped_does_not_keep_the_others(seam, caplog, number):
    h, manager = seam
    with caplog.at_level(logging.CRITICAL):
        names = lose(h, 0, 1, 2)
        manager.arm(release={number: RuntimeError("once")})
        h.coordinator.metrics()
    assert len(h.coordinator.request_ids) == 1
    h.coordinator.metrics()
    assert h.coordinator.request_ids == ()
    assert [h.coordinator.inspect(name).state for name in names] == ["released"] * 3
    assert h.all_active() == {}
    h.end_everything()


def test_an_interrupt_while_reaping_keeps_the_lost_request_in_the_queue(seam, caplog):
    h, manager = seam
    with caplog.at_level(logging.CRITICAL):
        (name,) = lose(h, 1)
    manager.arm(release={1: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        h.coordinator.metrics()
    assert h.coordinator.request_ids == (name,)
    h.coordinator.metrics()
    assert h.coordinator.request_ids == ()
    assert h.all_active() == {}
    h.end_everything()


def three(h):
    return batch(h, 5, 6, 7)


def three_prefilling(h):
    handle = h.begin_batch([h.T(5), [51, 52, 53], [61, 62, 63, 64]])
    assert h.coordinator.prepare_prefill(handle) is h.OK
    return handle


def three_admitted(h):
    return h.begin_batch([h.T(5), [51, 52, 53], [61, 62, 63, 64]])


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("end", ["finish", "close"])
@pytest.mark.parametrize("setup", [three, three_prefilling, three_admitted])
def test_an_end_that_is_interrupted_between_two_leases_goes_on(seam, setup, end, number, late):
    h, manager = seam
    handle = setup(h)
    error = KeyboardInterrupt()
    manager.arm(release={number: error}, late=late)
    with pytest.raises(KeyboardInterrupt) as caught:
        h.finish(handle) if end == "finish" else handle.close()
    assert caught.value is error
    assert h.coordinator.request_ids == (handle.id,)
    assert h.finish(handle) is h.OK
    assert handle.state == "released"
    assert h.coordinator.request_ids == ()
    assert h.all_active() == {}
    check_invariants(h.coordinator)
    assert h.coordinator.execution_holder is None
    # The resident slots are free for others.
    again = h.begin_batch([h.T(5), [51, 52, 53], [61, 62, 63, 64]])
    h.run_prefill(again)
    h.end_everything()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("end", ["finish", "close"])
def test_a_compaction_that_is_interrupted_between_two_leases_is_broken_and_ends(seam, end, number, late):
    h, manager = seam
    handle = three(h)
    assert h.begin_compaction(handle, [-1, -1, 0]) is h.OK
    error = KeyboardInterrupt()
    manager.arm(release={number: error}, late=late)
    with pytest.raises(KeyboardInterrupt) as caught:
        h.coordinator.compact_batch(handle)
    assert caught.value is error
    assert handle.state == "broken"
    assert h.coordinator.execution_holder is None
    if end == "finish":
        assert h.finish(handle) is h.OK
    else:
        handle.close()
    assert handle.state == "released"
    assert h.coordinator.request_ids == ()
    assert h.all_active() == {}
    check_invariants(h.coordinator)
    h.end_everything()


def test_a_half_ended_request_can_be_inspected(seam):
    h, manager = seam
    handle = three(h)
    manager.arm(release={2: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        h.finish(handle)
    view = h.coordinator.inspect(handle.id)
    assert [ref.slot for ref in view.residents] == [1, 2]
    h.coordinator.metrics()
    assert h.finish(handle) is h.OK
    h.end_everything()


def test_a_half_ended_request_whose_drain_fails_is_counted_and_released_later(seam):
    h, manager = seam
    handle = three_prefilling(h)
    manager.arm(release={2: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        h.finish(handle)
    h.sync.fail = True
    assert h.finish(handle) is h.POISONED
    assert handle.state == "quarantined"
    h.sync.fail = False
    held = len(h.all_active())
    assert held > 0
    assert h.coordinator.metrics().base_kv_pages_withheld == held
    assert h.coordinator.shutdown() is h.OK
    assert h.all_active() == {}
    h.end_everything()


def test_a_sequence_of_a_half_ended_request_that_has_left_is_refused(seam):
    h, manager = seam
    handle = three(h)
    manager.arm(release={2: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        h.finish(handle)
    with pytest.raises(ContractViolation):
        h.coordinator.sequence(handle, 0)
    assert h.finish(handle) is h.OK
    h.end_everything()


# ---- a fully committed request ---------------------------------------------------------------------------------------


def test_a_joiner_of_a_fully_committed_request_is_finalised_without_a_token_and_decodes_several(h):
    handle = h.begin(h.T(5), 0, contract=FULLY)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    assert h.coordinator.finalize_prefill_publication(handle, [h.advance((), 5)]) is h.OK
    assert h.admit(handle, JOINER, 2).status is h.OK
    h.seat(2)
    h.refuses(h.coordinator.finalize_sequence_admission, handle, 1, h.advance(702, 3))
    assert h.coordinator.finalize_sequence_admission(handle, 1, h.advance((), 3)) is h.OK
    assert handle.state == "settled"
    assert h.seq(handle, 1).token_ids.tolist() == JOINER
    assert h.prepare_decode(handle, 3).status is h.OK
    h.synchronize()
    advances = [h.advance((901, 902), 7), h.advance((701, 702, 703), 6)]
    assert h.coordinator.complete_decode_step(handle, advances, [1]) is h.OK
    assert h.seq(handle, 0).token_ids.tolist() == [*h.T(5), 901, 902]
    assert h.seq(handle, 1).token_ids.tolist() == [*JOINER, 701, 702, 703]
    assert [h.committed(handle, slot) for slot in (0, 1)] == [7, 6]
    assert h.seq(handle, 1).state == "terminal"
    assert h.seq(handle, 1).published_full_block_count == 1
    check_invariants(h.coordinator)
    h.end_everything()


# ---- resident slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float64(1), "1", None, [1], 2**63, 2**70, -(2**70)])
@pytest.mark.parametrize("name", ["slot", "epoch"])
def test_a_resident_reference_is_made_of_integers(name, value):
    with pytest.raises(ContractViolation):
        ResidentRef(**{"slot": 0, "epoch": 1, name: value})


def test_a_resident_reference_takes_numpy_integers_as_integers():
    ref = ResidentRef(np.int32(2), np.uint64(7))
    assert ref == ResidentRef(2, 7)
    assert (type(ref.slot), type(ref.epoch)) == (int, int)


def test_the_largest_epoch_can_be_held(h):
    handle = h.begin(h.T(5), ResidentRef(0, 2**63 - 1))
    h.run_prefill(handle)
    assert h.seq(handle).resident.epoch == 2**63 - 1
    h.end_everything()


def test_an_epoch_below_the_last_one_of_the_slot_is_stale(h):
    handle = h.begin(h.T(5), ResidentRef(0, 5))
    h.run_prefill(handle)
    assert h.finish(handle) is h.OK
    stale = h.sequence_admission(h.T(5), ResidentRef(0, 4))
    h.refuses(h.try_begin, [stale])
    other = settled(h, 6, 1)
    h.refuses(h.admit, other, JOINER, ResidentRef(0, 4))
    assert h.admit(other, JOINER, ResidentRef(0, 5)).status is h.OK
    assert h.finish(other) is h.OK
    again = h.begin(h.T(5), ResidentRef(0, 5))
    h.run_prefill(again)
    assert h.finish(again) is h.OK
    h.begin(h.T(5), ResidentRef(0, 6))
    h.end_everything()


def test_a_bound_row_is_changed_by_its_holder_alone(h):
    handle = settled(h)
    row, bound = h.row(0), h.table.bound_epoch(0)
    for call, *arguments in (
        (h.table.set_row, 0, [1]),
        (h.table.set_row, 0, []),
        (h.table.set_row, np.int64(0), [1]),
        (h.table.set_rows, ((1, [2]), (0, [1]))),
        (h.table.set_rows, iter([(0, [1]), (1, [2])])),
        (h.table.set_identity,),
    ):
        h.refuses(call, *arguments)
        assert (h.row(0), h.table.bound_epoch(0)) == (row, bound)
        assert not h.table.is_identity
    h.table.set_row(1, [11])
    h.table.set_rows(((1, []), (2, [])))
    h.decode(handle, 902)
    assert h.finish(handle) is h.OK
    h.table.set_row(0, [1])
    h.table.set_row(0, [])
    h.end_everything()


# ---- the device arrays of the caller ---------------------------------------------------------------------------------


def locked():
    array = np.zeros(3, np.int32)
    array.flags.writeable = False
    return array


TENSORS = {
    "every second entry": lambda: np.zeros(6, np.int32)[::2],
    "transposed": lambda: np.zeros((3, 2), np.int32).T,
    "read only": locked,
    "int64": lambda: np.zeros(3, np.int64),
    "uint32": lambda: np.zeros(3, np.uint32),
    "float32": lambda: np.zeros(3, np.float32),
    "other byte order": lambda: np.zeros(3, np.dtype(np.int32).newbyteorder()),
    "too short": lambda: np.zeros(1, np.int32),
    "empty": lambda: np.zeros(0, np.int32),
    "list": lambda: [0, 0, 0],
    "none": lambda: None,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_mapping_goes_only_into_a_tensor_that_can_take_it(h, name):
    handle = two(h)
    h.refuses(h.coordinator.begin_batch_compaction, handle, [-1, 0], 1, TENSORS[name]())
    assert handle.state == "settled"
    h.compact(handle, [-1, 0])
    h.end_everything()


@pytest.mark.parametrize(
    "size", [np.array([1]), np.array(1), [1], 1.0, np.float32(1), True, "1", None, 2, -1], ids=repr
)
def test_the_new_batch_size_is_an_integer_and_agrees_with_the_mapping(h, size):
    handle = two(h)
    h.refuses(h.coordinator.begin_batch_compaction, handle, [-1, 0], size, h.mapping_tensor())
    assert handle.state == "settled"
    assert h.coordinator.begin_batch_compaction(handle, [-1, 0], np.int64(1), h.mapping_tensor()) is h.OK
    assert h.coordinator.compact_batch(handle) is h.OK
    h.end_everything()


@pytest.mark.parametrize("mapping", [None, 3, "ab", [-1.0, 0.0], [True, False], [[-1, 0]], [-1, None], [-1, 2**40]])
def test_a_mapping_is_one_dimension_of_integers(h, mapping):
    handle = two(h)
    h.refuses(h.coordinator.begin_batch_compaction, handle, mapping, 1, h.mapping_tensor())
    h.end_everything()


@pytest.mark.parametrize("step", [1, np.int32(1), np.int64(1), np.uint8(1), np.array(1, np.int32)], ids=repr)
def test_the_lengths_of_all_sequences_may_be_raised_by_one_number_of_any_integer_type(h, step):
    two(h)
    before = h.device_lengths(3)
    h.cache_manager.commit_sequence_length(step, h.stream)
    assert h.device_lengths(3) == [before[0] + 1, before[1] + 1, before[2]]
    h.end_everything()


# ---- headroom --------------------------------------------------------------------------------------------------------


def test_a_narrow_numpy_headroom_does_not_wrap(harness):
    h = harness(row_pages=80, pages=80, max_batch=1)
    headroom = DecodingKvHeadroom(np.uint8(10), np.int8(0))
    assert (type(headroom.base_extra_tokens), type(headroom.draft_extra_tokens)) == (int, int)
    assert headroom == DecodingKvHeadroom(10)
    handle = h.begin([token % 7 for token in range(250)], 0, headroom=np.uint8(10))
    assert len(h.pages(handle)) == 65
    h.run_prefill(handle)
    assert h.prepare_decode(handle, np.uint8(40)).status is h.OK
    assert len(h.pages(handle)) == 73
    assert h.complete(handle, 901) is h.OK
    assert h.prepare_decode(handle, np.int8(1)).status is h.OK
    assert len(h.pages(handle)) == 73
    assert h.complete(handle, 902) is h.OK
    h.end_everything()


@pytest.mark.parametrize("value", [True, 1.0, np.float64(1), "1", None, np.array([1]), 2**70])
@pytest.mark.parametrize("name", ["base_extra_tokens", "draft_extra_tokens"])
def test_a_headroom_is_made_of_integers(name, value):
    with pytest.raises(ContractViolation):
        DecodingKvHeadroom(**{"base_extra_tokens": 1, name: value})


# ---- arguments of the wrong kind -------------------------------------------------------------------------------------

NO_OBJECTS = [None, 5, "x", [], object()]


def batch_admission(h, slot=1):
    return ContextCacheBatchAdmission([h.sequence_admission([1, 2, 3], slot)])


@pytest.mark.parametrize("value", NO_OBJECTS, ids=lambda value: type(value).__name__)
class TestArgumentsThatAreNoObjectsOfTheApi:
    def test_the_stream_of_an_admission(self, h, value):
        h.refuses(h.coordinator.begin_request, batch_admission(h), ONE, value)

    def test_the_admission(self, h, value):
        h.refuses(h.coordinator.begin_request, value, ONE, h.stream)
        h.refuses(h.coordinator.admit_sequence, settled(h), value, ONE)

    def test_the_headroom(self, h, value):
        h.refuses(h.coordinator.begin_request, batch_admission(h), value, h.stream)
        handle = settled(h)
        h.refuses(h.coordinator.admit_sequence, handle, h.sequence_admission(JOINER, 2), value)
        h.refuses(h.coordinator.prepare_decode_step, handle, value)
        h.decode(handle, 902)

    def test_the_handle(self, h, value):
        handle = settled(h)
        for call, *arguments in (
            (h.coordinator.prepare_prefill,),
            (h.coordinator.enqueue_prefill_captures,),
            (h.coordinator.finalize_prefill_publication, []),
            (h.coordinator.admit_sequence, h.sequence_admission(JOINER, 2), ONE),
            (h.coordinator.finalize_sequence_admission, 0, h.HOLD),
            (h.coordinator.retract_sequence_admission,),
            (h.coordinator.prepare_decode_step, ONE),
            (h.coordinator.complete_decode_step, []),
            (h.coordinator.begin_batch_compaction, [0], 1, h.mapping_tensor()),
            (h.coordinator.compact_batch,),
            (h.coordinator.finish,),
            (h.coordinator.sequence, 0),
        ):
            h.refuses(call, value, *arguments)
        h.decode(handle, 902)

    def test_the_extras_of_a_sequence(self, value):
        with pytest.raises(ContractViolation):
            ContextCacheSequenceAdmission([1, 2], value)

    def test_the_resident_of_a_sequence(self, value):
        with pytest.raises(ContractViolation):
            ContextCacheSequenceAdmission([1, 2], resident=value)

    def test_a_sequence_of_a_batch(self, value):
        with pytest.raises(ContractViolation):
            ContextCacheBatchAdmission([value])

    def test_the_policies(self, value):
        for name in ("token_state_contract", "lookup_policy", "commit_policy"):
            with pytest.raises(ContractViolation):
                ContextCacheBatchAdmission([], **{name: value})

    def test_the_advances(self, h, value):
        handle = prefilling(h)
        h.refuses(h.coordinator.finalize_prefill_publication, handle, value)
        h.refuses(h.coordinator.finalize_prefill_publication, handle, [value])
        assert h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle)) is h.OK
        assert h.prepare_decode(handle).status is h.OK
        h.refuses(h.coordinator.complete_decode_step, handle, value)
        h.refuses(h.coordinator.complete_decode_step, handle, [value])
        for name in ("token_ids", "counts", "committed"):
            arrays = {part: np.array([1], np.int32) for part in ("token_ids", "counts", "committed")} | {name: value}
            h.refuses(h.coordinator.complete_decode_step, handle, BatchAdvance(**arrays))
        assert h.complete(handle, 902) is h.OK

    def test_the_advance_of_a_joiner(self, h, value):
        handle = seating(h)
        h.refuses(h.coordinator.finalize_sequence_admission, handle, 1, value)
        assert h.coordinator.finalize_sequence_admission(handle, 1, h.advance(702, 3)) is h.OK

    def test_the_configuration_and_the_resources(self, h, value):
        given = [ContextCacheConfig(enabled=True), h.deployment, h.resources]
        for index in range(3):
            wrong = [*given[:index], value, *given[index + 1 :]]
            with pytest.raises(ContractViolation):
                ContextCacheCoordinator(*wrong, backend=h.backend, stream=h.stream)


@pytest.mark.parametrize("item", [((902,), 6), [902, 6], 902, None, {"accepted_token_ids": (902,)}], ids=repr)
def test_an_advance_is_an_advance_and_no_tuple_of_its_parts(h, item):
    handle = decoding(h)
    h.refuses(h.coordinator.complete_decode_step, handle, [item])
    h.refuses(h.coordinator.complete_decode_step, handle, (item,))
    assert h.complete(handle, 902) is h.OK
    h.end_everything()


@pytest.mark.parametrize(
    "advance",
    [
        ContextCacheSequenceAdvance((1.7,), 6),
        ContextCacheSequenceAdvance((True,), 6),
        ContextCacheSequenceAdvance((None,), 6),
        ContextCacheSequenceAdvance(("x",), 6),
        ContextCacheSequenceAdvance((2**70,), 6),
        ContextCacheSequenceAdvance((2**31,), 6),
        ContextCacheSequenceAdvance((902,), 6.0),
        ContextCacheSequenceAdvance((902,), None),
        ContextCacheSequenceAdvance((902,), 2**70),
        ContextCacheSequenceAdvance((902,), "6"),
    ],
    ids=repr,
)
def test_the_numbers_of_an_advance_are_integers_of_32_bit(h, advance):
    handle = decoding(h)
    h.refuses(h.coordinator.complete_decode_step, handle, [advance])
    assert h.complete(handle, 902) is h.OK
    h.end_everything()


@pytest.mark.parametrize(
    "value",
    [None, 0, iter([0]), {0}, "0", [0.0], [True], [None], ["0"], np.array([0.0]), np.array([True]), np.array([[0]]),
     np.array(0), [1], [-1], [2**70], [0, 0]],
)  # fmt: skip
@pytest.mark.parametrize("form", ["list", "arrays"])
def test_publishable_slots_are_a_list_of_slots(h, value, form):
    handle = decoding(h)
    advances = [h.advance(902, 6)] if form == "list" else BatchAdvance.one_token_each(
        np.array([902], np.int32), np.array([6], np.int32)
    )  # fmt: skip
    h.refuses(h.coordinator.complete_decode_step, handle, advances, value)
    assert h.coordinator.complete_decode_step(handle, advances, np.array([0])) is h.OK
    assert h.seq(handle).state == "terminal"
    h.end_everything()


@pytest.mark.parametrize("lengths", [3, 0, "3", [3], (3,), np.array([3]), object(), iter([3])])
def test_common_lengths_are_left_out_of_a_plain_request(h, lengths):
    handle = prefilling(h)
    advances = h.prefill_advances(handle)
    h.refuses(h.coordinator.finalize_prefill_publication, handle, advances, lengths)
    assert h.coordinator.finalize_prefill_publication(handle, advances) is h.OK
    assert h.prepare_decode(handle).status is h.OK
    h.refuses(h.coordinator.complete_decode_step, handle, [h.advance(902, 6)], (), lengths)
    assert h.coordinator.complete_decode_step(handle, [h.advance(902, 6)], (), []) is h.OK
    h.end_everything()


@pytest.mark.parametrize(
    "name", [5, None, b"r1", 1.0, ["r1"], "", "r", "r0", "r2", "r-1", "1", "x1", "r1.0", "r\u00b2"]
)
def test_only_an_id_that_was_given_can_be_inspected(h, name):
    settled(h)
    h.refuses(h.coordinator.inspect, name)
    assert h.coordinator.inspect("r1").state == "settled"


@pytest.mark.parametrize("slot", [None, "0", 0.0, True, np.bool_(False), [0], np.array([0]), -1, 1, 2**70])
def test_a_logical_slot_is_an_integer_in_range(h, slot):
    handle = settled(h)
    h.refuses(h.coordinator.sequence, handle, slot)
    assert h.coordinator.sequence(handle, np.int64(0)).state == "seated"


@pytest.mark.parametrize("key", [5, 5.0, "k" * 32, bytearray(32), [1] * 32, b"", b"short", True], ids=repr)
def test_an_identity_key_is_bytes(harness, key):
    with pytest.raises(ContractViolation):
        harness(identity_key=key)


@pytest.mark.parametrize("ids", [[1.7], [2**70], [2**32 + 5], [True], [None], ["1"], None, 5, [[1]], [-1], [12]])
def test_a_row_takes_page_numbers_only(h, ids):
    h.refuses(h.table.set_row, 0, ids)
    h.refuses(h.table.set_rows, ((1, [2]), (0, ids)))


@pytest.mark.parametrize("slot", [None, "0", 0.0, 0.5, True, [0], -1, 3, 2**70])
def test_a_row_is_named_by_an_integer(h, slot):
    h.refuses(h.table.set_row, slot, [1])


@pytest.mark.parametrize("enabled", ["no", "yes", 1, None, object(), False, np.True_])
def test_only_true_enables_the_cache(h, enabled):
    with pytest.raises(ContractViolation):
        ContextCacheCoordinator(
            ContextCacheConfig(enabled=enabled), h.deployment, h.resources, backend=h.backend, stream=h.stream
        )


@pytest.mark.parametrize("missing", ["backend", "stream"])
def test_a_coordinator_needs_a_backend_and_a_stream(h, missing):
    with pytest.raises(ContractViolation):
        ContextCacheCoordinator(
            ContextCacheConfig(enabled=True), h.deployment, h.resources,
            **{"backend": h.backend, "stream": h.stream, missing: None},
        )  # fmt: skip


HASHER = BlockHasher(bytes(32))
ELSEWHERE = {
    "no sequences": lambda h: ContextCacheBatchAdmission(None),
    "a number of sequences": lambda h: ContextCacheBatchAdmission(5),
    "no media list": lambda h: ContextCacheSequenceAdmission([1], per_position_media_hash=None),
    "a number as media list": lambda h: ContextCacheSequenceAdmission([1], per_position_media_hash=5),
    "no media keys": lambda h: BlockKeyExtras(media=None),
    "a number as media keys": lambda h: BlockKeyExtras(media=5),
    "no accepted tokens": lambda h: ContextCacheSequenceAdvance(None, 6),
    "a token instead of a tuple": lambda h: ContextCacheSequenceAdvance(902, 6),
    "no rows": lambda h: h.table.set_rows(None),
    "rows that are numbers": lambda h: h.table.set_rows([1]),
    "a row without pages": lambda h: h.table.set_rows([(0,)]),
    "no page size": lambda h: HASHER.hash_full_blocks([1, 2], None),
    "half a page size": lambda h: HASHER.hash_full_blocks([1, 2], 1.5),
    "no extras of a hash": lambda h: HASHER.hash_full_blocks([1, 2], 1, None),
    "a number as media of a hash": lambda h: HASHER.hash_full_blocks([1, 2], 1, media=5),
    "a number as extras of blocks": lambda h: HASHER.hash_full_blocks([1, 2], 1, block_extras=5),
    "no extras of blocks": lambda h: HASHER.hash_full_blocks([1, 2], 1, block_extras=[None, None]),
    "an id too long to be a number": lambda h: h.coordinator.inspect("r" + "9" * 5000),
    "a number as manager": lambda h: ContextCacheCoordinator(
        ContextCacheConfig(enabled=True), h.deployment, h.resources, backend=h.backend, stream=h.stream, manager=5
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_wrong_kinds_are_refused_elsewhere_too(h, name):
    h.refuses(ELSEWHERE[name], h)


# ---- one owner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps, lambda value: pickle.dumps(value, 0)])
@pytest.mark.parametrize("what", ["handle", "coordinator", "a list of both"])
def test_there_is_one_of_each_handle_and_coordinator(h, make, what):
    handle = settled(h)
    value = {"handle": handle, "coordinator": h.coordinator, "a list of both": [handle, h.coordinator]}[what]
    if what == "a list of both" and make is copy.copy:
        assert make(value)[0] is handle, "a shallow copy of a list copies neither"
        return
    h.refuses(make, value)
    h.decode(handle, 902)
    h.end_everything()


@pytest.mark.parametrize("number", [0, 1, 15, 17])
def test_the_number_of_records_is_set_in_one_place(harness, number):
    with pytest.raises(ContractViolation):
        harness(manager=Seam(), max_records=number)


@pytest.mark.parametrize("number", [None, 16])
def test_a_manager_brings_its_number_of_records(harness, number):
    h = harness(manager=Seam(), max_records=number)
    assert h.manager.max_records == 16
    settled(h)
    h.end_everything()


def test_a_manager_of_another_size_is_refused_whether_or_not_the_records_agree(harness):
    for number in (None, 16):
        with pytest.raises(ContractViolation):
            harness(manager=Seam(pages=13), max_records=number)


# ---- poison and lost handles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("headroom", [DecodingKvHeadroom(0), DecodingKvHeadroom(-1), DecodingKvHeadroom(1, 1)])
def test_a_poisoned_coordinator_says_so_before_it_looks_at_the_headroom(h, headroom):
    h.refuses(h.coordinator.begin_request, batch_admission(h), headroom, h.stream)
    h.poison(0)
    result = h.coordinator.begin_request(batch_admission(h), headroom, h.stream)
    assert result.status is h.POISONED
    assert result.admission is None
    h.end_everything()


@pytest.mark.parametrize("look", ["inspect", "inspect another", "sequence", "metrics"])
def test_looking_reaps_lost_handles(h, caplog, look):
    handle = settled(h)
    with caplog.at_level(logging.CRITICAL):
        (name,) = lose(h, 1)
    assert h.coordinator.request_ids == (handle.id, name)
    if look == "inspect":
        assert h.coordinator.inspect(name).state == "released"
    elif look == "inspect another":
        assert h.coordinator.inspect(handle.id).state == "settled"
    elif look == "sequence":
        assert h.coordinator.sequence(handle, 0).state == "seated"
    else:
        assert h.coordinator.metrics().active_requests == 1
    assert h.coordinator.request_ids == (handle.id,)
    assert h.row(1) == h.empty_row
    h.check()
    h.end_everything()


# ---- the recorder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", range(6))
def test_a_recorder_that_raises_is_switched_off_for_all_machines_at_once(h, caplog, patience):
    """A trace has no holes: after the step it did not take, no machine tells it another one."""
    told = []

    def record(step):
        told.append(step)
        if len(told) > patience:
            raise RuntimeError("full")

    h.recorder.record = record
    with caplog.at_level(logging.ERROR):
        handle = settled(h)
        h.decode(handle, 902)
        h.refuses(h.coordinator.prepare_prefill, handle)
        h.compact(handle, [0])
        assert h.finish(handle) is h.OK
    assert len(told) == patience + 1
    assert len([entry for entry in caplog.records if "switched off" in entry.getMessage()]) == 1
    h.end_everything()


def test_a_recorder_hears_of_more_than_one_machine(h):
    """What the test above relies on."""
    settled(h)
    assert {"request", "execution", "view"} <= {step.machine for step in h.recorder.steps[:6]}
