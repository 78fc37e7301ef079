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
_INT32_MAX = 2**31 - 1


@frozen(eq=False)
class Growth:
    """Pages to add.

    slots: int64[m], logical slots that grow. counts: int64[m], pages for each, above 0. left: int32[n], positions left
    to every sequence before it grows.
    """

    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    left: Int32Array


class DecodeCall(RequestCall):
    """prepare_decode_step. ``growth``: None when nobody needs a page. ``refusal``: set when not all can have theirs."""

    __slots__ = ("growth", "growth_possible", "only_sequence", "refusal")

    def __init__(self, core: Core, request: Request, growth: Growth | None, refusal: GrowthRefusal | None) -> None:
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

    def grow(self) -> None:
        growth = self.growth
        if growth is None:
            return
        core, ledger, request = self.core, self.core.ledger, self.request
        residents = request.order[growth.slots]
        rows = residents.tolist()
        leases = [ledger.lease(slot) for slot in rows]
        before = [lease.page_count for lease in leases]
        if core.manager.grow_all(leases, growth.counts):
            raise InvariantViolation("growth was planned as possible and refused; the pools changed in between")
        core.table.extend(
            [ledger.ref(slot) for slot in rows],
            before,
            [lease.base_pages[start:] for lease, start in zip(leases, before, strict=True)],
        )
        ledger.page_count[residents] += growth.counts
        added = growth.counts * core.page_size
        request.room[growth.slots] += added
        left = growth.left
        left[growth.slots] += added
        request.positions_left = int(left.min())


def plan_growth(
    core: Core, request: Request, headroom: DecodingKvHeadroom
) -> tuple[Growth | None, GrowthRefusal | None]:
    """Which sequences need pages for ``headroom`` more positions, and whether all of them can have theirs.

    Unfinalised joiners and terminal sequences hold in the step and ask for nothing.
    Raises ContractViolation when a length would pass int32.
    """
    extra = headroom.base_extra_tokens
    if extra <= request.positions_left:
        return None, None
    ledger, order, page_size = core.ledger, request.order, core.page_size
    committed = ledger.committed[order]
    if extra > _INT32_MAX - ledger.width and extra > _INT32_MAX - int(committed.max(initial=0)):
        raise ContractViolation(f"headroom {extra} takes a sequence past int32 positions; ask for less", headroom=extra)
    left = request.room - committed
    slots = (left < extra).nonzero()[0]
    if slots.size == 0:
        request.positions_left = int(left.min())
        return None, None
    # From here on only the sequences that grow are looked at.
    short = extra - left[slots].astype(np.int64)
    counts = (short + (page_size - 1)) // page_size
    held = request.room[slots] // page_size
    pools = core.manager.pools
    room = pools.free_count(_BASE) + pools.reclaimable_count(_BASE)
    total = int(counts.sum())
    if total <= room and int((held + counts).max()) <= core.row_pages:
        return Growth(slots, counts, left), None
    return None, _refusal(slots.tolist(), counts.tolist(), held.tolist(), core.row_pages, room)


def _refusal(slots: list[int], counts: list[int], held: list[int], row_pages: int, room: int) -> GrowthRefusal:
    """Name the slots that do not fit, taken in logical order; a slot that does not fit takes nothing."""
    failed: list[int] = []
    too_long: list[int] = []
    wanted, left = 0, room
    for slot, count, pages in zip(slots, counts, held, strict=True):
        if pages + count > row_pages:
            failed.append(slot)
            too_long.append(slot)
            continue
        wanted += count
        if count > left:
            failed.append(slot)
        else:
            left -= count
    return GrowthRefusal(tuple(failed), tuple(too_long), ResourceDemand(base_kv_pages=max(0, wanted - room)))
