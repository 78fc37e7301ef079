"""Completions: what the runtime says has been computed goes into the ledger, and finished prefixes are published."""

from __future__ import annotations

import logging

from context_cache.coordinator.advances import StepPlan
from context_cache.coordinator.calls.base import RequestCall
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import InvariantViolation

__all__ = ["CompletionCall"]

_log = logging.getLogger("context_cache.coordinator")


class CompletionCall(RequestCall):
    """finalize_prefill_publication, finalize_sequence_admission and complete_decode_step.

    plan:        the new ledger values.
    publishing:  logical slots whose endpoint is offered for publication.
    decode_end:  the offer is made at the end of a sequence, where PREFILL_STATE_ONLY publishes nothing.
    waits:       whether an unfinalised joiner remains afterwards.
    """

    __slots__ = ("decode_end", "plan", "publishing", "touched", "waits")

    def __init__(
        self,
        core: Core,
        request: Request,
        event: str,
        plan: StepPlan,
        publishing: tuple[int, ...],
        *,
        decode_end: bool,
        waits: bool,
        touched: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(core, request, event)
        self.plan = plan
        self.publishing = publishing
        self.decode_end = decode_end
        self.waits = waits
        self.touched = touched

    @property
    def slots(self) -> tuple[int, ...]:
        return self.request.slots if self.touched is None else self.touched

    @property
    def joiner_waits(self) -> bool:
        return self.waits

    def apply_advances(self) -> None:
        ledger, plan, request = self.core.ledger, self.plan, self.request
        residents = plan.residents
        ledger.flat_tokens[plan.positions] = plan.tokens
        ledger.committed[residents] = plan.committed
        ledger.common[residents] = plan.committed
        ledger.token_count[residents] = plan.token_count
        if plan.states is None:
            request.positions_left -= plan.most
        else:
            changed, codes = plan.states
            ledger.state[changed] = codes
            request.recount(ledger)

    def publish(self) -> None:
        """Offer every slot; one that raises is skipped, the others are still published, the first error is raised."""
        errors: list[Exception] = []
        for slot in self.publishing:
            try:
                self._publish(int(self.request.order[slot]))
            except Exception as error:
                errors.append(error)
        if not errors:
            return
        # A broken invariant must reach the guard that poisons, whatever else went wrong.
        chosen = next((error for error in errors if isinstance(error, InvariantViolation)), errors[0])
        for other in errors:
            if other is not chosen:
                _log.error("request %s: publishing a slot failed too", self.request.id, exc_info=other)
        raise chosen

    def _publish(self, resident: int) -> None:
        core, ledger = self.core, self.core.ledger
        if ledger.bypass[resident] or (self.decode_end and ledger.prefill_only[resident]):
            return
        committed = int(ledger.committed[resident])
        blocks = committed // core.page_size
        if blocks <= int(ledger.published_blocks[resident]):
            return
        chain = ledger.chain(resident)
        # The lookahead is listed but not committed, so it is not part of any hash.
        chain.extend_to(ledger.tokens[resident, :committed], ledger.media[resident])
        hashes = chain.digests if len(chain.digests) == blocks else chain.digests[:blocks]
        result = core.manager.publish(ledger.lease(resident), hashes, committed)
        core.counters.published(result.status)
        ledger.published_blocks[resident] = result.block_count
