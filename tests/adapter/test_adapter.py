"""The thin facade: what a runtime knows becomes what the coordinator takes, and misuse is refused before it."""

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import (
    AdmitOutcome,
    ContextCacheBatchAdmission,
    ContextCacheRequest,
    ContextCacheSequenceAdmission,
    ContractViolation,
    DecodingKvHeadroom,
    LookupPolicy,
    ResidentRef,
    Status,
)
from context_cache.coordinator.adapter import FinishReason, RuntimeSequence

ONE = DecodingKvHeadroom(1)


def i32(*values):
    return np.array(values, np.int32)


def u8(*values):
    return np.array(values, np.uint8)


@pytest.fixture
def begin(h, T):
    """begin(lengths, ...) -> a running adapter whose prefill has ended with token 901 for each slot."""

    def make(*lengths, seen=None, run=True):
        admission = ContextCacheBatchAdmission(
            [ContextCacheSequenceAdmission(T(n), resident=h.ref(slot)) for slot, n in enumerate(lengths)]
        )
        outcome, request = ContextCacheRequest.begin(
            h.coordinator, admission, headroom=ONE, mapping_tensor=h.mapping_tensor(),
            compact_runtime=None if seen is None else lambda mapping: seen.append(mapping.tolist()),
        )  # fmt: skip
        assert outcome is AdmitOutcome.ADMITTED
        h.handles.append(request.handle)
        if run:
            request.prepare_prefill()
            h.synchronize()
            request.complete_prefill(i32(*[901] * len(lengths)))
        return request

    return make


def test_a_step_with_one_token_each_advances_every_slot(h, begin):
    request = begin(5, 6)
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(902, 903))
    assert request.lengths.tolist() == [7, 8]
    assert [h.committed(request.handle, slot) for slot in (0, 1)] == [6, 7]


def test_slots_that_ended_normally_are_published_and_hold_from_then_on(h, begin):
    request = begin(7, 5)
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(902, 903), i32(1, 1), u8(FinishReason.ENDED, FinishReason.RUNNING))
    assert h.coordinator.sequence(request.handle, 0).state == "terminal"
    assert len(h.records()) == 2
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(904), i32(0, 1))
    assert request.lengths.tolist() == [9, 8]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_cancelled_slot_without_a_token_holds_and_is_not_published(h, begin, reason):
    request = begin(7, 5)
    before = h.records()
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(903), i32(0, 1), u8(reason, FinishReason.RUNNING))
    assert h.committed(request.handle, 0) == 7
    assert h.coordinator.sequence(request.handle, 0).state == "seated"
    assert h.records() == before


def test_a_slot_that_ended_normally_must_bring_a_token(h, begin):
    request = begin(7, 5)
    request.prepare_decode_step(ONE)
    with pytest.raises(ContractViolation, match="slot 0 ended normally without a token"):
        request.complete_decode_step(i32(903), i32(0, 1), u8(FinishReason.ENDED, FinishReason.RUNNING))
    request.complete_decode_step(i32(902, 903))


def test_publishable_overrides_which_slots_are_published(h, begin):
    request = begin(7, 5)
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(902, 903), publishable=[0])
    assert h.coordinator.sequence(request.handle, 0).state == "terminal"


def test_compaction_maps_the_runtime_and_the_prefill_starts(h, begin):
    seen = []
    request = begin(5, 6, 7, seen=seen)
    request.prefill_starts = [10, 11, 12]
    mapping = request.compact(np.array([True, False, True]))
    assert mapping.tolist() == [0, -1, 1]
    assert seen == [[0, -1, 1]]
    assert request.prefill_starts == [10, 12]
    assert request.lengths.tolist() == [6, 8]


def test_a_refused_growth_ends_the_named_slots_and_goes_on_with_the_others(harness, T):
    """40.19 [D]. Pool of 5 pages: slot 0 does not fit, leaves as an error, the step is prepared for slot 1."""
    h = harness(pages=5, enforce_min_pool=False)
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(T(n), resident=h.ref(slot)) for slot, n in enumerate((7, 5))]
    )
    _, request = ContextCacheRequest.begin(h.coordinator, admission, headroom=ONE, mapping_tensor=h.mapping_tensor())
    h.handles.append(request.handle)
    request.prepare_prefill()
    h.synchronize()
    request.complete_prefill(i32(901, 901))
    step = request.prepare_decode_step(DecodingKvHeadroom(6))
    assert step.ended == (0,)
    assert step.old_to_new == (-1, 0)
    assert not step.empty
    request.complete_decode_step(i32(902))
    assert request.batch_size == 1


