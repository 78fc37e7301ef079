"""What a device is to this library: protocols of verbs, streams and events. No branch on the kind of device anywhere.

Two levels. :class:`LifecycleDevice` is what the rows of a lifecycle ask for ("upload the rows that changed", "drain");
the coordinator implements it once over its page table and length vector. :class:`Backend` is what a device has to
offer for that: arrays, host staging, events and one verb per need. A verb enqueues on the given stream and returns; it
never waits. Only ``synchronize``, ``wait_event`` and a full staging ring wait.

Every verb reads its host inputs when the work *runs*, not when it is enqueued, so host inputs live in staging buffers
guarded by events (``staging``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

__all__ = [
    "Backend",
    "BackendUnavailable",
    "DeviceArray",
    "DeviceError",
    "DeviceOutOfMemory",
    "DrainResult",
    "Event",
    "HiddenCopy",
    "Int32Array",
    "LifecycleDevice",
    "SnapshotCopies",
    "Stream",
    "Synchronizer",
    "drain_with",
]

_log = logging.getLogger(__name__)

Int32Array: TypeAlias = npt.NDArray[np.int32]
DeviceArray: TypeAlias = Any
"""An array of the backend: ``numpy.ndarray`` on the host, ``cupy.ndarray`` on a GPU."""


class DeviceError(Exception):
    """A device verb failed. What it enqueued before is unknown, so the work counts as outstanding.

    verb:   the verb that failed, for instance ``upload_rows``.
    stream: name of the stream.
    cause:  the device's own words.
    """

    def __init__(self, verb: str, stream: str, cause: str) -> None:
        super().__init__(verb, stream, cause)
        self.verb, self.stream, self.cause = verb, stream, cause

    def __str__(self) -> str:
        return f"device verb {self.verb!r} on stream {self.stream!r} failed: {self.cause}"


class DeviceOutOfMemory(DeviceError, MemoryError):
    """An allocation did not fit. The device is as it was, and nothing is outstanding because of it."""


class BackendUnavailable(Exception):
    """A backend cannot work on this machine. The message is one sentence: what is missing, and what to install."""


class Stream(Protocol):
    """An ordered queue of device work. Streams are compared by identity."""

    @property
    def name(self) -> str:
        """A name for messages."""


class Event(Protocol):
    """A mark in a stream, made by ``Backend.record_event``."""


@frozen
class DrainResult:
    """Outcome of waiting for a stream.

    ok:        everything enqueued before has ended.
    cause:     why not, in words; None if ok.
    interrupt: a ``KeyboardInterrupt`` or the like that came while waiting; raised again once the failed drain has
               had its effect.
    """

    ok: bool
    cause: str | None = None
    interrupt: BaseException | None = None


Synchronizer: TypeAlias = Callable[[Any, "float | None"], bool]
"""``synchronizer(stream, timeout_seconds) -> ok``. With a limit it polls until the limit has passed and returns False.
Whatever it raises counts as a failed drain."""


def drain_with(synchronizer: Synchronizer, stream: Stream, timeout: float | None) -> DrainResult:
    """Run a synchroniser and turn every way it can end into a :class:`DrainResult`. Never raises."""
    try:
        if synchronizer(stream, timeout):
            return DrainResult(ok=True)
        limit = "" if timeout is None else f" within {timeout:g} s"
        result = DrainResult(ok=False, cause=f"stream {stream.name!r} did not become idle{limit}")
    except Exception as error:
        result = DrainResult(ok=False, cause=f"synchroniser raised {type(error).__name__}: {error}")
        _log.error("drain of stream %r failed", stream.name, exc_info=error)
        return result
    except BaseException as interrupt:
        result = DrainResult(ok=False, cause=f"interrupted by {type(interrupt).__name__}", interrupt=interrupt)
    _log.error("drain of stream %r failed: %s", stream.name, result.cause)
    return result


@frozen
class SnapshotCopies:
    """Copies between live state and snapshot slots, planned for a whole batch.

    slots, rows:    recurrent snapshot slot and resident row of each copy.
    partial_slots, base_pages, tokens: partial snapshot slot, page id and number of tokens of each partial-page copy.
    draft_pages:    page ids of the draft model, one for each partial copy; None: the draft takes no part.
    zero_rows:      resident rows that start from zero instead (a restore only).
    """

    slots: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    partial_slots: tuple[int, ...] = ()
    base_pages: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    draft_pages: tuple[int, ...] | None = None
    zero_rows: tuple[int, ...] = ()


@frozen(eq=False)
class HiddenCopy:
    """One boundary hidden row: recurrent snapshot slot, the runtime's tensor, the row in it, and the logical slot."""

    slot: int
    tensor: DeviceArray
    row: int
    logical_slot: int


