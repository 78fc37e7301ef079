"""The strong guarantee: whichever internal step fails, everything is as before, and the call can be repeated.

Steps after the last one that can fail (the commit of an eviction, the pop of a free list) are plain assignments; they
are not failed here, everything before them is.
"""

import pytest

from context_cache.coordinator.manager import ContextCacheManager, Lease
from context_cache.coordinator.manager import manager as manager_module
from context_cache.coordinator.manager.index import BaseBlockIndex
from context_cache.coordinator.manager.lease import PageList
from context_cache.coordinator.manager.pools import Pool
from context_cache.coordinator.manager.records import CacheRecordStore


class StepFailed(Exception):
    """Not one of the library's errors: nothing may catch it."""


def fail(monkeypatch, owner, name, *, after=0, half_done=None):
    """Let ``owner.name`` raise at its call number ``after``; ``half_done`` first does a part of its work."""
    real, calls = getattr(owner, name), []

    def failing(*arguments, **more):
        calls.append(name)
        if len(calls) > after:
            if half_done is not None:
                half_done(*arguments, **more)
            raise StepFailed(name)
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, failing)
    return calls


def refused_then_repeated(monkeypatch, d, step, call):
    before = d.manager.dump()
    with monkeypatch.context() as patch:
        calls = fail(patch, *step[:2], **(step[2] if len(step) > 2 else {}))
        with pytest.raises(StepFailed):
            call()
        assert calls, "the step was never reached"
    assert d.manager.dump() == before
    d.manager.check_invariants()
    result = call()
    d.manager.check_invariants()
    return result


ACQUIRE_STEPS = [
    (ContextCacheManager, "_refuse_unfit"),
    (Pool, "pin"),
    (manager_module, "plan_eviction"),
    (Pool, "sole_owner_releases"),
    (Pool, "simulate_release"),
    (PageList, "__init__"),
    (PageList, "append"),
    (manager_module, "commit_eviction"),
    (Pool, "check_cached"),
]


@pytest.mark.parametrize("step", ACQUIRE_STEPS, ids=lambda step: step[1])
def test_a_failing_step_of_acquire_changes_nothing(desk, monkeypatch, step):
    """The hit pins page 0, and two records have to go; the first walk falls one short because of the shared page."""
    d = desk(5, 2)
    d.cache("AB")
    d.cache("ABC")
    d.cache("DE")
    plan = d.plan("A", 16)
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.manager.acquire(plan))
    assert result.lease.base_pages.tolist()[0] == 0
    assert d.manager.metrics.evicted_records >= 2


def test_a_failing_allocation_without_eviction_changes_nothing(desk, monkeypatch):
    d = desk(4)
    d.cache("A")
    plan = d.plan("A", 9)
    refused_then_repeated(monkeypatch, d, (Pool, "take"), lambda: d.manager.acquire(plan))


GROW_STEPS = [
    (manager_module, "plan_eviction"),
    (PageList, "reserve"),
    (PageList, "reserve", {"after": 1}),
    (manager_module, "commit_eviction"),
]


@pytest.mark.parametrize("step", GROW_STEPS, ids=lambda step: step[1])
def test_a_failing_step_of_growth_changes_nothing(desk, monkeypatch, step):
    d = desk(6)
    d.cache("AB")
    leases = [d.lease("", 4, bypass=True) for _ in range(2)]
    assert refused_then_repeated(monkeypatch, d, step, lambda: d.manager.grow_all(leases, [2, 1])) == ()
    assert [lease.page_count for lease in leases] == [3, 2]


PUBLISH_STEPS = [
    (manager_module, "project_blocks"),
    (ContextCacheManager, "_limit_victim"),
    (Pool, "check_cached"),
    (Pool, "add_cache"),
    (BaseBlockIndex, "insert_new"),
    (BaseBlockIndex, "insert_new", {"half_done": lambda index, fresh, pages: index._page_of.update(fresh)}),
    (CacheRecordStore, "add"),
]


@pytest.mark.parametrize("step", PUBLISH_STEPS, ids=lambda step: step[1] + (" half done" if len(step) > 2 else ""))
def test_a_failing_step_of_publication_changes_nothing(desk, monkeypatch, step):
    """One canonical page, two fresh ones, and a victim of the record limit."""
    d = desk(5, max_records=2)
    d.cache("X")
    d.cache("A")
    lease = d.lease("ABC")
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.publish(lease, "ABC"))
    assert result.record_id == 3
    assert d.lru == [2, 3]
    assert d.lookup("ABC") == [1, 2, 3]


def test_a_failing_touch_of_a_publication_changes_nothing(desk, monkeypatch):
    d = desk(4)
    d.cache("A")
    d.cache("B")
    lease = d.lease("A")
    refused_then_repeated(monkeypatch, d, (CacheRecordStore, "touch"), lambda: d.publish(lease, "A"))
    assert d.lru == [2, 1]


def test_a_failing_release_keeps_the_lease(desk, monkeypatch):
    d = desk(4)
    lease = d.lease("A")
    refused_then_repeated(monkeypatch, d, (Pool, "unpin"), lease.release)
    assert isinstance(lease, Lease)
    assert lease.released


@pytest.mark.parametrize(
    "step", [(manager_module, "commit_eviction"), (Pool, "check_cached")], ids=lambda step: step[1]
)
def test_a_failing_eviction_of_everything_changes_nothing(desk, monkeypatch, step):
    d = desk(4)
    d.cache("A")
    d.cache("BC")
    assert refused_then_repeated(monkeypatch, d, step, d.manager.evict_all) == 2
