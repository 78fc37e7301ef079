"""Scenarios 52 to 73b: one request of an attention-only coordinator, from admission to compaction.

Page ids, free lists and metrics are exactly those of the scenarios; every refusal is checked to have changed nothing.
"""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.coordinator import (
    BatchAdvance,
    BlockKeyExtras,
    CommitPolicy,
    ContextCacheSequenceAdvance,
    Digest,
    LookupPolicy,
    ResidentRef,
    TokenStateContract,
)

TENANT_A = BlockKeyExtras(isolation_digest=Digest(b"A" * 16))
TENANT_B = BlockKeyExtras(isolation_digest=Digest(b"B" * 16))


def advance(token, committed):
    tokens = (token,) if isinstance(token, int) else tuple(token)
    return ContextCacheSequenceAdvance(accepted_token_ids=tokens, committed_state_length=committed)


def ints(values, dtype="int32"):
    return np.array(values, dtype=dtype)


def produce(h, tokens, **options):
    """Run a prompt's prefill and finish it: its full blocks are cached afterwards."""
    handle = h.begin(tokens, **options)
    h.run_prefill(handle)
    assert h.finish(handle) is h.OK
    return handle


# ---- admission and reuse ------------------------------------------------------------


def test_a_bypass_request_publishes_nothing(h, T):
    """Scenario 52."""
    handle = h.begin(T(5), lookup=LookupPolicy.BYPASS)
    assert h.pages(handle) == [0, 1]
    assert h.starts == [0]
    h.run_prefill(handle)
    assert h.finish(handle) is h.OK
    assert h.records() == {}
    assert sorted(h.free()) == list(range(12))
    assert h.metrics()["lookup_bypass_sequences"] == 1
    assert h.metrics()["publication_attempts"] == 0


def test_a_second_prompt_starts_after_the_published_prefix(h, T):
    """Scenario 53. Cold then warm: the consumer's row names the shared page first."""
    cold = h.begin(T(5))
    assert h.starts == [0]
    assert h.pages(cold) == [0, 1]
    h.run_prefill(cold)
    assert h.records() == {1: [0]}
    assert h.finish(cold) is h.OK
    assert h.free() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1]

    warm = h.begin(T(6))
    assert h.starts == [4]
    assert h.pages(warm) == [0, 2]
    assert h.row(0) == [-1] * 4, "rows are bound by prepare_prefill, not by begin_request"
    assert h.coordinator.prepare_prefill(warm) is h.OK
    assert h.row(0) == [0, 2, -1, -1]
    assert h.v_row(0) == [12, 14, -1, -1]
    assert h.device_row(0, 0) == [0, 2, -1, -1]
    assert h.device_row(0, 1) == [12, 14, -1, -1]
    assert h.device_lengths(1) == [4]


def test_an_aligned_identical_prompt_is_rewound_to_recompute_one_token(h, T):
    """Scenario 54. It counts as a hit although nothing is left to reuse."""
    produce(h, T(5))
    before = h.metrics()
    handle = h.begin(T(4))
    after = h.metrics()
    assert h.starts == [0]
    assert h.pages(handle) == [2, 3]
    assert after["matched_tokens"] - before["matched_tokens"] == 4
    assert after["reused_tokens"] - before["reused_tokens"] == 0
    assert after["hit_sequences"] - before["hit_sequences"] == 1
    assert after["full_input_rewind_plans"] - before["full_input_rewind_plans"] == 1


