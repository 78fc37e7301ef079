"""More pages for leases that decode: all that were asked for, or none and the positions that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from ..errors import ContractViolation, InvariantViolation
from .acquisition import refuse_dead
from .books import Books
from .lease import Lease

__all__ = ["Counts", "grow"]

Counts = Sequence[int] | NDArray[np.integer]


def grow(books: Books, leases: Sequence[Lease], counts: Counts, draft_counts: Counts | None) -> tuple[int, ...]:
    """Append ``counts[i]`` base and ``draft_counts[i]`` draft pages to ``leases[i]``. See ``grow_all``."""
    wanted: Sequence[int] = counts.tolist() if isinstance(counts, np.ndarray) else counts
    drafts: Sequence[int] | None = draft_counts.tolist() if isinstance(draft_counts, np.ndarray) else draft_counts
    if len(leases) != len(wanted) or (drafts is not None and len(leases) != len(drafts)):
        raise ContractViolation(
            f"grow: {len(leases)} leases, {len(wanted)} counts and {len(wanted) if drafts is None else len(drafts)} "
            f"draft counts; give one count per lease",
            leases=len(leases), counts=len(wanted),
        )  # fmt: skip
    base_room = base_available = books.base.free + books.base.reclaimable
    draft_room = draft_available = books.draft.free + books.draft.reclaimable
    refused: list[int] = []
    asked = repeat(0) if drafts is None else drafts
    for position, (lease, count, more) in enumerate(zip(leases, wanted, asked, strict=False)):
        if lease.manager.books is not books or lease.released:
            refuse_dead(books, lease, "grow")
        if count < 0 or more < 0:
            raise ContractViolation(
                f"grow: {min(count, more)} pages asked for at position {position}; a lease only grows, use 0 or more",
                position=position, count=min(count, more),
            )  # fmt: skip
        paged = lease.plan.owns_paged_spec_state
        if (paged and drafts is None) or (more and not paged):
            raise _mismatch(lease, position)
        if count > base_room or more > draft_room:
            refused.append(position)
        else:
            base_room -= count
            draft_room -= more
    base_total, draft_total = base_available - base_room, draft_available - draft_room
    if refused or not (base_total or draft_total):
        return tuple(refused)
    started = perf_counter_ns()
    room = books.room(base_total, draft_total)
    if not room.feasible:
        raise InvariantViolation(
            f"grow: {base_total} base and {draft_total} draft pages were counted as available and are not; the "
            f"metadata is corrupt, stop using this manager",
            base=base_total, draft=draft_total,
        )  # fmt: skip
    # Room in every list before the first page is drawn: nothing can fail after that.
    for lease, count in zip(leases, wanted, strict=True):
        lease.holds.base.reserve(count)
    if drafts is None:
        pages = books.draw_base(room, base_total)
    else:
        for lease, more in zip(leases, drafts, strict=True):
            if more:
                lease.holds.draft.reserve(more)
        pages, draft_pages = books.draw(room, base_total, draft_total)
        start = 0
        for lease, more in zip(leases, drafts, strict=True):
            if more:
                lease.holds.draft.append(draft_pages[start : start + more])
                start += more
    start = 0
    for lease, count in zip(leases, wanted, strict=True):
        if count:
            lease.holds.base.append(pages[start : start + count])
            start += count
    books.eviction_allocation_ns += perf_counter_ns() - started
    return ()


def _mismatch(lease: Lease, position: int) -> ContractViolation:
    if lease.plan.owns_paged_spec_state:
        advice = "has draft pages too, give draft counts (0 is one)"
    else:
        advice = "owns no draft pages, ask for 0 of them"
    return ContractViolation(
        f"grow: the {lease.mode.value} lease at position {position} {advice}", position=position, mode=lease.mode.value
    )
