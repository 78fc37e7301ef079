"""Leases with snapshots: reserve, restore, publish, evict."""

import pytest

from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.manager import (
    AcquireStatus,
    CacheRecordKey,
    HybridCheckpointKey,
    PublicationStatus,
    RecordFlavour,
    ResourceType,
    SnapshotReservation,
)

BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE
RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT


def test_a_checkpoint_is_published_and_used(desk):
    """Scenario 46."""
    d = desk(4, 0, 2, 2)
    lease = d.hybrid("A", 6)
    assert lease.base_pages.tolist() == [0, 1]
    reservation = d.reserve(lease, True)
    assert reservation == SnapshotReservation(0, 0)
    assert lease.reservations == (reservation,)
    result = d.publish_at(lease, "A", 6, reservation)
    assert (result.status, result.record_id, result.block_count) == (PublicationStatus.PUBLISHED, 1, 1)
    record = d.manager.records.get(1)
    assert record.key == CacheRecordKey(d.exact("A", 6), 1)
    assert (d.path(1), record.recurrent_slot, record.partial_slot, record.exact_checkpoint_length) == ([0], 0, 0, 6)
    lease.release()
    consumer = d.hybrid("AB", 10)
    assert consumer.plan.reuse_token_length == 6
    assert consumer.base_pages.tolist() == [0, 2, 3]
    assert (consumer.recurrent_slot, consumer.partial_slot) == (0, 0)
    assert (d.counts(RECURRENT, "active"), d.counts(PARTIAL, "active")) == ({0: 1}, {0: 1})
    d.manager.check_invariants()


def test_a_checkpoint_adopts_canonical_pages(desk):
    """Scenario 47."""
    d = desk(5, 0, 2)
    d.cache("A")
    lease = d.hybrid("AB", 8, bypass=True)
    assert lease.base_pages.tolist() == [1, 2]
    result = d.publish_at(lease, "AB", 8)
    assert result.base_pages.tolist() == d.path(2) == [0, 2]
    assert d.counts(BASE, "cache") == {0: 2, 2: 1}
    assert lease.base_pages.tolist() == [1, 2]


def test_pure_recurrent_checkpoints_have_no_pages(desk):
    """Scenario 48."""
    d = desk(0, 0, 2)
    lease = d.hybrid("", 3, attention=False)
    assert (lease.page_count, lease.has_attention) == (0, False)
    reservation = d.reserve(lease, False)
    assert reservation == SnapshotReservation(0)
    d.publish_at(lease, "", 3, reservation)
    lease.release()
    consumer = d.hybrid("A", 5, attention=False)
    assert (consumer.plan.reuse_token_length, consumer.page_count, consumer.recurrent_slot) == (3, 0, 0)
    d.manager.check_invariants()
    assert not d.manager.grow_base(consumer, 1)
    with pytest.raises(ContractViolation, match="no attention layers"):
        d.manager.reserve_snapshots(consumer, True)


def test_each_publication_demands_its_own_mode(desk):
    """Scenario 49."""
    d = desk(16, 16, 4, 4)
    leases = {"vanilla": d.lease("A"), "spec": d.spec("A")}
    leases |= {"hybrid": d.hybrid("A", 4), "mtp": d.hybrid("A", 4, mtp=True)}
    slots = {name: d.reserve(leases[name], True) for name in ("hybrid", "mtp")}
    before, m = d.manager.dump(), d.manager
    (a,) = d.hashes("A")
    for name, lease in leases.items():
        calls = []
        if name in ("hybrid", "mtp"):
            calls.append(lambda lease=lease: m.publish(lease, [a], 4))
        else:
            calls += [lambda lease=lease: m.reserve_snapshots(lease, False)]
            calls += [lambda lease=lease: m.release_restored_snapshots(lease)]
            calls += [lambda lease=lease: m.retire_reservation(lease, slots["hybrid"])]
        own = slots.get(name, slots["hybrid"])
        if name != "hybrid":
            calls.append(lambda lease=lease, own=own: m.publish_hybrid(lease, [a], a, 4, own))
        if name != "mtp":
            calls.append(lambda lease=lease, own=own: m.publish_hybrid_mtp(lease, [], a, 4, own))
        for call in calls:
            with pytest.raises(ContractViolation, match="no such operation"):
                call()
    assert d.manager.dump() == before


def test_an_mtp_prompt_of_one_page_keeps_no_block(desk):
    """Scenario 107, the manager's part: the draft path is empty and legal."""
    d = desk(6, 6, 2, 2)
    lease = d.hybrid("A", 4, mtp=True)
    reservation = d.reserve(lease, True)
    result = d.publish_at(lease, "A", 4, reservation)
    assert (result.status, result.block_count, d.path(1), d.draft_path(1)) == (PublicationStatus.PUBLISHED, 0, [], [])
    d.manager.check_invariants()
    lease.release()
    consumer = d.hybrid("A", 5, mtp=True)
    assert (consumer.plan.reuse_token_length, consumer.shared_page_count) == (4, 0)
    assert (consumer.page_count, consumer.draft_page_count) == (2, 2)
    assert d.manager.evict_all() == 1
    d.manager.check_invariants()


