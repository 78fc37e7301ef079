"""Leases with draft pages: acquire, grow, publish, upgrade, evict."""

import attrs
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import AcquireStatus, PublicationStatus, ResourceDemand, ResourceType

BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE


def pages(lease):
    return lease.base_pages.tolist(), lease.draft_pages.tolist()


def test_a_paired_producer_upgrades_a_record_without_drafts(desk):
    """Scenario 38."""
    d = desk(6, 4)
    d.cache("AB")
    lease = d.spec("AB", 8)
    assert pages(lease) == ([2, 3], [0, 1])
    result = d.publish(lease, "AB")
    assert (result.status, result.record_id, result.block_count) == (PublicationStatus.PUBLISHED, 1, 2)
    assert (result.base_pages.tolist(), d.path(1), d.draft_path(1)) == ([0, 1], [0, 1], [0, 1])
    d.manager.check_invariants()
    lease.release()
    assert (d.free_of(BASE), d.free_of(DRAFT), d.lru) == ([4, 5, 2, 3], [2, 3], [1])
    assert d.plan_spec("AB", 9, future=0).draft_pages == (0, 1)


def test_an_upgrade_moves_the_record_to_the_mru_end(desk):
    d = desk(8, 4, touch_on_hit=True)
    d.cache("A")
    d.cache("B")
    d.publish(d.spec("A"), "A")
    assert d.lru == [2, 1]


def test_a_vanilla_publication_keeps_the_draft_state(desk):
    """Scenario 39."""
    d = desk(6, 4)
    d.cache_paired("A")
    d.cache("B")
    lease = d.lease("A")
    result = d.publish(lease, "A")
    assert (result.status, result.record_id) == (PublicationStatus.EXISTING_RECORD, 1)
    assert (d.draft_path(1), d.lru) == ([0], [2, 1])


def test_a_second_paired_producer_changes_nothing_but_recency(desk):
    d = desk(6, 6)
    d.cache_paired("A")
    d.cache("B")
    lease = d.spec("A", bypass=True)
    assert d.publish(lease, "A").status is PublicationStatus.EXISTING_RECORD
    assert (d.draft_path(1), d.counts(DRAFT, "cache"), d.lru) == ([0], {0: 1}, [2, 1])


@pytest.fixture
def replay(desk):
    d = desk(6, 6)
    d.cache_paired("AB")
    return d, d.spec("ABC", 12)


def test_a_replayed_sequence_publishes_its_own_draft_pages(replay):
    """Scenario 40."""
    d, lease = replay
    assert pages(lease) == ([0, 2, 3], [0, 2, 3])
    result = d.publish(lease, "ABC")
    assert (result.record_id, d.path(2), d.draft_path(2)) == (2, [0, 1, 3], [0, 2, 3])
    assert d.counts(BASE, "cache") == {0: 2, 1: 2, 3: 1}
    assert d.counts(DRAFT, "cache") == {0: 2, 1: 1, 2: 1, 3: 1}
    assert pages(lease) == ([0, 2, 3], [0, 2, 3])
    assert d.plan_spec("ABC", 13, future=0).draft_pages == (0, 2, 3)
    assert d.plan_spec("ABX", 12, future=0).draft_pages == (0, 2), "the newest record with the boundary"
    d.manager.check_invariants()


@pytest.mark.parametrize(("letters", "resident"), [("ADE", 12), ("A", 4), ("ABC", 7), ("AD", 8)])
def test_a_replay_dependency_is_checked_at_publication(replay, letters, resident):
    """Scenario 41. Block 2 lies beyond the bound prefix, but the kept draft page has seen it."""
    d, lease = replay
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="computed before block 2"):
        d.publish(lease, letters, resident)
    assert d.manager.dump() == before
    assert d.publish(lease, "AB").status is PublicationStatus.EXISTING_RECORD


def test_a_hit_is_protected_from_its_own_eviction(desk):
    """Scenario 42."""
    d = desk(4, 4)
    d.cache_paired("AB")
    d.cache_paired("C")
    assert (d.path(2), d.draft_path(2)) == ([2], [2])
    lease = d.spec("AB", 9)
    assert pages(lease) == ([0, 3, 2], [0, 3, 2])
    assert d.lru == [1]
    d.manager.check_invariants()


def test_a_protected_hit_is_touched(desk):
    d = desk(8, 8)
    d.cache_paired("AB")
    d.cache_paired("C")
    d.spec("AB", 9)
    assert d.lru == [2, 1]


