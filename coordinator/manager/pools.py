"""Reference counts and free lists of the four typed pools.

Rule 1: a resource is free exactly when its active count (pins of leases) and its cache count (records) are both 0.
Rule 2: free lists are FIFO. Taking pops the head, the release of the last count appends to the tail, and within one
array operation resources join in the order of their last occurrence. Ids are therefore deterministic.
Rule 3: an array operation is checked as a whole before the first count changes. After the check it cannot fail.
Rule 4: ``reclaimable`` (active 0, cache > 0) is a counter, kept by the count operations and never recounted.

Paths nearly always name distinct pages, and then a plain indexed assignment is several times faster than
``np.add.at``. So each operation first proves distinctness with a scratch array, and only repeats take the slow way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ContractViolation, InvariantViolation
from .resources import PageObserver, ResourceDemand, ResourceId, ResourceType

__all__ = ["Int32Array", "ResourcePools"]

Int32Array = NDArray[np.int32]
_Indices = NDArray[np.intp]
_NONE: _Indices = np.empty(0, dtype=np.intp)


class Pool:
    """One pool: counts, FIFO ring and the two counters. Used by this package only; callers see ResourcePools."""

    __slots__ = (
        "_head",
        "_positions",
        "_released",
        "_ring",
        "_stamp",
        "active",
        "cache",
        "capacity",
        "free",
        "observer",
        "reclaimable",
        "type",
    )  # fmt: skip

    def __init__(self, type: ResourceType, capacity: int, observer: PageObserver | None) -> None:
        self.type = type
        self.capacity = capacity
        self.active: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.cache: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.free = capacity
        self.reclaimable = 0
        self.observer = observer
        self._ring: Int32Array = np.arange(capacity, dtype=np.int32)
        self._head = 0
        self._positions: Int32Array = np.arange(capacity, dtype=np.int32)
        self._stamp: Int32Array = np.zeros(capacity, dtype=np.int32)
        self._released: Int32Array = np.zeros(capacity, dtype=np.int32)  # all 0 between two simulations

    # Checks -----------------------------------------------------------------------------------------------------

    def indices(self, pages: ArrayLike) -> _Indices:
        """``pages`` as an intp array of shape [n]; ContractViolation when one of them does not exist."""
        given = np.asarray(pages)
        if given.size == 0:
            return _NONE
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ContractViolation(
                f"{self.type.name}: indices must be a flat list of integers, not {given.dtype} of shape "
                f"{given.shape}; pass the ids that the pool handed out",
                type=self.type.name,
            )
        indices = given.astype(np.intp, copy=False)
        # As unsigned numbers the negative ones are huge, so that one maximum checks both ends.
        if indices.view(np.uintp).max() >= self.capacity:
            raise ContractViolation(
                f"{self.type.name}: an index lies outside 0..{self.capacity - 1}; pass ids that the pool handed out",
                type=self.type.name, indices=indices.tolist(), capacity=self.capacity,
            )  # fmt: skip
        return indices

    def distinct(self, indices: _Indices) -> bool:
        """Whether no index occurs twice. Linear, without sorting."""
        count = indices.size
        if count < 2:
            return True
        if count > self.capacity:
            return False
        # Whichever write wins for a repeated index, the other position then reads a foreign number.
        positions = self._positions[:count]
        self._stamp[indices] = positions
        return bool(np.count_nonzero(self._stamp[indices] == positions) == count)

    def last_occurrence(self, indices: _Indices) -> NDArray[np.bool_]:
        """Mask of the positions at which each index occurs for the last time. For arrays with repeats."""
        positions = np.arange(indices.size, dtype=np.int32)
        self._stamp[indices] = -1
        np.maximum.at(self._stamp, indices, positions)
        last: NDArray[np.bool_] = self._stamp[indices] == positions
        return last

    def refuse_free(self, indices: _Indices, verb: str) -> None:
        held = self.active[indices] | self.cache[indices]
        if np.count_nonzero(held) != indices.size:
            free = indices[held == 0].tolist()
            raise ContractViolation(
                f"{self.type.name}: {verb} refused because {free[0]} is free; allocate it first",
                type=self.type.name, indices=free,
            )  # fmt: skip

    def check_cached(self, indices: _Indices) -> None:
        """InvariantViolation unless every index has at least as many cache references as it occurs."""
        counts = self.cache[indices]
        if not self.distinct(indices):
            np.subtract.at(self.cache, indices, 1)
            after = self.cache[indices]
            np.add.at(self.cache, indices, 1)
            counts = after + 1
        if indices.size and counts.min() < 1:
            raise self.uncached(indices[counts < 1])

    def uncached(self, indices: _Indices) -> InvariantViolation:
        """The error for resources that a record lists more often than they are cache-referenced."""
        return InvariantViolation(
            f"{self.type.name}: a record lists {indices[0]} without holding a cache reference; the metadata is "
            f"corrupt, stop using this manager",
            type=self.type.name, indices=indices.tolist(),
        )  # fmt: skip

    # Count operations -------------------------------------------------------------------------------------------

    def take(self, count: int) -> Int32Array:
        """Pop ``count`` resources from the head of the free list, each with active 1. The caller has checked."""
        if count == 0:
            return np.empty(0, dtype=np.int32)
        end = self._head + count
        if end <= self.capacity:
            pages = self._ring[self._head : end].copy()
        else:
            pages = np.concatenate((self._ring[self._head :], self._ring[: end - self.capacity]))
        self._head = end % self.capacity
        self.free -= count
        self.active[pages] = 1
        if self.observer is not None:
            self.observer.leased(self.type, pages)
        return pages

    def pin(self, indices: _Indices) -> None:
        """Active +1 per occurrence. None of the resources is free: the caller has checked."""
        if indices.size == 0:
            return
        if self.distinct(indices):
            counts = self.active[indices]
            self.reclaimable -= indices.size - int(np.count_nonzero(counts))
            counts += 1
            self.active[indices] = counts
        else:
            self.reclaimable -= int(np.count_nonzero((self.active[indices] == 0) & self.last_occurrence(indices)))
            np.add.at(self.active, indices, 1)

    def add_cache(self, indices: _Indices) -> None:
        """Cache +1 per occurrence. None of the resources is free: the caller has checked. ``reclaimable`` cannot
        change, because a resource that is not free and has active 0 is cached already."""
        if indices.size == 0:
            return
        if self.distinct(indices):
            counts = self.cache[indices]
            counts += 1
            self.cache[indices] = counts
        else:
            np.add.at(self.cache, indices, 1)

    def unpin(self, indices: _Indices) -> None:
        """Active -1 per occurrence; what has no count left joins the free tail. ContractViolation below 0."""
        if indices.size == 0:
            return
        zeroed = self._drop(self.active, indices, "active")
        cached = self.cache[zeroed] != 0
        kept = int(np.count_nonzero(cached))
        self.reclaimable += kept
        self._push(zeroed if kept == 0 else zeroed[~cached])

    def release_cache(self, indices: _Indices) -> _Indices:
        """Cache -1 per occurrence; what has no count left joins the free tail. ContractViolation below 0.
        Returns the indices whose last cache reference went, in that order, pinned ones included."""
        if indices.size == 0:
            return _NONE
        zeroed = self._drop(self.cache, indices, "cache")
        pinned = self.active[zeroed] != 0
        freed = zeroed if np.count_nonzero(pinned) == 0 else zeroed[~pinned]
        self.reclaimable -= freed.size
        self._push(freed)
        return zeroed

    def _drop(self, counts: Int32Array, indices: _Indices, kind: str) -> _Indices:
        """Take one off per occurrence, atomically. Returns the indices that reached 0, by last occurrence."""
        if self.distinct(indices):
            after = counts[indices]
            after -= 1
            if after.min() < 0:
                raise self._below_zero(indices[after < 0], kind)
            counts[indices] = after
            gone = after == 0
        else:
            np.subtract.at(counts, indices, 1)
            after = counts[indices]
            if after.min() < 0:
                np.add.at(counts, indices, 1)
                raise self._below_zero(indices[after < 0], kind)
            gone = (after == 0) & self.last_occurrence(indices)
        return indices if np.count_nonzero(gone) == indices.size else indices[gone]

    def _below_zero(self, indices: _Indices, kind: str) -> ContractViolation:
        return ContractViolation(
            f"{self.type.name}: {indices[0]} has no {kind} reference left to release; release each reference once",
            type=self.type.name, indices=indices.tolist(), kind=kind,
        )  # fmt: skip

    def _push(self, freed: _Indices) -> None:
        count = freed.size
        if count == 0:
            return
        tail = (self._head + self.free) % self.capacity
        fits = self.capacity - tail
        if count <= fits:
            self._ring[tail : tail + count] = freed
        else:
            self._ring[tail:] = freed[:fits]
            self._ring[: count - fits] = freed[fits:]
        self.free += count
        if self.observer is not None:
            self.observer.freed(self.type, freed)

    # Simulation of evictions ------------------------------------------------------------------------------------

    def sole_owner_releases(self, indices: _Indices) -> NDArray[np.bool_] | None:
        """The mask of ``simulate_release`` for the first releases of a walk, without remembering them; None when
        repeats or missing references call for the full account."""
        held = self.cache[indices]
        if np.count_nonzero(held) != indices.size or not self.distinct(indices):
            return None
        reclaimed: NDArray[np.bool_] = (held == 1) & (self.active[indices] == 0)
        return reclaimed

    def simulate_release(self, indices: _Indices) -> NDArray[np.bool_]:
        """Release one cache reference per occurrence on paper. Returns the mask of the positions at which a
        resource is reclaimed: no cache reference left, and no pin in reality. Adds to earlier calls until
        ``forget_simulation``. InvariantViolation when there are more releases than references."""
        if self.distinct(indices):
            released = self._released[indices]
            released += 1
            self._released[indices] = released
            last: NDArray[np.bool_] | None = None
        else:
            np.add.at(self._released, indices, 1)
            released = self._released[indices]
            last = self.last_occurrence(indices)
        held = self.cache[indices]
        excess = released > held
        if np.count_nonzero(excess):
            raise self.uncached(indices[excess])
        reclaimed: NDArray[np.bool_] = (released == held) & (self.active[indices] == 0)
        return reclaimed if last is None else reclaimed & last

    def forget_simulation(self, indices: _Indices) -> None:
        self._released[indices] = 0

    # Views ------------------------------------------------------------------------------------------------------

    def free_list(self) -> list[int]:
        free: list[int] = np.roll(self._ring, -self._head)[: self.free].tolist()
        return free

    def check(self) -> None:
        """Recount everything; InvariantViolation when the pool contradicts itself."""
        free = sorted(self.free_list())
        expected = np.flatnonzero((self.active == 0) & (self.cache == 0)).tolist()
        reclaimable = int(np.count_nonzero((self.active == 0) & (self.cache > 0)))
        for what, found, wanted in (
            ("the free list", free, expected),
            ("the reclaimable counter", self.reclaimable, reclaimable),
            ("the smallest count", min([0, *self.active.tolist(), *self.cache.tolist()]), 0),
            ("the scratch counts", int(np.count_nonzero(self._released)), 0),
        ):
            if found != wanted:
                raise InvariantViolation(
                    f"{self.type.name}: {what} is {found} where the counts say {wanted}; stop using this manager",
                    type=self.type.name, found=found, wanted=wanted,
                )  # fmt: skip


class ResourcePools:
    """The four pools behind one interface. See the rules at the top of the module.

    ``capacities`` has one count per pool; a negative one is a ContractViolation. ``observer`` hears what leaves and
    joins the free lists.
    """

    __slots__ = ("_by_type", "each")

    def __init__(self, capacities: ResourceDemand, observer: PageObserver | None = None) -> None:
        _refuse_negative(capacities, "pools cannot be built with")
        self.each = tuple(Pool(type, capacities.counts[type], observer) for type in ResourceType)
        self._by_type = dict(zip(ResourceType, self.each, strict=True))

    def pool(self, type: ResourceType) -> Pool:
        """The pool of one type; ContractViolation for anything that is not a ResourceType."""
        try:
            return self._by_type[type]
        except KeyError:
            raise ContractViolation(
                f"{type!r} is not a resource type; use a member of ResourceType", type=repr(type)
            ) from None

    def missing(self, demand: ResourceDemand) -> tuple[int, ...]:
        """How many resources of each pool must be reclaimed for the demand; 0 where it fits already."""
        return tuple([max(count - pool.free, 0) for pool, count in zip(self.each, demand.counts, strict=True)])

    def can_allocate(self, demand: ResourceDemand) -> bool:
        """Whether the demand fits the free lists as they are. False for a negative demand."""
        return all(0 <= count <= pool.free for pool, count in zip(self.each, demand.counts, strict=True))

    def allocate(self, demand: ResourceDemand) -> tuple[ResourceId, ...] | None:
        """All or nothing over all pools, in pool order; None when a pool has too little. ContractViolation when
        negative."""
        _refuse_negative(demand, "allocation refused for")
        if not self.can_allocate(demand):
            return None
        return tuple(
            ResourceId(pool.type, index)
            for pool, count in zip(self.each, demand.counts, strict=True)
            for index in pool.take(count).tolist()
        )

    def allocate_pages(self, type: ResourceType, count: int) -> Int32Array:
        """``count`` resources of one pool as int32 [count]. ContractViolation when so many are not free."""
        pool = self.pool(type)
        if not 0 <= count <= pool.free:
            raise ContractViolation(
                f"{pool.type.name}: {count} asked for while {pool.free} are free; evict first or ask for less",
                type=pool.type.name, count=count, free=pool.free,
            )  # fmt: skip
        return pool.take(count)

    def add_active(self, id: ResourceId) -> None:
        """One more pin. ContractViolation when the resource is free or unknown."""
        self.pin(id.type, (id.index,))

    def add_cache(self, id: ResourceId) -> None:
        """One more cache reference. ContractViolation when the resource is free or unknown."""
        self.add_cache_many(id.type, (id.index,))

    def release_active(self, id: ResourceId) -> None:
        """One pin less. ContractViolation when there is none or the resource is unknown."""
        self.unpin(id.type, (id.index,))

    def release_cache(self, id: ResourceId) -> None:
        """One cache reference less. ContractViolation when there is none or the resource is unknown."""
        self.release_cache_many(id.type, (id.index,))

    def pin(self, type: ResourceType, indices: ArrayLike) -> None:
        """``add_active`` for each index, as a whole: refused entirely when one of them is refused."""
        pool = self.pool(type)
        checked = pool.indices(indices)
        pool.refuse_free(checked, "a pin")
        pool.pin(checked)

    def add_cache_many(self, type: ResourceType, indices: ArrayLike) -> None:
        """``add_cache`` for each index, as a whole."""
        pool = self.pool(type)
        checked = pool.indices(indices)
        pool.refuse_free(checked, "a cache reference")
        pool.add_cache(checked)

    def unpin(self, type: ResourceType, indices: ArrayLike) -> None:
        """``release_active`` for each index in order, as a whole."""
        pool = self.pool(type)
        pool.unpin(pool.indices(indices))

    def release_cache_many(self, type: ResourceType, indices: ArrayLike) -> NDArray[np.intp]:
        """``release_cache`` for each index in order, as a whole. Returns the indices whose last cache reference
        went, those that a lease still pins included."""
        pool = self.pool(type)
        return pool.release_cache(pool.indices(indices))

    def active_count(self, id: ResourceId) -> int:
        return int(self.pool(id.type).active[self._slot(id)])

    def cache_count(self, id: ResourceId) -> int:
        return int(self.pool(id.type).cache[self._slot(id)])

    def _slot(self, id: ResourceId) -> int:
        return int(self.pool(id.type).indices((id.index,))[0])

    def free_count(self, type: ResourceType) -> int:
        return self.pool(type).free

    def reclaimable_count(self, type: ResourceType) -> int:
        """Resources that eviction alone would free: active 0, cache > 0."""
        return self.pool(type).reclaimable

    def capacity(self, type: ResourceType) -> int:
        return self.pool(type).capacity

    def free_list(self, type: ResourceType) -> list[int]:
        """The free ids, head first."""
        return self.pool(type).free_list()

    def check(self) -> None:
        """InvariantViolation when a pool contradicts itself. Walks every resource: for tests and post-mortems."""
        for pool in self.each:
            pool.check()

    def dump(self) -> dict[str, Any]:
        """Counts and free lists as plain lists, comparable with ``==``."""
        return {
            pool.type.name: {
                "active": pool.active.tolist(),
                "cache": pool.cache.tolist(),
                "free": pool.free_list(),
                "reclaimable": pool.reclaimable,
            }
            for pool in self.each
        }


def _refuse_negative(demand: ResourceDemand, what: str) -> None:
    if min(demand.counts) < 0:
        raise ContractViolation(f"{what} negative counts {demand.counts}; counts are 0 or more", counts=demand.counts)
