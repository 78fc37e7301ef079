"""Scenarios 100 to 104 and 109b: checkpoints of recurrent state, with attention layers beside them and without.

Set-up: pools (8,0,4,4), headroom (1,0), at most 2 sequences, rows of 4 pages. Verbs of a batch: ``zero_rows`` for what
starts cold, ``copy_rows`` for recurrent state to or from a slot, ``capture_pages`` and ``restore_pages`` for the partly
filled page.
"""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import (
    BlockKeyExtras,
    CommitPolicy,
    ContextCacheManager,
    ContextCacheSequenceAdvance,
    ContractViolation,
    Digest,
    HashChain,
    LookupPolicy,
)
from context_cache.coordinator.manager import AcquireResult, AcquireStatus

EMPTY = [-1] * 4
IMAGE = Digest(b"image-one" + bytes(23))
OTHER_IMAGE = Digest(b"image-two" + bytes(23))


@pytest.fixture
def y(flavour):
    return flavour("hybrid")


def settled(h, tokens, resident=0, **options):
    handle = h.begin(tokens, resident, **options)
    h.run_prefill(handle)
    return handle


def tensors(h):
    return [*h.cache_manager.recurrent_states, *h.cache_manager.conv_states]


# ---- 100: the checkpoint of a prompt ---------------------------------------------------------------------------------


def test_a_prompt_is_checkpointed_at_its_exact_length(y, T):
    """Scenario 100, the producer."""
    handle = y.begin(T(5))
    assert y.pages(handle) == [0, 1]
    assert y.hit_slots(handle) == (None, None)
    y.mark()
    assert y.coordinator.prepare_prefill(handle) is y.OK
    assert y.log == ["upload_rows", "zero_rows", "reset_lengths"]
    y.mark()
    y.capture(handle)
    assert y.log == ["copy_rows", "capture_pages"]
    assert y.captured(handle) == "captured"
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {0: 1}
    assert y.records() == {}
    y.synchronize()
    y.mark()
    assert y.finalize(handle) is y.OK
    assert y.log == [], "finalisation has no device action"
    assert y.record(1) == {"blocks": 1, "base": [0], "draft": None, "recurrent": 0, "partial": 0, "length": 5}
    assert y.captured(handle) == "none"
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {}
    assert y.seq(handle).published_exact_length == 5
    assert y.seq(handle).published_full_block_count == 1
    y.check()
    y.end_everything()


def test_a_longer_prompt_starts_at_the_checkpoint(y, T):
    """Scenario 100, the consumer: state and one token of the partial page are restored, the rest is not touched."""
    pool, state = y.cache_manager.kv_pools[0], tensors(y)
    producer = y.begin(T(5))
    assert y.coordinator.prepare_prefill(producer) is y.OK
    y.synchronize()
    pool[:, 1, 0], pool[:, 1, 1:] = 7, 9
    for tensor in state:
        tensor[0] = 3
    y.capture(producer)
    y.synchronize()
    assert y.finalize(producer) is y.OK
    assert y.finish(producer) is y.OK

    handle = y.begin(T(6), 1)
    assert y.starts == [5]
    assert y.pages(handle) == [0, 2]
    assert y.hit_slots(handle) == (0, 0)
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {0: 1}
    assert y.metrics()["hybrid_restores"] == 0
    pool[:, 2] = 55
    for tensor in state:
        tensor[...] = 44
    y.mark()
    assert y.coordinator.prepare_prefill(handle) is y.OK
    assert y.log == ["upload_rows", "copy_rows", "restore_pages", "reset_lengths"]
    assert y.metrics()["hybrid_restores"] == 1
    y.synchronize()
    assert y.device_lengths(1) == [5]
    assert (np.asarray(pool[:, 2, 0]) == 7).all()
    assert (np.asarray(pool[:, 2, 1:]) == 55).all(), "bytes beyond the first token"
    for tensor in state:
        assert (np.asarray(tensor[1]) == 3).all()
        assert (np.asarray(tensor[0]) == 44).all(), "the row of another resident"

    y.capture(handle)
    y.synchronize()
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {0: 1, 1: 1}
    assert y.finalize(handle) is y.OK
    assert y.record(2) == {"blocks": 1, "base": [0], "draft": None, "recurrent": 1, "partial": 1, "length": 6}
    assert y.hit_slots(handle) == (None, None), "hit pins are released at the finalisation"
    assert y.held()[y.RECURRENT] == y.held()[y.PARTIAL] == {}
    y.check()
    y.end_everything()


