"""What every way of scheduling has in common: the queue, seats, retirement, preemption, and what is verified."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from context_cache.coordinator import (
    AdmitOutcome,
    BlockKeyExtras,
    ContextCacheSequenceAdmission,
    Digest,
    ResidentRef,
    Status,
)
from context_cache.coordinator.adapter import RuntimeSequence
from context_cache.coordinator.cli.accounts import Counts
from context_cache.coordinator.cli.batch import Batch, Ticket
from context_cache.coordinator.cli.embedded import EmbeddedModel, EmbeddedRuntime
from context_cache.coordinator.cli.flavours import FLAVOURS, Flavour
from context_cache.coordinator.cli.platform import open_platform
from context_cache.coordinator.cli.sizing import RunSize
from context_cache.coordinator.cli.verify import Verifier
from context_cache.coordinator.cli.workload import Workload, WorkloadRequest
from context_cache.machines import Recorder

__all__ = ["RunFailed", "RunOptions", "Running", "admission_of"]


class RunFailed(Exception):
    """The run could not go on, its books do not balance, or cached is not cold. One sentence."""


@frozen(kw_only=True)
class RunOptions:
    """``backend``: host, cupy or auto. ``verify``: compare cached with cold. ``progress``: called now and then with the
    number of finished requests. ``recorder``: of the coordinator's calls and steps."""

    flavour: Flavour = field(factory=lambda: FLAVOURS["vanilla"])
    backend: str = "host"
    max_records: int | None = None
    snapshot_slots: int = 0
    seed: int = 0
    verify: bool = False
    progress: Callable[[int], None] = lambda finished: None
    recorder: Recorder | None = None