def test_the_metrics_of_a_chain_of_requests_add_up(h, T):
    """Scenario 55."""
    produce(h, T(5), lookup=LookupPolicy.BYPASS)
    produce(h, T(5))
    produce(h, T(6))
    last = h.begin(T(4))
    assert h.finish(last) is h.OK
    metrics = h.metrics()
    expected = {
        "admitted_sequences": 4,
        "hit_sequences": 2,
        "lookup_bypass_sequences": 1,
        "forced_cold_sequences": 0,
        "media_aware_sequences": 0,
        "standard_plans": 1,
        "no_reusable_prefix_plans": 2,
        "full_input_rewind_plans": 1,
        "matched_tokens": 8,
        "reused_tokens": 4,
        "publication_attempts": 2,
        "committed_publications": 1,
        "existing_publications": 1,
        "published_endpoints": 2,
        "current_records": 1,
        "evicted_records": 0,
        "reclaimed_base_kv_pages": 0,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert len(h.free()) == 11
    assert h.records() == {1: [2]}, "the canonical page of the block is 2"


def test_a_sequence_may_override_the_lookup_policy_of_its_batch(h, T):
    """Scenario 56. Only the sequence that looks up is offered for publication."""
    produce(h, T(5))
    before = h.metrics()
    result = h.try_begin(
        [
            h.sequence_admission(T(6), 0, lookup=LookupPolicy.BYPASS),
            h.sequence_admission(T(6), 1),
        ]
    )
    assert result.status is h.OK
    handle = result.admission.request
    h.handles.append(handle)
    assert list(result.admission.prefill_starts) == [0, 4]
    assert h.pages(handle, 0) == [2, 3]
    assert h.pages(handle, 1) == [0, 4]
    h.run_prefill(handle)
    after = h.metrics()
    assert after["lookup_bypass_sequences"] - before["lookup_bypass_sequences"] == 1
    assert after["hit_sequences"] - before["hit_sequences"] == 1
    assert after["publication_attempts"] - before["publication_attempts"] == 1
    assert after["existing_publications"] - before["existing_publications"] == 1
    assert h.records() == {1: [0]}


def test_a_bypass_batch_is_not_overridden_by_a_sequence(h, T):
    """Scenario 56, the other half (40.3): BYPASS of the batch wins over USE_CACHE of a sequence."""
    produce(h, T(5))
    h.begin(T(6), override=LookupPolicy.USE_CACHE, lookup=LookupPolicy.BYPASS)
    assert h.starts == [0]


# ---- what is published ------------------------------------------------------------


def test_generated_tokens_are_published_once_they_are_committed(h, T):
    """Scenario 57. The lookahead token 902 is part of no hash."""
    handle = h.begin(T(7))
    h.run_prefill(handle)
    assert h.records() == {1: [0]}
    h.decode(handle, 902, completed=[0])
    assert h.records() == {1: [0], 2: [0, 1]}
    assert h.seq(handle).published_full_block_count == 2
    assert h.finish(handle) is h.OK

    for next_token in (902, 777):
        consumer = h.begin([*T(7), 901, next_token])
        assert h.starts == [8]
        assert h.pages(consumer)[:2] == [0, 1]
        h.finish(consumer)
    h.begin([*T(7), 900, 902])
    assert h.starts == [4], "another generated token is another block"


def test_a_slot_that_is_not_completed_publishes_nothing_in_decode(h, T):
    """Scenario 57, the forbidden half: an ordinary step is no publication point."""
    handle = h.begin(T(7))
    h.run_prefill(handle)
    h.decode(handle, 902)
    assert h.records() == {1: [0]}
    assert h.metrics()["publication_attempts"] == 1


def test_prefill_state_only_never_publishes_generated_tokens(h, T):
    """Scenario 58."""
    handle = h.begin(T(7), commit=CommitPolicy.PREFILL_STATE_ONLY)
    h.run_prefill(handle)
    assert h.metrics()["publication_attempts"] == 1
    h.decode(handle, 902, completed=[0])
    assert h.metrics()["publication_attempts"] == 1
    assert h.records() == {1: [0]}


def test_isolation_reaches_generated_blocks(h, T):
    """Scenario 59."""
    handle = h.begin(T(3), extras=TENANT_A)
    h.run_prefill(handle)
    assert h.metrics()["publication_attempts"] == 0, "three tokens are no block"
    h.decode(handle, 902, completed=[0])
    assert list(h.records().values()) == [[0]]
    assert h.finish(handle) is h.OK

    prompt = [1, 2, 3, 901, 903]
    for extras, start in ((TENANT_A, 4), (TENANT_B, 0), (None, 0)):
        probe = h.begin(prompt, extras=extras)
        assert h.starts == [start], extras
        h.finish(probe)


def test_a_prompt_twice_in_one_batch_shares_nothing_and_is_published_once(h, T):
    """Scenario 63. Acquisition sees only published state."""
    handle = h.begin_batch([T(9), T(9)])
    assert h.starts == [0, 0]
    assert h.pages(handle, 0) == [0, 1, 2]
    assert h.pages(handle, 1) == [3, 4, 5]
    h.run_prefill(handle)
    metrics = h.metrics()
    assert metrics["committed_publications"] == 1
    assert metrics["existing_publications"] == 1
    assert h.all_cached() == {0: 1, 1: 1}
    assert h.pages(handle, 1) == [3, 4, 5], "publication never rewrites a lease"


# ---- malformed progress ------------------------------------------------------------


def prefilled_batch(h, T):
    handle = h.begin_batch([T(5), T(6)])
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def test_malformed_progress_changes_nothing_and_can_be_corrected(h, T):
    """Scenario 60."""
    handle = prefilled_batch(h, T)
    finalize = h.coordinator.finalize_prefill_publication
    good = [advance(901, 5), advance(902, 6)]
    h.refuses(finalize, handle, [advance(901, 5), advance(902, 5)])
    h.refuses(finalize, handle, [advance(901, 5)])
    h.refuses(finalize, handle, [*good, advance(903, 7)])
    h.refuses(finalize, handle, [advance((901, 903), 5), advance(902, 6)])
    h.refuses(finalize, handle, [advance((), 5), advance(902, 6)])
    h.refuses(finalize, handle, [h.HOLD, advance(902, 6)])
    h.refuses(finalize, handle, good, [5, 6])
    assert handle.state == "prefilling"

    assert finalize(handle, good) is h.OK
    assert handle.state == "settled"
    assert [h.committed(handle, slot) for slot in (0, 1)] == [5, 6]
    assert h.seq(handle, 0).token_ids.tolist() == [*T(5), 901]
    assert h.seq(handle, 1).token_ids.tolist() == [*T(6), 902]


def test_empty_common_lengths_count_as_absent(h, T):
    """Scenario 60, the legal half of the common lengths (40.18: absent or empty)."""
    handle = prefilled_batch(h, T)
    assert h.coordinator.finalize_prefill_publication(handle, [advance(901, 5), advance(902, 6)], []) is h.OK


def test_the_batch_form_of_a_step_equals_the_list_form(harness, T):
    """Scenario 60b. Same ledger, same records, and one recorded step that names both slots."""

    def run(advances):
        one = harness()
        handle = prefilled_batch(one, T)
        one.recorder.steps.clear()
        assert one.coordinator.finalize_prefill_publication(handle, advances) is one.OK
        views = [
            (v.token_count, v.committed_state_length, v.published_full_block_count, v.token_ids.tolist())
            for v in (one.seq(handle, 0), one.seq(handle, 1))
        ]
        steps = [s for s in one.recorder.steps if str(s.event).startswith("finalize_prefill")]
        return views, one.records(), one.plain(steps)

    listed = run([advance(901, 5), advance(902, 6)])
    batched = run(BatchAdvance(token_ids=ints([901, 902]), counts=ints([1, 1]), committed=ints([5, 6])))
    assert listed == batched
    steps = batched[2]
    assert len(steps) == 1
    assert list(steps[0]["slots"]) == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "counts", "committed"),
    [
        pytest.param(ints([901, 902]), ints([1, 2]), ints([5, 6]), id="counts do not add up"),
        pytest.param(ints([901, 902, 903]), ints([1, 1]), ints([5, 6]), id="a token too many"),
        pytest.param(ints([901, 902], "int64"), ints([1, 1]), ints([5, 6]), id="int64 tokens"),
        pytest.param(ints([901, 902]), ints([1, 1], "int64"), ints([5, 6]), id="int64 counts"),
        pytest.param(ints([901, 902]), ints([1, 1]), ints([5, 6], "int64"), id="int64 lengths"),
        pytest.param(ints([901]), ints([1]), ints([5]), id="one sequence of two"),
        pytest.param(ints([901, 902, 903]), ints([1, 1, 1]), ints([5, 6, 7]), id="three sequences of two"),
        pytest.param(ints([901, 902]), ints([1, 1]), ints([5, 6, 7]), id="one length too many"),
        pytest.param(ints([[901, 902]]), ints([1, 1]), ints([5, 6]), id="two dimensions"),
        pytest.param(ints([901, 902]), ints([3, -1]), ints([5, 6]), id="a negative count"),
        pytest.param(ints([901, 902]), ints([1, 1]), ints([5, -2]), id="committed -2"),
        pytest.param(ints([901, 902]), ints([1, 1]), ints([5, -1]), id="HOLD with a token"),
    ],
)
def test_a_malformed_batch_advance_changes_nothing(h, T, tokens, counts, committed):
    """Scenario 60b, the refused forms. Some are refused when the value is made, the others by the call."""
    handle = prefilled_batch(h, T)

    def call():
        h.coordinator.finalize_prefill_publication(
            handle, BatchAdvance(token_ids=tokens, counts=counts, committed=committed)
        )

    h.refuses(call)
    assert h.coordinator.finalize_prefill_publication(handle, [advance(901, 5), advance(902, 6)]) is h.OK


