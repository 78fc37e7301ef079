"""The page table: which physical pages each resident slot reads and writes.

The host rows are the truth, the device rows a copy. Shape ``[max_batch, 2, M]``, int32: half 0 the K page ids, half 1
the V page ids (K id + num_pages), unused entries -1. A row is dirty while it differs from what was uploaded last; a row
that was never uploaded is dirty whatever it holds, because the device memory under it is undefined.

Only K ids and slot numbers travel; the device derives the V ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import Backend, DeviceArray, Stream
from context_cache.backends.staging import StagingRing
from context_cache.coordinator.arguments import Int32Array, as_index, as_int32, as_tuple
from context_cache.coordinator.config import PAGES_MAX
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.types import ResidentRef

__all__ = ["KVPageTable"]

Pages = Sequence[int] | Int32Array


class _Staged:
    """One staging buffer: room for every row, slot numbers in front, so that a device can take both in one copy."""

    __slots__ = ("ids", "slots")

    def __init__(self, backend: Backend, rows: int, width: int) -> None:
        memory: Int32Array = backend.pinned((rows * (1 + width),), "int32")
        self.slots: Int32Array = memory[:rows]
        self.ids: Int32Array = memory[rows:].reshape(rows, width)


class KVPageTable:
    """Rows of K/V page ids, indexed by resident slot.

    Raises ContractViolation for sizes below 1 or more than ``(2**31 - 1) // 2`` pages.
    """

    def __init__(self, *, max_batch: int, max_pages_per_seq: int, num_pages: int, backend: Backend) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_pages_per_seq", max_pages_per_seq),
            ("num_pages", num_pages),
        ):
            if value < 1:
                raise ContractViolation(f"page table: {name} must be at least 1, got {value}")
        if num_pages > PAGES_MAX:
            raise ContractViolation(
                f"page table: {num_pages} pages are more than {PAGES_MAX}; V ids would not fit int32"
            )
        self.max_batch, self.max_pages_per_seq, self.num_pages = max_batch, max_pages_per_seq, num_pages
        self._backend = backend
        self._rows: Int32Array = np.full((max_batch, max_pages_per_seq), -1, np.int32)
        self._uploaded: Int32Array = np.full((max_batch, max_pages_per_seq), -1, np.int32)
        self._unknown = np.ones(max_batch, bool)
        self._dirty = np.ones(max_batch, bool)
        self._any_dirty = True
        self._epochs = np.zeros(max_batch, np.int64)
        self._identity = False
        self._staging = StagingRing(backend, lambda: _Staged(backend, max_batch, max_pages_per_seq))
        self.device_array: DeviceArray = backend.array((max_batch, 2, max_pages_per_seq), "int32")

    @property
    def is_identity(self) -> bool:
        """Whether the rows were set by :meth:`set_identity` and not changed since."""
        return self._identity

    @property
    def dirty_rows(self) -> tuple[int, ...]:
        """Resident slots whose device row is not (known to be) the host row."""
        return tuple(np.flatnonzero(self._dirty).tolist())

    @property
    def any_dirty(self) -> bool:
        """False: the next upload carries nothing. True: it may."""
        return self._any_dirty

    @property
    def is_new(self) -> bool:
        """Whether no row was ever uploaded."""
        return bool(self._unknown.all())

    @property
    def is_clear(self) -> bool:
        """Whether every row is clear, on the device too."""
        return not self._dirty.any() and bool((self._uploaded == -1).all())

    def pending(self) -> tuple[npt.NDArray[np.int64], Int32Array] | None:
        """What the next upload would carry: resident slots int64[k] and their K ids int32[k, M]. None: nothing."""
        if not self._any_dirty:
            return None
        dirty = self._dirty.nonzero()[0]
        return (dirty, self._rows[dirty]) if dirty.size else None

    def set_identity(self) -> None:
        """Row b gets pages b*M .. b*M+M-1.

        Raises ContractViolation if that needs more pages than there are, or a row is bound.
        """
        self._refuse_bound(range(self.max_batch))
        needed = self.max_batch * self.max_pages_per_seq
        if needed > self.num_pages:
            raise ContractViolation(f"page table: identity rows need {needed} pages, there are {self.num_pages}")
        self._rows[:] = np.arange(needed, dtype=np.int32).reshape(self._rows.shape)
        self._note(range(self.max_batch))
        self._identity = True

    def set_row(self, slot: int, ids: Pages) -> None:
        """Row ``slot`` names these K pages; the tail becomes -1.

        Raises ContractViolation, nothing changed: a slot, an id or a number of ids out of range, or a bound row.
        """
        self.set_rows(((slot, ids),))

    def set_rows(self, updates: Iterable[tuple[int, Pages]]) -> None:
        """Several rows, all or none; a slot at most once; empty ids clear the row; bound rows are refused."""
        checked: list[tuple[int, Int32Array]] = []
        for update in as_tuple(updates, "page table: updates"):
            if not isinstance(update, tuple | list) or len(update) != 2:
                raise ContractViolation(f"page table: an update is a pair (slot, ids), got {update!r}")
            checked.append(self._checked(update[0], update[1]))
        self._refuse_bound(slot for slot, _ in checked)
        self._write(checked)

    def _write(self, checked: list[tuple[int, Int32Array]]) -> None:
        slots = [slot for slot, _ in checked]
        if len(set(slots)) != len(slots):
            raise ContractViolation(f"page table: a slot is updated twice in one call: {slots}; merge the updates")
        if not checked:
            return
        for slot, row in checked:
            self._rows[slot, : row.size] = row
            self._rows[slot, row.size :] = -1
        self._note(slots)
        self._identity = False

    def bind(self, rows: Iterable[tuple[ResidentRef, Pages]]) -> None:
        """Give rows to their holders. From here on only the same ref may change or clear the row."""
        bound = list(rows)
        for ref, _ in bound:
            if self._epochs[ref.slot] != 0:
                raise ContractViolation(
                    f"page table: row {ref.slot} is bound to epoch {self._epochs[ref.slot]} already"
                )
        checked = [self._checked(ref.slot, pages) for ref, pages in bound]
        for ref, _ in bound:
            self._epochs[ref.slot] = ref.epoch
        self._write(checked)

    def extend(self, refs: Sequence[ResidentRef], starts: Sequence[int], pages: Sequence[Int32Array]) -> None:
        """Append pages to bound rows: ``pages[i]`` behind the first ``starts[i]`` entries of the row of ``refs[i]``."""
        for ref in refs:
            self._require_holder(ref)
        for ref, start, added in zip(refs, starts, pages, strict=True):
            self._rows[ref.slot, start : start + added.size] = added
            self._dirty[ref.slot] = True
        self._any_dirty = True
        self._identity = False

    def unbind(self, refs: Iterable[ResidentRef]) -> None:
        """Clear rows and give them up."""
        released = list(refs)
        for ref in released:
            self._require_holder(ref)
        for ref in released:
            self._rows[ref.slot] = -1
            self._epochs[ref.slot] = 0
        self._note([ref.slot for ref in released])

    def bound_epoch(self, slot: int) -> int:
        """Epoch of the holder of a row, 0 if nobody holds it."""
        return int(self._epochs[slot])

    def host_row(self, slot: int) -> Int32Array:
        """Read-only view of the K ids, int32[M]."""
        view: Int32Array = self._rows[slot]
        view.flags.writeable = False
        return view

    def host_v_row(self, slot: int) -> Int32Array:
        """The V ids, int32[M]."""
        row = self._rows[slot]
        values: Int32Array = np.where(row >= 0, row + np.int32(self.num_pages), np.int32(-1)).astype(np.int32)
        return values

    def device_rows(self) -> npt.NDArray[Any]:
        """A host copy of the device table, int32[max_batch, 2, M]. The caller has synchronised the stream."""
        return self._backend.to_host(self.device_array)

    def check_invariants(self, slots: Int32Array | None = None) -> None:
        """Ids in range or -1, no live id behind a -1. Raises ContractViolation. None: all rows."""
        self._check(self._rows if slots is None else self._rows[slots])

    def _check(self, rows: Int32Array) -> None:
        # One look at the unsigned value of id + 1 covers both ends of the range, -1 included.
        if rows.size and int((rows + np.int32(1)).view(np.uint32).max()) > self.num_pages:
            raise ContractViolation(f"page table: a row names a page outside 0..{self.num_pages - 1}")
        live = rows >= 0
        if (live[:, 1:] > live[:, :-1]).any():
            raise ContractViolation("page table: a row has a page behind an unused entry")

    def upload(self, stream: Stream) -> bool:
        """Enqueue the dirty rows; False, and no device call, when there are none.

        A row counts as clean only when its upload was enqueued without an error.
        """
        if not self._any_dirty:
            return False
        dirty = self._dirty.nonzero()[0]
        if dirty.size == 0:
            self._any_dirty = False
            return False
        rows = self._rows[dirty]
        self._check(rows)
        # Until the event behind the copy is recorded, what the device has is unknown: the rows stay dirty, whatever the
        # host sets them to meanwhile.
        self._unknown[dirty] = True
        use = self._staging.take()
        try:
            ids, slots = use.buffer.ids[: dirty.size], use.buffer.slots[: dirty.size]
            ids[:] = rows
            slots[:] = dirty
            self._backend.upload_rows(self.device_array, ids, slots, self.num_pages, stream)
        finally:
            self._staging.commit(use, stream)
        self._uploaded[dirty] = rows
        self._unknown[dirty] = False
        self._dirty[dirty] = False
        self._any_dirty = False
        return True

    def drained(self) -> None:
        """Everything enqueued has ended: every staging buffer is free."""
        self._staging.drained()

    def gather_rows(self, dest: DeviceArray, resident_slots: DeviceArray, count: int, stream: Stream) -> None:
        """Enqueue ``dest[i] = row of resident_slots[i]`` for i < count; dest int32[n, 2, M]."""
        self._backend.gather_rows(dest, self.device_array, resident_slots, count, stream)

    def _note(self, slots: Iterable[int]) -> None:
        for slot in slots:
            same = not self._unknown[slot] and np.array_equal(self._rows[slot], self._uploaded[slot])
            self._dirty[slot] = not same
            self._any_dirty = self._any_dirty or not same

    def _refuse_bound(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._epochs[slot] != 0:
                raise ContractViolation(
                    f"page table: row {slot} is bound to epoch {self._epochs[slot]}; only its holder may change it",
                    slot=slot, epoch=int(self._epochs[slot]),
                )  # fmt: skip

    def _require_holder(self, ref: ResidentRef) -> None:
        if self._epochs[ref.slot] != ref.epoch:
            raise ContractViolation(
                f"page table: row {ref.slot} belongs to epoch {self._epochs[ref.slot]}, not {ref.epoch}; "
                "a stale reference may not touch it",
                slot=ref.slot, epoch=ref.epoch,
            )  # fmt: skip

    def _checked(self, slot: int, ids: Pages) -> tuple[int, Int32Array]:
        slot = as_index(slot, "page table: slot")
        if not 0 <= slot < self.max_batch:
            raise ContractViolation(f"page table: slot {slot} is outside 0..{self.max_batch - 1}", slot=slot)
        row = as_int32(ids, f"page table: the ids of row {slot}")
        if row.size > self.max_pages_per_seq:
            raise ContractViolation(
                f"page table: row {slot} was given {row.size} pages, it has room for {self.max_pages_per_seq}",
                slot=slot,
            )
        if row.size and (int(row.min()) < 0 or int(row.max()) >= self.num_pages):
            raise ContractViolation(
                f"page table: row {slot} names a page outside 0..{self.num_pages - 1}: {row.tolist()}", slot=slot
            )
        return slot, row
