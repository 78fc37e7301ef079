"""Scenarios 96 to 98 for a draft that reads the base model's K/V and has no pages of its own."""

from __future__ import annotations

import pytest

from context_cache.coordinator import ContextCacheSequenceAdvance, Digest

IMAGE = Digest(b"image-one" + bytes(23))


@pytest.fixture
def s(flavour):
    return flavour("shared-kv")


def frozen(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    assert handle.state == "prefill_frozen"
    return handle


def test_there_is_no_draft_table_and_the_prompt_still_waits_for_a_verification(s, T):
    """Scenario 93 without draft pages."""
    handle = s.begin(T(8))
    assert s.draft_pages(handle) == []
    s.mark()
    s.run_prefill(handle)
    assert s.log == ["upload_rows", "reset_lengths"]
    assert s.records() == {}
    s.decode(handle, [41, 42], common=[8])
    assert handle.state == "settled"
    assert s.record(1) == {
        "blocks": 2, "base": [0, 1], "draft": None, "recurrent": None, "partial": None, "length": None
    }  # fmt: skip
    assert s.metrics()["spec_pair_publications"] == 1, "counted although there is no draft pool"
    s.end_everything()


def test_missing_common_lengths_are_derived_from_the_committed_ones(s, T):
    """Scenario 98, last sentence."""
    handle = s.begin(T(8))
    assert s.coordinator.prepare_prefill(handle) is s.OK
    s.synchronize()
    assert s.finalize(handle, common=None) is s.OK
    assert handle.state == "prefill_frozen"
    assert s.common(handle) == 8
    s.decode(handle, [41, 42], common=None)
    assert (s.committed(handle), s.common(handle)) == (10, 10)
    assert s.record(1)["blocks"] == 2


def test_a_slot_that_holds_keeps_its_derived_common_length(s, T):
    """Scenario 98, 40.18 [D]. It goes wrong when the marker of HOLD is copied: the common length would be -1."""
    handle = s.begin_batch([T(5), [51, 52, 53]])
    assert s.coordinator.prepare_prefill(handle) is s.OK
    s.synchronize()
    assert s.finalize(handle, common=None) is s.OK
    s.decode(handle, None, [41, 42], common=None)
    assert [s.common(handle, slot) for slot in (0, 1)] == [5, 5]
    assert [s.committed(handle, slot) for slot in (0, 1)] == [5, 5]
    s.decode(handle, [43], None, common=None, completed=[0, 1])
    assert [s.common(handle, slot) for slot in (0, 1)] == [6, 5]
    s.check()


def test_a_slot_that_holds_behind_its_committed_length_stays_there(s, T):
    """Scenario 98, 40.18 [D]: the runtime reported less than was committed, then the slot holds in a derived step."""
    handle = s.begin_batch([T(5), [51, 52, 53]])
    s.run_prefill(handle)
    s.decode(handle, [41], [42], common=[5, 3])
    assert [(s.committed(handle, slot), s.common(handle, slot)) for slot in (0, 1)] == [(6, 5), (4, 3)]
    s.decode(handle, None, [43], common=None)
    assert [(s.committed(handle, slot), s.common(handle, slot)) for slot in (0, 1)] == [(6, 5), (5, 5)]
    s.check()


@pytest.mark.parametrize("common", [[7], [9], [8, 8], [-1]], ids=repr)
def test_given_common_lengths_are_checked_as_for_paged_drafts(s, T, common):
    """Scenario 98: given at prefill, they must be the committed ones."""
    handle = s.begin(T(8))
    assert s.coordinator.prepare_prefill(handle) is s.OK
    s.synchronize()
    s.refuses(s.finalize, handle, 901, common)
    assert s.finalize(handle) is s.OK


@pytest.mark.parametrize("common", [[11], [7], [8, 8], [-1]], ids=repr)
def test_given_common_lengths_of_a_step_are_checked_too(s, T, common):
    """Scenario 98 for complete_decode_step."""
    handle = frozen(s, T(8))
    assert s.prepare_decode(handle).status is s.OK
    s.synchronize()
    s.refuses(lambda: s.complete(handle, [41, 42], common=common))
    assert s.complete(handle, [41, 42], common=[9]) is s.OK


def test_a_hit_is_bound_whole(s, T):
    """Scenario 19, second half, through the coordinator: base pages suffice, whoever published them."""
    plain = s.begin(T(9), speculative=False)
    s.run_prefill(plain)
    s.finish(plain)
    s.begin(T(9))
    assert s.starts == [8]
    assert s.metrics()["spec_full_page_replays"] == 0


def test_draft_headroom_is_refused(s, T):
    """40.4 and scenario 98: there is no paged draft state that it could be for."""
    s.refuses(lambda: s.try_begin([s.sequence_admission(T(5), 0)], headroom=(4, 4)))
    handle = frozen(s, T(5))
    s.refuses(s.prepare_decode, handle, (4, 1))
    assert s.prepare_decode(handle, (4, 0)).status is s.OK


def test_a_compaction_before_any_verification_drains_and_publishes(s, T):
    """Scenario 96 without a draft table."""
    handle = frozen(s, T(8))
    s.mark()
    assert s.begin_compaction(handle, [-1]) is s.OK
    assert s.log == ["drain", "upload_mapping"]
    assert s.record(1)["blocks"] == 2
    s.mark()
    assert s.coordinator.compact_batch(handle) is s.OK
    assert s.log == ["upload_rows", "compact_lengths", "drain"]
    assert s.sync.calls == 2
    s.end_everything()


def test_a_finish_before_any_verification_publishes_and_a_drop_does_not(s, T):
    """Scenarios 96 and 97 without a draft table."""
    s.drop(frozen(s, T(8)))
    assert s.records() == {}
    calls = s.sync.calls
    s.finish(frozen(s, T(8)))
    assert s.sync.calls - calls == 1
    assert s.record(1)["blocks"] == 2
    s.end_everything()


def test_a_frozen_endpoint_that_could_not_be_published_is_retried(s, T, publishing):
    """Scenario 96b without a draft table."""
    handle = frozen(s, T(8))
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        s.begin_compaction(handle, [-1])
    assert handle.state == "settled_frozen"
    s.mark()
    assert s.begin_compaction(handle, [-1]) is s.OK
    assert s.log == ["reset_lengths", "upload_mapping"]
    assert s.record(1)["blocks"] == 2


def test_media_bypasses_the_whole_batch(s, T):
    """Scenario 99 for a shared-K/V draft."""
    result = s.try_begin(
        [s.sequence_admission(T(8), 0), s.sequence_admission([5, 6], 1, media=[IMAGE, None])], headroom=(4, 0)
    )
    assert result.status is s.OK
    s.handles.append(result.admission.request)
    assert s.metrics()["lookup_bypass_sequences"] == 2
    s.run_prefill(result.admission.request)
    assert s.finish(result.admission.request) is s.OK
    assert s.records() == {}


def test_a_step_of_no_token_with_a_concrete_length_is_refused(s, T):
    """Scenario 72 for a speculative policy: HOLD is the only way to say that nothing happened."""
    handle = frozen(s, T(8))
    assert s.prepare_decode(handle).status is s.OK
    s.refuses(s.coordinator.complete_decode_step, handle, [ContextCacheSequenceAdvance((), 8)], (), [8])
    s.refuses(s.coordinator.complete_decode_step, handle, [ContextCacheSequenceAdvance((), 8)], ())
    assert s.complete(handle, None, common=None) is s.OK
