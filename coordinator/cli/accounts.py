"""What a run counts, and the account of pages and snapshot slots that it is checked against at the end."""

from __future__ import annotations

import numpy as np
from attrs import define

from context_cache.coordinator.manager import ContextCacheManager, ResourceDemand, ResourceType

__all__ = ["Counts", "leaked_pages"]


@define(eq=False)
class Counts:
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    founders: int = 0
    joiners: int = 0
    compactions: int = 0
    preemptions: int = 0
    refused_admissions: int = 0
    finished: int = 0


def leaked_pages(manager: ContextCacheManager, capacity: ResourceDemand) -> int:
    """Of the pages and snapshot slots of all pools, those with an active reference, or neither free nor in a record.

    All handles have ended. The lists are read one by one instead of trusting the pools' own counters. ``capacity``: how
    many there were to begin with.
    """
    sizes = capacity.counts
    accounts = {kind: np.zeros(size, dtype=np.bool_) for kind, size in zip(ResourceType, sizes, strict=True)}
    for kind, accounted in accounts.items():
        accounted[manager.pools.free_list(kind)] = True
    for record in manager.records.iterate_lru():
        for resource in record.resources():
            accounts[resource.type][resource.index] = True
    for kind, accounted in accounts.items():
        accounted[manager.pools.pool(kind).active > 0] = False
    return sum(sizes) - sum(int(np.count_nonzero(accounted)) for accounted in accounts.values())
