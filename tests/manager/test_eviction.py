"""Which records go: the shortest LRU prefix that serves all pools together, found without a walk when there is none."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import (
    CacheRecord,
    CacheRecordKey,
    CacheRecordStore,
    ContextCacheManager,
    ResourceDemand,
    ResourcePools,
    ResourceType,
    plan_eviction,
)
from context_cache.coordinator.manager.eviction import commit_eviction

BASE = ResourceType.BASE_KV_PAGE


def cached_record(pools, store, number, base, spec=None, recurrent=None, partial=None):
    """Insert a record over resources that are allocated already, and count its references."""
    digest = number.to_bytes(32, "big")
    record = CacheRecord(
        0, CacheRecordKey(digest, len(base)), [digest] * len(base), base, spec, recurrent, partial,
        None if recurrent is None else 4 * len(base) + 1,
    )  # fmt: skip
    store.insert(record)
    for id in record.resources():
        pools.add_cache(id)


def test_the_victims_are_a_prefix_useless_members_included(desk):
    """Scenario 50."""
    d = desk(2)
    live = d.lease("A")
    d.publish(live, "A")
    d.cache("B")
    plan = plan_eviction(ResourceDemand(1), d.manager.pools, d.manager.records)
    assert plan.feasible
    assert plan.victims == (1, 2)
    assert d.lease("C").base_pages.tolist() == [1]
    assert d.manager.metrics.reclaimed_base_kv_pages == 1
    assert d.lookup("A") == []
    assert live.base_pages.tolist() == [0]
    live.release()
    assert d.manager.metrics.reclaimed_base_kv_pages == 1


@pytest.fixture
def four_pools():
    pools, store = ResourcePools(ResourceDemand(1, 1, 1, 1)), CacheRecordStore()
    ids = pools.allocate(ResourceDemand(1, 1, 1, 1))
    cached_record(pools, store, 1, [0], spec=[0])
    cached_record(pools, store, 2, [], recurrent=0, partial=0)
    for id in ids:
        pools.release_active(id)
    return pools, store


@pytest.mark.parametrize(("protected", "victims"), [(None, (1, 2)), (1, (2, 1)), (2, (1, 2))])
def test_a_demand_over_several_pools_is_one_question(four_pools, protected, victims):
    """Scenario 51."""
    pools, store = four_pools
    plan = plan_eviction(ResourceDemand(1, 1, 1, 1), pools, store, protected)
    assert (plan.feasible, plan.victims) == (True, victims)


@pytest.mark.parametrize(
    ("demand", "victims"),
    [((1, 1, 0, 0), (1,)), ((0, 0, 1, 0), (1, 2)), ((0, 0, 0, 1), (1, 2)), ((0, 1, 0, 1), (1, 2)), ((0, 0, 0, 0), ())],
)
def test_only_the_pools_that_lack_something_decide(four_pools, demand, victims):
    pools, store = four_pools
    plan = plan_eviction(ResourceDemand(*demand), pools, store)
    assert (plan.feasible, plan.victims) == (True, victims)


@pytest.mark.parametrize("demand", [(2, 0, 0, 0), (1, 1, 1, 2)])
def test_a_demand_that_no_prefix_satisfies_has_no_victims(four_pools, demand):
    """Scenario 51, last sentence."""
    pools, store = four_pools
    plan = plan_eviction(ResourceDemand(*demand), pools, store)
    assert (plan.feasible, plan.victims) == (False, ())


def test_records_of_every_shape_can_be_evicted():
    manager = ContextCacheManager(ResourceDemand(1, 1, 1, 1), 4, max_records=16)
    ids = manager.pools.allocate(ResourceDemand(1, 1, 1, 1))
    cached_record(manager.pools, manager.records, 1, [0], spec=[0])
    manager.drafts.insert(manager.records.get(1))
    cached_record(manager.pools, manager.records, 2, [], recurrent=0, partial=0)
    for id in ids:
        manager.pools.release_active(id)
    manager.check_invariants()
    assert manager.evict_all() == 2
    assert set(manager.metrics.counters().values()) == {1, 2}
    assert all(manager.pools.free_count(type) == 1 for type in ResourceType)
    manager.check_invariants()


def test_an_infeasible_demand_walks_nothing(desk, monkeypatch):
    """Scenario 51b."""
    d = desk(4)
    live = d.lease("A")
    d.publish(live, "A")
    d.cache("B")
    d.cache("C")
    assert d.manager.pools.free_count(BASE) + d.manager.pools.reclaimable_count(BASE) == 3
    looked_at = []
    walk = CacheRecordStore.iterate_lru

    def watched(store):
        for record in walk(store):
            looked_at.append(record.id)
            yield record

    monkeypatch.setattr(CacheRecordStore, "iterate_lru", watched)
    assert not plan_eviction(ResourceDemand(4), d.manager.pools, d.manager.records).feasible
    assert looked_at == []
    assert plan_eviction(ResourceDemand(3), d.manager.pools, d.manager.records).victims == (1, 2, 3)
    assert looked_at == [1, 2, 3]
    looked_at.clear()
    assert plan_eviction(ResourceDemand(1), d.manager.pools, d.manager.records).victims == ()
    assert looked_at == []


def test_a_long_store_is_walked_only_as_far_as_needed(desk, monkeypatch):
    d = desk(500, max_records=None)
    for number in range(500):
        lease = d.lease("", 4, bypass=True)
        d.manager.publish(lease, [number.to_bytes(32, "big")], 4)
        lease.release()
    looked_at = count()
    walk = CacheRecordStore.iterate_lru

    def watched(store):
        for record in walk(store):
            next(looked_at)
            yield record

    monkeypatch.setattr(CacheRecordStore, "iterate_lru", watched)
    assert plan_eviction(ResourceDemand(3), d.manager.pools, d.manager.records).victims == (1, 2, 3)
    assert next(looked_at) == 3


def test_impossible_questions_are_refused(four_pools):
    pools, store = four_pools
    before = pools.dump(), store.dump()
    with pytest.raises(ContractViolation, match="negative counts"):
        plan_eviction(ResourceDemand(0, 0, -1), pools, store)
    with pytest.raises(ContractViolation, match="record 9 is not stored"):
        plan_eviction(ResourceDemand(1), pools, store, protected=9)
    assert (pools.dump(), store.dump()) == before


def test_a_record_without_its_cache_reference_is_an_invariant_violation(desk):
    """Page 0 loses its reference behind the manager's back: planning and committing notice, and change nothing."""
    d = desk(3)
    d.publish(d.lease("A"), "A")
    d.cache("B")
    d.cache("C")
    d.manager.pools.release_cache_many(BASE, [0])
    before = d.manager.dump()
    with pytest.raises(InvariantViolation, match="without holding a cache reference"):
        plan_eviction(ResourceDemand(2), d.manager.pools, d.manager.records)
    with pytest.raises(InvariantViolation, match="without holding a cache reference"):
        d.manager.evict_all()
    assert d.manager.dump() == before
    with pytest.raises(InvariantViolation):
        d.manager.check_invariants()


