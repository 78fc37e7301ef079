"""Acquire, grow, publish, release: what moves between leases, records and free lists."""

import attrs
import numpy as np
import pytest

from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.manager import (
    AcquireStatus,
    ContextCacheManager,
    PlanKind,
    PublicationStatus,
    ResourceDemand,
    ResourceType,
)


def test_a_hit_survives_the_death_of_its_record(desk):
    """Scenario 24. The record that supplied page 0 is evicted by the request that uses the page."""
    d = desk(2, max_records=2)
    d.cache("A")
    d.cache("B")
    lease = d.lease("A", 5)
    assert lease.base_pages.tolist() == [0, 1]
    assert d.lru == []
    assert len(d.manager.index) == 0
    assert d.manager.metrics.evicted_records == 2
    assert d.manager.metrics.reclaimed_base_kv_pages == 1
    lease.release()
    assert d.free == [0, 1]


def test_an_infeasible_acquire_rolls_back(desk):
    """Scenario 25."""
    d = desk(1)
    d.cache("A")
    before = d.manager.dump()
    plan = d.plan("A", 5)
    result = d.manager.acquire(plan)
    assert result.status is AcquireStatus.INSUFFICIENT_CAPACITY
    assert result.lease is None
    assert result.plan is plan
    assert d.manager.dump() == before
    assert (d.lru, d.cache_counts, d.active_counts) == ([1], {0: 1}, {})


def test_a_bypass_ignores_the_cache_and_may_evict_it(desk):
    """Scenario 26."""
    d = desk(1)
    d.cache("A")
    assert d.lease("A", bypass=True).base_pages.tolist() == [0]
    assert d.lru == []
    assert len(d.manager.index) == 0


def test_a_later_publisher_adopts_canonical_pages_in_its_record_only(desk):
    """Scenario 27."""
    d = desk(3, max_records=3)
    first, second = d.lease("A"), d.lease("AB")
    assert (first.base_pages.tolist(), second.base_pages.tolist()) == ([0], [1, 2])
    d.publish(first, "A")
    result = d.publish(second, "AB")
    assert (result.status, result.record_id, result.block_count) == (PublicationStatus.PUBLISHED, 2, 2)
    assert result.base_pages.tolist() == d.path(2) == [0, 2]
    assert second.base_pages.tolist() == [1, 2]
    assert d.cache_counts == {0: 2, 2: 1}
    first.release()
    second.release()
    assert d.free == [1]


def test_a_bypass_lease_may_publish_over_cached_blocks(desk):
    """Scenario 28."""
    d = desk(3)
    d.cache("A")
    lease = d.lease("AB", bypass=True)
    assert lease.base_pages.tolist() == [1, 2]
    assert d.publish(lease, "AB").base_pages.tolist() == [0, 2]
    assert lease.base_pages.tolist() == [1, 2]


def test_branches_share_their_ancestors(desk):
    """Scenario 29."""
    d = desk(4, max_records=2)
    d.cache("ABC")
    branch = d.lease("ABD", 12)
    assert branch.base_pages.tolist() == [0, 1, 3]
    assert branch.matched_hashes == tuple(d.hashes("AB"))
    assert d.publish(branch, "ABD").record_id == 2
    branch.release()
    assert d.lease("", 4).base_pages.tolist() == [2]
    assert d.lru == [2]
    assert d.manager.metrics.reclaimed_base_kv_pages == 1
    assert d.lookup("ABD") == [0, 1, 3]
    assert d.lookup("ABC") == [0, 1]


def test_a_vanilla_hit_does_not_refresh_recency(desk):
    """Scenario 30."""
    d = desk(3)
    d.cache("C")
    d.cache("A")
    lease = d.lease("A", 5)
    assert d.lru == [1, 2]
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="not those that the lease was matched with"):
        d.publish(lease, "C")
    assert d.manager.dump() == before


def test_publishing_a_stored_endpoint_again_refreshes_it(desk):
    """Scenario 31."""
    d = desk(3)
    d.cache("A")
    d.cache("B")
    lease = d.lease("A", 4)
    assert lease.base_pages.tolist() == [2]
    result = d.publish(lease, "A")
    assert (result.status, result.record_id) == (PublicationStatus.EXISTING_RECORD, 1)
    assert result.base_pages.tolist() == [0]
    assert d.lru == [2, 1]
    assert lease.base_pages.tolist() == [2]
    lease.release()
    assert d.free == [2]


