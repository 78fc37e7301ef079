"""What every call object offers: the device, the couplings, and what a failed drain leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from context_cache.backends.base import DeviceError, DrainResult, LifecycleDevice
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import InvariantViolation
from context_cache.coordinator.ledger import QUARANTINED
from context_cache.coordinator.watching import Offer

__all__ = ["Offer", "RequestCall", "publish_each"]

_log = logging.getLogger("context_cache.coordinator")


class RequestCall:
    """Base of the call objects. ``event`` is the request event that the call fires."""

    __slots__ = ("clearing_error", "core", "event", "request", "took_token")

    owners_left: ClassVar[bool] = True

    def __init__(self, core: Core, request: Request, event: str) -> None:
        self.core = core
        self.request = request
        self.event = event
        self.took_token = False
        self.clearing_error: DeviceError | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """Logical slots that the step touches."""
        return self.request.slots

    @property
    def device(self) -> LifecycleDevice:
        return self.core.device

    @property
    def paired(self) -> bool:
        """Whether the request has draft pages and draft rows."""
        return self.request.paired

    @property
    def joiner_waits(self) -> bool:
        """Whether an unfinalised joiner remains after the step; calls that change that override it."""
        return self.request.joiners > 0

    @property
    def holds_token(self) -> bool:
        return self.core.token.request is self.request

    @property
    def owns_view(self) -> bool:
        return self.core.view.request is self.request

    @property
    def view_current(self) -> bool:
        """Whether the device lengths describe this request's batch."""
        return self.core.view.request is self.request

    def drain(self) -> DrainResult:
        self.core.counters.drains[self.event] += 1
        return self.core.device.drain()

    def couple(self, machine: str, event: str) -> bool:
        core = self.core
        if machine == "execution":
            return core.token_runner.offer(core.token, event, self)
        if machine == "view":
            return core.view_runner.offer(core.view, event, self)
        return core.service_runner.offer(core.service, event, self)

    def hold_token(self) -> None:
        self.core.token.request = self.request
        self.took_token = True

    def free_token(self) -> None:
        self.core.token.request = None

    def own_view(self) -> None:
        self.core.view.request = self.request

    def drop_view(self) -> None:
        self.core.view.request = None

    def clearing_failed(self, error: DeviceError) -> None:
        """The rows stay dirty; any later upload carries them. The device is known to be quiet, so the pages go back."""
        _log.error("request %s: clearing its rows failed, the coordinator is poisoned", self.request.id, exc_info=error)
        self.clearing_error = error
        self.couple("coordinator", "clearing_failed")

    def withhold(self) -> None:
        self.core.withhold(self.request)
        for slot in self.core.owned_slots(self.request):
            self.core.ledger.state[slot] = QUARANTINED


def publish_each(call: RequestCall, offers: Sequence[tuple[int, Offer]]) -> None:
    """Make offers, (logical slot, how), one by one; one that raises is skipped, the others are still made, then one
    error is raised.

    A broken invariant is raised before anything else, because it must reach the guard that poisons.
    """
    errors: list[Exception] = []
    for slot, publish in offers:
        try:
            call.core.publisher(publish, call.core, call.request, int(call.request.order[slot]))
        except Exception as error:
            errors.append(error)
    if not errors:
        return
    chosen = next((error for error in errors if isinstance(error, InvariantViolation)), errors[0])
    for other in errors:
        if other is not chosen:
            _log.error("request %s: publishing a slot failed too", call.request.id, exc_info=other)
    raise chosen
