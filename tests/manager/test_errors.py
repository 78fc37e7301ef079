"""Errors carry their facts and survive a trip to another process."""

import copy
import pickle

import pytest

from context_cache.coordinator.errors import ContextCacheError, ContractViolation, InvariantViolation


@pytest.mark.parametrize("kind", [ContextCacheError, ContractViolation, InvariantViolation])
def test_an_error_keeps_its_facts_across_pickling(kind):
    error = kind("publish: 3 blocks do not fit 2 pages; grow the lease first", count=3, pages=(0, 1))
    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "publish: 3 blocks do not fit 2 pages; grow the lease first"
        assert twin.facts == {"count": 3, "pages": (0, 1)}
        assert twin.count == 3


def test_a_fact_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute or fact 'page'"):
        _ = ContractViolation("refused").page


def test_one_base_class_catches_everything():
    assert issubclass(ContractViolation, ContextCacheError)
    assert issubclass(InvariantViolation, ContextCacheError)
    assert not issubclass(InvariantViolation, ContractViolation)
