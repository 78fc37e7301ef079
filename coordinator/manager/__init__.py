"""Host bookkeeping of the context cache: which pages exist, who holds them, what can be found and reused.

Nothing in this package touches a device, a page table or a state machine. It imports attrs, NumPy and the errors of the
coordinator, and may be used alone.

``resources`` names what is counted, ``pools`` counts it, ``index`` maps block hashes to pages, ``records`` keeps what
was published; ``planning``, ``eviction`` and ``publication`` work things out before anything changes, ``lease`` is what
a sequence owns, and ``manager`` ties them into transactions.
"""

from .eviction import EvictionPlan, plan_eviction
from .index import BaseBlockIndex
from .lease import Lease
from .manager import ContextCacheManager
from .planning import LookupPolicy, PlanKind, ReuseMode, ReusePlan, plan_vanilla, require_coverage
from .pools import ResourcePools
from .records import CacheRecord, CacheRecordKey, CacheRecordStore, RecordFlavour
from .resources import PageObserver, ResourceDemand, ResourceId, ResourceType
from .results import AcquireResult, AcquireStatus, ManagerMetrics, PublicationResult, PublicationStatus

__all__ = [
    "AcquireResult",
    "AcquireStatus",
    "BaseBlockIndex",
    "CacheRecord",
    "CacheRecordKey",
    "CacheRecordStore",
    "ContextCacheManager",
    "EvictionPlan",
    "Lease",
    "LookupPolicy",
    "ManagerMetrics",
    "PageObserver",
    "PlanKind",
    "PublicationResult",
    "PublicationStatus",
    "RecordFlavour",
    "ResourceDemand",
    "ResourceId",
    "ResourcePools",
    "ResourceType",
    "ReuseMode",
    "ReusePlan",
    "plan_eviction",
    "plan_vanilla",
    "require_coverage",
]
