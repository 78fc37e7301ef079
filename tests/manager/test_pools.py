"""Counts and free lists: what is free, in which order, and that a refusal changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import ResourceDemand, ResourceId, ResourcePools, ResourceType

BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE


def pools_of(*capacities, observer=None):
    return ResourcePools(ResourceDemand(*capacities), observer)


def test_a_resource_is_free_only_when_both_counts_are_zero():
    """Scenario 1."""
    pools = pools_of(1)
    (page,) = pools.allocate(ResourceDemand(1))
    pools.add_cache(page)
    assert pools.free_count(BASE) == 0
    pools.release_active(page)
    assert pools.free_count(BASE) == 0
    assert pools.reclaimable_count(BASE) == 1
    pools.release_cache(page)
    assert pools.free_count(BASE) == 1
    assert pools.reclaimable_count(BASE) == 0
    before = pools.dump()
    for release in (pools.release_cache, pools.release_active):
        with pytest.raises(ContractViolation, match="release each reference once"):
            release(page)
    assert pools.dump() == before


def test_ids_come_and_go_first_in_first_out():
    """Scenario 2."""
    pools = pools_of(4)
    pages = pools.allocate(ResourceDemand(3))
    assert [page.index for page in pages] == [0, 1, 2]
    pools.release_active(pages[1])
    pools.release_active(pages[2])
    assert pools.free_list(BASE) == [3, 1, 2]
    assert pools.allocate(ResourceDemand(1)) == (ResourceId(BASE, 3),)
    assert [page.index for page in pools.allocate(ResourceDemand(2))] == [1, 2]


def test_allocation_is_all_or_nothing_over_all_pools():
    """Scenario 3."""
    pools = pools_of(2, 1)
    assert pools.allocate(ResourceDemand(1, 2)) is None
    assert not pools.can_allocate(ResourceDemand(1, 2))
    assert (pools.free_count(BASE), pools.free_count(DRAFT)) == (2, 1)


def test_equal_indices_of_different_types_are_different_resources():
    """Scenario 4."""
    pools = pools_of(1, 1)
    base, draft = pools.allocate(ResourceDemand(1, 1))
    assert (base, draft) == (ResourceId(BASE, 0), ResourceId(DRAFT, 0))
    pools.release_active(base)
    assert pools.active_count(base) == 0
    assert pools.active_count(draft) == 1


def test_allocation_follows_the_pool_order():
    pools = pools_of(2, 1, 1, 1)
    ids = pools.allocate(ResourceDemand(2, 1, 1, 1))
    assert [(id.type, id.index) for id in ids] == [(BASE, 0), (BASE, 1), (DRAFT, 0), (2, 0), (3, 0)]
    assert all(pools.active_count(id) == 1 and pools.cache_count(id) == 0 for id in ids)


def test_negative_numbers_are_refused():
    with pytest.raises(ContractViolation, match="negative"):
        pools_of(-1)
    pools = pools_of(2)
    assert not pools.can_allocate(ResourceDemand(-1))
    with pytest.raises(ContractViolation, match="negative"):
        pools.allocate(ResourceDemand(1, -1))
    for count in (-1, 3):
        with pytest.raises(ContractViolation, match="evict first or ask for less"):
            pools.allocate_pages(BASE, count)
    assert pools.free_list(BASE) == [0, 1]


@pytest.mark.parametrize("name", ["add_active", "add_cache", "release_active", "release_cache"])
@pytest.mark.parametrize("index", [0, 5, -1, 2**40])
def test_free_and_unknown_resources_are_refused(name, index):
    pools = pools_of(2)
    before = pools.dump()
    with pytest.raises(ContractViolation):
        getattr(pools, name)(ResourceId(BASE, index))
    assert pools.dump() == before


@pytest.mark.parametrize("name", ["active_count", "cache_count"])
def test_counts_of_unknown_resources_are_refused(name):
    for id in (ResourceId(BASE, 2), ResourceId(BASE, -1), ResourceId(7, 0)):
        with pytest.raises(ContractViolation):
            getattr(pools_of(2), name)(id)


@pytest.mark.parametrize("name", ["pin", "unpin", "add_cache_many", "release_cache_many"])
@pytest.mark.parametrize("indices", [[0, 3], [0, 9], [0, -1], [0.5], [[0, 1]], [2**70]])
def test_an_array_operation_is_refused_as_a_whole(name, indices):
    """Pages 0 and 1 have both counts, page 3 is free: nothing may happen to page 0 before page 3 is looked at."""
    pools = pools_of(4)
    pages = pools.allocate_pages(BASE, 3)
    pools.add_cache_many(BASE, pages)
    before = pools.dump()
    with pytest.raises(ContractViolation):
        getattr(pools, name)(BASE, indices)
    assert pools.dump() == before


@pytest.mark.parametrize("name", ["unpin", "release_cache_many"])
def test_more_releases_of_one_page_than_it_has_counts_are_refused(name):
    pools = pools_of(4)
    pools.add_cache_many(BASE, pools.allocate_pages(BASE, 3))
    before = pools.dump()
    with pytest.raises(ContractViolation, match="BASE_KV_PAGE: 1 has no"):
        getattr(pools, name)(BASE, [0, 1, 2, 1])
    assert pools.dump() == before


def test_repeated_pages_join_the_free_list_where_their_last_count_goes():
    """The release of [2, 0, 2, 1] is four single releases: 0 is free first, then 2, then 1."""
    pools = pools_of(3)
    pages = pools.allocate_pages(BASE, 3)
    pools.pin(BASE, [2])
    pools.unpin(BASE, [2, 0, 2, 1])
    assert pools.free_list(BASE) == [0, 2, 1]
    assert pages.tolist() == [0, 1, 2]


def test_release_cache_many_names_pages_that_are_cached_no_more_pinned_ones_included():
    pools = pools_of(3)
    pools.add_cache_many(BASE, pools.allocate_pages(BASE, 3))
    pools.add_cache_many(BASE, [2])
    pools.unpin(BASE, [1])
    assert pools.release_cache_many(BASE, [2, 1, 0]).tolist() == [1, 0]
    assert pools.free_list(BASE) == [1]


def test_the_free_ring_wraps_around():
    pools = pools_of(3)
    for _ in range(5):
        pages = pools.allocate_pages(BASE, 2)
        pools.unpin(BASE, pages)
    assert pools.free_list(BASE) == [1, 2, 0]
    assert pools.allocate_pages(BASE, 3).tolist() == [1, 2, 0]
    assert pools.free_list(BASE) == []


def test_an_observer_hears_what_leaves_and_joins_the_free_lists():
    class Log:
        def __init__(self):
            self.lines = []

        def leased(self, type, indices):
            self.lines.append(("leased", type, list(indices)))

        def freed(self, type, indices):
            self.lines.append(("freed", type, list(indices)))

    log = Log()
    pools = pools_of(3, 1, observer=log)
    pages = pools.allocate_pages(BASE, 3)
    pools.add_cache_many(BASE, [1])
    pools.unpin(BASE, pages)
    pools.release_cache_many(BASE, [1])
    pools.allocate(ResourceDemand(0, 1))
    assert log.lines == [
        ("leased", BASE, [0, 1, 2]),
        ("freed", BASE, [0, 2]),
        ("freed", BASE, [1]),
        ("leased", DRAFT, [0]),
    ]


def test_a_corrupted_pool_is_noticed():
    pools = pools_of(3)
    pools.allocate_pages(BASE, 1)
    pools.check()
    pools.pool(BASE).reclaimable = 1
    with pytest.raises(InvariantViolation, match="the reclaimable counter is 1 where the counts say 0"):
        pools.check()


class PlainPool:
    """The rules again, one page at a time and without arrays."""

    def __init__(self, capacity):
        self.active, self.cache = [0] * capacity, [0] * capacity
        self.free = list(range(capacity))

    def apply(self, name, pages):
        counts = self.active if name in ("pin", "unpin") else self.cache
        for page in pages:
            if not 0 <= page < len(counts):
                raise ContractViolation("unknown")
            if name in ("pin", "add_cache_many"):
                if page in self.free:
                    raise ContractViolation("free")
                counts[page] += 1
            else:
                if counts[page] == 0:
                    raise ContractViolation("below zero")
                counts[page] -= 1
                if self.active[page] == self.cache[page] == 0:
                    self.free.append(page)

    def copy(self):
        twin = PlainPool(0)
        twin.active, twin.cache, twin.free = self.active[:], self.cache[:], self.free[:]
        return twin


OPERATIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 4)),
    st.tuples(
        st.sampled_from(["pin", "unpin", "add_cache_many", "release_cache_many"]),
        st.lists(st.integers(0, 6), max_size=9),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=25))
def test_array_operations_equal_single_ones(operations):
    """Random paths with repeats. A mistake would show as another free order or a counter that drifts."""
    pools, plain = pools_of(6), PlainPool(6)
    for name, argument in operations:
        if name == "take":
            if argument <= len(plain.free):
                expected, plain.free = plain.free[:argument], plain.free[argument:]
                for page in expected:
                    plain.active[page] = 1
                assert pools.allocate_pages(BASE, argument).tolist() == expected
        else:
            trial = plain.copy()
            try:
                trial.apply(name, argument)
            except ContractViolation:
                with pytest.raises(ContractViolation):
                    getattr(pools, name)(BASE, np.array(argument, dtype=np.int32))
            else:
                getattr(pools, name)(BASE, np.array(argument, dtype=np.int32))
                plain = trial
        state = pools.dump()["BASE_KV_PAGE"]
        assert (state["active"], state["cache"], state["free"]) == (plain.active, plain.cache, plain.free)
        pools.check()
