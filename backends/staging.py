"""A ring of host buffers for asynchronous copies: one buffer per use, given back when its own copy has ended.

Why: a copy reads its host memory when it *runs*. A buffer that is filled again before that hands the second contents to
the first copy. So each use records an event behind its copy, and a buffer is taken again only after its event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from context_cache.backends.base import Backend, DeviceError, Event, Stream

__all__ = ["StagingRing", "Use"]

B = TypeVar("B")


class Use(Generic[B]):
    """One buffer of a ring, and how its last use ends."""

    __slots__ = ("buffer", "event", "lost")

    def __init__(self, buffer: B) -> None:
        self.buffer = buffer
        self.event: Event | None = None
        # The event could not be recorded: nothing tells when the copy ends, so only a proven drain frees the buffer.
        self.lost = False


class StagingRing(Generic[B]):
    """``depth`` buffers at first, up to ``limit`` under pressure; after that the oldest use is waited for.

    make: builds one buffer (any object made of pinned arrays).
    """

    def __init__(self, backend: Backend, make: Callable[[], B], *, depth: int = 2, limit: int = 8) -> None:
        if not 1 <= depth <= limit:
            raise ValueError(f"staging ring: depth {depth} must be between 1 and the limit {limit}")
        self._backend = backend
        self._make = make
        self._limit = limit
        self._uses: list[Use[B]] = [Use(make()) for _ in range(depth)]

    @property
    def buffers(self) -> int:
        """How many buffers exist."""
        return len(self._uses)

    def take(self) -> Use[B]:
        """A free buffer. Every ``take`` is followed by one ``commit``, in a ``finally``: work may be enqueued even
        when the verb raised. Raises DeviceError when no buffer can be proven free."""
        use = self._free()
        use.lost = True
        return use

    def commit(self, use: Use[B], stream: Stream) -> None:
        """Record an event behind whatever was enqueued; the buffer is free again when it has passed."""
        use.event = self._backend.record_event(stream)
        use.lost = False
        # Oldest use first: the next one to wait for is at the front.
        self._uses.remove(use)
        self._uses.append(use)

    def drained(self) -> None:
        """A drain has proven that every copy has ended: all buffers are free again."""
        for use in self._uses:
            use.event, use.lost = None, False

    def _free(self) -> Use[B]:
        for use in self._uses:
            if use.lost:
                continue
            if use.event is None or self._backend.event_done(use.event):
                use.event = None
                return use
        if len(self._uses) < self._limit:
            try:
                use = Use(self._make())
            except MemoryError:
                # Page-locked memory is scarce. A buffer that is in use comes back; without one there is no going on.
                if all(use.lost or use.event is None for use in self._uses):
                    raise
            else:
                self._uses.append(use)
                return use
        oldest = next((use for use in self._uses if not use.lost), None)
        if oldest is None or oldest.event is None:
            raise DeviceError("staging", "staging ring", "no buffer can be proven free; drain the stream first")
        self._backend.wait_event(oldest.event)
        oldest.event = None
        return oldest
