"""A caller's right to one request."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from types import TracebackType
from typing import NoReturn

from context_cache.coordinator.calls.ending import drop, reap_orphans
from context_cache.coordinator.core import ENDED_STATES, Core, Request
from context_cache.coordinator.entry import INSIDE, Entry
from context_cache.coordinator.errors import ContractViolation

__all__ = ["RequestHandle"]

_log = logging.getLogger("context_cache.coordinator")


def _orphaned(orphans: deque[Request], request: Request) -> None:
    """Runs when a handle is collected, on whatever thread: only a queue entry and a log line."""
    if request.state not in ENDED_STATES:
        orphans.append(request)
        _log.warning(
            "request %s: its handle was garbage collected while %s; the next call drops it, close handles explicitly",
            request.id, request.state,
        )  # fmt: skip


class RequestHandle:
    """Ends its request when it is closed; a context manager does that for you.

    A handle that is garbage collected while its request lives does nothing to the device: the request joins a queue of
    orphans, a warning is logged, and the next public call drops it.
    """

    __slots__ = ("__weakref__", "_core", "_entry", "_finalizer", "_request")

    def __init__(self, core: Core, entry: Entry, request: Request) -> None:
        self._core = core
        self._entry = entry
        self._request = request
        self._finalizer = weakref.finalize(self, _orphaned, core.orphans, request)
        # At interpreter exit nobody makes a next call; the process ends and the device memory with it.
        self._finalizer.atexit = False

    def request_of(self, core: Core) -> Request | None:
        """The request, if the handle is one of ``core``'s; for the coordinator's use."""
        return self._request if self._core is core else None

    @property
    def id(self) -> str:
        """Name of the request, for instance ``r1``."""
        return self._request.id

    @property
    def state(self) -> str:
        """Flat state of the request."""
        return self._request.state

    @property
    def phase(self) -> str:
        """Phase of the request: admitted, executing, finishing, quarantined, poisoned or released."""
        return self._request.phase

    @property
    def valid(self) -> bool:
        """False after finish, drop or quarantine."""
        return self._request.state not in ENDED_STATES

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self._request.slots)

    def close(self) -> None:
        """Drop the request: drain if work is outstanding, clear rows, release; nothing is published.

        A drain that fails quarantines the request and poisons the coordinator. Never raises (an interrupt that comes
        during the drain passes, once the request is quarantined). When another call is in progress on the coordinator
        the drop waits in the queue of orphans.
        """
        core, request = self._core, self._request
        if request.state in ENDED_STATES:
            return
        inside, mine = self._entry.inside, object()
        # As in ``entry.public_call``: an interrupt may come anywhere, and none may leave the door shut.
        try:
            if inside.setdefault(INSIDE, mine) is not mine:
                core.orphans.append(request)
                _log.warning("request %s: closed during another call; the next call drops it", request.id)
                return
            if core.orphans:
                reap_orphans(core)
            drop(core, request)
        except Exception:
            # A bug, or metadata that contradicts itself (the coordinator is poisoned then): nothing is lost, the
            # request stays queued and the next call tries again.
            _log.exception("request %s: dropping it failed", request.id)
            core.orphans.append(request)
        finally:
            if INSIDE in inside and inside[INSIDE] is mine:
                del inside[INSIDE]

    def __reduce__(self) -> NoReturn:
        raise ContractViolation("a request handle cannot be copied or pickled; there is one right to a request")

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RequestHandle {self.id} {self.state}>"
