"""Reuse for speculative sequences: base pages and, where the draft model has pages of its own, draft pages beside them.

A paged match needs both: the longest draft boundary within the matched base pages decides, and base pages beyond it are
not used. A draft model that looked at later tokens (EAGLE: one) makes the last matched page depend on a block that this
sequence may not share, so as many pages are given up and computed again as those tokens can reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ContractViolation, InvariantViolation
from .index import BaseBlockIndex
from .planning import (
    LookupPolicy,
    PlanKind,
    ReplayDependency,
    ReuseMode,
    ReusePlan,
    SpecReplayMode,
    cold_plan,
    refuse_impossible,
)
from .records import CacheRecordStore
from .resources import ResourceDemand
from .spec_index import SpecStateIndex

__all__ = ["plan_spec"]


def plan_spec(
    index: BaseBlockIndex,
    drafts: SpecStateIndex,
    records: CacheRecordStore,
    hashes: Sequence[bytes],
    token_count: int,
    page_size: int,
    lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
    *,
    owns_paged: bool,
    future_dependency_tokens: int,
) -> ReusePlan:
    """Plan a speculative sequence; inputs and refusals as in ``plan_vanilla``.

    ``owns_paged``: the draft model has pages (else it reads the base pages). ``future_dependency_tokens``: how many
    later tokens the draft state of a position depends on, 0 or more. InvariantViolation: the matched record does not
    have what the indices say, or is shorter than the replay.
    """
    refuse_impossible(hashes, token_count, page_size, lookup_policy)
    if future_dependency_tokens < 0:
        raise ContractViolation(
            f"plan: a draft cannot depend on {future_dependency_tokens} later tokens; use 0 or more",
            future_dependency_tokens=future_dependency_tokens,
        )
    cold = lookup_policy is LookupPolicy.BYPASS
    pages: list[int] = [] if cold else index.lookup_prefix(hashes)
    draft_path: list[int] = []
    record_id: int | None = None
    if owns_paged:
        match = drafts.lookup_longest(hashes, len(pages)) if pages else None
        if match is None:
            pages = []
        else:
            record_id = match[0]
            pages = pages[: match[1]]
            draft_path = _draft_path(records, record_id, hashes, pages)
    matched = len(pages)
    if not matched:
        return cold_plan(ReuseMode.SPEC, token_count, page_size, paged=owns_paged)
    replay = -(-future_dependency_tokens // page_size)
    full = matched * page_size == token_count
    kept = matched - max(replay, full)
    if kept < 0:
        raise InvariantViolation(
            f"plan: {replay} pages have to be replayed and {matched} are matched; such draft state should not have "
            f"been published",
            replay=replay, matched=matched,
        )  # fmt: skip
    kind = PlanKind.FULL_INPUT_REWIND if full else PlanKind.STANDARD if kept else PlanKind.NO_REUSABLE_PREFIX
    bound = np.array(pages[:kept], dtype=np.intp)
    demand = -(-token_count // page_size) - kept
    return ReusePlan(
        ReuseMode.SPEC, kind, matched * page_size, kept * page_size, tuple(index.hashes_of(bound)),
        tuple(pages[:kept]), ResourceDemand(demand, demand if owns_paged else 0),
        None if owns_paged else pages[-1], index.version, bound,
        draft_pages=tuple(draft_path[:kept]),
        protected_record=record_id if kept else None,
        spec_replay_mode=SpecReplayMode.FULL_PAGE if replay and kept else SpecReplayMode.NONE,
        replay_dependency=ReplayDependency(matched, hashes[matched - 1]) if replay and kept else None,
        owns_paged_spec_state=owns_paged,
    )  # fmt: skip


def _draft_path(
    records: CacheRecordStore, record_id: int, hashes: Sequence[bytes], pages: Sequence[int]
) -> list[int]:
    """The matched record's draft pages, one per base page; InvariantViolation when the record is another one."""
    count = len(pages)
    record = records.get(record_id) if records.contains(record_id) else None
    if record is not None and record.spec_page_path is not None:
        draft: list[int] = record.spec_page_path[:count].tolist()
        if (
            len(draft) == count
            and record.logical_block_hashes[count - 1] == hashes[count - 1]
            and record.base_page_path[:count].tolist() == pages
        ):
            return draft
    raise InvariantViolation(
        f"plan: the draft index names record {record_id} for {count} blocks that it does not hold; the metadata is "
        f"corrupt, stop using this manager",
        record_id=record_id, count=count,
    )  # fmt: skip
