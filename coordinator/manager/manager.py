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

The work itself is in the rooms: ``books`` holds the state, ``acquisition``, ``growth``, ``snapshots`` and
``publishing`` change it, the planning modules read it. This class is what callers see of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from ..errors import ContractViolation
from . import growth, publishing, snapshots
from .acquisition import bind_and_draw, foreign, give_back, refuse_unfit, release
from .books import Books
from .checkpoint_planning import plan_checkpoint, plan_mtp
from .index import BaseBlockIndex
from .invariants import check_books
from .lease import Lease, SnapshotReservation
from .planning import LookupPolicy, ReuseMode, ReusePlan, plan_vanilla
from .pools import ResourcePools
from .records import CacheRecordStore, RecordFlavour
from .resources import PageObserver, ResourceDemand
from .results import AcquireResult, AcquireStatus, ManagerMetrics, PublicationResult
from .spec_index import SpecStateIndex
from .spec_planning import plan_spec

__all__ = ["ContextCacheManager"]

_UNPAIRED = (ReuseMode.VANILLA, ReuseMode.HYBRID)
_PAIRED = (ReuseMode.SPEC, ReuseMode.HYBRID_MTP)


class ContextCacheManager:
    """Owner of all host metadata of the cache.

    ``capacities``: pages and slots per pool. ``page_size``: tokens per page, at least 1. ``max_records``: None means
    base pages + snapshot slots of both kinds, which never binds before those do; 0 keeps no record. ``observer`` hears
    what enters and leaves the free lists. ``chain_root`` is what stands before block 0 in the callers' hash chains;
    checkpoints within the first block are found behind it. ContractViolation for sizes below these.
    """

    def __init__(
        self,
        capacities: ResourceDemand,
        page_size: int,
        *,
        max_records: int | None = None,
        observer: PageObserver | None = None,
        touch_on_hit: bool = False,
        chain_root: bytes = b"",
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
        self.books = Books(capacities, page_size, max_records, observer, touch_on_hit, chain_root)

    @property
    def pools(self) -> ResourcePools:
        """Read only, like ``index``, ``drafts`` and ``records``: changing them behind the manager breaks its
        invariants."""
        return self.books.pools

    @property
    def index(self) -> BaseBlockIndex:
        return self.books.index

    @property
    def drafts(self) -> SpecStateIndex:
        return self.books.drafts

    @property
    def records(self) -> CacheRecordStore:
        return self.books.records

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.books.page_size

    @property
    def max_records(self) -> int:
        """The limit in force, never None."""
        return self.books.max_records

    @property
    def metrics(self) -> ManagerMetrics:
        books = self.books
        base, draft, recurrent, partial = books.reclaimed
        return ManagerMetrics(
            books.evicted_records, base, draft, recurrent, partial, books.planning_ns, books.eviction_allocation_ns
        )

    # Planning and acquisition: nothing but the planning time changes ---------------------------------------------

    def plan(
        self, hashes: Sequence[bytes], token_count: int, lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE
    ) -> ReusePlan:
        """``plan_vanilla`` over this manager's index."""
        started = perf_counter_ns()
        books = self.books
        plan = plan_vanilla(books.index, hashes, token_count, books.page_size, lookup_policy)
        books.planning_ns += perf_counter_ns() - started
        return plan

    def plan_spec(
        self,
        hashes: Sequence[bytes],
        token_count: int,
        lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
        *,
        owns_paged: bool,
        future_dependency_tokens: int,
    ) -> ReusePlan:
        """``spec_planning.plan_spec`` over this manager's indices: a speculative sequence without recurrent layers."""
        started = perf_counter_ns()
        books = self.books
        plan = plan_spec(
            books.index, books.drafts, books.records, hashes, token_count, books.page_size, lookup_policy,
            owns_paged=owns_paged, future_dependency_tokens=future_dependency_tokens,
        )  # fmt: skip
        books.planning_ns += perf_counter_ns() - started
        return plan

    def plan_checkpoint(
        self,
        hashes: Sequence[bytes],
        token_count: int,
        lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
        *,
        exact_digest: Callable[[int], bytes],
        has_attention: bool = True,
    ) -> ReusePlan:
        """``checkpoint_planning.plan_checkpoint`` over this manager's records: a sequence with recurrent layers.

        ``exact_digest`` is asked only for lengths that the checkpoint index names.
        """
        started = perf_counter_ns()
        books = self.books
        plan = plan_checkpoint(
            books.records, hashes, token_count, books.page_size, lookup_policy,
            exact_digest=exact_digest, has_attention=has_attention,
        )  # fmt: skip
        books.planning_ns += perf_counter_ns() - started
        return plan

    def plan_mtp(
        self,
        hashes: Sequence[bytes],
        token_count: int,
        lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
        *,
        exact_digest: Callable[[int], bytes],
    ) -> ReusePlan:
        """``checkpoint_planning.plan_mtp`` over this manager's records: recurrent layers and a paged draft."""
        started = perf_counter_ns()
        books = self.books
        plan = plan_mtp(
            books.records, hashes, token_count, books.page_size, lookup_policy, exact_digest=exact_digest
        )  # fmt: skip
        books.planning_ns += perf_counter_ns() - started
        return plan

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """Pin what the plan binds, evict and allocate what it demands: all of it, or INSUFFICIENT_CAPACITY.

        The plan's protected record is evicted only after all others and is touched when it is still there.
        ContractViolation when the demand is not one of the plan's mode or the plan names what has been evicted since.
        """
        books = self.books
        refuse_unfit(books, plan)
        started = perf_counter_ns()
        holds = bind_and_draw(books, plan)
        if holds is None:
            return AcquireResult(AcquireStatus.INSUFFICIENT_CAPACITY, plan)
        try:
            lease = Lease(self, books.next_lease_id, plan, holds)
            books.held[lease.id] = holds
        except BaseException:
            books.held.pop(books.next_lease_id, None)
            give_back(books, holds)
            raise
        books.next_lease_id += 1
        if plan.protected_record is not None:
            books.touch_if_stored(plan.protected_record)
        elif books.latest_record is not None and plan.hit_page is not None:
            books.touch_if_stored(int(books.latest_record[plan.hit_page]))
        books.eviction_allocation_ns += perf_counter_ns() - started
        return AcquireResult(AcquireStatus.ACQUIRED, plan, lease)

    # Growth and release -----------------------------------------------------------------------------------------

    def grow_base(self, lease: Lease, count: int) -> bool:
        """Append ``count`` pages to a vanilla or hybrid lease: True, or False and nothing changed. Refusals as in
        ``grow_all``."""
        snapshots.refuse_other_modes(self.books, lease, "grow_base", _UNPAIRED)
        return not growth.grow(self.books, (lease,), (count,), None)

    def grow_spec(self, lease: Lease, base: int, draft: int) -> bool:
        """Append ``base`` and ``draft`` pages to a speculative or MTP lease: True, or False and nothing changed in
        either pool. Refusals as in ``grow_all``."""
        snapshots.refuse_other_modes(self.books, lease, "grow_spec", _PAIRED)
        return not growth.grow(self.books, (lease,), (base,), (draft,))

    def grow_all(
        self, leases: Sequence[Lease], counts: growth.Counts, draft_counts: growth.Counts | None = None
    ) -> tuple[int, ...]:
        """Append ``counts[i]`` base pages (and ``draft_counts[i]`` draft pages) to ``leases[i]``: all of them, or none.

        Returns the positions that do not fit: taken in order, each that exceeds what the ones before it leave of free +
        reclaimable pages in a pool. () means that all have grown. Evicts unpinned records if needed. ContractViolation:
        a released or foreign lease, a negative count, lists of different lengths, a lease with a paged draft without
        draft counts, or draft pages for a lease without one.
        """
        return growth.grow(self.books, leases, counts, draft_counts)

    def release(self, lease: Lease) -> None:
        """Drop every pin of the lease: in each pool shared ones first, then the hit's snapshot, then private ones in
        allocation order, which fixes the order of the free list. Nothing happens the second time. ContractViolation for
        a lease of another manager."""
        if lease.manager is not self:
            raise foreign(lease, "release")
        if not lease.released:
            release(self.books, lease)

    # Snapshots --------------------------------------------------------------------------------------------------

    def reserve_snapshots(self, lease: Lease, needs_partial: bool) -> SnapshotReservation | None:
        """Slots for a checkpoint of a hybrid or MTP lease, evicting unpinned records if needed; None, and nothing
        changed, when they do not fit. ContractViolation: another mode, or a partial slot without attention layers."""
        return snapshots.reserve(self.books, lease, needs_partial)

    def release_restored_snapshots(self, lease: Lease) -> None:
        """Drop the pins on the snapshots of the lease's hit: they have been restored. Idempotent. ContractViolation:
        another mode."""
        snapshots.release_restored(self.books, lease)

    def retire_reservation(self, lease: Lease, reservation: SnapshotReservation) -> None:
        """Drop the producer's pins on a reservation, published or not. ContractViolation: another mode, or a
        reservation that the lease does not hold."""
        snapshots.retire(self.books, lease, reservation)

    # Publication ------------------------------------------------------------------------------------------------

    def publish(self, lease: Lease, hashes: Sequence[bytes], resident_length: int) -> PublicationResult:
        """Make the first full blocks of a vanilla or speculative lease findable as one record.

        ``resident_length`` is in tokens; ``min(len(hashes), resident_length // page_size)`` blocks are published. The
        caller vouches that the device has finished writing them. A stored endpoint is only touched (EXISTING_RECORD),
        or gets the lease's draft pages if it has none (PUBLISHED, same id). ContractViolation: a released or foreign
        lease or one of another mode, no full block, more blocks than pages, hashes that contradict the ones the lease
        was matched with or its replay dependency, or a page that is canonical for another block.
        """
        return publishing.publish(self.books, lease, hashes, resident_length)

    def publish_hybrid(
        self,
        lease: Lease,
        hashes: Sequence[bytes],
        exact_digest: bytes,
        length: int,
        reservation: SnapshotReservation,
    ) -> PublicationResult:
        """Make the first ``length`` tokens of a hybrid lease a checkpoint. The caller vouches that the snapshots in the
        reservation are complete.

        ``hashes``: exactly ``length // page_size``. The partial slot is there exactly when attention layers exist and
        the length is not a whole number of pages. A stored checkpoint is only touched (EXISTING_RECORD).
        ContractViolation: anything else, a reservation that the lease does not hold, too few pages, or hashes as in
        ``publish``.
        """
        return publishing.publish_checkpoint(
            self.books, lease, RecordFlavour.PLAIN, hashes, exact_digest, length, reservation
        )

    def publish_hybrid_mtp(
        self,
        lease: Lease,
        hashes: Sequence[bytes],
        exact_digest: bytes,
        length: int,
        reservation: SnapshotReservation,
    ) -> PublicationResult:
        """As ``publish_hybrid`` for an MTP lease: the boundary token's block stays private, so ``hashes`` are exactly
        ``(length - 1) // page_size`` (none is legal); both slots are always needed, and base and draft pages for the
        kept blocks."""
        return publishing.publish_checkpoint(
            self.books, lease, RecordFlavour.MTP, hashes, exact_digest, length, reservation
        )

    # Eviction, checks and views ---------------------------------------------------------------------------------

    def evict_all(self) -> int:
        """Evict every record, LRU first, and return how many there were. What a lease pins stays in use."""
        victims = tuple(self.books.records.iterate_lru())
        self.books.evict(victims)
        return len(victims)

    def check_invariants(self) -> None:
        """InvariantViolation when the parts contradict each other. Recounts everything: for tests and post-mortems."""
        check_books(self.books)

    def dump(self) -> dict[str, Any]:
        """The whole state as plain values: two dumps are equal exactly when nothing has changed (times excepted)."""
        books = self.books
        return {
            "pools": books.pools.dump(),
            "index": books.index.dump(),
            "drafts": books.drafts.dump(),
            "records": books.records.dump(),
            "checkpoints": books.records.checkpoints.dump(),
            "lru": books.records.lru_to_mru(),
            "next_record_id": books.records.next_id,
            "leases": {id: holds.dump() for id, holds in books.held.items()},
            "metrics": self.metrics.counters(),
        }
