"""Checkpoints: which sequences are captured, into which snapshot slots, and from where on the device.

Planned before the row: the digest first, then the reservation, so that nothing that can fail comes between a
reservation and the row that retires it. A reservation refused for want of slots is skipped and counted; it is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from attrs import field, frozen

from context_cache.backends.base import DeviceArray, DrainResult, HiddenCopy, SnapshotCopies
from context_cache.coordinator.calls.base import RequestCall, publish_each
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.identity import Digest
from context_cache.coordinator.ledger import (
    CAPTURE_CAPTURED,
    CAPTURE_NONE,
    CAPTURE_RESERVED,
    StagedHybridPublication,
)
from context_cache.coordinator.policies import publish_staged

__all__ = [
    "NO_CAPTURES",
    "CaptureMixin",
    "Captures",
    "EnqueueCapturesCall",
    "MtpCall",
    "plan_captures",
    "plan_restores",
]


@frozen(eq=False)
class Captures:
    """staged: (resident slot, what it will be published as). copies: the device copies for all of them."""

    staged: tuple[tuple[int, StagedHybridPublication], ...] = ()
    copies: SnapshotCopies = field(factory=SnapshotCopies)


NO_CAPTURES = Captures()
C = TypeVar("C")


def plan_restores(core: Core, request: Request) -> SnapshotCopies:
    """What ``prepare_prefill`` does to the recurrent state: zero it, or restore the hit's snapshots."""
    if not core.profile.uses_checkpoints or not (request.policy.captures or request.policy.mtp):
        return SnapshotCopies()
    ledger = core.ledger
    zero: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    partials: list[tuple[int, int, int, int]] = []
    for resident in request.order.tolist():
        lease = ledger.lease(resident)
        if lease.recurrent_slot is None:
            zero.append(resident)
            continue
        slots.append(lease.recurrent_slot)
        rows.append(resident)
        if lease.partial_slot is not None:
            length = int(ledger.reuse[resident])
            index = (length - 1) // core.page_size
            draft = int(lease.draft_pages[index]) if request.paired else -1
            partials.append((lease.partial_slot, int(lease.base_pages[index]), length - index * core.page_size, draft))
    return SnapshotCopies(
        slots=tuple(slots),
        rows=tuple(rows),
        partial_slots=tuple(item[0] for item in partials),
        base_pages=tuple(item[1] for item in partials),
        tokens=tuple(item[2] for item in partials),
        draft_pages=tuple(item[3] for item in partials) if request.paired else None,
        zero_rows=tuple(zero),
    )


def plan_captures(core: Core, request: Request, wanted: list[tuple[int, int]], *, decode_end: bool) -> Captures:
    """Reserve snapshot slots for (resident slot, length in tokens) pairs, where there is something new to keep.

    Skipped silently: a bypassed sequence, a length that is published already, the end of a sequence that keeps its
    prefill only. Skipped and counted: no free snapshot slot. Anything raised here has reserved nothing.
    """
    mtp = request.policy.mtp
    staged: list[tuple[int, StagedHybridPublication]] = []
    try:
        for resident, length in wanted:
            item = _reserve(core, resident, length, mtp=mtp, decode_end=decode_end)
            if item is not None:
                staged.append((resident, item))
        return Captures(tuple(staged), _copies(core, request, staged)) if staged else NO_CAPTURES
    except BaseException:
        _retire(core, staged)
        raise


def call_with(core: Core, captures: Captures, make: Callable[[], C]) -> C:
    """Make the call object that takes the captures over; if that fails, their reservations are retired."""
    try:
        return make()
    except BaseException:
        _retire(core, captures.staged)
        raise


def _retire(core: Core, staged: Iterable[tuple[int, StagedHybridPublication]]) -> None:
    for resident, item in staged:
        core.manager.retire_reservation(core.ledger.lease(resident), item.reservation)


def exact_digest(core: Core, resident: int, length: int) -> Digest:
    """Identity of the first ``length`` tokens of a sequence; hashes its new full blocks and the tail."""
    ledger = core.ledger
    chain, tokens = ledger.chain(resident), ledger.tokens[resident, :length]
    chain.extend_to(tokens, ledger.media[resident])
    return chain.exact_digest(tokens, length, ledger.media[resident])


def _reserve(core: Core, resident: int, length: int, *, mtp: bool, decode_end: bool) -> StagedHybridPublication | None:
    ledger = core.ledger
    if ledger.staged[resident] is not None:
        raise InvariantViolation(f"resident slot {resident} has a staged checkpoint already")
    if ledger.bypass[resident] or (decode_end and ledger.prefill_only[resident]):
        return None
    if length <= int(ledger.published_exact[resident]):
        return None
    digest = exact_digest(core, resident, length)
    needs_partial = mtp or (core.profile.has_attention and length % core.page_size != 0)
    reservation = core.manager.reserve_snapshots(ledger.lease(resident), needs_partial)
    if reservation is None:
        core.counters.hybrid_snapshot_pressure_skips += 1
        return None
    return StagedHybridPublication(digest, length, reservation, decode_end)


