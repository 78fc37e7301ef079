"""What a request still owes before its batch changes or it ends: the frozen endpoint of a speculative prompt."""

from __future__ import annotations

from context_cache.coordinator.calls.base import RequestCall, publish_each

__all__ = ["TerminalCall"]


class TerminalCall(RequestCall):
    """A call that publishes a frozen endpoint first, where there is one."""

    __slots__ = ()

    def publish_frozen(self) -> None:
        """Offer the prompt endpoint of every sequence, at most as far as base and draft agree."""
        publish_each(self, [(slot, self.request.policy.publish_prefill) for slot in self.request.slots])