def test_the_partial_page_is_restored_up_to_its_last_token(y, T):
    """Scenario 100 for three tokens of the page: not one less, not one more."""
    pool = y.cache_manager.kv_pools[0]
    producer = y.begin(T(7))
    assert y.coordinator.prepare_prefill(producer) is y.OK
    y.synchronize()
    pool[:, 1] = np.arange(1, 5, dtype=np.float16)[None, :, None, None]
    y.capture(producer)
    y.synchronize()
    assert y.finalize(producer) is y.OK
    assert y.finish(producer) is y.OK
    handle = y.begin(T(8), 1)
    assert y.starts == [7]
    page = y.pages(handle)[1]
    pool[:, page] = 55
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.synchronize()
    for half in (0, 1):
        assert np.asarray(pool[half, page, :, 0, 0]).tolist() == [1, 2, 3, 55]


def test_a_checkpoint_of_the_same_length_is_no_hit(y, T):
    """Scenario 20 through the coordinator: strictly shorter."""
    y.finish(settled(y, T(6)))
    y.begin(T(6), 0)
    assert y.starts == [0]
    y.begin(T(7), 1)
    assert y.starts == [6]


def test_a_second_producer_of_a_checkpoint_gives_its_slots_back(y, T):
    """Scenario 100, 50.4: the key exists, so the reservation is retired and free again."""
    y.finish(settled(y, T(5)))
    handle = settled(y, T(5))
    assert y.metrics()["existing_publications"] == 1
    assert y.record_ids() == [1]
    assert y.free(y.RECURRENT) == y.free(y.PARTIAL) == [2, 3, 1]
    assert y.seq(handle).published_exact_length == 5


def test_a_bypass_sequence_captures_nothing(y, T):
    """Scenario 100, 40.9: skipped silently."""
    handle = y.begin(T(5), lookup=LookupPolicy.BYPASS)
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.mark()
    y.capture(handle)
    assert y.log == []
    assert y.captured(handle) == "none"
    y.synchronize()
    assert y.finalize(handle) is y.OK
    assert y.records() == {}
    assert y.metrics()["hybrid_snapshot_pressure_skips"] == 0


def test_without_captures_nothing_is_published(y, T):
    """Scenario 100, the forbidden half: checkpoint deployments publish no base endpoint."""
    handle = y.begin(T(5))
    y.run_prefill(handle, captures=False)
    assert y.records() == {}
    assert y.metrics()["publication_attempts"] == 0
    y.end_everything()


def test_captures_are_asked_for_once_and_only_while_prefilling(y, T):
    """Scenario 100, 40.9: nothing may be staged already."""
    handle = y.begin(T(5))
    y.refuses(y.coordinator.enqueue_prefill_captures, handle)
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.capture(handle)
    y.refuses(y.coordinator.enqueue_prefill_captures, handle)
    y.synchronize()
    assert y.finalize(handle) is y.OK
    y.refuses(y.coordinator.enqueue_prefill_captures, handle)
    assert y.record_ids() == [1]