def test_the_batch_form_of_a_decode_step_equals_the_list_form(harness, T):
    """Scenario 60b for complete_decode_step, with a slot that holds."""

    def run(advances):
        one = harness()
        handle = one.begin_batch([T(5), T(6)])
        one.run_prefill(handle)
        one.prepare_decode(handle)
        assert one.coordinator.complete_decode_step(handle, advances, ()) is one.OK
        return [one.seq(handle, slot).token_ids.tolist() for slot in (0, 1)], [one.committed(handle, s) for s in (0, 1)]

    listed = run([ContextCacheSequenceAdvance((), -1), advance(903, 7)])
    batched = run(BatchAdvance(token_ids=ints([903]), counts=ints([0, 1]), committed=ints([-1, 7])))
    assert listed == batched == ([[*T(5), 901], [*T(6), 902, 903]], [5, 7])


def test_a_fully_committed_batch_advances_without_lookahead(h, T):
    """40.10 and 40.18, FULLY_COMMITTED: no token at prefill, k tokens and k positions in a step, HOLD allowed."""
    handle = h.begin(T(5), contract=TokenStateContract.FULLY_COMMITTED, headroom=4)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    h.refuses(h.coordinator.finalize_prefill_publication, handle, [advance(901, 5)])
    assert h.coordinator.finalize_prefill_publication(handle, [advance((), 5)]) is h.OK
    assert h.seq(handle).token_count == h.committed(handle) == 5

    assert h.prepare_decode(handle, 4).status is h.OK
    h.refuses(h.coordinator.complete_decode_step, handle, [advance((11, 12, 13), 7)], ())
    h.refuses(h.coordinator.complete_decode_step, handle, [advance((), 5)], ())
    assert h.coordinator.complete_decode_step(handle, [advance((11, 12, 13), 8)], (0,)) is h.OK
    assert h.seq(handle).token_ids.tolist() == [*T(5), 11, 12, 13]
    assert h.records()[2] == [0, 1]

    assert h.prepare_decode(handle).status is h.OK
    assert h.coordinator.complete_decode_step(handle, [h.HOLD], ()) is h.OK
    assert h.committed(handle) == 8


