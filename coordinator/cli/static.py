"""Static batches, for the flavours that nobody can join while they run.

A batch is as many of the next requests of one commit policy as there are resident slots, or fewer when they do not fit.
It is prefilled once and decoded until all of it has ended; who has ended is compacted out, who gets no pages is ended
and queued again with the tokens that it has. One batch runs at a time, so everything else in the pools can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from context_cache.coordinator import CommitPolicy, ContextCacheBatchAdmission, ContextCacheRequest, Status
from context_cache.coordinator.adapter import FinishReason, PreparedStep
from context_cache.coordinator.cli.batch import Batch, Ticket
from context_cache.coordinator.cli.running import RunFailed, Running, RunOptions
from context_cache.coordinator.cli.sizing import RunSize
from context_cache.coordinator.cli.stub import StubModel
from context_cache.coordinator.cli.workload import Workload

__all__ = ["VOLATILE_TAIL_TOKENS", "StaticScheduler"]

VOLATILE_TAIL_TOKENS: Final = 4
"""Tokens at the end of an MTP prompt that the next turn is taken to replace (its generation prompt): the endpoint lies
before them."""


class StaticScheduler(Running):
    def __init__(self, workload: Workload, size: RunSize, options: RunOptions) -> None:
        super().__init__(workload, size, options)
        self._flavour = options.flavour
        self._batch: Batch | None = None

    def _running(self) -> Iterable[Batch]:
        return () if self._batch is None else (self._batch,)

    def _finished(self, left: list[Ticket]) -> None:
        self._batch = None

    def _run(self) -> None:
        model = self.runtime.model
        assert model is not None, "static batches need a model that computes"
        while self._head() is not None:
            batch = self._begin()
            if batch is None:
                return
            self._prefill(batch, model)
            self._retire_ended(batch)
            while self._batch is not None:
                self._decode(batch, model)

    # Admission --------------------------------------------------------------------------------------------------

    def _commit_policy(self, ticket: Ticket) -> CommitPolicy:
        return CommitPolicy.PREFILL_STATE_ONLY if self._flavour.mtp else ticket.commit_policy

    def _begin(self) -> Batch | None:
        """Begin with as many waiting requests as possible; None when not even one fits."""
        head = self._head()
        assert head is not None, "somebody waits"
        policy = self._commit_policy(head)
        tickets: list[Ticket] = []
        residents = []
        while (
            (following := self._head()) is not None
            and self._commit_policy(following) is policy
            and (resident := self.runtime.residents.acquire()) is not None
        ):
            tickets.append(self._queue.popleft())
            residents.append(resident)
        request, count = None, len(tickets)
        while request is None and count:
            pairs = zip(tickets[:count], residents, strict=False)
            admission = ContextCacheBatchAdmission(
                sequences=tuple(ticket.admission.on(resident) for ticket, resident in pairs),
                speculative_request=self._flavour.speculative,
                commit_policy=policy,
                replay_tail_length=VOLATILE_TAIL_TOKENS if self._flavour.mtp else 0,
            )
            outcome, request = ContextCacheRequest.begin(
                self.coordinator, admission, headroom=self._flavour.headroom, mapping_tensor=self.runtime.mapping
            )
            if request is None:
                self._refused(outcome)
                count //= 2
        for unused in residents[count:]:
            self.runtime.residents.release(unused)
        self._queue.extendleft(reversed(tickets[count:]))
        if request is None:
            return None
        batch = self._batch = Batch.of(request, tickets[:count])
        for ticket, taken, start in zip(batch.tickets, residents, request.prefill_starts, strict=False):
            self._seated(ticket, taken, start)
        self.counts.founders += count
        return batch

    # The model's part -------------------------------------------------------------------------------------------

    def _prefill(self, batch: Batch, model: StubModel) -> None:
        request, slots = batch.request, batch.slots()
        request.prepare_prefill()
        lengths = request.lengths
        if self._flavour.mtp:
            self._prefill_mtp(batch, model)
            self.runtime.synchronize()
        else:
            for ticket, start in zip(batch.tickets, request.prefill_starts, strict=True):
                self._load(ticket, start)
            for logical, ticket in enumerate(batch.tickets):
                model.prefill(logical, ticket.slot, ticket.input_length)
            if self._flavour.has_recurrent:
                self.coordinator.enqueue_prefill_captures(request.handle)
            self.runtime.synchronize()
            if self._flavour.has_draft_pages:
                # Enqueued without a synchronise: it runs with the first verification, or at the next drain.
                for logical, ticket in enumerate(batch.tickets):
                    model.prefill_draft(logical, ticket.slot, ticket.input_length)
        self._check()
        request.complete_prefill(self.runtime.sampled(lengths, slots))

    def _prefill_mtp(self, batch: Batch, model: StubModel) -> None:
        """Up to the stable boundary, publish there, then the volatile tail."""
        request, (ticket,) = batch.request, batch.tickets
        start, length = request.prefill_starts[0], ticket.input_length
        model.load(ticket.slot, ticket.admission.token_ids)
        if start:
            status = self.coordinator.restore_hybrid_mtp_boundary_hidden(request.handle, 0, model.hidden, start - 1)
            if status is not Status.OK:
                raise RunFailed("a boundary row was not restored; this is a bug, please report it")
        if self.verifier is not None:
            self.verifier.started(ticket.ordinal, ticket.slot, ticket.admission.token_ids, start)
        boundary = length - VOLATILE_TAIL_TOKENS if length > VOLATILE_TAIL_TOKENS else length
        for end in (boundary, length) if start < boundary < length else (length,):
            model.prefill(0, ticket.slot, end, sample_next=end == length)
            model.prefill_draft(0, ticket.slot, end)
            if end == boundary:
                status = self.coordinator.publish_hybrid_mtp_endpoint(
                    request.handle, 0, boundary, model.hidden, boundary - 1
                )
                if status is not Status.OK:
                    raise RunFailed("the drain of an endpoint failed; this is a bug, please report it")

    def _decode(self, batch: Batch, model: StubModel) -> None:
        """Decode until a sequence ends."""
        request, headroom, slots = batch.request, self._flavour.headroom, batch.slots()
        offsets = np.arange(self._flavour.width)
        while True:
            prepared = request.prepare_decode_step(headroom)
            if prepared.refusal is not None:
                self._preempt(batch, prepared)
                if not batch.tickets:
                    return
                slots = batch.slots()
            model.decode(slots, batch.remaining)
            self.runtime.synchronize()
            counts = model.counts
            batch.remaining = batch.remaining - counts
            ended = batch.remaining == 0
            request.complete_decode_step(
                model.produced[offsets < counts[:, np.newaxis]],
                counts.astype(np.int32),
                np.where(ended, FinishReason.ENDED, FinishReason.RUNNING).astype(np.uint8),
            )
            self.counts.decode_tokens += int(counts.sum())
            if ended.any():
                self._retire_ended(batch)
                return

    def _preempt(self, batch: Batch, prepared: PreparedStep) -> None:
        """Queue again whom the adapter ended for want of pages."""
        stays = np.ones(len(batch.tickets), dtype=np.bool_)
        stays[list(prepared.ended)] = False
        if prepared.poisoned or stays.all():
            raise RunFailed("a decode step got no pages and nobody could leave; this is a bug, please report it")
        slots, remaining = batch.slots()[~stays].tolist(), batch.remaining[~stays].tolist()
        self._requeue(self._left(batch, stays), slots, remaining)