def test_the_record_limit_evicts_the_oldest(desk):
    """Scenario 32."""
    d = desk(4, max_records=2)
    for letters in "ABC":
        d.cache(letters)
    assert d.lru == [2, 3]
    assert d.manager.metrics.evicted_records == 1

    d = desk(4, max_records=1)
    d.cache("A")
    d.cache("B")
    assert d.lru == [2]
    assert d.manager.metrics.evicted_records == 1
    assert d.manager.metrics.reclaimed_base_kv_pages == 1


def test_without_a_record_limit_only_pages_bind(desk):
    """Scenario 32b."""
    d = desk(4, max_records=None)
    assert d.manager.max_records == 4
    for letters in "ABCD":
        d.cache(letters)
    assert d.lru == [1, 2, 3, 4]
    assert d.manager.metrics.evicted_records == 0
    d.cache("E")
    assert d.lru == [2, 3, 4, 5]


def test_the_default_record_limit_counts_snapshot_slots_of_both_kinds():
    assert ContextCacheManager(ResourceDemand(5, 7, 2, 3), 4).max_records == 10


def test_a_record_limit_of_zero_keeps_nothing(desk):
    """Scenario 33."""
    d = desk(1, max_records=0)
    lease = d.lease("A")
    result = d.publish(lease, "A")
    assert (result.status, result.record_id) == (PublicationStatus.PUBLISHED, None)
    assert (d.manager.metrics.evicted_records, d.manager.metrics.reclaimed_base_kv_pages) == (1, 0)
    assert (d.active_counts, d.cache_counts, d.lru, len(d.manager.index)) == ({0: 1}, {}, [], 0)
    lease.release()
    assert d.free == [0]
    assert d.manager.metrics.reclaimed_base_kv_pages == 0


def test_a_page_is_canonical_for_one_block_only(desk):
    """Scenario 34."""
    d = desk(2)
    lease = d.lease("C")
    d.publish(lease, "C")
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="page 0 is already canonical for another block"):
        d.publish(lease, "D")
    assert d.manager.dump() == before


@pytest.mark.parametrize(("letters", "resident"), [("A", 3), ("", 8), ("ABC", 12), ("A", -1), ("A", -4)])
def test_publication_has_bounds(desk, letters, resident):
    """Scenario 35: no block, more blocks than pages, a negative length."""
    d = desk(4)
    lease = d.lease("AB")
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="at least one block and at most one per page"):
        d.publish(lease, letters, resident)
    assert d.manager.dump() == before


def test_resident_tokens_limit_what_is_published(desk):
    d = desk(4)
    lease = d.lease("ABC")
    assert d.publish(lease, "ABC", 11).block_count == 2
    assert d.publish(lease, "A", 11).block_count == 1


@pytest.mark.parametrize("kind", ["released", "foreign"])
def test_operations_on_a_released_or_foreign_lease_are_refused(desk, kind):
    """Scenarios 35 and 36."""
    d, other = desk(4), desk(4)
    lease = d.lease("A") if kind == "released" else other.lease("A")
    if kind == "released":
        lease.release()
    before = d.manager.dump(), other.manager.dump()
    for operation in (
        lambda: d.publish(lease, "A"),
        lambda: d.manager.grow_base(lease, 1),
        lambda: d.manager.grow_base(lease, 0),
        lambda: d.manager.grow_all([d.lease("", 0), lease], [1, 1]),
    ):
        with pytest.raises(ContractViolation, match=r"has been released|belongs to another manager"):
            operation()
    if kind == "foreign":
        with pytest.raises(ContractViolation, match="belongs to another manager"):
            d.manager.release(lease)
        assert not lease.released
    d.manager.books.held.clear()  # the empty lease above
    before[0]["leases"].clear()
    assert (d.manager.dump(), other.manager.dump()) == before


def test_growth(desk):
    """Scenario 36."""
    d = desk(3)
    lease = d.lease("", 1)
    assert d.manager.grow_base(lease, 0)
    assert lease.base_pages.tolist() == [0]
    assert d.manager.grow_base(lease, 2)
    assert lease.base_pages.tolist() == [0, 1, 2]
    before = d.manager.dump()
    assert not d.manager.grow_base(lease, 1)
    assert not d.manager.grow_base(lease, 2**31 - 1)
    assert not d.manager.grow_base(lease, 2**70)
    with pytest.raises(ContractViolation, match="use 0 or more"):
        d.manager.grow_base(lease, -1)
    assert d.manager.dump() == before
    assert lease.page_count == 3


def test_growth_evicts_but_never_pinned_pages(desk):
    """Scenario 37."""
    d = desk(2)
    d.cache("A")
    lease = d.lease("", 4, bypass=True)
    assert lease.base_pages.tolist() == [1]
    assert d.manager.grow_base(lease, 1)
    assert lease.base_pages.tolist() == [1, 0]
    assert d.lru == []
    assert not d.manager.grow_base(lease, 1)