def test_a_batch_restores_and_zeroes_each_row_on_its_own(y, T):
    """Scenarios 100 and 104: one sequence is warm, the other cold; one verb a kind for the whole batch."""
    producer = y.begin(T(5))
    assert y.coordinator.prepare_prefill(producer) is y.OK
    y.synchronize()
    for tensor in tensors(y):
        tensor[0] = 3
    y.capture(producer)
    y.synchronize()
    assert y.finalize(producer) is y.OK
    y.finish(producer)
    for tensor in tensors(y):
        tensor[...] = 44
    handle = y.begin_batch([[51, 52, 53], T(6)], [1, 0])
    assert y.starts == [0, 5]
    y.mark()
    assert y.coordinator.prepare_prefill(handle) is y.OK
    assert sorted(y.log) == sorted(["upload_rows", "zero_rows", "copy_rows", "restore_pages", "reset_lengths"])
    assert y.log[0] == "upload_rows"
    assert y.log[-1] == "reset_lengths"
    assert y.device_lengths(2) == [0, 5]
    for tensor in tensors(y):
        assert (np.asarray(tensor[1]) == 0).all()
        assert (np.asarray(tensor[0]) == 3).all()
    y.mark()
    y.capture(handle)
    assert y.log == ["copy_rows", "capture_pages"]
    y.synchronize()
    assert y.finalize(handle) is y.OK
    assert [y.record(i)["length"] for i in y.record_ids()] == [5, 3, 6]
    y.check()
    y.end_everything()


# ---- 101: not enough slots -------------------------------------------------------------------------------------------


def test_a_refused_reservation_costs_the_checkpoint_and_nothing_else(flavour, T):
    """Scenario 101."""
    h = flavour("hybrid", pools=(8, 0, 1, 1))
    h.finish(settled(h, T(5)))
    handle = h.begin(T(6))
    assert h.starts == [5]
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.mark()
    h.capture(handle)
    assert h.log == []
    assert h.captured(handle) == "none"
    h.synchronize()
    assert h.finalize(handle) is h.OK
    assert h.metrics()["hybrid_snapshot_pressure_skips"] == 1
    assert h.metrics()["publication_attempts"] == 1
    assert h.record_ids() == [1]
    h.decode(handle, 902)
    assert h.committed(handle) == 7
    h.check()
    h.end_everything()


def test_a_reservation_may_evict_an_older_checkpoint(flavour, T):
    """Scenario 101, the other half: a slot that nobody pins is taken from the oldest record."""
    h = flavour("hybrid", pools=(8, 0, 1, 1))
    h.finish(settled(h, T(5)))
    settled(h, [51, 52, 53])
    assert h.record_ids() == [2]
    assert h.metrics()["hybrid_snapshot_pressure_skips"] == 0
    assert h.metrics()["evicted_records"] == 1
    h.end_everything()


def test_slots_come_from_byte_budgets(flavour):
    """00.5: budget // bytes per slot; too few slots, or a negative budget, fail at construction."""
    h = flavour("hybrid")
    recurrent, partial = h.profile.recurrent_slot_bytes, h.profile.partial_slot_bytes
    # One layer: state 1*2*2 float32 and convolution 2*2 float16; a page of 4 tokens, K and V, 4 numbers of float16.
    assert (recurrent, partial) == (1 * 2 * 2 * 4 + 2 * 2 * 2, 2 * 4 * 1 * 4 * 2)
    for budget in ((recurrent - 1, partial), (recurrent, partial - 1), (0, 0), (-1, partial)):
        with pytest.raises(ContractViolation):
            flavour("hybrid", enabled_bytes=budget)
    spare = flavour("hybrid", enabled_bytes=(3 * recurrent - 1, 2 * partial + 1), pools=(8, 0, 2, 2))
    assert spare.manager.pools.capacity(spare.RECURRENT) == 2
    assert spare.manager.pools.capacity(spare.PARTIAL) == 2
    with pytest.raises(ContractViolation):
        flavour("recurrent", enabled_bytes=(recurrent - 1, 0))


def test_a_budget_below_one_slot_a_sequence_is_warned_about(flavour, caplog):
    """90 P9: captures would be skipped silently, so construction says so."""
    with caplog.at_level("WARNING"):
        flavour("hybrid", pools=(8, 0, 4, 4))
        assert [r for r in caplog.records if r.levelname == "WARNING"] == []
        flavour("hybrid", pools=(8, 0, 2, 4))
    assert any("slot" in r.getMessage() for r in caplog.records)


# ---- 102: the checkpoint of a finished sequence ----------------------------------------------------------------------


