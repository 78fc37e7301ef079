"""Block hash -> canonical base page, one-to-one. The index owns no page and no reference.

The key object that the first committer brought is the one that everybody shares: ``hash_of`` hands it out, and plans,
leases and records keep that object instead of their own equal copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContractViolation, InvariantViolation

__all__ = ["BaseBlockIndex"]


class BaseBlockIndex:
    """``capacity`` is the number of base pages; page ids lie in 0..capacity-1.

    ``version`` is another object whenever an entry has disappeared. While it is the same, whatever was found in this
    index is still true. (An object and not a number, so that no other index has it by chance.)
    """

    __slots__ = ("_hash_of", "_page_of", "get", "version")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ContractViolation(
                f"an index cannot have {capacity} pages; give the number of base pages, 0 or more", capacity=capacity
            )
        self.version = object()
        self._page_of: dict[bytes, int] = {}
        # An object array, not a list: many entries are read, set or cleared by one indexing operation.
        self._hash_of: NDArray[np.object_] = np.full(capacity, None, dtype=np.object_)
        # The bound method of the dict itself: a prefix lookup calls it once per block.
        self.get: Callable[[bytes], int | None] = self._page_of.get

    def __len__(self) -> int:
        return len(self._page_of)

    def hash_of(self, page: int) -> bytes | None:
        """The hash that the page is canonical for, or None. The shared key object, not a copy."""
        hash: bytes | None = self._hash_of[page] if 0 <= page < self._hash_of.size else None
        return hash

    def hashes_of(self, pages: Sequence[int] | NDArray[np.integer]) -> list[Any]:
        """``hash_of`` for many existing pages."""
        return self._hash_of[pages].tolist() if len(pages) else []

    def lookup_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest leading run of known hashes; stops at the first hole. No side effects."""
        # A cold prompt is decided by its first block; a warm one by a single pass in C.
        if not hashes or hashes[0] not in self._page_of:
            return []
        found: list[Any] = list(map(self.get, hashes))
        return found[: found.index(None)] if None in found else found

    def insert(self, hash: bytes, page: int) -> tuple[int, bool]:
        """(canonical page, inserted). A known hash answers before the proposed page is looked at. ContractViolation
        when the page of a new hash does not exist or is canonical for another hash."""
        known = self._page_of.get(hash)
        if known is not None:
            return known, False
        self.refuse_claimed(page)
        self._page_of[hash] = page
        self._hash_of[page] = hash
        return page, True

    def refuse_claimed(self, page: int) -> None:
        """ContractViolation unless the page exists and is canonical for nothing."""
        if not 0 <= page < self._hash_of.size:
            raise ContractViolation(
                f"the index cannot map a block to page {page} of {self._hash_of.size}; propose a page of the pool",
                page=page, capacity=self._hash_of.size,
            )  # fmt: skip
        if self._hash_of[page] is not None:
            raise ContractViolation(
                f"page {page} is already canonical for another block; publish the hashes that it was computed for",
                page=page,
            )

    def insert_new(self, fresh: Mapping[bytes, int], pages: NDArray[np.integer]) -> None:
        """Insert many pairs that the caller has checked: hashes unknown, pages unclaimed and distinct.

        ``pages`` are the values of ``fresh`` once more, as an array in the same order.
        """
        self._page_of.update(fresh)
        self._hash_of[pages] = list(fresh)

    def withdraw(self, fresh: Mapping[bytes, int]) -> None:
        """Undo ``insert_new``, also one that stopped half way. Cannot fail."""
        for hash, page in fresh.items():
            if self._page_of.get(hash) == page:
                del self._page_of[hash]
                self._hash_of[page] = None
        self.version = object()

    def erase_page(self, page: int) -> None:
        """Remove both directions. An unknown page is no error."""
        if self.hash_of(page) is not None:
            self.erase_pages(np.array((page,)))

    def erase_pages(self, pages: NDArray[np.integer]) -> None:
        """``erase_page`` for many existing, distinct pages. Cannot fail."""
        forget = self._page_of.pop
        for hash in self._hash_of[pages].tolist():
            forget(hash, None)  # None is no key: a page that is not indexed
        self._hash_of[pages] = None
        self.version = object()

    def check(self) -> None:
        """InvariantViolation when the two directions disagree."""
        reverse = {hash: page for page, hash in enumerate(self._hash_of.tolist()) if hash is not None}
        if reverse != self._page_of:
            raise InvariantViolation(
                "the block index is not one-to-one; the metadata is corrupt, stop using this manager",
                forward=dict(self._page_of), reverse=reverse,
            )  # fmt: skip

    def dump(self) -> dict[bytes, int]:
        return dict(self._page_of)
