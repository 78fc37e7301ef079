"""In-flight batching over the coordinator's runtime adapter, with the embedded model.

Requests are taken in file order as fast as they fit. The commit policy belongs to a request handle, so there is one
running batch for each commit policy in use; batches take turns at settled points. A batch begins with founders and is
joined by the next requests at its settled points; sequences that ended leave by compaction, the last by ``finish``.

What is refused, and what happens then:

* an admission without room is tried again after the next sequence has ended, not before: nothing else frees pages;
* a decode step without room ends the sequences that cannot grow (the adapter compacts them out). Here they count as
  preempted: their requests go back to the head of the queue with the tokens generated so far. Each admission yields at
  least one token, so a run always ends.

Rule 1: the steady decode path has no loop over sequences. What a step needs is kept in arrays, and the number of steps
until the next sequence ends is known beforehand, so a run of steps is one tight loop.
Rule 2: only time inside the coordinator's own calls counts as the coordinator's (``measured``).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from context_cache.coordinator import (
    AdmitOutcome,
    BlockKeyExtras,
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheRequest,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    Digest,
    ResidentRef,
    Status,
)
from context_cache.coordinator.adapter import FinishReason, PreparedStep, RuntimeSequence
from context_cache.coordinator.cli.accounts import Counts, leaked_pages
from context_cache.coordinator.cli.batch import Batch, Ticket
from context_cache.coordinator.cli.embedded import EmbeddedModel, EmbeddedRuntime
from context_cache.coordinator.cli.report import RunReport
from context_cache.coordinator.cli.sizing import HEADROOM_TOKENS, RunSize
from context_cache.coordinator.cli.workload import Workload, WorkloadRequest

__all__ = ["RunFailed", "run_workload"]

_HEADROOM: Final = DecodingKvHeadroom(HEADROOM_TOKENS, 0)
_RUN_STEPS_MAX: Final = 256  # bounds the token matrix of one run of steps
_TURN_STEPS_MAX: Final = 32  # while two batches take turns


class RunFailed(Exception):
    """The run could not go on, or its books do not balance. One sentence."""


def run_workload(
    workload: Workload,
    size: RunSize,
    *,
    max_records: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda finished: None,
) -> RunReport:
    """Run every request of ``workload`` to its end and report.

    ``progress`` is called now and then with the number of finished requests.
    Raises: RunFailed if the coordinator refuses to go on or the books do not balance; MemoryError if the pool does not
    fit into memory.
    """
    started = perf_counter()
    scheduler = _Scheduler(workload, size, max_records, seed, progress)
    scheduler.run()
    return scheduler.report(started)


class _Scheduler:
    def __init__(
        self, workload: Workload, size: RunSize, max_records: int | None, seed: int, progress: Callable[[int], None]
    ) -> None:
        self._workload = workload
        self._size = size
        self._max_records = max_records
        self._seed = seed
        self._progress = progress
        self._runtime = EmbeddedRuntime(size, max_records=max_records)
        self._coordinator = self._runtime.coordinator
        self._model = EmbeddedModel(seed)
        self._queue: deque[Ticket] = deque()  # taken from the file, and waiting: for the first time, or again
        self._next = 0  # the first request that was not taken from the file
        self._batches: dict[CommitPolicy, Batch] = {}
        self._blocked = False  # the head of the queue was refused, and no sequence has ended since
        self._counts = Counts()

    # The run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._admit()
            while self._batches:
                for batch in tuple(self._batches.values()):
                    self._decode(batch)
                self._admit()
        except BaseException:
            for batch in self._batches.values():
                batch.request.handle.close()
            self._coordinator.shutdown()
            raise
        if self._head() is not None:
            raise RunFailed("nothing runs, yet the next request was refused; this is a bug, please report it")
        generated = self._counts.prefill_tokens + self._counts.decode_tokens
        wanted = sum(request.max_new_tokens for request in self._workload.requests)
        if generated != wanted:
            raise RunFailed(f"{generated} tokens were generated instead of {wanted}; this is a bug, please report it")

    # Admission --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit from the head of the queue until it is empty, no resident slot is free, or there is no room."""
        while not self._blocked and (head := self._head()) is not None:
            resident = self._runtime.residents.acquire()
            if resident is None:
                return
            batch = self._batches.get(head.commit_policy)
            admitted = self._begin(head, resident) if batch is None else self._join(batch, head, resident)
            self._blocked = not admitted

    def _head(self) -> Ticket | None:
        if not self._queue and self._next < len(self._workload.requests):
            request = self._workload.requests[self._next]
            self._queue.append(Ticket(self._next, request, _admission(request, request.prompt())))
            self._next += 1
        return self._queue[0] if self._queue else None

    def _begin(self, head: Ticket, resident: ResidentRef) -> bool:
        """Found a batch with as many waiting requests as there are free resident slots, or with fewer if need be."""
        founders = [self._queue.popleft()]
        residents = [resident]
        while (
            (following := self._head()) is not None
            and following.commit_policy is head.commit_policy
            and (free := self._runtime.residents.acquire()) is not None
        ):
            founders.append(self._queue.popleft())
            residents.append(free)
        request, count = None, len(founders)
        while request is None and count:
            pairs = zip(founders[:count], residents, strict=False)
            admission = ContextCacheBatchAdmission(
                sequences=tuple(ticket.admission.on(resident) for ticket, resident in pairs),
                commit_policy=head.commit_policy,
            )
            outcome, request = ContextCacheRequest.begin(
                self._coordinator, admission, headroom=_HEADROOM, mapping_tensor=self._runtime.mapping
            )
            if request is None:
                self._refused(outcome)
                count //= 2
        for unused in residents[count:]:
            self._runtime.residents.release(unused)
        self._queue.extendleft(reversed(founders[count:]))
        if request is None:
            return False
        batch = Batch.of(request, founders[:count])
        self._batches[head.commit_policy] = batch
        for ticket, taken, start in zip(batch.tickets, residents, request.prefill_starts, strict=False):
            self._seated(ticket, taken, start)
        self._counts.founders += count
        request.prepare_prefill()
        self._runtime.prefill(request.lengths)
        request.complete_prefill(self._model.tokens(batch.ordinals, request.lengths, 1)[0])
        self._retire_ended(batch)
        return True

    def _join(self, batch: Batch, head: Ticket, resident: ResidentRef) -> bool:
        outcome = batch.request.admit(head.admission.on(resident), _HEADROOM)
        if outcome is not AdmitOutcome.ADMITTED:
            self._runtime.residents.release(resident)
            self._refused(outcome)
            return False
        self._queue.popleft()
        slot, length = len(batch.tickets), head.input_length
        batch.append(head)
        self._seated(head, resident, batch.request.prefill_starts[slot])
        self._counts.joiners += 1
        self._runtime.prefill_joiner(slot, length)
        if not batch.request.complete_admission(slot, int(self._model.sequence(head.ordinal, length, 1)[0])):
            raise RunFailed("the coordinator is poisoned; this is a bug, please report it")
        if not head.remaining:
            self._retire_ended(batch)
        return True

    def _seated(self, ticket: Ticket, resident: ResidentRef, start: int) -> None:
        ticket.resident = resident
        self._counts.prefill_tokens += 1
        if ticket.generated:
            self._counts.recomputed_tokens += ticket.input_length - start
        else:
            self._counts.reused_tokens += start

    def _refused(self, outcome: AdmitOutcome) -> None:
        if outcome is not AdmitOutcome.NO_CAPACITY:
            raise RunFailed("the coordinator is poisoned; this is a bug, please report it")
        self._counts.refused_admissions += 1

    # Decoding ---------------------------------------------------------------------------------------------------

    def _decode(self, batch: Batch) -> None:
        """Decode until a sequence ends, nobody is left, or the batch's turn is over."""
        limit = _RUN_STEPS_MAX if len(self._batches) == 1 else _TURN_STEPS_MAX
        steps = min(int(batch.remaining.min()), limit)
        tokens, size = self._model.tokens(batch.ordinals, batch.request.lengths, steps), len(batch.tickets)
        prepare, complete, model_step = (
            batch.request.prepare_decode_step,
            batch.request.complete_decode_step,
            self._runtime.decode,
        )
        for step in range(steps):
            prepared = prepare(_HEADROOM)
            if prepared.refusal is not None:
                stays = self._preempt(batch, prepared, step)
                if not batch.tickets:
                    return
                tokens, size = tokens[:, stays], len(batch.tickets)
            model_step(size)
            if step < steps - 1:
                complete(tokens[step])
            else:
                ended = np.where(batch.remaining == steps, FinishReason.ENDED, FinishReason.RUNNING)
                complete(tokens[step], reasons=ended.astype(np.uint8))
            self._counts.decode_tokens += size
        batch.remaining -= steps
        self._retire_ended(batch)

    def _preempt(self, batch: Batch, prepared: PreparedStep, steps_done: int) -> NDArray[np.bool_]:
        """Queue again whom the adapter ended for want of pages, ``steps_done`` steps into a run; who stays, bool[n]."""
        stays = np.ones(len(batch.tickets), dtype=np.bool_)
        stays[list(prepared.ended)] = False
        if prepared.poisoned or stays.all():
            raise RunFailed("a decode step got no pages and nobody could leave; this is a bug, please report it")
        remaining = batch.remaining[~stays] - steps_done
        left = self._left(batch, stays)
        for ticket, still in zip(left, remaining.tolist(), strict=True):
            ticket.generated = ticket.request.max_new_tokens - still
            prompt = ticket.request.prompt()
            generated = self._model.sequence(ticket.ordinal, prompt.size, ticket.generated)
            ticket.admission = _admission(ticket.request, np.concatenate((prompt, generated)))
        self._queue.extendleft(reversed(left))
        self._counts.preemptions += len(left)
        # The pages that became free are for those that go on: the queue waits for the next end, if anybody is left.
        self._blocked = bool(self._batches)
        return stays

    # Leaving ----------------------------------------------------------------------------------------------------

    def _retire_ended(self, batch: Batch) -> None:
        stays = batch.remaining > 0
        if stays.all():
            return
        if stays.any() and batch.request.compact(stays) is None:
            raise RunFailed("the drain of a compaction failed; this is a bug, please report it")
        self._counts.finished += len(self._left(batch, stays))
        self._blocked = False
        self._progress(self._counts.finished)

    def _left(self, batch: Batch, stays: NDArray[np.bool_]) -> list[Ticket]:
        """Follow those who left the request, by compaction or because nobody stays; then the request is finished."""
        left = batch.keep(stays)
        if batch.tickets:
            self._counts.compactions += 1
            if not self._runtime.check_lengths(batch.request.lengths - 1):  # the last token is not materialised yet
                raise RunFailed("the device's lengths are not those of the batch; this is a bug, please report it")
        else:
            if batch.request.finish() is not Status.OK:
                raise RunFailed("the drain at the end of a request failed; this is a bug, please report it")
            del self._batches[left[0].commit_policy]
        for ticket in left:
            assert ticket.resident is not None, "a sequence in a batch has a resident slot"
            self._runtime.residents.release(ticket.resident)
            ticket.resident = None
        return left

    # The result -------------------------------------------------------------------------------------------------

    def report(self, started: float) -> RunReport:
        """The report; ends the coordinator. ``started`` is the reading of the clock at which the run began."""
        counts, size, metrics = self._counts, self._size, self._coordinator.metrics()
        leaked = leaked_pages(self._coordinator.manager, size.pages)
        if self._coordinator.shutdown() is not Status.OK:
            raise RunFailed("the coordinator did not shut down; this is a bug, please report it")
        self._coordinator.close()
        steps = self._coordinator.step_nanoseconds
        p50, p99 = np.percentile(steps, (50, 99)).tolist() if steps.size else (None, None)
        return RunReport(
            workload=self._workload.source,
            backend=self._runtime.backend_name,
            seed=self._seed,
            pages=size.pages,
            page_size=size.page_size,
            row_tokens=size.row_tokens,
            max_batch=size.max_batch,
            max_records=self._max_records,
            requests=counts.finished,
            prompt_tokens=sum(request.prompt_length for request in self._workload.requests),
            reused_tokens=counts.reused_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            generated_tokens=counts.prefill_tokens + counts.decode_tokens,
            decode_tokens=counts.decode_tokens,
            decode_steps=steps.size,
            founders=counts.founders,
            joiners=counts.joiners,
            compactions=counts.compactions,
            preemptions=counts.preemptions,
            refused_admissions=counts.refused_admissions,
            drains=sum(metrics.drains.values()),
            evicted_records=metrics.evicted_records,
            records=metrics.current_records,
            leaked_pages=leaked,
            wall_seconds=perf_counter() - started,
            coordinator_seconds=self._coordinator.seconds,
            coordinator_us_per_step_p50=None if p50 is None else p50 / 1000,
            coordinator_us_per_step_p99=None if p99 is None else p99 / 1000,
        )


def _admission(request: WorkloadRequest, tokens: NDArray[np.int32]) -> ContextCacheSequenceAdmission:
    """What the coordinator gets of ``request`` when its input is ``tokens``; the resident slot is named later."""
    tokens.flags.writeable = False  # then the coordinator need not copy it
    tenant = None if request.tenant is None else Digest(hashlib.sha256(request.tenant.encode()).digest())
    return RuntimeSequence(
        token_ids=tokens,
        resident=ResidentRef(),
        key_extras=BlockKeyExtras(isolation_digest=tenant),
        bypass=request.lookup_policy == "bypass",
    ).admission()