def test_a_protected_record_may_go_last(desk):
    """Nothing else is left to evict: the record goes, its bound pages stay with the lease."""
    d = desk(3, 3)
    d.cache_paired("AB")
    lease = d.spec("AB", 9)
    assert pages(lease) == ([0, 2, 1], [0, 2, 1])
    assert (d.lru, len(d.manager.index), len(d.manager.drafts)) == ([], 0, 0)
    assert d.manager.metrics.reclaimed_draft_kv_pages == 1
    lease.release()
    assert (d.free_of(BASE), d.free_of(DRAFT)) == ([0, 2, 1], [0, 2, 1])


def test_an_infeasible_paired_acquire_changes_nothing(desk):
    """Scenario 43."""
    d = desk(3, 3)
    d.cache_paired("AB")
    d.cache_paired("C")
    before = d.manager.dump()
    result = d.manager.acquire(d.plan_spec("ABX", 13))
    assert (result.status, result.lease) == (AcquireStatus.INSUFFICIENT_CAPACITY, None)
    assert d.manager.dump() == before
    assert d.lru == [1, 2]


def test_only_the_common_part_is_published(desk):
    """Scenario 44."""
    d = desk(4, 4)
    lease = d.spec("AB")
    assert d.publish(lease, "AB", 4).block_count == 1
    assert (d.path(1), d.draft_path(1)) == ([0], [0])
    lease.release()
    assert (d.free_of(BASE), d.free_of(DRAFT)) == ([2, 3, 1],) * 2


def test_paired_growth_is_atomic(desk):
    """Scenario 45."""
    d = desk(3, 2, max_records=1)
    lease = d.spec("", 4)
    assert d.manager.grow_spec(lease, 1, 1)
    assert pages(lease) == ([0, 1], [0, 1])
    before = d.manager.dump()
    assert not d.manager.grow_spec(lease, 1, 1)
    assert not d.manager.grow_spec(lease, 0, 2**70)
    assert d.manager.grow_spec(lease, 0, 0)
    assert d.manager.dump() == before
    assert d.free_of(BASE) == [2]
    assert d.manager.grow_spec(lease, 1, 0)
    assert pages(lease) == ([0, 1, 2], [0, 1])


def test_growing_many_counts_both_pools(desk):
    d = desk(7, 5)
    d.cache_paired("A")
    leases = [d.spec("", 4), d.lease("", 4), d.spec("", 4)]
    before = d.manager.dump()
    grow = d.manager.grow_all
    assert grow(leases, [1, 1, 1], [4, 0, 1]) == (0,)
    assert grow(leases, [1, 4, 1], [1, 0, 2]) == (1,)
    assert grow(leases, [1, 0, 0], [1, 0, 3]) == (2,)
    assert grow(leases, [5, 0, 0], [0, 0, 0]) == (0,)
    assert d.manager.dump() == before
    assert grow(leases, [2, 0, 1], [2, 0, 1]) == ()
    assert [pages(lease) for lease in leases] == [([1, 4, 5], [1, 3, 4]), ([2], []), ([3, 6], [2, 0])]
    assert d.lru == []
    d.manager.check_invariants()
    for lease in leases:
        lease.release()
    assert (d.free_of(BASE), d.free_of(DRAFT)) == ([0, 1, 4, 5, 2, 3, 6], [1, 3, 4, 2, 0])


def test_growth_of_the_wrong_kind_is_refused(desk):
    d = desk(8, 8, 2, 2)
    plain, eagle, shared = d.lease("", 4), d.spec("", 4), d.spec("", 4, paged=False, future=0)
    hybrid, mtp = d.hybrid("", 4), d.hybrid("", 4, mtp=True)
    before, m = d.manager.dump(), d.manager
    for call, words in (
        (lambda: m.grow_base(eagle, 1), "no such operation"),
        (lambda: m.grow_base(shared, 1), "no such operation"),
        (lambda: m.grow_base(mtp, 1), "no such operation"),
        (lambda: m.grow_spec(plain, 1, 0), "no such operation"),
        (lambda: m.grow_spec(hybrid, 1, 0), "no such operation"),
        (lambda: m.grow_spec(shared, 1, 1), "owns no draft pages"),
        (lambda: m.grow_spec(eagle, 1, -1), "use 0 or more"),
        (lambda: m.grow_all([plain, eagle], [1, 1]), "give draft counts"),
        (lambda: m.grow_all([plain], [1], [1]), "owns no draft pages"),
        (lambda: m.grow_all([plain], [1], [0, 0]), "one count per lease"),
    ):
        with pytest.raises(ContractViolation, match=words):
            call()
    assert d.manager.dump() == before
    assert m.grow_spec(shared, 1, 0)
    assert m.grow_all([plain, shared, hybrid], [1, 0, 0]) == ()