class LifecycleDevice(Protocol):
    """Everything the rows of a lifecycle may ask of a device. Actions return whether anything was enqueued.

    Lengths and mappings are int32 arrays in logical order; resident slots are row numbers.
    """

    def upload_base_rows(self) -> bool:
        """Enqueue the page-table rows that differ from what the device has."""

    def upload_draft_rows(self) -> bool:
        """The same for the draft's page table."""

    def reset_draft_lengths(self, lengths: Int32Array) -> bool:
        """Start a batch in the draft's length vector."""

    def install_draft_lengths(self, lengths: Int32Array) -> bool:
        """Put a running batch's common lengths back into the draft's vector."""

    def compact_draft_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        """Compact the draft's length vector in place, ascending."""

    def zero_recurrent(self, copies: SnapshotCopies) -> bool:
        """Zero the recurrent rows of sequences that start cold."""

    def restore_recurrent(self, copies: SnapshotCopies) -> bool:
        """Recurrent snapshots into resident rows."""

    def restore_partial(self, copies: SnapshotCopies) -> bool:
        """Partial-page snapshots into pages, of the draft too where the copies name draft pages."""

    def capture_recurrent(self, copies: SnapshotCopies) -> bool:
        """Resident rows into recurrent snapshots."""

    def capture_partial(self, copies: SnapshotCopies) -> bool:
        """The written part of a page into partial snapshots, of the draft too where the copies name draft pages."""

    def capture_hidden(self, copy: HiddenCopy) -> bool:
        """One boundary hidden row into its snapshot slot."""

    def restore_hidden(self, copy: HiddenCopy) -> bool:
        """One boundary hidden row out of its snapshot slot."""

    def reset_base_lengths(self, lengths: Int32Array) -> bool:
        """Start a batch: its lengths become the device length vector."""

    def install_base_lengths(self, lengths: Int32Array) -> bool:
        """Put a running batch's lengths back after another batch had the vector."""

    def compact_base_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        """Compact the length vector in place, ascending."""

    def copy_mapping(self, mapping: Int32Array, tensor: DeviceArray) -> bool:
        """Enqueue the copy of a compaction mapping into the caller's tensor."""

    def clear_resident_state(self, slots: tuple[int, ...]) -> bool:
        """Zero the recurrent state of resident slots; nothing to do without recurrent layers."""

    def drain(self) -> DrainResult:
        """Wait until everything enqueued has ended."""


