"""Reuse from checkpoints: recurrent state exists only where it was saved, so a sequence starts at a stored length.

The candidates come from the sequence's own block chain, walked downwards: behind each block the few lengths that the
checkpoint index has there, longest first. No other length is tried or hashed, and nothing scans records. A candidate
that does not fit is a miss of that candidate, never an error.

An MTP checkpoint keeps the block of its boundary token private, so it has one block less than a plain one where the
length is a whole number of pages. Where it is not, both have the same shape, and a plain sequence may use either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .planning import LookupPolicy, PlanKind, ReuseMode, ReusePlan, cold_plan, refuse_impossible
from .records import CacheRecord, CacheRecordStore, RecordFlavour
from .resources import ResourceDemand

__all__ = ["kept_blocks", "plan_checkpoint", "plan_mtp"]

ExactDigest = Callable[[int], bytes]


def kept_blocks(flavour: RecordFlavour, length: int, page_size: int) -> int:
    """How many full blocks a checkpoint of ``length`` tokens shares: up to its end, or up to its boundary token."""
    return (length - 1 if flavour is RecordFlavour.MTP else length) // page_size


def plan_checkpoint(
    records: CacheRecordStore,
    hashes: Sequence[bytes],
    token_count: int,
    page_size: int,
    lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
    *,
    exact_digest: ExactDigest,
    has_attention: bool = True,
) -> ReusePlan:
    """Plan a sequence with recurrent layers; inputs and refusals as in ``plan_vanilla``.

    ``exact_digest`` gives the digest of the sequence's first n tokens and is asked only for lengths that the checkpoint
    index names. ``has_attention`` False: there are no pages. The checkpoint used is strictly shorter than the input.
    """
    refuse_impossible(hashes, token_count, page_size, lookup_policy)

    def fits(record: CacheRecord, length: int) -> bool:
        blocks = length // page_size
        return (
            _continues(record, hashes, blocks)
            and (record.partial_slot is not None) == (has_attention and length % page_size != 0)
            and record.base_page_path.size == (blocks if has_attention else 0)
        )

    found = None
    if lookup_policy is LookupPolicy.USE_CACHE:
        flavours = (RecordFlavour.PLAIN, RecordFlavour.MTP)
        found = _longest(records, hashes, token_count, page_size, flavours, exact_digest, fits)
    if found is None:
        return cold_plan(ReuseMode.HYBRID, token_count, page_size, has_attention=has_attention)
    return _hit(ReuseMode.HYBRID, found, token_count, page_size, has_attention)


def plan_mtp(
    records: CacheRecordStore,
    hashes: Sequence[bytes],
    token_count: int,
    page_size: int,
    lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
    *,
    exact_digest: ExactDigest,
) -> ReusePlan:
    """As ``plan_checkpoint``, for a hybrid model with a paged draft: only MTP checkpoints with both snapshots and both
    paths are used."""
    refuse_impossible(hashes, token_count, page_size, lookup_policy)

    def fits(record: CacheRecord, length: int) -> bool:
        blocks = kept_blocks(RecordFlavour.MTP, length, page_size)
        draft = record.spec_page_path
        return (
            _continues(record, hashes, blocks)
            and record.partial_slot is not None
            and record.base_page_path.size == blocks
            and draft is not None
            and draft.size == blocks
        )

    found = None
    if lookup_policy is LookupPolicy.USE_CACHE:
        found = _longest(records, hashes, token_count, page_size, (RecordFlavour.MTP,), exact_digest, fits)
    if found is None:
        return cold_plan(ReuseMode.HYBRID_MTP, token_count, page_size, paged=True)
    return _hit(ReuseMode.HYBRID_MTP, found, token_count, page_size, True)


def _continues(record: CacheRecord, hashes: Sequence[bytes], blocks: int) -> bool:
    """Whether the record is a checkpoint over exactly the sequence's first ``blocks`` blocks."""
    own = record.logical_block_hashes
    return record.recurrent_slot is not None and len(own) == blocks and own == tuple(hashes[:blocks])


def _longest(
    records: CacheRecordStore,
    hashes: Sequence[bytes],
    token_count: int,
    page_size: int,
    flavours: Sequence[RecordFlavour],
    exact_digest: ExactDigest,
    fits: Callable[[CacheRecord, int], bool],
) -> CacheRecord | None:
    behind, root = records.checkpoints.behind, records.checkpoints.chain_root
    for blocks in range(len(hashes), -1, -1):
        block = hashes[blocks - 1] if blocks else root
        if behind(block) is None:
            continue
        named = {length for flavour in flavours for length in records.checkpoint_lengths(block, flavour)}
        for length in sorted(named, reverse=True):
            if not 0 < length < token_count or length // page_size != blocks:
                continue
            digest = exact_digest(length)
            for flavour in flavours:
                record = records.find_hybrid(digest, length, flavour)
                if record is not None and fits(record, length):
                    return record
    return None


def _hit(mode: ReuseMode, record: CacheRecord, token_count: int, page_size: int, has_attention: bool) -> ReusePlan:
    paged = mode is ReuseMode.HYBRID_MTP
    length = record.exact_checkpoint_length or 0
    hashes = record.logical_block_hashes
    private = -(-token_count // page_size) - len(hashes) if has_attention else 0
    draft = record.spec_page_path if paged else None
    return ReusePlan(
        mode, PlanKind.STANDARD, length, length, hashes, tuple(record.base_page_path.tolist()),
        ResourceDemand(private, private if paged else 0),
        bound=record.base_page_path.astype(np.intp),
        draft_pages=() if draft is None else tuple(draft.tolist()),
        protected_record=record.id,
        recurrent_slot=record.recurrent_slot,
        partial_slot=record.partial_slot,
        owns_paged_spec_state=paged,
        has_attention=has_attention,
    )  # fmt: skip
