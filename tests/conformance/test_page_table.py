"""Scenarios 113 to 118: the KV page table on its own."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.backends import DeviceError, FaultyBackend, RecordingBackend
from context_cache.coordinator import ContractViolation, KVPageTable


@pytest.fixture
def backend(new_backend):
    return RecordingBackend(new_backend())


@pytest.fixture
def make(backend):
    def build(max_batch=2, width=4, pages=10, on=backend):
        return KVPageTable(max_batch=max_batch, max_pages_per_seq=width, num_pages=pages, backend=on)

    return build


@pytest.fixture
def stream(backend):
    return backend.new_stream()


def k_row(table, slot):
    return np.asarray(table.host_row(slot)).tolist()


def v_row(table, slot):
    return np.asarray(table.host_v_row(slot)).tolist()


def rows(table, count=2):
    return [(k_row(table, slot), v_row(table, slot)) for slot in range(count)]


def device(table, stream):
    stream.run()
    return np.asarray(table.device_rows()).tolist()


def test_a_row_names_k_pages_and_their_v_partners(make):
    """Scenario 113."""
    table = make()
    assert rows(table) == [([-1] * 4, [-1] * 4)] * 2
    table.set_row(1, [3, 7])
    assert k_row(table, 1) == [3, 7, -1, -1]
    assert v_row(table, 1) == [13, 17, -1, -1]
    assert table.is_identity is False
    table.set_row(1, [])
    assert k_row(table, 1) == [-1] * 4
    assert v_row(table, 1) == [-1] * 4


def test_a_shorter_row_leaves_no_stale_tail(make):
    """Scenario 113, the tail (30.1)."""
    table = make()
    table.set_row(0, [1, 2, 3, 4])
    table.set_row(0, [5])
    assert k_row(table, 0) == [5, -1, -1, -1]


@pytest.mark.parametrize(
    ("slot", "ids"),
    [(2, [1]), (-1, [1]), (0, [10]), (0, [-1]), (0, [1, -1, 2]), (0, [1, 2, 3, 4, 5])],
)
def test_a_bad_row_is_refused_and_changes_nothing(make, slot, ids):
    """Scenario 113, the refused half."""
    table = make()
    table.set_row(0, [8])
    before = rows(table)
    with pytest.raises(ContractViolation):
        table.set_row(slot, ids)
    assert rows(table) == before


def test_the_host_row_is_read_only(make):
    """30.1: host_row is a view nobody may write to."""
    table = make()
    table.set_row(0, [1])
    with pytest.raises((ValueError, TypeError)):
        table.host_row(0)[0] = 5
    assert k_row(table, 0) == [1, -1, -1, -1]


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param([(0, [2, 3]), (1, [10])], id="id out of range"),
        pytest.param([(0, [2, 3]), (0, [4])], id="slot twice"),
        pytest.param([(0, [2, 3]), (1, [4, -1, 5])], id="-1 inside a row"),
        pytest.param([(0, [2, 3]), (1, [1, 2, 3, 4, 5])], id="too long"),
        pytest.param([(0, [2, 3]), (2, [1])], id="slot out of range"),
    ],
)
def test_several_rows_are_set_as_a_whole_or_not_at_all(make, updates):
    """Scenario 114."""
    table = make()
    table.set_row(0, [8])
    table.set_row(1, [9])
    before = rows(table)
    with pytest.raises(ContractViolation):
        table.set_rows(updates)
    assert rows(table) == before


def test_several_rows_may_be_set_and_cleared_at_once(make):
    """Scenario 114, the legal half; an empty list is no change and keeps the identity."""
    table = make()
    table.set_identity()
    table.set_rows([])
    assert table.is_identity is True
    table.set_rows([(1, [2, 3]), (0, [])])
    assert [k_row(table, slot) for slot in (0, 1)] == [[-1] * 4, [2, 3, -1, -1]]
    assert table.is_identity is False


def test_identity_leaves_spare_pages_alone(make):
    """Scenario 115."""
    table = make(max_batch=3, pages=17)
    table.set_identity()
    assert table.is_identity is True
    for row in range(3):
        expected = list(range(4 * row, 4 * row + 4))
        assert k_row(table, row) == expected
        assert v_row(table, row) == [page + 17 for page in expected]


def test_identity_needs_enough_pages(make):
    """Scenario 115, the refused half."""
    table = make(max_batch=3, pages=11)
    with pytest.raises(ContractViolation):
        table.set_identity()
    assert rows(table, 3) == [([-1] * 4, [-1] * 4)] * 3
    assert table.is_identity is False


def test_rows_that_look_like_identity_are_not_identity(make):
    """Scenario 115 and 30.1."""
    table = make()
    table.set_identity()
    table.set_row(0, [0, 1, 2, 3])
    assert table.is_identity is False


@pytest.mark.parametrize(
    "sizes", [{"max_batch": 0}, {"width": 0}, {"pages": 0}, {"pages": -1}, {"pages": (2**31 - 1) // 2 + 1}]
)
def test_an_impossible_table_is_refused(make, sizes):
    """30.1: all sizes are positive, V ids fit int32."""
    with pytest.raises(ContractViolation):
        make(**sizes)


def test_only_changed_rows_are_uploaded(make, backend, stream):
    """Scenario 116. A marker behind the table's back in an unchanged row survives."""
    table = make()
    table.set_rows([(0, [1, 2]), (1, [3])])
    assert table.upload(stream) is True
    stream.run()
    address = table.device_array.ctypes.data
    verbs = list(backend.log)
    assert table.upload(stream) is False
    table.set_row(0, [7])
    table.set_row(0, [1, 2])
    assert table.upload(stream) is False, "set back to what the device has: clean again"
    assert list(backend.log) == verbs, "no device call for nothing"

    table.device_array[1, 0, 0] = 99
    table.set_row(0, [4])
    assert table.upload(stream) is True
    after = device(table, stream)
    assert after[0] == [[4, -1, -1, -1], [14, -1, -1, -1]]
    assert after[1] == [[99, -1, -1, -1], [13, -1, -1, -1]]
    assert table.device_array.ctypes.data == address


