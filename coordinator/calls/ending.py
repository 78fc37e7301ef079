"""End of life: one way out for finish, drop, reaped orphans and shutdown."""

from __future__ import annotations

import logging

from context_cache.coordinator.calls.base import RequestCall
from context_cache.coordinator.core import ENDED_STATES, Core

__all__ = ["EndingCall", "reap_orphans"]

_log = logging.getLogger("context_cache.coordinator")


class EndingCall(RequestCall):
    """Clears the rows that are bound and returns the leases. Neither can fail."""

    __slots__ = ()

    joiner_waits = False

    def unbind_rows(self) -> None:
        core = self.core
        refs = [core.ledger.ref(slot) for slot in self.request.order.tolist()]
        core.table.unbind(ref for ref in refs if core.table.bound_epoch(ref.slot) == ref.epoch)

    def release(self) -> None:
        core, request = self.core, self.request
        for slot in request.order.tolist():
            core.ledger.lease(slot).release()
            core.ledger.close(slot)
        core.requests.pop(request.id, None)


def reap_orphans(core: Core) -> None:
    """End the requests whose handles were lost, as a drop."""
    while core.orphans:
        request = core.orphans.popleft()
        if request.state not in ENDED_STATES:
            core.fire(request, "drop", EndingCall(core, request, "drop"))