class Backend(Protocol):
    """One kind of device. One verb per need; each enqueues a fixed number of operations, whatever the sizes.

    ``stream`` and ``event`` are the backend's own kinds (they satisfy ``Stream`` and ``Event``); a stream of another
    backend is a caller's error.
    """

    @property
    def name(self) -> str:
        """``host``, ``cupy``, ..."""

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """A zeroed device array."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """A host array that asynchronous copies may read."""

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        """A host copy of what the array holds now. The caller has synchronised."""

    def new_stream(self, name: str = "stream") -> Any:
        """A new stream."""

    def record_event(self, stream: Any) -> Any:
        """Mark the work enqueued so far."""

    def event_done(self, event: Any) -> bool:
        """Whether the marked work has ended; never waits."""

    def wait_event(self, event: Any) -> None:
        """Wait on the host until the marked work has ended."""

    def synchronize(self, stream: Any, timeout: float | None = None) -> bool:
        """Wait for the stream; False when ``timeout`` seconds have passed first."""

    def upload_rows(
        self, table: DeviceArray, staged_ids: Int32Array, staged_slots: Int32Array, num_pages: int, stream: Any
    ) -> None:
        """``table[slot, 0] = ids; table[slot, 1] = ids + num_pages`` (-1 stays -1) for each staged row.

        table int32[max_batch, 2, M]; staged_ids int32[k, M]; staged_slots int32[k].
        """

    def reset_lengths(self, lengths: DeviceArray, staged: Int32Array, stream: Any) -> None:
        """``lengths[:n] = staged`` with n = len(staged); both int32."""

    def compact_lengths(self, lengths: DeviceArray, mapping: DeviceArray, old_size: int, stream: Any) -> None:
        """In place, for old index ascending: ``lengths[mapping[i]] = lengths[i]`` where mapping[i] >= 0."""

    def copy_lengths(self, lengths: DeviceArray, source: DeviceArray, count: int, stream: Any) -> None:
        """``lengths[:count] = source[:count]``, both on the device."""

    def add_lengths(self, lengths: DeviceArray, increments: DeviceArray | int, count: int, stream: Any) -> None:
        """``lengths[:count] += increments``, a device array or one number for all."""

    def upload_mapping(self, tensor: DeviceArray, staged: Int32Array, stream: Any) -> None:
        """``tensor[:n] = staged``, int32."""

    def gather_rows(self, dest: DeviceArray, table: DeviceArray, slots: DeviceArray, count: int, stream: Any) -> None:
        """``dest[i] = table[slots[i]]`` for i < count; never moves K/V data."""

    def clear_resident_row(self, tensors: tuple[DeviceArray, ...], slot: int, stream: Any) -> None:
        """Zero row ``slot`` of every tensor."""

    def zero_rows(self, tensors: tuple[DeviceArray, ...], rows: Int32Array, stream: Any) -> None:
        """``tensor[rows[i]] = 0`` for every tensor and i. rows: staged int32[n], each at most once."""

    def copy_rows(
        self,
        dest_tensors: tuple[DeviceArray, ...],
        dest_rows: Int32Array,
        source_tensors: tuple[DeviceArray, ...],
        source_rows: Int32Array,
        stream: Any,
    ) -> None:
        """``dest[dest_rows[i]] = source[source_rows[i]]`` for every pair of tensors and i, byte for byte.

        Row sizes and dtypes of a pair are equal, the two do not overlap. dest_rows, source_rows: staged int32[n]; a
        destination at most once.
        """

    def capture_pages(
        self,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        tokens: Int32Array,
        stream: Any,
    ) -> None:
        """``slab[slots[i], h, :tokens[i]] = pool[h, pages[i], :tokens[i]]`` for every layer, i, and h = 0 (K), 1 (V).

        slabs ``[slots, 2, P, kv_heads, head_dim]``, pools ``[2, pages, P, kv_heads, head_dim]``, one pair per layer;
        slots, pages, tokens: staged int32[n], 1 <= tokens <= P, a slot at most once. Byte for byte, and bytes behind
        the tokens are not touched.
        """

    def restore_pages(
        self,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        tokens: Int32Array,
        stream: Any,
    ) -> None:
        """``pool[h, pages[i], :tokens[i]] = slab[slots[i], h, :tokens[i]]``: capture_pages the other way round.

        A page at most once; a slot may be restored into several pages.
        """

    def copy_row(self, dest: DeviceArray, dest_row: int, source: DeviceArray, source_row: int, stream: Any) -> None:
        """``dest[dest_row] = source[source_row]``, two-dimensional arrays of one width and dtype."""
