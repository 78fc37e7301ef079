"""The block index: longest prefix, first committer wins, one-to-one."""

import numpy as np
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.manager import BaseBlockIndex

A, B, C = (letter * 32 for letter in (b"A", b"B", b"C"))


def index_of(**pages):
    index = BaseBlockIndex(8)
    for letter, page in pages.items():
        index.insert(letter.encode() * 32, page)
    return index


def test_a_prefix_lookup_stops_at_the_first_hole_and_changes_nothing():
    """Scenario 5."""
    index = index_of(A=0, C=2)
    before = index.dump()
    for _ in range(3):
        assert index.lookup_prefix([A, B, C]) == [0]
        assert index.lookup_prefix([B, A]) == []
        assert index.lookup_prefix([]) == []
        assert index.lookup_prefix([A]) == [0]
    assert index.dump() == before == {A: 0, C: 2}


def test_the_first_committer_wins_before_the_proposal_is_looked_at():
    """Scenario 6."""
    index = index_of(A=0)
    assert index.insert(A, -5) == (0, False)
    with pytest.raises(ContractViolation, match="page 0 is already canonical"):
        index.insert(B, 0)
    index.erase_page(0)
    assert len(index) == 0
    index.erase_page(0)
    assert index.lookup_prefix([A]) == []
    assert index.insert(B, 0) == (0, True)


@pytest.mark.parametrize("page", [-1, 8])
def test_a_page_that_does_not_exist_is_refused(page):
    index = index_of(A=0)
    with pytest.raises(ContractViolation, match="propose a page of the pool"):
        index.insert(B, page)
    index.erase_page(page)
    assert index.hash_of(page) is None
    assert index.dump() == {A: 0}


def test_a_negative_capacity_is_refused():
    with pytest.raises(ContractViolation):
        BaseBlockIndex(-1)


def test_everybody_shares_the_key_object_of_the_first_committer():
    index = BaseBlockIndex(2)
    first, equal = bytes(bytearray(A)), bytes(bytearray(A))
    index.insert(first, 1)
    index.insert(equal, 0)
    assert index.hash_of(1) is first
    assert index.hashes_of(np.array([1]))[0] is first


def test_the_version_tells_whether_an_entry_was_lost():
    index = index_of(A=0)
    version = index.version
    index.insert(B, 1)
    index.erase_page(7)
    assert index.version is version
    index.erase_page(0)
    assert index.version is not version


def test_withdrawing_undoes_an_insertion_that_stopped_half_way():
    index = index_of(A=0)
    index.insert_new({B: 1, C: 2}, np.array([1, 2]))
    index.withdraw({B: 1, C: 2})
    assert index.dump() == {A: 0}
    index.check()
    index._page_of.update({B: 1})  # the first half of insert_new
    index.withdraw({B: 1, C: 2})
    assert index.dump() == {A: 0}
    index.check()


def test_a_corrupted_index_is_noticed():
    index = index_of(A=0)
    index._page_of[B] = 1
    with pytest.raises(InvariantViolation, match="not one-to-one"):
        index.check()
