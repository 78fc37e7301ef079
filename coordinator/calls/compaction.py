"""Compaction: sequences that ended leave the batch, the others close the ranks. Resident rows never move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import DeviceArray
from context_cache.coordinator.arguments import Int32Array, as_index, as_int32
from context_cache.coordinator.calls.terminal import TerminalCall
from context_cache.coordinator.core import Core, PendingMapping, Request
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.ledger import BOUND

__all__ = ["CompactionCall", "check_mapping", "check_tensor"]


def check_mapping(values: Sequence[int] | Int32Array, new_size: int, old_size: int) -> Int32Array:
    """The mapping as int32[old_size]: -1 retires, all others are 0, 1, 2, ... without gaps, ``new_size`` of them.

    Raises ContractViolation. Survivors keep their order because the in-place compaction on the device walks upward.
    """
    mapping = as_int32(values, "old_to_new")
    new_size = as_index(new_size, "new_batch_size")
    if mapping.size != old_size:
        raise ContractViolation(f"old_to_new has {mapping.size} entries for {old_size} sequences; give one per slot")
    kept = mapping[mapping != -1]
    if not np.array_equal(kept, np.arange(kept.size)):
        raise ContractViolation(
            f"old_to_new {mapping.tolist()} must number the survivors 0, 1, 2, ... in their order and retire with -1"
        )
    if kept.size != new_size:
        raise ContractViolation(f"old_to_new keeps {kept.size} sequences, but the new batch size is {new_size}")
    return mapping


def check_tensor(tensor: Any, old_size: int) -> DeviceArray:
    """The caller's tensor, flat, cut to ``old_size`` entries. Raises ContractViolation for another dtype or size."""
    dtype, size = getattr(tensor, "dtype", None), getattr(tensor, "size", None)
    if dtype is None or str(dtype) != "int32" or not isinstance(size, int) or size < old_size:
        raise ContractViolation(
            f"device_batch_mapping must be an int32 device array of at least {old_size} entries, got {size} of {dtype}"
        )
    flags = getattr(tensor, "flags", None)
    if not getattr(flags, "c_contiguous", True) or not getattr(flags, "writeable", True):
        # A reshape of such a tensor is a copy, so the caller would never see the mapping.
        raise ContractViolation("device_batch_mapping must be contiguous and writable; pass the tensor itself, no view")
    return tensor.reshape(-1)[:old_size]


class CompactionCall(TerminalCall):
    """begin_batch_compaction and compact_batch."""

    __slots__ = ("mapping", "mapping_tensor", "new_size")

    def __init__(self, core: Core, request: Request, event: str, pending: PendingMapping) -> None:
        super().__init__(core, request, event)
        self.mapping = pending.mapping
        self.mapping_tensor = pending.tensor
        self.new_size = pending.new_size

    @property
    def survivors_remain(self) -> bool:
        return self.new_size > 0

    @property
    def joiner_waits(self) -> bool:
        """At the begin: whether one waits now. At the end: whether one survives."""
        if self.event == "begin_batch_compaction":
            return self.request.joiners > 0
        return bool((self.core.ledger.state[self._surviving()] == BOUND).any())

    @property
    def lengths(self) -> Int32Array:
        return self.core.lengths_of(self.request)

    @property
    def draft_lengths(self) -> Int32Array:
        return self.core.common_lengths_of(self.request)

    @property
    def retired_residents(self) -> tuple[int, ...]:
        """Resident slots that leave, in logical order."""
        return tuple(self.request.order[self.mapping == -1].tolist())

    def unbind_retired(self) -> None:
        self.core.rows.unbind([self.core.ledger.ref(slot) for slot in self.retired_residents])

    def retire(self) -> None:
        core, request = self.core, self.request
        retired = self.retired_residents
        for slot in retired:
            core.give_back(request, slot)
        request.order_by(self._surviving(), core.ledger)
        request.recount(core.ledger)

    def _surviving(self) -> npt.NDArray[np.int64]:
        # After retire() the order is the survivors already.
        order = self.request.order
        return order if order.size == self.new_size else order[self.mapping >= 0]
