"""Random schedules on the device and on the host: the same rows, lengths, state and snapshots whenever it settles.

CONTEXT_CACHE_GPU_SCHEDULES sets their number.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from context_cache.backends import HostBackend
from context_cache.backends.base import SnapshotCopies
from context_cache.coordinator import (
    DeploymentConfig,
    HybridSnapshotStorage,
    LayerGeometry,
    SpecConfig,
    SpecMode,
    allocate_resources,
)
from context_cache.coordinator.device import DeviceFace

pytestmark = pytest.mark.gpu

SCHEDULES = int(os.environ.get("CONTEXT_CACHE_GPU_SCHEDULES", "1000"))
BLOCKS = 10
BATCH, WIDTH, PAGE, PAGES, SLOTS, PARTIALS = 6, 5, 4, 40, 4, 5
WIDE, ODD = LayerGeometry.attention(kv_heads=1, head_dim=8), LayerGeometry.attention(kv_heads=3, head_dim=5)
STATE = LayerGeometry.recurrent(heads=2, head_dim=3, state=2, conv_dim=5, conv_kernel=4)
NARROW = LayerGeometry.recurrent(1, 2, 3, 2, 2, state_dtype="bfloat16", conv_dtype="float32")
DEPLOYMENT = DeploymentConfig(
    max_batch=BATCH,
    kv_capacity_tokens=WIDTH * PAGE,
    page_size=PAGE,
    layers=(WIDE, STATE, ODD, NARROW),
    spec_config=SpecConfig(mode=SpecMode.MTP, draft_layers=(ODD,), hidden_dim=6),
)


class Side:
    """One backend with everything that a schedule touches."""

    def __init__(self, backend):
        self.backend = backend
        self.stream = backend.new_stream()
        self.resources = allocate_resources(DEPLOYMENT, PAGES, backend)
        self.storage = HybridSnapshotStorage(DEPLOYMENT, self.resources, SLOTS, PARTIALS, backend)
        self.face = DeviceFace(backend, self.resources, self.storage, self.stream, backend.synchronize, None)
        self.mapping = backend.array((BATCH,), "int32")
        base, draft = self.resources.base_cache, self.resources.draft_cache
        self.data = [
            *base.recurrent_states, *base.conv_states, *base.kv_pools, *draft.kv_pools, *self.storage.recurrent_slabs,
            *self.storage.conv_slabs, *self.storage.partial_slabs, *self.storage.draft_partial_slabs,
        ]  # fmt: skip
        self.small = [
            self.resources.base_page_table.device_array, self.resources.draft_page_table.device_array,
            base.lengths, draft.lengths, self.mapping,
        ]  # fmt: skip

    def contents(self, arrays):
        return [self.backend.to_host(array).tobytes() for array in arrays]


def fill(sides, rng):
    for arrays in zip(*(side.data for side in sides), strict=True):
        values = rng.integers(0, 256, arrays[0].nbytes, dtype=np.uint8)
        for array in arrays:
            array[...] = values.view(array.dtype).reshape(array.shape)


def act(rng, active):
    """One random action: a function of a side, and the active batch afterwards."""

    def some(limit, count, unique=True):
        return tuple(int(i) for i in rng.choice(limit, count, replace=not unique))

    kind, count = int(rng.integers(9)), int(rng.integers(1, SLOTS + 1))
    tokens = tuple(int(n) for n in rng.integers(1, PAGE + 1, count))
    if kind == 0:
        rows = [(slot, some(PAGES, int(rng.integers(0, WIDTH + 1)))) for slot in some(BATCH, count)]
        drafts = [(slot, pages[:2]) for slot, pages in rows]

        def upload(side):
            side.resources.base_page_table.set_rows(rows)
            side.resources.draft_page_table.set_rows(drafts)
            side.face.upload_base_rows()
            side.face.upload_draft_rows()

        return upload, active
    if kind == 1:
        lengths = rng.integers(0, 99, int(rng.integers(1, BATCH + 1))).astype(np.int32)

        def reset(side):
            side.face.reset_base_lengths(lengths)
            side.face.reset_draft_lengths(lengths + np.int32(1))

        return reset, lengths.size
    if kind == 2 and active:
        keep = rng.random(active) < 0.7
        mapping = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
        new = int(keep.sum())

        def compact(side):
            side.face.copy_mapping(mapping, side.mapping)
            side.face.compact_base_lengths(side.mapping, active, new)
            side.face.compact_draft_lengths(side.mapping, active, new)

        return compact, new
    if kind == 3:
        return lambda side: side.resources.base_cache.commit_sequence_length(2, side.stream), active
    if kind == 4:
        retired = some(BATCH, int(rng.integers(1, 3)))
        return lambda side: side.face.clear_resident_state(retired), active
    partial = some(PARTIALS, count)
    copies = {"slots": some(SLOTS, count), "rows": some(BATCH, count), "partial_slots": partial, "tokens": tokens}
    pages = {"base_pages": some(PAGES, count), "draft_pages": some(PAGES, count) if rng.random() < 0.5 else None}
    batch = SnapshotCopies(**copies, **pages)
    verb = ("capture_recurrent", "restore_recurrent", "capture_partial", "restore_partial")[kind % 4]
    return lambda side: getattr(side.face, verb)(batch), active


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_device_holds_what_the_host_backend_holds(backend, block):
    rng = np.random.default_rng(block)
    sides = [Side(HostBackend()), Side(backend)]
    fill(sides, rng)
    active = 0
    for number in range(SCHEDULES // BLOCKS):
        for _ in range(int(rng.integers(1, 12))):
            action, active = act(rng, active)
            for side in sides:
                action(side)
        for side in sides:
            assert side.face.drain().ok
        # Rows and lengths each time, all bytes at every eighth settled point.
        arrays = [side.small if number % 8 else side.small + side.data for side in sides]
        host, device = (side.contents(chosen) for side, chosen in zip(sides, arrays, strict=True))
        assert host == device, f"block {block}, schedule {number}"
