"""Draft paths: a match names one record and uses its whole path."""

import attrs
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import CacheRecord, CacheRecordKey, SpecStateIndex

A, B, C, X = (letter * 32 for letter in (b"A", b"B", b"C", b"X"))


def paired(id, hashes, draft):
    return CacheRecord(id, CacheRecordKey(hashes[-1], len(hashes)), hashes, range(len(hashes)), draft)


@pytest.fixture
def index():
    index = SpecStateIndex()
    index.insert(paired(1, [A, B], [0, 1]))
    index.insert(paired(2, [A, C], [2, 3]))
    return index


def test_a_lookup_names_one_coherent_path(index):
    """Scenario 7. The newest record with the boundary wins; paths are never mixed."""
    assert index.lookup_longest([A, C], 2) == (2, 2)
    assert index.lookup_longest([A, X], 2) == (2, 1)
    assert index.lookup_longest([A, B], 2) == (1, 2)
    assert index.lookup_longest([A, B], 1) == (2, 1)
    assert index.lookup_longest([X, A], 2) is None
    assert index.lookup_longest([A], 0) is None


def test_repeated_hashes_are_distinct_boundaries():
    """Scenario 8."""
    index = SpecStateIndex()
    index.insert(paired(1, [A, A], [4, 5]))
    assert index.lookup_longest([A, A], 2) == (1, 2)
    assert index.lookup_longest([A, A], 1) == (1, 1)
    assert len(index) == 2


def test_erasing_removes_exactly_the_entries_of_one_record(index):
    index.erase(paired(2, [A, C], [2, 3]))
    assert index.dump() == {(A, 1): [1], (B, 2): [1]}
    assert index.lookup_longest([A, C], 2) == (1, 1)
    index.erase(paired(1, [A, B], [0, 1]))
    assert index.dump() == {}
    index.erase(paired(3, [A], None))


def test_erasing_what_is_not_there_is_an_invariant_violation(index):
    before = index.dump()
    for record in (paired(3, [A, B], [0, 1]), paired(1, [A, X], [0, 1])):
        with pytest.raises(InvariantViolation, match="missing in the draft index"):
            index.erase(record)
    assert index.dump() == before


@pytest.mark.parametrize(
    "record",
    [
        paired(0, [A], [0]),
        paired(3, [A], None),
        paired(3, [A, B], [0]),
        attrs.evolve(paired(3, [A, B], [0, 1]), key=CacheRecordKey(B, 3)),
        paired(1, [A, B], [0, 1]),
        paired(1, [C, B], [0, 1]),
    ],
)
def test_impossible_records_are_refused(index, record):
    before = index.dump()
    with pytest.raises(ContractViolation, match="the draft index"):
        index.insert(record)
    assert index.dump() == before


@pytest.mark.parametrize("count", [-1, 3])
def test_a_lookup_beyond_its_hashes_is_refused(index, count):
    with pytest.raises(ContractViolation, match="at most one block per hash"):
        index.lookup_longest([A, B], count)


def test_an_empty_draft_path_has_no_boundary():
    index = SpecStateIndex()
    record = CacheRecord(1, CacheRecordKey(X, 0), [], [], [], 0, 0, 4)
    index.insert(record)
    assert len(index) == 0
    index.erase(record)


def test_the_check_compares_with_the_records(index):
    records = [paired(1, [A, B], [0, 1]), paired(2, [A, C], [2, 3])]
    index.check(records)
    for wrong in (records[:1], [*records, paired(3, [X], [4])]):
        with pytest.raises(InvariantViolation, match="not what the records say"):
            index.check(wrong)
