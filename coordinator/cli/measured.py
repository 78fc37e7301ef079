"""A coordinator that knows how long it took: the public calls of a run, each between two readings of the clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from context_cache.backends.base import Backend, DeviceArray, Int32Array, Stream
from context_cache.coordinator import (
    AdmitSequenceResult,
    BatchAdvance,
    BeginRequestResult,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    PrepareDecodeResult,
    RequestHandle,
    Status,
)
from context_cache.machines import Recorder

__all__ = ["MeasuredCoordinator"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MeasuredCoordinator(ContextCacheCoordinator):
    """Adds up the time inside the calls of a run. What a runtime or its adapter does between calls is not in it."""

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        resources: ContextCachePhysicalResources,
        *,
        backend: Backend,
        stream: Stream,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(config, deployment, resources, backend=backend, stream=stream, recorder=recorder)
        self._total_ns = 0
        self._prepare_ns = 0
        self._step_ns = array("q")

    @property
    def seconds(self) -> float:
        """Time inside all calls so far."""
        return self._total_ns / 1e9

    @property
    def step_nanoseconds(self) -> NDArray[np.int64]:
        """Prepare + complete of every decode step so far, int64[steps]."""
        return np.array(self._step_ns, dtype=np.int64)

    # The two calls of a decode step are timed in line: a step is short, and a helper would be a part of what it shows.

    def prepare_decode_step(self, request: RequestHandle, headroom: DecodingKvHeadroom) -> PrepareDecodeResult:
        before = perf_counter_ns()
        result = super().prepare_decode_step(request, headroom)
        self._prepare_ns = perf_counter_ns() - before
        self._total_ns += self._prepare_ns
        return result

    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: BatchAdvance | Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int] | Int32Array = (),
        common_state_lengths: Sequence[int] | Int32Array | None = None,
    ) -> Status:
        before = perf_counter_ns()
        status = super().complete_decode_step(request, advances, publishable_completed_slots, common_state_lengths)
        complete_ns = perf_counter_ns() - before
        self._total_ns += complete_ns
        self._step_ns.append(self._prepare_ns + complete_ns)
        return status

    def begin_request(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom, stream: Stream
    ) -> BeginRequestResult:
        return self._timed(super().begin_request, admission, headroom, stream)

    def prepare_prefill(self, request: RequestHandle) -> Status:
        return self._timed(super().prepare_prefill, request)

    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: BatchAdvance | Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | Int32Array | None = None,
    ) -> Status:
        return self._timed(super().finalize_prefill_publication, request, advances, common_state_lengths)

    def admit_sequence(
        self, request: RequestHandle, admission: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom
    ) -> AdmitSequenceResult:
        return self._timed(super().admit_sequence, request, admission, headroom)

    def finalize_sequence_admission(
        self, request: RequestHandle, slot: int, advance: ContextCacheSequenceAdvance
    ) -> Status:
        return self._timed(super().finalize_sequence_admission, request, slot, advance)

    def begin_batch_compaction(
        self,
        request: RequestHandle,
        old_to_new: Sequence[int] | Int32Array,
        new_batch_size: int,
        device_batch_mapping: DeviceArray,
    ) -> Status:
        return self._timed(
            super().begin_batch_compaction, request, old_to_new, new_batch_size, device_batch_mapping
        )

    def compact_batch(self, request: RequestHandle) -> Status:
        return self._timed(super().compact_batch, request)

    def finish(self, request: RequestHandle) -> Status:
        return self._timed(super().finish, request)

    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        return self._timed(super().enqueue_prefill_captures, request)

    def publish_hybrid_mtp_endpoint(
        self, request: RequestHandle, slot: int, resident_length: int, base_hidden: DeviceArray, boundary_row: int
    ) -> Status:
        return self._timed(
            super().publish_hybrid_mtp_endpoint, request, slot, resident_length, base_hidden, boundary_row
        )

    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden: DeviceArray, destination_row: int
    ) -> Status:
        return self._timed(
            super().restore_hybrid_mtp_boundary_hidden, request, slot, base_hidden, destination_row
        )

    def shutdown(self) -> Status:
        return self._timed(super().shutdown)

    def _timed(self, call: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
        before = perf_counter_ns()
        try:
            return call(*arguments, **options)
        finally:
            self._total_ns += perf_counter_ns() - before
