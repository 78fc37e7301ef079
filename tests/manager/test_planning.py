"""Vanilla reuse plans: where a sequence starts and what it needs, without changing anything."""

import attrs
import pytest

from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.manager import (
    BaseBlockIndex,
    LookupPolicy,
    PlanKind,
    ResourceDemand,
    plan_vanilla,
    require_coverage,
)

A, B, C = (letter * 32 for letter in (b"A", b"B", b"C"))


@pytest.fixture
def index():
    index = BaseBlockIndex(8)
    index.insert(A, 0)
    index.insert(B, 1)
    return index


def facts(plan):
    return plan.kind, plan.matched_token_length, plan.reuse_token_length, plan.base_pages, plan.demand.base_kv_pages


def test_a_partial_tail_is_computed_on_a_private_page(index):
    """Scenario 12."""
    plan = plan_vanilla(index, [A, B], 9, 4, LookupPolicy.USE_CACHE)
    assert facts(plan) == (PlanKind.STANDARD, 8, 8, (0, 1), 1)
    assert plan.matched_hashes == (A, B)
    assert plan.demand == ResourceDemand(1)


def test_an_aligned_full_match_gives_up_its_last_page(index):
    """Scenario 13."""
    plan = plan_vanilla(index, [A, B], 8, 4, LookupPolicy.USE_CACHE)
    assert facts(plan) == (PlanKind.FULL_INPUT_REWIND, 8, 4, (0,), 1)
    assert plan.matched_hashes == (A,)
    assert plan.hit_page == 1


def test_a_rewind_to_nothing_is_still_a_hit(index):
    """Scenario 14. The kind must not become NO_REUSABLE_PREFIX although nothing is bound."""
    plan = plan_vanilla(index, [A], 4, 4, LookupPolicy.USE_CACHE)
    assert facts(plan) == (PlanKind.FULL_INPUT_REWIND, 4, 0, (), 1)


def test_a_miss_and_a_bypass_start_cold(index):
    for hashes, policy in (([C, B], LookupPolicy.USE_CACHE), ([A, B], LookupPolicy.BYPASS)):
        plan = plan_vanilla(index, hashes, 9, 4, policy)
        assert facts(plan) == (PlanKind.NO_REUSABLE_PREFIX, 0, 0, (), 3)
        assert plan.hit_page is None


def test_fewer_hashes_than_full_blocks_are_fine(index):
    assert facts(plan_vanilla(index, [A], 11, 4)) == (PlanKind.STANDARD, 4, 4, (0,), 2)


def test_a_match_that_stops_at_the_first_unknown_block(index):
    assert facts(plan_vanilla(index, [A, C, B], 12, 4)) == (PlanKind.STANDARD, 4, 4, (0,), 2)


def test_no_tokens_need_nothing(index):
    for policy in LookupPolicy:
        plan = plan_vanilla(index, [], 0, 4, policy)
        assert facts(plan) == (PlanKind.STANDARD, 0, 0, (), 0)


@pytest.mark.parametrize(
    ("hashes", "tokens", "page_size", "policy"),
    [
        ([A, B], 7, 4, LookupPolicy.USE_CACHE),
        ([], -1, 4, LookupPolicy.USE_CACHE),
        ([], 4, 0, LookupPolicy.USE_CACHE),
        ([], 4, -4, LookupPolicy.USE_CACHE),
        ([A], 4, 4, "bypass"),
        ([A], 4, 4, None),
    ],
)
def test_impossible_inputs_are_refused(index, hashes, tokens, page_size, policy):
    with pytest.raises(ContractViolation):
        plan_vanilla(index, hashes, tokens, page_size, policy)


@pytest.mark.parametrize(("headroom", "pages", "demand"), [(1, 3, 1), (3, 3, 1), (4, 4, 2)])
def test_coverage_adds_the_headroom_of_the_first_step(index, headroom, pages, demand):
    """Scenario 22."""
    plan = plan_vanilla(index, [A, B], 9, 4)
    covered = require_coverage(plan, -(-(9 + headroom) // 4))
    assert len(covered.base_pages) + covered.demand.base_kv_pages == pages
    assert covered == attrs.evolve(plan, demand=ResourceDemand(demand))


def test_coverage_never_lowers_a_demand(index):
    plan = plan_vanilla(index, [A, B], 9, 4)
    assert require_coverage(plan, 0) is plan


@pytest.mark.parametrize("pages", [(-1, 0), (3, -1), (3, 1)])
def test_impossible_coverage_is_refused(index, pages):
    """A vanilla plan owns no draft pages, so it cannot cover any."""
    with pytest.raises(ContractViolation):
        require_coverage(plan_vanilla(index, [A, B], 9, 4), *pages)


def test_planning_changes_nothing(desk):
    """Scenario 23."""
    d = desk(4)
    d.cache("AB")
    before = d.manager.dump()
    for _ in range(3):
        for letters, tokens in (("AB", 8), ("AB", 11), ("AC", 8), ("", 3), ("", 0)):
            plan = d.plan(letters, tokens)
            assert plan == d.plan(letters, tokens)
            d.plan(letters, tokens, bypass=True)
            require_coverage(plan, 9)
    assert d.manager.dump() == before
    assert d.manager.metrics.planning_nanoseconds > 0