def test_a_completed_sequence_is_checkpointed_at_its_committed_length(y, T):
    """Scenario 102."""
    handle = settled(y, T(5))
    assert y.prepare_decode(handle).status is y.OK
    y.synchronize()
    y.mark()
    assert y.complete(handle, 902, completed=[0]) is y.OK
    assert y.log == ["copy_rows", "capture_pages", "drain"]
    assert y.metrics()["hybrid_capture_synchronizations"] == 1
    assert handle.state == "settled"
    assert y.coordinator.execution_holder is None
    assert y.record(2) == {"blocks": 1, "base": [0], "draft": None, "recurrent": 1, "partial": 1, "length": 6}
    assert y.captured(handle) == "none"
    assert y.finish(handle) is y.OK
    follow = y.begin([*T(5), 901, 42])
    assert y.starts == [6]
    assert y.pages(follow) == [0, 2]
    y.check()
    y.end_everything()


def test_a_step_without_a_completed_slot_captures_nothing(y, T):
    """Scenario 102, the forbidden half."""
    handle = settled(y, T(5))
    y.mark()
    y.decode(handle, 902)
    assert y.log == []
    assert y.metrics()["hybrid_capture_synchronizations"] == 0
    assert y.record_ids() == [1]


def test_prefill_state_only_takes_no_checkpoint_at_the_end(y, T):
    """Scenario 102, 40.9: and without a reservation there is no drain either."""
    handle = settled(y, T(5), commit=CommitPolicy.PREFILL_STATE_ONLY)
    y.mark()
    y.decode(handle, 902, completed=[0])
    assert y.log == []
    assert y.record_ids() == [1]


def test_pages_and_slots_are_held_until_the_drain_of_the_capture(y, T):
    """Scenario 102: inside the synchroniser the reservation is active and nothing is published."""
    handle = settled(y, T(5))
    seen = []
    y.sync.before = lambda: seen.append((y.all_active(y.RECURRENT), y.all_active(), y.record_ids()))
    y.decode(handle, 902, completed=[0])
    assert seen == [({1: 1}, {0: 1, 1: 1}, [1])]


def test_a_sequence_that_holds_may_still_be_completed(y, T):
    """Scenario 102 with HOLD: its committed length is the published one, so nothing is captured."""
    handle = y.begin_batch([T(5), [51, 52, 53]])
    y.run_prefill(handle)
    y.mark()
    y.decode(handle, None, 902, completed=[0, 1])
    assert y.log == ["copy_rows", "drain"] or y.log == ["copy_rows", "capture_pages", "drain"]
    assert [y.record(i)["length"] for i in y.record_ids()] == [5, 3, 4]
    assert y.record(y.record_ids()[-1])["partial"] is None, "4 is a page multiple"


# ---- 103: aligned lengths --------------------------------------------------------------------------------------------


def test_an_aligned_checkpoint_needs_no_partial_slot(y, T):
    """Scenario 103."""
    handle = y.begin(T(8))
    assert y.pages(handle) == [0, 1, 2]
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.mark()
    y.capture(handle)
    assert y.log == ["copy_rows"]
    assert y.all_active(y.PARTIAL) == {}
    y.synchronize()
    assert y.finalize(handle) is y.OK
    assert y.record(1) == {"blocks": 2, "base": [0, 1], "draft": None, "recurrent": 0, "partial": None, "length": 8}
    y.finish(handle)
    again = y.begin(T(8))
    assert y.starts == [0]
    y.drop(again)
    longer = y.begin(T(9))
    assert y.starts == [8]
    assert y.pages(longer)[:2] == [0, 1]
    y.mark()
    assert y.coordinator.prepare_prefill(longer) is y.OK
    assert y.log == ["upload_rows", "copy_rows", "reset_lengths"]
    y.check()


# ---- 104: rows -------------------------------------------------------------------------------------------------------


def test_only_the_row_of_a_cold_sequence_is_zeroed(y, T):
    """Scenario 104."""
    for tensor in tensors(y):
        tensor[...] = 44
    handle = y.begin(T(3), 1)
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.synchronize()
    for tensor in tensors(y):
        assert (np.asarray(tensor[1]) == 0).all()
        assert (np.asarray(tensor[0]) == 44).all()


