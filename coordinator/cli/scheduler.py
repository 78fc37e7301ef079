"""In-flight batching over the coordinator's runtime adapter, with the embedded model; and the entry for all flavours.

Vanilla runs as described here, the other flavours in static batches (module ``static``).

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

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from context_cache.coordinator import (
    AdmitOutcome,
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheRequest,
    DecodingKvHeadroom,
    ResidentRef,
    Status,
)
from context_cache.coordinator.adapter import FinishReason, PreparedStep
from context_cache.coordinator.cli.accounts import leaked_pages
from context_cache.coordinator.cli.batch import Batch, Ticket
from context_cache.coordinator.cli.flavours import FLAVOURS, Flavour
from context_cache.coordinator.cli.report import RunReport
from context_cache.coordinator.cli.running import RunFailed, Running, RunOptions
from context_cache.coordinator.cli.sizing import HEADROOM_TOKENS, RunSize
from context_cache.coordinator.cli.static import StaticScheduler
from context_cache.coordinator.cli.workload import Workload
from context_cache.machines import Recorder

__all__ = ["RunFailed", "run_workload"]

_HEADROOM: Final = DecodingKvHeadroom(HEADROOM_TOKENS, 0)
_RUN_STEPS_MAX: Final = 256  # bounds the token matrix of one run of steps
_TURN_STEPS_MAX: Final = 32  # while two batches take turns


def run_workload(
    workload: Workload,
    size: RunSize,
    *,
    flavour: Flavour = FLAVOURS["vanilla"],
    backend: str = "host",
    max_records: int | None = None,
    snapshot_slots: int = 0,
    seed: int = 0,
    verify: bool = False,
    progress: Callable[[int], None] = lambda finished: None,
    recorder: Recorder | None = None,
) -> RunReport:
    """Run every request of ``workload`` to its end and report.

    ``verify``: compare a sample of the requests with a cold computation. ``progress`` is called now and then with the
    number of finished requests. ``recorder`` is the coordinator's; it is not closed here.
    Raises: BackendUnavailable if the backend cannot be opened; RunFailed if the coordinator refuses to go on, the books
    do not balance or a comparison finds a difference; MemoryError if the pools do not fit into memory.
    """
    started = perf_counter()
    options = RunOptions(
        flavour=flavour, backend=backend, max_records=max_records, snapshot_slots=snapshot_slots, seed=seed,
        verify=verify, progress=progress, recorder=recorder,
    )  # fmt: skip
    running = (_Scheduler if flavour.live else StaticScheduler)(workload, size, options)
    running.run()
    return _report(running, started)


class _Scheduler(Running):
    """Live: sequences join a running batch."""

    def __init__(self, workload: Workload, size: RunSize, options: RunOptions) -> None:
        super().__init__(workload, size, options)
        self._batches: dict[CommitPolicy, Batch] = {}
        self._blocked = False  # the head of the queue was refused, and no sequence has ended since

    def _run(self) -> None:
        self._admit()
        while self._batches:
            for batch in tuple(self._batches.values()):
                self._decode(batch)
            self._admit()

    def _running(self) -> Iterable[Batch]:
        return self._batches.values()

    def _finished(self, left: list[Ticket]) -> None:
        del self._batches[left[0].commit_policy]

    # Admission --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit from the head of the queue until it is empty, no resident slot is free, or there is no room."""
        while not self._blocked and (head := self._head()) is not None:
            resident = self.runtime.residents.acquire()
            if resident is None:
                return
            batch = self._batches.get(head.commit_policy)
            admitted = self._begin(head, resident) if batch is None else self._join(batch, head, resident)
            self._blocked = not admitted

    def _begin(self, head: Ticket, resident: ResidentRef) -> bool:
        """Found a batch with as many waiting requests as there are free resident slots, or with fewer if need be."""
        founders = [self._queue.popleft()]
        residents = [resident]
        while (
            (following := self._head()) is not None
            and following.commit_policy is head.commit_policy
            and (free := self.runtime.residents.acquire()) is not None
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
                self.coordinator, admission, headroom=_HEADROOM, mapping_tensor=self.runtime.mapping
            )
            if request is None:
                self._refused(outcome)
                count //= 2
        for unused in residents[count:]:
            self.runtime.residents.release(unused)
        self._queue.extendleft(reversed(founders[count:]))
        if request is None:
            return False
        batch = Batch.of(request, founders[:count])
        self._batches[head.commit_policy] = batch
        for ticket, taken, start in zip(batch.tickets, residents, request.prefill_starts, strict=False):
            self._seated(ticket, taken, start)
        self.counts.founders += count
        request.prepare_prefill()
        for ticket, start in zip(batch.tickets, request.prefill_starts, strict=True):
            self._load(ticket, start)
        slots = batch.slots()
        self.runtime.prefill(request.lengths, slots)
        self._check()
        if self.runtime.model is None:
            sampled = self._model.tokens(batch.ordinals, request.lengths, 1)[0]
        else:
            sampled = self.runtime.sampled(request.lengths, slots)
        request.complete_prefill(sampled)
        self._retire_ended(batch)
        return True

    def _join(self, batch: Batch, head: Ticket, resident: ResidentRef) -> bool:
        outcome = batch.request.admit(head.admission.on(resident), _HEADROOM)
        if outcome is not AdmitOutcome.ADMITTED:
            self.runtime.residents.release(resident)
            self._refused(outcome)
            return False
        self._queue.popleft()
        slot, length = len(batch.tickets), head.input_length
        batch.append(head)
        start = batch.request.prefill_starts[slot]
        self._seated(head, resident, start)
        self.counts.joiners += 1
        self._load(head, start)
        self.runtime.prefill_joiner(slot, resident.slot, start, length)
        self._check()
        if self.runtime.model is None:
            sampled = int(self._model.sequence(head.ordinal, length, 1)[0])
        else:
            sampled = int(self.runtime.model.tokens[resident.slot, length])
        if not batch.request.complete_admission(slot, sampled):
            raise RunFailed("the coordinator is poisoned; this is a bug, please report it")
        if not head.remaining:
            self._retire_ended(batch)
        return True

    # Decoding ---------------------------------------------------------------------------------------------------

    def _decode(self, batch: Batch) -> None:
        """Decode until a sequence ends, nobody is left, or the batch's turn is over."""
        limit = _RUN_STEPS_MAX if len(self._batches) == 1 else _TURN_STEPS_MAX
        steps = min(int(batch.remaining.min()), limit)
        size, model = len(batch.tickets), self.runtime.model
        # A model that computes nothing has all tokens of the run beforehand; else each step samples its own.
        tokens = None if model is not None else self._model.tokens(batch.ordinals, batch.request.lengths, steps)
        slots = None if model is None else batch.slots()
        prepare, complete, model_step = (
            batch.request.prepare_decode_step,
            batch.request.complete_decode_step,
            self.runtime.decode,
        )
        for step in range(steps):
            prepared = prepare(_HEADROOM)
            if prepared.refusal is not None:
                stays = self._preempt(batch, prepared, step)
                if not batch.tickets:
                    return
                size = len(batch.tickets)
                tokens = None if tokens is None else tokens[:, stays]
                slots = None if slots is None else slots[stays]
            model_step(size, slots)
            if tokens is not None:
                sampled = tokens[step]
            else:
                assert model is not None, "tokens are known beforehand, or a model samples them"
                sampled = model.produced[:, 0]
            if step < steps - 1:
                complete(sampled)
            else:
                ended = np.where(batch.remaining == steps, FinishReason.ENDED, FinishReason.RUNNING)
                complete(sampled, reasons=ended.astype(np.uint8))
            self.counts.decode_tokens += size
        batch.remaining -= steps
        self._retire_ended(batch)

    def _preempt(self, batch: Batch, prepared: PreparedStep, steps_done: int) -> NDArray[np.bool_]:
        """Queue again whom the adapter ended for want of pages, ``steps_done`` steps into a run; who stays, bool[n]."""
        stays = np.ones(len(batch.tickets), dtype=np.bool_)
        stays[list(prepared.ended)] = False
        if prepared.poisoned or stays.all():
            raise RunFailed("a decode step got no pages and nobody could leave; this is a bug, please report it")
        slots, remaining = batch.slots()[~stays].tolist(), (batch.remaining[~stays] - steps_done).tolist()
        self._requeue(self._left(batch, stays), slots, remaining)
        # The pages that became free are for those that go on: the queue waits for the next end, if anybody is left.
        self._blocked = bool(self._batches)
        return stays

    # Leaving ----------------------------------------------------------------------------------------------------

    def _retire_ended(self, batch: Batch) -> int:
        ended = super()._retire_ended(batch)
        if ended:
            self._blocked = False
        return ended


