"""Speculative batches through the adapter: several tokens a slot, and common lengths that follow a round behind."""

import numpy as np
import pytest

from context_cache.backends import DeviceError, HostBackend
from context_cache.coordinator import (
    AdmitOutcome,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheRequest,
    ContextCacheSequenceAdmission,
    ContractViolation,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentRef,
    SpecCommonStateTracker,
    SpecConfig,
    SpecMode,
    allocate_resources,
)
from context_cache.coordinator.adapter import FinishReason

LAYER = LayerGeometry.attention(kv_heads=1, head_dim=4)


def i32(*values):
    return np.array(values, np.int32)


def u8(*values):
    return np.array(values, np.uint8)


# The tracker


def test_common_starts_at_the_input_and_lags_by_one_round():
    tracker = SpecCommonStateTracker([5, 9])
    assert tracker.lengths.tolist() == [5, 9]  # the first round reports the input
    tracker.record([3, 1])
    assert tracker.lengths.tolist() == [8, 10]
    tracker.record(i32(0, 4))
    assert tracker.lengths.tolist() == [8, 14]


@pytest.mark.parametrize("pruned", [2, [2, 2], np.int32(2)])
def test_pruned_tokens_are_not_common(pruned):
    assert SpecCommonStateTracker(i32(5, 9), pruned).lengths.tolist() == [3, 7]


def test_the_tracker_follows_a_compaction():
    tracker = SpecCommonStateTracker([5, 9, 2, 7])
    tracker.compact([-1, 0, -1, 1])
    assert tracker.lengths.tolist() == [9, 7]
    tracker.record([1, 1])
    tracker.compact(i32(-1, -1))
    assert tracker.lengths.tolist() == []


def test_the_lengths_are_a_copy_of_int32():
    tracker = SpecCommonStateTracker([5])
    tracker.lengths[0] = 99
    assert tracker.lengths.tolist() == [5]
    assert tracker.lengths.dtype == np.int32


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: SpecCommonStateTracker([5, 9], [1]),
        lambda: SpecCommonStateTracker([5, 9], 6),
        lambda: SpecCommonStateTracker([5], -1),
        lambda: SpecCommonStateTracker([5.5]),
        lambda: SpecCommonStateTracker([5, 9]).record([1]),
        lambda: SpecCommonStateTracker([5, 9]).record([1, -1]),
        lambda: SpecCommonStateTracker([5, 9]).compact([0]),
        lambda: SpecCommonStateTracker([5, 9]).compact([1, 0]),
        lambda: SpecCommonStateTracker([5, 9]).compact([0, 2]),
    ],
)
def test_misuse_of_the_tracker_is_refused(misuse):
    with pytest.raises(ContractViolation):
        misuse()


# The adapter


class Runtime:
    """A speculative coordinator, and adapters over it."""

    def __init__(self, mode, *, pages=32):
        self.backend = HostBackend()
        self.stream = self.backend.new_stream()
        self.paged = mode is not SpecMode.SHARED_KV
        deployment = DeploymentConfig(
            max_batch=3, kv_capacity_tokens=32, page_size=4, layers=(LAYER,), enforce_min_pool=False,
            spec_config=SpecConfig(mode=mode, draft_layers=(LAYER,) if self.paged else (), verify_size=4, steps=3),
        )  # fmt: skip
        self.resources = allocate_resources(deployment, pages, self.backend)
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True), deployment, self.resources, backend=self.backend, stream=self.stream
        )
        self.headroom = DecodingKvHeadroom(4, 4 if self.paged else 0)
        self.mapping = self.backend.array((3,), "int32")
        self.requests = []

    def close(self):
        for request in self.requests:
            request.handle.close()
        self.coordinator.close()

    def begin(self, *lengths, speculative=True):
        sequences = [
            ContextCacheSequenceAdmission([100 * slot + n for n in range(length)], resident=ResidentRef(slot, 1))
            for slot, length in enumerate(lengths)
        ]
        headroom = self.headroom if speculative else DecodingKvHeadroom(1)
        outcome, request = ContextCacheRequest.begin(
            self.coordinator, ContextCacheBatchAdmission(sequences, speculative_request=speculative),
            headroom=headroom, mapping_tensor=self.mapping,
        )  # fmt: skip
        assert outcome is AdmitOutcome.ADMITTED
        self.requests.append(request)
        request.prepare_prefill()
        self.backend.synchronize(self.stream)
        request.complete_prefill(i32(*[900] * len(lengths)))
        return request

    def common(self, request):
        slots = range(request.batch_size)
        return [self.coordinator.sequence(request.handle, slot).common_state_length for slot in slots]


