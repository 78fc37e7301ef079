"""Scenarios 105 to 109b: recurrent state and a paged draft together. Text-only, a batch of one.

Set-up: pools (8,8,4,4), headroom (4,4), rows of 4 pages. The endpoint of a prompt is published by its own call, at a
boundary that the runtime chooses, with the hidden row of that boundary.
"""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import CommitPolicy, HashChain, LookupPolicy

EMPTY = [-1] * 4


@pytest.fixture
def m(flavour):
    return flavour("hybrid-mtp")


def prefilling(h, tokens, resident=0, **options):
    handle = h.begin(tokens, resident, **options)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def produce(h, tokens, length, resident=0):
    """A request that published its endpoint and is gone."""
    handle = prefilling(h, tokens, resident)
    assert h.publish_mtp(handle, length) is h.OK
    assert h.finalize(handle) is h.OK
    assert h.finish(handle) is h.OK


def is_capture(log):
    """Recurrent state, then the partial page of both models, then the hidden row, then one drain."""
    middle = log[1:-2]
    return log[0] == "copy_rows" and set(middle) == {"capture_pages"} and log[-2:] == ["copy_row", "drain"]


# ---- 105 -------------------------------------------------------------------------------------------------------------


def test_an_endpoint_is_published_while_prefilling(m, T):
    """Scenario 105, the producer."""
    handle = m.begin(T(5))
    assert m.pages(handle) == m.draft_pages(handle) == [0, 1, 2]
    m.mark()
    assert m.coordinator.prepare_prefill(handle) is m.OK
    assert m.log == ["upload_rows", "upload_rows", "zero_rows", "reset_lengths", "reset_lengths"]
    m.synchronize()
    m.mark()
    assert m.publish_mtp(handle, 5) is m.OK
    assert is_capture(m.log), m.log
    assert handle.state == "prefilling"
    assert m.coordinator.execution_holder == handle.id
    assert m.record(1) == {"blocks": 1, "base": [0], "draft": [0], "recurrent": 0, "partial": 0, "length": 5}
    assert m.metrics()["hybrid_capture_synchronizations"] == 1
    assert m.seq(handle).published_exact_length == 5
    assert m.seq(handle).published_full_block_count == 1
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {}
    assert m.captured(handle) == "none"
    m.capture(handle)
    assert is_capture(m.log), "captures of a plain policy are no business of an MTP request"
    assert m.finalize(handle) is m.OK
    assert handle.state == "settled"
    assert m.metrics()["publication_attempts"] == 1
    m.check()
    m.end_everything()


def test_a_consumer_restores_state_both_partial_pages_and_the_hidden_row(m, T):
    """Scenario 105, the consumer."""
    base, draft = m.cache_manager.kv_pools[0], m.draft_cache.kv_pools[0]
    state = [*m.cache_manager.recurrent_states, *m.cache_manager.conv_states]
    producer = prefilling(m, T(5))
    base[:, 1, 0], base[:, 1, 1:] = 7, 9
    draft[:, 1, 0], draft[:, 1, 1:] = 17, 19
    for tensor in state:
        tensor[0] = 3
    assert m.publish_mtp(producer, 5, m.hidden(), row=2) is m.OK
    assert m.finalize(producer) is m.OK
    assert m.finish(producer) is m.OK

    handle = m.begin(T(6), 1)
    assert m.starts == [5]
    assert m.hit_slots(handle) == (0, 0)
    for pool in (base, draft):
        pool[:, 3] = 55
    for tensor in state:
        tensor[...] = 44
    m.mark()
    assert m.coordinator.prepare_prefill(handle) is m.OK
    log = m.log
    assert log[:3] == ["upload_rows", "upload_rows", "copy_rows"]
    assert set(log[3:-2]) == {"restore_pages"}
    assert log[-2:] == ["reset_lengths", "reset_lengths"]
    assert m.row(1) == m.draft_row(1) == [0, 3, 4, -1]
    assert m.device_row(1) == m.device_draft_row(1) == [0, 3, 4, -1]
    assert m.device_lengths(1) == m.device_draft_lengths(1) == [5]
    assert (np.asarray(base[:, 3, 0]) == 7).all()
    assert (np.asarray(draft[:, 3, 0]) == 17).all()
    for pool in (base, draft):
        assert (np.asarray(pool[:, 3, 1:]) == 55).all(), "beyond the first token"
    for tensor in state:
        assert (np.asarray(tensor[1]) == 3).all()
        assert (np.asarray(tensor[0]) == 44).all()

    front = m.backend.array((4, 8), "float16")
    m.mark()
    assert m.restore_mtp(handle, front, row=1) is m.OK
    assert m.log == ["copy_row"]
    assert handle.state == "prefilling"
    m.synchronize()
    assert (np.asarray(front[1]) == 3).all(), "row 2 of the producer's tensor was filled with 3"
    assert (np.asarray(front)[[0, 2, 3]] == 0).all()
    assert m.metrics()["hybrid_restores"] == 1
    m.check()


