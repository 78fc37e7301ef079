"""The public API: the coordinator, its value types and errors, and what a runtime needs around it.

Start with :class:`ContextCacheCoordinator` and :func:`allocate_resources`; :class:`ContextCacheRequest` is the thin
facade that maps a runtime's own state to calls.
"""

from context_cache.coordinator.adapter import AdmitOutcome, ContextCacheRequest, SpecCommonStateTracker
from context_cache.coordinator.config import (
    BaseStateKind,
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    LayerGeometry,
    LayerKind,
    SpecConfig,
    SpecMode,
    SpecReuseContract,
    snapshot_slots,
    validate_deployment,
)
from context_cache.coordinator.coordinator import ContextCacheCoordinator, OwnersLeft
from context_cache.coordinator.device_state import (
    ContextCachePhysicalResources,
    HybridCacheManager,
    allocate_resources,
)
from context_cache.coordinator.errors import ContextCacheError, ContractViolation, InvariantViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.identity import (
    AdapterKey,
    BlockHasher,
    BlockKeyExtras,
    Digest,
    HashChain,
    MediaSpanKey,
)
from context_cache.coordinator.manager import ContextCacheManager, LookupPolicy, ResourceDemand
from context_cache.coordinator.metrics import CoordinatorMetrics
from context_cache.coordinator.page_table import KVPageTable
from context_cache.coordinator.resident import ResidentSlotPool
from context_cache.coordinator.snapshots import HybridSnapshotStorage
from context_cache.coordinator.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    AdmissionResult,
    AdmitSequenceResult,
    BatchAdvance,
    BeginRequestResult,
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    GrowthRefusal,
    PrepareDecodeResult,
    RequestView,
    ResidentRef,
    SequenceState,
    Status,
    TokenStateContract,
)

__all__ = [
    "HOLD_COMMITTED_STATE_LENGTH",
    "AdapterKey",
    "AdmissionResult",
    "AdmitOutcome",
    "AdmitSequenceResult",
    "BaseStateKind",
    "BatchAdvance",
    "BeginRequestResult",
    "BlockHasher",
    "BlockKeyExtras",
    "CommitPolicy",
    "ContextCacheBatchAdmission",
    "ContextCacheConfig",
    "ContextCacheCoordinator",
    "ContextCacheCoordinatorStatus",
    "ContextCacheDeploymentProfile",
    "ContextCacheError",
    "ContextCacheManager",
    "ContextCachePhysicalResources",
    "ContextCacheRequest",
    "ContextCacheSequenceAdmission",
    "ContextCacheSequenceAdvance",
    "ContractViolation",
    "CoordinatorMetrics",
    "DecodingKvHeadroom",
    "DeploymentConfig",
    "Digest",
    "GrowthRefusal",
    "HashChain",
    "HybridCacheManager",
    "HybridSnapshotStorage",
    "InvariantViolation",
    "KVPageTable",
    "LayerGeometry",
    "LayerKind",
    "LookupPolicy",
    "MediaSpanKey",
    "OwnersLeft",
    "PrepareDecodeResult",
    "RequestHandle",
    "RequestView",
    "ResidentRef",
    "ResidentSlotPool",
    "ResourceDemand",
    "SequenceState",
    "SpecCommonStateTracker",
    "SpecConfig",
    "SpecMode",
    "SpecReuseContract",
    "Status",
    "TokenStateContract",
    "allocate_resources",
    "snapshot_slots",
    "validate_deployment",
]
