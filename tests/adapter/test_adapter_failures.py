"""The facade keeps in step with the coordinator when a call of it fails half-way, and refuses what it cannot read."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import (
    AdmitOutcome,
    ContextCacheBatchAdmission,
    ContextCacheManager,
    ContextCacheRequest,
    ContextCacheSequenceAdmission,
    ContractViolation,
    DecodingKvHeadroom,
    InvariantViolation,
    ResourceDemand,
    Status,
    TokenStateContract,
)
from context_cache.coordinator.adapter import FinishReason
from context_cache.coordinator.testing import check_invariants

ONE = DecodingKvHeadroom(1)
SIX = DecodingKvHeadroom(6)
ERRORS = [ValueError, InvariantViolation, KeyboardInterrupt]


def i32(*values):
    return np.array(values, np.int32)


class Publishing(ContextCacheManager):
    """A manager that raises at the next publications while ``error`` is set."""

    error: BaseException | None = None

    def publish(self, lease, hashes, resident_length):
        if self.error is not None:
            raise self.error
        return super().publish(lease, hashes, resident_length)


def start(h, *lengths, contract=TokenStateContract.COMMITTED_PLUS_LOOKAHEAD, seen=None):
    """An admitted adapter; slot s has the tokens 100 s + 1, 100 s + 2, ..."""
    admission = ContextCacheBatchAdmission(
        [
            ContextCacheSequenceAdmission([100 * slot + token for token in h.T(n)], resident=h.ref(slot))
            for slot, n in enumerate(lengths)
        ],
        token_state_contract=contract,
    )
    outcome, request = ContextCacheRequest.begin(
        h.coordinator, admission, headroom=ONE, mapping_tensor=h.mapping_tensor(),
        compact_runtime=None if seen is None else lambda mapping: seen.append(mapping.tolist()),
    )  # fmt: skip
    assert outcome is AdmitOutcome.ADMITTED
    h.handles.append(request.handle)
    return request


def run(h, *lengths, seen=None):
    """The same, its prefill ended with the token 901 + s for slot s."""
    request = start(h, *lengths, seen=seen)
    request.prepare_prefill()
    h.synchronize()
    request.complete_prefill(i32(*[901 + slot for slot in range(len(lengths))]))
    return request


def in_step(h, request):
    """The adapter's lengths are the coordinator's."""
    assert request.batch_size == h.size(request.handle)
    assert request.lengths.tolist() == [h.seq(request.handle, slot).token_count for slot in range(request.batch_size)]
    check_invariants(h.coordinator)


@pytest.fixture
def publishing(harness):
    manager = Publishing(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    return harness(manager=manager), manager


@pytest.fixture
def small(harness):
    """A pool of 5 pages."""
    return harness(pages=5, enforce_min_pool=False)


# ---- publishing raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ERRORS)
def test_a_prefill_whose_publication_raised_has_ended(publishing, kind):
    h, manager = publishing
    request = start(h, 5, 6)
    request.prepare_prefill()
    h.synchronize()
    manager.error = kind("publishing")
    with pytest.raises(kind) as caught:
        request.complete_prefill(i32(901, 902))
    assert caught.value is manager.error
    manager.error = None
    in_step(h, request)
    assert request.lengths.tolist() == [6, 7]
    assert request.prepare_decode_step(ONE).prepared
    request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    h.end_everything()


def test_a_fully_committed_prefill_whose_publication_raised_has_ended(publishing):
    h, manager = publishing
    request = start(h, 5, contract=TokenStateContract.FULLY_COMMITTED)
    request.prepare_prefill()
    h.synchronize()
    manager.error = ValueError("publishing")
    with pytest.raises(ValueError, match="publishing"):
        request.complete_prefill()
    manager.error = None
    in_step(h, request)
    assert request.prepare_decode_step(DecodingKvHeadroom(3)).prepared
    request.complete_decode_step(i32(903, 904), i32(2))
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize(
    "named",
    [{"reasons": np.array([FinishReason.ENDED, FinishReason.RUNNING], np.uint8)}, {"publishable": [0]}],
    ids=["by reason", "by name"],
)
@pytest.mark.parametrize("kind", ERRORS)
def test_a_step_whose_publication_raised_has_ended(publishing, kind, named):
    h, manager = publishing
    request = run(h, 7, 5)
    request.prepare_decode_step(ONE)
    h.synchronize()
    manager.error = kind("publishing")
    with pytest.raises(kind) as caught:
        request.complete_decode_step(i32(903, 904), **named)
    assert caught.value is manager.error
    manager.error = None
    in_step(h, request)
    assert request.lengths.tolist() == [9, 7]
    with pytest.raises(ContractViolation, match="no decode step is prepared"):
        request.complete_decode_step(i32(905, 906))
    assert request.prepare_decode_step(ONE).prepared
    request.complete_decode_step(i32(905), i32(0, 1))
    in_step(h, request)
    assert request.lengths.tolist() == [9, 8]
    assert request.finish() is Status.OK
    h.end_everything()


@pytest.mark.parametrize("kind", ERRORS)
def test_a_joiner_whose_publication_raised_is_seated(publishing, kind):
    h, manager = publishing
    request = run(h, 5)
    joiner = ContextCacheSequenceAdmission([61, 62, 63, 64, 65], resident=h.ref(2))
    assert request.admit(joiner, ONE) is AdmitOutcome.ADMITTED
    h.seat(2)
    manager.error = kind("publishing")
    with pytest.raises(kind) as caught:
        request.complete_admission(1, 702)
    assert caught.value is manager.error
    manager.error = None
    in_step(h, request)
    assert request.lengths.tolist() == [6, 6]
    assert request.prepare_decode_step(ONE).prepared
    request.complete_decode_step(i32(902, 703))
    in_step(h, request)
    h.end_everything()


def test_a_refused_completion_leaves_the_step_open(h):
    request = run(h, 5, 6)
    request.prepare_decode_step(ONE)
    h.synchronize()
    for wrong in ((i32(903),), (i32(903, 904), i32(1, 2)), (i32(903, 904), None, None)):
        options = {"publishable": [7]} if len(wrong) == 3 else {}
        with pytest.raises(ContractViolation):
            request.complete_decode_step(*wrong, **options)
        in_step(h, request)
    request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    h.end_everything()


def test_a_refused_completion_of_an_admission_leaves_the_joiner(h):
    request = run(h, 5)
    assert request.admit(ContextCacheSequenceAdmission([61, 62], resident=h.ref(2)), ONE) is AdmitOutcome.ADMITTED
    h.seat(2)
    with pytest.raises(ContractViolation):
        request.complete_admission(0, 702)
    with pytest.raises(ContractViolation):
        request.complete_admission(1, 2**40)
    in_step(h, request)
    assert request.lengths.tolist() == [6, 2]
    assert request.complete_admission(1, 702)
    in_step(h, request)
    h.end_everything()


# ---- preparing for those that fit ------------------------------------------------------------------------------------


def verbs_of_a_preparation(harness):
    """How many verbs a refused growth has: those of the compaction, and the upload of the second preparation."""
    h = harness(pages=5, enforce_min_pool=False)
    request = run(h, 7, 5)
    h.mark()
    request.prepare_decode_step(SIX)
    return len([verb for verb in h.log if verb != "drain"])


@pytest.mark.parametrize("attempts", [1, 2])
def test_who_left_is_told_with_the_next_preparation_that_succeeds(harness, small, attempts):
    """The slot is gone from the batch, whether or not the upload for the others went through."""
    h, seen = small, []
    request = run(h, 7, 5, seen=seen)
    h.fail(verbs_of_a_preparation(harness))
    with pytest.raises(DeviceError):
        request.prepare_decode_step(SIX)
    for _ in range(attempts - 1):
        h.fail(1)
        with pytest.raises(DeviceError):
            request.prepare_decode_step(SIX)
    h.heal()
    assert request.handle.state == "decode_retry"
    assert seen == [[-1, 0]]
    in_step(h, request)
    step = request.prepare_decode_step(SIX)
    assert (step.ended, step.old_to_new) == ((0,), (-1, 0))
    assert step.refusal.failed_slots == (0,)
    assert (step.prepared, step.empty, step.poisoned) == (True, False, False)
    h.synchronize()
    request.complete_decode_step(i32(903))
    in_step(h, request)
    assert request.lengths.tolist() == [7]
    step = request.prepare_decode_step(ONE)
    assert (step.ended, step.old_to_new, step.refusal, step.prepared) == ((), None, None, True)
    request.complete_decode_step(i32(904))
    h.end_everything()


def test_who_left_is_told_after_a_refusal_in_between(harness):
    """Two remain, the second preparation fails, and a bolder one is refused: the leaver is not forgotten."""
    h = harness()
    request = run(h, 7, 5, 3)
    headroom = DecodingKvHeadroom(10)  # slot 0 would need a fifth page
    h.fail(4)
    with pytest.raises(DeviceError):
        request.prepare_decode_step(headroom)
    h.heal()
    assert request.handle.state == "decode_retry"
    assert request.batch_size == 2
    bolder = request.prepare_decode_step(DecodingKvHeadroom(16))
    assert (bolder.prepared, bolder.empty, bolder.poisoned) == (False, False, False)
    assert bolder.refusal is not None
    step = request.prepare_decode_step(ONE)
    assert (step.ended, step.old_to_new, step.prepared) == ((0,), (-1, 0, 1), True)
    request.complete_decode_step(i32(904, 905))
    in_step(h, request)
    h.end_everything()


def test_a_refusal_while_an_upload_is_incomplete_is_neither_prepared_nor_empty(small):
    h = small
    request = run(h, 7, 5)
    h.fail(1)
    with pytest.raises(DeviceError):
        request.prepare_decode_step(DecodingKvHeadroom(2))
    h.heal()
    assert request.handle.state == "decode_retry"
    step = request.prepare_decode_step(SIX)
    assert (step.prepared, step.empty, step.poisoned) == (False, False, False)
    assert (step.ended, step.old_to_new) == ((), None)
    assert step.refusal.failed_slots == (0, 1)
    assert request.handle.state == "decode_retry"
    with pytest.raises(ContractViolation, match="no decode step is prepared"):
        request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    step = request.prepare_decode_step(DecodingKvHeadroom(2))
    assert (step.ended, step.refusal, step.prepared) == ((), None, True)
    request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    h.end_everything()


def test_after_a_refusal_while_an_upload_is_incomplete_the_request_can_be_ended(small):
    h = small
    request = run(h, 7, 5)
    h.fail(1)
    with pytest.raises(DeviceError):
        request.prepare_decode_step(DecodingKvHeadroom(2))
    h.heal()
    request.prepare_decode_step(SIX)
    assert request.finish() is Status.OK
    assert h.all_active() == {}
    h.end_everything()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_preparation_that_was_interrupted_may_be_made_again(h, kind, monkeypatch):
    request = run(h, 5)

    def verb(name, stream, enqueue):
        raise error

    error = kind("in a verb")
    with monkeypatch.context() as patch:
        patch.setattr(h.backend, "verb", verb)
        with pytest.raises(kind) as caught:
            request.prepare_decode_step(DecodingKvHeadroom(5))
    assert caught.value is error
    assert request.handle.state == "decode_retry"
    in_step(h, request)
    assert request.prepare_decode_step(DecodingKvHeadroom(5)).prepared
    request.complete_decode_step(i32(902))
    in_step(h, request)
    h.end_everything()


# ---- arguments of the wrong kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [9, 2, -1, 1.0, "1", True, None, [1], np.array([1])])
def test_a_joiner_is_named_by_its_slot(h, slot):
    request = run(h, 5)
    request.admit(ContextCacheSequenceAdmission([61, 62], resident=h.ref(2)), ONE)
    h.seat(2)
    with pytest.raises(ContractViolation):
        request.complete_admission(slot, 702)
    in_step(h, request)
    assert request.complete_admission(np.int64(1), np.int32(702))
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize("sampled", [None, 1.0, "702", True, [702], np.array([702]), 2**31, 2**70])
def test_a_joiner_takes_one_token(h, sampled):
    request = run(h, 5)
    request.admit(ContextCacheSequenceAdmission([61, 62], resident=h.ref(2)), ONE)
    h.seat(2)
    with pytest.raises(ContractViolation):
        request.complete_admission(1, sampled)
    in_step(h, request)
    assert request.complete_admission(1, 702)
    h.end_everything()


@pytest.mark.parametrize(
    "keep",
    [[1, 0], [0, 1], np.array([1, 0]), [True], [True] * 3, True, None, 1, "ab", [[True, False]], [1.0, 0.0],
     np.array([True, False], object)],
)  # fmt: skip
def test_who_is_kept_is_said_with_one_bool_for_each(h, keep):
    """[0, 1] could be two flags or two slots, so it is neither."""
    seen = []
    request = run(h, 5, 6, seen=seen)
    with pytest.raises(ContractViolation):
        request.compact(keep)
    assert seen == []
    assert request.handle.state == "settled"
    in_step(h, request)
    assert request.compact([True, False]).tolist() == [0, -1]
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize("sampled", [None, 5, "ab", [1.0, 2.0], [True, False], [901, 2**40], [[901, 902]], [901, None]])
def test_the_sampled_tokens_of_a_prefill_are_integers(h, sampled):
    request = start(h, 5, 6)
    request.prepare_prefill()
    h.synchronize()
    with pytest.raises(ContractViolation):
        request.complete_prefill(sampled)
    assert request.handle.state == "prefilling"
    request.complete_prefill([901, 902])
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize(
    "value", [None, 5, "ab", [903, 904], (903, 904), np.array([903.0, 904.0]), np.array([True, False])]
)
def test_the_tokens_of_a_step_are_an_int32_array(h, value):
    request = run(h, 5, 6)
    request.prepare_decode_step(ONE)
    h.synchronize()
    with pytest.raises(ContractViolation):
        request.complete_decode_step(value)
    in_step(h, request)
    request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize("name", ["counts", "reasons", "publishable"])
@pytest.mark.parametrize("value", [5, "ab", [[1, 1]], [1, 1, 1], object()])
def test_what_else_a_step_is_told_is_refused_when_it_cannot_be_read(h, name, value):
    request = run(h, 5, 6)
    request.prepare_decode_step(ONE)
    h.synchronize()
    with pytest.raises(ContractViolation):
        request.complete_decode_step(i32(903, 904), **{name: value})
    in_step(h, request)
    request.complete_decode_step(i32(903, 904))
    in_step(h, request)
    h.end_everything()


@pytest.mark.parametrize("name", ["counts", "reasons", "publishable"])
@pytest.mark.parametrize("value", [[1.5, 1.0], [None, None]])
def test_what_else_a_step_is_told_is_made_of_integers(h, name, value):
    request = run(h, 5, 6)
    request.prepare_decode_step(ONE)
    h.synchronize()
    with pytest.raises(ContractViolation):
        request.complete_decode_step(i32(903, 904), **{name: value})
    in_step(h, request)
    h.end_everything()


def test_a_completed_admission_cannot_be_completed_again(h):
    request = run(h, 5)
    request.admit(ContextCacheSequenceAdmission([61, 62], resident=h.ref(2)), ONE)
    h.seat(2)
    assert request.complete_admission(1, 702)
    with pytest.raises(ContractViolation):
        request.complete_admission(1, 703)
    in_step(h, request)
    assert request.lengths.tolist() == [6, 3]
    h.end_everything()
