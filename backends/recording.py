"""What was asked of the device, in order: for tests that say "no device call" and mean it."""

from __future__ import annotations

from collections.abc import Callable

from context_cache.backends.base import Backend, Stream
from context_cache.backends.delegate import DelegatingBackend

__all__ = ["RecordingBackend"]


class RecordingBackend(DelegatingBackend):
    """``log`` holds the name of every enqueueing verb and ``drain`` for every synchronise through this backend."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.log: list[str] = []

    def verb(self, name: str, stream: Stream, enqueue: Callable[[], None]) -> None:
        self.log.append(name)
        enqueue()

    def synchronize(self, stream: Stream, timeout: float | None = None) -> bool:
        self.log.append("drain")
        return self.inner.synchronize(stream, timeout)
