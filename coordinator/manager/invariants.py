"""The facts that hold between any two calls, recounted from scratch.

Each is checked from the owning side (records, leases) against the counted side (pools, index), so that neither can be
wrong alone. Linear in everything that exists: for tests and post-mortems.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import InvariantViolation
from .index import BaseBlockIndex
from .lease import PageList
from .pools import ResourcePools
from .records import CacheRecordStore, unpack_indices
from .resources import ResourceType

__all__ = ["check_manager"]


def check_manager(
    pools: ResourcePools,
    index: BaseBlockIndex,
    records: CacheRecordStore,
    page_lists: Iterable[PageList],
    max_records: int,
) -> None:
    """InvariantViolation that names the first fact that does not hold.

    ``page_lists`` are those of all leases that were never released.
    """
    pools.check()
    index.check()
    records.check()
    if len(records) > max_records:
        raise InvariantViolation(
            f"{len(records)} records are kept under a limit of {max_records}; the metadata is corrupt, stop using this "
            f"manager",
            records=len(records), max_records=max_records,
        )  # fmt: skip
    _check_counts(pools, records, page_lists)
    _check_index(pools, index, records)


def _check_counts(pools: ResourcePools, records: CacheRecordStore, page_lists: Iterable[PageList]) -> None:
    pinned = [page for pages in page_lists for page in pages.view().tolist()]
    for type in ResourceType:
        pool = pools.pool(type)
        listed = [int(index) for record in records.iterate_lru() for index in unpack_indices(record.packed(type))]
        for kind, counts, owners in (
            ("cache", pool.cache, listed),
            ("active", pool.active, pinned if type == ResourceType.BASE_KV_PAGE else []),
        ):
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