# ---- admission that is refused ------------------------------------------------------------


@pytest.mark.parametrize("length", [17, 16])
def test_an_input_that_exceeds_its_row_is_refused(h, T, length):
    """Scenario 61. 16 tokens fill the row, the headroom does not fit any more."""
    admission = [h.sequence_admission(T(length), 0)]
    h.refuses(h.try_begin, admission)
    handle = h.begin(T(5))
    assert h.pages(handle) == [0, 1]
    assert h.finish(handle) is h.OK
    assert h.coordinator.shutdown() is h.OK, "no active request remains of the refused one"


@pytest.mark.parametrize("length", [17, 16])
def test_a_batch_with_one_oversized_input_holds_nothing(h, T, length):
    """Scenario 61 inside a batch: what the first sequence took goes back."""
    h.refuses(h.try_begin, [h.sequence_admission(T(5), 0), h.sequence_admission(T(length), 1)])
    handle = h.begin(T(5))
    assert h.pages(handle) == [0, 1]


@pytest.mark.parametrize("headroom", [0, -1])
def test_a_request_without_headroom_is_refused(h, T, headroom):
    """40.4: base headroom is positive."""
    h.refuses(lambda: h.try_begin([h.sequence_admission(T(5), 0)], headroom=headroom))


def test_an_empty_prompt_and_an_empty_or_too_large_batch_are_refused(h, T):
    """40.3 and 40.4: 1 to max_batch sequences, each with at least one token."""
    h.refuses(h.try_begin, [h.sequence_admission([], 0)])
    h.refuses(h.try_begin, [])
    h.refuses(h.try_begin, [h.sequence_admission(T(2), slot) for slot in (0, 1, 2)] + [h.sequence_admission(T(2), 3)])


