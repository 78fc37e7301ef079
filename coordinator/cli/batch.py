"""What the scheduler knows of a request on its way, and of a running batch."""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import define
from numpy.typing import NDArray

from context_cache.coordinator import (
    CommitPolicy,
    ContextCacheRequest,
    ContextCacheSequenceAdmission,
    ResidentRef,
)
from context_cache.coordinator.cli.workload import WorkloadRequest

__all__ = ["Batch", "Ticket"]

_COMMIT: Final = {
    "including_generated_tokens": CommitPolicy.INCLUDING_GENERATED_TOKENS,
    "prefill_state_only": CommitPolicy.PREFILL_STATE_ONLY,
    None: CommitPolicy.INCLUDING_GENERATED_TOKENS,
}


@define(eq=False)
class Ticket:
    """One request on its way: waiting (``resident`` is None) or in a batch.

    ordinal: its place in the workload. admission: remembers the prompt's hashes, so it is kept while it is refused.
    generated: tokens that earlier, preempted runs of it have given it; they are a part of the admission's tokens.
    """

    ordinal: int
    request: WorkloadRequest
    admission: ContextCacheSequenceAdmission
    generated: int = 0
    resident: ResidentRef | None = None

    @property
    def commit_policy(self) -> CommitPolicy:
        return _COMMIT[self.request.commit_policy]

    @property
    def input_length(self) -> int:
        """Tokens to prefill, reused ones included."""
        return self.request.prompt_length + self.generated

    @property
    def slot(self) -> int:
        """Its resident slot."""
        assert self.resident is not None, "a sequence in a batch has a resident slot"
        return self.resident.slot

    @property
    def remaining(self) -> int:
        """Tokens still to generate once it has been prefilled: the prefill samples one."""
        return self.request.max_new_tokens - self.generated - 1


@define(eq=False)
class Batch:
    """A running request, and what a decode step needs of its sequences, in logical order.

    ordinals: int64[n]. remaining: int64[n], tokens still to generate.
    """

    request: ContextCacheRequest
    tickets: list[Ticket]
    ordinals: NDArray[np.int64]
    remaining: NDArray[np.int64]

    @classmethod
    def of(cls, request: ContextCacheRequest, tickets: list[Ticket]) -> Batch:
        ordinals = np.array([ticket.ordinal for ticket in tickets], dtype=np.int64)
        remaining = np.array([ticket.remaining for ticket in tickets], dtype=np.int64)
        return cls(request, tickets, ordinals, remaining)

    def slots(self) -> NDArray[np.int64]:
        """Resident slots in logical order, int64[n]; a new array."""
        return np.array([ticket.slot for ticket in self.tickets], dtype=np.int64)

    def append(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.ordinals = np.append(self.ordinals, np.int64(ticket.ordinal))
        self.remaining = np.append(self.remaining, np.int64(ticket.remaining))

    def keep(self, stays: NDArray[np.bool_]) -> list[Ticket]:
        """Follow a compaction, bool[n]; the tickets of the sequences that left."""
        left = [ticket for ticket, kept in zip(self.tickets, stays, strict=True) if not kept]
        self.tickets = [ticket for ticket, kept in zip(self.tickets, stays, strict=True) if kept]
        self.ordinals, self.remaining = self.ordinals[stays], self.remaining[stays]
        return left
