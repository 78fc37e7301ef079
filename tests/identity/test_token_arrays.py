"""Token ids as callers give them: copied where somebody could still write to them, made plain or refused."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.coordinator import (
    BlockHasher,
    ContextCacheSequenceAdmission,
    ContractViolation,
    ResidentRef,
)
from context_cache.coordinator.adapter import RuntimeSequence

HASHER = BlockHasher(bytes(32))
IDS = [1, 2, 3, 4, 5, 6, 7, 8]


def as_admission(values):
    return ContextCacheSequenceAdmission(values).token_ids


def as_runtime_sequence(values):
    return RuntimeSequence(token_ids=values, resident=ResidentRef(0, 1)).token_ids


@pytest.fixture(params=[as_admission, as_runtime_sequence], ids=["admission", "runtime sequence"])
def take(request):
    return request.param


def locked(array):
    array.flags.writeable = False
    return array


def view_of_array():
    buffer = np.array(IDS, np.int32)
    return locked(buffer[:]), buffer


def view_of_view():
    buffer = np.array(IDS, np.int32)
    return locked(locked(buffer[:])[:]), buffer


def view_of_bytes():
    buffer = bytearray(np.array(IDS, np.int32).tobytes())
    return locked(np.frombuffer(buffer, np.int32)), np.frombuffer(buffer, np.int32)


def broadcast():
    buffer = np.array([IDS], np.int32)
    return np.broadcast_to(buffer, (1, 8))[0], buffer[0]


def memory():
    buffer = np.array(IDS, np.int32)
    return memoryview(buffer).toreadonly(), buffer


def writable():
    buffer = np.array(IDS, np.int32)
    return buffer, buffer


@pytest.mark.parametrize("make", [view_of_array, view_of_view, view_of_bytes, broadcast, memory, writable])
def test_what_somebody_can_still_write_to_is_copied(take, make):
    """A read-only view says nothing of its buffer: a runtime fills the next prompt into the same one."""
    values, buffer = make()
    taken = take(values)
    assert taken.tolist() == IDS
    buffer[:] = 99
    assert taken.tolist() == IDS
    assert not taken.flags.writeable


def test_what_was_taken_cannot_be_written_to(take):
    with pytest.raises(ValueError, match="read-only"):
        take(IDS)[0] = 9


@pytest.mark.parametrize("make", [view_of_array, view_of_view, view_of_bytes, broadcast, memory, writable])
def test_digests_that_are_remembered_stay_those_of_the_tokens(h, make):
    """The chain of a prompt is kept beside it: tokens that changed under it would be published as others."""
    values, buffer = make()
    sequence = ContextCacheSequenceAdmission(values, resident=h.ref(0))
    handle = h.try_begin([sequence]).admission.request
    h.handles.append(handle)
    buffer[:] = 99
    h.run_prefill(handle)
    assert h.seq(handle).token_ids.tolist() == [*IDS, 901]
    assert h.finish(handle) is h.OK
    h.begin([*IDS, 9], 1)
    assert h.starts == [8]
    h.begin([99] * 9, 2)
    assert h.starts == [0]
    h.end_everything()


@pytest.mark.parametrize(
    "values",
    [
        np.array(IDS, np.int64),
        np.array(IDS, np.uint8),
        np.array(IDS, np.uint64),
        np.array(IDS, ">i4"),
        np.repeat(np.array(IDS, np.int32), 2)[::2],
        np.array(IDS[::-1], np.int32)[::-1],
        np.array(IDS, np.int64).view(np.recarray),
        np.ma.masked_array(np.array(IDS, np.int32), mask=False),
        tuple(IDS),
        range(1, 9),
        [np.int64(token) for token in IDS],
    ],
    ids=["int64", "uint8", "uint64", "big endian", "strided", "backwards", "subclass", "nothing masked", "tuple",
         "range", "scalars"],
)  # fmt: skip
def test_integers_of_every_kind_become_one_plain_array(take, values):
    taken = take(values)
    assert type(taken) is np.ndarray
    assert (taken.dtype, taken.ndim) == (np.dtype(np.int32), 1)
    assert taken.flags.c_contiguous
    assert taken.tolist() == IDS


def test_an_array_with_masked_entries_is_refused_or_made_plain(take):
    values = np.ma.masked_array(np.array(IDS, np.int32), mask=[0, 1, 0, 0, 0, 0, 0, 0])
    try:
        taken = take(values)
    except ContractViolation:
        return
    assert type(taken) is np.ndarray
    assert taken.dtype == np.int32
    assert taken.tolist() == IDS, "what a mask hides is data all the same; never a fill value"


WRONG = {
    "int64 beyond int32": np.array([1, 2**32 + 5]),
    "int64 just beyond int32": np.array([2**31]),
    "int64 below int32": np.array([-(2**31) - 1]),
    "uint32 beyond int32": np.array([2**31], np.uint32),
    "uint64 beyond int64": np.array([2**64 - 1], np.uint64),
    "integers beyond 64 bit": [1, 2**70],
    "masked beyond int32": np.ma.masked_array([1, 2**32 + 5], mask=False),
    "float": [1.7],
    "whole float": [1.0, 2.0],
    "one float among integers": [1, 2.0],
    "float array": np.array([1.0, 2.0], np.float32),
    "nan": [float("nan")],
    "complex": [1j],
    "bool": [True, False],
    "bool array": np.array([True, False]),
    "none": None,
    "none inside": [1, None],
    "number": 5,
    "text": "12",
    "texts": ["1", "2"],
    "object": object(),
    "object array": np.array([1, 2], object),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "records": np.zeros(2, [("token", np.int32)]),
    "two dimensions": [[1, 2], [3, 4]],
    "int32 with two dimensions": np.zeros((2, 2), np.int32),
    "no dimension": np.array(5, np.int32),
    "ragged": [[1, 2], [3]],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_one_dimension_of_32_bit_integers_is_refused(take, name):
    with pytest.raises(ContractViolation):
        take(WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_one_dimension_of_32_bit_integers_is_not_hashed(name):
    """2**32 + 5 must not be hashed as 5, nor 1.7 as 1."""
    with pytest.raises(ContractViolation):
        HASHER.hash_full_blocks(WRONG[name], 1)


@pytest.mark.parametrize("key", [5, 5.0, "k" * 32, bytearray(32), [1] * 32, b"", b"short", True])
def test_a_hasher_takes_bytes_as_its_key(key):
    with pytest.raises(ContractViolation):
        BlockHasher(key)
