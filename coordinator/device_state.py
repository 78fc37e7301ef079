"""Device memory that is indexed by page, by resident slot and by batch position: the K/V pools, the recurrent state and
the length vector.

``HybridCacheManager`` is borrowed from the runtime and outlives the coordinator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from context_cache.backends.base import Backend, DeviceArray, Stream
from context_cache.coordinator.arguments import as_index
from context_cache.coordinator.config import DeploymentConfig, validate_deployment, validate_pool
from context_cache.coordinator.deployment import LayerKind, storage_dtype
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.page_table import KVPageTable

__all__ = ["ContextCachePhysicalResources", "HybridCacheManager", "allocate_resources"]

Int32Array = npt.NDArray[np.int32]


class HybridCacheManager:
    """K/V pools, recurrent state, the device length vector, and how many sequences that describes. One per model.

    kv_pools:         per attention layer, in order, ``[2, num_pages, page_size, kv_heads, head_dim]``: all K pages,
                      then all V pages. A layer that borrows another layer's K/V shares its array.
    recurrent_states: per recurrent layer, in order, ``[max_batch, heads, head_dim, state]``, rows by resident slot.
    conv_states:      per recurrent layer, in order, ``[max_batch, conv_dim, conv_kernel]``, rows by resident slot.
    lengths:          int32 ``[max_batch]``, by batch position.

    deployment: validated here.
    num_pages:  size of the pool; 0 for a pure recurrent deployment, which has no pools.
    draft:      build the draft's part: pools of ``spec_config.draft_layers``; a draft has no recurrent state.

    Raises ContractViolation as validation does, and for a draft that has no K/V of its own.
    """

    def __init__(self, *, deployment: DeploymentConfig, num_pages: int, backend: Backend, draft: bool = False) -> None:
        profile = validate_deployment(deployment)
        if draft and not profile.paged_spec:
            raise ContractViolation(
                "this deployment has no draft with K/V of its own; build a draft cache only for a spec_config whose "
                "draft has pages"
            )
        validate_pool(deployment, num_pages, draft=draft)
        self.max_batch, self.num_pages, self.page_size = deployment.max_batch, num_pages, deployment.page_size
        self._backend = backend
        self._active = 0
        layers = deployment.draft_layers if draft else deployment.layers
        dtype = storage_dtype(deployment.kv_dtype)
        pools: dict[int, DeviceArray] = {
            index: backend.array((2, num_pages, *layer.page_shape(deployment.page_size)), dtype)
            for index, layer in enumerate(layers)
            if layer.owns_kv
        }
        self.kv_pools: list[DeviceArray] = [
            pools[index if layer.kv_donor is None else layer.kv_donor]
            for index, layer in enumerate(layers)
            if layer.kind is LayerKind.ATTENTION
        ]
        recurrent = () if draft else deployment.recurrent_layers
        self.recurrent_states: list[DeviceArray] = [
            backend.array((self.max_batch, *layer.state_shape), storage_dtype(layer.state_dtype)) for layer in recurrent
        ]
        self.conv_states: list[DeviceArray] = [
            backend.array((self.max_batch, *layer.conv_shape), storage_dtype(layer.conv_dtype)) for layer in recurrent
        ]
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

    def clear_resident_slot(self, slot: int, stream: Stream) -> bool:
        """Enqueue zeroes for that row of every recurrent and convolution tensor.

        False, and no device call, without recurrent layers. Raises ContractViolation outside 0..max_batch - 1.
        """
        slot = as_index(slot, "resident slot")
        if not 0 <= slot < self.max_batch:
            raise ContractViolation(f"resident slot {slot} is outside 0..{self.max_batch - 1}", slot=slot)
        if not self.recurrent_states:
            return False
        self._backend.clear_resident_row((*self.recurrent_states, *self.conv_states), slot, stream)
        return True

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
    """What the coordinator borrows; it must outlive it.

    base_cache:       K/V pools, recurrent state and lengths of the base model.
    base_page_table:  its page table; None for a pure recurrent deployment, and only there.
    draft_cache, draft_page_table: the draft's, if the draft has K/V of its own; else None.
    """

    base_cache: HybridCacheManager
    # Typed as present, because every flavour but one has it; that one never holds a page to name in a row.
    base_page_table: KVPageTable = field(default=None)
    draft_cache: HybridCacheManager | None = None
    draft_page_table: KVPageTable | None = None


def allocate_resources(
    deployment: DeploymentConfig, num_pages: int, backend: Backend, draft_pages: int | None = None
) -> ContextCachePhysicalResources:
    """Pools, recurrent state, length vectors and page tables for a deployment of any flavour.

    num_pages:   base pool, in pages; 0 for a pure recurrent deployment, which gets no page table.
    draft_pages: the draft's pool, in pages; None: as many as the base's, if the draft has K/V of its own.

    Raises ContractViolation as validation does, and for draft pages that no draft would use.
    """
    profile = validate_deployment(deployment)
    if draft_pages is not None and not profile.paged_spec:
        raise ContractViolation(
            f"draft_pages is {draft_pages}, but this deployment has no draft with K/V of its own; leave it out",
            draft_pages=draft_pages,
        )
    cache = HybridCacheManager(deployment=deployment, num_pages=num_pages, backend=backend)
    if not profile.has_attention:
        return ContextCachePhysicalResources(cache)
    table = _page_table(deployment, num_pages, backend)
    if not profile.paged_spec:
        return ContextCachePhysicalResources(cache, table)
    pages = num_pages if draft_pages is None else draft_pages
    draft_cache = HybridCacheManager(deployment=deployment, num_pages=pages, backend=backend, draft=True)
    return ContextCachePhysicalResources(cache, table, draft_cache, _page_table(deployment, pages, backend))


def _page_table(deployment: DeploymentConfig, num_pages: int, backend: Backend) -> KVPageTable:
    return KVPageTable(
        max_batch=deployment.max_batch,
        max_pages_per_seq=deployment.row_pages,
        num_pages=num_pages,
        backend=backend,
    )
