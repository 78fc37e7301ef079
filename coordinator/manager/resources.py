"""Names for what the manager counts: resource types, ids and demands.

Four kinds of resource exist, each in its own pool and its own id space. Equal indices of different types are
different resources. Counts are pages (or snapshot slots), never tokens and never bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["PageObserver", "ResourceDemand", "ResourceId", "ResourceType"]


class ResourceType(IntEnum):
    """The four pools, in the order in which a demand is served."""

    BASE_KV_PAGE = 0
    DRAFT_KV_PAGE = 1
    RECURRENT_SNAPSHOT = 2
    PARTIAL_KV_SNAPSHOT = 3


@frozen(order=True)
class ResourceId:
    """One page or snapshot slot: its pool and its index there."""

    type: ResourceType
    index: int


@frozen
class ResourceDemand:
    """One count per pool. Negative counts can be written down; every operation refuses them."""

    base_kv_pages: int = 0
    draft_kv_pages: int = 0
    recurrent_snapshot_slots: int = 0
    partial_kv_snapshot_slots: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The four counts in pool order; ``counts[ResourceType.X]`` is the count of X."""
        return (
            self.base_kv_pages,
            self.draft_kv_pages,
            self.recurrent_snapshot_slots,
            self.partial_kv_snapshot_slots,
        )


class PageObserver(Protocol):
    """Hears which resources leave and join the free lists; tests use it to catch the use of a free page.

    ``indices`` is an int array of shape [n], n > 0, in free-list order. It is called after the counts are changed
    and must not raise or call back into the pools.
    """

    def leased(self, type: ResourceType, indices: NDArray[np.integer]) -> None: ...

    def freed(self, type: ResourceType, indices: NDArray[np.integer]) -> None: ...
