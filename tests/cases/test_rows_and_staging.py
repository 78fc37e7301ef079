"""Cases of public bug reports: admission, batch rows and compaction, page-table upload and pinned staging.

Left out, because the thing is not offered here:
C048, C049, C050, C052 a queue, loads and preemption: the scheduler outside decides who is admitted when.
C057 recurrent state: attention only.
C058 captured graphs: the coordinator captures nothing.
C059 moving pages: pages never move.
C064 reading back: the coordinator reads nothing from the device.
C065, C066 a second stream: a coordinator has exactly one (scenario 64 refuses another).
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from context_cache.backends import HostBackend, RecordingBackend
from context_cache.coordinator import ContextCacheSequenceAdvance, ContractViolation, KVPageTable, ResidentRef


@pytest.fixture
def backend():
    return RecordingBackend(HostBackend())


@pytest.fixture
def table(backend):
    return KVPageTable(max_batch=4, max_pages_per_seq=6, num_pages=16, backend=backend)


def device_k(table, stream, slot):
    stream.run()
    return np.asarray(table.device_rows())[slot, 0].tolist()


def agrees(table, stream):
    stream.run()
    device = np.asarray(table.device_rows())
    for slot in range(4):
        assert device[slot, 0].tolist() == np.asarray(table.host_row(slot)).tolist()
        assert device[slot, 1].tolist() == np.asarray(table.host_v_row(slot)).tolist()


# ---- admission ------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_at_once_and_the_next_runs(harness, T):
    """C047. The message has the pages it would need and the pages of a row."""
    h = harness(pages=8, row_pages=8, max_batch=1, enforce_min_pool=False)
    error = h.refuses(h.try_begin, [h.sequence_admission(T(40), 0)])
    assert "11" in str(error)
    assert "8" in str(error)
    h.run_prefill(h.begin(T(4)))


def test_growth_with_nothing_left_ends_that_request_clearly(harness, T):
    """C051. The outcome names the slot; what it had stays readable; then 8 pages are free and the next request runs."""
    h = harness(pages=8, row_pages=9, max_batch=1, enforce_min_pool=False)
    handle = h.begin(T(31))
    h.run_prefill(handle)
    h.decode(handle, 902)
    result = h.prepare_decode(handle)
    assert result.status is h.REQUEST_FAILED
    assert list(result.refusal.failed_slots) == [0]
    assert result.refusal.missing.base_kv_pages == 1
    assert h.seq(handle).token_ids.tolist() == [*T(31), 901, 902]
    assert h.finish(handle) is h.OK
    h.manager.evict_all()
    assert sorted(h.free()) == list(range(8))
    h.run_prefill(h.begin(T(4)))


def test_100_invalid_requests_hurt_nobody(h, T):
    """C084. Refused clearly one by one; the three good ones finish, and the coordinator is well all the time."""
    good = [h.begin([n, n + 1, n + 2], n) for n in range(2)]
    for n in range(100):
        with pytest.raises(ContractViolation):
            h.try_begin([h.sequence_admission(T(17 + n), ResidentRef(2, 1))])
        assert h.coordinator.state == "serving"
    good.append(h.begin(T(3), 2))
    for handle in good:
        h.run_prefill(handle)
        assert h.finish(handle) is h.OK
    h.end_everything()


# ---- rows ------------------------------------------------------------


def test_a_row_taken_by_a_shorter_request_has_no_stale_tail(harness, T):
    """C053. Rows do not move here; a newcomer in the row of a longer one reads its own pages and empty marks."""
    h = harness(pages=12, row_pages=6, max_batch=2)
    long = h.begin(T(23), 0)
    h.run_prefill(long)
    assert -1 not in h.device_row(0)
    h.finish(long)
    h.manager.evict_all()
    short = h.begin([51, 52, 53, 54, 55], 0)
    h.run_prefill(short)
    pages = h.pages(short)
    assert h.device_row(0) == [*pages, -1, -1, -1, -1]
    assert h.device_row(0, 1) == [*(page + 12 for page in pages), -1, -1, -1, -1]
    assert h.device_row(1) == [-1] * 6


def test_a_row_stays_with_its_sequence_through_compactions(h, T):
    """C054. Reordering is refused; the survivor keeps its row, a newcomer in the freed one starts clean."""
    handle = h.begin_batch([T(5), [51, 52, 53, 54, 55]])
    h.run_prefill(handle)
    h.refuses(h.begin_compaction, handle, [1, 0])
    row = h.row(1)
    h.compact(handle, [-1, 0])
    assert h.device_row(1) == row
    assert h.device_row(0) == [-1] * 4
    result = h.admit(handle, [71, 72], 0)
    assert (result.status, result.prefill_start) == (h.OK, 0)
    assert h.row(0) == [*h.pages(handle, 1), -1, -1, -1]
    assert h.row(1) == row


def test_all_sequences_that_end_in_one_step_are_removed(harness):
    """C055. Four rows, 0, 1 and 3 end: one live sequence, dense, three free rows, maps agree in both directions."""
    h = harness(pages=16, max_batch=4)
    handle = h.begin_batch([[n, n + 1, n + 2, n + 3, n + 4] for n in (10, 20, 30, 40)])
    h.run_prefill(handle)
    h.set_device_lengths([5, 5, 5, 5])
    h.decode(handle, 1, 2, 3, 4, completed=[0, 1, 3])
    h.set_device_lengths([6, 6, 6, 6])
    h.compact(handle, [-1, -1, 0, -1])
    assert h.size(handle) == 1
    assert h.seq(handle, 0).resident.slot == 2
    assert h.seq(handle, 0).token_ids.tolist()[:5] == [30, 31, 32, 33, 34]
    assert h.device_lengths(1) == [6]
    assert [h.device_row(slot) == [-1] * 4 for slot in range(4)] == [True, True, False, True]
    h.decode(handle, 5)


def test_a_row_is_not_given_away_while_its_step_runs(h, T):
    """C056. All other rows taken: the newcomer is refused, and on refusal nothing is changed."""
    running = h.begin(T(9), 0)
    others = h.begin_batch([[51, 52], [61, 62]], [1, 2])
    assert h.coordinator.prepare_prefill(running) is h.OK
    for slot in range(3):
        h.refuses(h.try_begin, [h.sequence_admission([71, 72], ResidentRef(slot, 77))])
    h.synchronize()
    assert h.coordinator.finalize_prefill_publication(running, [ContextCacheSequenceAdvance((901,), 9)]) is h.OK
    assert h.finish(running) is h.OK
    h.begin([71, 72], ResidentRef(0, 77))
    assert others.state == "admitted"


@pytest.mark.parametrize("change", ["cleared and filled", "appended", "moved", "swapped", "cleared", "shortened"])
def test_every_kind_of_change_reaches_the_device(table, backend, change):
    """C060. And without a change nothing is copied."""
    stream = backend.new_stream()
    table.set_rows([(0, [1, 2]), (1, [3]), (3, [4, 5, 6])])
    table.upload(stream)
    agrees(table, stream)
    if change == "cleared and filled":
        table.set_row(0, [])
        table.set_row(0, [7, 8, 9])
    elif change == "appended":
        table.set_row(1, [3, 10])
    elif change == "moved":
        table.set_rows([(2, [1, 2]), (0, [])])
    elif change == "swapped":
        table.set_rows([(0, [3]), (1, [1, 2])])
    elif change == "cleared":
        table.set_row(3, [])
    else:
        table.set_row(3, [4])
    assert table.upload(stream) is True
    agrees(table, stream)
    verbs = len(backend.log)
    assert table.upload(stream) is False
    assert len(backend.log) == verbs


# ---- staging ------------------------------------------------------------


def test_staging_is_not_rewritten_before_its_copy_ran(table, backend):
    """C061. What arrives first is what was staged first."""
    stream = backend.new_stream()
    table.set_row(0, [1, 2])
    table.upload(stream)
    table.set_row(0, [7, 8])
    table.upload(stream)
    seen = []
    while stream.pending:
        stream.run(1)
        seen.append(np.asarray(table.device_rows())[0, 0].tolist()[:2])
    assert [1, 2] in seen
    assert seen[-1] == [7, 8]


def test_staging_outlives_its_table(backend):
    """C062. The caller drops every reference, memory is used again, then the stream is let go."""
    stream = backend.new_stream()
    table = KVPageTable(max_batch=2, max_pages_per_seq=4, num_pages=10, backend=backend)
    device = table.device_array
    table.set_row(0, [1, 2])
    table.upload(stream)
    del table
    gc.collect()
    filler = [backend.pinned((2, 4), "int32") for _ in range(100)]
    for block in filler:
        np.asarray(block)[:] = 99
    stream.run()
    assert np.asarray(device)[0, 0].tolist() == [1, 2, -1, -1]


def test_staging_memory_is_bounded(backend):
    """C063. 1,000 uploads on a stream that runs only when somebody waits: a few buffers, and the last content wins."""

    class Counting(RecordingBackend):
        made = 0

        def pinned(self, shape, dtype):
            Counting.made += 1
            return super().pinned(shape, dtype)

    counting = Counting(HostBackend())
    stream = counting.new_stream()
    table = KVPageTable(max_batch=2, max_pages_per_seq=4, num_pages=1024, backend=counting)
    for page in range(1000):
        table.set_row(0, [page])
        assert table.upload(stream) is True
        if page == 50:
            few = Counting.made
    assert Counting.made == few, "a ring of a fixed size, not one buffer per upload"
    assert device_k(table, stream, 0) == [999, -1, -1, -1]
