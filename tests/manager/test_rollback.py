"""The strong guarantee: whichever internal step fails, everything is as before, and the call can be repeated.

Steps after the last one that can fail (the commit of an eviction, the pop of a free list) are plain assignments; they
are not failed here, everything before them is.
"""

import pytest

from context_cache.coordinator.manager import Lease, SpecStateIndex
from context_cache.coordinator.manager import books as books_module
from context_cache.coordinator.manager import manager as manager_module
from context_cache.coordinator.manager import publishing as publishing_module
from context_cache.coordinator.manager.books import Books
from context_cache.coordinator.manager.checkpoints import CheckpointIndex
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
    (manager_module, "refuse_unfit"),
    (Pool, "pin"),
    (books_module, "plan_eviction"),
    (Pool, "sole_owner_releases"),
    (Pool, "simulate_release"),
    (PageList, "__init__"),
    (books_module, "commit_eviction"),
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
    (books_module, "plan_eviction"),
    (PageList, "reserve"),
    (PageList, "reserve", {"after": 1}),
    (books_module, "commit_eviction"),
]


@pytest.mark.parametrize("step", GROW_STEPS, ids=lambda step: step[1])
def test_a_failing_step_of_growth_changes_nothing(desk, monkeypatch, step):
    d = desk(6)
    d.cache("AB")
    leases = [d.lease("", 4, bypass=True) for _ in range(2)]
    assert refused_then_repeated(monkeypatch, d, step, lambda: d.manager.grow_all(leases, [2, 1])) == ()
    assert [lease.page_count for lease in leases] == [3, 2]


PUBLISH_STEPS = [
    (publishing_module, "project_blocks"),
    (Books, "limit_victim"),
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
    "step", [(books_module, "commit_eviction"), (Pool, "check_cached")], ids=lambda step: step[1]
)
def test_a_failing_eviction_of_everything_changes_nothing(desk, monkeypatch, step):
    d = desk(4)
    d.cache("A")
    d.cache("BC")
    assert refused_then_repeated(monkeypatch, d, step, d.manager.evict_all) == 2


# Flavours with more than one pool ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        (manager_module, "refuse_unfit"),
        (Pool, "distinct"),
        (Pool, "pin"),
        (Pool, "pin", {"after": 1}),
        (books_module, "plan_eviction"),
        (PageList, "__init__"),
        (PageList, "__init__", {"after": 1}),
        (books_module, "commit_eviction"),
        (Pool, "check_cached"),
        (SpecStateIndex, "check_listed"),
    ],
    ids=lambda step: step[1] + (" again" if len(step) > 2 else ""),
)
def test_a_failing_step_of_a_paired_acquire_changes_nothing(desk, monkeypatch, step):
    d = desk(4, 4)
    d.cache_paired("AB")
    d.cache_paired("C")
    plan = d.plan_spec("AB", 9)
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.manager.acquire(plan))
    assert result.lease.draft_pages.tolist() == [0, 3, 2]
    assert d.lru == [1]


@pytest.mark.parametrize("after", range(4))
def test_a_failing_pin_of_an_mtp_acquire_changes_nothing(desk, monkeypatch, after):
    """Base pages, draft pages, recurrent slot, partial slot."""
    d = desk(8, 8, 2, 2)
    d.cache_at("AB", 6, mtp=True)
    plan = d.plan_hybrid("ABC", 12, mtp=True)
    result = refused_then_repeated(
        monkeypatch, d, (Pool, "pin", {"after": after}), lambda: d.manager.acquire(plan)
    )  # fmt: skip
    assert (result.lease.recurrent_slot, result.lease.partial_slot) == (0, 0)


@pytest.mark.parametrize("after", [0, 1])
def test_a_failing_allocation_from_two_pools_changes_nothing(desk, monkeypatch, after):
    d = desk(4, 4, 2, 2)
    plan = d.plan_spec("AB", 9)
    step = (Pool, "peek", {"after": after})
    lease = refused_then_repeated(monkeypatch, d, step, lambda: d.manager.acquire(plan)).lease
    assert lease.draft_page_count == 3
    assert refused_then_repeated(monkeypatch, d, step, lambda: d.manager.grow_spec(lease, 1, 1))
    with d.hybrid("", 0) as hybrid:
        assert refused_then_repeated(monkeypatch, d, step, lambda: d.manager.reserve_snapshots(hybrid, True))


@pytest.mark.parametrize(
    "step",
    [
        (books_module, "plan_eviction"),
        (PageList, "reserve"),
        (PageList, "reserve", {"after": 1}),
        (PageList, "reserve", {"after": 2}),
        (PageList, "reserve", {"after": 3}),
        (books_module, "commit_eviction"),
        (SpecStateIndex, "check_listed"),
    ],
    ids=lambda step: step[1] + (" again" if len(step) > 2 else ""),
)
def test_a_failing_step_of_paired_growth_changes_nothing(desk, monkeypatch, step):
    d = desk(5, 5)
    d.cache_paired("AB")
    leases = [d.spec("", 4, bypass=True) for _ in range(2)]
    grow = d.manager.grow_all
    assert refused_then_repeated(monkeypatch, d, step, lambda: grow(leases, [2, 1], [1, 2])) == ()
    assert [(lease.page_count, lease.draft_page_count) for lease in leases] == [(3, 2), (2, 3)]


