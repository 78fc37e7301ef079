"""Putting a coordinator together: every part is checked against the deployment before anything is built."""

from __future__ import annotations

from context_cache.backends.base import Backend, Stream, Synchronizer
from context_cache.coordinator.arguments import expect
from context_cache.coordinator.config import (
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    snapshot_slots,
    validate_deployment,
    validate_pool,
)
from context_cache.coordinator.core import Core
from context_cache.coordinator.device_state import ContextCachePhysicalResources, HybridCacheManager
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.identity import BlockHasher
from context_cache.coordinator.live_tensors import check_live_tensors, check_tensor
from context_cache.coordinator.manager import ContextCacheManager, ResourceDemand, ResourceType
from context_cache.coordinator.page_table import KVPageTable
from context_cache.coordinator.snapshots import HybridSnapshotStorage
from context_cache.coordinator.watching import Watcher
from context_cache.machines import Recorder

__all__ = ["build_core"]


def build_core(
    config: ContextCacheConfig,
    deployment: DeploymentConfig,
    resources: ContextCachePhysicalResources,
    backend: Backend,
    stream: Stream,
    synchronizer: Synchronizer | None,
    recorder: Recorder | None,
    identity_key: bytes | None,
    manager: ContextCacheManager | None,
) -> Core:
    """See ``ContextCacheCoordinator`` for the arguments. Raises ContractViolation for whatever does not agree."""
    expect(config, ContextCacheConfig, "config")
    expect(deployment, DeploymentConfig, "deployment")
    expect(resources, ContextCachePhysicalResources, "resources")
    if backend is None or stream is None:
        raise ContractViolation("a coordinator needs a backend and one of its streams")
    if config.enabled is not True:
        raise ContractViolation("the context cache is not enabled; set ContextCacheConfig(enabled=True)")
    profile = validate_deployment(deployment)
    _check_resources(deployment, profile, resources)
    hasher = BlockHasher(identity_key)
    if isinstance(recorder, Watcher):
        hasher = recorder.hasher(hasher)
    slots = snapshot_slots(profile, config) if profile.uses_checkpoints else (0, 0)
    pages = resources.base_cache.num_pages if profile.has_attention else 0
    draft_pages = 0 if resources.draft_cache is None else resources.draft_cache.num_pages
    capacities = ResourceDemand(pages, draft_pages, *slots)
    if manager is None:
        root = hasher.chain(deployment.page_size).root
        manager = ContextCacheManager(capacities, deployment.page_size, max_records=config.max_records, chain_root=root)
    else:
        _check_manager(manager, config, deployment, capacities)
    return Core(
        config,
        deployment,
        profile,
        resources,
        manager,
        backend,
        stream,
        synchronizer or backend.synchronize,
        recorder,
        hasher,
        HybridSnapshotStorage(deployment, resources, *slots, backend) if profile.uses_checkpoints else None,
    )


def _check_manager(
    manager: ContextCacheManager, config: ContextCacheConfig, deployment: DeploymentConfig, capacities: ResourceDemand
) -> None:
    expect(manager, ContextCacheManager, "manager")
    if config.max_records not in (None, manager.max_records):
        raise ContractViolation(
            f"config.max_records is {config.max_records}, the given manager keeps {manager.max_records}; "
            "set it in one place"
        )
    if manager.page_size != deployment.page_size:
        raise ContractViolation(
            f"the given manager has pages of {manager.page_size} tokens, the deployment of {deployment.page_size}"
        )
    for kind, wanted in zip(ResourceType, capacities.counts, strict=True):
        if manager.pools.capacity(kind) != wanted:
            raise ContractViolation(
                f"the given manager has {manager.pools.capacity(kind)} of {kind.name}, the deployment {wanted}; "
                "build it with the deployment's numbers"
            )


def _check_resources(
    deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile, resources: ContextCachePhysicalResources
) -> None:
    _check_part("base", deployment, resources.base_cache, resources.base_page_table, paged=profile.has_attention)
    draft, table = resources.draft_cache, resources.draft_page_table
    if not profile.paged_spec:
        if draft is not None or table is not None:
            raise ContractViolation("draft resources were given to a deployment without a draft of its own pages")
        return
    if draft is None or table is None:
        raise ContractViolation("this deployment's draft has pages of its own; give draft_cache and draft_page_table")
    if draft is resources.base_cache or table is resources.base_page_table:
        raise ContractViolation(
            "base and draft share a cache or a page table; their pages are different, give each its own"
        )
    _check_part("draft", deployment, draft, table, paged=True)


def _check_part(
    name: str, deployment: DeploymentConfig, cache: HybridCacheManager, table: KVPageTable | None, *, paged: bool
) -> None:
    validate_pool(deployment, cache.num_pages, draft=name == "draft")
    expected = [
        ("cache's max_batch", cache.max_batch, deployment.max_batch),
        ("cache's page size", cache.page_size, deployment.page_size),
    ]
    if not paged and table is not None:
        raise ContractViolation(f"the {name} model has no attention layers; leave its page table out")
    if paged:
        if table is None:
            raise ContractViolation(f"the {name} model has attention layers; give its page table")
        expected += [
            ("page table's number of pages", table.num_pages, cache.num_pages),
            ("page table's max_batch", table.max_batch, deployment.max_batch),
            ("page table's row width in pages", table.max_pages_per_seq, deployment.row_pages),
        ]
    for what, found, wanted in expected:
        if found != wanted:
            raise ContractViolation(
                f"the {name} {what} is {found}, expected {wanted}; allocate both for this deployment"
            )
    check_live_tensors(deployment, cache, name)
    check_tensor(f"{name} length vector", cache.lengths, (deployment.max_batch,), "int32")
    if table is not None:
        check_tensor(f"{name} page table", table.device_array, (deployment.max_batch, 2, deployment.row_pages), "int32")