@pytest.mark.parametrize("length", [8, 5])
def test_plain_and_mtp_checkpoints_do_not_shadow_each_other(desk, length):
    """Scenario 108, the manager's part. For 5 tokens both keep one block, so both keys need the flavour."""
    d = desk(12, 12, 4, 4)
    d.cache_at("AB", length)
    result = d.cache_at("AB", length, mtp=True)
    assert (result.status, result.record_id) == (PublicationStatus.PUBLISHED, 2)
    plain, mtp = (d.manager.records.find_hybrid(d.exact("AB", length), length, flavour) for flavour in RecordFlavour)
    assert (plain.id, mtp.id) == (1, 2)
    assert HybridCheckpointKey(d.exact("AB", length), length, RecordFlavour.MTP) == (d.exact("AB", length), length, 1)
    assert d.hybrid("ABC", 9, mtp=True).plan.protected_record == 2
    assert d.cache_at("AB", length, mtp=True).status is PublicationStatus.EXISTING_RECORD
    assert d.cache_at("AB", length).status is PublicationStatus.EXISTING_RECORD
    d.manager.check_invariants()


def test_an_existing_checkpoint_is_touched_and_the_slots_come_back(desk):
    d = desk(8, 0, 3, 3)
    d.cache_at("A", 6)
    d.cache_at("A", 5)
    with d.hybrid("A", 6) as lease:
        result = d.publish_at(lease, "A", 6)
    assert (result.status, result.record_id, d.lru) == (PublicationStatus.EXISTING_RECORD, 1, [2, 1])
    assert d.counts(RECURRENT, "active") == {}
    assert len(d.free_of(RECURRENT)) == 1


def test_a_base_record_under_the_same_key_answers_for_an_aligned_checkpoint(desk):
    """10.7: both are keyed by the last block's hash; the store never replaces."""
    d = desk(8, 0, 2)
    d.cache("AB")
    assert d.cache_at("AB", 8).status is PublicationStatus.EXISTING_RECORD
    assert d.lru == [1]
    d.manager.check_invariants()


def test_a_hit_protects_its_record_and_touches_it(desk):
    d = desk(3, 0, 2, 2)
    d.cache_at("A", 6)
    d.cache("X")
    assert d.lru == [1, 2]
    lease = d.hybrid("A", 9)
    assert d.lru == [1], "the other record went, although it is younger"
    assert lease.base_pages.tolist()[0] == 0


def test_reservations_evict_and_refuse(desk):
    """Scenario 101, the manager's part: slots that a hit pins cannot be reclaimed."""
    d = desk(8, 0, 1, 1)
    d.cache_at("A", 6)
    lease = d.hybrid("A", 7)
    before = d.manager.dump()
    assert d.manager.reserve_snapshots(lease, True) is None
    assert d.manager.reserve_snapshots(lease, False) is None
    assert d.manager.dump() == before
    d.manager.release_restored_snapshots(lease)
    assert (lease.recurrent_slot, lease.partial_slot) == (None, None)
    after = d.manager.dump()
    d.manager.release_restored_snapshots(lease)
    assert d.manager.dump() == after
    assert d.manager.reserve_snapshots(lease, True) == SnapshotReservation(0, 0)
    assert d.lru == []
    assert d.manager.metrics.reclaimed_recurrent_snapshots == 1
    assert lease.base_pages.tolist()[0] == 0
    d.manager.check_invariants()


def test_a_retired_reservation_leaves_what_the_record_references(desk):
    d = desk(8, 0, 2, 2)
    lease = d.hybrid("A", 6)
    kept, dropped = d.reserve(lease, True), d.reserve(lease, False)
    d.publish_at(lease, "A", 6, kept)
    for reservation in (kept, dropped):
        d.manager.retire_reservation(lease, reservation)
        d.manager.check_invariants()
    assert (d.free_of(RECURRENT), d.free_of(PARTIAL), lease.reservations) == ([1], [1], ())
    for reservation in (kept, SnapshotReservation(1, 1)):
        with pytest.raises(ContractViolation, match="has not retired"):
            d.manager.retire_reservation(lease, reservation)


