"""The facts that hold between any two calls, recounted from scratch.

Each is checked from the owning side (records, leases) against the counted side (pools, index), so that neither can be
wrong alone. Linear in everything that exists: for tests and post-mortems.
"""

from __future__ import annotations

import numpy as np

from ..errors import InvariantViolation
from .books import Books
from .index import BaseBlockIndex
from .pools import ResourcePools
from .records import CacheRecordStore, unpack_indices
from .resources import ResourceType

__all__ = ["check_books"]


def check_books(books: Books) -> None:
    """InvariantViolation that names the first fact that does not hold."""
    books.pools.check()
    books.index.check()
    books.records.check()
    books.drafts.check(books.records.iterate_lru())
    if len(books.records) > books.max_records:
        raise InvariantViolation(
            f"{len(books.records)} records are kept under a limit of {books.max_records}; the metadata is corrupt, "
            f"stop using this manager",
            records=len(books.records), max_records=books.max_records,
        )  # fmt: skip
    _check_counts(books)
    _check_index(books.pools, books.index, books.records)


def _check_counts(books: Books) -> None:
    for type in ResourceType:
        pool = books.pools.pool(type)
        pinned = [index for holds in books.held.values() for index in holds.pins(type).tolist()]
        listed = [int(index) for record in books.records.iterate_lru() for index in unpack_indices(record.packed(type))]
        for kind, counts, owners in (("cache", pool.cache, listed), ("active", pool.active, pinned)):
            recount = np.bincount(np.asarray(owners, dtype=np.intp), minlength=pool.capacity)
            if recount.tolist() != counts.tolist():
                wrong = np.flatnonzero(recount != counts).tolist()
                raise InvariantViolation(
                    f"{type.name}: the {kind} counts of {wrong} are not what their owners hold; the metadata is "
                    f"corrupt, stop using this manager",
                    type=type.name, kind=kind, indices=wrong,
                )  # fmt: skip


def _check_index(pools: ResourcePools, index: BaseBlockIndex, records: CacheRecordStore) -> None:
    cache = pools.pool(ResourceType.BASE_KV_PAGE).cache
    vouched = {
        pair
        for record in records.iterate_lru()
        for pair in zip(record.logical_block_hashes, record.base_page_path.tolist(), strict=False)
    }
    for hash, page in index.dump().items():
        if cache[page] < 1 or (hash, page) not in vouched:
            raise InvariantViolation(
                f"page {page} is in the block index and no record holds it there; the metadata is corrupt, stop using "
                f"this manager",
                page=page, hash=hash,
            )  # fmt: skip
