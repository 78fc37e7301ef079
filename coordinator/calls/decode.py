"""Preparing a decode step: pages for every seated sequence, decided for all of them before anything is done."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.calls.base import RequestCall
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import ResourceDemand, ResourceType
from context_cache.coordinator.types import DecodingKvHeadroom, GrowthRefusal

__all__ = ["DecodeCall", "plan_growth"]

_BASE = ResourceType.BASE_KV_PAGE
_DRAFT = ResourceType.DRAFT_KV_PAGE
_INT32_MAX = 2**31 - 1


@frozen(eq=False)
class Growth:
    """Pages to add.

    slots: int64[m], logical slots that grow. base, draft: int64[m], pages for each in the two pools (draft is None for
    an unpaired request); at least one of the two is above 0. left, draft_left: int32[n], positions left to every
    sequence before it grows.
    """

    slots: npt.NDArray[np.int64]
    base: npt.NDArray[np.int64]
    draft: npt.NDArray[np.int64] | None
    left: Int32Array
    draft_left: Int32Array | None


class DecodeCall(RequestCall):
    """prepare_decode_step. ``growth``: None when nobody needs a page. ``refusal``: set when not all can have theirs."""

    __slots__ = ("growth", "growth_possible", "only_sequence", "refusal")

    def __init__(self, core: Core, request: Request, growth: Growth | None, refusal: GrowthRefusal | None) -> None:
        # Written out instead of asking the base, because this is on the way of every decode step.
        self.core = core
        self.request = request
        self.event = "prepare_decode_step"
        self.took_token = False
        self.clearing_error = None
        self.growth = growth
        self.refusal = refusal
        self.growth_possible = refusal is None
        self.only_sequence = len(request.slots) == 1

    @property
    def lengths(self) -> Int32Array:
        return self.core.lengths_of(self.request)

    @property
    def draft_lengths(self) -> Int32Array:
        return self.core.common_lengths_of(self.request)

    def grow(self) -> bool:
        growth = self.growth
        if growth is None:
            return False
        core, ledger, request = self.core, self.core.ledger, self.request
        rows = request.order[growth.slots].tolist()
        leases = [ledger.lease(slot) for slot in rows]
        if core.manager.grow_all(leases, growth.base, growth.draft):
            raise InvariantViolation("growth was planned as possible and refused; the pools changed in between")
        _extend(core, request, rows)
        added = growth.base * core.page_size
        request.room[growth.slots] += added
        growth.left[growth.slots] += added
        request.positions_left = int(growth.left.min())
        if growth.draft is not None and growth.draft_left is not None:
            added = growth.draft * core.page_size
            request.draft_room[growth.slots] += added
            growth.draft_left[growth.slots] += added
            request.draft_left = int(growth.draft_left.min())
        return True


def _extend(core: Core, request: Request, residents: list[int]) -> None:
    """Rows and ledger of these resident slots learn the pages that their leases have and they do not know yet."""
    ledger = core.ledger
    leases = [ledger.lease(slot) for slot in residents]
    refs = [ledger.ref(slot) for slot in residents]
    starts = ledger.page_count[residents].tolist()
    core.rows.extend_base(refs, starts, [lease.base_pages[at:] for lease, at in zip(leases, starts, strict=True)])
    for slot, lease in zip(residents, leases, strict=True):
        ledger.page_count[slot] = lease.page_count
    if not request.paired:
        return
    starts = ledger.draft_page_count[residents].tolist()
    core.rows.extend_draft(refs, starts, [lease.draft_pages[at:] for lease, at in zip(leases, starts, strict=True)])
    for slot, lease in zip(residents, leases, strict=True):
        ledger.draft_page_count[slot] = lease.draft_page_count


def catch_up(core: Core, request: Request) -> None:
    """After a step that was interrupted while it grew: what the leases have counts, rows and ledger follow."""
    ledger = core.ledger
    behind = [
        slot
        for slot in request.order.tolist()
        if ledger.page_count[slot] != ledger.lease(slot).page_count
        or ledger.draft_page_count[slot] != ledger.lease(slot).draft_page_count
    ]
    if behind:
        _extend(core, request, behind)
    request.recount(ledger)


def plan_growth(
    core: Core, request: Request, headroom: DecodingKvHeadroom
) -> tuple[Growth | None, GrowthRefusal | None]:
    """Which sequences need pages for ``headroom`` more positions, and whether all of them can have theirs.

    Unfinalised joiners and terminal sequences hold in the step and ask for nothing.
    Raises ContractViolation when a length would pass int32.
    """
    extra, draft_extra = headroom.base_extra_tokens, headroom.draft_extra_tokens
    if extra <= request.positions_left and (not request.paired or draft_extra <= request.draft_left):
        return None, None
    ledger, order = core.ledger, request.order
    committed = ledger.committed[order]
    most = max(extra, draft_extra)
    if most > _INT32_MAX - ledger.width and most > _INT32_MAX - int(committed.max(initial=0)):
        raise ContractViolation(f"headroom {most} takes a sequence past int32 positions; ask for less", headroom=most)
    left = request.room - committed
    draft_left = request.draft_room - committed if request.paired else None
    asks = left < extra
    if draft_left is not None:
        asks |= draft_left < draft_extra
    slots = asks.nonzero()[0]
    if slots.size == 0:
        request.positions_left = int(left.min())
        if draft_left is not None:
            request.draft_left = int(draft_left.min())
        return None, None
    # From here on only the sequences that grow are looked at.
    base, longest = _pages(core, request.room[slots], left[slots], extra)
    draft: npt.NDArray[np.int64] | None = None
    if draft_left is not None:
        draft, longest_draft = _pages(core, request.draft_room[slots], draft_left[slots], draft_extra)
        longest = np.maximum(longest, longest_draft)
    pools = core.manager.pools
    room = pools.free_count(_BASE) + pools.reclaimable_count(_BASE)
    draft_room = pools.free_count(_DRAFT) + pools.reclaimable_count(_DRAFT)
    fits = int(base.sum()) <= room and (draft is None or int(draft.sum()) <= draft_room)
    if fits and int(longest.max()) <= core.row_pages:
        return Growth(slots, base, draft, left, draft_left), None
    drafts = [0] * slots.size if draft is None else draft.tolist()
    too_long = (longest > core.row_pages).tolist()
    return None, _refusal(slots.tolist(), base.tolist(), drafts, too_long, room, draft_room)


def _pages(
    core: Core, held: Int32Array, left: Int32Array, extra: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pages to add so that ``extra`` positions are left, and the pages that the sequence has then; int64[m] both."""
    short = np.maximum(extra - left.astype(np.int64), 0)
    counts = (short + (core.page_size - 1)) // core.page_size
    return counts, held // core.page_size + counts


def _refusal(
    slots: list[int], base: list[int], draft: list[int], too_long: list[bool], room: int, draft_room: int
) -> GrowthRefusal:
    """Name the slots that do not fit, taken in logical order; a slot that does not fit takes nothing."""
    failed: list[int] = []
    long_ones: list[int] = []
    wanted = wanted_draft = 0
    left, draft_left = room, draft_room
    for slot, pages, draft_pages, long in zip(slots, base, draft, too_long, strict=True):
        if long:
            failed.append(slot)
            long_ones.append(slot)
            continue
        wanted += pages
        wanted_draft += draft_pages
        if pages > left or draft_pages > draft_left:
            failed.append(slot)
        else:
            left -= pages
            draft_left -= draft_pages
    missing = ResourceDemand(max(0, wanted - room), max(0, wanted_draft - draft_room))
    return GrowthRefusal(tuple(failed), tuple(long_ones), missing)
