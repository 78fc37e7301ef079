"""Times are read in order, put back to their steps, and refused when they are not those of the trace beside them."""

from __future__ import annotations

import re
import shutil
import statistics
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest

from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.timings import TimedTrace, Timings, median_durations


def rows_of(path):
    return np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)


def write_rows(path, rows):
    np.asarray(rows, "<i8").tofile(f"{path}.timings")


def groups_of(path):
    with TraceReader(path) as reader:
        return list(reader.groups())


def calls_of(path):
    with TimedTrace(path) as trace:
        return list(trace)


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_every_row_is_read_in_order(record, life):
    path = record(life)
    with Timings(path) as timings:
        rows = list(timings)
        assert len(timings) == len(rows)
        assert (timings.began_at, timings.ended_at) == (rows[0].begin, rows[-1].end)
    assert [list(row) for row in rows] == rows_of(path).tolist()


def test_every_step_and_act_of_the_trace_is_timed_and_in_its_call(record, failing):
    path = record(failing)
    calls = calls_of(path)
    groups = groups_of(path)
    assert [call.group.raw for call in calls] == [group.raw for group in groups]
    acts = rows_of(path)
    acts = acts[acts[:, 1] >= 0].tolist()
    times = []
    for call, group in zip(calls, groups, strict=True):
        assert [timed.found for timed in call.steps] == group.steps()
        assert call.timed == bool(call.steps)
        for timed in call.steps:
            assert call.begin <= timed.at <= call.end
            assert [one.act for one in timed.acts] == timed.found.step.acts
            times += [[timed.found.number, index, one.begin, one.end] for index, one in enumerate(timed.acts)]
    assert times == acts


def test_steps_end_after_their_acts_in_order_and_the_last_one_with_its_call(record, life):
    for call in calls_of(record(life)):
        places = [timed.at for timed in call.steps]
        assert places == sorted(places)
        assert not places or places[-1] == call.end
        for timed in call.steps:
            assert all(one.end <= timed.at for one in timed.acts)


def test_steps_between_two_known_times_share_the_room_evenly(record):
    """Four steps, acts only under the last: their order is known and nothing else, so each gets a quarter."""

    def script(h):
        h.coordinator.prepare_prefill(h.begin(h.T(6), 0))

    path = record(script)
    rows = rows_of(path)
    rows[:, 2:] = 0
    call = next(index for index in range(1, len(rows)) if rows[index, 1] == -1)
    rows[1:call, 2:] = 1500
    rows[call, 2:] = 1000, 2000
    rows[call + 1 :, 2:] = 3000
    write_rows(path, rows)
    prepared = calls_of(path)[1]
    assert [timed.found.step.machine for timed in prepared.steps] == ["execution", "view", "view", "request"]
    assert [timed.at for timed in prepared.steps] == [1250, 1500, 1750, 2000]


def test_a_call_without_steps_stands_where_the_call_before_it_ended(record):
    def script(h):
        handle = h.begin(h.T(6), 0)
        h.coordinator.finish(handle)
        h.coordinator.finish(handle)

    begun, finished, again = calls_of(record(script))[:3]
    assert not again.timed
    assert again.begin == again.end == finished.end
    assert again.request == begun.request == "r1"


def test_the_median_of_a_row_is_that_of_the_calls_that_fired_it(record, life):
    path = record(life)
    rows = rows_of(path)
    ends = {step: index for index, step in enumerate(rows[rows[:, 1] == -1][:, 0])}
    rows[:, 2:] = 0
    for place, (step, act, *_) in enumerate(rows):
        begin = 10_000 * ends[step] if step in ends else 0
        rows[place, 2:] = (begin, begin + 100 * int(step) if act == -1 else begin)
    for place in range(len(rows) - 2, -1, -1):
        if rows[place, 1] >= 0:
            rows[place, 2:] = rows[place + 1, 2]
    write_rows(path, rows)
    expected = defaultdict(list)
    for group in groups_of(path):
        steps = [found for found in group.steps() if found.step.machine == "request"]
        for found in steps:
            expected["request", found.step.row].append(100 * (group.first_step + len(group.raw) - 2))
    found = median_durations(path)
    assert found.pop(("coordinator", 8)) > 0, "the shutdown, which no request's row belongs to"
    assert found == {key: int(statistics.median(durations)) for key, durations in expected.items()}
    assert any(len(durations) > 1 for durations in expected.values())


def test_rows_that_did_not_end_well_have_no_median(record, failing):
    path = record(failing)
    failed = {
        found.step.row
        for group in groups_of(path)
        for found in group.steps()
        if found.step.machine == "request" and found.step.outcome != "done"
    }
    assert len(failed) == 2
    assert {("request", row) for row in failed}.isdisjoint(median_durations(path))


def test_a_trace_without_times_says_how_to_record_them(record, life):
    path = record(life, timings=False)
    with pytest.raises(TraceError) as error:
        TimedTrace(path)
    assert "TraceRecorder(path, timings=True), which is the default" in one_sentence(error)


