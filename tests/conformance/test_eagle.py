"""Scenarios 91b and 93 to 99: paged drafts. EAGLE looks one token ahead, the other paged drafts do not.

Set-up: pools (8,8,0,0), headroom (4,4), at most 2 sequences, rows of 4 pages.
"""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import CommitPolicy, ContextCacheSequenceAdvance, Digest, LookupPolicy

EMPTY = [-1] * 4
IMAGE = Digest(b"image-one" + bytes(23))


@pytest.fixture
def e(flavour):
    return flavour("eagle")


def frozen(h, tokens, resident=0):
    """A request whose prompt is complete and whose endpoint waits for the first verification."""
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    assert handle.state == "prefill_frozen"
    return handle


def settled(h, tokens, resident=0):
    handle = frozen(h, tokens, resident)
    h.decode(handle, [41, 42])
    assert handle.state == "settled"
    return handle


# ---- 93 to 95: when a prompt is published --------------------------------------------------------------------------


def test_a_prefill_publishes_nothing_before_the_first_verification(e, T):
    """Scenario 93."""
    handle = e.begin(T(8))
    assert e.starts == [0]
    assert e.pages(handle) == e.draft_pages(handle) == [0, 1, 2]
    e.mark()
    e.run_prefill(handle)
    assert e.log == ["upload_rows", "upload_rows", "reset_lengths", "reset_lengths"]
    assert e.records() == {}
    assert handle.state == "prefill_frozen"
    assert handle.phase.lower() == "executing"
    assert e.coordinator.execution_holder == handle.id
    assert (e.committed(handle), e.common(handle)) == (8, 8)
    assert e.seq(handle).frozen_spec_prefill_length == 8
    assert e.metrics()["publication_attempts"] == 0

    assert e.prepare_decode(handle).status is e.OK
    assert handle.state == "decoding_frozen"
    e.synchronize()
    assert e.complete(handle, [41, 42], common=[8]) is e.OK
    assert handle.state == "settled"
    assert (e.committed(handle), e.common(handle)) == (10, 8)
    assert e.record_ids() == [1]
    assert e.record(1) == {
        "blocks": 2, "base": [0, 1], "draft": [0, 1], "recurrent": None, "partial": None, "length": None
    }  # fmt: skip
    assert e.metrics()["spec_pair_publications"] == 1
    assert e.coordinator.execution_holder is None
    e.check()
    e.end_everything()


def test_rows_and_lengths_of_both_models_reach_the_device(e, T):
    """Scenario 93, 30.5: both tables, both length vectors."""
    handle = e.begin(T(8), 1)
    assert e.coordinator.prepare_prefill(handle) is e.OK
    assert e.device_row(1) == e.device_draft_row(1) == [0, 1, 2, -1]
    assert e.device_row(0) == e.device_draft_row(0) == EMPTY
    assert e.device_lengths(1) == e.device_draft_lengths(1) == [0]
    assert e.cache_manager.active_batch_size == e.draft_cache.active_batch_size == 1


def test_a_warm_request_gives_up_one_page_because_the_draft_looks_ahead(e, T):
    """Scenario 94."""
    e.finish(settled(e, T(8)))
    before = e.metrics()
    handle = e.begin([*T(8), 77])
    assert e.starts == [4]
    after = e.metrics()
    assert after["matched_tokens"] - before["matched_tokens"] == 8
    assert after["reused_tokens"] - before["reused_tokens"] == 4
    assert after["spec_full_page_replays"] - before["spec_full_page_replays"] == 1
    assert e.coordinator.prepare_prefill(handle) is e.OK
    assert e.row(0) == e.draft_row(0) == [0, 3, 4, 5]
    assert e.device_row(0) == e.device_draft_row(0) == [0, 3, 4, 5]
    assert e.device_lengths(1) == e.device_draft_lengths(1) == [4]
    e.check()


