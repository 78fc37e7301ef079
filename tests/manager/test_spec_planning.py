"""Speculative plans: which pages both models can start from, and what has to be replayed."""

import attrs
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import (
    CacheRecord,
    CacheRecordKey,
    PlanKind,
    ReplayDependency,
    ResourceDemand,
    ReuseMode,
    SpecReplayMode,
    require_coverage,
)


@pytest.fixture
def d(desk):
    d = desk(8, 8)
    d.cache_paired("AB")
    return d


def facts(plan):
    return (
        plan.kind, plan.matched_token_length, plan.reuse_token_length, plan.base_pages, plan.draft_pages,
        plan.demand.counts[:2], plan.spec_replay_mode, plan.replay_dependency,
    )  # fmt: skip


def test_eagle_with_a_tail_replays_one_page(d):
    """Scenario 15."""
    plan = d.plan_spec("AB", 9)
    dependency = ReplayDependency(2, d.hashes("B")[0])
    assert facts(plan) == (
        PlanKind.STANDARD, 8, 4, (0,), (0,), (2, 2), SpecReplayMode.FULL_PAGE, dependency
    )  # fmt: skip
    assert (plan.mode, plan.protected_record, plan.owns_paged_spec_state) == (ReuseMode.SPEC, 1, True)
    assert plan.matched_hashes == tuple(d.hashes("A"))


def test_eagle_aligned_drops_one_page_and_not_two(d):
    """Scenario 16."""
    dependency = ReplayDependency(2, d.hashes("B")[0])
    assert facts(d.plan_spec("AB", 8)) == (
        PlanKind.FULL_INPUT_REWIND, 8, 4, (0,), (0,), (1, 1), SpecReplayMode.FULL_PAGE, dependency
    )  # fmt: skip


def test_eagle_with_one_matched_block_starts_at_nothing(desk):
    """Scenario 17. Nothing is bound, so nothing is protected and nothing depends on the next block."""
    d = desk(8, 8)
    d.cache_paired("A")
    plan = d.plan_spec("A", 5)
    assert facts(plan) == (PlanKind.NO_REUSABLE_PREFIX, 4, 0, (), (), (2, 2), SpecReplayMode.NONE, None)
    assert plan.protected_record is None
    plan = d.plan_spec("A", 4)
    assert facts(plan) == (PlanKind.FULL_INPUT_REWIND, 4, 0, (), (), (1, 1), SpecReplayMode.NONE, None)
    assert plan.protected_record is None


def test_drafts_without_a_future_replay_nothing(d):
    """Scenario 18."""
    plan = d.plan_spec("AB", 9, future=0)
    assert facts(plan) == (PlanKind.STANDARD, 8, 8, (0, 1), (0, 1), (1, 1), SpecReplayMode.NONE, None)
    plan = d.plan_spec("AB", 8, future=0)
    assert facts(plan) == (PlanKind.FULL_INPUT_REWIND, 8, 4, (0,), (0,), (1, 1), SpecReplayMode.NONE, None)


def test_base_pages_alone_do_not_help_a_paged_draft(desk):
    """Scenario 19."""
    d = desk(8, 8)
    d.cache("AB")
    eagle = d.plan_spec("AB", 9)
    assert facts(eagle) == (PlanKind.NO_REUSABLE_PREFIX, 0, 0, (), (), (3, 3), SpecReplayMode.NONE, None)
    shared = d.plan_spec("AB", 9, paged=False, future=0)
    assert facts(shared) == (PlanKind.STANDARD, 8, 8, (0, 1), (), (1, 0), SpecReplayMode.NONE, None)
    assert (shared.protected_record, shared.hit_page) == (None, 1)


def test_base_pages_beyond_the_paired_record_are_not_used(d):
    d.cache("ABC")
    plan = d.plan_spec("ABC", 13, future=0)
    assert (plan.reuse_token_length, plan.base_pages, plan.draft_pages) == (8, (0, 1), (0, 1))


def test_a_shared_draft_with_an_empty_match_is_cold(d):
    plan = d.plan_spec("X", 5, paged=False, future=0)
    assert facts(plan) == (PlanKind.NO_REUSABLE_PREFIX, 0, 0, (), (), (2, 0), SpecReplayMode.NONE, None)


@pytest.mark.parametrize(("paged", "demand"), [(True, (3, 3)), (False, (3, 0))])
def test_a_bypass_is_cold(d, paged, demand):
    plan = d.plan_spec("AB", 9, paged=paged, bypass=True)
    assert facts(plan) == (PlanKind.NO_REUSABLE_PREFIX, 0, 0, (), (), demand, SpecReplayMode.NONE, None)
    assert plan.owns_paged_spec_state is paged


def test_no_tokens_need_nothing(d):
    plan = d.plan_spec("", 0)
    assert facts(plan)[:3] == (PlanKind.STANDARD, 0, 0)
    assert plan.demand == ResourceDemand()


def test_coverage_counts_both_pools(d):
    """Scenario 22 with draft pages."""
    plan = d.plan_spec("AB", 9)
    assert require_coverage(plan, 3, 3) is plan
    assert require_coverage(plan, 4, 3) == attrs.evolve(plan, demand=ResourceDemand(3, 2))
    assert require_coverage(plan, 3, 5) == attrs.evolve(plan, demand=ResourceDemand(2, 4))
    with pytest.raises(ContractViolation, match="owns no draft pages"):
        require_coverage(d.plan_spec("AB", 9, paged=False, future=0), 3, 1)


def test_planning_changes_nothing(d):
    """Scenario 23."""
    before = d.manager.dump()
    for letters, tokens in (("AB", 9), ("AB", 8), ("A", 4), ("AX", 11), ("", 3)):
        for paged in (True, False):
            assert d.plan_spec(letters, tokens, paged=paged) == d.plan_spec(letters, tokens, paged=paged)
    assert d.manager.dump() == before


def test_impossible_inputs_are_refused(d):
    for call in (
        lambda: d.plan_spec("AB", 7),
        lambda: d.plan_spec("A", -1),
        lambda: d.plan_spec("AB", 9, future=-1),
        lambda: d.manager.plan_spec(d.hashes("A"), 4, "bypass", owns_paged=True, future_dependency_tokens=0),
    ):
        with pytest.raises(ContractViolation, match="plan:"):
            call()


def test_a_draft_index_that_names_a_wrong_record_is_an_invariant_violation(d):
    """Records 1 and 9: one that is stored with another path, and one that is not stored at all."""
    (a,) = d.hashes("A")
    d.cache("X")
    wrong = d.manager.records.find(CacheRecordKey(d.hashes("X")[0], 1))
    for id in (wrong.id, 9):
        record = CacheRecord(id, CacheRecordKey(a, 1), [a], [0], [7])
        d.manager.drafts.insert(record)
        with pytest.raises(InvariantViolation, match="does not hold"):
            d.plan_spec("A", 5)
        d.manager.drafts.erase(record)
    with pytest.raises(InvariantViolation, match="replayed"):
        d.plan_spec("AB", 9, future=9)
