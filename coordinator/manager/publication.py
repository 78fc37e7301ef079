"""Which pages a published endpoint consists of, worked out without changing anything.

Each block goes to its canonical page if the index has one, else to the producer's own page, which becomes canonical
(the first committer wins). Nothing here changes the index; the manager commits a finished projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ..errors import ContractViolation
from .index import BaseBlockIndex
from .pool import Int32Array

__all__ = ["FreshBlocks", "Projection", "project_blocks"]


@frozen(eq=False)
class Projection:
    """The blocks of one endpoint, true as long as the index has lost nothing since ``index_version``.

    ``hashes`` are the index's own key objects, ``path`` has one page per block (read-only int32). A lease keeps the
    projection of its last publication, so it holds nothing but what the record shares anyway.
    """

    hashes: tuple[bytes, ...]
    path: Int32Array
    index_version: object


class FreshBlocks(NamedTuple):
    """Blocks that the index does not know yet: hash -> page, and the same pages as an array in the same order."""

    page_of: dict[bytes, int]
    pages: NDArray[np.integer]


def project_blocks(
    index: BaseBlockIndex, hashes: list[bytes], pages: Int32Array, earlier: Projection | None = None
) -> tuple[Projection, FreshBlocks]:
    """Project ``hashes`` onto pages; ``pages`` are the producer's own, one per block.

    ``earlier`` is a committed projection of the same producer. When it is a prefix of ``hashes`` and the index has lost
    nothing since, only the blocks after it are looked up. ContractViolation when a fresh block would need a page that
    is canonical for another block.
    """
    start = 0
    known_hashes: tuple[bytes, ...] = ()
    path = np.empty(len(hashes), dtype=np.int32)
    if earlier is not None and earlier.index_version is index.version:
        known = len(earlier.hashes)
        if tuple(hashes[:known]) == earlier.hashes:
            start, known_hashes = known, earlier.hashes
            path[:start] = earlier.path
    wanted = hashes[start:] if start else hashes
    found: list[Any] = list(map(index.get, wanted))
    # A chain of hashes is known up to some block and unknown after it.
    split = found.index(None) if None in found else len(found)
    tail, proposed = wanted[split:], pages[start + split :]
    listed: list[int] = proposed.tolist()
    page_of = dict(zip(tail, listed, strict=True))
    if (
        len(page_of) == len(tail)
        and found[split:].count(None) == len(tail)
        and index.hashes_of(proposed).count(None) == len(tail)
        and len(set(listed)) == len(tail)
    ):
        path[start : start + split] = found[:split]
        path[start + split :] = proposed
        shared = (*known_hashes, *index.hashes_of(path[start : start + split]), *tail)
        fresh = FreshBlocks(page_of, path[start + split :])
    else:
        chosen, names, page_of = _project_one_by_one(index, wanted, pages[start:].tolist())
        path[start:] = chosen
        shared = (*known_hashes, *names)
        fresh = FreshBlocks(page_of, np.array(list(page_of.values()), dtype=np.int32))
    path.setflags(write=False)
    return Projection(shared, path, index.version), fresh


def _project_one_by_one(
    index: BaseBlockIndex, hashes: Sequence[bytes], own: Sequence[int]
) -> tuple[list[int], list[bytes], dict[bytes, int]]:
    """The general case: holes, repeated hashes, and the refusals."""
    fresh: dict[bytes, int] = {}
    claimed: set[int] = set()
    path: list[int] = []
    shared: list[bytes] = []
    for hash, page in zip(hashes, own, strict=True):
        canonical = index.get(hash)
        if canonical is None:
            canonical = fresh.get(hash)
        if canonical is None:
            index.refuse_claimed(page)
            if page in claimed:
                raise ContractViolation(
                    f"page {page} is proposed for two blocks; publish each block on its own page", page=page
                )
            claimed.add(page)
            fresh[hash] = canonical = page
        path.append(canonical)
        shared.append(index.hash_of(canonical) or hash)
    return path, shared, fresh
