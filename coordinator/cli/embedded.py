"""The embedded runtime: what a real runtime does around the coordinator.

Two models. ``StubModel`` (module ``stub``) computes states through the device's rows; every flavour but vanilla, and
every verified run, uses it. ``EmbeddedModel`` computes nothing, so that a plain run measures the coordinator alone: its
tokens depend on the request's place in the workload, on the position in the sequence and on the seed, and
on nothing else: not on the batch a request happens to run in, not on what was reused. So two runs of one workload agree
token for token whatever the page count or the batch size, and a preempted request can be given its tokens back
without anyone having stored them.

What the coordinator leaves to a runtime is done here as on a real device: work is enqueued on the stream and the stream
is synchronised before a completion is reported. Each model step moves the device's length vector, and ``check_lengths``
holds it against the scheduler's own account, so that a lost upload or a wrong compaction ends the run.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from context_cache.coordinator import (
    ContextCacheConfig,
    ResidentSlotPool,
    allocate_resources,
    validate_deployment,
)
from context_cache.coordinator.cli.flavours import FLAVOURS, Flavour
from context_cache.coordinator.cli.measured import MeasuredCoordinator
from context_cache.coordinator.cli.platform import Platform
from context_cache.coordinator.cli.sizing import RunSize
from context_cache.coordinator.cli.stub import StubModel
from context_cache.coordinator.manager import ResourceDemand
from context_cache.machines import Recorder

__all__ = ["EmbeddedModel", "EmbeddedRuntime"]

# Odd 64-bit constants with well spread bits; the finaliser below is the usual xor-shift-multiply avalanche.
_ORDINAL_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION_STEP: Final = np.uint64(0xD1342543DE82EF95)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


class EmbeddedModel:
    """Deterministic tokens in [0, 2**31) for the requests of one run."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = np.uint64(seed % 2**64)

    def tokens(self, ordinals: NDArray[np.int64], positions: NDArray[np.integer[Any]], steps: int) -> NDArray[np.int32]:
        """The tokens of ``steps`` consecutive positions of several sequences, int32[steps, n].

        ordinals: int64[n], the place of each request in the workload. positions: integers[n], the position of the first
        token of each sequence (the length of its token list before that token is appended).
        """
        # Unsigned arrays wrap silently, which is what the arithmetic wants; NumPy warns for scalars only.
        bases = ordinals.astype(np.uint64) * _ORDINAL_STEP + self._seed
        where = positions.astype(np.uint64) + np.arange(steps, dtype=np.uint64)[:, np.newaxis]
        mixed = bases ^ (where * _POSITION_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        tokens: NDArray[np.int32] = (mixed >> np.uint64(33)).astype(np.int32)
        return tokens

    def sequence(self, ordinal: int, position: int, count: int) -> NDArray[np.int32]:
        """The ``count`` tokens of one sequence from ``position`` on, int32[count]."""
        return self.tokens(np.array([ordinal]), np.array([position]), count)[:, 0]


class EmbeddedRuntime:
    """Backend, stream, device memory, resident slots and the coordinator of one run.

    model: None when nothing is computed; the K/V pool is zeroed lazily and then never touched.
    capacity: what each of the four pools has.
    Raises MemoryError if the pools do not fit.
    """

    def __init__(
        self,
        size: RunSize,
        flavour: Flavour = FLAVOURS["vanilla"],
        *,
        platform: Platform,
        max_records: int | None = None,
        snapshot_slots: int = 0,
        seed: int = 0,
        compute: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        deployment = flavour.deployment(
            max_batch=size.max_batch, row_tokens=size.row_tokens, page_size=size.page_size
        )
        profile = validate_deployment(deployment)
        self.platform: Final = platform
        self._backend = platform.backend
        self.stream: Final = platform.stream
        resources = allocate_resources(deployment, size.pages, self._backend)
        self._cache = resources.base_cache
        self._lengths = platform.view(self._cache.lengths)
        self.capacity: Final = ResourceDemand(
            size.pages,
            size.pages if flavour.has_draft_pages else 0,
            snapshot_slots if flavour.has_recurrent else 0,
            snapshot_slots if flavour.has_recurrent and flavour.has_attention else 0,
        )
        self.model: Final = (
            StubModel(flavour, resources, platform, row_tokens=size.row_tokens, seed=seed)
            if compute
            else None
        )
        self.residents: Final = ResidentSlotPool(size.max_batch)
        self.mapping: Final[Any] = self._backend.array((size.max_batch,), "int32")
        self.coordinator: Final = MeasuredCoordinator(
            ContextCacheConfig(
                enabled=True,
                max_records=max_records,
                recurrent_snapshot_pool_bytes=self.capacity.recurrent_snapshot_slots * profile.recurrent_slot_bytes,
                partial_kv_snapshot_pool_bytes=self.capacity.partial_kv_snapshot_slots * profile.partial_slot_bytes,
            ),
            deployment,
            resources,
            backend=self._backend,
            stream=self.stream,
            recorder=recorder,
        )

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def prefill(self, lengths: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Run the prefill of a founder batch: int32[n] input lengths and int64[n] resident slots, in logical order."""
        if self.model is None:
            self._write_lengths(0, lengths)
        else:
            for logical, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
                self.model.prefill(logical, slot, length)
        self.synchronize()

    def prefill_joiner(self, logical: int, slot: int, start: int, length: int) -> None:
        """Append a sequence to the running batch and run its prefill of tokens ``start`` to ``length``."""
        self._cache.set_active_batch_size(logical + 1)
        self._write_lengths(logical, np.array([length if self.model is None else start], dtype=np.int32))
        if self.model is not None:
            self.model.prefill(logical, slot, length)
        self.synchronize()

    def sampled(self, lengths: NDArray[np.int32], slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens behind ``lengths``, int32[n], which the model has computed."""
        assert self.model is not None, "tokens are sampled where a model computes"
        tokens: NDArray[np.int32] = self.model.tokens[slots, lengths]
        return tokens

    def decode(self, batch: int, slots: NDArray[np.int64] | None = None) -> None:
        """Run one decode step of the ``batch`` sequences that the length vector describes.

        slots: their resident slots, int64[n], where a model computes.
        """
        if self.model is not None:
            assert slots is not None, "a model that computes has to know the resident slots"
            self.model.decode(slots)
            self.synchronize()
            return
        lengths = self._lengths

        def work() -> None:
            lengths[:batch] += 1

        self.platform.enqueue(work, "decode")
        self.synchronize()

    def check_lengths(self, expected: NDArray[np.int32]) -> bool:
        """Whether the device lengths are those that the scheduler expects, int32[n] in logical order."""
        return bool(np.array_equal(self._backend.to_host(self._cache.lengths)[: expected.size], expected))

    def synchronize(self) -> None:
        """Wait for the model, as a runtime does before it reads the sampled tokens."""
        self._backend.synchronize(self.stream)

    def _write_lengths(self, first: int, values: NDArray[np.int32]) -> None:
        lengths = self._lengths

        def work() -> None:
            lengths[first : first + values.size] = values

        self.platform.enqueue(work, "prefill")