def test_a_speculative_request_on_a_plain_deployment_is_refused(h, T):
    """40.3: speculative only on speculative profiles."""
    h.refuses(lambda: h.try_begin([h.sequence_admission(T(5), 0)], speculative_request=True))


def test_batch_admission_is_all_or_nothing(harness, T):
    """Scenario 62. The first sequence fits, the second does not: nothing is kept, nothing is counted."""
    h = harness(pages=3, enforce_min_pool=False)
    before = h.counters()
    result = h.try_begin([h.sequence_admission(T(5), 0), h.sequence_admission(T(9), 1)])
    assert result.status is h.REQUEST_FAILED
    assert result.insufficient_capacity is True
    assert result.admission is None
    assert sorted(h.free()) == [0, 1, 2]
    assert h.all_active() == {}
    assert h.counters() == before
    assert h.coordinator.shutdown() is h.OK


def test_a_second_stream_is_refused_even_while_poisoned(h, T):
    """Scenario 64. The stream is checked before the poison."""
    other = h.backend.new_stream()
    admission = [h.sequence_admission(T(5), 0)]
    h.refuses(lambda: h.try_begin(admission, stream=other))
    h.poison(2)
    h.refuses(lambda: h.try_begin(admission, stream=other))
    assert h.try_begin(admission).status is h.POISONED


def test_calls_in_the_wrong_phase_change_nothing(h, T):
    """Scenario 65. And the request still finishes normally."""
    c = h.coordinator
    handle = h.begin(T(5))
    headroomed = [advance(901, 5)]
    h.refuses(c.finalize_prefill_publication, handle, headroomed)
    h.refuses(c.enqueue_prefill_captures, handle)
    h.refuses(h.prepare_decode, handle)
    h.refuses(c.complete_decode_step, handle, headroomed, ())
    h.refuses(h.begin_compaction, handle, [0])
    h.refuses(c.compact_batch, handle)

    assert c.prepare_prefill(handle) is h.OK
    h.refuses(c.prepare_prefill, handle)
    h.refuses(h.prepare_decode, handle)
    h.refuses(c.complete_decode_step, handle, headroomed, ())
    h.refuses(h.begin_compaction, handle, [0])
    h.refuses(c.compact_batch, handle)
    assert c.enqueue_prefill_captures(handle) is h.OK, "nothing to capture, but legal"

    h.synchronize()
    assert c.finalize_prefill_publication(handle, headroomed) is h.OK
    h.refuses(c.prepare_prefill, handle)
    h.refuses(c.finalize_prefill_publication, handle, headroomed)
    h.refuses(c.enqueue_prefill_captures, handle)
    h.refuses(c.complete_decode_step, handle, [advance(902, 6)], ())
    h.refuses(c.compact_batch, handle)

    assert h.prepare_decode(handle).status is h.OK
    h.refuses(h.prepare_decode, handle)
    h.refuses(c.finalize_prefill_publication, handle, headroomed)
    h.refuses(h.begin_compaction, handle, [0])
    assert h.complete(handle, 902) is h.OK
    h.decode(handle, 903)
    assert h.finish(handle) is h.OK
    h.end_everything()


# ---- growth ------------------------------------------------------------