def test_a_compaction_clears_the_state_of_the_retired_row_and_of_no_other(y, T):
    """Scenario 104, 30.5: survivors stay on their resident rows."""
    handle = y.begin_batch([T(5), [51, 52, 53]])
    y.run_prefill(handle)
    for tensor in tensors(y):
        tensor[...] = 44
    assert y.begin_compaction(handle, [-1, 0]) is y.OK
    start = len(y.recording.log)
    assert y.coordinator.compact_batch(handle) is y.OK
    verbs = y.recording.log[start:]
    assert verbs[:2] == ["upload_rows", "compact_lengths"]
    assert len(verbs) == 4
    assert verbs[3] == "drain"
    for tensor in tensors(y):
        assert (np.asarray(tensor[0]) == 0).all()
        assert (np.asarray(tensor[1]) == 44).all()


def test_a_live_admission_is_refused_on_a_checkpoint_deployment(flavour, T):
    """Scenario 83 for hybrid and pure recurrent deployments."""
    for name in ("hybrid", "recurrent"):
        h = flavour(name)
        assert h.coordinator.supports_live_sequence_admission() is False
        handle = settled(h, T(5))
        h.refuses(h.admit, handle, [1, 2], 1)
        h.end_everything()


def test_a_speculative_request_is_refused_without_a_speculative_deployment(flavour, T):
    """00.5 for hybrid and pure recurrent deployments (scenario 104's set-up)."""
    for name in ("hybrid", "recurrent"):
        h = flavour(name)
        h.refuses(lambda h=h: h.try_begin([h.sequence_admission(T(5), 0)], speculative=True, headroom=(4, 4)))


def test_mtp_calls_are_refused_for_plain_requests(flavour, T):
    """40.18: publishing and restoring a boundary belong to the MTP policy (scenario 105, the refused half)."""
    for name in ("hybrid", "recurrent", "eagle", "hybrid-mtp"):
        h = flavour(name)
        handle = h.begin(T(5), speculative=False)
        assert h.coordinator.prepare_prefill(handle) is h.OK
        hidden = h.backend.array((4, 8), "float16")
        h.refuses(h.publish_mtp, handle, 5, hidden)
        h.refuses(h.restore_mtp, handle, hidden)


# ---- pure recurrent --------------------------------------------------------------------------------------------------


def test_a_pure_recurrent_model_needs_no_pages(flavour, T):
    """Scenarios 48 and 100 through the coordinator."""
    h = flavour("recurrent")
    handle = h.begin(T(3))
    assert h.pages(handle) == []
    h.mark()
    assert h.coordinator.prepare_prefill(handle) is h.OK
    assert h.log == ["zero_rows", "reset_lengths"]
    h.synchronize()
    for tensor in tensors(h):
        tensor[0] = 3
    h.mark()
    h.capture(handle)
    assert h.log == ["copy_rows"]
    h.synchronize()
    assert h.finalize(handle) is h.OK
    found = h.record(1)
    assert (found["base"], found["recurrent"], found["partial"], found["length"]) == ([], 0, None, 3)
    h.decode(handle, 902, completed=[0])
    assert h.record(2)["length"] == 4
    assert h.finish(handle) is h.OK

    for tensor in tensors(h):
        tensor[...] = 44
    follow = h.begin([*T(3), 8, 9], 1)
    assert h.starts == [3]
    h.mark()
    assert h.coordinator.prepare_prefill(follow) is h.OK
    assert h.log == ["copy_rows", "reset_lengths"]
    h.synchronize()
    for tensor in tensors(h):
        assert (np.asarray(tensor[1]) == 3).all()
        assert (np.asarray(tensor[0]) == 44).all()
    h.drop(follow)
    h.begin([*T(3), 901, 9], 1)
    assert h.starts == [4], "the checkpoint taken at the end of generation"
    h.check()
    h.end_everything()


