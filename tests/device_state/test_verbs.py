"""The verbs behind snapshots, straight on the host backend: late, in order, reading their host inputs when they run."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError, FaultyBackend, HostBackend, RecordingBackend

NAMES = ["zero_rows", "copy_rows", "capture_pages", "restore_pages", "copy_row"]


@pytest.fixture
def backend():
    return HostBackend()


@pytest.fixture
def stream(backend):
    return backend.new_stream()


def ints(*values):
    return np.array(values, dtype=np.int32)


def counted(*shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def test_zero_rows_zeroes_these_rows_of_every_tensor(backend, stream):
    one, two = counted(3, 2), counted(3, 2, 2)
    backend.zero_rows((one, two), ints(2, 0), stream)
    assert (one == counted(3, 2)).all(), "nothing runs at the enqueue"
    backend.synchronize(stream)
    assert one.tolist() == [[0, 0], [3, 4], [0, 0]]
    assert two.tolist() == [[[0, 0], [0, 0]], [[5, 6], [7, 8]], [[0, 0], [0, 0]]]


def test_copy_rows_pairs_rows_of_paired_tensors(backend, stream):
    dest, source = (np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)), (counted(3, 2), counted(3, 1))
    backend.copy_rows(dest, ints(3, 0), source, ints(1, 1), stream)
    backend.synchronize(stream)
    assert dest[0].tolist() == [[3, 4], [0, 0], [0, 0], [3, 4]]
    assert dest[1].tolist() == [[2], [0], [0], [2]]


def test_pages_are_captured_and_restored_up_to_their_tokens(backend, stream):
    """Half 0 from the K page, half 1 from the V page; what is behind the tokens stays."""
    pool, slab = counted(2, 3, 2, 1, 1), np.zeros((2, 2, 2, 1, 1), np.float32)
    backend.capture_pages((slab,), ints(1, 0), (pool,), ints(2, 0), ints(2, 1), stream)
    backend.synchronize(stream)
    assert slab.reshape(2, 2, 2).tolist() == [[[1, 0], [7, 0]], [[5, 6], [11, 12]]]
    backend.restore_pages((pool,), ints(1, 0), (slab,), ints(1, 1), ints(1, 2), stream)
    backend.synchronize(stream)
    assert pool.reshape(2, 3, 2).tolist() == [[[5, 6], [5, 4], [5, 6]], [[11, 12], [11, 10], [11, 12]]]


def test_copy_row_copies_one_row(backend, stream):
    dest = np.zeros((2, 3), np.float32)
    backend.copy_row(dest, 1, counted(3, 3), 2, stream)
    backend.synchronize(stream)
    assert dest.tolist() == [[0, 0, 0], [7, 8, 9]]


def test_index_arrays_are_read_when_the_work_runs(backend, stream):
    """Why they are staged: what is written into them meanwhile is what counts."""
    tensor, rows = counted(2, 1), ints(0)
    backend.zero_rows((tensor,), rows, stream)
    rows[0] = 1
    backend.synchronize(stream)
    assert tensor.tolist() == [[1], [0]]


def calls(backend, stream):
    one, two = counted(2, 2), counted(2, 2)
    pool, slab = counted(2, 2, 2, 1, 1), counted(2, 2, 2, 1, 1)
    return [
        lambda: backend.zero_rows((one,), ints(0), stream),
        lambda: backend.copy_rows((one,), ints(0), (two,), ints(1), stream),
        lambda: backend.capture_pages((slab,), ints(0), (pool,), ints(1), ints(1), stream),
        lambda: backend.restore_pages((pool,), ints(1), (slab,), ints(0), ints(1), stream),
        lambda: backend.copy_row(one, 0, two, 1, stream),
    ]


def test_the_verbs_appear_in_the_log_under_their_names(backend, stream):
    recording = RecordingBackend(backend)
    for call in calls(recording, stream):
        call()
    assert recording.log == NAMES
    assert list(stream.pending) == NAMES, "one piece of work each"


@pytest.mark.parametrize("number", range(1, 6))
def test_the_chosen_verb_fails_and_enqueues_nothing(backend, stream, number):
    faulty = FaultyBackend(backend, fail_action=number)
    for n, call in enumerate(calls(faulty, stream), start=1):
        if n == number:
            with pytest.raises(DeviceError, match=NAMES[n - 1]):
                call()
        else:
            call()
    assert list(stream.pending) == NAMES[: number - 1] + NAMES[number:]
