"""What the manager answers: statuses, results and its counters, all frozen values."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs
import numpy as np
from attrs import field, frozen

from .lease import Lease
from .planning import ReusePlan
from .pool import Int32Array

__all__ = ["AcquireResult", "AcquireStatus", "ManagerMetrics", "PublicationResult", "PublicationStatus"]


class AcquireStatus(Enum):
    ACQUIRED = "acquired"
    INSUFFICIENT_CAPACITY = "insufficient_capacity"


class PublicationStatus(Enum):
    PUBLISHED = "published"
    EXISTING_RECORD = "existing_record"


@frozen
class AcquireResult:
    """``lease`` is there exactly when the status is ACQUIRED."""

    status: AcquireStatus
    plan: ReusePlan
    lease: Lease | None = None


@frozen
class PublicationResult:
    """Information about a publication, not an instruction: the lease keeps its own pages.

    ``record_id`` is None when the record was evicted at once. ``base_pages`` is the record's path, one canonical page
    per block (read-only int32 [block_count]).
    """

    status: PublicationStatus
    record_id: int | None
    base_pages: Int32Array = field(eq=attrs.cmp_using(eq=np.array_equal), hash=False)
    block_count: int


@frozen
class ManagerMetrics:
    """Counters since construction; times are nanoseconds.

    ``reclaimed_*`` counts what went back to a free list at the moment of an eviction. A page that a lease still pins
    then is never counted, also not when the lease lets go.
    """

    evicted_records: int = 0
    reclaimed_base_kv_pages: int = 0
    reclaimed_draft_kv_pages: int = 0
    reclaimed_recurrent_snapshots: int = 0
    reclaimed_partial_kv_snapshots: int = 0
    planning_nanoseconds: int = 0
    eviction_allocation_nanoseconds: int = 0

    def counters(self) -> dict[str, Any]:
        """Everything but the times: what two equal schedules agree on."""
        return {name: count for name, count in attrs.asdict(self).items() if not name.endswith("_nanoseconds")}