def test_a_decode_step_grows_the_row_and_uploads_it_once(h, T):
    """Scenario 66, first half: 9 positions need a third page."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    h.mark()
    assert h.prepare_decode(handle, 4).status is h.OK
    assert h.row(0) == [0, 1, 2, -1]
    assert h.log == ["upload_rows"]
    assert h.device_row(0) == [0, 1, 2, -1]
    assert handle.state == "decoding"


def test_a_step_without_growth_makes_no_device_call_and_is_decoding_all_the_same(h, T):
    """Scenario 66, second half: 6 positions fit into two pages."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    h.mark()
    assert h.prepare_decode(handle, 1).status is h.OK
    assert h.log == []
    assert h.row(0) == [0, 1, -1, -1]
    assert handle.state == "decoding"
    assert h.coordinator.execution_holder == handle.id


def test_a_drop_of_a_step_without_growth_still_drains(h, T):
    """Scenario 66, why it is decoding: the runtime has enqueued model work by then."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    assert h.prepare_decode(handle, 1).status is h.OK
    h.mark()
    h.drop(handle)
    assert h.log == ["drain", "upload_rows"]


def test_the_only_sequence_that_cannot_grow_is_finishing(harness, T):
    """Scenario 67."""
    h = harness(pages=2, enforce_min_pool=False)
    handle = h.begin(T(7))
    assert h.pages(handle) == [0, 1]
    h.run_prefill(handle)
    h.mark()
    result = h.prepare_decode(handle, 2)
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [0]
    assert list(result.refusal.too_long_slots) == []
    assert result.refusal.missing.base_kv_pages == 1
    assert handle.state == "finishing"
    assert h.coordinator.execution_holder is None
    assert h.pages(handle) == [0, 1]
    assert h.log == []
    h.refuses(h.begin_compaction, handle, [-1])
    h.refuses(h.prepare_decode, handle)
    assert h.finish(handle) is h.OK
    assert h.free() == [1]
    assert h.records() == {1: [0]}


def test_growth_that_is_refused_to_one_slot_leaves_the_others_their_request(harness, T):
    """Scenario 67b. The named slot can be retired, then the step succeeds."""
    h = harness(pages=5, enforce_min_pool=False)
    handle = h.begin_batch([T(7), T(5)])
    assert h.pages(handle, 0) == [0, 1]
    assert h.pages(handle, 1) == [2, 3]
    h.run_prefill(handle)
    assert h.free() == [4]
    before = h.dump()
    h.mark()
    result = h.prepare_decode(handle, 6)
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [0]
    assert list(result.refusal.too_long_slots) == []
    assert h.dump() == before
    assert h.log == []
    assert handle.state == "settled"

    h.compact(handle, [-1, 0])
    assert h.records() == {1: [0]}
    assert h.free() == [4, 1]
    assert h.prepare_decode(handle, 6).status is h.OK
    assert h.row(1) == [2, 3, 4, -1]


def test_a_slot_that_exceeds_its_row_is_named_as_too_long(h, T):
    """Scenario 67b for the row width (40.13): free pages do not help a slot whose row is full."""
    handle = h.begin_batch([T(7), T(5)])
    h.run_prefill(handle)
    before = h.dump()
    result = h.prepare_decode(handle, 10)
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [0]
    assert list(result.refusal.too_long_slots) == [0]
    assert h.dump() == before
    assert h.prepare_decode(handle, 9).status is h.OK


@pytest.mark.parametrize("headroom", [0, -1, 2**31 - 1])
def test_an_absurd_step_is_refused(h, T, headroom):
    """40.13: headroom is positive and its end fits int32."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    h.refuses(h.prepare_decode, handle, headroom)


# ---- compaction ------------------------------------------------------------


def batch_of_three(h, T):
    handle = h.begin_batch([T(5), T(6), T(7)])
    assert [h.pages(handle, slot) for slot in range(3)] == [[0, 1], [2, 3], [4, 5]]
    h.run_prefill(handle)
    h.set_device_lengths([5, 6, 7])
    return handle


