"""Admission: acquiring pages for sequences, binding their rows, seating and retracting joiners."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from context_cache.backends.base import SnapshotCopies
from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.calls.base import RequestCall
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.identity import HashChain, check_media
from context_cache.coordinator.ledger import BOUND, LEASED
from context_cache.coordinator.manager import (
    AcquireStatus,
    Lease,
    LookupPolicy,
    PlanKind,
    ReusePlan,
    require_coverage,
)
from context_cache.coordinator.policies import PublicationPolicy
from context_cache.coordinator.types import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    ResidentRef,
)

__all__ = [
    "AcquireSequenceResult",
    "Acquired",
    "BeginCall",
    "JoinCall",
    "PrepareCall",
    "acquire_sequence",
    "check_headroom",
    "check_input",
    "check_resident",
    "effective_policy",
    "give_up",
]


@frozen
class AcquireSequenceResult:
    """Outcome of acquiring one sequence; ``lease`` is None when it was refused for capacity."""

    status: AcquireStatus
    plan: ReusePlan
    chain: HashChain
    lease: Lease | None = None
    forced_cold: bool = False


@frozen(eq=False)
class Acquired:
    """One sequence that has its pages, and what the ledger will know of it."""

    sequence: ContextCacheSequenceAdmission
    result: AcquireSequenceResult
    lease: Lease
    policy: LookupPolicy

    @property
    def resident(self) -> ResidentRef:
        return self.sequence.resident


def check_headroom(headroom: DecodingKvHeadroom, paired: bool) -> None:
    """Base headroom above 0; draft headroom exactly with paged draft state. Raises ContractViolation."""
    if headroom.base_extra_tokens <= 0:
        raise ContractViolation(
            f"base headroom must be at least 1 position, got {headroom.base_extra_tokens}; a decode step writes one"
        )
    if paired and headroom.draft_extra_tokens <= 0:
        raise ContractViolation(
            f"draft headroom must be at least 1 position with paged draft state, got {headroom.draft_extra_tokens}"
        )
    if not paired and headroom.draft_extra_tokens != 0:
        raise ContractViolation(
            f"draft headroom {headroom.draft_extra_tokens} without paged draft state; pass 0",
            draft_extra_tokens=headroom.draft_extra_tokens,
        )


def check_resident(core: Core, ref: ResidentRef, taken: set[int]) -> None:
    """Slot in range, epoch set, and nobody else on the slot. Raises ContractViolation."""
    limit = core.deployment.max_batch
    if not 0 <= ref.slot < limit:
        raise ContractViolation(f"resident slot {ref.slot} is outside 0..{limit - 1}", slot=ref.slot)
    if ref.epoch < 1:
        raise ContractViolation(f"resident slot {ref.slot} has epoch {ref.epoch}; acquire it from the slot pool first")
    if ref.slot in taken:
        raise ContractViolation(f"resident slot {ref.slot} is named twice in one batch; give each sequence its own")
    last = int(core.ledger.last_epoch[ref.slot])
    if ref.epoch < last:
        raise ContractViolation(
            f"resident slot {ref.slot} was last held with epoch {last}, the reference has {ref.epoch} and is stale; "
            "acquire the slot anew",
            slot=ref.slot, epoch=ref.epoch, last_epoch=last,
        )  # fmt: skip
    owner = core.ledger.owners[ref.slot]
    if owner is not None:
        raise ContractViolation(
            f"resident slot {ref.slot} is held by request {owner} ({core.requests[owner].state}); "
            "wait until that sequence has left, or take another slot",
            slot=ref.slot, owner=owner,
        )  # fmt: skip


def effective_policy(batch: ContextCacheBatchAdmission, sequence: ContextCacheSequenceAdmission) -> LookupPolicy:
    """BYPASS if the batch says so or a speculative batch carries media; else the override, else the batch's policy."""
    if batch.speculative_request and any(item.has_media for item in batch.sequences):
        return LookupPolicy.BYPASS
    if batch.lookup_policy is LookupPolicy.BYPASS or sequence.lookup_policy is None:
        return batch.lookup_policy
    return sequence.lookup_policy


