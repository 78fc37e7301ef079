"""Counters. Mutable inside the coordinator, frozen when handed out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from attrs import define, field, frozen

from context_cache.coordinator.manager import (
    ContextCacheManager,
    PlanKind,
    PublicationStatus,
    ResourceType,
    ReusePlan,
    SpecReplayMode,
)

__all__ = ["CoordinatorMetrics", "Counters"]


@frozen(kw_only=True)
class CoordinatorMetrics:
    """A snapshot. Counts are of sequences unless the name says otherwise.

    hit_sequences counts hits whose rewind left nothing to reuse; reusing_sequences does not.
    reclaimed_* count resources that returned to a free list at the moment of eviction; a page that a lease still
    pinned then is never counted, also not later.
    spec_pair_publications counts attempts of speculative endpoints that were not skipped, also when the endpoint
    existed already, and also on deployments without draft pages.
    drains: drains by the event that needed them, failed ones included.
    planning_nanoseconds: hashing, lookup and planning; acquiring_nanoseconds: eviction and allocation.
    """

    admitted_sequences: int
    hit_sequences: int
    reusing_sequences: int
    media_aware_sequences: int
    lookup_bypass_sequences: int
    forced_cold_sequences: int
    standard_plans: int
    no_reusable_prefix_plans: int
    full_input_rewind_plans: int
    matched_tokens: int
    reused_tokens: int
    publication_attempts: int
    committed_publications: int
    existing_publications: int
    published_endpoints: int
    hybrid_restores: int
    hybrid_snapshot_pressure_skips: int
    hybrid_capture_synchronizations: int
    spec_full_page_replays: int
    spec_pair_publications: int
    retracted_sequences: int
    refused_admissions: int
    refused_growth: int
    quarantined_requests: int
    planning_nanoseconds: int
    acquiring_nanoseconds: int
    drains: Mapping[str, int]
    evicted_records: int
    reclaimed_base_kv_pages: int
    reclaimed_draft_kv_pages: int
    reclaimed_recurrent_snapshots: int
    reclaimed_partial_kv_snapshots: int
    current_records: int
    active_requests: int
    base_kv_pages_free: int
    base_kv_pages_capacity: int
    draft_kv_pages_free: int
    draft_kv_pages_capacity: int
    recurrent_snapshots_free: int
    recurrent_snapshots_capacity: int
    partial_kv_snapshots_free: int
    partial_kv_snapshots_capacity: int
    base_kv_pages_leased: int
    base_kv_pages_cached_idle: int
    base_kv_pages_withheld: int


@define
class Counters:
    """The coordinator's own counters; the manager has the rest."""

    admitted_sequences: int = 0
    hit_sequences: int = 0
    reusing_sequences: int = 0
    media_aware_sequences: int = 0
    lookup_bypass_sequences: int = 0
    forced_cold_sequences: int = 0
    standard_plans: int = 0
    no_reusable_prefix_plans: int = 0
    full_input_rewind_plans: int = 0
    matched_tokens: int = 0
    reused_tokens: int = 0
    publication_attempts: int = 0
    committed_publications: int = 0
    existing_publications: int = 0
    hybrid_restores: int = 0
    hybrid_snapshot_pressure_skips: int = 0
    hybrid_capture_synchronizations: int = 0
    spec_full_page_replays: int = 0
    spec_pair_publications: int = 0
    retracted_sequences: int = 0
    refused_admissions: int = 0
    refused_growth: int = 0
    quarantined_requests: int = 0
    planning_nanoseconds: int = 0
    acquiring_nanoseconds: int = 0
    drains: Counter[str] = field(factory=Counter)

    def admitted(self, plan: ReusePlan, *, media: bool, bypass: bool, forced_cold: bool) -> None:
        """One sequence of an admission that succeeded as a whole."""
        self.admitted_sequences += 1
        self.media_aware_sequences += media
        self.matched_tokens += plan.matched_token_length
        self.reused_tokens += plan.reuse_token_length
        self.hit_sequences += plan.matched_token_length > 0
        self.reusing_sequences += plan.reuse_token_length > 0
        self.lookup_bypass_sequences += bypass or forced_cold
        self.forced_cold_sequences += forced_cold
        self.standard_plans += plan.kind is PlanKind.STANDARD
        self.no_reusable_prefix_plans += plan.kind is PlanKind.NO_REUSABLE_PREFIX
        self.full_input_rewind_plans += plan.kind is PlanKind.FULL_INPUT_REWIND
        self.spec_full_page_replays += plan.spec_replay_mode is SpecReplayMode.FULL_PAGE

    def published(self, status: PublicationStatus) -> None:
        """One publication attempt that the manager answered."""
        self.publication_attempts += 1
        self.committed_publications += status is PublicationStatus.PUBLISHED
        self.existing_publications += status is PublicationStatus.EXISTING_RECORD

    def snapshot(self, manager: ContextCacheManager, active_requests: int, withheld_pages: int) -> CoordinatorMetrics:
        """Everything, with the manager's counters and the state of the pools.

        withheld_pages: pages of quarantined and poisoned requests; they count as withheld, not as leased.
        """
        pools, eviction = manager.pools, manager.metrics
        own = {name: getattr(self, name) for name in Counters.__slots__ if name not in {"drains", "__weakref__"}}
        free = {kind: pools.free_count(kind) for kind in ResourceType}
        capacity = {kind: pools.capacity(kind) for kind in ResourceType}
        base = ResourceType.BASE_KV_PAGE
        idle = pools.reclaimable_count(base)
        return CoordinatorMetrics(
            **own,
            published_endpoints=self.committed_publications + self.existing_publications,
            drains=MappingProxyType(dict(self.drains)),
            evicted_records=eviction.evicted_records,
            reclaimed_base_kv_pages=eviction.reclaimed_base_kv_pages,
            reclaimed_draft_kv_pages=eviction.reclaimed_draft_kv_pages,
            reclaimed_recurrent_snapshots=eviction.reclaimed_recurrent_snapshots,
            reclaimed_partial_kv_snapshots=eviction.reclaimed_partial_kv_snapshots,
            current_records=len(manager.records),
            active_requests=active_requests,
            base_kv_pages_free=free[base],
            base_kv_pages_capacity=capacity[base],
            draft_kv_pages_free=free[ResourceType.DRAFT_KV_PAGE],
            draft_kv_pages_capacity=capacity[ResourceType.DRAFT_KV_PAGE],
            recurrent_snapshots_free=free[ResourceType.RECURRENT_SNAPSHOT],
            recurrent_snapshots_capacity=capacity[ResourceType.RECURRENT_SNAPSHOT],
            partial_kv_snapshots_free=free[ResourceType.PARTIAL_KV_SNAPSHOT],
            partial_kv_snapshots_capacity=capacity[ResourceType.PARTIAL_KV_SNAPSHOT],
            base_kv_pages_leased=capacity[base] - free[base] - idle - withheld_pages,
            base_kv_pages_cached_idle=idle,
            base_kv_pages_withheld=withheld_pages,
        )
