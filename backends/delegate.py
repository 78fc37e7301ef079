"""A backend that hands every verb to another one; the wrappers override the one place where verbs pass.

Written out verb by verb, so that a new verb of the protocol is a type error here and not a hole in a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from context_cache.backends.base import Backend, DeviceArray, Event, Int32Array, Stream

__all__ = ["DelegatingBackend"]


class DelegatingBackend:
    """Every enqueueing verb goes through :meth:`verb`, every wait through :meth:`synchronize`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def verb(self, name: str, stream: Stream, enqueue: Callable[[], None]) -> None:
        """Called for every enqueueing verb; override to look, count or fail."""
        enqueue()

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        return self.inner.array(shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self.inner.pinned(shape, dtype)

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        return self.inner.to_host(array)

    def new_stream(self, name: str = "stream") -> Any:
        return self.inner.new_stream(name)

    def record_event(self, stream: Stream) -> Any:
        return self.inner.record_event(stream)

    def event_done(self, event: Event) -> bool:
        return self.inner.event_done(event)

    def wait_event(self, event: Event) -> None:
        self.inner.wait_event(event)

    def synchronize(self, stream: Stream, timeout: float | None = None) -> bool:
        return self.inner.synchronize(stream, timeout)

    def upload_rows(
        self, table: DeviceArray, staged_ids: Int32Array, staged_slots: Int32Array, num_pages: int, stream: Stream
    ) -> None:
        self.verb(
            "upload_rows", stream, lambda: self.inner.upload_rows(table, staged_ids, staged_slots, num_pages, stream)
        )

    def reset_lengths(self, lengths: DeviceArray, staged: Int32Array, stream: Stream) -> None:
        self.verb("reset_lengths", stream, lambda: self.inner.reset_lengths(lengths, staged, stream))

    def compact_lengths(self, lengths: DeviceArray, mapping: DeviceArray, old_size: int, stream: Stream) -> None:
        self.verb("compact_lengths", stream, lambda: self.inner.compact_lengths(lengths, mapping, old_size, stream))

    def copy_lengths(self, lengths: DeviceArray, source: DeviceArray, count: int, stream: Stream) -> None:
        self.verb("copy_lengths", stream, lambda: self.inner.copy_lengths(lengths, source, count, stream))

    def add_lengths(self, lengths: DeviceArray, increments: DeviceArray | int, count: int, stream: Stream) -> None:
        self.verb("add_lengths", stream, lambda: self.inner.add_lengths(lengths, increments, count, stream))

    def upload_mapping(self, tensor: DeviceArray, staged: Int32Array, stream: Stream) -> None:
        self.verb("upload_mapping", stream, lambda: self.inner.upload_mapping(tensor, staged, stream))

    def gather_rows(
        self, dest: DeviceArray, table: DeviceArray, slots: DeviceArray, count: int, stream: Stream
    ) -> None:
        self.verb("gather_rows", stream, lambda: self.inner.gather_rows(dest, table, slots, count, stream))

    def clear_resident_row(self, tensors: tuple[DeviceArray, ...], slot: int, stream: Stream) -> None:
        self.verb("clear_resident_row", stream, lambda: self.inner.clear_resident_row(tensors, slot, stream))

    def zero_rows(self, tensors: tuple[DeviceArray, ...], rows: Int32Array, stream: Stream) -> None:
        self.verb("zero_rows", stream, lambda: self.inner.zero_rows(tensors, rows, stream))

    def copy_rows(
        self,
        dest_tensors: tuple[DeviceArray, ...],
        dest_rows: Int32Array,
        source_tensors: tuple[DeviceArray, ...],
        source_rows: Int32Array,
        stream: Stream,
    ) -> None:
        self.verb(
            "copy_rows",
            stream,
            lambda: self.inner.copy_rows(dest_tensors, dest_rows, source_tensors, source_rows, stream),
        )

    def capture_pages(
        self,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        tokens: Int32Array,
        stream: Stream,
    ) -> None:
        self.verb("capture_pages", stream, lambda: self.inner.capture_pages(slabs, slots, pools, pages, tokens, stream))

    def restore_pages(
        self,
        pools: tuple[DeviceArray, ...],
        pages: Int32Array,
        slabs: tuple[DeviceArray, ...],
        slots: Int32Array,
        tokens: Int32Array,
        stream: Stream,
    ) -> None:
        self.verb("restore_pages", stream, lambda: self.inner.restore_pages(pools, pages, slabs, slots, tokens, stream))

    def copy_row(self, dest: DeviceArray, dest_row: int, source: DeviceArray, source_row: int, stream: Stream) -> None:
        self.verb("copy_row", stream, lambda: self.inner.copy_row(dest, dest_row, source, source_row, stream))