def check_input(core: Core, sequence: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom) -> None:
    """Tokens present, media list complete, input + headroom within a row. Raises ContractViolation."""
    tokens = sequence.token_ids.size
    if tokens == 0:
        raise ContractViolation("a sequence without tokens cannot be admitted; give at least one token")
    check_media(sequence.per_position_media_hash, tokens)
    extra = max(headroom.base_extra_tokens, headroom.draft_extra_tokens)
    pages = pages_needed(core, sequence, extra)
    if pages > core.row_pages:
        raise ContractViolation(
            f"{tokens} tokens + {extra} of headroom need {pages} pages, a row has room for "
            f"{core.row_pages}; shorten the input or deploy a larger kv_capacity_tokens",
            tokens=int(tokens), pages=pages, row_pages=core.row_pages,
        )  # fmt: skip


def pages_needed(core: Core, sequence: ContextCacheSequenceAdmission, extra: int) -> int:
    """Pages for the whole input and ``extra`` positions of headroom."""
    return -(-(sequence.token_ids.size + extra) // core.page_size)


def acquire_sequence(
    core: Core,
    sequence: ContextCacheSequenceAdmission,
    policy: LookupPolicy,
    headroom: DecodingKvHeadroom,
    publication: PublicationPolicy,
    paired: bool,
) -> AcquireSequenceResult:
    """Find the reusable prefix of a checked input and lease the pages for input + headroom.

    A hit that does not fit is tried again cold: *forced cold*. With plans whose only demand is pages the second try
    can never succeed (what a cold plan needs more, it can gain by eviction at most); it is here for demands that a hit
    has and a cold plan has not.
    """
    tokens = sequence.token_ids
    pages = pages_needed(core, sequence, headroom.base_extra_tokens) if core.profile.has_attention else 0
    draft_pages = pages_needed(core, sequence, headroom.draft_extra_tokens) if paired else 0
    started = core.nanoseconds()
    # Forked before anything is leased: from here to the ledger nothing can fail.
    chain = sequence.memo.chain(
        core.hasher, core.page_size, tokens, sequence.key_extras, sequence.per_position_media_hash
    ).fork()
    manager = core.manager
    plan = require_coverage(publication.plan(core, sequence, chain, policy), pages, draft_pages)
    planned = core.nanoseconds()
    outcome = manager.acquire(plan)
    forced_cold = False
    derived = plan.reuse_token_length > 0 or plan.kind is PlanKind.FULL_INPUT_REWIND
    if outcome.lease is None and policy is LookupPolicy.USE_CACHE and derived:
        cold = require_coverage(publication.plan(core, sequence, chain, LookupPolicy.BYPASS), pages, draft_pages)
        outcome = manager.acquire(cold)
        forced_cold = outcome.lease is not None
    core.counters.planning_nanoseconds += planned - started
    core.counters.acquiring_nanoseconds += core.nanoseconds() - planned
    return AcquireSequenceResult(outcome.status, outcome.plan, chain, outcome.lease, forced_cold)


class _Opening(RequestCall):
    """Shared by founders and joiners: writing acquired sequences into the ledger, counting them once."""

    __slots__ = ("acquired",)

    def __init__(self, core: Core, request: Request, event: str, acquired: list[Acquired]) -> None:
        super().__init__(core, request, event)
        self.acquired = acquired

    def open_rows(self, state: int) -> None:
        core, batch = self.core, self.request.batch
        for item in self.acquired:
            sequence = item.sequence
            core.ledger.open(
                self.request.id,
                sequence.resident,
                item.lease,
                item.result.chain,
                sequence.token_ids,
                sequence.key_extras,
                sequence.per_position_media_hash,
                reuse=item.result.plan.reuse_token_length,
                state=state,
                lookup_policy=item.policy,
                commit_policy=batch.commit_policy,
                replay_tail=batch.replay_tail_length,
            )

    def count(self) -> None:
        for item in self.acquired:
            self.core.counters.admitted(
                item.result.plan,
                media=item.sequence.has_media,
                bypass=item.policy is LookupPolicy.BYPASS,
                forced_cold=item.result.forced_cold,
            )


def give_up(core: Core, request: Request | None, acquired: list[Acquired]) -> None:
    """An admission did not come about after its pages were leased: everything it has goes back. Never fails."""
    for item in acquired:
        slot = item.resident.slot
        if core.ledger.leases[slot] is item.lease:
            core.ledger.close(slot)
        item.lease.release()
    if request is not None:
        core.requests.pop(request.id, None)


class BeginCall(_Opening):
    """begin_request: the leases were acquired; they become the request's."""

    __slots__ = ()

    def take_leases(self) -> None:
        self.open_rows(LEASED)
        slots = np.array([item.resident.slot for item in self.acquired], np.int64)
        self.core.requests[self.request.id] = self.request
        self.request.order_by(slots, self.core.ledger)
        self.count()


class PrepareCall(RequestCall):
    """prepare_prefill. ``restores``: what the sequences start from, on a checkpoint deployment."""

    __slots__ = ("restores",)

    joiner_waits = False

    def __init__(self, core: Core, request: Request, restores: SnapshotCopies) -> None:
        super().__init__(core, request, "prepare_prefill")
        self.restores = restores

    @property
    def lengths(self) -> Int32Array:
        return self.core.lengths_of(self.request)

    @property
    def draft_lengths(self) -> Int32Array:
        return self.core.common_lengths_of(self.request)

    def bind_rows(self) -> None:
        core, ledger = self.core, self.core.ledger
        slots = self.request.order.tolist()
        leases = [ledger.lease(slot) for slot in slots]
        core.rows.bind(
            [ledger.ref(slot) for slot in slots],
            [lease.base_pages for lease in leases],
            [lease.draft_pages for lease in leases] if self.paired else None,
        )
        ledger.state[self.request.order] = BOUND


class JoinCall(_Opening):
    """admit_sequence and retract_sequence_admission: the tail sequence of a running request."""

    __slots__ = ("_joiner", "was_waiting")

    def __init__(self, core: Core, request: Request, event: str, acquired: list[Acquired]) -> None:
        super().__init__(core, request, event, acquired)
        self._joiner = acquired[0].resident if acquired else core.ledger.ref(int(request.order[-1]))
        # Counted without the joiner of this call: admission looks before it is bound, retraction after it has left.
        self.was_waiting = request.joiners > (0 if acquired else 1)

    @property
    def joiner_waits(self) -> bool:
        return self.was_waiting

    @property
    def slots(self) -> tuple[int, ...]:
        count = len(self.request.slots)
        bound = count > 0 and int(self.request.order[-1]) == self._joiner.slot
        return (count - 1 if bound else count,)

    @property
    def lengths(self) -> Int32Array:
        return self.core.lengths_of(self.request)

    @property
    def draft_lengths(self) -> Int32Array:
        return self.core.common_lengths_of(self.request)

    def bind_joiner(self) -> None:
        core, request = self.core, self.request
        self.open_rows(BOUND)
        request.order_by(core.joined_order(request, self._joiner.slot), core.ledger)
        request.recount(core.ledger)
        core.rows.bind([self._joiner], [self.acquired[0].lease.base_pages], None)

    def unbind_joiner(self) -> bool:
        # After a failed length install the joiner has no row yet.
        return self.core.rows.unbind([self._joiner])

    def release_joiner(self) -> None:
        core, request, slot = self.core, self.request, self._joiner.slot
        if request.order.size and int(request.order[-1]) == slot:
            core.ledger.lease(slot).release()
            core.ledger.close(slot)
            request.order_by(request.order[:-1], core.ledger)
            request.recount(core.ledger)
        else:
            # Interrupted before the joiner took its place in the order; its ledger row may be open already.
            give_up(core, None, self.acquired)
        if self.owns_view:
            core.set_active_batch(request)

    def withhold(self) -> None:
        # The joiner's lease is withheld with the others even when its row was never opened.
        core, request = self.core, self.request
        if self.acquired and not (request.order.size and int(request.order[-1]) == self._joiner.slot):
            if core.ledger.owners[self._joiner.slot] is None:
                self.open_rows(BOUND)
            request.order_by(core.joined_order(request, self._joiner.slot), core.ledger)
        super().withhold()
