"""The door of a coordinator: one caller at a time, orphans first, broken invariants poison, calls are told to whoever
watches.

An interrupt may come anywhere, so nothing that it cuts off may leave the door shut. Who is inside is therefore an entry
in a dictionary that names the call: taking it is one atomic operation inside the ``try`` block that gives it back, and
giving it back is done by operators alone, between which the interpreter does not look for interrupts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from context_cache.coordinator.calls.ending import reap_orphans
from context_cache.coordinator.core import Core
from context_cache.coordinator.errors import ContractViolation, InvariantViolation

__all__ = ["INSIDE", "Entry", "public_call", "public_look"]

INSIDE: Final = "inside"
"""The one key of ``Entry.inside``."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Entry:
    """Who is inside. There is no waiting: the contract is one call after another, and this only tells when it breaks.

    inside: empty, or under ``INSIDE`` an object that stands for the call in progress.
    """

    __slots__ = ("core", "inside", "watcher")

    def __init__(self, core: Core) -> None:
        self.core = core
        self.inside: dict[str, object] = {}
        self.watcher = core.watcher

    def busy(self) -> ContractViolation:
        """The error of a caller that comes while another one is inside, on this thread (re-entrant) or on another."""
        return ContractViolation(
            "another call on this coordinator is in progress; make calls one after another, one thread at a time"
        )

    def failed(self, call: tuple[str, tuple[Any, ...], dict[str, Any]] | None, error: BaseException) -> None:
        """A call raises ``error``; ``call`` is its name and arguments if a watcher is to be told."""
        try:
            if isinstance(error, InvariantViolation):
                self.core.tell_service("invariant_broken")
        finally:
            if self.watcher is not None and call is not None:
                self.watcher.raised(*call, error)


class _Guarded(Protocol):
    @property
    def _entry(self) -> Entry: ...


_S = TypeVar("_S", bound=_Guarded)


def public_call(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A call that may change something: it runs behind the door, and a watcher of the coordinator is told of it.

    Raises ContractViolation when another call is in progress.
    """
    name = method.__name__

    @functools.wraps(method)
    def entered(self: _S, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        entry = self._entry
        inside, mine, call, began = entry.inside, object(), None, False
        try:
            if inside.setdefault(INSIDE, mine) is not mine:
                raise entry.busy()
            if entry.core.orphans:
                reap_orphans(entry.core)
            watcher, began = entry.watcher, True
            if watcher is None:
                return method(self, *arguments, **options)
            watcher.began_at = perf_counter_ns()
            if name in watcher.looks_before:
                watcher.look()
            call = (name, arguments, options)
            result = method(self, *arguments, **options)
            told, call = call, None
            watcher.returned(*told, result)
            return result
        except BaseException as error:
            if began:
                entry.failed(call, error)
            raise
        finally:
            if INSIDE in inside and inside[INSIDE] is mine:
                del inside[INSIDE]

    return entered


def public_look(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A call that only looks: behind the same door, and nobody is told of it.

    Raises ContractViolation when another call is in progress.
    """

    @functools.wraps(method)
    def entered(self: _S, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        entry = self._entry
        inside, mine = entry.inside, object()
        try:
            if inside.setdefault(INSIDE, mine) is not mine:
                raise entry.busy()
            if entry.core.orphans:
                reap_orphans(entry.core)
            return method(self, *arguments, **options)
        finally:
            if INSIDE in inside and inside[INSIDE] is mine:
                del inside[INSIDE]

    return entered
