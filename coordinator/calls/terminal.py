"""What a request still owes before its batch changes or it ends: the frozen endpoint of a speculative prompt."""

from __future__ import annotations

from context_cache.coordinator.calls.base import RequestCall, publish_each

__all__ = ["TerminalCall"]


class TerminalCall(RequestCall):
    """A call that publishes a frozen endpoint first, where there is one."""

    __slots__ = ()

    def publish_frozen(self) -> None:
        """Offer the prompt endpoint of every sequence, at most as far as base and draft agree."""
        request, owned = self.request, set(self.core.owned_slots(self.request))
        # An end that was interrupted has given some slots back; they may belong to somebody else by now.
        slots = [slot for slot in request.slots if int(request.order[slot]) in owned]
        publish_each(self, [(slot, request.policy.publish_prefill) for slot in slots])