def test_growing_many_is_all_or_nothing(desk):
    """40.13: the positions are taken in order; one that does not fit takes nothing from the later ones."""
    d = desk(6)
    d.cache("A")
    leases = [d.lease("", 4, bypass=True) for _ in range(3)]
    before = d.manager.dump()
    assert d.manager.grow_all(leases, [1, 3, 2]) == (1,)
    assert d.manager.grow_all(leases, [4, 1, 3]) == (0, 2)
    assert d.manager.dump() == before
    with pytest.raises(ContractViolation, match="position 2"):
        d.manager.grow_all(leases, [1, 0, -1])
    with pytest.raises(ContractViolation, match="one count per lease"):
        d.manager.grow_all(leases, [1])
    assert d.manager.dump() == before
    assert d.manager.grow_all(leases, np.array([1, 0, 2], dtype=np.int32)) == ()
    assert [lease.base_pages.tolist() for lease in leases] == [[1, 4], [2], [3, 5, 0]]
    assert d.lru == []
    assert d.manager.grow_all([], []) == ()


def test_growing_together_hands_out_the_same_pages_as_growing_in_turn(desk):
    together, in_turn = desk(8), desk(8)
    results = []
    for d in (together, in_turn):
        d.cache("AB")
        d.cache("C")
        leases = [d.lease("", 4, bypass=True) for _ in range(3)]
        if d is together:
            d.manager.grow_all(leases, [2, 1, 2])
        else:
            assert all(d.manager.grow_base(lease, count) for lease, count in zip(leases, [2, 1, 2], strict=True))
        results.append(d.manager.dump())
    assert results[0] == results[1]


def test_a_view_of_the_pages_is_read_only_and_unaffected_by_growth(desk):
    d = desk(64)
    lease = d.lease("", 4)
    view = lease.base_pages
    assert view.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    for count in (1, 30, 2):
        assert d.manager.grow_base(lease, count)
    assert view.tolist() == [0]
    assert lease.base_pages.tolist() == list(range(34))


def test_release_walks_shared_pages_first_and_then_private_ones_in_allocation_order(desk):
    d = desk(6, max_records=1)
    d.cache("AB")
    lease = d.lease("AB", 9)
    d.manager.grow_base(lease, 1)
    d.manager.evict_all()
    assert lease.base_pages.tolist() == [0, 1, 2, 3]
    lease.release()
    assert d.free == [4, 5, 0, 1, 2, 3]


def test_later_publications_of_one_lease_extend_the_earlier(desk):
    """The second publication starts from the first; after an eviction in between it must not."""
    d = desk(8)
    lease = d.lease("ABCD", 17)
    assert d.publish(lease, "AB").record_id == 1
    assert d.publish(lease, "ABCD").base_pages.tolist() == [0, 1, 2, 3]
    assert d.cache_counts == {0: 2, 1: 2, 2: 1, 3: 1}
    d.manager.evict_all()
    assert d.lookup("ABCD") == []
    other = d.lease("AX", 8)
    d.publish(other, "AX")
    assert d.publish(lease, "ABCD").base_pages.tolist() == [5, 1, 2, 3]
    assert d.path(3) == [5, 6]
    d.manager.check_invariants()


def test_a_changed_prefix_is_not_taken_from_the_earlier_publication(desk):
    d = desk(8)
    lease = d.lease("AB", 17)
    d.publish(lease, "AB")
    with pytest.raises(ContractViolation, match="already canonical"):
        d.publish(lease, "AXY")
    with pytest.raises(ContractViolation, match="already canonical"):
        d.publish(lease, "X")
    assert d.publish(lease, "ABXY").base_pages.tolist() == [0, 1, 2, 3]


def test_a_repeated_hash_is_published_on_one_page(desk):
    """The general path of the projection: within one endpoint the first block of a hash is canonical for all."""
    d = desk(4)
    lease = d.lease("AABA")
    assert d.publish(lease, "AABA").base_pages.tolist() == [0, 0, 2, 0]
    assert d.cache_counts == {0: 3, 2: 1}
    d.manager.check_invariants()
    lease.release()
    assert d.free == [1, 3]
    hit = d.lease("AABA", 17)
    assert hit.base_pages.tolist() == [0, 0, 2, 0, 1]
    assert d.active_counts == {0: 3, 1: 1, 2: 1}
    d.publish(hit, "AABAC")
    d.manager.check_invariants()
    hit.release()
    assert d.manager.evict_all() == 2
    assert sorted(d.free) == [0, 1, 2, 3]


