"""The public face: every call that a runtime makes.

Each method does the same four things: it enters (one caller at a time, orphans reaped), checks the handle, the token
and everything else that can be refused, plans a call object, and fires one event of the request's machine. What the
event does is a row of ``machines.request``; what may be wrong with the arguments is here.
"""

from __future__ import annotations

import logging
import weakref
from types import TracebackType
from typing import NoReturn

import numpy as np

from context_cache.backends.base import Backend, Stream, Synchronizer
from context_cache.coordinator.admitting import AdmissionCalls
from context_cache.coordinator.arguments import expect
from context_cache.coordinator.calls.ending import EndingCall
from context_cache.coordinator.config import (
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
)
from context_cache.coordinator.construction import build_core
from context_cache.coordinator.core import ENDED_STATES, Core
from context_cache.coordinator.device_state import ContextCachePhysicalResources
from context_cache.coordinator.entry import Entry, public_call, public_look
from context_cache.coordinator.errors import ContextCacheError, ContractViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.ledger import BOUND
from context_cache.coordinator.manager import ContextCacheManager
from context_cache.coordinator.metrics import CoordinatorMetrics
from context_cache.coordinator.stepping import StepCalls
from context_cache.coordinator.types import (
    RequestView,
    SequenceState,
    Status,
)
from context_cache.machines import Recorder

__all__ = ["ContextCacheCoordinator", "OwnersLeft"]

_log = logging.getLogger("context_cache.coordinator")

_KEPT_ALIVE: list[Core] = []
"""Cores whose coordinator was lost while they owned requests: the device may still use their memory."""


class OwnersLeft(ContextCacheError):
    """The coordinator could not be closed: requests are live, or the device could not be proven quiet."""


def _lost(core: Core) -> None:
    if core.requests:
        _KEPT_ALIVE.append(core)
        _log.error(
            "a coordinator was lost while it owned %d request(s); their memory is kept, close coordinators explicitly",
            len(core.requests),
        )