def _copies(core: Core, request: Request, staged: list[tuple[int, StagedHybridPublication]]) -> SnapshotCopies:
    partial_slots: list[int] = []
    base_pages: list[int] = []
    draft_pages: list[int] = []
    tokens: list[int] = []
    for resident, item in staged:
        if item.reservation.partial_slot is None:
            continue
        lease = core.ledger.lease(resident)
        # The page that holds the last token: partly filled, or a full one whose last token must stay private (MTP).
        index = (item.length - 1) // core.page_size
        partial_slots.append(item.reservation.partial_slot)
        base_pages.append(int(lease.base_pages[index]))
        tokens.append(item.length - index * core.page_size)
        if request.policy.mtp:
            draft_pages.append(int(lease.draft_pages[index]))
    return SnapshotCopies(
        slots=tuple(item.reservation.recurrent_slot for _, item in staged),
        rows=tuple(resident for resident, _ in staged),
        partial_slots=tuple(partial_slots),
        base_pages=tuple(base_pages),
        tokens=tuple(tokens),
        draft_pages=tuple(draft_pages) if request.policy.mtp else None,
    )


class CaptureMixin(RequestCall):
    """Host steps around captures: staging them, marking them copied, retiring their reservations."""

    __slots__ = ("_captures",)

    def __init__(self, core: Core, request: Request, event: str, captures: Captures) -> None:
        super().__init__(core, request, event)
        self._captures = captures

    @property
    def captures(self) -> SnapshotCopies:
        return self._captures.copies

    @property
    def captures_planned(self) -> bool:
        return bool(self._captures.staged)

    def stage_captures(self) -> bool:
        ledger = self.core.ledger
        for resident, item in self._captures.staged:
            ledger.staged[resident] = item
            # Until every copy is enqueued: a copy that raises leaves the slots reserved.
            ledger.capture[resident] = CAPTURE_RESERVED
        return self.captures_planned

    def mark_captured(self) -> bool:
        for resident, _ in self._captures.staged:
            self.core.ledger.capture[resident] = CAPTURE_CAPTURED
        return self.captures_planned

    def retire_reservations(self) -> bool:
        """Nothing stays staged, whether it was published or not."""
        core, ledger = self.core, self.core.ledger
        retired = False
        for resident in core.owned_slots(self.request):
            item = ledger.staged[resident]
            if item is not None:
                core.manager.retire_reservation(ledger.lease(resident), item.reservation)
                ledger.staged[resident] = None
                ledger.capture[resident] = CAPTURE_NONE
                retired = True
        return retired

    def drain(self) -> DrainResult:
        self.core.counters.hybrid_capture_synchronizations += 1
        return super().drain()


class EnqueueCapturesCall(CaptureMixin):
    """enqueue_prefill_captures."""

    __slots__ = ()

    @property
    def plain_checkpoint(self) -> bool:
        return self.request.policy.captures


class MtpCall(CaptureMixin):
    """publish_hybrid_mtp_endpoint and restore_hybrid_mtp_boundary_hidden, of one logical slot."""

    __slots__ = ("hidden", "slot")

    def __init__(
        self, core: Core, request: Request, event: str, captures: Captures, slot: int, tensor: DeviceArray, row: int
    ) -> None:
        super().__init__(core, request, event, captures)
        self.slot = slot
        lease = core.ledger.lease(int(request.order[slot]))
        pinned = captures.staged[0][1].reservation.recurrent_slot if captures.staged else lease.recurrent_slot
        self.hidden = HiddenCopy(-1 if pinned is None else pinned, tensor, row, slot)

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    def publish(self) -> None:
        publish_each(self, [(self.slot, lambda core, request, resident: publish_staged(core, resident))])


def check_mtp_length(core: Core, request: Request, resident: int, length: int, boundary_row: int) -> None:
    """The boundary lies within the tokens and within the leased pages. Raises ContractViolation."""
    ledger = core.ledger
    listed = int(ledger.token_count[resident])
    if length > listed:
        raise ContractViolation(f"resident length {length} is longer than the {listed} tokens of the sequence")
    reuse = int(ledger.reuse[resident])
    if length < reuse:
        raise ContractViolation(
            f"the boundary at {length} tokens lies before token {reuse}, where the sequence started; the state of then "
            "is gone"
        )
    if boundary_row < 0:
        raise ContractViolation(f"boundary row {boundary_row} must be 0 or more")
    index = (length - 1) // core.page_size
    lease = ledger.lease(resident)
    if index >= lease.page_count or index >= lease.draft_page_count:
        raise ContractViolation(
            f"the boundary at {length} tokens lies in page {index}, the lease has {lease.page_count} base and "
            f"{lease.draft_page_count} draft pages"
        )
