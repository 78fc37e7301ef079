"""The four typed pools behind one interface: what is counted where, and which operations are all or nothing.

The counting itself and its rules are in ``pool``.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from ..errors import ContractViolation
from .pool import Indices, Int32Array, Pool
from .resources import PageObserver, ResourceDemand, ResourceId, ResourceType

__all__ = ["Int32Array", "ResourcePools"]


class ResourcePools:
    """The four pools behind one interface.

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

    def release_cache_many(self, type: ResourceType, indices: ArrayLike) -> Indices:
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