def test_the_hidden_row_can_be_restored_until_the_request_publishes_or_finalises(m, T):
    """Scenario 105, last sentence: the hit's snapshot is given up by either."""
    produce(m, T(5), 5)
    handle = prefilling(m, T(6))
    assert m.restore_mtp(handle) is m.OK
    assert m.restore_mtp(handle, row=3) is m.OK, "as often as wanted"
    assert m.publish_mtp(handle, 6) is m.OK
    assert m.hit_slots(handle) == (None, None)
    m.refuses(m.restore_mtp, handle)
    assert m.finalize(handle) is m.OK
    m.refuses(m.restore_mtp, handle)
    m.finish(handle)
    other = prefilling(m, [*T(5), 9])
    assert m.starts == [5]
    assert m.finalize(other) is m.OK
    m.refuses(m.restore_mtp, other)


def test_a_cold_request_has_no_hidden_row_to_restore(m, T):
    """Scenario 105, 40.12: the lease must hold a hit's snapshot."""
    m.refuses(m.restore_mtp, prefilling(m, T(5)))


def test_boundaries_and_rows_are_checked(m, T):
    """40.11, 40.12 (scenario 105, the refused half): nothing is enqueued, nothing changed."""
    produce(m, T(5), 5)
    handle = prefilling(m, T(6))
    hidden = m.hidden()
    m.refuses(m.publish_mtp, handle, 7)
    m.refuses(m.publish_mtp, handle, 6, hidden, -1)
    m.refuses(m.publish_mtp, handle, 6, hidden, 4)
    m.refuses(m.restore_mtp, handle, hidden, -1)
    m.refuses(m.restore_mtp, handle, hidden, 4)
    for wrong in (m.backend.array((4, 7), "float16"), m.backend.array((4, 8), "float32")):
        m.refuses(m.publish_mtp, handle, 6, wrong)
        m.refuses(m.restore_mtp, handle, wrong)
    m.refuses(m.coordinator.publish_hybrid_mtp_endpoint, handle, 1, 6, hidden, 0)
    m.refuses(m.coordinator.restore_hybrid_mtp_boundary_hidden, handle, 1, hidden, 0)
    assert m.publish_mtp(handle, 6) is m.OK


def test_endpoints_are_published_only_while_prefilling(m, T):
    """40.11 [D] (scenario 105, the refused half)."""
    handle = m.begin(T(5))
    m.refuses(m.publish_mtp, handle, 5)
    m.refuses(m.restore_mtp, handle)
    assert m.coordinator.prepare_prefill(handle) is m.OK
    m.synchronize()
    assert m.finalize(handle) is m.OK
    m.refuses(m.publish_mtp, handle, 5)
    assert m.prepare_decode(handle).status is m.OK
    m.refuses(m.publish_mtp, handle, 5)


def test_a_hidden_tensor_may_be_indexed_by_slot_and_row(m, T):
    """30.4 (scenario 105): three dimensions are ``[slot, row, :]``."""
    source = m.backend.array((1, 4, 8), "float16")
    source[0] = np.arange(1, 5, dtype=np.float16)[:, None]
    producer = prefilling(m, T(5))
    assert m.publish_mtp(producer, 5, source, 3) is m.OK
    m.drop(producer)
    handle = prefilling(m, T(6))
    front = m.backend.array((1, 2, 8), "float16")
    assert m.restore_mtp(handle, front, 1) is m.OK
    m.synchronize()
    assert (np.asarray(front[0, 1]) == 4).all()
    assert (np.asarray(front[0, 0]) == 0).all()


# ---- 106 to 108: boundaries and keys ---------------------------------------------------------------------------------


def test_an_aligned_boundary_keeps_its_last_page_private(m, T):
    """Scenario 106."""
    producer = prefilling(m, T(9))
    assert m.pages(producer) == [0, 1, 2, 3]
    pools = [pool for pool in (*m.cache_manager.kv_pools, *m.draft_cache.kv_pools) if pool is not None]
    for pool in pools:
        pool[:, 1] = 7
    assert m.publish_mtp(producer, 8) is m.OK
    assert m.record(1) == {"blocks": 1, "base": [0], "draft": [0], "recurrent": 0, "partial": 0, "length": 8}
    assert m.finalize(producer) is m.OK
    assert m.finish(producer) is m.OK
    handle = m.begin(T(9))
    assert m.starts == [8]
    for pool in pools:
        pool[:, 4] = 55
    assert m.coordinator.prepare_prefill(handle) is m.OK
    assert m.row(0) == m.draft_row(0) == [0, 4, 5, 6]
    m.synchronize()
    for pool in pools:
        assert (np.asarray(pool[:, 4]) == 7).all(), "all four tokens of the boundary page"
    m.check()
    m.end_everything()