class Running(ABC):
    """One run in progress. A subclass decides who is admitted when."""

    def __init__(self, workload: Workload, size: RunSize, options: RunOptions) -> None:
        self.workload: Final = workload
        self.size: Final = size
        self.options: Final = options
        self.runtime: Final = EmbeddedRuntime(
            size,
            options.flavour,
            platform=open_platform(options.backend),
            max_records=options.max_records,
            snapshot_slots=options.snapshot_slots,
            seed=options.seed,
            compute=options.verify or not options.flavour.live,
            recorder=options.recorder,
        )
        self.coordinator: Final = self.runtime.coordinator
        self.counts: Final = Counts()
        self.verifier: Final = (
            Verifier(workload, self.runtime.model, self.runtime.platform, seed=options.seed)
            if options.verify and self.runtime.model is not None
            else None
        )
        self._model = EmbeddedModel(options.seed)
        self._queue: deque[Ticket] = deque()  # taken from the file, and waiting: for the first time, or again
        self._next = 0  # the first request that was not taken from the file

    def run(self) -> None:
        """Run every request to its end. Raises RunFailed; nothing is live afterwards."""
        try:
            self._run()
            self.runtime.synchronize()
            self._check()
        except BaseException:
            for batch in self._running():
                batch.request.handle.close()
            self.coordinator.shutdown()
            raise
        if self._head() is not None:
            raise RunFailed("nothing runs, yet the next request was refused; this is a bug, please report it")
        generated = self.counts.prefill_tokens + self.counts.decode_tokens
        wanted = sum(request.max_new_tokens for request in self.workload.requests)
        if generated != wanted:
            raise RunFailed(f"{generated} tokens were generated instead of {wanted}; this is a bug, please report it")

    @abstractmethod
    def _run(self) -> None:
        """Admit, step and finish until the queue is empty."""

    @abstractmethod
    def _running(self) -> Iterable[Batch]:
        """The batches that are live."""

    # The queue --------------------------------------------------------------------------------------------------

    def _head(self) -> Ticket | None:
        if not self._queue and self._next < len(self.workload.requests):
            request = self.workload.requests[self._next]
            self._queue.append(Ticket(self._next, request, admission_of(request, request.prompt())))
            self._next += 1
        return self._queue[0] if self._queue else None

    def _refused(self, outcome: AdmitOutcome) -> None:
        if outcome is not AdmitOutcome.NO_CAPACITY:
            raise RunFailed("the coordinator is poisoned; this is a bug, please report it")
        self.counts.refused_admissions += 1

    def _seated(self, ticket: Ticket, resident: ResidentRef, start: int) -> None:
        ticket.resident = resident
        self.counts.prefill_tokens += 1
        if ticket.generated:
            self.counts.recomputed_tokens += ticket.input_length - start
        else:
            self.counts.reused_tokens += start

    def _requeue(self, left: list[Ticket], slots: list[int], remaining: list[int]) -> None:
        """Put those who were ended for want of pages back at the head, with the tokens that they have.

        slots: the resident slots that they had.
        """
        for ticket, slot, still in zip(left, slots, remaining, strict=True):
            ticket.generated = ticket.request.max_new_tokens - still
            prompt = ticket.request.prompt()
            if self.runtime.model is None:
                generated = self._model.sequence(ticket.ordinal, prompt.size, ticket.generated)
            else:
                generated = self.runtime.model.tokens[slot, prompt.size : prompt.size + ticket.generated]
            ticket.admission = admission_of(ticket.request, np.concatenate((prompt, generated)))
        self._queue.extendleft(reversed(left))
        self.counts.preemptions += len(left)

    # The model --------------------------------------------------------------------------------------------------

    def _load(self, ticket: Ticket, start: int) -> None:
        """Give the model the input of a sequence whose row is bound, and check what it starts from."""
        if self.runtime.model is None:
            return
        tokens = ticket.admission.token_ids
        self.runtime.model.load(ticket.slot, tokens)
        if self.verifier is not None:
            self.verifier.started(ticket.ordinal, ticket.slot, tokens, start)

    def _check(self) -> None:
        """Whether all checks that have run so far agree. The caller has synchronised."""
        if self.runtime.model is not None and self.runtime.model.faults:
            raise RunFailed(f"{self.runtime.model.faults[0]}; this is a bug, please report it")
        if self.verifier is not None and self.verifier.difference is not None:
            raise RunFailed(str(self.verifier.difference))

    # Leaving ----------------------------------------------------------------------------------------------------

    def _verify_ended(self, batch: Batch, stays: NDArray[np.bool_]) -> None:
        """Enqueue the checks of those who are about to leave, while their rows are bound."""
        if self.verifier is None:
            return
        for logical in (~stays).nonzero()[0].tolist():
            ticket = batch.tickets[logical]
            state = self.coordinator.sequence(batch.request.handle, logical)
            lengths = state.committed_state_length, state.common_state_length
            self.verifier.retired(ticket.ordinal, ticket.slot, *lengths)

    def _left(self, batch: Batch, stays: NDArray[np.bool_]) -> list[Ticket]:
        """Follow those who left the request, by compaction or because nobody stays; then the request is finished."""
        left = batch.keep(stays)
        if batch.tickets:
            self.counts.compactions += 1
            if not self.runtime.check_lengths(batch.request.lengths - 1):  # the last token is not materialised yet
                raise RunFailed("the device's lengths are not those of the batch; this is a bug, please report it")
        else:
            if batch.request.finish() is not Status.OK:
                raise RunFailed("the drain at the end of a request failed; this is a bug, please report it")
            self._finished(left)
        for ticket in left:
            assert ticket.resident is not None, "a sequence in a batch has a resident slot"
            self.runtime.residents.release(ticket.resident)
            ticket.resident = None
        return left

    @abstractmethod
    def _finished(self, left: list[Ticket]) -> None:
        """The request whose last sequences these were has ended."""

    def _retire_ended(self, batch: Batch) -> int:
        """Take out the sequences that have all of their tokens; how many."""
        stays = batch.remaining > 0
        if stays.all():
            return 0
        self._verify_ended(batch, stays)
        if stays.any() and batch.request.compact(stays) is None:
            raise RunFailed("the drain of a compaction failed; this is a bug, please report it")
        ended = len(self._left(batch, stays))
        self._check()
        self.counts.finished += ended
        self.options.progress(self.counts.finished)
        return ended


def admission_of(request: WorkloadRequest, tokens: NDArray[np.int32]) -> ContextCacheSequenceAdmission:
    """What the coordinator gets of ``request`` when its input is ``tokens``; the resident slot is named later."""
    tokens.flags.writeable = False  # then the coordinator need not copy it
    tenant = None if request.tenant is None else Digest(hashlib.sha256(request.tenant.encode()).digest())
    return RuntimeSequence(
        token_ids=tokens,
        resident=ResidentRef(),
        key_extras=BlockKeyExtras(isolation_digest=tenant),
        bypass=request.lookup_policy == "bypass",
    ).admission()
