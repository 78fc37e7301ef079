"""From a lease's finished state to a record that others can find. Publication never changes the lease's pages.

Each function first works out the whole record, where it can be refused. Then one commit: cache references, mappings,
draft index, record; whatever of it raises, the steps before it are undone. Evictions that the record limit demands come
after it and were checked before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from ..errors import ContractViolation
from .books import Books
from .checkpoint_planning import kept_blocks
from .lease import Lease, SnapshotReservation
from .planning import ReuseMode
from .pool import Indices, Int32Array, Pool
from .publication import FreshBlocks, Projection, project_blocks
from .records import CacheRecord, CacheRecordKey, RecordFlavour
from .results import PublicationResult, PublicationStatus
from .snapshots import refuse_other_modes, refuse_unowned

__all__ = ["publish", "publish_checkpoint"]

_PUBLISHED, _EXISTING = PublicationStatus.PUBLISHED, PublicationStatus.EXISTING_RECORD
_PAGE_MODES = (ReuseMode.VANILLA, ReuseMode.SPEC)
_MODE_OF = {RecordFlavour.PLAIN: ReuseMode.HYBRID, RecordFlavour.MTP: ReuseMode.HYBRID_MTP}
_NO_BLOCKS = np.empty(0, dtype=np.int32)
_NO_BLOCKS.setflags(write=False)


def publish(books: Books, lease: Lease, hashes: Sequence[bytes], resident_length: int) -> PublicationResult:
    """See ``ContextCacheManager.publish``."""
    refuse_other_modes(books, lease, "publish", _PAGE_MODES)
    count = min(len(hashes), resident_length // books.page_size)
    holds, paged = lease.holds, lease.plan.owns_paged_spec_state
    pages = min(holds.base.count, holds.draft.count) if paged else holds.base.count
    if not 1 <= count <= pages:
        raise ContractViolation(
            f"publish: {count} full blocks from {len(hashes)} hashes and {resident_length} resident tokens, with "
            f"{pages} pages; publish at least one block and at most one per page",
            count=count, pages=pages, resident_length=resident_length,
        )  # fmt: skip
    given = list(hashes[:count])
    _refuse_other_prefix(lease, given)
    dependency = lease.plan.replay_dependency
    if dependency is not None and (
        dependency.block_count > count or given[dependency.block_count - 1] != dependency.block_hash
    ):
        raise ContractViolation(
            f"publish: the reused draft pages were computed before block {dependency.block_count} and these {count} "
            f"blocks do not repeat it; publish the sequence that the lease was acquired for",
            block_count=dependency.block_count, count=count,
        )  # fmt: skip
    key = CacheRecordKey(given[-1], count)
    existing = books.records.find(key)
    if existing is not None:
        if paged and existing.packed_spec is None and len(existing.packed_base) == 4 * count:
            return _upgrade(books, existing, holds.draft.head(count))
        return _touched(books, existing)
    projection, fresh = project_blocks(books.index, given, holds.base.head(count), lease.published)
    record = CacheRecord(books.records.next_id, key, projection.hashes, projection.path.tobytes())
    listed: list[tuple[Pool, Indices]] = [(books.base, projection.path.astype(np.intp))]
    if paged:
        draft = holds.draft.head(count)
        record = attrs.evolve(record, spec_page_path=draft.tobytes())
        listed.append((books.draft, draft.astype(np.intp)))
    return _commit(books, lease, record, projection, fresh, listed)


def publish_checkpoint(
    books: Books,
    lease: Lease,
    flavour: RecordFlavour,
    hashes: Sequence[bytes],
    exact_digest: bytes,
    length: int,
    reservation: SnapshotReservation,
) -> PublicationResult:
    """See ``ContextCacheManager.publish_hybrid`` and ``publish_hybrid_mtp``."""
    verb = "publish_hybrid_mtp" if flavour is RecordFlavour.MTP else "publish_hybrid"
    refuse_other_modes(books, lease, verb, (_MODE_OF[flavour],))
    refuse_unowned(lease, reservation, verb)
    holds, mtp = lease.holds, flavour is RecordFlavour.MTP
    blocks = kept_blocks(flavour, length, books.page_size)
    if length <= 0 or len(hashes) != blocks:
        raise ContractViolation(
            f"{verb}: a checkpoint of {length} tokens keeps {blocks} full blocks and {len(hashes)} hashes were given; "
            f"use a length of 1 or more and one hash per kept block",
            length=length, blocks=blocks, hashes=len(hashes),
        )  # fmt: skip
    needs_partial = mtp or (lease.has_attention and length % books.page_size != 0)
    if needs_partial != (reservation.partial_slot is not None):
        raise ContractViolation(
            f"{verb}: a checkpoint of {length} tokens {'needs a' if needs_partial else 'has no'} partial page; reserve "
            f"{'with' if needs_partial else 'without'} a partial slot",
            length=length, needs_partial=needs_partial,
        )  # fmt: skip
    pages = min(holds.base.count, holds.draft.count) if mtp else holds.base.count
    if lease.has_attention and pages < blocks:
        raise ContractViolation(
            f"{verb}: the lease has {pages} pages for {blocks} blocks; grow it before it publishes",
            pages=pages, blocks=blocks,
        )  # fmt: skip
    given = list(hashes)
    _refuse_other_prefix(lease, given)
    key = CacheRecordKey(exact_digest, blocks, flavour)
    existing = books.records.stored_like(key, length)
    if existing is not None:
        return _touched(books, existing)
    if books.recurrent.cache[reservation.recurrent_slot]:
        raise ContractViolation(
            f"{verb}: the slots of {reservation} already hold another checkpoint; reserve anew for each one",
            reservation=str(reservation),
        )
    if lease.has_attention and blocks:
        projection, fresh = project_blocks(books.index, given, holds.base.head(blocks), lease.published)
    else:
        projection, fresh = Projection(tuple(given), _NO_BLOCKS, books.index.version), FreshBlocks({}, _NO_BLOCKS)
    draft = holds.draft.head(blocks) if mtp else None
    record = CacheRecord(
        books.records.next_id, key, projection.hashes, projection.path.tobytes(),
        None if draft is None else draft.tobytes(), reservation.recurrent_slot, reservation.partial_slot, length,
    )  # fmt: skip
    record.refuse_invalid()
    listed = [(books.base, projection.path.astype(np.intp))]
    if draft is not None:
        listed.append((books.draft, draft.astype(np.intp)))
    listed.append((books.recurrent, books.recurrent.indices((reservation.recurrent_slot,))))
    if reservation.partial_slot is not None:
        listed.append((books.partial, books.partial.indices((reservation.partial_slot,))))
    return _commit(books, lease, record, projection, fresh, listed)


def _refuse_other_prefix(lease: Lease, given: list[bytes]) -> None:
    matched = lease.matched_hashes
    known = min(len(given), len(matched))
    if known and given[:known] != list(matched[:known]):
        raise ContractViolation(
            f"publish: the first {known} hashes are not those that the lease was matched with; publish the "
            f"sequence that the lease was acquired for",
            known=known,
        )


def _touched(books: Books, existing: CacheRecord) -> PublicationResult:
    books.touch(existing)
    return PublicationResult(_EXISTING, existing.id, existing.base_page_path, existing.key.full_block_count)


def _upgrade(books: Books, existing: CacheRecord, draft: Int32Array) -> PublicationResult:
    """Give a base-only record the producer's draft pages, as one transaction."""
    packed = draft.tobytes()
    paired = attrs.evolve(existing, spec_page_path=packed)
    paired.refuse_invalid()
    indices = draft.astype(np.intp)
    books.draft.add_cache(indices)
    try:
        books.drafts.insert(paired)
        books.records.set_spec_state(existing.id, packed)
    except BaseException:
        # The producer pins its draft pages, so this frees nothing.
        books.drafts.withdraw(paired)
        books.draft.release_cache(indices)
        raise
    books.note_latest(paired)
    return PublicationResult(_PUBLISHED, existing.id, existing.base_page_path, existing.key.full_block_count)


def _commit(
    books: Books,
    lease: Lease,
    record: CacheRecord,
    projection: Projection,
    fresh: FreshBlocks,
    listed: Sequence[tuple[Pool, Indices]],
) -> PublicationResult:
    """Store a new record: all of its references, mappings and entries, or none. Then the limit is applied."""
    victim = books.limit_victim()
    referenced = 0
    try:
        for pool, indices in listed:
            pool.add_cache(indices)
            referenced += 1
        if fresh.page_of:
            books.index.insert_new(fresh.page_of, fresh.pages)
        if record.packed_spec is not None:
            books.drafts.insert(record)
        books.records.add(record)
    except BaseException:
        # The producer pins its pages and slots and the canonical pages are cached, so this frees nothing.
        books.drafts.withdraw(record)
        books.index.withdraw(fresh.page_of)
        for pool, indices in listed[:referenced]:
            pool.release_cache(indices)
        raise
    lease.published = projection
    books.note_latest(record)
    if books.max_records == 0:
        victim = record
    if victim is not None:
        books.evict((victim,))
    kept = None if victim is record else record.id
    return PublicationResult(_PUBLISHED, kept, projection.path, len(projection.hashes))
