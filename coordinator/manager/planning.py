"""What a sequence may reuse, worked out without changing anything.

Planning only reads. A plan is a value: it says what would be bound and what would have to be allocated, and it stays
true as long as its record is stored (``protected_record``) or, without one, the index has lost no entry since
(``index_version``); ``acquire`` checks that again. This module has the values, the vanilla rule and the coverage; the
rules of the other flavours are in ``spec_planning`` and ``checkpoint_planning`` and produce the same ``ReusePlan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ..errors import ContractViolation
from .index import BaseBlockIndex
from .resources import ResourceDemand

__all__ = [
    "LookupPolicy",
    "PlanKind",
    "ReplayDependency",
    "ReuseMode",
    "ReusePlan",
    "SpecReplayMode",
    "plan_vanilla",
    "require_coverage",
]


class LookupPolicy(Enum):
    """Whether a sequence may start from cached pages."""

    USE_CACHE = "use_cache"
    BYPASS = "bypass"


class PlanKind(Enum):
    """How a plan came to its start."""

    STANDARD = "standard"
    NO_REUSABLE_PREFIX = "no_reusable_prefix"
    FULL_INPUT_REWIND = "full_input_rewind"


class ReuseMode(Enum):
    """Which rules a plan and its lease follow."""

    VANILLA = "vanilla"
    SPEC = "spec"
    HYBRID = "hybrid"
    HYBRID_MTP = "hybrid_mtp"


class SpecReplayMode(Enum):
    """Whether a speculative sequence computes matched pages again, because their draft state saw what comes next."""

    NONE = "none"
    FULL_PAGE = "full_page"


@frozen
class ReplayDependency:
    """The last kept draft page was computed with the block after it in view: block number ``block_count`` must still
    have ``block_hash`` when the sequence publishes."""

    block_count: int
    block_hash: bytes


# A dictionary class on purpose: attrs fills one faster than so many slots, and every admission makes a plan or two.
@frozen(slots=False)
class ReusePlan:
    """Where a sequence may start and what it needs for that.

    Lengths are tokens: ``matched_token_length`` before a rewind, ``reuse_token_length`` where execution starts.
    ``matched_hashes`` and ``base_pages`` are what would be bound, after the rewind; the hashes are the index's own key
    objects. ``demand`` counts private resources only. ``hit_page`` is the last matched page of a hit in the index
    alone, before the rewind.

    A hit on one record names it as ``protected_record`` and binds what it has: ``draft_pages`` beside the base pages,
    or the ``recurrent_slot`` and ``partial_slot`` of a checkpoint. ``has_attention`` False: no pages at all.
    """

    mode: ReuseMode
    kind: PlanKind
    matched_token_length: int
    reuse_token_length: int
    matched_hashes: tuple[bytes, ...]
    base_pages: tuple[int, ...]
    demand: ResourceDemand
    hit_page: int | None = None
    index_version: object = field(default=None, eq=False, repr=False)
    bound: NDArray[np.intp] | None = field(default=None, eq=False, repr=False)  # base_pages, ready for indexing
    draft_pages: tuple[int, ...] = ()
    protected_record: int | None = None
    spec_replay_mode: SpecReplayMode = SpecReplayMode.NONE
    replay_dependency: ReplayDependency | None = None
    recurrent_slot: int | None = None
    partial_slot: int | None = None
    owns_paged_spec_state: bool = False
    has_attention: bool = True


def refuse_impossible(hashes: Sequence[bytes], token_count: int, page_size: int, lookup_policy: LookupPolicy) -> None:
    """What every planning function demands of its input; ContractViolation otherwise."""
    if page_size <= 0 or token_count < 0 or len(hashes) * page_size > token_count:
        raise ContractViolation(
            f"plan: {len(hashes)} block hashes do not fit {token_count} tokens in pages of {page_size}; pass at most "
            f"one hash per full block",
            hashes=len(hashes), token_count=token_count, page_size=page_size,
        )  # fmt: skip
    if not isinstance(lookup_policy, LookupPolicy):
        raise ContractViolation(
            f"plan: {lookup_policy!r} is not a lookup policy; use a member of LookupPolicy", policy=repr(lookup_policy)
        )


def cold_plan(
    mode: ReuseMode, token_count: int, page_size: int, *, paged: bool = False, has_attention: bool = True
) -> ReusePlan:
    """Everything is computed: a miss, or a lookup that was not asked for."""
    total = -(-token_count // page_size) if has_attention else 0
    kind = PlanKind.NO_REUSABLE_PREFIX if token_count else PlanKind.STANDARD
    return ReusePlan(
        mode, kind, 0, 0, (), (), ResourceDemand(total, total if paged else 0),
        owns_paged_spec_state=paged, has_attention=has_attention,
    )  # fmt: skip


def plan_vanilla(
    index: BaseBlockIndex,
    hashes: Sequence[bytes],
    token_count: int,
    page_size: int,
    lookup_policy: LookupPolicy = LookupPolicy.USE_CACHE,
) -> ReusePlan:
    """Plan a sequence of ``token_count`` tokens whose leading full blocks have ``hashes`` (fewer are fine).

    At least one token is always recomputed, so a full match gives up its last page. ContractViolation: a negative token
    count, a page size below 1, more hashes than full blocks, or a policy that is none.
    """
    refuse_impossible(hashes, token_count, page_size, lookup_policy)
    pages = index.lookup_prefix(hashes) if lookup_policy is LookupPolicy.USE_CACHE else []
    total = -(-token_count // page_size)
    matched = len(pages)
    hit_page = pages[-1] if pages else None
    kind = PlanKind.STANDARD
    if matched and matched * page_size == token_count:
        pages.pop()
        kind = PlanKind.FULL_INPUT_REWIND
    elif not matched and total:
        kind = PlanKind.NO_REUSABLE_PREFIX
    bound = np.array(pages, dtype=np.intp)
    return ReusePlan(
        ReuseMode.VANILLA, kind, matched * page_size, len(pages) * page_size, tuple(index.hashes_of(bound)),
        tuple(pages), ResourceDemand(total - len(pages)), hit_page, index.version, bound,
    )  # fmt: skip


def require_coverage(plan: ReusePlan, base_pages: int, draft_pages: int = 0) -> ReusePlan:
    """The plan with its demand raised so that bound and private pages cover ``base_pages`` and ``draft_pages``.

    The same plan when they do already. ContractViolation: a negative count, or pages of a kind that the plan's sequence
    does not own.
    """
    if base_pages < 0 or draft_pages < 0:
        raise ContractViolation(
            f"coverage of {base_pages} base and {draft_pages} draft pages is negative; counts are 0 or more",
            base_pages=base_pages, draft_pages=draft_pages,
        )  # fmt: skip
    if draft_pages > 0 and not plan.owns_paged_spec_state:
        raise ContractViolation(
            f"a {plan.mode.value} plan owns no draft pages; ask for base pages only",
            mode=plan.mode.value, draft_pages=draft_pages,
        )  # fmt: skip
    if base_pages > 0 and not plan.has_attention:
        raise ContractViolation(
            f"a {plan.mode.value} plan without attention owns no base pages; ask for none",
            mode=plan.mode.value, base_pages=base_pages,
        )  # fmt: skip
    base, draft, recurrent, partial = plan.demand.counts
    missing, missing_drafts = base_pages - len(plan.base_pages), draft_pages - len(plan.draft_pages)
    if missing <= base and missing_drafts <= draft:
        return plan
    demand = ResourceDemand(max(base, missing), max(draft, missing_drafts), recurrent, partial)
    return ReusePlan(
        plan.mode, plan.kind, plan.matched_token_length, plan.reuse_token_length, plan.matched_hashes, plan.base_pages,
        demand, plan.hit_page, plan.index_version, plan.bound, plan.draft_pages, plan.protected_record,
        plan.spec_replay_mode, plan.replay_dependency, plan.recurrent_slot, plan.partial_slot,
        plan.owns_paged_spec_state, plan.has_attention,
    )  # fmt: skip