def test_a_plain_request_on_a_speculative_deployment_uses_the_base_alone(e, T):
    """Scenario 94, second half: no replay, and the draft table is untouched."""
    e.finish(settled(e, T(8)))
    e.synchronize()
    held, rows = e.all_active(e.DRAFT), [e.draft_row(slot) for slot in (0, 1)]
    e.mark()
    handle = e.begin([*T(8), 77], speculative=False)
    assert e.starts == [8]
    assert e.pages(handle)[:2] == [0, 1]
    assert e.draft_pages(handle) == []
    e.run_prefill(handle)
    assert handle.state == "settled", "a plain request freezes nothing"
    assert e.log == ["upload_rows", "reset_lengths"]
    e.decode(handle, 902, completed=[0])
    assert e.finish(handle) is e.OK
    assert e.all_active(e.DRAFT) == held
    assert [e.draft_row(slot) for slot in (0, 1)] == rows
    assert e.metrics()["spec_pair_publications"] == 1, "only the speculative producer"
    e.end_everything()


def test_headroom_must_fit_the_kind_of_request(e, T):
    """Scenario 94, 40.4: draft headroom exactly where there is paged draft state."""
    for spec, headroom in ((True, (4, 0)), (True, (0, 4)), (False, (1, 1)), (False, (0, 0)), (True, (4, -1))):
        e.refuses(lambda spec=spec, room=headroom: e.try_begin(
            [e.sequence_admission(T(5), 0)], speculative=spec, headroom=room))  # fmt: skip
    handle = settled(e, T(8))
    e.refuses(e.prepare_decode, handle, (4, 0))
    e.refuses(e.prepare_decode, handle, (0, 4))


def test_the_frozen_endpoint_first_and_the_completed_slot_later(e, T):
    """Scenario 95."""
    handle = frozen(e, T(7))
    assert e.pages(handle) == [0, 1, 2]
    e.decode(handle, [41, 42], common=[7])
    assert [e.record(i)["blocks"] for i in e.record_ids()] == [1]
    assert (e.committed(handle), e.common(handle)) == (9, 7)
    e.decode(handle, [43, 44], common=[9], completed=[0])
    assert [e.record(i)["blocks"] for i in e.record_ids()] == [1, 2]
    assert e.metrics()["publication_attempts"] == 2
    assert e.metrics()["spec_pair_publications"] == 2
    e.check()


def test_a_prompt_below_one_page_has_nothing_to_publish(e):
    """Scenario 95, the empty case: no attempt is counted."""
    handle = frozen(e, [1, 2, 3])
    e.decode(handle, [41], common=[3])
    assert handle.state == "settled"
    assert e.records() == {}
    assert e.metrics()["spec_pair_publications"] == 0


def test_the_frozen_endpoint_is_cut_to_what_both_models_have(e, T):
    """Scenario 95, 40.18: min(frozen, common). Generated tokens beyond the prompt wait for their own completion."""
    handle = frozen(e, T(7))
    e.decode(handle, [41, 42], common=[9])
    assert [e.record(i)["blocks"] for i in e.record_ids()] == [1], "the frozen length is 7, whatever common says"


def test_prefill_state_only_still_publishes_the_prompt(e, T):
    """Scenario 95, 40.18: the commit policy concerns the end of generation, not the frozen prompt."""
    handle = e.begin(T(8), commit=CommitPolicy.PREFILL_STATE_ONLY)
    e.run_prefill(handle)
    e.decode(handle, [41, 42, 43, 44], common=[8])
    e.decode(handle, [45], common=[12], completed=[0])
    assert [e.record(i)["blocks"] for i in e.record_ids()] == [2]


# ---- 96 to 97b: ends and failures while the endpoint is frozen -------------------------------------------------------


def test_a_compaction_before_any_verification_drains_and_publishes_first(e, T):
    """Scenario 96."""
    handle = frozen(e, T(8))
    e.mark()
    assert e.begin_compaction(handle, [-1]) is e.OK
    assert e.log == ["drain", "upload_mapping"]
    assert handle.state == "compacting"
    assert e.record(1)["blocks"] == 2
    assert e.record(1)["draft"] == [0, 1]
    e.mark()
    assert e.coordinator.compact_batch(handle) is e.OK
    assert e.log == ["upload_rows", "upload_rows", "compact_lengths", "compact_lengths", "drain"]
    assert e.sync.calls == 2
    assert handle.state == "finishing"
    assert e.device_row(0) == e.device_draft_row(0) == EMPTY
    assert e.held() == {kind: {} for kind in e.KINDS}
    e.end_everything()


