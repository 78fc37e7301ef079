"""Resources that served another coordinator before: their page tables begin clear, not new, and the trace says so."""

from __future__ import annotations

import pytest

from context_cache.backends import HostBackend
from context_cache.coordinator import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractViolation,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentRef,
    allocate_resources,
)
from context_cache.coordinator.traces import TraceRecorder, replay

LAYERS = (LayerGeometry.attention(kv_heads=1, head_dim=4),)
DEPLOYMENT = DeploymentConfig(max_batch=2, kv_capacity_tokens=64, page_size=4, layers=LAYERS)
ONE = DecodingKvHeadroom(1)


@pytest.fixture
def place():
    backend = HostBackend()
    return backend, backend.new_stream(), allocate_resources(DEPLOYMENT, 64, backend)


def coordinator(place, recorder=None):
    backend, stream, resources = place
    return ContextCacheCoordinator(
        ContextCacheConfig(enabled=True), DEPLOYMENT, resources, backend=backend, stream=stream, recorder=recorder
    )


def live(cache, place):
    prompt = ContextCacheSequenceAdmission([7] * 9, resident=ResidentRef(0, 1))
    handle = cache.begin_request(ContextCacheBatchAdmission([prompt]), ONE, place[1]).admission.request
    cache.prepare_prefill(handle)
    place[0].synchronize(place[1])
    cache.finalize_prefill_publication(handle, [ContextCacheSequenceAdvance([1], 9)])
    cache.finish(handle)
    cache.close()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_coordinator_on_used_resources_replays(place, tmp_path, before):
    """How it could go wrong: on new tables the first upload carries every row, on used ones only those that changed."""
    for _ in range(before):
        live(coordinator(place), place)
    with TraceRecorder(tmp_path / "t.jsonl") as recorder:
        live(coordinator(place, recorder), place)
    assert (b'"clear_rows":true' in (tmp_path / "t.jsonl").read_bytes()) == (before > 0)
    assert replay(tmp_path / "t.jsonl").equal


def test_a_table_that_holds_something_is_refused_before_anything_is_written(place, tmp_path):
    live(coordinator(place), place)
    place[2].base_page_table.set_row(1, [3])
    with pytest.raises(ContractViolation, match="clear and upload their rows first"):
        coordinator(place, TraceRecorder(tmp_path / "t.jsonl"))
    assert (tmp_path / "t.jsonl").read_bytes() == b""
