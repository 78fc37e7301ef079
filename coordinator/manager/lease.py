"""What one active sequence owns: an append-only list of base pages, pinned until an explicit release.

A lease is released by ``release()`` or by leaving its ``with`` block, once; later releases do nothing. A lease
that is garbage collected while it still holds pages is reported in the log and keeps its pages: only its owner knows
whether the device has stopped using them.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .planning import ReuseMode
from .pools import Int32Array
from .publication import Projection

if TYPE_CHECKING:
    from .manager import ContextCacheManager

__all__ = ["Lease", "PageList"]

_log = logging.getLogger(__name__)


class PageList:
    """Page ids in allocation order, int32, append-only."""

    __slots__ = ("_buffer", "count")

    def __init__(self, count: int = 0) -> None:
        # Some room for growth: a decode step then appends without a new buffer.
        self._buffer: Int32Array = np.empty(count + count // 8 + 4, dtype=np.int32)
        self.count = 0

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


_NO_PAGES = PageList()  # of every released lease; nothing appends to it


class Lease:
    """Pins of one sequence. Made by ``ContextCacheManager.acquire``; compared by identity, never copied.

    ``matched_hashes`` are the hashes of the shared leading pages. They and the page list are never rewritten by a
    publication.
    """

    __slots__ = (
        "__weakref__",
        "_released",
        "id",
        "manager",
        "matched_hashes",
        "mode",
        "pages",
        "published",
        "shared_page_count",
    )  # fmt: skip

    def __init__(
        self,
        manager: ContextCacheManager,
        id: int,
        mode: ReuseMode,
        matched_hashes: tuple[bytes, ...],
        shared_page_count: int,
        pages: PageList,
    ) -> None:
        self._released = False
        self.manager = manager
        self.id = id
        self.mode = mode
        self.matched_hashes = matched_hashes
        self.shared_page_count = shared_page_count
        self.pages = pages
        self.published: Projection | None = None  # of the last publication: a longer one starts from it

    @property
    def base_pages(self) -> Int32Array:
        """Shared pages, then private ones in allocation order: read-only int32 [page_count]; empty once released."""
        return self.pages.view()

    @property
    def page_count(self) -> int:
        """Number of base pages held; 0 once released."""
        return self.pages.count

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Give everything back. Does nothing the second time."""
        self.manager.release(self)

    def forget_pages(self) -> None:
        """Mark as released; called by the manager after the pins are gone."""
        self._released = True
        self.pages = _NO_PAGES
        self.published = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.page_count} base pages, {self.shared_page_count} shared"
        return f"<Lease {self.id}: {self.mode.value}, {state}>"

    def __del__(self) -> None:
        # A lease whose construction failed has no mark yet and owns nothing.
        if not getattr(self, "_released", True):
            _log.warning("%r was collected without a release; its pages stay pinned, release leases explicitly", self)