def test_a_finish_before_any_verification_drains_once_and_publishes(e, T):
    """Scenario 96, finish instead."""
    handle = frozen(e, T(8))
    e.mark()
    assert e.finish(handle) is e.OK
    assert e.log == ["drain", "upload_rows", "upload_rows"]
    assert e.record(1)["blocks"] == 2
    e.end_everything()


def test_leases_of_the_frozen_endpoint_are_held_until_the_drain(e, T):
    """Scenario 96: in the synchroniser nothing is published and nothing is free yet."""
    handle = frozen(e, T(8))
    seen = []
    e.sync.before = lambda: seen.append((e.records(), e.all_active(), e.all_active(e.DRAFT)))
    e.finish(handle)
    assert seen == [({}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1})]


def settled_frozen(h, T, publishing):
    handle = frozen(h, T(8))
    publishing.fail(1)
    h.mark()
    with pytest.raises(RuntimeError, match="publish"):
        h.begin_compaction(handle, [-1])
    assert handle.state == "settled_frozen"
    assert h.log == ["drain"], "the mapping is not uploaded"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.length_view is None
    assert h.records() == {}
    assert h.coordinator.state == "serving"
    h.check()
    h.mark()
    return handle


def test_a_frozen_endpoint_that_could_not_be_published_is_retried_by_the_next_compaction(e, T, publishing):
    """Scenario 96b. No second drain: quiescence is already proven. The lengths are installed, because it is no view."""
    handle = settled_frozen(e, T, publishing)
    assert e.begin_compaction(handle, [-1]) is e.OK
    assert e.log == ["reset_lengths", "reset_lengths", "upload_mapping"]
    assert e.record(1)["blocks"] == 2
    assert e.coordinator.compact_batch(handle) is e.OK
    e.end_everything()


def test_a_frozen_endpoint_that_could_not_be_published_is_retried_by_finish(e, T, publishing):
    """Scenario 96b, finish instead."""
    handle = settled_frozen(e, T, publishing)
    assert e.finish(handle) is e.OK
    assert e.log == ["upload_rows", "upload_rows"]
    assert e.record(1)["blocks"] == 2
    e.end_everything()


def test_a_frozen_endpoint_that_could_not_be_published_is_lost_by_a_drop(e, T, publishing):
    """Scenario 96b, drop instead."""
    handle = settled_frozen(e, T, publishing)
    e.drop(handle)
    assert e.log == ["upload_rows", "upload_rows"]
    assert e.records() == {}
    e.end_everything()


def test_a_frozen_endpoint_that_could_not_be_published_does_not_stop_decoding(e, T, publishing):
    """Scenario 96b and 50.1: the next verification publishes it."""
    handle = settled_frozen(e, T, publishing)
    assert e.prepare_decode(handle).status is e.OK
    assert handle.state == "decoding_frozen"
    assert e.log == ["reset_lengths", "reset_lengths"]
    assert e.device_lengths(1) == e.device_draft_lengths(1) == [8]
    assert e.complete(handle, [41, 42], common=[8]) is e.OK
    assert e.record(1)["blocks"] == 2


def test_publishing_may_fail_more_than_once(e, T, publishing):
    """Scenario 96b: settled_frozen is stable until a publication succeeds."""
    handle = settled_frozen(e, T, publishing)
    publishing.fail(1, 2)
    with pytest.raises(RuntimeError, match="publish"):
        e.begin_compaction(handle, [-1])
    assert handle.state == "settled_frozen"
    with pytest.raises(RuntimeError, match="publish"):
        e.finish(handle)
    assert handle.state == "settled_frozen"
    assert handle.valid
    assert e.log == []
    assert e.all_active() == {0: 1, 1: 1, 2: 1}
    assert e.finish(handle) is e.OK
    assert e.record(1)["blocks"] == 2


def test_an_illegal_mapping_does_not_publish_the_frozen_endpoint(e, T):
    """Scenario 96, 40.15: the mapping rules come first."""
    handle = frozen(e, T(8))
    e.refuses(e.begin_compaction, handle, [0, 1])
    e.refuses(e.begin_compaction, handle, [1])
    assert handle.state == "prefill_frozen"


def test_a_drop_while_awaiting_publishes_nothing(e, T):
    """Scenario 97."""
    handle = frozen(e, T(8))
    e.mark()
    e.drop(handle)
    assert e.log == ["drain", "upload_rows", "upload_rows"]
    assert e.records() == {}
    assert e.device_row(0) == e.device_draft_row(0) == EMPTY
    assert sorted(e.free()) == sorted(e.free(e.DRAFT)) == list(range(8))
    e.end_everything()


