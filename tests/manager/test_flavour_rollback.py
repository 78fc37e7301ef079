"""No memory and interrupts at the last steps of a transaction: between what was drawn and what will own it."""

from __future__ import annotations

import logging

import pytest

from context_cache.coordinator.manager import ResourceType, SnapshotReservation
from context_cache.coordinator.manager import manager as manager_module
from context_cache.coordinator.manager import snapshots as snapshots_module
from context_cache.coordinator.manager.lease import Lease

RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT
ERRORS = [MemoryError, KeyboardInterrupt]


def unordered(dump):
    """A dump in which free lists are sorted: what was drawn and given back is free again, perhaps at another place."""

    def plain(value):
        if isinstance(value, dict):
            return {key: sorted(item) if key == "free" else plain(item) for key, item in value.items()}
        return value

    return plain(dump)


class Raising(dict):
    """A dict in which the next assignment raises, before it has stored anything."""

    error: type[BaseException] | None = None

    def __setitem__(self, key, value):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().__setitem__(key, value)


def refused(d, error, call):
    """The call raises and nothing has changed, but for the order of free lists."""
    before = unordered(d.manager.dump())
    with pytest.raises(error):
        call()
    assert unordered(d.manager.dump()) == before
    d.manager.check_invariants()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("needs_partial", [True, False], ids=["with a partial slot", "recurrent alone"])
@pytest.mark.parametrize("mtp", [False, True], ids=["hybrid", "hybrid-mtp"])
def test_a_reservation_that_cannot_be_made_draws_nothing(desk, monkeypatch, mtp, needs_partial, error):
    d = desk(8, 8, 3, 3)
    d.cache_at("A", 6, mtp=mtp)
    lease = d.hybrid("AB", 9, mtp=mtp)
    first = d.reserve(lease, True)

    def raising(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module, "SnapshotReservation", raising)
        refused(d, error, lambda: d.manager.reserve_snapshots(lease, needs_partial))
    assert lease.reservations == (first,)
    second = d.reserve(lease, needs_partial)
    assert second == SnapshotReservation(2, 2 if needs_partial else None)
    d.manager.check_invariants()
    lease.release()
    assert d.manager.evict_all() == 1
    assert sorted(d.free_of(RECURRENT)) == sorted(d.free_of(PARTIAL)) == [0, 1, 2]


@pytest.mark.parametrize("error", ERRORS)
def test_a_reservation_without_pages_that_cannot_be_made_draws_nothing(desk, monkeypatch, error):
    d = desk(0, 0, 2)
    lease = d.hybrid("", 3, attention=False)

    def raising(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module, "SnapshotReservation", raising)
        refused(d, error, lambda: d.manager.reserve_snapshots(lease, False))
    assert sorted(d.free_of(RECURRENT)) == [0, 1]
    assert d.reserve(lease, False).partial_slot is None
    d.manager.check_invariants()


def plans(d):
    """One plan of every mode, each with a hit where its mode has one."""
    d.cache("AB")
    d.cache_paired("CD")
    d.cache_at("EF", 6)
    d.cache_at("GH", 6, mtp=True)
    return {
        "vanilla": d.plan("AB", 12),
        "spec": d.plan_spec("CD", 12),
        "hybrid": d.plan_hybrid("EF", 9),
        "hybrid-mtp": d.plan_hybrid("GH", 9, mtp=True),
    }


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["lease", "lease, half done", "list of leases"])
@pytest.mark.parametrize("mode", ["vanilla", "spec", "hybrid", "hybrid-mtp"])
def test_a_lease_that_cannot_be_made_pins_nothing(desk, monkeypatch, caplog, mode, place, error):
    d = desk(16, 16, 4, 4)
    plan = plans(d)[mode]
    real = Lease.__init__

    def raising(*arguments):
        raise error

    def half_done(*arguments):
        real(*arguments)
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        if place == "lease":
            patch.setattr(manager_module, "Lease", raising)
        elif place == "lease, half done":
            patch.setattr(Lease, "__init__", half_done)
        else:
            d.manager.books.held = Raising(d.manager.books.held)
            d.manager.books.held.error = error
        refused(d, error, lambda: d.manager.acquire(plan))
    lease = d.manager.acquire(plan).lease
    assert lease is not None
    assert lease.shared_page_count == len(plan.base_pages) > 0
    d.manager.check_invariants()
    lease.release()
    d.manager.evict_all()
    d.manager.check_invariants()
    for type in ResourceType:
        assert sorted(d.free_of(type)) == list(range(d.manager.pools.capacity(type)))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("map", ["by key", "by block"])
@pytest.mark.parametrize("known", ["nothing", "another block", "another length", "another flavour"])
@pytest.mark.parametrize("mtp", [False, True], ids=["hybrid", "hybrid-mtp"])
def test_a_checkpoint_whose_indexing_is_interrupted_is_not_published(desk, mtp, known, map, error):
    d = desk(16, 16, 5, 5)
    if known == "another block":
        d.cache_at("X", 6, mtp=mtp)
    elif known == "another length":
        d.cache_at("AB", 6, mtp=mtp)
    elif known == "another flavour":
        d.cache_at("AB", 7, mtp=not mtp)
    lease = d.hybrid("AB", 7, mtp=mtp, bypass=True)
    reservation = d.reserve(lease, True)
    index = d.manager.records.checkpoints
    if map == "by key":
        index._id_of = dangerous = Raising(index._id_of)
    else:
        index._behind = dangerous = Raising(index._behind)
        index.behind = dangerous.get
    dangerous.error = error
    records = d.lru
    refused(d, error, lambda: d.publish_at(lease, "AB", 7, reservation))
    assert dangerous.error is None, "the map was written to"
    assert d.lru == records
    index.check(d.manager.records.get(id) for id in records)
    result = d.publish_at(lease, "AB", 7, reservation)
    assert d.lru == [*records, result.record_id]
    d.manager.retire_reservation(lease, reservation)
    lease.release()
    assert d.hybrid("AB", 9, mtp=mtp).plan.protected_record == result.record_id
    d.manager.evict_all()
    d.manager.check_invariants()
    assert index.dump() == {"ids": {}, "lengths": {}}