@pytest.fixture
def runtime():
    made = []

    def make(mode, **options):
        made.append(Runtime(mode, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=[SpecMode.EAGLE, SpecMode.DFLASH])
def paged(request, runtime):
    return runtime(request.param)


def test_the_prompt_is_frozen_until_the_first_round(paged):
    request = paged.begin(9, 6)
    assert request.handle.state == "prefill_frozen"
    assert len(paged.coordinator.manager.records) == 0
    request.prepare_decode_step(paged.headroom)
    request.complete_decode_step(i32(1, 2, 3), i32(2, 1))
    assert request.handle.state == "settled"
    assert len(paged.coordinator.manager.records) == 2
    assert request.finish().name == "OK"


def test_several_tokens_a_slot_and_common_a_round_behind(paged):
    request = paged.begin(9, 6)
    request.prepare_decode_step(paged.headroom)
    request.complete_decode_step(i32(1, 2, 3, 4), i32(3, 1))
    assert request.lengths.tolist() == [13, 8]
    assert paged.common(request) == [9, 6]
    assert request.common_lengths.tolist() == [12, 7]
    request.prepare_decode_step(paged.headroom)
    request.complete_decode_step(i32(5, 6), i32(1, 1))
    assert paged.common(request) == [12, 7]


def test_a_slot_that_holds_keeps_its_common_length_and_goes_on(paged):
    request = paged.begin(9, 6)
    for counts, common in (((2, 1), [9, 6]), ((0, 3), [9, 7]), ((1, 1), [11, 10])):
        request.prepare_decode_step(paged.headroom)
        reasons = None if all(counts) else u8(FinishReason.CANCELLED, FinishReason.RUNNING)
        request.complete_decode_step(i32(*range(sum(counts))), i32(*counts), reasons)
        assert paged.common(request) == common


def test_the_tracker_is_compacted_with_the_batch(paged):
    request = paged.begin(9, 6, 7)
    request.prepare_decode_step(paged.headroom)
    request.complete_decode_step(i32(1, 2, 3, 4), i32(1, 1, 2), u8(FinishReason.ENDED, 0, 0))
    assert request.compact(np.array([False, True, True])).tolist() == [-1, 0, 1]
    assert request.common_lengths.tolist() == [7, 9]
    request.prepare_decode_step(paged.headroom)
    request.complete_decode_step(i32(1, 2))
    assert paged.common(request) == [7, 9]


def test_a_refused_completion_of_a_frozen_step_leaves_it_open(paged):
    request = paged.begin(9)
    request.prepare_decode_step(paged.headroom)
    with pytest.raises(ContractViolation):
        request.complete_decode_step(i32(*range(9)), i32(9))
    assert request.common_lengths.tolist() == [9]
    with pytest.raises(ContractViolation, match="prepared and not completed"):
        request.finish()
    request.complete_decode_step(i32(1, 2), i32(2))
    assert request.lengths.tolist() == [12]


def test_slots_that_get_no_pages_leave_a_frozen_batch(runtime):
    small = runtime(SpecMode.EAGLE, pages=9)
    request = small.begin(9, 9)
    request.prepare_decode_step(small.headroom)
    request.complete_decode_step(i32(*range(8)), i32(4, 4))
    prepared = request.prepare_decode_step(small.headroom)
    assert (prepared.ended, prepared.old_to_new, prepared.prepared) == ((1,), (0, -1), True)
    assert request.common_lengths.tolist() == [13]
    request.complete_decode_step(i32(5), i32(1))
    assert small.common(request) == [13]


def test_a_failed_upload_of_a_frozen_step_may_be_prepared_again(paged, monkeypatch):
    request = paged.begin(9)

    def fail(self, *arguments):
        raise DeviceError("upload_rows", "host", "on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(HostBackend, "upload_rows", fail)
        with pytest.raises(DeviceError):
            request.prepare_decode_step(DecodingKvHeadroom(8, 8))
    assert request.handle.state == "decode_retry_frozen"
    assert request.prepare_decode_step(DecodingKvHeadroom(8, 8)).prepared
    request.complete_decode_step(i32(1), i32(1))
    assert request.handle.state == "settled"


def test_shared_kv_needs_no_common_lengths(runtime):
    shared = runtime(SpecMode.SHARED_KV)
    request = shared.begin(9, 6)
    assert request.common_lengths is None
    request.prepare_decode_step(shared.headroom)
    request.complete_decode_step(i32(1, 2, 3), i32(2, 1))
    assert shared.common(request) == [11, 7]


def test_a_plain_request_of_a_speculative_deployment_tracks_nothing(paged):
    request = paged.begin(9, speculative=False)
    assert request.common_lengths is None
    request.prepare_decode_step(DecodingKvHeadroom(1))
    request.complete_decode_step(i32(1))
    assert request.lengths.tolist() == [11]
