"""The scheduler's pool of resident slots: stable page-table rows, each with an epoch that ages at every release."""

from __future__ import annotations

from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.types import ResidentRef

__all__ = ["ResidentSlotPool"]


class ResidentSlotPool:
    """``capacity`` slots, handed out last-in first-out, slot 0 first. Epochs start at 1.

    A slot must not be released while device work may touch its row: release it after the coordinator has released the
    sequence (after ``finish``, ``compact_batch`` or ``retract_sequence_admission`` returned).
    """

    __slots__ = ("_epochs", "_free", "_taken")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ContractViolation(f"resident slot pool: capacity must be 0 or more, got {capacity}")
        self._free = list(range(capacity - 1, -1, -1))
        self._epochs = [1] * capacity
        self._taken = [False] * capacity

    @property
    def free_count(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def acquire(self) -> ResidentRef | None:
        """A free slot, or None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return ResidentRef(slot, self._epochs[slot])

    def release(self, ref: ResidentRef) -> bool:
        """Give a slot back; False for a stale or unknown ref, and nothing changes then."""
        if not self.contains(ref):
            return False
        self._taken[ref.slot] = False
        self._epochs[ref.slot] += 1
        self._free.append(ref.slot)
        return True

    def contains(self, ref: ResidentRef) -> bool:
        """Whether the ref is the current holder of its slot."""
        known = 0 <= ref.slot < len(self._taken)
        return known and self._taken[ref.slot] and self._epochs[ref.slot] == ref.epoch