def test_a_pure_recurrent_sequence_may_be_as_long_as_the_deployment_allows(flavour, T):
    """40.4 and scenario 61 without a row: no page is asked for, growth is never refused for pages."""
    h = flavour("recurrent")
    handle = settled(h, T(12))
    h.decode(handle, 902, headroom=(4, 0))
    assert h.pages(handle) == []
    h.mark()
    assert h.prepare_decode(handle).status is h.OK
    assert h.log == []
    h.end_everything()


# ---- turns, length view ----------------------------------------------------------------------------------------------


def test_settled_checkpoint_requests_take_turns(y, T):
    """Scenario 83c for a hybrid: only lengths are installed; the state of a row is where it was."""
    a, b = settled(y, T(5), 0), settled(y, [51, 52, 53], 1)
    for tensor in tensors(y):
        tensor[0], tensor[1] = 5, 6
    y.mark()
    assert y.prepare_decode(a).status is y.OK
    assert y.log == ["reset_lengths"]
    assert y.device_lengths(1) == [5]
    assert y.complete(a, 902) is y.OK
    assert y.prepare_decode(b).status is y.OK
    assert y.device_lengths(1) == [3]
    for tensor in tensors(y):
        assert (np.asarray(tensor[0]) == 5).all()
        assert (np.asarray(tensor[1]) == 6).all()


# ---- 109b: captures that fail ----------------------------------------------------------------------------------------


def test_a_digest_that_raises_strands_no_slot(y, T, monkeypatch):
    """Scenario 109b for prefill and decode-end captures: before the first copy everything is as it was."""
    handle = y.begin(T(5))
    assert y.coordinator.prepare_prefill(handle) is y.OK
    healthy = HashChain.exact_digest

    def broken(self, *arguments, **options):
        raise RuntimeError("digest")

    monkeypatch.setattr(HashChain, "exact_digest", broken)
    y.refuses(y.coordinator.enqueue_prefill_captures, handle, error=RuntimeError)
    assert y.captured(handle) == "none"
    assert handle.state == "prefilling"
    monkeypatch.setattr(HashChain, "exact_digest", healthy)
    y.capture(handle)
    y.synchronize()
    assert y.finalize(handle) is y.OK

    assert y.prepare_decode(handle).status is y.OK
    y.synchronize()
    monkeypatch.setattr(HashChain, "exact_digest", broken)
    held = y.held()
    with pytest.raises(RuntimeError, match="digest"):
        y.complete(handle, 902, completed=[0])
    assert y.held() == held
    assert y.captured(handle) == "none"
    monkeypatch.setattr(HashChain, "exact_digest", healthy)
    y.check()
    y.end_everything()


@pytest.mark.parametrize("action", [1, 2])
def test_a_capture_at_the_end_of_generation_that_fails_leaves_the_request_broken(y, T, action):
    """Scenario 109b, last sentence: finish publishes nothing; the slots are free after its drain."""
    handle = settled(y, T(5))
    assert y.prepare_decode(handle).status is y.OK
    y.synchronize()
    y.fail(action)
    with pytest.raises(DeviceError):
        y.complete(handle, 902, completed=[0])
    y.heal()
    assert handle.state == "broken"
    assert y.captured(handle) == "reserved"
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {1: 1}
    assert y.coordinator.execution_holder is None
    y.check()
    seen = []
    y.sync.before = lambda: seen.append(y.all_active(y.RECURRENT))
    y.mark()
    assert y.finish(handle) is y.OK
    assert y.log == ["drain", "upload_rows"]
    assert seen == [{1: 1}], "kept until the drain"
    assert y.record_ids() == [1]
    assert y.free(y.RECURRENT) == [2, 3, 1]
    y.end_everything()


@pytest.mark.parametrize("action", [1, 2])
def test_a_capture_of_a_prefill_that_fails_leaves_the_request_broken(y, T, action):
    """Scenario 109b for enqueue_prefill_captures."""
    handle = y.begin(T(5))
    assert y.coordinator.prepare_prefill(handle) is y.OK
    y.fail(action)
    with pytest.raises(DeviceError):
        y.coordinator.enqueue_prefill_captures(handle)
    y.heal()
    assert handle.state == "broken"
    assert y.captured(handle) == "reserved"
    assert y.all_active(y.RECURRENT) == {0: 1}
    y.refuses(y.finalize, handle)
    y.drop(handle)
    assert y.records() == {}
    y.end_everything()


