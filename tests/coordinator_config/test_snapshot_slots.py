"""Snapshot slots from byte budgets (00.5): what a budget buys, what is too little, and the warning of P9."""

from __future__ import annotations

import logging

import pytest

from context_cache.backends import HostBackend
from context_cache.coordinator import (
    BaseStateKind,
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    ContractViolation,
    DeploymentConfig,
    HybridSnapshotStorage,
    LayerGeometry,
    SpecConfig,
    SpecMode,
    allocate_resources,
    snapshot_slots,
    validate_deployment,
)

ATTENTION = LayerGeometry.attention(kv_heads=2, head_dim=4)
RECURRENT = LayerGeometry.recurrent(heads=2, head_dim=3, state=5, conv_dim=6, conv_kernel=4)
MTP = SpecConfig(mode=SpecMode.MTP, draft_layers=(ATTENTION, ATTENTION), hidden_dim=8)
FLAVOURS = {
    "hybrid": ((ATTENTION, RECURRENT), None),
    "recurrent": ((RECURRENT,), None),
    "mtp": ((ATTENTION, RECURRENT), MTP),
}


def deploy(layers, spec=None, max_batch=2):
    return DeploymentConfig(max_batch=max_batch, kv_capacity_tokens=16, page_size=4, layers=layers, spec_config=spec)


def config(recurrent=0, partial=0):
    return ContextCacheConfig(
        enabled=True, recurrent_snapshot_pool_bytes=recurrent, partial_kv_snapshot_pool_bytes=partial
    )


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_budget_buys_whole_slots(flavour):
    """budget // bytes; a byte short of one more slot buys nothing more."""
    profile = validate_deployment(deploy(*FLAVOURS[flavour]))
    recurrent, partial = profile.recurrent_slot_bytes, profile.partial_slot_bytes
    wanted = 0 if flavour == "recurrent" else 7
    assert snapshot_slots(profile, config(5 * recurrent, 7 * partial)) == (5, wanted)
    assert snapshot_slots(profile, config(6 * recurrent - 1, 8 * partial - 1 if partial else 0)) == (5, wanted)
    assert snapshot_slots(profile, config(6 * recurrent, 7 * partial))[0] == 6


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_slabs_cost_exactly_what_the_slots_are_priced_at(flavour):
    """Every slab that is allocated per slot is paid for: nothing is allocated that no budget covers."""
    layers, spec = FLAVOURS[flavour]
    deployment = deploy(layers, spec)
    profile = validate_deployment(deployment)
    host = HostBackend()
    resources = allocate_resources(deployment, 8 if profile.has_attention else 0, host)
    allocated = []

    class Counting(HostBackend):
        def array(self, shape, dtype):
            allocated.append(super().array(shape, dtype))
            return allocated[-1]

    partial_slots = 5 if profile.has_attention else 0
    HybridSnapshotStorage(deployment, resources, 3, partial_slots, Counting())
    assert sum(array.nbytes for array in allocated) == (
        3 * profile.recurrent_slot_bytes + partial_slots * profile.partial_slot_bytes
    )


def test_deployments_without_checkpoints_have_no_slots(caplog):
    profile = validate_deployment(deploy((ATTENTION,)))
    assert snapshot_slots(profile, config(10**9, 10**9)) == (0, 0)
    assert snapshot_slots(profile, config()) == (0, 0)
    assert not caplog.records


def test_a_pure_recurrent_deployment_buys_no_partial_slots():
    profile = validate_deployment(deploy((RECURRENT,)))
    assert snapshot_slots(profile, config(3 * profile.recurrent_slot_bytes, 10**9)) == (3, 0)


@pytest.mark.parametrize(
    ("flavour", "short"),
    [
        ("hybrid", "recurrent"),
        ("hybrid", "partial"),
        ("recurrent", "recurrent"),
        ("mtp", "recurrent"),
        ("mtp", "partial"),
    ],
)
def test_too_little_for_one_slot_is_refused_with_the_bytes_needed(flavour, short):
    profile = validate_deployment(deploy(*FLAVOURS[flavour]))
    needed = profile.recurrent_slot_bytes if short == "recurrent" else profile.partial_slot_bytes
    budgets = {"recurrent": 10 * profile.recurrent_slot_bytes, "partial": 10 * profile.partial_slot_bytes}
    budgets[short] = needed - 1
    with pytest.raises(ContractViolation) as caught:
        snapshot_slots(profile, config(**budgets))
    message = str(caught.value)
    assert f"of {needed} bytes" in message
    assert f"is {needed - 1}" in message
    option = "recurrent_snapshot_pool_bytes" if short == "recurrent" else "partial_kv_snapshot_pool_bytes"
    assert option in message
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (needed, needed - 1)


@pytest.mark.parametrize("name", ["recurrent_snapshot_pool_bytes", "partial_kv_snapshot_pool_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_a_budget_is_a_number_of_bytes(name, value):
    with pytest.raises(ContractViolation, match=f"{name} must be 0 or more"):
        ContextCacheConfig(**{name: value})


@pytest.mark.parametrize("kind", [BaseStateKind.HYBRID, BaseStateKind.PURE_RECURRENT])
def test_an_empty_schema_is_refused(kind):
    """A profile that nobody validated has no bytes per slot: dividing by them would be a crash."""
    with pytest.raises(ContractViolation, match="use the profile that validate_deployment returns"):
        snapshot_slots(ContextCacheDeploymentProfile(kind), config(100, 100))


def test_more_slots_than_can_be_numbered_are_refused():
    profile = validate_deployment(deploy((RECURRENT,)))
    with pytest.raises(ContractViolation, match="more than the 2147483647 that can be numbered"):
        snapshot_slots(profile, config(recurrent=2**31 * profile.recurrent_slot_bytes))


@pytest.mark.parametrize("short", ["recurrent", "partial"])
def test_fewer_slots_than_live_sequences_are_warned_about(short, caplog):
    """P9: one more slot than residents lets every sequence capture while a hit is restored; fewer skip silently."""
    profile = validate_deployment(deploy(*FLAVOURS["hybrid"], max_batch=2))
    sizes = {"recurrent": profile.recurrent_slot_bytes, "partial": profile.partial_slot_bytes}
    enough = {kind: 3 * size for kind, size in sizes.items()}
    with caplog.at_level(logging.WARNING):
        snapshot_slots(profile, config(**enough))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert min(snapshot_slots(profile, config(**{**enough, short: 2 * sizes[short]}))) == 2
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    for part in (short, "buys 2", "max_batch + 1 = 3", str(3 * sizes[short])):
        assert part in caplog.text
