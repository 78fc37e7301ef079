"""Which records have to go, and how they go.

Feasible or not is decided by counters alone: the demand fits exactly when it is at most free + reclaimable in every
pool. Only a feasible demand is walked for, lazily from the LRU end, in chunks that contain at least as many
resources as are still missing (fewer can never do) and at least as many records as were walked before, so that long
runs of pinned or shared pages are crossed in a few vectorised rounds. The cost depends on the victims, never on
how many records are kept.

The victims are the shortest LRU prefix that serves all pools together. Members that freed nothing useful are part of
it: the order of eviction then depends on recency only, which is what the tests and the operators can predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter, methodcaller

import numpy as np
from attrs import field, frozen

from ..errors import ContractViolation, InvariantViolation
from .index import BaseBlockIndex
from .pool import Indices, Pool
from .pools import ResourcePools
from .records import CacheRecord, CacheRecordStore, unpack_indices
from .resources import ResourceDemand, ResourceType
from .spec_index import SpecStateIndex

__all__ = ["NO_EVICTION", "EvictionPlan", "commit_eviction", "plan_eviction"]

_BASE = ResourceType.BASE_KV_PAGE
_ITEM = 4  # bytes of one packed index
_BATCH = 64  # records


@frozen
class EvictionPlan:
    """Whether a demand can be served, and the records that have to be evicted for it, in this order.

    ``base_pages`` is what the victims list of base pages when the walk has collected it anyway, else None.
    """

    feasible: bool
    records: tuple[CacheRecord, ...] = ()
    base_pages: Indices | None = field(default=None, eq=False, repr=False)

    @property
    def victims(self) -> tuple[int, ...]:
        """Record ids in the order of eviction."""
        return tuple([record.id for record in self.records])


NO_EVICTION = EvictionPlan(True)
_INFEASIBLE = EvictionPlan(False)


def plan_eviction(
    demand: ResourceDemand, pools: ResourcePools, store: CacheRecordStore, protected: int | None = None
) -> EvictionPlan:
    """Plan the room for ``demand``. Changes nothing; ``protected`` (a record id) is evicted only after all others.

    ContractViolation: a negative demand, or a protected record that is not stored. InvariantViolation: a record
    lists a resource without a cache reference, or the counters promise more than the records hold.
    """
    if min(demand.counts) < 0:
        raise ContractViolation(
            f"eviction cannot be planned for negative counts {demand.counts}; counts are 0 or more",
            counts=demand.counts,
        )
    spared = None if protected is None else store.get(protected)
    missing = pools.missing(demand)
    if not any(missing):
        return NO_EVICTION
    open_pools: list[_OpenPool] = []
    for pool, lacking in zip(pools.each, missing, strict=True):
        if lacking > pool.reclaimable:
            return _INFEASIBLE
        if lacking:
            open_pools.append(_OpenPool(pool, lacking))
    try:
        return _walk(open_pools, _eviction_order(store, spared))
    finally:
        for open_pool in open_pools:
            open_pool.forget()


class _OpenPool:
    """One pool that still lacks something, during one walk."""

    __slots__ = ("missing", "packed", "pool", "seen", "simulated", "victims")

    def __init__(self, pool: Pool, missing: int) -> None:
        self.pool = pool
        self.missing = missing  # resources still to be reclaimed; 0 once served
        self.packed = _packer(pool.type)
        self.victims = 0  # length of the prefix that serves this pool; 0 while unknown
        self.seen: list[Indices] = []
        self.simulated: list[Indices] = []

    def release(self, chunk: Sequence[CacheRecord], walked: int) -> None:
        """Release the chunk on paper; ``walked`` records came before it."""
        paths = list(map(self.packed, chunk))
        indices = self.pool.indices(unpack_indices(b"".join(paths)))
        reclaimed = None if self.seen else self.pool.sole_owner_releases(indices)
        self.seen.append(indices)
        count = -1 if reclaimed is None else int(np.count_nonzero(reclaimed))
        if reclaimed is None or count < self.missing:
            # Later chunks have to know what this one released.
            self.simulated.append(indices)
            reclaimed = self.pool.simulate_release(indices)
            count = int(np.count_nonzero(reclaimed))
        if count < self.missing:
            self.missing -= count
            return
        position = int(np.flatnonzero(reclaimed)[self.missing - 1])  # where the last missing one is reclaimed
        if position >= indices.size - len(paths[-1]) // _ITEM:
            self.victims = walked + len(chunk)
        else:
            ends = np.cumsum(list(map(len, paths))) // _ITEM
            self.victims = walked + int(np.searchsorted(ends, position, side="right")) + 1
        self.missing = 0

    def forget(self) -> None:
        for indices in self.simulated:
            self.pool.forget_simulation(indices)


def _walk(open_pools: Sequence[_OpenPool], source: Iterator[CacheRecord]) -> EvictionPlan:
    walked: list[CacheRecord] = []
    unserved = open_pools
    while unserved:
        chunk = _chunk(source, unserved, len(walked))
        if not chunk:
            short = unserved[0]
            raise InvariantViolation(
                f"{short.pool.type.name}: {short.missing} more are counted as reclaimable than the records hold; the "
                f"metadata is corrupt, stop using this manager",
                type=short.pool.type.name, missing=short.missing,
            )  # fmt: skip
        for open_pool in unserved:
            open_pool.release(chunk, len(walked))
        walked += chunk
        unserved = [open_pool for open_pool in unserved if open_pool.missing]
    count = max([open_pool.victims for open_pool in open_pools])
    records = tuple(walked[:count])
    only = open_pools[0]
    if len(open_pools) > 1 or only.pool.type != _BASE:
        return EvictionPlan(True, records)
    pages = only.seen[0] if len(only.seen) == 1 else np.concatenate(only.seen)
    beyond = sum([len(record.packed_base) for record in walked[count:]]) // _ITEM
    return EvictionPlan(True, records, pages[: pages.size - beyond] if beyond else pages)


def _chunk(source: Iterator[CacheRecord], unserved: Sequence[_OpenPool], walked: int) -> list[CacheRecord]:
    """The next records: at least ``walked``, and enough to list what each pool still lacks. Empty at the end."""
    chunk = list(islice(source, walked))
    for open_pool in unserved:
        packed = open_pool.packed
        lacking = open_pool.missing * _ITEM - sum([len(packed(record)) for record in chunk])
        # In batches, each guessed from the size of the record before it: no Python code per record, and little
        # too much when the sizes differ.
        size = len(packed(chunk[-1])) if chunk else lacking
        while lacking > 0:
            batch = list(islice(source, min(-(-lacking // max(size, _ITEM)), _BATCH)))
            if not batch:
                break
            chunk += batch
            sizes = list(map(len, map(packed, batch)))
            size = sizes[-1]
            lacking -= sum(sizes)
    return chunk


def _packer(type: ResourceType) -> Callable[[CacheRecord], bytes]:
    """The bytes of what a record lists of one type; for base pages without running Python code per record."""
    return attrgetter("packed_base") if type == _BASE else methodcaller("packed", type)


def _eviction_order(store: CacheRecordStore, spared: CacheRecord | None) -> Iterator[CacheRecord]:
    order = store.iterate_lru()
    if spared is None:
        return order
    return chain((record for record in order if record is not spared), (spared,))


def commit_eviction(
    victims: Sequence[CacheRecord],
    pools: ResourcePools,
    index: BaseBlockIndex,
    store: CacheRecordStore,
    base_pages: Indices | None = None,
    drafts: SpecStateIndex | None = None,
) -> tuple[int, int, int, int]:
    """Evict stored records in this order and return how many resources of each pool went back to a free list.

    An entry of the block index goes with the last cache reference of its page, even while a lease uses the page; the
    entries of a draft path go with their record. ``base_pages``
    comes from a plan for exactly these victims, which has checked it. InvariantViolation when a record lists a resource
    without a cache reference or is missing in ``drafts``, before the first change; after this check no step can fail.
    """
    paired: Sequence[CacheRecord] = ()
    if drafts is not None and pools.each[ResourceType.DRAFT_KV_PAGE].capacity:
        paired = [record for record in victims if record.packed_spec]
        drafts.check_listed(paired)
    listed: list[tuple[Pool, Indices]] = []
    for pool in pools.each:
        if pool.type == _BASE and base_pages is not None:
            listed.append((pool, base_pages))
        elif pool.capacity:
            indices = pool.indices(unpack_indices(b"".join(map(_packer(pool.type), victims))))
            pool.check_cached(indices)
            listed.append((pool, indices))
    freed = [0, 0, 0, 0]
    for pool, indices in listed:
        before = pool.free
        uncached = pool.release_cache(indices)
        freed[pool.type] = pool.free - before
        if pool.type == _BASE and uncached.size:
            index.erase_pages(uncached)
    if drafts is not None:
        for record in paired:
            drafts.withdraw(record)
    store.erase_many(victims)
    return freed[0], freed[1], freed[2], freed[3]
