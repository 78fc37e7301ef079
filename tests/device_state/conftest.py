"""Deployments of every flavour, and a world around a snapshot storage: live tensors, slabs, a stream that runs late.

``make(flavour)`` fills every live tensor and every slab with random bytes, NaN patterns included, so that a copy that
is not byte exact, or touches what it must not touch, changes something that a test compares.
"""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import FaultyBackend, HostBackend, HostStream, RecordingBackend
from context_cache.coordinator import (
    DeploymentConfig,
    HybridSnapshotStorage,
    LayerGeometry,
    SpecConfig,
    SpecMode,
    allocate_resources,
)

PAGE, BATCH, PAGES, DRAFT_PAGES = 4, 3, 12, 13
ATTENTION = LayerGeometry.attention(kv_heads=2, head_dim=3)
BORROWER = LayerGeometry.attention(kv_heads=2, head_dim=3, kv_donor=0)
WIDE = LayerGeometry.attention(kv_heads=1, head_dim=8)
RECURRENT = LayerGeometry.recurrent(heads=2, head_dim=3, state=2, conv_dim=5, conv_kernel=4)
NARROW = LayerGeometry.recurrent(1, 2, 3, 2, 2, state_dtype="bfloat16", conv_dtype="float32")


def spec(mode, *layers, **fields):
    return SpecConfig(mode=mode, draft_layers=layers, **fields)


FLAVOURS = {
    "vanilla": ((ATTENTION, BORROWER, WIDE), None),
    "eagle": ((ATTENTION,), spec(SpecMode.EAGLE, WIDE)),
    "draft": ((ATTENTION,), spec(SpecMode.DFLASH, WIDE, LayerGeometry.attention(1, 8, kv_donor=0))),
    "shared-kv": ((ATTENTION,), spec(SpecMode.SHARED_KV)),
    "hybrid": ((ATTENTION, RECURRENT, BORROWER, NARROW, WIDE), None),
    "recurrent": ((RECURRENT, NARROW), None),
    "hybrid-mtp": ((RECURRENT, ATTENTION, WIDE), spec(SpecMode.MTP, ATTENTION, WIDE, hidden_dim=6)),
}


def deployment_of(flavour, **fields):
    layers, spec_config = FLAVOURS[flavour]
    fields = {"max_batch": BATCH, "kv_capacity_tokens": 4 * PAGE, "page_size": PAGE, **fields}
    return DeploymentConfig(layers=layers, spec_config=spec_config, **fields)


def random_bytes(array, rng):
    array.view(np.uint8).reshape(-1)[:] = rng.integers(0, 256, array.nbytes, dtype=np.uint8)


class World:
    """A storage with 4 recurrent and 5 partial slots, and everything that its copies may and may not touch."""

    new_backend = HostBackend  # or what the fixtures below were given

    def __init__(self, flavour, *, partly=False, seed=0, **fields):
        self.deployment = deployment_of(flavour, **fields)
        self.host = self.new_backend()
        self.recording = RecordingBackend(self.host)
        self.backend = FaultyBackend(self.recording, partly=partly)
        self.stream = self.backend.new_stream()
        pure = flavour == "recurrent"
        paged = flavour == "hybrid-mtp"
        self.resources = allocate_resources(
            self.deployment, 0 if pure else PAGES, self.backend, DRAFT_PAGES if paged else None
        )
        self.cache, self.draft = self.resources.base_cache, self.resources.draft_cache
        self.recurrent_slots, self.partial_slots = 4, 0 if pure else 5
        self.storage = HybridSnapshotStorage(
            self.deployment, self.resources, self.recurrent_slots, self.partial_slots, self.backend
        )
        rng = np.random.default_rng(seed)
        for array in self.arrays().values():
            random_bytes(array, rng)
        self.recording.log.clear()

    def device(self, values):
        """A device array with these values, as a runtime has one."""
        array = self.host.array(values.shape, str(values.dtype))
        array[...] = values
        return array

    def arrays(self):
        """Every array that a copy could touch, by name; a borrowed pool once."""
        named = {
            "recurrent": self.cache.recurrent_states,
            "conv": self.cache.conv_states,
            "pool": self.cache.kv_pools,
            "draft pool": [] if self.draft is None else self.draft.kv_pools,
            "recurrent slab": self.storage.recurrent_slabs,
            "conv slab": self.storage.conv_slabs,
            "partial slab": self.storage.partial_slabs,
            "draft partial slab": self.storage.draft_partial_slabs,
            "hidden slab": [] if self.storage.hidden_slab is None else [self.storage.hidden_slab],
        }
        return {f"{name} {index}": array for name, arrays in named.items() for index, array in enumerate(arrays)}

    def bytes(self):
        """The contents of all of them."""
        return {name: array.tobytes() for name, array in self.arrays().items()}

    def copies(self):
        """A changeable copy of all of them, to build what is expected in."""
        return {name: array.copy() for name, array in self.arrays().items()}

    def expect(self, copies):
        """The arrays are, byte for byte, these."""
        found = self.bytes()
        for name, array in copies.items():
            assert found[name] == array.tobytes(), name

    def run(self):
        assert self.host.synchronize(self.stream)

    def nothing_is_enqueued(self):
        """Neither a verb was called nor, where the stream runs late, does anything wait in it."""
        return self.log == [] and (not isinstance(self.stream, HostStream) or self.stream.pending == ())

    @property
    def log(self):
        return self.recording.log


@pytest.fixture(scope="session")  # a class without state; Hypothesis asks for a fixture that outlives one example
def make(new_backend):
    World.new_backend = new_backend
    return World


@pytest.fixture
def mtp(make):
    return make("hybrid-mtp")


@pytest.fixture(name="deployment_of")
def deployment_factory():
    return deployment_of
