"""Host bookkeeping of the context cache: which pages exist, who holds them, what can be found and reused.

Nothing in this package touches a device, a page table or a state machine. It imports attrs, NumPy and the errors of the
coordinator, and may be used alone.

``resources`` names what is counted, ``pool`` and ``pools`` count it, ``index`` maps block hashes to pages,
``spec_index`` finds draft paths, ``records`` and ``checkpoints`` keep what was published. ``planning``,
``spec_planning``, ``checkpoint_planning``, ``eviction`` and ``publication`` work things out before anything changes;
``lease`` is what a sequence owns. ``books`` holds it all together, ``acquisition``, ``growth``, ``snapshots`` and
``publishing`` are the transactions over it, and ``manager`` is the class that callers use.
"""

from .checkpoint_planning import plan_checkpoint, plan_mtp
from .checkpoints import HybridCheckpointKey
from .eviction import EvictionPlan, plan_eviction
from .index import BaseBlockIndex
from .lease import Lease, SnapshotReservation
from .manager import ContextCacheManager
from .planning import (
    LookupPolicy,
    PlanKind,
    ReplayDependency,
    ReuseMode,
    ReusePlan,
    SpecReplayMode,
    plan_vanilla,
    require_coverage,
)
from .pools import ResourcePools
from .records import CacheRecord, CacheRecordKey, CacheRecordStore, RecordFlavour
from .resources import PageObserver, ResourceDemand, ResourceId, ResourceType
from .results import AcquireResult, AcquireStatus, ManagerMetrics, PublicationResult, PublicationStatus
from .spec_index import SpecStateIndex
from .spec_planning import plan_spec

__all__ = [
    "AcquireResult",
    "AcquireStatus",
    "BaseBlockIndex",
    "CacheRecord",
    "CacheRecordKey",
    "CacheRecordStore",
    "ContextCacheManager",
    "EvictionPlan",
    "HybridCheckpointKey",
    "Lease",
    "LookupPolicy",
    "ManagerMetrics",
    "PageObserver",
    "PlanKind",
    "PublicationResult",
    "PublicationStatus",
    "RecordFlavour",
    "ReplayDependency",
    "ResourceDemand",
    "ResourceId",
    "ResourcePools",
    "ResourceType",
    "ReuseMode",
    "ReusePlan",
    "SnapshotReservation",
    "SpecReplayMode",
    "SpecStateIndex",
    "plan_checkpoint",
    "plan_eviction",
    "plan_mtp",
    "plan_spec",
    "plan_vanilla",
    "require_coverage",
]