def retry_frozen(h, T):
    handle = frozen(h, T(8))
    h.fail(2)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, (5, 5))
    h.heal()
    assert handle.state == "decode_retry_frozen"
    assert h.coordinator.execution_holder == handle.id
    assert h.pages(handle) == h.draft_pages(handle) == [0, 1, 2, 3], "the growth is kept"
    assert h.draft_table.dirty_rows == (0,)
    h.mark()
    return handle


def test_a_first_verification_whose_upload_failed_is_prepared_again(e, T):
    """Scenario 97b: only the draft row is missing on the device."""
    handle = retry_frozen(e, T)
    assert e.prepare_decode(handle, (5, 5)).status is e.OK
    assert e.log == ["upload_rows"]
    assert handle.state == "decoding_frozen"
    assert e.device_row(0) == e.device_draft_row(0) == [0, 1, 2, 3]
    assert e.complete(handle, [41, 42], common=[8]) is e.OK
    assert e.record(1)["blocks"] == 2
    e.end_everything()


def test_a_first_verification_whose_upload_failed_may_be_finished(e, T):
    """Scenario 97b, finish instead: one drain, the endpoint is published."""
    handle = retry_frozen(e, T)
    assert e.finish(handle) is e.OK
    assert e.log == ["drain", "upload_rows", "upload_rows"]
    assert e.record(1)["blocks"] == 2
    e.end_everything()


def test_a_first_verification_whose_upload_failed_may_be_dropped(e, T):
    """Scenario 97b, drop instead: one drain, nothing is published."""
    handle = retry_frozen(e, T)
    e.drop(handle)
    assert e.log == ["drain", "upload_rows", "upload_rows"]
    assert e.records() == {}
    e.end_everything()


def test_a_frozen_request_accepts_only_what_its_state_accepts(e, T):
    """Scenarios 93, 97b: everything else is refused and changes nothing."""
    handle = frozen(e, T(8))
    c = e.coordinator
    one = [ContextCacheSequenceAdvance((5,), 9)]
    e.refuses(c.prepare_prefill, handle)
    e.refuses(c.enqueue_prefill_captures, handle)
    e.refuses(c.finalize_prefill_publication, handle, one, [9])
    e.refuses(c.complete_decode_step, handle, one, (), [8])
    e.refuses(c.compact_batch, handle)
    e.refuses(e.admit, handle, [1, 2], 1)
    e.refuses(c.finalize_sequence_admission, handle, 0, one[0])
    assert c.retract_sequence_admission(handle) is False
    assert handle.state == "prefill_frozen"


def test_a_first_verification_to_be_retried_accepts_nothing_else(e, T):
    """Scenario 97b, the refused half (92b for EAGLE)."""
    handle = retry_frozen(e, T)
    c = e.coordinator
    one = [ContextCacheSequenceAdvance((5,), 9)]
    e.refuses(c.complete_decode_step, handle, one, (), [8])
    e.refuses(e.begin_compaction, handle, [-1])
    e.refuses(c.finalize_prefill_publication, handle, one, [9])


# ---- growth ----------------------------------------------------------------------------------------------------------


def test_base_and_draft_grow_together_or_not_at_all(flavour, T):
    """Scenario 45 through the coordinator: without a draft page the slot keeps its hands off the base pool too."""
    h = flavour("eagle", pools=(8, 7, 0, 0), enforce_min_pool=False)
    handle = h.begin_batch([T(8), [51, 52, 53, 54, 55, 56, 57, 58]])
    h.run_prefill(handle)
    h.decode(handle, [41], [42])
    before = h.dump()
    result = h.prepare_decode(handle, (4, 4))
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [1], "slot 0 takes the last draft page"
    missing = result.refusal.missing
    assert (missing.base_kv_pages, missing.draft_kv_pages) == (0, 1)
    assert h.dump() == before
    assert handle.state == "settled"
    h.compact(handle, [0, -1])
    assert h.prepare_decode(handle, (4, 4)).status is h.OK
    assert len(h.pages(handle)) == len(h.draft_pages(handle)) == 4