def test_a_counter_that_promises_too_much_is_an_invariant_violation(desk):
    d = desk(2)
    d.cache("A")
    lease = d.lease("B")
    d.manager.pools.pool(BASE).reclaimable = 2
    with pytest.raises(InvariantViolation, match="counted as reclaimable"):
        plan_eviction(ResourceDemand(2), d.manager.pools, d.manager.records)
    d.manager.pools.pool(BASE).reclaimable = 1
    d.manager.check_invariants()
    lease.release()


def plain_plan(demand, pools, store, protected):
    """The rule of 20.8, record by record."""
    fits = [pools.free_count(type) for type in ResourceType]
    order = [store.get(id) for id in store.lru_to_mru() if id != protected]
    if protected is not None:
        order.append(store.get(protected))
    if all(need <= free for need, free in zip(demand.counts, fits, strict=True)):
        return True, ()
    cache = {}
    for position, record in enumerate(order, start=1):
        for id in record.resources():
            cache[id] = cache.get(id, pools.cache_count(id)) - 1
            if cache[id] == 0 and pools.active_count(id) == 0:
                fits[id.type] += 1
        if all(need <= free for need, free in zip(demand.counts, fits, strict=True)):
            return True, tuple(each.id for each in order[:position])
    return False, ()


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_plans_equal_a_walk_record_by_record(seed, capacity, base_only):
    """Random records that share and repeat resources, random pins. Chunks, repeats within and across chunks, and the
    protected record would each show as another victim list."""
    rng = random.Random(seed)
    sizes = (capacity, 0, 0, 0) if base_only else (capacity, capacity, 3, 3)
    pools, store = ResourcePools(ResourceDemand(*sizes)), CacheRecordStore()
    ids = pools.allocate(ResourceDemand(*sizes))
    for number in range(rng.randint(0, 14)):
        base = [rng.randrange(capacity) for _ in range(rng.randint(1, 5))]
        if base_only:
            cached_record(pools, store, number, base)
        else:
            spec = [rng.randrange(capacity) for _ in base] if rng.random() < 0.5 else None
            recurrent = rng.randrange(3) if rng.random() < 0.5 else None
            partial = rng.randrange(3) if recurrent is not None and rng.random() < 0.5 else None
            cached_record(pools, store, number, base, spec, recurrent, partial)
    for id in ids:
        if rng.random() < 0.8:
            pools.release_active(id)
    before = pools.dump(), store.dump()
    for _ in range(8):
        demand = ResourceDemand(*(rng.randint(0, size) for size in sizes))
        protected = rng.choice(store.lru_to_mru()) if len(store) and rng.random() < 0.4 else None
        plan = plan_eviction(demand, pools, store, protected)
        assert (plan.feasible, plan.victims) == plain_plan(demand, pools, store, protected), f"seed {seed}"
        assert (pools.dump(), store.dump()) == before
        pools.check()
        if plan.base_pages is not None:
            assert plan.base_pages.tolist() == [page for each in plan.records for page in each.base_page_path]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_evicting_many_equals_evicting_one_by_one(seed):
    """Same counts, same index, same free order: a page joins the free list where its last reference goes."""
    rng = random.Random(seed)
    outcomes = []
    for together in (True, False):
        rng.seed(seed)
        manager = ContextCacheManager(ResourceDemand(9, 0, 2), 4, max_records=99)
        ids = manager.pools.allocate(ResourceDemand(9, 0, 2))
        for page in range(9):
            manager.index.insert(bytes([page]), page)
        for number in range(10):
            path = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
            cached_record(manager.pools, manager.records, number, path, recurrent=rng.choice([None, 0, 1]))
        for id in ids:
            if rng.random() < 0.8:
                manager.pools.release_active(id)
        victims = list(manager.records.iterate_lru())[: rng.randint(1, 10)]
        batches = [victims] if together else [[victim] for victim in victims]
        freed = [commit_eviction(batch, manager.pools, manager.index, manager.records) for batch in batches]
        outcomes.append((manager.dump(), [sum(counts) for counts in zip(*freed, strict=True)]))
        manager.pools.check()
    assert outcomes[0] == outcomes[1]
