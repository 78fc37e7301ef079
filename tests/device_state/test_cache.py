"""The live device state of each flavour (30.3): what is allocated, in which shapes, and clearing a resident row."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import FaultyBackend, HostBackend, RecordingBackend
from context_cache.backends.base import DeviceError
from context_cache.coordinator import ContractViolation, HybridCacheManager, KVPageTable, allocate_resources
from context_cache.coordinator.device import DeviceFace

FLAVOURS = ["vanilla", "eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp"]
WITH_DRAFT = {"eagle", "draft", "hybrid-mtp"}
WITH_STATE = {"hybrid", "recurrent", "hybrid-mtp"}


@pytest.fixture
def backend():
    return RecordingBackend(HostBackend())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_each_flavour_gets_what_it_needs_and_nothing_else(deployment_of, backend, flavour):
    pages = 0 if flavour == "recurrent" else 12
    resources = allocate_resources(deployment_of(flavour), pages, backend)
    assert (resources.base_page_table is None) is (flavour == "recurrent")
    assert (resources.draft_cache is None) is (resources.draft_page_table is None) is (flavour not in WITH_DRAFT)
    assert bool(resources.base_cache.recurrent_states) is (flavour in WITH_STATE)
    assert bool(resources.base_cache.kv_pools) is (flavour != "recurrent")
    if flavour in WITH_DRAFT:
        draft = resources.draft_cache
        assert draft.num_pages == resources.draft_page_table.num_pages == 12
        assert draft.recurrent_states == draft.conv_states == []
        assert draft.lengths.shape == (3,)
        assert draft.lengths is not resources.base_cache.lengths
        assert isinstance(resources.draft_page_table, KVPageTable)
        assert resources.draft_page_table.max_pages_per_seq == 4
    assert backend.log == [], "allocation is no device work"


def test_the_shapes_of_a_hybrid_model(deployment_of, backend):
    """30.3: pools per attention layer, borrowed ones shared; state per recurrent layer, in its own dtypes."""
    cache = HybridCacheManager(deployment=deployment_of("hybrid"), num_pages=12, backend=backend)
    assert [pool.shape for pool in cache.kv_pools] == [(2, 12, 4, 2, 3), (2, 12, 4, 2, 3), (2, 12, 4, 1, 8)]
    assert cache.kv_pools[1] is cache.kv_pools[0]
    assert cache.kv_pools[2] is not cache.kv_pools[0]
    assert [state.shape for state in cache.recurrent_states] == [(3, 2, 3, 2), (3, 1, 2, 3)]
    assert [state.dtype for state in cache.recurrent_states] == [np.float32, np.uint16]
    assert [conv.shape for conv in cache.conv_states] == [(3, 5, 4), (3, 2, 2)]
    assert [conv.dtype for conv in cache.conv_states] == [np.float16, np.float32]


@pytest.mark.parametrize(("kv_dtype", "stored"), [("float16", np.float16), ("float8", np.uint8)])
def test_the_draft_has_its_own_layers_pages_and_the_base_models_dtype(deployment_of, backend, kv_dtype, stored):
    resources = allocate_resources(deployment_of("draft", kv_dtype=kv_dtype), 12, backend, draft_pages=15)
    pools = resources.draft_cache.kv_pools
    assert [pool.shape for pool in pools] == [(2, 15, 4, 1, 8)] * 2
    assert pools[0] is pools[1]
    assert {pool.dtype.type for pool in (*pools, *resources.base_cache.kv_pools)} == {stored}
    assert resources.draft_page_table.num_pages == resources.draft_cache.num_pages == 15
    assert resources.base_cache.num_pages == resources.base_page_table.num_pages == 12


@pytest.mark.parametrize("flavour", [name for name in FLAVOURS if name not in WITH_DRAFT])
def test_a_draft_cache_needs_a_draft_with_pages(deployment_of, backend, flavour):
    with pytest.raises(ContractViolation, match="no draft with K/V of its own"):
        HybridCacheManager(deployment=deployment_of(flavour), num_pages=12, backend=backend, draft=True)
    with pytest.raises(ContractViolation, match="draft_pages is 12, but this deployment has no draft"):
        allocate_resources(deployment_of(flavour), 0 if flavour == "recurrent" else 12, backend, draft_pages=12)


def test_the_draft_pool_keeps_the_pool_minimum(deployment_of, backend):
    with pytest.raises(ContractViolation, match="11 draft pages are fewer"):
        allocate_resources(deployment_of("eagle"), 12, backend, draft_pages=11)
    resources = allocate_resources(deployment_of("eagle", enforce_min_pool=False), 12, backend, draft_pages=1)
    assert resources.draft_cache.num_pages == 1


def test_a_pure_recurrent_deployment_takes_no_pages(deployment_of, backend):
    with pytest.raises(ContractViolation, match="num_pages must be 0, got 12"):
        allocate_resources(deployment_of("recurrent"), 12, backend)


# ---- clearing a resident row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", sorted(WITH_STATE))
def test_clearing_a_resident_slot_zeroes_that_row_of_every_state_tensor(make, flavour):
    world = make(flavour)
    wanted = world.copies()
    for name, array in wanted.items():
        if name.startswith(("recurrent ", "conv ")) and "slab" not in name:
            array[1] = 0
    assert world.cache.clear_resident_slot(1, world.stream) is True
    assert world.log == ["clear_resident_row"]
    world.run()
    world.expect(wanted)


@pytest.mark.parametrize("flavour", [name for name in FLAVOURS if name not in WITH_STATE])
def test_clearing_a_resident_slot_asks_nothing_of_the_device_without_recurrent_layers(deployment_of, backend, flavour):
    stream = backend.new_stream()
    cache = HybridCacheManager(deployment=deployment_of(flavour), num_pages=12, backend=backend)
    assert cache.clear_resident_slot(0, stream) is False
    assert backend.log == []


@pytest.mark.parametrize("flavour", ["vanilla", "hybrid"])
@pytest.mark.parametrize("slot", [-1, 3, True, 1.0, None])
def test_a_resident_slot_out_of_range_is_refused(deployment_of, backend, flavour, slot):
    cache = HybridCacheManager(deployment=deployment_of(flavour), num_pages=12, backend=backend)
    with pytest.raises(ContractViolation, match=rf"resident slot ({slot} is outside 0\.\.2|must be an integer)"):
        cache.clear_resident_slot(slot, backend.new_stream())
    assert backend.log == []


# ---- what the lifecycle rows see -------------------------------------------------------------------------------------


def face(world, resources=None):
    resources = resources or world.resources
    return DeviceFace(world.backend, resources, world.storage, world.stream, world.host.synchronize, None)


def test_retired_rows_are_cleared_by_one_verb(make):
    """30.5, compact_batch: the rows of all retired resident slots, whatever their number."""
    world = make("hybrid")
    device = face(world)
    assert device.clear_resident_state((0, 2)) is True
    assert world.log == ["zero_rows"]
    assert device.drain().ok
    for tensor in (*world.cache.recurrent_states, *world.cache.conv_states):
        assert not tensor[[0, 2]].any()
        assert tensor[1].any()


def test_a_failed_clear_is_a_device_error(make):
    world = make("hybrid")
    world.backend.arm(1)
    with pytest.raises(DeviceError):
        face(world).clear_resident_state((0, 2))


def test_a_pure_recurrent_deployment_has_no_rows_to_upload(make):
    world = make("recurrent")
    device = face(world)
    assert device.upload_base_rows() is False
    assert device.reset_base_lengths(np.array([4, 5], np.int32)) is True
    assert device.drain().ok
    assert world.cache.device_lengths().tolist() == [4, 5, 0]
    assert world.log == ["reset_lengths"]


def test_an_attention_only_deployment_clears_nothing(deployment_of):
    host = HostBackend()
    backend = FaultyBackend(host, fail_action=1)
    resources = allocate_resources(deployment_of("vanilla"), 12, backend)
    device = DeviceFace(backend, resources, None, backend.new_stream(), host.synchronize, None)
    assert device.clear_resident_state((0, 1, 2)) is False