@pytest.mark.parametrize("missing", [1, 31])
def test_times_of_a_broken_size_are_refused(record, life, missing):
    path = record(life)
    data = rows_of(path).tobytes()
    (path.parent / "trace.jsonl.timings").write_bytes(data[:-missing])
    with pytest.raises(TraceError, match="no multiple of 32") as error:
        Timings(path)
    one_sentence(error)


def _later_step(rows):
    rows[-1, 0] += 1


def _decreasing(rows):
    rows[4, 0], rows[5, 0] = rows[5, 0], 1


def _step_zero(rows):
    rows[0, 0] = 0


def _strange_act(rows):
    rows[0, 1] = -2


def _ends_before_it_begins(rows):
    rows[0, 3] = rows[0, 2] - 1


def _negative(rows):
    rows[0, 2] = -5


def _overlapping(rows):
    rows[-1, 2] = rows[0, 2]


def _act_outside_its_call(rows):
    place = np.flatnonzero(rows[:, 1] >= 0)[-1]
    rows[place, 3] = rows[-1, 3] + 1


def _another_act(rows):
    place = np.flatnonzero(rows[:, 1] >= 0)[0]
    rows[place, 1] = 7


ROW_DAMAGES = (_decreasing, _step_zero, _strange_act, _ends_before_it_begins, _negative)


@pytest.mark.parametrize("damage", ROW_DAMAGES)
def test_a_row_that_no_recorder_writes_is_refused_by_its_number(record, life, damage):
    path = record(life)
    rows = rows_of(path)
    damage(rows)
    write_rows(path, rows)
    with Timings(path) as timings, pytest.raises(TraceError, match=r"row \d+ is \[.*no recorder writes that") as error:
        list(timings)
    one_sentence(error)


@pytest.mark.parametrize(
    "damage",
    [*ROW_DAMAGES, _later_step, _overlapping, _act_outside_its_call, _another_act],
)
def test_times_that_do_not_fit_the_trace_are_refused_by_row_or_call(record, life, damage):
    path = record(life)
    rows = rows_of(path)
    damage(rows)
    write_rows(path, rows)
    with pytest.raises(TraceError) as error:
        calls_of(path)
    assert re.search(r"trace\.jsonl\.timings: (row \d+|the times of call \d+) ", one_sentence(error))


def test_times_of_another_recording_are_refused(record, life, failing):
    path, other = record(life), record(failing, "other.jsonl")
    shutil.copy(f"{other}.timings", f"{path}.timings")
    with pytest.raises(TraceError, match="keep the files of one recording together") as error:
        calls_of(path)
    one_sentence(error)


def test_more_times_than_steps_are_refused(record, life):
    path = record(life)
    rows = rows_of(path)
    write_rows(path, np.vstack([rows, rows[-1] + [1, 0, 0, 0]]))
    with pytest.raises(TraceError, match="which the trace does not have"):
        calls_of(path)


def test_times_lost_with_the_process_leave_the_calls_before_them(record, life):
    """A recorder hands times on in blocks, so a process that dies takes the last ones along, and only those."""
    path = record(life)
    rows = rows_of(path)
    ends = np.flatnonzero(rows[:, 1] == -1)
    write_rows(path, rows[: ends[4] + 1])
    with TimedTrace(path) as trace:
        assert [call.group.number for call in trace] == [1, 2, 3, 4, 5]
        assert trace.untimed == len(groups_of(path)) - 5


def test_a_recorder_that_was_never_closed_has_lost_its_times(harness_class, tmp_path):
    path = tmp_path / "open.jsonl"
    recorder = TraceRecorder(path)

    class Traced(harness_class):
        Recorder = staticmethod(lambda: recorder)

    h = Traced()
    h.begin(h.T(6), 0)
    with TimedTrace(path) as trace, pytest.raises(TraceError, match="close the recorder") as error:
        list(trace)
    one_sentence(error)
    h.abandon()
    recorder.close()


def test_a_torn_trace_keeps_the_calls_before_and_their_times(record, life):
    path = record(life)
    whole = calls_of(path)
    data = path.read_bytes()
    cut = data.index(b'{"line":"step"', data.index(b'{"line":"finish"'))
    path.write_bytes(data[: cut + 30])
    with TimedTrace(path) as trace:
        kept = [call.end for call in trace]
        assert trace.torn
    finished = next(call.group.number for call in whole if call.group.raw[0].startswith(b'{"line":"finish"'))
    assert kept == [call.end for call in whole[: finished - 1]]


def test_reading_holds_one_call_and_a_block_of_times_whatever_the_length(long_trace):
    peaks = []
    for count in (1000, 4000):
        path = long_trace(count)
        tracemalloc.start()
        with TimedTrace(path) as trace:
            assert sum(len(call.steps) for call in trace) > 4 * count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