def test_refused_growth_of_a_frozen_request_keeps_it_frozen(flavour, T):
    """Scenario 67b for EAGLE: with other sequences nothing changes; the only sequence ends in a frozen finishing."""
    h = flavour("eagle")
    handle = h.begin_batch([T(8), [51, 52]])
    h.run_prefill(handle)
    before = h.dump()
    result = h.prepare_decode(handle, (12, 12))
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [0]
    assert list(result.refusal.too_long_slots) == [0]
    assert h.dump() == before
    assert h.finish(handle) is h.OK
    alone = frozen(h, T(8))
    assert h.prepare_decode(alone, (12, 12)).status is h.REQUEST_FAILED
    assert alone.state == "finishing_prefill_frozen"
    assert h.coordinator.execution_holder is None
    h.refuses(h.begin_compaction, alone, [-1])
    h.mark()
    assert h.finish(alone) is h.OK
    assert h.log == ["drain", "upload_rows", "upload_rows"]
    assert h.metrics()["existing_publications"] == 1, "the frozen endpoint was offered again"
    h.end_everything()


# ---- 98: common lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("common", [None, [], [7], [9], [8, 8], [-1]], ids=repr)
def test_common_lengths_of_a_prefill_must_be_the_committed_ones(e, T, common):
    """Scenario 98. Afterwards the right ones are accepted."""
    handle = e.begin(T(8))
    assert e.coordinator.prepare_prefill(handle) is e.OK
    e.synchronize()
    e.refuses(e.finalize, handle, 901, common)
    assert e.finalize(handle, common=np.array([8], dtype=np.int32)) is e.OK
    assert handle.state == "prefill_frozen"


@pytest.mark.parametrize("common", [None, [], [11], [7], [8, 8], [-1]], ids=repr)
def test_common_lengths_of_a_step_are_monotonic_and_at_most_committed(e, T, common):
    """Scenario 98. The new committed length is 10, the old common length is 8."""
    handle = frozen(e, T(8))
    assert e.prepare_decode(handle).status is e.OK
    e.synchronize()
    e.refuses(lambda: e.complete(handle, [41, 42], common=common))
    assert e.complete(handle, [41, 42], common=np.array([10], dtype=np.int32)) is e.OK
    assert e.common(handle) == 10


def test_a_plain_request_reports_no_common_lengths(e, T):
    """Scenario 98, the other policy: base-endpoint refuses them."""
    handle = e.begin(T(5), speculative=False)
    assert e.coordinator.prepare_prefill(handle) is e.OK
    e.synchronize()
    e.refuses(e.finalize, handle, 901, [5])
    assert e.finalize(handle) is e.OK


def test_a_cancelled_slot_holds_and_keeps_its_common_length(e, T):
    """Scenario 98, 40.18 [D]: HOLD is accepted, a cancelled slot must not fail the batch."""
    handle = e.begin_batch([T(5), [51, 52, 53, 54, 55]])
    e.run_prefill(handle)
    e.decode(handle, None, [41, 42], common=[5, 5])
    assert [(e.committed(handle, s), e.common(handle, s)) for s in (0, 1)] == [(5, 5), (7, 5)]
    assert e.prepare_decode(handle).status is e.OK
    e.synchronize()
    e.refuses(lambda: e.complete(handle, None, [43], common=[6, 7]))
    e.refuses(lambda: e.coordinator.complete_decode_step(
        handle, [ContextCacheSequenceAdvance((), 5), ContextCacheSequenceAdvance((43,), 8)], (), [5, 7]))  # fmt: skip
    assert e.complete(handle, None, [43], common=[5, 7]) is e.OK
    e.compact(handle, [-1, 0])
    assert e.common(handle) == 7
    e.check()


def test_a_step_of_several_tokens_must_add_up(e, T):
    """Scenario 98, 40.18: k tokens advance by k, and k is positive."""
    handle = settled(e, T(8))
    assert e.prepare_decode(handle).status is e.OK
    c = e.coordinator
    for tokens, committed in (((43, 44), 11), ((43,), 12), ((), 11), ((43, 44, 45), 12)):
        e.refuses(c.complete_decode_step, handle, [ContextCacheSequenceAdvance(tokens, committed)], (), [8])
    assert c.complete_decode_step(handle, [ContextCacheSequenceAdvance((43, 44, 45), 13)], (), [10]) is e.OK