def test_release_walks_the_hit_first_and_then_the_reservations_in_order(desk):
    d = desk(8, 8, 4, 4)
    d.cache_at("AB", 6, mtp=True)
    lease = d.hybrid("AB", 9, mtp=True)
    first, second = d.reserve(lease, True), d.reserve(lease, True)
    assert (first.recurrent_slot, second.recurrent_slot) == (1, 2)
    assert d.manager.grow_spec(lease, 1, 1)
    d.manager.evict_all()
    base, draft = lease.base_pages.tolist(), lease.draft_pages.tolist()
    free = {type: d.free_of(type) for type in ResourceType}
    lease.release()
    assert d.free_of(BASE) == free[BASE] + base
    assert d.free_of(DRAFT) == free[DRAFT] + draft
    assert d.free_of(RECURRENT) == d.free_of(PARTIAL) == [3, 0, 1, 2]
    assert (lease.recurrent_slot, lease.reservations, lease.draft_page_count) == (None, (), 0)
    d.manager.check_invariants()


def test_bounds_of_a_checkpoint(desk):
    """Every refusal of 20.7, and nothing changes."""
    d = desk(8, 8, 4, 4)
    plain, mtp = d.hybrid("AB", 6), d.hybrid("AB", 8, mtp=True)
    with_partial, without, pair = d.reserve(plain, True), d.reserve(plain, False), d.reserve(mtp, True)
    lone = d.reserve(mtp, False)
    before, m = d.manager.dump(), d.manager
    a, b, c = d.hashes("ABC")
    for call, words in (
        (lambda: m.publish_hybrid(plain, [], b"", 0, without), "length of 1 or more"),
        (lambda: m.publish_hybrid(plain, [], b"", -4, without), "length of 1 or more"),
        (lambda: m.publish_hybrid(plain, [], b"d", 6, with_partial), "one hash per kept block"),
        (lambda: m.publish_hybrid(plain, [a, b], b"d", 6, with_partial), "one hash per kept block"),
        (lambda: m.publish_hybrid(plain, [a], b"d", 6, without), "reserve with a partial slot"),
        (lambda: m.publish_hybrid(plain, [a, b], b, 8, with_partial), "reserve without a partial slot"),
        (lambda: m.publish_hybrid(plain, [a, b, c], c, 12, without), "pages for 3 blocks"),
        (lambda: m.publish_hybrid(plain, [a], b"d", 6, pair), "has not retired"),
        (lambda: m.publish_hybrid_mtp(mtp, [a], b, 8, lone), "reserve with a partial slot"),
        (lambda: m.publish_hybrid_mtp(mtp, [a, b], b, 8, pair), "one hash per kept block"),
        (lambda: m.publish_hybrid_mtp(mtp, [a, b, c], b"d", 13, pair), "pages for 3 blocks"),
    ):
        with pytest.raises(ContractViolation, match=words):
            call()
    assert d.manager.dump() == before
    d.manager.publish_hybrid_mtp(mtp, [a], b, 8, pair)


def test_a_reservation_holds_one_checkpoint(desk):
    """Two records over one slot would both claim what the last copy left there."""
    d = desk(8, 0, 4, 4)
    lease = d.hybrid("AB", 8)
    reservation = d.reserve(lease, True)
    d.publish_at(lease, "AB", 5, reservation)
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="already hold another checkpoint"):
        d.publish_at(lease, "AB", 6, reservation)
    assert d.manager.dump() == before
    assert d.publish_at(lease, "AB", 5, reservation).status is PublicationStatus.EXISTING_RECORD


def test_a_checkpoint_of_another_prefix_than_the_hit_is_refused(desk):
    d = desk(8, 0, 4, 4)
    d.cache_at("A", 6)
    lease = d.hybrid("AB", 10)
    reservation = d.reserve(lease, True)
    before = d.manager.dump()
    with pytest.raises(ContractViolation, match="matched with"):
        d.publish_at(lease, "XB", 10, reservation)
    assert d.manager.dump() == before


def test_a_failed_acquire_drops_the_snapshot_pins(desk):
    d = desk(2, 0, 1, 1)
    d.cache_at("A", 6)
    before = d.manager.dump()
    assert d.manager.acquire(d.plan_hybrid("AXYZ", 16)).status is AcquireStatus.INSUFFICIENT_CAPACITY
    assert d.manager.dump() == before


@pytest.mark.parametrize("max_records", [1, 0])
def test_the_record_limit_covers_checkpoints(desk, max_records):
    d = desk(8, 8, 3, 3, max_records=max_records)
    d.cache_at("A", 6, mtp=True)
    result = d.cache_at("AB", 9, mtp=True)
    assert result.record_id == (2 if max_records else None)
    assert d.lru == [2][:max_records]
    assert len(d.free_of(RECURRENT)) == 3 - max_records
    d.manager.check_invariants()


def test_a_lost_lease_keeps_its_snapshots(desk):
    d = desk(8, 0, 4, 4)
    d.cache_at("A", 6)
    lease = d.hybrid("A", 7)
    d.reserve(lease, True)
    del lease
    assert d.counts(RECURRENT, "active") == {0: 1, 1: 1}
    d.manager.check_invariants()
