"""What a run counts, and the account of pages that it is checked against at the end."""

from __future__ import annotations

import numpy as np
from attrs import define

from context_cache.coordinator.manager import ContextCacheManager, ResourceType

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


def leaked_pages(manager: ContextCacheManager, pages: int) -> int:
    """Of ``pages``, those with an active reference, or in neither the free list nor a record.

    All handles have ended. The lists are read one by one instead of trusting the pool's own counters.
    """
    pool = ResourceType.BASE_KV_PAGE
    accounted = np.zeros(pages, dtype=np.bool_)
    accounted[manager.pools.free_list(pool)] = True
    for record in manager.records.iterate_lru():
        accounted[record.base_page_path] = True
    accounted[manager.pools.pool(pool).active > 0] = False
    return pages - int(np.count_nonzero(accounted))