def test_a_completed_slot_publishes_up_to_its_common_length(e, T):
    """Scenario 98, 40.18: committed 14, common 10: two blocks, not three."""
    handle = settled(e, T(8))
    e.decode(handle, [43, 44, 45, 46], common=[10], completed=[0])
    assert e.committed(handle) == 14
    assert [e.record(i)["blocks"] for i in e.record_ids()] == [2]


# ---- 99: media -------------------------------------------------------------------------------------------------------


def test_one_sequence_with_media_bypasses_the_whole_speculative_batch(flavour, T):
    """Scenario 99."""
    e = flavour("eagle", pools=(16, 16, 0, 0))
    e.finish(settled(e, T(8)))
    records, before = e.records(), e.metrics()
    result = e.try_begin(
        [
            e.sequence_admission([*T(8), 9], 0),
            e.sequence_admission([5, 6, 7, 8, 9], 1, media=[None, IMAGE, IMAGE, None, None]),
        ]
    )
    assert result.status is e.OK
    handle = result.admission.request
    e.handles.append(handle)
    assert list(result.admission.prefill_starts) == [0, 0]
    after = e.metrics()
    assert after["lookup_bypass_sequences"] - before["lookup_bypass_sequences"] == 2
    assert after["media_aware_sequences"] - before["media_aware_sequences"] == 1
    e.run_prefill(handle)
    e.decode(handle, [41], [42], completed=[0, 1])
    assert e.records() == records
    assert e.metrics()["publication_attempts"] == before["publication_attempts"]
    e.end_everything()


def test_a_plain_request_with_media_still_uses_the_cache(e):
    """Scenario 99, the forbidden half: only media with speculation bypasses."""
    tokens, media = [1, 2, 7, 7, 7, 7], [None, None, IMAGE, IMAGE, IMAGE, None]
    first = e.begin(tokens, media=media, speculative=False)
    e.run_prefill(first)
    e.finish(first)
    e.begin(tokens, media=media, speculative=False)
    assert e.starts == [4]
    assert e.metrics()["lookup_bypass_sequences"] == 0


# ---- 91, 91b, 83c for two models -------------------------------------------------------------------------------------


def firsts_as_they_arrive(h, cache):
    """Run the stream piece by piece; the first entry of that length vector after each piece."""
    seen = []
    while h.stream.pending:
        h.stream.run(1)
        value = int(np.asarray(cache.device_lengths())[0])
        if not seen or seen[-1] != value:
            seen.append(value)
    return seen


def test_the_length_copies_of_a_broken_request_keep_their_own_staging(e, T):
    """Scenario 91b. It goes wrong when staging is one buffer: A's copy, which runs late, would carry B's lengths."""
    e.finish(settled(e, T(8)))
    e.synchronize()
    a = e.begin([*T(8), 77], 0)
    assert e.starts == [4]
    b = e.begin([51, 52, 53], 1)
    assert e.starts == [0]
    e.set_device_lengths([99])
    e.set_draft_lengths([99])
    e.fail(4)
    with pytest.raises(DeviceError):
        e.coordinator.prepare_prefill(a)
    e.heal()
    assert a.state == "broken"
    assert e.coordinator.execution_holder is None
    assert e.coordinator.prepare_prefill(b) is e.OK
    assert firsts_as_they_arrive(e, e.cache_manager)[-2:] == [4, 0]
    assert e.device_lengths(1) == e.device_draft_lengths(1) == [0]
    e.end_everything()


@pytest.mark.parametrize("action", [1, 2, 3, 4])
def test_a_paired_prefill_that_could_not_be_enqueued_is_broken(e, T, action):
    """Scenario 91 for both tables: dropping it drains once, clears and uploads both rows, then frees."""
    handle = e.begin(T(8))
    e.fail(action)
    with pytest.raises(DeviceError):
        e.coordinator.prepare_prefill(handle)
    e.heal()
    assert handle.state == "broken"
    e.refuses(e.coordinator.prepare_prefill, handle)
    calls = e.sync.calls
    e.drop(handle)
    assert e.sync.calls - calls == 1
    assert e.device_row(0) == e.device_draft_row(0) == EMPTY
    e.end_everything()


