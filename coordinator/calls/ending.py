"""End of life: one way out for finish, drop, reaped orphans and shutdown."""

from __future__ import annotations

import logging

from context_cache.coordinator.calls.terminal import TerminalCall
from context_cache.coordinator.core import ENDED_STATES, Core, Request
from context_cache.coordinator.errors import InvariantViolation

__all__ = ["EndingCall", "drop", "reap_orphans"]

_log = logging.getLogger("context_cache.coordinator")


class EndingCall(TerminalCall):
    """Clears the rows that are bound and returns the leases. Neither can fail; an interrupt in between loses nothing,
    because the same event goes on with what is left."""

    __slots__ = ()

    joiner_waits = False

    def unbind_rows(self) -> bool:
        core = self.core
        return core.rows.unbind([core.ledger.ref(slot) for slot in core.owned_slots(self.request)])

    def release(self) -> None:
        core, request = self.core, self.request
        for slot in core.owned_slots(request):
            core.give_back(request, slot)
        core.requests.pop(request.id, None)


def reap_orphans(core: Core) -> None:
    """End the requests whose handles were lost, as a drop. Raises only what interrupts (the orphan stays queued)."""
    for _ in range(len(core.orphans)):
        request = core.orphans[0]
        try:
            drop(core, request)
        except Exception:
            # The caller of this call is not to blame; the request is tried again at the next call.
            _log.exception("request %s: dropping it as an orphan failed", request.id)
            core.orphans.append(request)
        core.orphans.popleft()


def drop(core: Core, request: Request) -> None:
    """The way out without publishing. A broken invariant poisons before it is raised."""
    if request.state in ENDED_STATES:
        return
    if core.watcher is None:
        _drop(core, request)
    else:
        core.watcher.dropped(request, lambda: _drop(core, request))


def _drop(core: Core, request: Request) -> None:
    try:
        core.fire(request, "drop", EndingCall(core, request, "drop"))
    except InvariantViolation:
        core.tell_service("invariant_broken")
        raise
