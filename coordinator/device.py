"""What the rows of a lifecycle see of the device: one verb per action, over the caches, tables and snapshots of one
coordinator. Every host input is copied into a staging buffer of its own use before the verb is called."""

from __future__ import annotations

from context_cache.backends.base import (
    Backend,
    DeviceArray,
    DrainResult,
    HiddenCopy,
    SnapshotCopies,
    Stream,
    Synchronizer,
    drain_with,
)
from context_cache.backends.staging import StagingRing
from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.device_state import ContextCachePhysicalResources, HybridCacheManager
from context_cache.coordinator.snapshots import HybridSnapshotStorage

__all__ = ["DeviceFace"]


class DeviceFace:
    """The verbs of ``LifecycleDevice``. Actions return whether anything was enqueued.

    snapshots: storage of a checkpoint deployment, else None.
    """

    def __init__(
        self,
        backend: Backend,
        resources: ContextCachePhysicalResources,
        snapshots: HybridSnapshotStorage | None,
        stream: Stream,
        synchronizer: Synchronizer,
        drain_timeout: float | None,
    ) -> None:
        self._backend = backend
        self._cache, self._draft_cache = resources.base_cache, resources.draft_cache
        self._table, self._draft_table = resources.base_page_table, resources.draft_page_table
        self._snapshots = snapshots
        self._stream = stream
        self._synchronizer = synchronizer
        self._drain_timeout = drain_timeout
        batch = self._cache.max_batch
        self._lengths: StagingRing[Int32Array] = StagingRing(backend, lambda: backend.pinned((batch,), "int32"))
        self._mappings: StagingRing[Int32Array] = StagingRing(backend, lambda: backend.pinned((batch,), "int32"))

    def upload_base_rows(self) -> bool:
        # A pure recurrent deployment has no page table.
        return self._table is not None and self._table.upload(self._stream)

    def upload_draft_rows(self) -> bool:
        return self._draft_table is not None and self._draft_table.upload(self._stream)

    def reset_base_lengths(self, lengths: Int32Array) -> bool:
        return self._reset(self._cache, lengths)

    def reset_draft_lengths(self, lengths: Int32Array) -> bool:
        return self._draft_cache is not None and self._reset(self._draft_cache, lengths)

    # Installing the lengths of a running batch is the same verb; the two names keep the trace readable.
    install_base_lengths = reset_base_lengths
    install_draft_lengths = reset_draft_lengths

    def _reset(self, cache: HybridCacheManager, lengths: Int32Array) -> bool:
        use = self._lengths.take()
        try:
            staged = use.buffer[: lengths.size]
            staged[:] = lengths
            cache.reset_for_new_sequences(staged, self._stream)
        finally:
            self._lengths.commit(use, self._stream)
        return True

    def compact_base_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        self._cache.compact_kv_cache_lengths(mapping, old_size, new_size, self._stream)
        return True

    def compact_draft_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        if self._draft_cache is None:
            return False
        self._draft_cache.compact_kv_cache_lengths(mapping, old_size, new_size, self._stream)
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
        # One verb for all of them; models without recurrent layers keep nothing per resident slot.
        return self._snapshots is not None and self._snapshots.zero_recurrent(slots, self._stream)

    def zero_recurrent(self, copies: SnapshotCopies) -> bool:
        return self._snapshots is not None and self._snapshots.zero_recurrent(copies.zero_rows, self._stream)

    def restore_recurrent(self, copies: SnapshotCopies) -> bool:
        if self._snapshots is None:
            return False
        return self._snapshots.restore_recurrent(copies.slots, copies.rows, self._stream)

    def capture_recurrent(self, copies: SnapshotCopies) -> bool:
        if self._snapshots is None:
            return False
        return self._snapshots.capture_recurrent(copies.slots, copies.rows, self._stream)

    def restore_partial(self, copies: SnapshotCopies) -> bool:
        if self._snapshots is None or not copies.partial_slots:
            return False
        slots, pages, tokens = copies.partial_slots, copies.base_pages, copies.tokens
        if copies.draft_pages is None:
            return self._snapshots.restore_partial(slots, pages, tokens, self._stream)
        return self._snapshots.restore_partial_pair(slots, pages, copies.draft_pages, tokens, self._stream)

    def capture_partial(self, copies: SnapshotCopies) -> bool:
        if self._snapshots is None or not copies.partial_slots:
            return False
        slots, pages, tokens = copies.partial_slots, copies.base_pages, copies.tokens
        if copies.draft_pages is None:
            return self._snapshots.capture_partial(slots, pages, tokens, self._stream)
        return self._snapshots.capture_partial_pair(slots, pages, copies.draft_pages, tokens, self._stream)

    def capture_hidden(self, copy: HiddenCopy) -> bool:
        assert self._snapshots is not None, "hidden rows belong to checkpoint deployments"
        return self._snapshots.capture_hidden(copy.slot, copy.tensor, copy.row, self._stream, copy.logical_slot)

    def restore_hidden(self, copy: HiddenCopy) -> bool:
        assert self._snapshots is not None, "hidden rows belong to checkpoint deployments"
        return self._snapshots.restore_hidden(copy.slot, copy.tensor, copy.row, self._stream, copy.logical_slot)

    def drain(self) -> DrainResult:
        result = drain_with(self._synchronizer, self._stream, self._drain_timeout)
        if result.ok:
            for ring in (self._lengths, self._mappings):
                ring.drained()
            for table in (self._table, self._draft_table):
                if table is not None:
                    table.drained()
            if self._snapshots is not None:
                self._snapshots.drained()
        return result
