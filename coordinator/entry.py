"""The door of a coordinator: one caller at a time, orphans first, broken invariants poison, calls are told to whoever
watches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from context_cache.coordinator.calls.ending import reap_orphans
from context_cache.coordinator.core import Core
from context_cache.coordinator.errors import ContractViolation, InvariantViolation

__all__ = ["Entry", "public_call"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Entry:
    """``with entry:`` around every public call.

    Raises ContractViolation when another call is in progress, on this thread (re-entrant) or on another one. There is
    no waiting: the contract is one call after another, and this only tells when it is broken.
    """

    __slots__ = ("_core", "_lock", "calling", "watcher")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self.watcher = core.watcher
        self.calling: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    def try_enter(self) -> bool:
        """Enter unless a call is in progress; orphans are reaped. Leave with ``leave``."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._core.orphans:
            try:
                reap_orphans(self._core)
            except BaseException:
                self._lock.release()
                raise
        return True

    def leave(self) -> None:
        """The call is over."""
        self._lock.release()

    def __enter__(self) -> None:
        # try_enter without the call, where nobody waits to be reaped: this is on the way of every decode step.
        entered = self.try_enter() if self._core.orphans else self._lock.acquire(blocking=False)
        if not entered:
            raise ContractViolation(
                "another call on this coordinator is in progress; make calls one after another, one thread at a time"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._lock.release()
            return
        try:
            if isinstance(error, InvariantViolation):
                self._core.tell_service("invariant_broken")
        finally:
            try:
                if self.watcher is not None and self.calling is not None:
                    self.watcher.raised(*self.calling, error)
            finally:
                self.calling = None
                self._lock.release()


class _Guarded(Protocol):
    @property
    def _entry(self) -> Entry: ...


_S = TypeVar("_S", bound=_Guarded)


def public_call(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A call that may change something: it runs behind the door, and a watcher of the coordinator is told of it."""

    name = method.__name__

    @functools.wraps(method)
    def entered(self: _S, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        entry = self._entry
        with entry:
            watcher = entry.watcher
            if watcher is None:
                return method(self, *arguments, **options)
            entry.calling = calling = (name, arguments, options)
            watcher.began_at = perf_counter_ns()
            if name in watcher.looks_before:
                watcher.look()
            result = method(self, *arguments, **options)
            entry.calling = None
            watcher.returned(*calling, result)
            return result

    return entered