def test_settled_paired_requests_take_turns(e, T):
    """Scenario 83c for EAGLE: base lengths are the committed ones, draft lengths the common ones."""
    a = settled(e, T(5), 0)
    b = settled(e, [51, 52, 53], 1)
    assert e.coordinator.length_view == b.id
    e.mark()
    assert e.prepare_decode(a, (1, 1)).status is e.OK
    assert e.log == ["reset_lengths", "reset_lengths"]
    assert e.device_lengths(1) == [7]
    assert e.device_draft_lengths(1) == [5]
    assert e.coordinator.length_view == a.id
    assert e.complete(a, [43], common=[7]) is e.OK
    e.mark()
    assert e.prepare_decode(a, (1, 1)).status is e.OK
    assert e.log == []
    e.refuses(e.prepare_decode, b, (1, 1))
    assert e.complete(a, [44], common=[8]) is e.OK
    assert e.prepare_decode(b, (1, 1)).status is e.OK
    assert e.device_lengths(1) == [5]
    assert e.device_draft_lengths(1) == [3]


def test_a_paired_compaction_moves_both_length_vectors(e, T):
    """Scenario 68 for two models."""
    handle = e.begin_batch([T(5), [51, 52, 53]])
    e.run_prefill(handle)
    e.decode(handle, [41], [42], headroom=(1, 1))
    e.set_device_lengths([6, 4])
    e.set_draft_lengths([5, 3])
    e.mark()
    e.compact(handle, [-1, 0])
    assert e.log == ["upload_mapping", "upload_rows", "upload_rows", "compact_lengths", "compact_lengths", "drain"]
    assert e.device_lengths(1) == [4]
    assert e.device_draft_lengths(1) == [3]
    assert e.device_row(0) == e.device_draft_row(0) == EMPTY
    assert e.cache_manager.active_batch_size == e.draft_cache.active_batch_size == 1
    e.check()


def test_a_live_admission_is_refused_on_a_speculative_deployment(e, T):
    """Scenario 83: also for a plain request, whose draft rows would be nobody's business."""
    assert e.coordinator.supports_live_sequence_admission() is False
    plain = e.begin(T(5), speculative=False)
    e.run_prefill(plain)
    e.refuses(e.admit, plain, [1, 2], 1)
    speculative = settled(e, [51, 52, 53], 1)
    e.finish(plain)
    e.refuses(e.admit, speculative, [1, 2], 0)


# ---- drafts that do not look ahead -----------------------------------------------------------------------------------


def test_a_draft_without_look_ahead_keeps_all_matched_pages(flavour, T):
    """Scenario 18 through the coordinator: 9 tokens start at 8, 8 tokens at 4, and nothing is replayed."""
    h = flavour("draft")
    h.finish(settled(h, T(8)))
    handle = h.begin([*T(8), 77])
    assert h.starts == [8]
    assert h.pages(handle)[:2] == h.draft_pages(handle)[:2] == [0, 1]
    assert h.metrics()["spec_full_page_replays"] == 0
    h.drop(handle)
    h.begin(T(8))
    assert h.starts == [4]
    h.end_everything()


def test_base_pages_without_a_draft_path_do_not_help_a_paired_request(e, T):
    """Scenario 19 through the coordinator; the paired request then upgrades the record (scenario 38)."""
    plain = e.begin(T(9), speculative=False)
    e.run_prefill(plain)
    e.finish(plain)
    assert e.record(1)["draft"] is None
    handle = e.begin(T(9))
    assert e.starts == [0]
    e.run_prefill(handle)
    e.decode(handle, [41], common=[9])
    assert e.record_ids() == [1]
    assert e.record(1)["base"] == [0, 1]
    assert e.record(1)["draft"] == e.draft_pages(handle)[:2]
    assert e.metrics()["committed_publications"] == 2
    e.finish(handle)
    e.begin(T(9))
    assert e.starts == [4]
    e.end_everything()


def test_a_bypass_request_publishes_no_pair(e, T):
    """Scenario 52 for EAGLE: the frozen endpoint of a bypass sequence is never published."""
    handle = e.begin(T(8), lookup=LookupPolicy.BYPASS)
    e.run_prefill(handle)
    e.decode(handle, [41, 42], common=[8], completed=[0])
    assert e.records() == {}
    assert e.metrics()["spec_pair_publications"] == 0
    assert e.finish(handle) is e.OK
    e.end_everything()