def _report(running: Running, started: float) -> RunReport:
    """The report; ends the coordinator. ``started`` is the reading of the clock at which the run began."""
    counts, size, options, coordinator = running.counts, running.size, running.options, running.coordinator
    metrics = coordinator.metrics()
    leaked = leaked_pages(coordinator.manager, running.runtime.capacity)
    if coordinator.shutdown() is not Status.OK:
        raise RunFailed("the coordinator did not shut down; this is a bug, please report it")
    coordinator.close()
    steps = coordinator.step_nanoseconds
    p50, p99 = np.percentile(steps, (50, 99)).tolist() if steps.size else (None, None)
    snapshots = options.flavour.has_recurrent
    return RunReport(
        workload=running.workload.source,
        flavour=options.flavour.name,
        backend=running.runtime.backend_name,
        seed=options.seed,
        pages=size.pages,
        page_size=size.page_size,
        row_tokens=size.row_tokens,
        max_batch=size.max_batch,
        max_records=options.max_records,
        requests=counts.finished,
        prompt_tokens=sum(request.prompt_length for request in running.workload.requests),
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
        coordinator_seconds=coordinator.seconds,
        coordinator_us_per_step_p50=None if p50 is None else p50 / 1000,
        coordinator_us_per_step_p99=None if p99 is None else p99 / 1000,
        verified_requests=None if running.verifier is None else running.verifier.verified,
        snapshot_slots=options.snapshot_slots if snapshots else None,
        checkpoints=metrics.committed_publications if snapshots else None,
        hybrid_restores=metrics.hybrid_restores if snapshots else None,
        hybrid_snapshot_pressure_skips=metrics.hybrid_snapshot_pressure_skips if snapshots else None,
    )