def test_compaction_keeps_resident_rows_and_moves_only_lengths(h, T):
    """Scenario 68. A row never moves; the length vector does."""
    handle = batch_of_three(h, T)
    rows = [h.device_row(slot) for slot in range(3)]
    h.mark()
    assert h.begin_compaction(handle, [0, -1, 1]) is h.OK
    assert h.log == ["upload_mapping"]
    assert [h.row(slot) for slot in range(3)] == rows, "begin_batch_compaction clears no row"
    h.mark()
    assert h.coordinator.compact_batch(handle) is h.OK
    assert h.log == ["upload_rows", "compact_lengths", "drain"]
    assert h.row(1) == [-1, -1, -1, -1]
    assert [h.row(0), h.row(2)] == [rows[0], rows[2]]
    assert [h.device_row(slot) for slot in range(3)] == [rows[0], [-1] * 4, rows[2]]
    assert h.device_lengths(2) == [5, 7]
    assert h.free() == [6, 7, 8, 9, 10, 11, 2, 3]
    assert handle.state == "settled"
    assert h.cache_manager.active_batch_size == 2

    assert h.prepare_decode(handle, 4).status is h.OK
    assert h.row(0) == [0, 1, 6, -1]
    assert h.row(2) == [4, 5, 7, -1]
    assert h.seq(handle, 1).resident.slot == 2
    assert h.committed(handle, 1) == 7


def test_the_mapping_tensor_carries_the_mapping_to_the_runtime(h, T):
    """Scenario 68, 30.5: the caller's tensor receives old_to_new before compact_batch."""
    handle = batch_of_three(h, T)
    assert h.begin_compaction(handle, [0, -1, 1]) is h.OK
    h.synchronize()
    assert np.asarray(h.backend.to_host(h.mapping_device)).tolist()[:3] == [0, -1, 1]


@pytest.mark.parametrize(
    ("mapping", "new_batch"),
    [
        pytest.param([1, 0], 2, id="reordered"),
        pytest.param([0, 0], 1, id="one destination twice"),
        pytest.param([0, 2], 2, id="a gap"),
        pytest.param([1, -1], 1, id="does not start at 0"),
        pytest.param([0], 1, id="too short"),
        pytest.param([0, 1, 2], 3, id="too long"),
        pytest.param([0, -1], 2, id="new batch too large"),
        pytest.param([0, 1], 1, id="new batch too small"),
        pytest.param([-1, -2], 0, id="below -1"),
    ],
)
def test_an_illegal_mapping_is_refused_before_anything_is_enqueued(h, T, mapping, new_batch):
    """Scenario 69, the refused forms."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    h.refuses(h.begin_compaction, handle, mapping, new_batch)
    h.decode(handle, 903, 904)


def test_a_mapping_that_retires_nobody_is_legal(h, T):
    """Scenario 69, legal: [0, 1]."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    before = h.all_active()
    h.compact(handle, [0, 1])
    assert handle.state == "settled"
    assert h.all_active() == before
    h.decode(handle, 903, 904)


