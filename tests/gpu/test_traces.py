"""A trace recorded on the host replays on the GPU and the other way round; recorded failures happen again there."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("msgspec") is None, reason="traces need context-cache-coordinator[cli]"),
]

if find_spec("msgspec") is not None:
    from context_cache.backends import DeviceError, FaultyBackend, FaultySynchronizer, HostBackend
    from context_cache.coordinator import (
        BatchAdvance,
        ContextCacheBatchAdmission,
        ContextCacheConfig,
        ContextCacheCoordinator,
        ContextCacheSequenceAdmission,
        ContextCacheSequenceAdvance,
        DecodingKvHeadroom,
        DeploymentConfig,
        LayerGeometry,
        ResidentRef,
        allocate_resources,
    )
    from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES, FLAVOURS
    from context_cache.coordinator.cli.scheduler import run_workload
    from context_cache.coordinator.cli.sizing import size_run
    from context_cache.coordinator.cli.workload import read_workload
    from context_cache.coordinator.cli.workloads import shipped_workload
    from context_cache.coordinator.traces import TraceRecorder, replay
else:
    FLAVOUR_NAMES = ()

OTHER = {"host": "cupy", "cupy": "host"}


def record_run(path, flavour, backend):
    kind = FLAVOURS[flavour]
    with shipped_workload() as file:
        workload = read_workload(file, name="shipped workload").cut(limit=25, max_new_tokens=None)
    batch = 1 if kind.mtp else 8
    size = size_run(
        workload, page_size=128, max_batch=batch, pages=None, row_tokens=None, headroom=kind.width,
        paged=kind.has_attention,
    )  # fmt: skip
    slots = 2 * batch + 64 if kind.has_recurrent else 0
    with TraceRecorder(path) as recorder:
        run_workload(workload, size, flavour=kind, backend=backend, snapshot_slots=slots, recorder=recorder)
    assert recorder.failure is None


@pytest.mark.parametrize("recorded_on", ["host", "cupy"])
@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_a_run_replays_on_both_backends(backend, tmp_path, flavour, recorded_on):
    record_run(tmp_path / "t.jsonl", flavour, recorded_on)
    for name in (recorded_on, OTHER[recorded_on]):
        result = replay(tmp_path / "t.jsonl", backend=name)
        assert result.equal, result.difference
        assert result.steps > 100


def test_both_backends_record_the_same_bytes(backend, tmp_path):
    for name in ("host", "cupy"):
        record_run(tmp_path / name, "vanilla", name)
    assert (tmp_path / "host").read_bytes() == (tmp_path / "cupy").read_bytes()
    assert (tmp_path / "host.tokens").read_bytes() == (tmp_path / "cupy.tokens").read_bytes()


def _story(inner, path, *, fail_action=None, fail_drain=None):
    """One request that grows and ends, with one failure on the way."""
    faulty = FaultyBackend(inner)
    sync = FaultySynchronizer(inner.synchronize)
    stream = inner.new_stream("story")
    layers = (LayerGeometry.attention(kv_heads=1, head_dim=4),)
    deployment = DeploymentConfig(max_batch=2, kv_capacity_tokens=64, page_size=4, layers=layers)
    resources = allocate_resources(deployment, 64, faulty)
    one = DecodingKvHeadroom(1)
    with TraceRecorder(path) as recorder:
        cache = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True), deployment, resources, backend=faulty, stream=stream, synchronizer=sync,
            recorder=recorder,
        )  # fmt: skip
        faulty.arm(fail_action)
        sync.arm(fail_drain)
        sequences = [ContextCacheSequenceAdmission([7] * 9, resident=ResidentRef(slot, 1)) for slot in range(2)]
        handle = cache.begin_request(ContextCacheBatchAdmission(sequences), one, stream).admission.request
        try:
            cache.prepare_prefill(handle)
            inner.synchronize(stream)
            cache.finalize_prefill_publication(handle, [ContextCacheSequenceAdvance([1], 9)] * 2)
            for length in range(10, 16):
                cache.prepare_decode_step(handle, one)
                inner.synchronize(stream)
                both = np.full(2, length, np.int32)
                cache.complete_decode_step(handle, BatchAdvance.one_token_each(np.ones(2, np.int32), both))
            cache.begin_batch_compaction(handle, [0, -1], 1, faulty.array((2,), "int32"))
            cache.compact_batch(handle)
        except DeviceError:
            pass
        cache.finish(handle)
        faulty.disarm()
        sync.arm()
        cache.shutdown()
    assert recorder.failure is None


@pytest.mark.parametrize("failing", [*({"fail_action": n} for n in range(1, 8)), {"fail_drain": 1}, {"fail_drain": 2}])
def test_recorded_failures_happen_again_on_the_other_backend(backend, tmp_path, failing):
    """C131: what failed on a device is repeated without it."""
    for name, inner in (("host", HostBackend()), ("cupy", backend)):
        _story(inner, tmp_path / name, **failing)
        for target in ("host", "cupy"):
            result = replay(tmp_path / name, backend=target)
            assert result.equal, (name, target, result.difference)
    assert (tmp_path / "host").read_bytes() == (tmp_path / "cupy").read_bytes()
