"""Reference counts and the free list of one pool.

Rule 1: a resource is free exactly when its active count (pins of leases) and its cache count (records) are both 0.
Rule 2: free lists are FIFO. Taking pops the head, the release of the last count appends to the tail, and within one
array operation resources join in the order of their last occurrence. Ids are therefore deterministic.
Rule 3: an array operation is checked as a whole before the first count changes. After the check it cannot fail.
Rule 4: ``reclaimable`` (active 0, cache > 0) is a counter, kept by the count operations and never recounted.

Paths nearly always name distinct pages, and then a plain indexed assignment is several times faster than
``np.add.at``. So each operation first proves distinctness with a scratch array, and only repeats take the slow way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ContractViolation, InvariantViolation
from .resources import PageObserver, ResourceType

__all__ = ["Indices", "Int32Array", "Pool"]

Int32Array = NDArray[np.int32]
Indices = NDArray[np.intp]
_NONE: Indices = np.empty(0, dtype=np.intp)


class Pool:
    """Counts, FIFO ring and the two counters. Used by this package only; callers see ``ResourcePools``."""

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

    def indices(self, pages: ArrayLike) -> Indices:
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

    def distinct(self, indices: Indices) -> bool:
        """Whether no index occurs twice. Linear, without sorting."""
        count = indices.size
        if count < 2:
            return True
        if count > self.capacity:
            return False
        # Whichever write wins for a repeated index, the other position then reads a foreign number.
        positions = self._positions[:count]
        self._stamp[indices] = positions
        # As bytes: one memory compare is cheaper than two array operations.
        return self._stamp[indices].tobytes() == positions.tobytes()

    def last_occurrence(self, indices: Indices) -> NDArray[np.bool_]:
        """Mask of the positions at which each index occurs for the last time. For arrays with repeats."""
        positions = np.arange(indices.size, dtype=np.int32)
        self._stamp[indices] = -1
        np.maximum.at(self._stamp, indices, positions)
        last: NDArray[np.bool_] = self._stamp[indices] == positions
        return last

    def refuse_free(self, indices: Indices, verb: str) -> None:
        held = self.active[indices] | self.cache[indices]
        if np.count_nonzero(held) != indices.size:
            free = indices[held == 0].tolist()
            raise ContractViolation(
                f"{self.type.name}: {verb} refused because {free[0]} is free; allocate it first",
                type=self.type.name, indices=free,
            )  # fmt: skip

    def check_cached(self, indices: Indices) -> None:
        """InvariantViolation unless every index has at least as many cache references as it occurs."""
        counts = self.cache[indices]
        if not self.distinct(indices):
            np.subtract.at(self.cache, indices, 1)
            after = self.cache[indices]
            np.add.at(self.cache, indices, 1)
            counts = after + 1
        if indices.size and counts.min() < 1:
            raise self.uncached(indices[counts < 1])

    def uncached(self, indices: Indices) -> InvariantViolation:
        """The error for resources that a record lists more often than they are cache-referenced."""
        return InvariantViolation(
            f"{self.type.name}: a record lists {indices[0]} without holding a cache reference; the metadata is "
            f"corrupt, stop using this manager",
            type=self.type.name, indices=indices.tolist(),
        )  # fmt: skip

    # Count operations -------------------------------------------------------------------------------------------

    def peek(self, count: int) -> Int32Array:
        """The next ``count`` resources of the free list, not taken yet. The caller has checked the number."""
        end = self._head + count
        if end <= self.capacity:
            return self._ring[self._head : end].copy()
        return np.concatenate((self._ring[self._head :], self._ring[: end - self.capacity]))

    def claim(self, pages: Int32Array) -> None:
        """Take what ``peek`` has just returned, each with active 1. Cannot fail."""
        count = pages.size
        if count == 0:
            return
        self._head = (self._head + count) % self.capacity
        self.free -= count
        self.active[pages] = 1
        if self.observer is not None:
            self.observer.leased(self.type, pages)

    def take(self, count: int) -> Int32Array:
        """``peek`` and ``claim`` in one."""
        pages = self.peek(count)
        self.claim(pages)
        return pages

    def pin(self, indices: Indices, distinct: bool = False) -> None:
        """Active +1 per occurrence. None of the resources is free: the caller has checked. ``distinct``, here and
        below: the caller knows that no index is repeated."""
        if indices.size == 0:
            return
        if distinct or self.distinct(indices):
            counts = self.active[indices]
            self.reclaimable -= indices.size - int(np.count_nonzero(counts))
            counts += 1
            self.active[indices] = counts
        else:
            self.reclaimable -= int(np.count_nonzero((self.active[indices] == 0) & self.last_occurrence(indices)))
            np.add.at(self.active, indices, 1)

    def add_cache(self, indices: Indices) -> None:
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

    def check_pinned(self, indices: Indices) -> None:
        """ContractViolation unless ``unpin`` of the same indices would succeed."""
        counts = self.active[indices]
        if not self.distinct(indices):
            np.subtract.at(self.active, indices, 1)
            counts = self.active[indices] + 1
            np.add.at(self.active, indices, 1)
        if indices.size and counts.min() < 1:
            raise self._below_zero(indices[counts < 1], "active")

    def unpin(self, indices: Indices, distinct: bool = False) -> None:
        """Active -1 per occurrence; what has no count left joins the free tail. ContractViolation below 0."""
        if indices.size == 0:
            return
        zeroed = self._drop(self.active, indices, "active", distinct)
        cached = self.cache[zeroed] != 0
        kept = int(np.count_nonzero(cached))
        self.reclaimable += kept
        self._push(zeroed if kept == 0 else zeroed[~cached])

    def release_cache(self, indices: Indices) -> Indices:
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

    def _drop(self, counts: Int32Array, indices: Indices, kind: str, distinct: bool = False) -> Indices:
        """Take one off per occurrence, atomically. Returns the indices that reached 0, by last occurrence."""
        if distinct or self.distinct(indices):
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

    def _below_zero(self, indices: Indices, kind: str) -> ContractViolation:
        return ContractViolation(
            f"{self.type.name}: {indices[0]} has no {kind} reference left to release; release each reference once",
            type=self.type.name, indices=indices.tolist(), kind=kind,
        )  # fmt: skip

    def _push(self, freed: Indices) -> None:
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

    def sole_owner_releases(self, indices: Indices) -> NDArray[np.bool_] | None:
        """The mask of ``simulate_release`` for the first releases of a walk, without remembering them; None when
        repeats or missing references call for the full account."""
        held = self.cache[indices]
        if np.count_nonzero(held) != indices.size or not self.distinct(indices):
            return None
        reclaimed: NDArray[np.bool_] = (held == 1) & (self.active[indices] == 0)
        return reclaimed

    def simulate_release(self, indices: Indices) -> NDArray[np.bool_]:
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

    def forget_simulation(self, indices: Indices) -> None:
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