def test_a_row_never_uploaded_is_dirty_whatever_it_holds(make, stream):
    """Scenario 117. Device content is undefined until the first upload of each row."""
    table = make()
    table.device_array[:] = 99
    table.set_row(0, [1])
    table.set_row(0, [])
    table.set_row(1, [2])
    table.set_row(1, [])
    assert table.upload(stream) is True
    assert device(table, stream) == [[[-1] * 4, [-1] * 4]] * 2


def test_an_untouched_new_table_uploads_everything(make, stream):
    """Scenario 117 without any row ever set."""
    table = make()
    table.device_array[:] = 99
    assert table.upload(stream) is True
    assert device(table, stream) == [[[-1] * 4, [-1] * 4]] * 2
    assert table.upload(stream) is False


def test_back_to_back_uploads_do_not_share_staging(make, stream):
    """Scenario 118. The first copy carried [1, 2] although the row was set again before it ran."""
    table = make(max_batch=1)
    table.set_row(0, [1, 2])
    assert table.upload(stream) is True
    table.set_row(0, [5, 6, 7])
    assert table.upload(stream) is True
    seen = []
    while stream.pending:
        stream.run(1)
        row = np.asarray(table.device_rows())[0, 0].tolist()
        if not seen or seen[-1] != row:
            seen.append(row)
    assert seen[-2:] == [[1, 2, -1, -1], [5, 6, 7, -1]]


def test_each_of_many_uploads_carries_its_own_row(make, stream):
    """Scenario 118 beyond the number of staging buffers: whatever waits, nothing is overwritten early.

    Behind each upload the stream itself looks at the device, so no copy can hide behind a later one.
    """
    table = make(max_batch=2)
    seen = []
    for page in range(20):
        table.set_rows([(0, [page % 10]), (1, [page % 10, (page + 1) % 10])])
        assert table.upload(stream) is True
        stream.enqueue(lambda: seen.append(np.asarray(table.device_rows())[:, 0, :2].tolist()), "look")
    stream.run()
    assert seen == [[[page % 10, -1], [page % 10, (page + 1) % 10]] for page in range(20)]


def test_a_failed_upload_leaves_the_rows_dirty(stream, backend):
    """30.1: rows stay dirty, also those that are set back to what was uploaded last."""
    faults = FaultyBackend(backend)
    table = KVPageTable(max_batch=2, max_pages_per_seq=4, num_pages=10, backend=faults)
    table.set_row(0, [1])
    table.upload(stream)
    stream.run()
    table.set_row(0, [2])
    faults.arm(1)
    with pytest.raises(DeviceError):
        table.upload(stream)
    faults.disarm()
    table.set_row(0, [1])
    table.device_array[0] = 99  # nobody knows how much of the failed copy was done
    assert table.upload(stream) is True
    assert device(table, stream)[0] == [[1, -1, -1, -1], [11, -1, -1, -1]]


def test_a_corrupt_row_is_refused_before_anything_is_enqueued(make, backend, stream):
    """30.1, upload step 2. Corrupts the host truth behind the table's back, if it can be reached."""
    table = make()
    table.set_row(0, [1, 2])
    table.check_invariants()
    row = np.asarray(table.host_row(0))
    base = row
    while base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    if not base.flags.writeable:
        pytest.skip("the host rows cannot be corrupted from outside")
    base[np.where(base == 1)] = -1
    verbs = list(backend.log)
    with pytest.raises(ContractViolation):
        table.upload(stream)
    assert list(backend.log) == verbs


def test_gather_maps_execution_rows_to_resident_rows(make, backend, stream):
    """30.1, gather_rows: the runtime's active-step table, without moving KV data."""
    table = make(max_batch=3)
    table.set_rows([(0, [1]), (1, [2, 3]), (2, [4])])
    table.upload(stream)
    target = backend.array((2, 2, 4), "int32")
    slots = backend.array((2,), "int32")
    slots[:] = [2, 0]
    table.gather_rows(target, slots, 2, stream)
    stream.run()
    gathered = np.asarray(backend.to_host(target)).tolist()
    assert gathered == [[[4, -1, -1, -1], [14, -1, -1, -1]], [[1, -1, -1, -1], [11, -1, -1, -1]]]
