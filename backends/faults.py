"""Failures on purpose: the n-th device action or the n-th drain fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from context_cache.backends.base import Backend, DeviceError, Event, Stream, Synchronizer
from context_cache.backends.delegate import DelegatingBackend

__all__ = ["FaultyBackend", "FaultySynchronizer"]


class FaultyBackend(DelegatingBackend):
    """Raises :class:`DeviceError` at chosen enqueueing verbs, counted from 1 since construction or the last ``arm``.

    partly: the verb's work is enqueued before the error is raised, as a copy that fails after its first part would.
    events: with ``fail_events`` every event verb (record, query, wait) raises, as after a sticky error of a device.
    """

    fail_events = False

    def __init__(self, inner: Backend, *, fail_action: int | None = None, partly: bool = False) -> None:
        super().__init__(inner)
        self.partly = partly
        self.actions = 0
        self._failing: frozenset[int] = frozenset()
        self.arm(fail_action)

    def arm(self, *fail_actions: int | None) -> None:
        """Count anew, and fail at these numbers (None: at none)."""
        self.actions = 0
        self._failing = frozenset(number for number in fail_actions if number is not None)

    def disarm(self) -> None:
        """Count anew and let everything pass."""
        self.arm()

    def record_event(self, stream: Stream) -> Any:
        self._event_verb("record_event", stream.name)
        return self.inner.record_event(stream)

    def event_done(self, event: Event) -> bool:
        self._event_verb("event_done", "?")
        return self.inner.event_done(event)

    def wait_event(self, event: Event) -> None:
        self._event_verb("wait_event", "?")
        self.inner.wait_event(event)

    def _event_verb(self, name: str, stream: str) -> None:
        if self.fail_events:
            raise DeviceError(name, stream, "injected failure of an event")

    def verb(self, name: str, stream: Stream, enqueue: Callable[[], None]) -> None:
        self.actions += 1
        if self.actions in self._failing:
            if self.partly:
                enqueue()
            raise DeviceError(name, stream.name, f"injected failure of action {self.actions}")
        enqueue()


class FaultySynchronizer:
    """A synchroniser that fails at chosen calls, counted from 1.

    raises: raise this instead of returning False.
    """

    def __init__(
        self, inner: Synchronizer, *, fail_drain: int | None = None, raises: BaseException | None = None
    ) -> None:
        self._inner = inner
        self.raises = raises
        self.calls = 0
        self._failing: frozenset[int] = frozenset()
        self.arm(fail_drain)

    def arm(self, *fail_drains: int | None) -> None:
        """Count anew, and fail at these numbers (None: at none)."""
        self.calls = 0
        self._failing = frozenset(number for number in fail_drains if number is not None)

    def __call__(self, stream: Stream, timeout: float | None) -> bool:
        self.calls += 1
        if self.calls in self._failing:
            if self.raises is not None:
                raise self.raises
            return False
        return self._inner(stream, timeout)