def test_a_failed_drain_of_a_capture_withholds_the_slots_too(y, T):
    """Scenario 109b for the decode end: quarantined, POISONED, the captures stay until a later drain succeeds."""
    handle = settled(y, T(5))
    assert y.prepare_decode(handle).status is y.OK
    y.synchronize()
    y.sync.fail = True
    y.mark()
    assert y.complete(handle, 902, completed=[0]) is y.POISONED
    assert y.log[-1] == "drain"
    assert handle.state == "quarantined"
    assert y.all_active(y.RECURRENT) == y.all_active(y.PARTIAL) == {1: 1}
    assert y.coordinator.shutdown() is y.POISONED
    assert y.all_active(y.RECURRENT) == {1: 1}
    y.sync.fail = False
    assert y.coordinator.shutdown() is y.OK
    assert y.record_ids() == [1]
    y.end_everything()


@pytest.mark.parametrize("when", ["prefill", "decode end"])
def test_a_checkpoint_that_could_not_be_published_stays_nowhere(y, T, publishing, when):
    """Scenario 109b, 40.18, 50.6: the slot is free, nothing stays staged, and a later capture is possible."""
    handle = y.begin(T(5))
    if when == "prefill":
        assert y.coordinator.prepare_prefill(handle) is y.OK
        y.capture(handle)
        y.synchronize()
        publishing.fail(1)
        with pytest.raises(RuntimeError, match="publish"):
            y.finalize(handle)
        assert y.records() == {}
        assert y.committed(handle) == 5, "the ledger is advanced"
    else:
        y.run_prefill(handle)
        assert y.prepare_decode(handle).status is y.OK
        y.synchronize()
        publishing.fail(1)
        with pytest.raises(RuntimeError, match="publish"):
            y.complete(handle, 902, completed=[0])
        assert y.record_ids() == [1]
        assert y.committed(handle) == 6
    assert handle.state == "settled"
    assert y.coordinator.execution_holder is None
    assert y.captured(handle) == "none"
    assert y.held()[y.RECURRENT] == y.held()[y.PARTIAL] == {}
    if when == "prefill":
        y.decode(handle, 902, completed=[0])
        assert [y.record(i)["length"] for i in y.record_ids()] == [6]
    y.check()
    y.end_everything()


# ---- 110, 111: media and checkpoints ---------------------------------------------------------------------------------


def media_prompt(last=11, digest=IMAGE, placeholder=7777):
    """11 positions, a media run at positions 2 to 9, text elsewhere."""
    return [1, 2, *[placeholder] * 8, last], [None, None, *[digest] * 8, None]


def start_of(h, tokens, media=(), **options):
    handle = h.begin(tokens, media=media, **options)
    start = h.starts[0]
    h.drop(handle)
    return start


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_a_checkpoint_inside_a_media_run_is_found_by_the_same_media_only(flavour, name):
    """Scenario 110 for checkpoints: the tail of the digest is media too, so the placeholder ids do not matter."""
    h = flavour(name)
    tokens, media = media_prompt()
    h.finish(settled(h, tokens[:7], media=media[:7]))
    assert start_of(h, tokens, media) == 7
    assert start_of(h, *media_prompt(placeholder=4242)) == 7
    assert start_of(h, *media_prompt(digest=OTHER_IMAGE)) == 0
    assert start_of(h, tokens) == 0, "the placeholder ids as text are another prompt"
    late = [*media[:5], OTHER_IMAGE, *media[6:]]
    assert start_of(h, tokens, late) == 0, "another image in the tail"


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_a_checkpoint_of_generated_tokens_after_media_is_text(flavour, name):
    """Scenario 111: decode-end publication extends the media list with "absent"."""
    h = flavour(name)
    tokens, media = [1, 2, 7, 7, 7], [None, None, IMAGE, IMAGE, IMAGE]
    handle = settled(h, tokens, media=media)
    h.decode(handle, 902, completed=[0])
    assert h.finish(handle) is h.OK
    assert start_of(h, [*tokens, 901, 5], [*media, None, None]) == 6
    assert start_of(h, [*tokens, 901, 5], [*media, IMAGE, None]) == 5
    assert start_of(h, [*tokens, 900, 5], [*media, None, None]) == 5