def test_the_only_slot_that_cannot_grow_leaves_nobody_to_decode(harness, T):
    h = harness(pages=2, enforce_min_pool=False)
    admission = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(7), resident=h.ref(0))])
    _, request = ContextCacheRequest.begin(h.coordinator, admission, headroom=ONE, mapping_tensor=h.mapping_tensor())
    h.handles.append(request.handle)
    request.prepare_prefill()
    h.synchronize()
    request.complete_prefill(i32(901))
    step = request.prepare_decode_step(DecodingKvHeadroom(2))
    assert step.empty
    assert request.handle.phase == "finishing"
    assert request.finish() is Status.OK


def test_a_joiner_is_admitted_seated_and_decoded(h, begin, T):
    request = begin(8)
    joiner = ContextCacheSequenceAdmission([*T(8), 701], resident=h.ref(2))
    assert request.admit(joiner, ONE) is AdmitOutcome.ADMITTED
    assert request.prefill_starts == [0, 8]
    h.seat(2)
    assert request.complete_admission(1, 702)
    request.prepare_decode_step(ONE)
    request.complete_decode_step(i32(903, 703))
    assert request.lengths.tolist() == [10, 11]


def test_a_joiner_can_be_retracted(h, begin, T):
    request = begin(8)
    request.admit(ContextCacheSequenceAdmission([*T(8), 701], resident=h.ref(2)), ONE)
    assert request.retract()
    assert request.prefill_starts == [0]
    assert request.batch_size == 1
    assert not request.retract()


def test_no_capacity_and_poison_are_told_apart(harness, T):
    h = harness(pages=3, enforce_min_pool=False)
    sequences = [ContextCacheSequenceAdmission(T(n), resident=h.ref(slot)) for slot, n in enumerate((5, 9))]
    outcome, request = ContextCacheRequest.begin(
        h.coordinator, ContextCacheBatchAdmission(sequences), headroom=ONE, mapping_tensor=h.mapping_tensor()
    )
    assert (outcome, request) == (AdmitOutcome.NO_CAPACITY, None)
    h.poison(1)
    outcome, request = ContextCacheRequest.begin(
        h.coordinator, ContextCacheBatchAdmission(sequences[:1]), headroom=ONE, mapping_tensor=h.mapping_tensor()
    )
    assert (outcome, request) == (AdmitOutcome.FAILED, None)


def test_a_step_is_prepared_once_and_completed_once(h, begin):
    request = begin(5)
    with pytest.raises(ContractViolation, match="no decode step is prepared"):
        request.complete_decode_step(i32(902))
    request.prepare_decode_step(ONE)
    for misuse in (
        lambda: request.prepare_decode_step(ONE),
        request.finish,
        lambda: request.compact(np.array([True])),
        lambda: request.admit(ContextCacheSequenceAdmission([1], resident=h.ref(2)), ONE),
    ):
        with pytest.raises(ContractViolation, match="a decode step is prepared and not completed"):
            misuse()
    request.complete_decode_step(i32(902))
    with pytest.raises(ContractViolation, match="no decode step is prepared"):
        request.complete_decode_step(i32(903))


def test_a_step_whose_upload_failed_may_be_prepared_again(h, begin):
    request = begin(5)
    h.fail(1)
    with pytest.raises(DeviceError):
        request.prepare_decode_step(DecodingKvHeadroom(4))
    h.heal()
    request.prepare_decode_step(DecodingKvHeadroom(4))
    request.complete_decode_step(i32(902))


@pytest.mark.parametrize(
    "wish", [{"bypass": True}, {"media_readable": False}, {"wants_audio": True}, {"wants_hidden_states": True}]
)
def test_wishes_that_a_reused_prefix_cannot_serve_bypass(wish):
    sequence = RuntimeSequence(token_ids=[1, 2], resident=ResidentRef(0, 1), media=[None, b"m" * 16], **wish)
    admission = sequence.admission()
    assert admission.lookup_policy is LookupPolicy.BYPASS
    assert not admission.has_media


def test_an_ordinary_sequence_follows_the_batch_policy():
    admission = RuntimeSequence(token_ids=[1, 2], resident=ResidentRef(0, 1), media=[None, b"m" * 16]).admission()
    assert admission.lookup_policy is None
    assert admission.has_media


@pytest.mark.parametrize("sampled", [(), (1,), (1, 2, 3)])
def test_a_prefill_samples_one_token_per_slot(h, begin, sampled):
    request = begin(5, 6, run=False)
    request.prepare_prefill()
    h.synchronize()
    with pytest.raises(ContractViolation, match="tokens were sampled for 2 slots"):
        request.complete_prefill(i32(*sampled))
    request.complete_prefill(i32(1, 2))
