"""The embedded runtime: what a real runtime does around the coordinator, with a model that computes nothing.

The model's tokens depend on the request's place in the workload, on the position in the sequence and on the seed, and
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

from context_cache.backends import HostBackend
from context_cache.coordinator import (
    ContextCacheConfig,
    DeploymentConfig,
    LayerGeometry,
    ResidentSlotPool,
    allocate_resources,
)
from context_cache.coordinator.cli.measured import MeasuredCoordinator
from context_cache.coordinator.cli.sizing import RunSize

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

    The K/V pool is that of one layer with one head of four FP16 values; it is zeroed lazily and never touched, because
    nothing is computed. Raises MemoryError if the pool does not fit.
    """

    def __init__(self, size: RunSize, *, max_records: int | None = None) -> None:
        deployment = DeploymentConfig(
            max_batch=size.max_batch,
            kv_capacity_tokens=size.row_tokens,
            page_size=size.page_size,
            layers=(LayerGeometry.attention(kv_heads=1, head_dim=4),),
            # One row has to fit, not one row per sequence: a small pool is how refusals and evictions are seen.
            enforce_min_pool=False,
        )
        self._backend = HostBackend()
        self.stream: Final = self._backend.new_stream("embedded")
        resources = allocate_resources(deployment, size.pages, self._backend)
        self._cache = resources.base_cache
        self.residents: Final = ResidentSlotPool(size.max_batch)
        self.mapping: Final[Any] = self._backend.array((size.max_batch,), "int32")
        self.coordinator: Final = MeasuredCoordinator(
            ContextCacheConfig(enabled=True, max_records=max_records),
            deployment,
            resources,
            backend=self._backend,
            stream=self.stream,
        )

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def prefill(self, lengths: NDArray[np.int32]) -> None:
        """Run the prefill of a founder batch: int32[n] input lengths, in logical order."""
        self._write_lengths(0, lengths)
        self.synchronize()

    def prefill_joiner(self, slot: int, length: int) -> None:
        """Append logical slot ``slot`` to the running batch and run its prefill of ``length`` tokens."""
        self._cache.set_active_batch_size(slot + 1)
        self._write_lengths(slot, np.array([length], dtype=np.int32))
        self.synchronize()

    def decode(self, batch: int) -> None:
        """Run one decode step of the ``batch`` sequences that the length vector describes."""
        lengths = self._cache.lengths

        def work() -> None:
            lengths[:batch] += 1

        self.stream.enqueue(work, "decode")
        self.synchronize()

    def check_lengths(self, expected: NDArray[np.int32]) -> bool:
        """Whether the device lengths are those that the scheduler expects, int32[n] in logical order."""
        return bool(np.array_equal(self._backend.to_host(self._cache.lengths)[: expected.size], expected))

    def synchronize(self) -> None:
        """Wait for the model, as a runtime does before it reads the sampled tokens."""
        self._backend.synchronize(self.stream)

    def _write_lengths(self, first: int, values: NDArray[np.int32]) -> None:
        lengths = self._cache.lengths

        def work() -> None:
            lengths[first : first + values.size] = values

        self.stream.enqueue(work, "prefill")
