"""Completions: what the runtime says has been computed goes into the ledger, and finished prefixes are published."""

from __future__ import annotations

from context_cache.coordinator.advances import StepPlan
from context_cache.coordinator.calls.base import Offer, publish_each
from context_cache.coordinator.calls.captures import NO_CAPTURES, CaptureMixin, Captures
from context_cache.coordinator.core import Core, Request

__all__ = ["CompletionCall"]


class CompletionCall(CaptureMixin):
    """finalize_prefill_publication, finalize_sequence_admission and complete_decode_step.

    plan:     the new ledger values.
    prefill:  logical slots whose prompt endpoint is offered for publication; ended: those that ended normally.
    waits:    whether an unfinalised joiner remains afterwards.
    """

    __slots__ = ("ended", "plan", "prefill", "touched", "waits")

    def __init__(
        self,
        core: Core,
        request: Request,
        event: str,
        plan: StepPlan,
        *,
        prefill: tuple[int, ...] = (),
        ended: tuple[int, ...] = (),
        waits: bool,
        touched: tuple[int, ...] | None = None,
        captures: Captures = NO_CAPTURES,
    ) -> None:
        # Written out instead of asking the bases, because this is on the way of every decode step.
        self.core = core
        self.request = request
        self.event = event
        self.took_token = False
        self.clearing_error = None
        self._captures = captures
        self.plan = plan
        self.prefill = prefill
        self.ended = ended
        self.waits = waits
        self.touched = touched

    @property
    def slots(self) -> tuple[int, ...]:
        return self.request.slots if self.touched is None else self.touched

    @property
    def joiner_waits(self) -> bool:
        return self.waits

    @property
    def frozen_policy(self) -> bool:
        return self.request.policy.frozen

    def apply_advances(self) -> None:
        ledger, plan, request = self.core.ledger, self.plan, self.request
        residents = plan.residents
        ledger.flat_tokens[plan.positions] = plan.tokens
        ledger.committed[residents] = plan.committed
        ledger.common[residents] = plan.committed if plan.common is None else plan.common
        ledger.token_count[residents] = plan.token_count
        if plan.states is None:
            request.positions_left -= plan.most
            request.draft_left -= plan.most
        else:
            changed, codes = plan.states
            ledger.state[changed] = codes
            request.recount(ledger)

    def freeze(self) -> None:
        """The prompt is complete, but only a verification proves the draft's part of it."""
        ledger, order = self.core.ledger, self.request.order
        ledger.frozen[order] = ledger.committed[order]

    def release_hit_pins(self) -> bool:
        """The restored snapshots have been read: the prefill behind them has ended."""
        policy = self.request.policy
        if not (policy.captures or policy.mtp):
            return False
        for resident in self.request.order.tolist():
            self.core.manager.release_restored_snapshots(self.core.ledger.lease(resident))
        return True

    def publish(self) -> None:
        if not (self.prefill or self.ended):
            return
        policy = self.request.policy
        prompt: Offer = policy.publish_prefill
        end: Offer = policy.publish_decode
        publish_each(self, [*((slot, prompt) for slot in self.prefill), *((slot, end) for slot in self.ended)])
