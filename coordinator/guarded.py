"""Who may call, and when: what every public call checks before it plans anything."""

from __future__ import annotations

from typing import Final

import numpy as np

from context_cache.coordinator.core import ENDED_STATES, Core, Request
from context_cache.coordinator.entry import Entry
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.handle import RequestHandle

__all__ = ["CALLS", "Guarded"]

CALLS: Final = {
    "finalize_prefill": "finalize_prefill_publication",
    "publish_mtp_endpoint": "publish_hybrid_mtp_endpoint",
    "restore_mtp_boundary": "restore_hybrid_mtp_boundary_hidden",
    "drop": "close",
}
"""Events whose names are shorter than the call that fires them."""


class Guarded:
    """The core of a coordinator behind its entry guard, and the checks of handle, token, state and slot."""

    _core: Core
    _entry: Entry

    def _request(self, handle: RequestHandle) -> Request:
        if type(handle) is RequestHandle and handle._core is self._core and handle._request._state not in ENDED_STATES:
            return handle._request
        request = self._any_request(handle)
        if request._state in ENDED_STATES:
            raise ContractViolation(
                f"request {request.id} is {request.state}; its handle is not valid any more",
                request=request.id, state=request.state,
            )  # fmt: skip
        return request

    def _any_request(self, handle: RequestHandle) -> Request:
        request = handle.request_of(self._core) if isinstance(handle, RequestHandle) else None
        if request is None:
            raise ContractViolation(
                "the handle is not one of this coordinator; use the coordinator that admitted the request"
            )
        return request

    def _check_token(self, request: Request) -> None:
        holder = self._core.token.request
        if holder is not None and holder is not request:
            raise ContractViolation(
                f"request {holder.id} is between a prepare call and its completion ({holder.state}); complete, finish "
                f"or drop it before request {request.id} prepares",
                holder=holder.id, request=request.id,
            )  # fmt: skip

    def _require(self, request: Request, event: str) -> None:
        runner = self._core.request_runner
        if not runner.declares(request.state, event):
            refusal = runner.refuse(request, event)
            accepted = tuple(CALLS.get(name, name) for name in refusal.accepted)
            raise ContractViolation(
                f"request {request.id} is {request.state} and does not take {CALLS.get(event, event)!r}; "
                f"it takes: {', '.join(accepted)}",
                request=request.id, state=request.state, event=event, accepted=accepted,
            )  # fmt: skip

    def _check_slot(self, request: Request, slot: int) -> None:
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer) or not 0 <= slot < len(request.slots):
            raise ContractViolation(
                f"slot {slot!r} is outside 0..{len(request.slots) - 1} of request {request.id}", slot=slot
            )

    def _mtp_resident(self, found: Request, slot: int) -> int:
        if not found.policy.mtp:
            raise ContractViolation(
                f"request {found.id} publishes as {found.policy.name}; this call is for hybrid + MTP"
            )
        self._check_slot(found, slot)
        return int(found.order[slot])