def test_a_stale_paired_plan_is_refused(desk):
    """The draft pages of the plan belong to a record that is gone; its pages may hold anything by now."""
    d = desk(8, 8)
    d.cache_paired("AB")
    plan = d.plan_spec("AB", 9)
    lies = [
        attrs.evolve(plan, protected_record=None),
        attrs.evolve(plan, draft_pages=(5,)),
        attrs.evolve(plan, base_pages=(5,), bound=None),
        attrs.evolve(plan, matched_hashes=(b"x",)),
        attrs.evolve(plan, recurrent_slot=0),
    ]
    before = d.manager.dump()
    for lie in lies:
        with pytest.raises(ContractViolation, match="plan again"):
            d.manager.acquire(lie)
    assert d.manager.dump() == before
    d.manager.evict_all()
    d.cache("AB")
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="plan again"):
        d.manager.acquire(plan)
    assert d.manager.dump() == before


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (ResourceDemand(1, -1), "base and draft pages only"),
        (ResourceDemand(1, 1, 1), "base and draft pages only"),
        (ResourceDemand(1, 1, 0, 1), "base and draft pages only"),
    ],
)
def test_a_paired_plan_demands_pages_only(desk, demand, words):
    d = desk(4, 4, 4, 4)
    with pytest.raises(ContractViolation, match=words):
        d.manager.acquire(attrs.evolve(d.plan_spec("A", 5), demand=demand))


def test_more_blocks_than_draft_pages_are_refused(desk):
    d = desk(4, 4)
    lease = d.spec("A")
    d.manager.grow_spec(lease, 1, 0)
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="at most one per page"):
        d.publish(lease, "AB")
    assert d.manager.dump() == before


def test_eviction_drops_the_draft_entries_of_its_victims_only(desk):
    d = desk(6, 6, max_records=2)
    d.cache_paired("AB")
    d.cache_paired("AC")
    d.cache_paired("D")
    assert d.lru == [2, 3]
    assert d.manager.drafts.lookup_longest(d.hashes("AB"), 2) == (2, 1)
    assert d.manager.metrics.reclaimed_draft_kv_pages == 2
    d.manager.check_invariants()


def test_a_record_limit_of_zero_keeps_no_draft_entry(desk):
    d = desk(2, 2, max_records=0)
    lease = d.spec("A")
    assert d.publish(lease, "A").record_id is None
    assert len(d.manager.drafts) == 0
    lease.release()
    assert (d.free_of(BASE), d.free_of(DRAFT)) == ([1, 0], [1, 0])
    d.manager.check_invariants()


def test_a_victim_that_misses_its_draft_entries_is_an_invariant_violation(desk):
    """Noticed before anything changes, also where the record limit chose the victim."""
    d = desk(6, 6, max_records=1)
    d.cache_paired("A")
    d.manager.drafts.withdraw(d.manager.records.get(1))
    lease = d.spec("B")
    before = d.manager.dump()
    for call in (d.manager.evict_all, lambda: d.publish(lease, "B")):
        with pytest.raises(InvariantViolation, match="missing in the draft index"):
            call()
    assert d.manager.dump() == before
    with pytest.raises(InvariantViolation, match="not what the records say"):
        d.manager.check_invariants()


def test_a_shared_draft_publishes_base_pages_only(desk):
    d = desk(6)
    lease = d.spec("AB", paged=False, future=0)
    assert pages(lease) == ([0, 1], [])
    d.publish(lease, "AB")
    assert (d.path(1), d.draft_path(1)) == ([0, 1], None)
    lease.release()
    hit = d.spec("AB", 9, paged=False, future=0)
    assert hit.base_pages.tolist() == [0, 1, 2]
    assert "spec" in repr(hit)


def test_touch_on_hit_works_for_a_shared_draft_too(desk):
    d = desk(6, touch_on_hit=True)
    d.cache("A")
    d.cache("B")
    d.spec("A", 5, paged=False, future=0)
    assert d.lru == [2, 1]


def test_attaching_draft_state_to_a_record(desk):
    d = desk(6, 6)
    d.cache("AB")
    d.cache("C")
    records = d.manager.records
    before = records.dump()
    for id, path in ((9, [0, 1]), (1, [0]), (1, [0, -1]), (1, ["x", 1])):
        with pytest.raises(ContractViolation):
            records.set_spec_state(id, path)
    assert records.dump() == before
    assert records.set_spec_state(1, [4, 5]).key == records.get(1).key
    assert (records.lru_to_mru(), d.draft_path(1)) == ([2, 1], [4, 5])
    records.set_spec_state(1, [4, 5])
    with pytest.raises(ContractViolation, match="other draft pages already"):
        records.set_spec_state(1, [5, 4])