def test_a_mapping_that_retires_everybody_ends_in_finishing(h, T):
    """Scenario 69, legal: [-1, -1] with a new batch of 0."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    h.compact(handle, [-1, -1])
    assert handle.state == "finishing"
    assert h.coordinator.execution_holder is None
    assert h.all_active() == {}
    h.refuses(h.prepare_decode, handle)
    h.mark()
    assert h.finish(handle) is h.OK
    assert "drain" not in h.log
    h.end_everything()


def test_leases_leave_only_after_the_drain_of_the_compaction(h, T):
    """Scenario 70. The device may read the retired pages until the drain returns."""
    handle = batch_of_three(h, T)
    assert h.begin_compaction(handle, [0, -1, 1]) is h.OK
    seen = []
    h.sync.before = lambda: seen.append((h.active(2), h.active(3), 2 in h.free(), 3 in h.free()))
    assert h.coordinator.compact_batch(handle) is h.OK
    assert seen == [(1, 1, False, False)]
    assert (h.active(2), h.active(3)) == (0, 0)
    assert {2, 3} <= set(h.free())


def test_a_failed_drain_of_a_compaction_withholds_the_survivors_too(h, T):
    """Scenario 71."""
    handle = batch_of_three(h, T)
    assert h.begin_compaction(handle, [0, -1, 1]) is h.OK
    h.sync.fail = True
    assert h.coordinator.compact_batch(handle) is h.POISONED
    assert not handle.valid
    assert handle.state == "quarantined"
    assert h.coordinator.state == "poisoned"
    assert h.coordinator.execution_holder is None
    assert h.all_active() == dict.fromkeys(range(6), 1)
    assert h.try_begin([h.sequence_admission(T(5), ResidentRef(0, 9))]).status is h.POISONED

    h.sync.fail = False
    h.mark()
    assert h.coordinator.shutdown() is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert [h.device_row(slot) for slot in range(3)] == [[-1] * 4] * 3
    assert h.all_active() == {}
    assert sorted(h.free()) == list(range(1, 12)), "page 0 stays cached"


# ---- slots of a step ------------------------------------------------------------


def test_a_cancelled_slot_holds_and_keeps_its_ledger(h, T):
    """Scenario 72. The right concrete length without a token is not a hold."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    complete = h.coordinator.complete_decode_step
    h.refuses(complete, handle, [advance((), 5), advance(903, 7)], ())
    assert complete(handle, [h.HOLD, advance(903, 7)], ()) is h.OK
    assert (h.committed(handle, 0), h.seq(handle, 0).token_count) == (5, 6)
    assert (h.committed(handle, 1), h.seq(handle, 1).token_count) == (7, 8)
    assert h.seq(handle, 1).token_ids.tolist() == [*T(6), 902, 903]


@pytest.mark.parametrize(
    "advances",
    [
        pytest.param([advance(903, 6)], id="one advance of two"),
        pytest.param([advance(903, 7), advance(904, 7)], id="two positions for one token"),
        pytest.param([advance(903, 5), advance(904, 7)], id="no position for a token"),
        pytest.param([advance((903, 905), 7), advance(904, 7)], id="two tokens"),
    ],
)
def test_a_step_of_the_wrong_shape_changes_nothing(h, T, advances):
    """Scenario 72 and 40.18: one token, one position."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.refuses(h.coordinator.complete_decode_step, handle, advances, ())
    h.refuses(h.coordinator.complete_decode_step, handle, [advance(903, 6), advance(904, 7)], (), [6, 7])
    assert h.complete(handle, 903, 904) is h.OK


@pytest.mark.parametrize("completed", [[0, 0], [5], [2], [-1]])
def test_an_invalid_completed_slot_does_not_advance_the_ledger(h, T, completed):
    """Scenario 73. The corrected call succeeds."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    advances = [advance(903, 6), advance(904, 7)]
    h.refuses(h.coordinator.complete_decode_step, handle, advances, completed)
    assert h.coordinator.complete_decode_step(handle, advances, [0]) is h.OK
    assert [h.committed(handle, slot) for slot in (0, 1)] == [6, 7]


def test_completed_slots_may_be_an_array(h, T):
    """Scenario 73, 40.1: slot lists may be int32 arrays."""
    handle = h.begin_batch([T(5), T(7)])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    assert h.coordinator.complete_decode_step(handle, [advance(903, 6), advance(904, 8)], ints([1])) is h.OK
    assert h.seq(handle, 1).published_full_block_count == 2


def test_a_terminal_slot_holds_until_it_is_retired(h, T):
    """Scenario 73b. It takes no token, is not completed twice and asks for no growth."""
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    h.decode(handle, 903, 904, completed=[0])
    assert h.prepare_decode(handle, 5).status is h.OK
    assert h.pages(handle, 0) == [0, 1], "a terminal slot needs no page"
    assert len(h.pages(handle, 1)) == 3
    complete = h.coordinator.complete_decode_step
    h.refuses(complete, handle, [advance(905, 7), advance(906, 8)], ())
    h.refuses(complete, handle, [h.HOLD, advance(906, 8)], [0])
    assert complete(handle, [h.HOLD, advance(906, 8)], ()) is h.OK
    assert [h.committed(handle, slot) for slot in (0, 1)] == [6, 8]
    h.compact(handle, [-1, 0])
    assert h.seq(handle, 0).resident.slot == 1
    h.decode(handle, 907)
