"""Transactions over pools, block index, records and leases. Host bookkeeping only: no call here reaches a device.

Rule 1: a call that raises or says "no" leaves everything as it was. Each operation first works out all it needs
(where it can be refused), then commits; what can still fail during a commit is undone.
Rule 2: a lease pins, a record references. Whatever is pinned survives the eviction of its record.
Rule 3: publication never changes the lease that published; other leases see the canonical pages through plans.
Rule 4: callers take turns. There is no lock in here.

A vanilla hit protects no record and, by default, refreshes none: a hot prefix ages as if it were unused. With
``touch_on_hit`` a hit moves the most recently used record that contains the last matched page to the MRU end. That
costs one integer per base page and no search: the last record to be published or touched over a page is also the last
of that page's records to be evicted, so one number per page always names a stored one.

Speculative and checkpoint flavours add planning functions, page lists and publication methods beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContractViolation, InvariantViolation
from .eviction import NO_EVICTION, EvictionPlan, commit_eviction, plan_eviction
from .index import BaseBlockIndex
from .invariants import check_manager
from .lease import Lease, PageList
from .planning import LookupPolicy, ReuseMode, ReusePlan, plan_vanilla
from .pools import Int32Array, ResourcePools
from .publication import FreshBlocks, Projection, project_blocks
from .records import CacheRecord, CacheRecordKey, CacheRecordStore, unpack_indices
from .resources import PageObserver, ResourceDemand, ResourceType
from .results import AcquireResult, AcquireStatus, ManagerMetrics, PublicationResult, PublicationStatus

__all__ = ["ContextCacheManager"]

_BASE = ResourceType.BASE_KV_PAGE
_MODES = frozenset({ReuseMode.VANILLA})


class ContextCacheManager:
    """Owner of all host metadata of the cache.

    ``capacities``: pages and slots per pool. ``page_size``: tokens per page, at least 1. ``max_records``: None means
    base pages + snapshot slots of both kinds, which never binds before those do; 0 keeps no record. ``observer`` hears
    what enters and leaves the free lists. ContractViolation for sizes below these.
    """

    def __init__(
        self,
        capacities: ResourceDemand,
        page_size: int,
        *,
        max_records: int | None = None,
        observer: PageObserver | None = None,
        touch_on_hit: bool = False,
    ) -> None:
        if page_size < 1:
            raise ContractViolation(
                f"a manager cannot work with pages of {page_size} tokens; use 1 or more", page_size=page_size
            )
        if max_records is None:
            base, _, recurrent, partial = capacities.counts
            max_records = base + recurrent + partial
        if max_records < 0:
            raise ContractViolation(
                f"a manager cannot keep {max_records} records; use 0 or more, or None for no limit",
                max_records=max_records,
            )
        self._pools = ResourcePools(capacities, observer)
        self._index = BaseBlockIndex(capacities.base_kv_pages)
        self._records = CacheRecordStore()
        self._page_size = page_size
        self._max_records = max_records
        self._base = self._pools.pool(_BASE)
        self._page_lists: dict[int, PageList] = {}  # of the leases that are not released, lost ones included
        self._next_lease_id = 1
        # Per base page the record that was last published or touched over it; only kept for touch_on_hit.
        self._latest_record: NDArray[np.int64] | None = (
            np.zeros(capacities.base_kv_pages, dtype=np.int64) if touch_on_hit else None
        )
        self._evicted_records = 0
        self._reclaimed = [0, 0, 0, 0]
        self._planning_ns = 0
        self._eviction_allocation_ns = 0

    @property
    def pools(self) -> ResourcePools:
        """Read only, like ``index`` and ``records``: changing them behind the manager breaks its invariants."""
        return self._pools

    @property
    def index(self) -> BaseBlockIndex:
        return self._index

    @property
    def records(self) -> CacheRecordStore:
        return self._records

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def max_records(self) -> int:
        """The limit in force, never None."""
        return self._max_records

    @property
    def metrics(self) -> ManagerMetrics:
        base, draft, recurrent, partial = self._reclaimed
        return ManagerMetrics(
            self._evicted_records, base, draft, recurrent, partial, self._planning_ns, self._eviction_allocation_ns
        )

    # Planning and acquisition -----------------------------------------------------------------------------------

    def plan(
        self, hashes: Sequence[bytes], token_count: int, lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE
    ) -> ReusePlan:
        """``plan_vanilla`` over this manager's index. Changes nothing but the planning time."""
        started = perf_counter_ns()
        plan = plan_vanilla(self._index, hashes, token_count, self._page_size, lookup_policy)
        self._planning_ns += perf_counter_ns() - started
        return plan

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """Pin what the plan binds, evict and allocate what it demands: all of it, or INSUFFICIENT_CAPACITY.

        ContractViolation when the plan is of another mode or names pages that have been evicted since.
        """
        self._refuse_unfit(plan)
        started = perf_counter_ns()
        bound = self._base.indices(plan.base_pages) if plan.bound is None else plan.bound
        count = plan.demand.base_kv_pages
        # Pinned before eviction is planned: the pages of the hit must not count as reclaimable.
        self._base.pin(bound)
        try:
            room = self._plan_room(count)
            if room.feasible:
                pages = PageList(bound.size + count)
                pages.append(bound)
                pages.append(self._take(room, count))
        except BaseException:
            self._base.unpin(bound)
            raise
        if not room.feasible:
            self._base.unpin(bound)
            return AcquireResult(AcquireStatus.INSUFFICIENT_CAPACITY, plan)
        lease = Lease(self, self._next_lease_id, plan.mode, plan.matched_hashes, bound.size, pages)
        self._page_lists[lease.id] = pages
        self._next_lease_id += 1
        if self._latest_record is not None and plan.hit_page is not None:
            self._touch_if_stored(int(self._latest_record[plan.hit_page]))
        self._eviction_allocation_ns += perf_counter_ns() - started
        return AcquireResult(AcquireStatus.ACQUIRED, plan, lease)

    def _refuse_unfit(self, plan: ReusePlan) -> None:
        demand = plan.demand.counts
        if plan.mode not in _MODES or min(demand) < 0 or any(demand[1:]):
            raise ContractViolation(
                f"acquire: a {plan.mode.value} plan cannot demand {demand}; demand base pages only, 0 or more",
                mode=plan.mode.value, demand=demand,
            )  # fmt: skip
        # An entry that vanished may have come back with another page, or its page may hold other tokens now.
        if plan.index_version is not self._index.version and tuple(map(self._index.get, plan.matched_hashes)) != (
            plan.base_pages
        ):
            raise ContractViolation(
                f"acquire: the plan binds {len(plan.base_pages)} pages of which some were evicted since; plan again",
                base_pages=plan.base_pages,
            )

    def _plan_room(self, count: int) -> EvictionPlan:
        """What has to be evicted before ``count`` base pages can be allocated."""
        if count <= self._base.free:
            return NO_EVICTION
        return plan_eviction(ResourceDemand(count), self._pools, self._records)

    def _take(self, room: EvictionPlan, count: int) -> Int32Array:
        """Commit a feasible plan: evict, then allocate ``count`` base pages."""
        if room.records:
            self._evict(room.records, room.base_pages)
        if count > self._base.free:
            raise InvariantViolation(
                f"{count} pages were counted as available and {self._base.free} are free; the metadata is corrupt, "
                f"stop using this manager",
                count=count, free=self._base.free,
            )  # fmt: skip
        return self._base.take(count)

    # Growth and release -----------------------------------------------------------------------------------------

    def grow_base(self, lease: Lease, count: int) -> bool:
        """Append ``count`` pages to the lease: True, or False and nothing changed. Refusals as in ``grow_all``."""
        return not self.grow_all((lease,), (count,))

    def grow_all(self, leases: Sequence[Lease], counts: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
        """Append ``counts[i]`` pages to ``leases[i]``: all of them, or none.

        Returns the positions that do not fit: taken in order, each that exceeds what the ones before it leave of free +
        reclaimable pages. () means that all have grown. Evicts unpinned records if needed. ContractViolation: a
        released or foreign lease, a negative count, or lists of different lengths.
        """
        wanted: Sequence[int] = counts.tolist() if isinstance(counts, np.ndarray) else counts
        if len(leases) != len(wanted):
            raise ContractViolation(
                f"grow: {len(leases)} leases and {len(wanted)} counts; give one count per lease",
                leases=len(leases), counts=len(wanted),
            )  # fmt: skip
        available = room = self._base.free + self._base.reclaimable
        refused: list[int] = []
        for position, (lease, count) in enumerate(zip(leases, wanted, strict=True)):
            self._refuse_dead(lease, "grow")
            if count < 0:
                raise ContractViolation(
                    f"grow: {count} pages asked for at position {position}; a lease only grows, use 0 or more",
                    position=position, count=count,
                )  # fmt: skip
            if count > room:
                refused.append(position)
            else:
                room -= count
        if refused or room == available:
            return tuple(refused)
        started = perf_counter_ns()
        plan = self._plan_room(available - room)
        if not plan.feasible:
            raise InvariantViolation(
                f"grow: {available - room} pages were counted as available and are not; the metadata is corrupt, stop "
                f"using this manager",
                count=available - room,
            )
        for lease, count in zip(leases, wanted, strict=True):
            lease.pages.reserve(count)
        pages = self._take(plan, available - room)
        start = 0
        for lease, count in zip(leases, wanted, strict=True):
            if count:
                lease.pages.append(pages[start : start + count])
                start += count
        self._eviction_allocation_ns += perf_counter_ns() - started
        return ()

    def release(self, lease: Lease) -> None:
        """Drop every pin of the lease: shared pages first, then private ones in allocation order, which fixes the order
        of the free list. Nothing happens the second time. ContractViolation for a lease of another manager."""
        if lease.manager is not self:
            raise self._foreign(lease, "release")
        if lease.released:
            return
        self._base.unpin(lease.pages.head(lease.pages.count).astype(np.intp))
        del self._page_lists[lease.id]
        lease.forget_pages()

    # Publication ------------------------------------------------------------------------------------------------

    def publish(self, lease: Lease, hashes: Sequence[bytes], resident_length: int) -> PublicationResult:
        """Make the first full blocks of the lease findable as one record.

        ``resident_length`` is in tokens; ``min(len(hashes), resident_length // page_size)`` blocks are published. The
        caller vouches that the device has finished writing them. A stored endpoint is only touched
        (EXISTING_RECORD). ContractViolation: a released or foreign lease, no full block, more blocks than pages, hashes
        that contradict the ones the lease was matched with, or a page that is canonical for another block.
        """
        self._refuse_dead(lease, "publish")
        count = min(len(hashes), resident_length // self._page_size)
        if not 1 <= count <= lease.pages.count:
            raise ContractViolation(
                f"publish: {count} full blocks from {len(hashes)} hashes and {resident_length} resident tokens, with "
                f"{lease.pages.count} pages; publish at least one block and at most one per page",
                count=count, pages=lease.pages.count, resident_length=resident_length,
            )  # fmt: skip
        given = list(hashes[:count])
        known = min(count, len(lease.matched_hashes))
        if known and given[:known] != list(lease.matched_hashes[:known]):
            raise ContractViolation(
                f"publish: the first {known} hashes are not those that the lease was matched with; publish the "
                f"sequence that the lease was acquired for",
                known=known,
            )
        key = CacheRecordKey(given[-1], count)
        existing = self._records.find(key)
        if existing is not None:
            self._records.touch(existing.id)
            self._note_latest(existing)
            return PublicationResult(PublicationStatus.EXISTING_RECORD, existing.id, existing.base_page_path, count)
        projection, fresh = project_blocks(self._index, given, lease.pages.head(count), lease.published)
        victim = self._limit_victim()
        record = self._commit_publication(projection, fresh)
        lease.published = projection
        self._note_latest(record)
        if self._max_records == 0:
            victim = record
        if victim is not None:
            self._evict((victim,))
        kept = None if victim is record else record.id
        return PublicationResult(PublicationStatus.PUBLISHED, kept, projection.path, count)

    def _limit_victim(self) -> CacheRecord | None:
        """The record that has to make room under the limit. Checked here, because its eviction comes after the commit
        of the new record and must not fail then."""
        if not 0 < self._max_records <= len(self._records):
            return None
        victim = self._records.oldest()
        for type in ResourceType:
            pool = self._pools.pool(type)
            pool.check_cached(pool.indices(unpack_indices(victim.packed(type))))
        return victim

    def _commit_publication(self, projection: Projection, fresh: FreshBlocks) -> CacheRecord:
        """Cache references, then mappings, then the record; a failure undoes the steps before it."""
        path = projection.path.astype(np.intp)
        key = CacheRecordKey(projection.hashes[-1], len(projection.hashes))
        record = CacheRecord(self._records.next_id, key, projection.hashes, projection.path.tobytes())
        self._base.add_cache(path)
        try:
            if fresh.page_of:
                self._index.insert_new(fresh.page_of, fresh.pages)
            self._records.add(record)
        except BaseException:
            # The producer pins its pages and the canonical ones are cached, so this frees nothing.
            self._index.withdraw(fresh.page_of)
            self._base.release_cache(path)
            raise
        return record

    # Eviction ---------------------------------------------------------------------------------------------------

    def evict_all(self) -> int:
        """Evict every record, LRU first, and return how many there were. Pages that a lease pins stay in use."""
        victims = tuple(self._records.iterate_lru())
        self._evict(victims)
        return len(victims)

    def _evict(self, victims: Sequence[CacheRecord], base_pages: NDArray[np.intp] | None = None) -> None:
        freed = commit_eviction(victims, self._pools, self._index, self._records, base_pages)
        self._evicted_records += len(victims)
        for type, count in enumerate(freed):
            self._reclaimed[type] += count

    def _touch_if_stored(self, record_id: int) -> None:
        if self._records.contains(record_id):
            self._records.touch(record_id)
            self._note_latest(self._records.get(record_id))

    def _note_latest(self, record: CacheRecord) -> None:
        if self._latest_record is not None:
            self._latest_record[record.base_page_path] = record.id

    # Checks and views -------------------------------------------------------------------------------------------

    def _refuse_dead(self, lease: Lease, verb: str) -> None:
        if lease.manager is not self:
            raise self._foreign(lease, verb)
        if lease.released:
            raise ContractViolation(
                f"{verb}: lease {lease.id} has been released; acquire a new one", lease_id=lease.id, verb=verb
            )

    @staticmethod
    def _foreign(lease: Lease, verb: str) -> ContractViolation:
        return ContractViolation(
            f"{verb}: lease {lease.id} belongs to another manager; pass it to the one that acquired it",
            lease_id=lease.id, verb=verb,
        )  # fmt: skip

    def check_invariants(self) -> None:
        """InvariantViolation when the parts contradict each other. Recounts everything: for tests and post-mortems."""
        check_manager(self._pools, self._index, self._records, self._page_lists.values(), self._max_records)

    def dump(self) -> dict[str, Any]:
        """The whole state as plain values: two dumps are equal exactly when nothing has changed (times excepted)."""
        return {
            "pools": self._pools.dump(),
            "index": self._index.dump(),
            "records": self._records.dump(),
            "lru": self._records.lru_to_mru(),
            "next_record_id": self._records.next_id,
            "leases": {id: pages.view().tolist() for id, pages in self._page_lists.items()},
            "metrics": self.metrics.counters(),
        }