@pytest.mark.parametrize("name", ["eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp"])
def test_a_media_list_of_another_length_is_refused_by_every_flavour(flavour, name):
    """Scenario 111."""
    h = flavour(name)
    for length in (1, 4, 6):
        for spec in {False, h.flavour.speculative}:
            h.refuses(lambda n=length, spec=spec: h.try_begin(
                [h.sequence_admission([1, 2, 3, 4, 5], 0, media=[IMAGE] * n)], speculative=spec))  # fmt: skip


@pytest.mark.parametrize("name", ["eagle", "hybrid", "recurrent", "hybrid-mtp"])
def test_isolation_separates_every_flavour(flavour, name, T):
    """Scenario 59 for drafts and checkpoints: nothing of a tenant is found by another."""
    h = flavour(name)
    ours, theirs = (BlockKeyExtras(isolation_digest=Digest(bytes([n]) * 32)) for n in (1, 2))
    handle = h.begin(T(9), extras=ours)
    mtp = 9 if h.mtp else None
    h.play_prefill(handle, [901], mtp)
    if h.flavour.frozen:
        h.decode(handle, [41])
    assert h.finish(handle) is h.OK
    follow = [*T(9), 901, 5]
    assert start_of(h, follow, extras=ours) > 0
    assert start_of(h, follow, extras=theirs) == 0
    assert start_of(h, follow) == 0


def test_a_step_of_two_tokens_is_refused_by_a_checkpoint_policy(y, T):
    """40.18: as with the lookahead contract, one token a step (scenario 60 for a hybrid)."""
    handle = settled(y, T(5))
    assert y.prepare_decode(handle, (3, 0)).status is y.OK
    c = y.coordinator
    y.refuses(c.complete_decode_step, handle, [ContextCacheSequenceAdvance((1, 2), 7)], ())
    y.refuses(c.complete_decode_step, handle, [ContextCacheSequenceAdvance((1,), 6)], (), [6])
    assert c.complete_decode_step(handle, [ContextCacheSequenceAdvance((1,), 6)], ()) is y.OK


# ---- 112: a hit that is retried cold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp"])
def test_a_hit_that_does_not_fit_is_retried_cold_by_every_flavour(flavour, name, T, monkeypatch):
    """Scenario 112. It counts as bypass, not as a hit; no snapshot stays pinned; the sequence still publishes."""
    h = flavour(name)
    producer = h.begin(T(9))
    h.play_prefill(producer, [901], 9 if h.mtp else None)
    if h.flavour.frozen:
        h.decode(producer, [41])
    assert h.finish(producer) is h.OK
    refused = []
    inner = ContextCacheManager.acquire

    def acquire(self, plan):
        if plan.matched_token_length > 0 and not refused:
            refused.append(plan)
            return AcquireResult(status=AcquireStatus.INSUFFICIENT_CAPACITY, plan=plan, lease=None)
        return inner(self, plan)

    monkeypatch.setattr(ContextCacheManager, "acquire", acquire)
    before = h.metrics()
    handle = h.begin([*T(9), 77])
    assert len(refused) == 1
    assert h.starts == [0]
    assert h.hit_slots(handle) == (None, None)
    after = h.metrics()
    for metric, more in {
        "admitted_sequences": 1,
        "forced_cold_sequences": 1,
        "lookup_bypass_sequences": 1,
        "hit_sequences": 0,
        "matched_tokens": 0,
        "reused_tokens": 0,
        "spec_full_page_replays": 0,
    }.items():
        assert after[metric] - before[metric] == more, metric
    h.play_prefill(handle, [901], 10 if h.mtp else None)
    if h.flavour.frozen:
        h.decode(handle, [41])
    assert h.metrics()["publication_attempts"] - before["publication_attempts"] == 1
    h.check()
    h.end_everything()
