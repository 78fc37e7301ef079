"""Records: which are valid, how they are found, and in which order they age."""

import attrs
import numpy as np
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import (
    CacheRecord,
    CacheRecordKey,
    CacheRecordStore,
    RecordFlavour,
    ResourceId,
    ResourceType,
)

A, B, C, D = (letter * 32 for letter in (b"A", b"B", b"C", b"d"))


def record(hashes, base, **more):
    key = more.pop("key", None) or CacheRecordKey(hashes[-1] if hashes else D, len(hashes))
    return CacheRecord(0, key, hashes, base, **more)


def store_of(*records):
    store = CacheRecordStore()
    for each in records:
        store.insert(each)
    return store


def test_a_duplicate_key_refreshes_the_stored_record():
    """Scenario 9."""
    store = store_of(record([A, B], [0, 1]), record([C], [2]))
    assert store.insert(record([A, B], [4, 5])) == (1, False)
    assert store.lru_to_mru() == [2, 1]
    assert store.get(1).base_page_path.tolist() == [0, 1]
    assert len(store) == 2


def test_ids_are_never_used_again():
    """Scenario 10."""
    store = store_of(record([A], [0]))
    erased = store.erase(1)
    assert erased.id == 1
    assert not store.contains(1)
    assert store.find(erased.key) is None
    assert store.insert(erased) == (2, True)
    assert store.get(2).id == 2


def test_reading_does_not_refresh_and_touching_does():
    store = store_of(record([A], [0]), record([B], [1]), record([C], [2]))
    found = store.find(CacheRecordKey(A, 1))
    assert found is store.get(1)
    assert store.contains(1)
    assert store.oldest() is found
    assert store.lru_to_mru() == [1, 2, 3]
    store.touch(1)
    assert store.lru_to_mru() == [each.id for each in store.iterate_lru()] == [2, 3, 1]


@pytest.mark.parametrize("name", ["get", "touch", "erase"])
def test_an_unknown_id_is_refused(name):
    store = store_of(record([A], [0]))
    before = store.dump()
    with pytest.raises(ContractViolation, match="record 7 is not stored"):
        getattr(store, name)(7)
    assert store.dump() == before


def test_flavours_do_not_shadow_each_other():
    """Scenario 108, the keys alone."""
    mtp = CacheRecordKey(A, 1, RecordFlavour.MTP)
    store = store_of(record([A], [0]))
    assert store.insert(record([A], [1], key=mtp)) == (2, True)
    assert store.find(CacheRecordKey(A, 1)).id == 1
    assert store.find(mtp).id == 2


def test_resources_are_listed_in_pool_order():
    full = record([A, B], [4, 3], spec_page_path=[7, 6], recurrent_slot=2, partial_slot=1, exact_checkpoint_length=9)
    assert [(id.type, id.index) for id in full.resources()] == [(0, 4), (0, 3), (1, 7), (1, 6), (2, 2), (3, 1)]
    assert record([A], [4]).resources() == (ResourceId(ResourceType.BASE_KV_PAGE, 4),)


def test_a_record_is_a_value_and_its_paths_are_read_only():
    one, two = record([A, B], (0, 1)), record([A, B], np.array([0, 1]))
    assert one == two
    assert hash(one) == hash(two)
    assert one.base_page_path.dtype == np.int32
    assert one.spec_page_path is None
    assert "[0, 1]" in repr(one)
    with pytest.raises(ValueError, match="read-only"):
        one.base_page_path[0] = 5
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.id = 5


LEGAL = {
    "plain": record([A], [0]),
    "paired": record([A], [0], spec_page_path=[3]),
    "checkpoint": record([A], [0], recurrent_slot=0, partial_slot=0, exact_checkpoint_length=6),
    "checkpoint within the first block": record([], [], recurrent_slot=0, partial_slot=0, exact_checkpoint_length=3),
    "checkpoint without attention": record([A], [], recurrent_slot=0, exact_checkpoint_length=6),
    "short MTP checkpoint, empty draft path": record(
        [], [], spec_page_path=[], recurrent_slot=0, partial_slot=0, exact_checkpoint_length=4
    ),
    "checkpoint keyed by its exact digest": record(
        [A], [0], key=CacheRecordKey(D, 1), recurrent_slot=0, partial_slot=0, exact_checkpoint_length=6
    ),
}
ILLEGAL = {
    "a negative block count": record([], [], key=CacheRecordKey(A, -1), recurrent_slot=0, exact_checkpoint_length=1),
    "another number of hashes": record([A], [0], key=CacheRecordKey(A, 2)),
    "no block and no checkpoint": record([], []),
    "a key that is not the last hash": record([A, B], [0, 1], key=CacheRecordKey(A, 2)),
    "a checkpoint of length 0": record([A], [0], recurrent_slot=0, exact_checkpoint_length=0),
    "a checkpoint without recurrent state": record([A], [0], partial_slot=0, exact_checkpoint_length=6),
    "a short base path": record([A, B], [0]),
    "an empty base path without a checkpoint": record([A], []),
    "a short checkpoint base path": record([A, B], [0], recurrent_slot=0, exact_checkpoint_length=9),
    "an unpaired draft path": record([A, B], [0, 1], spec_page_path=[0]),
    "an empty draft path beside base pages": record([A], [0], spec_page_path=[]),
    "a draft path without base pages": record([A], [], spec_page_path=[0], recurrent_slot=0, exact_checkpoint_length=6),
    "a negative base page": record([A], [-1]),
    "a negative draft page": record([A], [0], spec_page_path=[-1]),
    "a negative recurrent slot": record([A], [0], recurrent_slot=-1),
    "a negative partial slot": record([A], [0], partial_slot=-1),
}


@pytest.mark.parametrize("each", LEGAL.values(), ids=LEGAL.keys())
def test_every_legal_shape_can_be_stored_and_erased(each):
    store = CacheRecordStore()
    assert store.insert(each) == (1, True)
    store.check()
    assert store.erase(1) == attrs.evolve(each, id=1)
    assert len(store) == 0


@pytest.mark.parametrize("each", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_record_is_refused_and_the_store_unchanged(each):
    store = store_of(record([C], [2]))
    before = store.dump()
    with pytest.raises(ContractViolation, match="is invalid"):
        store.insert(each)
    assert store.dump() == before
    assert store.next_id == 2


@pytest.mark.parametrize("path", [[2**31], ["x"], [None]])
def test_a_path_that_is_no_list_of_page_ids_is_refused(path):
    with pytest.raises(ContractViolation, match="flat list of 32-bit page ids"):
        record([A], path)


def test_a_corrupted_store_is_noticed():
    store = store_of(record([A], [0]))
    store._id_of.clear()
    with pytest.raises(InvariantViolation, match="maps of the record store disagree"):
        store.check()
