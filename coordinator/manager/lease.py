"""What one active sequence owns: append-only lists of base and draft pages, the snapshots of its hit and those that it
has reserved for its own checkpoints. All of it is pinned until an explicit release.

A lease is released by ``release()`` or by leaving its ``with`` block, once; later releases do nothing. A lease
that is garbage collected while it still holds pages is reported in the log and keeps its pages: only its owner knows
whether the device has stopped using them.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .planning import ReuseMode, ReusePlan
from .pool import Indices, Int32Array
from .publication import Projection
from .resources import ResourceType

if TYPE_CHECKING:
    from .manager import ContextCacheManager

__all__ = ["Holdings", "Lease", "PageList", "SnapshotReservation"]

_log = logging.getLogger(__name__)


class PageList:
    """Page ids in allocation order, int32, append-only."""

    __slots__ = ("_buffer", "count")

    def __init__(self, pages: NDArray[np.integer] | None = None, more: int = 0) -> None:
        """``pages`` to begin with; the next ``more`` are appended without new memory."""
        self.count = 0 if pages is None else len(pages)
        expected = self.count + more
        # Some room for growth: a decode step then appends without a new buffer.
        self._buffer: Int32Array = np.empty(expected + expected // 8 + 4, dtype=np.int32)
        if pages is not None:
            self._buffer[: self.count] = pages

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more: the next append of so many pages needs no memory."""
        end = self.count + count
        if end > self._buffer.size:
            grown = np.empty(end + end // 2, dtype=np.int32)
            grown[: self.count] = self._buffer[: self.count]
            self._buffer = grown

    def append(self, pages: NDArray[np.integer]) -> None:
        self.reserve(len(pages))
        end = self.count + len(pages)
        self._buffer[self.count : end] = pages
        self.count = end

    def head(self, count: int) -> Int32Array:
        """The first ``count`` pages, not protected against writing: for callers who only read at once."""
        return self._buffer[:count]

    def view(self) -> Int32Array:
        """The pages so far as a read-only int32 array of shape [count]; later appends do not show in it."""
        view = self._buffer[: self.count]
        view.setflags(write=False)
        return view


NO_PAGES = PageList()  # of every lease without pages of a kind; nothing appends to it
_NOTHING = np.empty(0, dtype=np.intp)


@frozen
class SnapshotReservation:
    """Slots that a lease has reserved to save a checkpoint in; the partial one only where a page is partly filled."""

    recurrent_slot: int
    partial_slot: int | None = None


class Holdings:
    """All pins of one lease. The manager keeps these also of leases that were lost."""

    __slots__ = ("base", "distinct", "draft", "partial_slot", "recurrent_slot", "reservations")

    def __init__(
        self,
        base: PageList,
        distinct: bool = False,
        draft: PageList = NO_PAGES,
        recurrent_slot: int | None = None,
        partial_slot: int | None = None,
    ) -> None:
        self.base = base
        # Whether no base page is listed twice. A bound path with a repeated block may; what is drawn later never does.
        self.distinct = distinct
        self.draft = draft
        self.recurrent_slot = recurrent_slot  # these two: of the hit
        self.partial_slot = partial_slot
        self.reservations: tuple[SnapshotReservation, ...] = ()

    def pins(self, type: ResourceType) -> Indices:
        """What is pinned of one type, in the order of release: shared, then the hit's snapshot, then private ones in
        allocation order."""
        if type == ResourceType.BASE_KV_PAGE:
            return self.base.head(self.base.count).astype(np.intp)
        if type == ResourceType.DRAFT_KV_PAGE:
            return self.draft.head(self.draft.count).astype(np.intp) if self.draft.count else _NOTHING
        if type == ResourceType.RECURRENT_SNAPSHOT:
            slots = [self.recurrent_slot, *[reservation.recurrent_slot for reservation in self.reservations]]
        else:
            slots = [self.partial_slot, *[reservation.partial_slot for reservation in self.reservations]]
        return np.array([slot for slot in slots if slot is not None], dtype=np.intp)

    @property
    def has_snapshots(self) -> bool:
        return self.recurrent_slot is not None or self.partial_slot is not None or bool(self.reservations)

    def dump(self) -> dict[str, object]:
        return {
            "base": self.base.view().tolist(),
            "draft": self.draft.view().tolist(),
            "hit": (self.recurrent_slot, self.partial_slot),
            "reserved": [(each.recurrent_slot, each.partial_slot) for each in self.reservations],
        }


_NO_HOLDINGS = Holdings(NO_PAGES)  # of every released lease; nothing changes it


class Lease:
    """Pins of one sequence. Made by ``ContextCacheManager.acquire``; compared by identity, never copied.

    ``plan`` is the one that it was acquired for. Its hashes and the page lists are never rewritten by a publication.
    """

    __slots__ = ("__weakref__", "_released", "holds", "id", "manager", "plan", "published")

    def __init__(self, manager: ContextCacheManager, id: int, plan: ReusePlan, holds: Holdings) -> None:
        self._released = False
        self.manager = manager
        self.id = id
        self.plan = plan
        self.holds = holds
        self.published: Projection | None = None  # of the last publication: a longer one starts from it

    @property
    def mode(self) -> ReuseMode:
        return self.plan.mode

    @property
    def has_attention(self) -> bool:
        """False for a model of recurrent layers alone: such a lease has no pages."""
        return self.plan.has_attention

    @property
    def matched_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the shared leading blocks."""
        return self.plan.matched_hashes

    @property
    def shared_page_count(self) -> int:
        return len(self.plan.base_pages)

    @property
    def base_pages(self) -> Int32Array:
        """Shared pages, then private ones in allocation order: read-only int32 [page_count]; empty once released."""
        return self.holds.base.view()

    @property
    def page_count(self) -> int:
        """Number of base pages held; 0 once released."""
        return self.holds.base.count

    @property
    def draft_pages(self) -> Int32Array:
        """Draft pages in the same order: read-only int32 [draft_page_count]; empty without a paged draft."""
        return self.holds.draft.view()

    @property
    def draft_page_count(self) -> int:
        return self.holds.draft.count

    @property
    def recurrent_slot(self) -> int | None:
        """Slot of the hit's recurrent snapshot; None without one and after ``release_restored_snapshots``."""
        return self.holds.recurrent_slot

    @property
    def partial_slot(self) -> int | None:
        """Slot of the hit's partial-KV snapshot; None without one and after ``release_restored_snapshots``."""
        return self.holds.partial_slot

    @property
    def reservations(self) -> tuple[SnapshotReservation, ...]:
        """Reserved and not retired, oldest first."""
        return self.holds.reservations

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Give everything back. Does nothing the second time."""
        self.manager.release(self)

    def forget(self) -> None:
        """Mark as released; called by the manager after the pins are gone."""
        self._released = True
        self.holds = _NO_HOLDINGS
        self.published = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.page_count} base pages, {self.shared_page_count} shared"
        if self.draft_page_count:
            state += f", {self.draft_page_count} draft pages"
        return f"<Lease {self.id}: {self.mode.value}, {state}>"

    def __del__(self) -> None:
        # A lease whose construction failed has no mark yet and owns nothing.
        if not getattr(self, "_released", True):
            _log.warning("%r was collected without a release; its pages stay pinned, release leases explicitly", self)