def test_a_hole_in_the_index_is_filled_by_the_producer(desk):
    d = desk(8)
    d.manager.index.insert(d.hashes("A")[0], 7)  # as if another prefix had brought A and C
    d.manager.index.insert(d.hashes("C")[0], 6)
    d.manager.pools.add_active(d.manager.pools.allocate(ResourceDemand(8))[7])
    d.manager.pools.unpin(ResourceType.BASE_KV_PAGE, [0, 1, 2])
    lease = d.lease("ABC", bypass=True)
    assert d.publish(lease, "ABC").base_pages.tolist() == [7, 1, 6]


def test_records_share_the_hash_objects_of_the_index(desk):
    d = desk(8)
    d.cache("AB")
    lease = d.lease("ABC")
    d.publish(lease, "ABC")
    one, two = (d.manager.records.get(id).logical_block_hashes for id in (1, 2))
    assert all(a is b for a, b in zip(one, two, strict=False))
    assert all(a is b for a, b in zip(one, lease.matched_hashes, strict=True))


def test_a_stale_plan_is_refused(desk):
    """Page 0 holds other tokens by the time the plan is acquired; pinning it would serve the wrong context."""
    d = desk(2)
    d.cache("A")
    plan = d.plan("A", 5)
    d.manager.evict_all()
    d.cache("B")
    d.cache("C")
    before = d.manager.dump()
    for stale in (plan, attrs.evolve(plan, index_version=None, bound=None), desk(2).plan("", 4)):
        if stale.base_pages:
            with pytest.raises(ContractViolation, match="plan again"):
                d.manager.acquire(stale)
    assert d.manager.dump() == before


def test_a_plan_that_outlived_an_unrelated_eviction_is_fine(desk):
    d = desk(4)
    d.cache("A")
    d.cache("B")
    plan = d.plan("B", 5)
    d.lease("", 12, bypass=True).release()
    assert d.lru == [2]
    assert d.manager.acquire(plan).lease.base_pages.tolist()[0] == 1


@pytest.mark.parametrize("demand", [ResourceDemand(-1), ResourceDemand(1, 1), ResourceDemand(1, 0, 1)])
def test_a_vanilla_plan_demands_base_pages_only(desk, demand):
    d = desk(4, 4, 4, 4)
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="demand base pages only"):
        d.manager.acquire(attrs.evolve(d.plan("A", 5), demand=demand))
    assert d.manager.dump() == before


def test_an_empty_plan_gives_an_empty_lease(desk):
    d = desk(2)
    result = d.acquire("", 0)
    assert result.plan.kind is PlanKind.STANDARD
    assert result.lease.page_count == 0
    result.lease.release()
    assert d.free == [0, 1]


@pytest.mark.parametrize(("page_size", "max_records"), [(0, 1), (-4, 1), (4, -1)])
def test_impossible_managers_are_refused(page_size, max_records):
    with pytest.raises(ContractViolation, match="a manager cannot"):
        ContextCacheManager(ResourceDemand(2), page_size, max_records=max_records)


def test_touch_on_hit_refreshes_the_record_that_supplied_the_hit(desk):
    """The option for weakness M3; off by default (scenario 30)."""
    d = desk(8, touch_on_hit=True)
    for letters in ("A", "AB", "C"):
        d.cache(letters)
    d.lease("A", 5).release()
    assert d.lru == [1, 3, 2], "the latest record over page 0 is [A,B]"
    d.lease("C", 4).release()
    assert d.lru == [1, 2, 3], "a rewound hit is a hit"
    d.publish(d.lease("A", 4), "A")
    d.lease("A", 5).release()
    assert d.lru == [3, 2, 1], "a touched record is the latest over its pages"
    d.lease("X", 4).release()
    assert d.lru == [3, 2, 1]


def test_touch_on_hit_of_a_record_that_the_same_acquire_evicted(desk):
    d = desk(2, touch_on_hit=True)
    d.cache("A")
    d.cache("B")
    assert d.lease("A", 5).base_pages.tolist() == [0, 1]
    assert d.lru == []


def test_metrics_count_and_time(desk):
    d = desk(1)
    assert d.manager.metrics.counters() == dict.fromkeys(d.manager.metrics.counters(), 0)
    d.cache("A")
    d.lease("B")
    metrics = d.manager.metrics
    assert metrics.counters() == {
        "evicted_records": 1,
        "reclaimed_base_kv_pages": 1,
        "reclaimed_draft_kv_pages": 0,
        "reclaimed_recurrent_snapshots": 0,
        "reclaimed_partial_kv_snapshots": 0,
    }
    assert metrics.planning_nanoseconds > 0
    assert metrics.eviction_allocation_nanoseconds > 0
