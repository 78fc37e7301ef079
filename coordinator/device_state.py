"""Device memory that is indexed by page and by batch position: the K/V pools and the length vector.

``HybridCacheManager`` is borrowed from the runtime and outlives the coordinator. ``DeviceFace`` is what the rows of a
lifecycle see of it: one verb per action, every host input in a staging buffer of its own use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from context_cache.backends.base import Backend, DeviceArray, DrainResult, Stream, Synchronizer, drain_with
from context_cache.backends.staging import StagingRing
from context_cache.coordinator.config import DeploymentConfig, validate_deployment, validate_pool
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.page_table import KVPageTable

__all__ = ["ContextCachePhysicalResources", "DeviceFace", "HybridCacheManager", "allocate_resources"]

Int32Array = npt.NDArray[np.int32]


class HybridCacheManager:
    """K/V pools per owning attention layer, the device length vector, and how many sequences it describes.

    kv_pools: per layer ``[2, num_pages, page_size, kv_heads, head_dim]`` (all K pages, then all V pages); a layer that
              borrows another layer's K/V shares its array.
    """

    def __init__(self, *, deployment: DeploymentConfig, num_pages: int, backend: Backend) -> None:
        validate_deployment(deployment)
        validate_pool(deployment, num_pages)
        self.max_batch, self.num_pages, self.page_size = deployment.max_batch, num_pages, deployment.page_size
        self._backend = backend
        self._active = 0
        self.kv_pools: list[DeviceArray] = []
        dtype = "float16" if deployment.kv_itemsize == 2 else "uint8"
        for layer in deployment.layers:
            shape = (2, num_pages, deployment.page_size, layer.kv_heads, layer.head_dim)
            self.kv_pools.append(backend.array(shape, dtype) if layer.kv_donor is None else None)
        for index, layer in enumerate(deployment.layers):
            if layer.kv_donor is not None:
                self.kv_pools[index] = self.kv_pools[layer.kv_donor]
        self.lengths: DeviceArray = backend.array((self.max_batch,), "int32")

    @property
    def active_batch_size(self) -> int:
        """How many sequences the device length vector describes; host view."""
        return self._active

    def set_active_batch_size(self, size: int) -> None:
        """Host view only. Raises ContractViolation outside 0..max_batch."""
        if not 0 <= size <= self.max_batch:
            raise ContractViolation(f"active batch size {size} is outside 0..{self.max_batch}", size=size)
        self._active = size

    def reset_for_new_sequences(self, staged_lengths: Int32Array, stream: Stream) -> None:
        """Enqueue new lengths, int32[n] in staging memory; n becomes the active batch size."""
        self._backend.reset_lengths(self.lengths, staged_lengths, stream)
        self.set_active_batch_size(staged_lengths.size)

    def compact_kv_cache_lengths(self, mapping: DeviceArray, old_size: int, new_size: int, stream: Stream) -> None:
        """Enqueue the in-place compaction of the lengths. Raises ContractViolation for another size than the active."""
        if old_size != self._active:
            raise ContractViolation(f"compaction from {old_size} sequences, but {self._active} are active")
        self._backend.compact_lengths(self.lengths, mapping, old_size, stream)
        self.set_active_batch_size(new_size)

    def materialize_execution_lengths(self, source: DeviceArray, count: int, stream: Stream) -> None:
        """For the runtime: enqueue ``lengths[:count] = source[:count]``, int32 device arrays, and set the active batch.

        For instance after a joiner was appended to the runtime's batch. Raises ContractViolation outside 0..max_batch.
        """
        self.set_active_batch_size(count)
        self._backend.copy_lengths(self.lengths, source, count, stream)

    def commit_sequence_length(self, increments: DeviceArray | int, stream: Stream) -> None:
        """For the runtime: enqueue ``lengths[:active] += increments``, one number or a device array, after a step."""
        self._backend.add_lengths(self.lengths, increments, self._active, stream)

    def device_lengths(self) -> npt.NDArray[Any]:
        """A host copy of the whole device vector, int32[max_batch]. The caller has synchronised the stream."""
        return self._backend.to_host(self.lengths)


@frozen
class ContextCachePhysicalResources:
    """What the coordinator borrows. Both must outlive it."""

    base_cache: HybridCacheManager
    base_page_table: KVPageTable


def allocate_resources(deployment: DeploymentConfig, num_pages: int, backend: Backend) -> ContextCachePhysicalResources:
    """K/V pools, length vector and page table for a deployment. Raises ContractViolation as validation does."""
    cache = HybridCacheManager(deployment=deployment, num_pages=num_pages, backend=backend)
    table = KVPageTable(
        max_batch=deployment.max_batch,
        max_pages_per_seq=deployment.row_pages,
        num_pages=num_pages,
        backend=backend,
    )
    return ContextCachePhysicalResources(cache, table)


class DeviceFace:
    """The verbs of ``LifecycleDevice`` over one cache, one table and one stream."""

    def __init__(
        self,
        backend: Backend,
        resources: ContextCachePhysicalResources,
        stream: Stream,
        synchronizer: Synchronizer,
        drain_timeout: float | None,
    ) -> None:
        self._backend = backend
        self._cache = resources.base_cache
        self._table = resources.base_page_table
        self._stream = stream
        self._synchronizer = synchronizer
        self._drain_timeout = drain_timeout
        batch = self._cache.max_batch
        self._lengths: StagingRing[Int32Array] = StagingRing(backend, lambda: backend.pinned((batch,), "int32"))
        self._mappings: StagingRing[Int32Array] = StagingRing(backend, lambda: backend.pinned((batch,), "int32"))

    def upload_base_rows(self) -> bool:
        return self._table.upload(self._stream)

    def reset_base_lengths(self, lengths: Int32Array) -> bool:
        use = self._lengths.take()
        try:
            staged = use.buffer[: lengths.size]
            staged[:] = lengths
            self._cache.reset_for_new_sequences(staged, self._stream)
        finally:
            self._lengths.commit(use, self._stream)
        return True

    def install_base_lengths(self, lengths: Int32Array) -> bool:
        return self.reset_base_lengths(lengths)

    def compact_base_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        self._cache.compact_kv_cache_lengths(mapping, old_size, new_size, self._stream)
        return True

    def copy_mapping(self, mapping: Int32Array, tensor: DeviceArray) -> bool:
        use = self._mappings.take()
        try:
            staged = use.buffer[: mapping.size]
            staged[:] = mapping
            self._backend.upload_mapping(tensor, staged, self._stream)
        finally:
            self._mappings.commit(use, self._stream)
        return True

    def clear_resident_state(self, slots: tuple[int, ...]) -> bool:
        # Attention-only models keep no state per resident slot outside the page table.
        return False

    def drain(self) -> DrainResult:
        result = drain_with(self._synchronizer, self._stream, self._drain_timeout)
        if result.ok:
            for ring in (self._lengths, self._mappings):
                ring.drained()
            self._table.drained()
        return result
