"""From a plan to the pins of a lease, and back.

Pins come first, so that nothing that the plan binds counts as reclaimable when the eviction is planned. They are taken
back when the demand does not fit or anything raises before the eviction is committed.
"""

from __future__ import annotations

import numpy as np

from ..errors import ContractViolation
from .books import Books
from .lease import NO_PAGES, Holdings, Lease, PageList
from .planning import ReuseMode, ReusePlan
from .pool import Indices, Pool
from .resources import ResourceType

__all__ = ["bind_and_draw", "drop_pins", "give_back", "refuse_dead", "refuse_unfit", "release"]

_Pins = list[tuple[Pool, Indices]]
_NOT_BASE = [type for type in ResourceType if type != ResourceType.BASE_KV_PAGE]


def refuse_dead(books: Books, lease: Lease, verb: str) -> None:
    """ContractViolation for a lease of another manager or one that has been released."""
    if lease.manager.books is not books:
        raise foreign(lease, verb)
    if lease.released:
        raise ContractViolation(
            f"{verb}: lease {lease.id} has been released; acquire a new one", lease_id=lease.id, verb=verb
        )


def foreign(lease: Lease, verb: str) -> ContractViolation:
    return ContractViolation(
        f"{verb}: lease {lease.id} belongs to another manager; pass it to the one that acquired it",
        lease_id=lease.id, verb=verb,
    )  # fmt: skip


def refuse_unfit(books: Books, plan: ReusePlan) -> None:
    """ContractViolation for a demand that the plan's mode excludes, and for a plan that has become untrue."""
    base, draft, recurrent, partial = plan.demand.counts
    paged, attention = plan.owns_paged_spec_state, plan.has_attention
    if (
        base < 0 or draft < 0 or recurrent or partial
        or (draft and not paged) or (base and not attention) or not isinstance(plan.mode, ReuseMode)
    ):  # fmt: skip
        kinds = "base and draft pages" if paged else "base pages" if attention else "no pages"
        raise ContractViolation(
            f"acquire: a {getattr(plan.mode, 'value', plan.mode)} plan cannot demand {plan.demand.counts}; demand "
            f"{kinds} only, 0 or more",
            mode=str(plan.mode), demand=plan.demand.counts,
        )  # fmt: skip
    if plan.protected_record is not None:
        true = _record_supports(books, plan, plan.protected_record)
    elif plan.draft_pages or plan.recurrent_slot is not None or plan.partial_slot is not None:
        true = False
    else:
        # An entry that vanished may have come back with another page, or its page may hold other tokens now.
        true = plan.index_version is books.index.version or (
            tuple(map(books.index.get, plan.matched_hashes)) == plan.base_pages
        )
    if not true:
        raise ContractViolation(
            f"acquire: the plan binds {len(plan.base_pages)} pages of which some were evicted since; plan again",
            base_pages=plan.base_pages, protected_record=plan.protected_record,
        )  # fmt: skip


def _record_supports(books: Books, plan: ReusePlan, record_id: int) -> bool:
    """Whether the record is stored and has all that the plan binds. Its pages then hold what was planned with: a
    record's content never changes, and its pages are not free while it lives."""
    if not books.records.contains(record_id):
        return False
    record = books.records.get(record_id)
    return (
        record.packed_base.startswith(np.array(plan.base_pages, dtype=np.int32).tobytes())
        and (record.packed_spec or b"").startswith(np.array(plan.draft_pages, dtype=np.int32).tobytes())
        and plan.recurrent_slot in (None, record.recurrent_slot)
        and plan.partial_slot in (None, record.partial_slot)
        and record.logical_block_hashes[: len(plan.matched_hashes)] == plan.matched_hashes
    )


def bind_and_draw(books: Books, plan: ReusePlan) -> Holdings | None:
    """Pin what the plan binds, evict and allocate what it demands. None, and nothing changed, when it does not fit."""
    bound = books.base.indices(plan.base_pages) if plan.bound is None else plan.bound
    distinct = books.base.distinct(bound)
    others = [] if plan.protected_record is None else _other_bindings(books, plan)
    base_count, draft_count = plan.demand.base_kv_pages, plan.demand.draft_kv_pages
    books.base.pin(bound, distinct)
    pinned = 0
    try:
        for pool, indices in others:
            pool.pin(indices)
            pinned += 1
        room = books.room(base_count, draft_count, protected=plan.protected_record)
        if room.feasible:
            # Every list has its memory before anything is evicted or drawn.
            pages = PageList(bound, base_count)
            if plan.owns_paged_spec_state:
                drafts = PageList(np.array(plan.draft_pages, dtype=np.int32), draft_count)
                holds = Holdings(pages, distinct, drafts, plan.recurrent_slot, plan.partial_slot)
                drawn, drawn_drafts = books.draw(room, base_count, draft_count)
                drafts.append(drawn_drafts)
            else:
                holds = Holdings(pages, distinct, NO_PAGES, plan.recurrent_slot, plan.partial_slot)
                drawn = books.draw_base(room, base_count)
            pages.append(drawn)
            return holds
    except BaseException:
        _unpin(others[:pinned])
        books.base.unpin(bound, distinct)
        raise
    _unpin(others)
    books.base.unpin(bound, distinct)
    return None


def _other_bindings(books: Books, plan: ReusePlan) -> _Pins:
    """What the plan binds of its record beside base pages."""
    pins: _Pins = []
    if plan.draft_pages:
        pins.append((books.draft, books.draft.indices(plan.draft_pages)))
    if plan.recurrent_slot is not None:
        pins.append((books.recurrent, books.recurrent.indices((plan.recurrent_slot,))))
    if plan.partial_slot is not None:
        pins.append((books.partial, books.partial.indices((plan.partial_slot,))))
    return pins


def _unpin(pins: _Pins) -> None:
    for pool, indices in pins:
        pool.unpin(indices)


def drop_pins(pins: _Pins) -> None:
    """Unpin in several pools, or in none: checked as a whole before the first count changes."""
    for pool, indices in pins:
        pool.check_pinned(indices)
    _unpin(pins)


def release(books: Books, lease: Lease) -> None:
    """Drop every pin of the lease: per pool shared ones first, then the hit's snapshot, then private ones in allocation
    order, which fixes the order of the free list."""
    give_back(books, lease.holds)
    del books.held[lease.id]
    lease.forget()


def give_back(books: Books, holds: Holdings) -> None:
    """Unpin everything that was bound and drawn: in all pools or in none."""
    base = holds.pins(ResourceType.BASE_KV_PAGE)
    if holds.draft.count or holds.has_snapshots:
        books.base.check_pinned(base)
        drop_pins([(books.pools.pool(type), holds.pins(type)) for type in _NOT_BASE])
    books.base.unpin(base, holds.distinct)
