"""The host backend: NumPy arrays and a stream that runs late.

It is the real backend of a runtime that computes on the CPU, and the strict stand-in for a GPU in tests. Work that is
enqueued on a :class:`HostStream` does not run: it waits in order until somebody synchronises, and reads its inputs only
then. A staging buffer that is written again too early, a row uploaded after its page was given away, a missing drain:
each shows up as wrong data in an ordinary test.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import DeviceArray, DeviceError, Int32Array

__all__ = ["HostBackend", "HostEvent", "HostStream"]


class HostStream:
    """Work in order, run late.

    ``hold`` blocks the stream, as a long kernel would, until ``let_go``: a synchronise with a time-out gives up on
    it, one without a time-out raises, because it would wait for ever (there is one thread).
    """

    __slots__ = ("__weakref__", "_done", "_held", "_name", "_queue")

    def __init__(self, name: str = "host") -> None:
        self._name = name
        self._queue: deque[tuple[str, Callable[[], None]]] = deque()
        self._done = 0
        self._held = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def pending(self) -> tuple[str, ...]:
        """Labels of the work that has not run, oldest first."""
        return tuple(label for label, _ in self._queue)

    @property
    def held(self) -> bool:
        """Whether the stream is blocked."""
        return self._held

    @property
    def position(self) -> int:
        """Number of pieces of work enqueued so far, run or not."""
        return self._done + len(self._queue)

    @property
    def completed(self) -> int:
        """Number of pieces of work that have run."""
        return self._done

    def enqueue(self, work: Callable[[], None], label: str) -> None:
        """Append work. It runs at a later synchronise."""
        self._queue.append((label, work))

    def hold(self) -> None:
        """Block the stream."""
        self._held = True

    def let_go(self) -> None:
        """Unblock the stream; its work still runs only when somebody synchronises."""
        self._held = False

    def run(self, count: int | None = None) -> int:
        """Run up to ``count`` pieces of work (None: all); the number that ran. Nothing runs while held."""
        ran = 0
        while self._queue and not self._held and (count is None or ran < count):
            _, work = self._queue.popleft()
            self._done += 1
            ran += 1
            work()
        return ran


class HostEvent:
    """A position in a stream."""

    __slots__ = ("position", "stream")

    def __init__(self, stream: HostStream) -> None:
        self.stream = stream
        self.position = stream.position


class HostBackend:
    """Arrays are NumPy arrays; pinned memory is ordinary memory."""

    name = "host"

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        # numpy takes large zeroed arrays from the system untouched, so an unused pool costs no memory.
        return np.zeros(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return np.zeros(shape, dtype=dtype)

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        copy: npt.NDArray[Any] = np.array(array)
        return copy

    def new_stream(self, name: str = "host") -> HostStream:
        return HostStream(name)

    def record_event(self, stream: HostStream) -> HostEvent:
        return HostEvent(stream)

    def event_done(self, event: HostEvent) -> bool:
        return event.stream.completed >= event.position

    def wait_event(self, event: HostEvent) -> None:
        stream = event.stream
        if stream.held and not self.event_done(event):
            raise DeviceError("wait_event", stream.name, "the stream is held and would never reach the event")
        stream.run(event.position - stream.completed)

    def synchronize(self, stream: HostStream, timeout: float | None = None) -> bool:
        if stream.held and timeout is None:
            raise DeviceError("synchronize", stream.name, "the stream is held and would never become idle")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            stream.run()
            if not stream.pending and not stream.held:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)

    def upload_rows(
        self,
        table: DeviceArray,
        staged_ids: Int32Array,
        staged_slots: Int32Array,
        num_pages: int,
        stream: HostStream,
    ) -> None:
        def work() -> None:
            table[staged_slots, 0] = staged_ids
            table[staged_slots, 1] = np.where(staged_ids >= 0, staged_ids + np.int32(num_pages), np.int32(-1))

        stream.enqueue(work, "upload_rows")

    def reset_lengths(self, lengths: DeviceArray, staged: Int32Array, stream: HostStream) -> None:
        def work() -> None:
            lengths[: staged.size] = staged

        stream.enqueue(work, "reset_lengths")

    def compact_lengths(self, lengths: DeviceArray, mapping: DeviceArray, old_size: int, stream: HostStream) -> None:
        def work() -> None:
            targets = mapping[:old_size]
            kept = np.flatnonzero(targets >= 0)
            # Destinations never exceed sources, so one gather followed by one scatter equals the ascending walk.
            lengths[targets[kept]] = lengths[kept]

        stream.enqueue(work, "compact_lengths")

    def copy_lengths(self, lengths: DeviceArray, source: DeviceArray, count: int, stream: HostStream) -> None:
        def work() -> None:
            lengths[:count] = source[:count]

        stream.enqueue(work, "copy_lengths")

    def add_lengths(self, lengths: DeviceArray, increments: DeviceArray | int, count: int, stream: HostStream) -> None:
        def work() -> None:
            step: Any = increments
            lengths[:count] += step if np.ndim(step) == 0 else step[:count]

        stream.enqueue(work, "add_lengths")

    def upload_mapping(self, tensor: DeviceArray, staged: Int32Array, stream: HostStream) -> None:
        def work() -> None:
            tensor.reshape(-1)[: staged.size] = staged

        stream.enqueue(work, "upload_mapping")

    def gather_rows(
        self, dest: DeviceArray, table: DeviceArray, slots: DeviceArray, count: int, stream: HostStream
    ) -> None:
        def work() -> None:
            dest[:count] = table[slots[:count]]

        stream.enqueue(work, "gather_rows")

    def clear_resident_row(self, tensors: tuple[DeviceArray, ...], slot: int, stream: HostStream) -> None:
        def work() -> None:
            for tensor in tensors:
                tensor[slot] = 0

        stream.enqueue(work, "clear_resident_row")

    def zero_rows(self, tensors: tuple[DeviceArray, ...], rows: Int32Array, stream: HostStream) -> None:
        def work() -> None:
            for tensor in tensors:
                tensor[rows] = 0

        stream.enqueue(work, "zero_rows")

    def copy_rows(
        self,
        dest_tensors: tuple[DeviceArray, ...],
        dest_rows: Int32Array,
        source_tensors: tuple[DeviceArray, ...],
        source_rows: Int32Array,
        stream: HostStream,
    ) -> None:
        def work() -> None:
            for dest, source in zip(dest_tensors, source_tensors, strict=True):
                dest[dest_rows] = source[source_rows]

        stream.enqueue(work, "copy_rows")

    def capture_pages(
        self,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        tokens: Int32Array,
        stream: HostStream,
    ) -> None:
        def work() -> None:
            copies = list(zip(slots.tolist(), pages.tolist(), tokens.tolist(), strict=True))
            for slab, pool in zip(slabs, pools, strict=True):
                for slot, page, count in copies:
                    slab[slot, :, :count] = pool[:, page, :count]

        stream.enqueue(work, "capture_pages")

    def restore_pages(
        self,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        tokens: Int32Array,
        stream: HostStream,
    ) -> None:
        def work() -> None:
            copies = list(zip(pages.tolist(), slots.tolist(), tokens.tolist(), strict=True))
            for pool, slab in zip(pools, slabs, strict=True):
                for page, slot, count in copies:
                    pool[:, page, :count] = slab[slot, :, :count]

        stream.enqueue(work, "restore_pages")

    def copy_row(
        self, dest: DeviceArray, dest_row: int, source: DeviceArray, source_row: int, stream: HostStream
    ) -> None:
        def work() -> None:
            dest[dest_row] = source[source_row]

        stream.enqueue(work, "copy_row")