class ContextCacheCoordinator(AdmissionCalls, StepCalls):
    """Owns the life of requests in a paged context cache. See ``docs/architecture.md`` and the README's example.

    config:        must be enabled.
    deployment:    validated here.
    resources:     borrowed: K/V pools, length vector and page table; they must outlive the coordinator.
    backend, stream: the device, and the one stream on which all its work is enqueued.
    synchronizer:  ``(stream, timeout_seconds) -> bool``; default: ``backend.synchronize``.
    recorder:      takes every recorded step.
    identity_key:  key of the block hashes, at least 16 bytes; default: random.
    manager:       a prepared manager instead of a new one (for tests, or for ``touch_on_hit``); its base pool and page
                   size must be the deployment's.

    Raises ContractViolation when the configuration is not enabled, the deployment breaks a rule, or the resources do
    not agree with it. A context manager: leaving it closes the coordinator.
    """

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        resources: ContextCachePhysicalResources,
        *,
        backend: Backend,
        stream: Stream,
        synchronizer: Synchronizer | None = None,
        recorder: Recorder | None = None,
        identity_key: bytes | None = None,
        manager: ContextCacheManager | None = None,
    ) -> None:
        self._core = build_core(
            config, deployment, resources, backend, stream, synchronizer, recorder, identity_key, manager
        )
        self._entry = Entry(self._core)
        self._finalizer = weakref.finalize(self, _lost, self._core)
        self._finalizer.atexit = False

    # What can be read at any time.

    @property
    def profile(self) -> ContextCacheDeploymentProfile:
        """What the deployment was validated as."""
        return self._core.profile

    @property
    def manager(self) -> ContextCacheManager:
        """The host bookkeeping, read only: changing it behind the coordinator breaks its invariants."""
        return self._core.manager

    @property
    def stream(self) -> Stream:
        """The stream given at construction."""
        return self._core.stream

    @property
    def state(self) -> str:
        """``serving``, ``poisoned`` or ``closed``."""
        return self._core.service.state

    @property
    def execution_holder(self) -> str | None:
        """Id of the request between a prepare call and its completion."""
        holder = self._core.token.request
        return None if holder is None else holder.id

    @property
    def length_view(self) -> str | None:
        """Id of the request whose batch the device length vector describes."""
        owner = self._core.view.request
        return None if owner is None else owner.id

    @property
    def length_view_partial(self) -> bool:
        """Whether a joiner's entry in the length vector may be only its reuse length."""
        return self._core.view.state == "partial"

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Every request that still owns pages, in order of admission."""
        return tuple(self._core.requests)

    @public_look
    def sequence(self, request: RequestHandle, slot: int) -> SequenceState:
        """What the ledger knows of logical ``slot``, copied. Raises ContractViolation for a slot out of range."""
        found = self._request(request)
        self._check_slot(found, slot)
        resident = int(found.order[slot])
        if self._core.ledger.owners[resident] != found.id:
            raise ContractViolation(f"slot {slot} of request {found.id} has been released already", slot=slot)
        return self._core.ledger.view(resident)

    @public_look
    def inspect(self, request_id: str) -> RequestView:
        """One request by id, quarantined and poisoned ones included; a released one has no sequences left.

        Raises ContractViolation for an id that was never given.
        """
        return self._inspect(request_id)

    def _inspect(self, request_id: str) -> RequestView:
        core = self._core
        expect(request_id, str, "request_id")
        request = core.requests.get(request_id)
        if request is None:
            if not core.was_given(request_id):
                raise ContractViolation(f"there is no request {request_id!r}; ids look like 'r1'", request=request_id)
            return RequestView(request_id, "released", "released", (), (), ())
        slots = core.owned_slots(request)
        return RequestView(
            request.id,
            request.state,
            request.phase,
            tuple(core.ledger.ref(slot) for slot in slots),
            tuple(tuple(core.ledger.lease(slot).base_pages.tolist()) for slot in slots),
            tuple(np.flatnonzero(core.ledger.state[request.order] == BOUND).tolist()) if request.joiners else (),
        )

    @public_look
    def metrics(self) -> CoordinatorMetrics:
        """Counters, pools and records now. A page of the base pool is free, leased, cached and idle, or withheld."""
        core = self._core
        withheld = {
            page
            for request in core.withheld()
            for slot in core.owned_slots(request)
            for page in core.ledger.lease(slot).base_pages.tolist()
        }
        return core.counters.snapshot(core.manager, len(core.requests), len(withheld))

    # End of life.

    @public_call
    def finish(self, request: RequestHandle) -> Status:
        """End a request: drain if work is outstanding, clear its rows, release its pages. Works in every live state.

        OK for a handle that is not valid any more. POISONED when the drain failed (quarantined) or the clearing
        upload raised (released). Raises ContractViolation for another coordinator's handle.
        """
        core, found = self._core, self._any_request(request)
        if found.state in ENDED_STATES:
            return Status.OK
        call = EndingCall(core, found, "finish")
        released = core.fire(found, "finish", call)
        return Status.OK if released and call.clearing_error is None else Status.POISONED

    @public_call
    def shutdown(self) -> Status:
        """Try to release what is withheld, newest first, and close if nothing is left. Repeatable, never raises.

        POISONED: a drain failed; that request is poisoned, older ones were not tried. REQUEST_FAILED: live handles
        exist. OK: closed, no more admissions.
        """
        core = self._core
        if core.closed:
            return Status.OK
        for request in core.withheld():
            if not core.fire(request, "shutdown", EndingCall(core, request, "shutdown")):
                return Status.POISONED
        live = bool(core.requests)
        core.tell_service("shutdown", owners_left=live)
        return Status.REQUEST_FAILED if live else Status.OK

    def close(self) -> None:
        """``shutdown``, insisting on success.

        Raises OwnersLeft when live requests remain, or the device could not be proven quiet; nothing is lost then,
        and the call may be repeated.
        """
        status = self.shutdown()
        if status is Status.REQUEST_FAILED:
            live = ", ".join(request.id for request in self._core.live())
            raise OwnersLeft(f"the coordinator still owns live requests ({live}); finish or close their handles first")
        if status is Status.POISONED:
            held = ", ".join(request.id for request in self._core.withheld())
            raise OwnersLeft(
                f"the device could not be proven quiet, requests {held} stay withheld; "
                "repair the device and close again"
            )

    def __reduce__(self) -> NoReturn:
        raise ContractViolation("a coordinator cannot be pickled or copied; save what inspect() and metrics() return")

    def __enter__(self) -> ContextCacheCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The caller's error matters more than ours: try, and log what could not be closed.
        try:
            self.close()
        except ContextCacheError as unfinished:
            _log.error("%s", unfinished)
