"""Common lengths of a speculative batch, as a runtime follows them from round to round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from context_cache.coordinator.arguments import Int32Array, as_index, as_int32
from context_cache.coordinator.errors import ContractViolation

__all__ = ["SpecCommonStateTracker"]


class SpecCommonStateTracker:
    """How far base and draft state agree, for each sequence of a running speculative batch.

    A draft is fed with what the round before accepted, so it lags by one round: the first round reports the input
    length, each later one adds what the round before it accepted.

    input_lengths: int32[n], at least 0. pruned: tokens of each input that the draft never sees (dropped media tokens),
    one number for all or int32[n]; at least 0 and at most the input.
    """

    def __init__(self, input_lengths: Int32Array | Sequence[int], pruned: Int32Array | Sequence[int] | int = 0) -> None:
        inputs = as_int32(input_lengths, "input_lengths")
        dropped = (
            as_int32([as_index(pruned, "pruned")] * inputs.size, "pruned")
            if isinstance(pruned, int | np.integer)
            else as_int32(pruned, "pruned")
        )
        if dropped.size != inputs.size:
            raise ContractViolation(f"{dropped.size} pruned counts were given for {inputs.size} inputs; give one each")
        wrong = ((dropped < 0) | (dropped > inputs)).nonzero()[0]
        if wrong.size:
            slot = int(wrong[0])
            raise ContractViolation(
                f"slot {slot} has {int(inputs[slot])} input tokens of which {int(dropped[slot])} are pruned; "
                "give from 0 to all of them",
                slot=slot,
            )
        self._lengths = inputs - dropped

    @property
    def lengths(self) -> Int32Array:
        """int32[n], copied: what the round that completes next reports."""
        return self._lengths.copy()

    def record(self, accepted: Int32Array | Sequence[int]) -> None:
        """A round has completed: int32[n], how many tokens each sequence accepted in it (0: it held)."""
        counts = as_int32(accepted, "accepted")
        if counts.size != self._lengths.size:
            raise ContractViolation(f"{counts.size} accepted counts were given for {self._lengths.size} sequences")
        if counts.size and int(counts.min()) < 0:
            raise ContractViolation(f"slot {int(counts.argmin())} accepted {int(counts.min())} tokens; give 0 or more")
        self._lengths = self._lengths + counts

    def compact(self, mapping: Int32Array | Sequence[int]) -> None:
        """Follow a compaction: int32[n], the new slot of each sequence, ascending without gaps, or -1: it left."""
        targets = as_int32(mapping, "mapping")
        kept = targets >= 0
        if targets.size != self._lengths.size or not np.array_equal(targets[kept], np.arange(int(kept.sum()))):
            raise ContractViolation(
                f"the mapping {targets.tolist()} does not number those who stay of {self._lengths.size} sequences "
                "from 0 on; give the mapping of the compaction"
            )
        self._lengths = self._lengths[kept]
