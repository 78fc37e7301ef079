"""What a sequence may reuse, worked out without changing anything.

Planning only reads the index. A plan is a value: it says what would be bound and what would have to be allocated, and
it stays true as long as the index has lost no entry since (``index_version``); ``acquire`` checks that again.
Each deployment flavour is one more function beside ``plan_vanilla``; what they produce is the same ``ReusePlan``.
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

__all__ = ["LookupPolicy", "PlanKind", "ReuseMode", "ReusePlan", "plan_vanilla", "require_coverage"]


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


@frozen
class ReusePlan:
    """Where a sequence may start and what it needs for that.

    Lengths are tokens: ``matched_token_length`` before a rewind, ``reuse_token_length`` where execution starts.
    ``matched_hashes`` and ``base_pages`` are what would be bound, after the rewind; the hashes are the index's own key
    objects. ``demand`` counts private resources only. ``hit_page`` is the last matched page, before the rewind.
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
    if page_size <= 0 or token_count < 0 or len(hashes) * page_size > token_count:
        raise ContractViolation(
            f"plan: {len(hashes)} block hashes do not fit {token_count} tokens in pages of {page_size}; pass at most "
            f"one hash per full block",
            hashes=len(hashes), token_count=token_count, page_size=page_size,
        )  # fmt: skip
    if lookup_policy is LookupPolicy.USE_CACHE:
        pages = index.lookup_prefix(hashes)
    elif lookup_policy is LookupPolicy.BYPASS:
        pages = []
    else:
        raise ContractViolation(
            f"plan: {lookup_policy!r} is not a lookup policy; use a member of LookupPolicy", policy=repr(lookup_policy)
        )
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
    """The plan with its demand raised so that bound and private pages together cover ``base_pages``.

    The same plan when they do already. ContractViolation: a negative count, or draft pages for a plan of a mode that
    owns none.
    """
    if base_pages < 0 or draft_pages < 0:
        raise ContractViolation(
            f"coverage of {base_pages} base and {draft_pages} draft pages is negative; counts are 0 or more",
            base_pages=base_pages, draft_pages=draft_pages,
        )  # fmt: skip
    if draft_pages > 0:
        raise ContractViolation(
            f"a {plan.mode.value} plan owns no draft pages; ask for base pages only",
            mode=plan.mode.value, draft_pages=draft_pages,
        )  # fmt: skip
    missing = base_pages - len(plan.base_pages)
    if missing <= plan.demand.base_kv_pages:
        return plan
    return ReusePlan(
        plan.mode, plan.kind, plan.matched_token_length, plan.reuse_token_length, plan.matched_hashes, plan.base_pages,
        ResourceDemand(missing), plan.hit_page, plan.index_version, plan.bound,
    )  # fmt: skip