def test_a_prompt_of_at_most_one_page_shares_no_page(m, T):
    """Scenario 107."""
    producer = prefilling(m, T(4))
    assert m.pages(producer) == [0, 1]
    assert m.publish_mtp(producer, 4) is m.OK
    assert m.record(1) == {"blocks": 0, "base": [], "draft": [], "recurrent": 0, "partial": 0, "length": 4}
    assert m.finalize(producer) is m.OK
    assert m.finish(producer) is m.OK
    assert sorted(m.free()) == list(range(8)), "the record owns snapshots only"
    handle = m.begin(T(5))
    assert m.starts == [4]
    assert m.pages(handle) == m.draft_pages(handle) == [2, 3, 4]
    m.check()
    m.end_everything()


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("first", ["plain", "mtp"])
def test_plain_and_mtp_checkpoints_of_one_prefix_do_not_shadow_each_other(flavour, T, length, first):
    """Scenario 108, in both orders."""
    m = flavour("hybrid-mtp", pools=(16, 16, 4, 4))

    def plain():
        handle = m.begin(T(length), speculative=False)
        m.run_prefill(handle)
        m.finish(handle)

    def mtp():
        produce(m, T(9), length)

    for make in (plain, mtp) if first == "plain" else (mtp, plain):
        make()
    assert len(m.record_ids()) == 2
    assert m.metrics()["existing_publications"] == 0
    assert m.metrics()["committed_publications"] == 2
    assert [m.record(i)["length"] for i in (1, 2)] == [length, length]
    handle = m.begin([*T(length), 99])
    assert m.starts == [length]
    assert len(m.draft_pages(handle)) == len(m.pages(handle))
    m.drop(handle)
    m.begin([*T(length), 99], speculative=False)
    assert m.starts == [length]
    m.check()
    m.end_everything()


def test_a_plain_request_may_use_an_mtp_checkpoint_whose_shape_fits(m, T):
    """20.7 [D] (scenario 108): unaligned fits (one page, one partial slot), aligned does not."""
    produce(m, T(9), 5)
    m.begin([*T(5), 99], 0, speculative=False)
    fallback = m.starts
    assert fallback in ([5], [0]), "the fallback is allowed, not required"
    produce(m, [61, 62, 63, 64, 65], 4, 1)
    m.begin([61, 62, 63, 64, 66], 1, speculative=False)
    assert m.starts == [0]


def test_an_mtp_request_never_uses_a_plain_checkpoint(m, T):
    """Scenario 108, the forbidden half: it has neither draft pages nor a hidden row."""
    handle = m.begin(T(5), speculative=False)
    m.run_prefill(handle)
    m.finish(handle)
    m.begin(T(6))
    assert m.starts == [0]


# ---- 109: nothing to do ----------------------------------------------------------------------------------------------


def test_what_is_published_already_or_nothing_is_skipped(m, T):
    """Scenario 109: OK, no device action, no drain."""
    handle = prefilling(m, T(5))
    m.mark()
    assert m.publish_mtp(handle, 0) is m.OK
    assert m.publish_mtp(handle, -1) is m.OK
    assert m.log == []
    assert m.publish_mtp(handle, 4) is m.OK
    m.mark()
    before = m.dump()
    for length in (4, 3, 0):
        assert m.publish_mtp(handle, length) is m.OK
    assert m.log == []
    assert m.dump() == before
    assert m.publish_mtp(handle, 5) is m.OK, "a longer boundary of the same prefill"
    assert [m.record(i)["length"] for i in m.record_ids()] == [4, 5]


def test_a_bypass_sequence_publishes_no_endpoint(m, T):
    """Scenario 109."""
    handle = prefilling(m, T(5), lookup=LookupPolicy.BYPASS)
    m.mark()
    assert m.publish_mtp(handle, 5) is m.OK
    assert m.log == []
    assert m.records() == {}
    assert handle.state == "prefilling"


def test_an_endpoint_without_a_free_slot_is_skipped(flavour, T):
    """Scenario 101 for MTP: every slot is pinned by hits of others."""
    h = flavour("hybrid-mtp", pools=(8, 8, 1, 1), max_batch=2)
    produce(h, T(5), 5)
    reader = h.begin(T(6), 0)
    assert h.starts == [5]
    writer = prefilling(h, [61, 62], 1)
    h.mark()
    assert h.publish_mtp(writer, 2) is h.OK
    assert h.log == []
    assert h.metrics()["hybrid_snapshot_pressure_skips"] == 1
    assert h.seq(writer).published_exact_length == 0
    h.drop(reader)
    assert h.publish_mtp(writer, 2) is h.OK
    assert [h.record(i)["length"] for i in h.record_ids()] == [2]
    h.end_everything()