PAIRED_STEPS = [
    (publishing_module, "project_blocks"),
    (Books, "limit_victim"),
    (Pool, "check_cached"),
    (SpecStateIndex, "check_listed"),
    (Pool, "add_cache"),
    (Pool, "add_cache", {"after": 1}),
    (BaseBlockIndex, "insert_new"),
    (BaseBlockIndex, "insert_new", {"half_done": lambda index, fresh, pages: index._page_of.update(fresh)}),
    (SpecStateIndex, "insert"),
    (SpecStateIndex, "insert", {"half_done": SpecStateIndex.insert}),
    (CacheRecordStore, "add"),
    (CacheRecordStore, "add", {"half_done": lambda store, record: store.checkpoints.key_of(record)}),
]


@pytest.mark.parametrize("step", PAIRED_STEPS, ids=lambda step: step[1] + str(step[2:] and list(step[2])))
def test_a_failing_step_of_a_paired_publication_changes_nothing(desk, monkeypatch, step):
    d = desk(6, 6, max_records=2)
    d.cache_paired("X")
    d.cache_paired("AB")
    lease = d.spec("ABC")
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.publish(lease, "ABC"))
    assert (result.record_id, d.lru) == (3, [2, 3])


UPGRADE_STEPS = [
    (Pool, "add_cache"),
    (SpecStateIndex, "insert"),
    (SpecStateIndex, "insert", {"half_done": SpecStateIndex.insert}),
    (CacheRecordStore, "set_spec_state"),
]


@pytest.mark.parametrize("step", UPGRADE_STEPS, ids=lambda step: step[1] + str(step[2:] and list(step[2])))
def test_a_failing_step_of_a_draft_upgrade_changes_nothing(desk, monkeypatch, step):
    """Weakness M5."""
    d = desk(6, 4)
    d.cache("AB")
    d.cache("X")
    lease = d.spec("AB")
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.publish(lease, "AB"))
    assert (result.record_id, d.draft_path(1), d.lru) == (1, [0, 1], [2, 1])


CHECKPOINT_STEPS = [
    *PAIRED_STEPS,
    (Pool, "add_cache", {"after": 2}),
    (Pool, "add_cache", {"after": 3}),
    (CheckpointIndex, "add"),
    (CheckpointIndex, "add", {"half_done": CheckpointIndex.add}),
]


@pytest.mark.parametrize("step", CHECKPOINT_STEPS, ids=lambda step: step[1] + str(step[2:] and list(step[2])))
def test_a_failing_step_of_a_checkpoint_publication_changes_nothing(desk, monkeypatch, step):
    d = desk(8, 8, 3, 3, max_records=2)
    d.cache_at("X", 5, mtp=True)
    d.cache_at("AB", 6, mtp=True)
    lease = d.hybrid("ABC", 11, mtp=True)
    reservation = d.reserve(lease, True)
    result = refused_then_repeated(monkeypatch, d, step, lambda: d.publish_at(lease, "ABC", 11, reservation))
    assert (result.record_id, d.lru) == (3, [2, 3])


@pytest.mark.parametrize("step", [(Pool, "check_pinned", {"after": n}) for n in range(4)] + [(Pool, "unpin")])
def test_a_failing_release_of_several_pools_keeps_the_lease(desk, monkeypatch, step):
    d = desk(8, 8, 3, 3)
    d.cache_at("AB", 6, mtp=True)
    lease = d.hybrid("AB", 9, mtp=True)
    d.reserve(lease, True)
    refused_then_repeated(monkeypatch, d, step, lease.release)
    assert lease.released


@pytest.mark.parametrize("step", [(Pool, "check_pinned"), (Pool, "check_pinned", {"after": 1}), (Pool, "unpin")])
def test_a_failing_release_of_snapshots_changes_nothing(desk, monkeypatch, step):
    d = desk(8, 8, 3, 3)
    d.cache_at("AB", 6, mtp=True)
    lease = d.hybrid("AB", 9, mtp=True)
    reservation = d.reserve(lease, True)
    refused_then_repeated(monkeypatch, d, step, lambda: d.manager.release_restored_snapshots(lease))
    refused_then_repeated(monkeypatch, d, step, lambda: d.manager.retire_reservation(lease, reservation))
    assert (lease.recurrent_slot, lease.reservations) == (None, ())


@pytest.mark.parametrize("step", [(books_module, "plan_eviction"), (books_module, "commit_eviction")])
def test_a_failing_step_of_a_reservation_changes_nothing(desk, monkeypatch, step):
    d = desk(8, 0, 1, 1)
    d.cache_at("A", 6)
    lease = d.hybrid("X", 4)
    refused_then_repeated(monkeypatch, d, step, lambda: d.manager.reserve_snapshots(lease, True))
    assert d.lru == []
