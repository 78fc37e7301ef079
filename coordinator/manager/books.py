"""Everything that the manager keeps, and the few transactions that its operations are made of.

One object, so that the rooms (``acquisition``, ``growth``, ``snapshots``, ``publishing``) are plain functions over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantViolation
from .eviction import NO_EVICTION, EvictionPlan, commit_eviction, plan_eviction
from .index import BaseBlockIndex
from .lease import Holdings
from .pool import Indices, Int32Array, Pool
from .pools import ResourcePools
from .records import CacheRecord, CacheRecordStore, unpack_indices
from .resources import PageObserver, ResourceDemand, ResourceType
from .spec_index import SpecStateIndex

__all__ = ["Books"]


class Books:
    """The state of one manager; arguments as there, checked there."""

    __slots__ = (
        "base",
        "draft",
        "drafts",
        "evicted_records",
        "eviction_allocation_ns",
        "held",
        "index",
        "latest_record",
        "max_records",
        "next_lease_id",
        "page_size",
        "partial",
        "planning_ns",
        "pools",
        "reclaimed",
        "records",
        "recurrent",
    )  # fmt: skip

    def __init__(
        self,
        capacities: ResourceDemand,
        page_size: int,
        max_records: int,
        observer: PageObserver | None,
        touch_on_hit: bool,
        chain_root: bytes,
    ) -> None:
        self.pools = ResourcePools(capacities, observer)
        self.base, self.draft, self.recurrent, self.partial = self.pools.each
        self.index = BaseBlockIndex(capacities.base_kv_pages)
        self.drafts = SpecStateIndex()
        self.records = CacheRecordStore(page_size, chain_root)
        self.page_size = page_size
        self.max_records = max_records
        self.held: dict[int, Holdings] = {}  # by lease id, of the leases that are not released, lost ones included
        self.next_lease_id = 1
        # Per base page the record that was last published or touched over it; only kept for touch_on_hit.
        self.latest_record: NDArray[np.int64] | None = (
            np.zeros(capacities.base_kv_pages, dtype=np.int64) if touch_on_hit else None
        )
        self.evicted_records = 0
        self.reclaimed = [0, 0, 0, 0]
        self.planning_ns = 0
        self.eviction_allocation_ns = 0

    def room(
        self, base: int, draft: int = 0, recurrent: int = 0, partial: int = 0, *, protected: int | None = None
    ) -> EvictionPlan:
        """What has to be evicted before so much can be drawn. Changes nothing."""
        if (
            base <= self.base.free
            and draft <= self.draft.free
            and recurrent <= self.recurrent.free
            and partial <= self.partial.free
        ):
            return NO_EVICTION
        return plan_eviction(ResourceDemand(base, draft, recurrent, partial), self.pools, self.records, protected)

    def draw_base(self, room: EvictionPlan, count: int) -> Int32Array:
        """Commit a feasible plan: evict, then allocate ``count`` base pages."""
        if room.records:
            self.evict(room.records, room.base_pages)
        if count > self.base.free:
            raise _short(self.base, count)
        return self.base.take(count)

    def draw(self, room: EvictionPlan, *counts: int) -> list[Int32Array]:
        """Commit a feasible plan: evict, then allocate ``counts`` (in pool order, later pools may be left out). One
        int32 array per count, and none is taken before all are known."""
        if room.records:
            self.evict(room.records, room.base_pages)
        wanted = list(zip(self.pools.each, counts, strict=False))
        for pool, count in wanted:
            if count > pool.free:
                raise _short(pool, count)
        drawn = [pool.peek(count) for pool, count in wanted]
        for (pool, _), indices in zip(wanted, drawn, strict=True):
            pool.claim(indices)
        return drawn

    def evict(self, victims: Sequence[CacheRecord], base_pages: Indices | None = None) -> None:
        freed = commit_eviction(victims, self.pools, self.index, self.records, base_pages, self.drafts)
        self.evicted_records += len(victims)
        for type, count in enumerate(freed):
            self.reclaimed[type] += count

    def limit_victim(self) -> CacheRecord | None:
        """The record that has to make room under the limit. Checked here, because its eviction comes after the commit
        of the new record and must not fail then."""
        if not 0 < self.max_records <= len(self.records):
            return None
        victim = self.records.oldest()
        for type in ResourceType:
            pool = self.pools.pool(type)
            pool.check_cached(pool.indices(unpack_indices(victim.packed(type))))
        self.drafts.check_listed((victim,))
        return victim

    def touch(self, record: CacheRecord) -> None:
        """Move a stored record to the MRU end."""
        self.records.touch(record.id)
        self.note_latest(record)

    def touch_if_stored(self, record_id: int) -> None:
        if self.records.contains(record_id):
            self.touch(self.records.get(record_id))

    def note_latest(self, record: CacheRecord) -> None:
        if self.latest_record is not None:
            self.latest_record[record.base_page_path] = record.id


def _short(pool: Pool, count: int) -> InvariantViolation:
    return InvariantViolation(
        f"{pool.type.name}: {count} were counted as available and {pool.free} are free; the metadata is corrupt, stop "
        f"using this manager",
        type=pool.type.name, count=count, free=pool.free,
    )  # fmt: skip