def test_an_mtp_request_never_takes_a_plain_checkpoint_at_its_end(m, T):
    """40.18 [D] (90 M9): a completed slot reserves nothing, whatever the commit policy."""
    handle = m.begin(T(5), commit=CommitPolicy.INCLUDING_GENERATED_TOKENS)
    m.run_prefill(handle)
    m.mark()
    m.decode(handle, [41, 42], completed=[0])
    assert m.log == []
    assert handle.state == "settled"
    assert m.records() == {}
    assert m.committed(handle) == 7
    m.check()
    m.end_everything()


def test_decoding_takes_several_tokens_and_holds(m, T):
    """40.18: k tokens, or HOLD; no common lengths are reported."""
    handle = m.begin(T(5))
    m.run_prefill(handle)
    m.decode(handle, [41, 42, 43])
    assert m.committed(handle) == 8
    m.decode(handle, None)
    assert m.committed(handle) == 8
    assert m.prepare_decode(handle).status is m.OK
    m.refuses(lambda: m.complete(handle, [44], common=[9]))
    assert m.complete(handle, [44]) is m.OK


# ---- 109b: failures --------------------------------------------------------------------------------------------------


def test_a_digest_that_raises_leaves_everything_as_it_was(m, T, monkeypatch):
    """Scenario 109b: no slot stays reserved, still prefilling, and it may be called again."""
    handle = prefilling(m, T(5))
    with monkeypatch.context() as patch:

        def broken(self, *arguments, **options):
            raise RuntimeError("digest")

        patch.setattr(HashChain, "exact_digest", broken)
        m.refuses(m.publish_mtp, handle, 5, error=RuntimeError)
    assert handle.state == "prefilling"
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {}
    assert m.publish_mtp(handle, 5) is m.OK
    m.end_everything()


def failed_copy(m, T, action=2):
    handle = prefilling(m, T(5))
    m.fail(action)
    with pytest.raises(DeviceError):
        m.publish_mtp(handle, 5)
    m.heal()
    assert handle.state == "broken"
    assert m.captured(handle) == "reserved"
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {0: 1}
    assert m.coordinator.execution_holder is None
    m.check()
    return handle


@pytest.mark.parametrize("action", [1, 2, 3])
def test_a_copy_that_raises_keeps_the_slots_until_a_drain(m, T, action):
    """Scenario 109b."""
    handle = failed_copy(m, T, action)
    seen = []
    m.sync.before = lambda: seen.append((m.held()[m.RECURRENT], m.held()[m.PARTIAL]))
    m.drop(handle)
    assert seen == [({0: 1}, {0: 1})]
    assert m.records() == {}
    assert sorted(m.free(m.RECURRENT)) == sorted(m.free(m.PARTIAL)) == [0, 1, 2, 3]
    m.end_everything()


def test_a_copy_that_raises_and_a_drain_that_fails_withhold_the_slots(m, T):
    """Scenario 109b."""
    handle = failed_copy(m, T)
    m.sync.fail = True
    m.drop(handle)
    assert handle.state == "quarantined"
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {0: 1}
    m.end_everything()


def test_a_drain_that_fails_withholds_the_endpoint(m, T):
    """Scenario 109b, 40.11: quarantined, POISONED, nothing published."""
    handle = prefilling(m, T(5))
    m.sync.fail = True
    m.mark()
    assert m.publish_mtp(handle, 5) is m.POISONED
    assert m.log[-1] == "drain"
    assert handle.state == "quarantined"
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {0: 1}
    assert m.records() == {}
    m.end_everything()


def test_an_endpoint_that_could_not_be_published_is_not_kept(m, T, publishing):
    """Scenario 109b: the drain was good, so the slots are free; still prefilling."""
    handle = prefilling(m, T(5))
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        m.publish_mtp(handle, 5)
    assert handle.state == "prefilling"
    assert m.held()[m.RECURRENT] == m.held()[m.PARTIAL] == {}
    assert m.captured(handle) == "none"
    assert m.publish_mtp(handle, 5) is m.OK
    assert m.finalize(handle) is m.OK
    m.check()
    m.end_everything()


def test_a_hidden_row_that_could_not_be_copied_may_be_asked_for_again(m, T):
    """40.12, 50.1 (scenario 109b): the state is unchanged."""
    produce(m, T(5), 5)
    handle = prefilling(m, T(6))
    front = m.backend.array((4, 8), "float16")
    m.fail(1)
    with pytest.raises(DeviceError):
        m.restore_mtp(handle, front)
    m.heal()
    assert handle.state == "prefilling"
    assert m.coordinator.execution_holder == handle.id
    assert m.restore_mtp(handle, front) is m.OK
    m.synchronize()
    assert (np.asarray(front[0]) == 1).all()
