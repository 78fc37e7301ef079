"""The picture is in the Trace Event Format, says what the trace says, and is written whole or not at all.

The shape that is checked is the documented one: an object with ``traceEvents``; every event has name, phase, process
and track; a complete event (X) has begin and duration, an instant (i) a scope, metadata (M) its one argument. Times are
microseconds. Spans of one track must nest or lie apart, else the viewer drops them; ours lie apart.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tracemalloc
from collections import defaultdict
from decimal import Decimal

import numpy as np
import pytest

from context_cache.coordinator.cli.scheduler import run_workload
from context_cache.coordinator.cli.sizing import size_run
from context_cache.coordinator.cli.workload import read_workload
from context_cache.coordinator.cli.workloads import shipped_workload
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.perfetto import PerfettoExport, write_perfetto
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.timings import TimedTrace
from context_cache.machines import REQUEST

NAMED = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def draw(path):
    """The events, with decimals as they are written; checked against the format."""
    out = path.with_suffix(".json")
    write_perfetto(path, out)
    return events_of(out)


def events_of(out):
    picture = json.loads(out.read_bytes(), parse_float=Decimal)
    assert set(picture) == {"traceEvents", "otherData"}
    for event in picture["traceEvents"]:
        check_event(event)
    return picture["traceEvents"]


def check_event(event):
    assert isinstance(event["name"], str)
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert isinstance(event["args"], dict)
    common = {"name", "ph", "pid", "tid", "args"}
    if event["ph"] == "M":
        assert set(event) == common
        assert list(event["args"]) == [NAMED[event["name"]]]
        return
    assert isinstance(event["cat"], str)
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert set(event) == common | {"cat", "ts", "dur"}
        assert event["dur"] >= 0
    else:
        assert event["ph"] == "i"
        assert set(event) == common | {"cat", "ts", "s"}
        assert event["s"] in ("t", "p", "g")


def tracks(events):
    """Name of a track -> its spans in order of time."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    for spans in found.values():
        spans.sort(key=lambda event: (event["ts"], event["dur"]))
    return found


def instants(events):
    return [event["name"] for event in events if event["ph"] == "i"]


def steps_of(path):
    with TraceReader(path) as reader:
        return [found.step for group in reader.groups() for found in group.steps()]


@pytest.mark.parametrize("script", ["life", "failing"])
def test_the_spans_of_a_track_never_overlap(record, request, script):
    for spans in tracks(draw(record(request.getfixturevalue(script)))).values():
        for one, following in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= following["ts"]


def test_the_process_and_every_track_have_a_name(record, life):
    events = draw(record(life))
    named = [event for event in events if event["name"] == "thread_name"]
    assert {event["args"]["name"] for event in named} == {
        "device", "calls of no live request", "coordinator", "execution", "view", "r1", "r1 state", "r2", "r2 state",
    }  # fmt: skip
    assert len({event["tid"] for event in named}) == len(named)
    assert {event["tid"] for event in events if event["ph"] != "M"} <= {event["tid"] for event in named}
    process = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert process == ["context cache coordinator (vanilla)"]


def test_every_call_with_steps_is_a_span_on_the_track_of_its_request(record, life):
    path = record(life)
    found = tracks(draw(path))
    with TimedTrace(path) as trace:
        calls = [call for call in trace if call.timed]
        began = trace.times.began_at
    for owner, track in (("r1", "r1"), ("r2", "r2"), (None, "calls of no live request")):
        expected = [call for call in calls if call.request == owner]
        drawn = [event for event in found[track] if event["cat"] == "call"]
        assert len(drawn) == len(expected)
        for event, call in zip(drawn, expected, strict=True):
            assert event["args"]["call"] == call.group.number
            assert event["name"] == json.loads(call.group.raw[0])["line"]
            assert (event["ts"] * 1000, event["dur"] * 1000) == (call.begin - began, call.end - call.begin)


def test_the_arguments_of_a_call_are_summed_up(record, life):
    begun, *_ = tracks(draw(record(life)))["r1"]
    assert begun["args"] == {
        "call": 1, "line": 2, "headroom": [1, 0], "status": "OK", "gave": "r1", "starts": [0], "sequences": 1,
        "prompt_tokens": 6,
    }  # fmt: skip


def test_long_lists_are_counted_not_written(record):
    def script(h):
        h.run_prefill(h.begin_batch([h.T(5)] * 9))

    path = record(script, harness={"max_batch": 9, "pages": 36})
    finalized = next(event for event in draw(path) if event["name"] == "finalize_prefill_publication")
    assert finalized["args"]["committed"] == "9 values"
    assert finalized["args"]["tokens"] == 9


@pytest.mark.parametrize("script", ["life", "failing"])
def test_the_states_of_a_request_follow_each_other_from_step_to_step(record, request, script):
    path = record(request.getfixturevalue(script))
    found = tracks(draw(path))
    for name in ("r1", "r2"):
        steps = [step for step in steps_of(path) if step.machine == "request" and step.subject == name]
        spans = found[f"{name} state"]
        assert [span["name"] for span in spans] == [step.target for step in steps if step.target != "released"]
        for one, following in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] == following["ts"]
        for span, step in zip(spans, steps, strict=False):
            assert span["args"]["row"] == step.row
            assert span["args"]["event"] == step.event
            assert span["args"].get("guards", {}) == step.guards
            assert span["args"]["outcome"] == step.outcome


def test_the_machines_of_the_coordinator_have_a_track_each_and_name_the_request(record, life):
    path = record(life)
    found = tracks(draw(path))
    for machine, first in (("coordinator", "serving"), ("execution", "free"), ("view", "none")):
        steps = [step for step in steps_of(path) if step.machine == machine]
        assert [span["name"] for span in found[machine]] == [first, *(step.target for step in steps)]
    assert {span["args"].get("request") for span in found["execution"]} == {None, "r1", "r2"}


def test_device_work_is_a_span_of_its_own_with_the_times_that_were_noted(record, failing):
    path = record(failing)
    acts = [(step.subject, act) for step in steps_of(path) for act in step.acts]
    rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)
    with TimedTrace(path) as trace:
        began = trace.times.began_at
    rows = rows[rows[:, 1] >= 0]
    spans = tracks(draw(path))["device"]
    assert [span["name"] for span in spans] == [act.verb for _, act in acts]
    assert [span["args"]["request"] for span in spans] == [owner for owner, _ in acts]
    assert [span["args"].get("failed") for span in spans] == [act.failed for _, act in acts]
    assert [span["ts"] * 1000 for span in spans] == (rows[:, 2] - began).tolist()
    assert [span["dur"] * 1000 for span in spans] == (rows[:, 3] - rows[:, 2]).tolist()
    assert "drain" in {span["name"] for span in spans}


def test_what_failed_is_an_instant(record, failing):
    assert [name for name in instants(draw(record(failing))) if " " in name] == [
        "prepare_prefill failed",
        "finish drain_failed",
    ]


def test_what_was_refused_is_an_instant_and_changes_no_state(record, life):
    """No public call offers an event that its request's table refuses, so the refusal is written into the trace."""
    path = record(life)
    before = [span["name"] for span in tracks(draw(path))["r1 state"]]
    refusal = (
        b'{"line":"step","machine":"request","subject":"r1","row":-1,"event":"compact_batch","source":"settled",'
        b'"target":"settled","outcome":"refused"}\n'
    )
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if b'"finalize_prefill"' in line)
    number = sum(line.startswith(b'{"line":"step"') for line in lines[:place])
    path.write_bytes(b"".join([*lines[:place], refusal, *lines[place:]]))
    rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)
    rows[rows[:, 0] > number, 0] += 1
    rows.tofile(f"{path}.timings")
    events = draw(path)
    assert "compact_batch refused" in instants(events)
    assert [span["name"] for span in tracks(events)["r1 state"]] == before


def test_a_call_that_changed_nothing_is_an_instant_beside_the_live_requests(record):
    def script(h):
        handle = h.begin(h.T(6), 0)
        h.coordinator.finish(handle)
        h.coordinator.finish(handle)

    events = draw(record(script))
    (again,) = [event for event in events if event["ph"] == "i" and event["name"] == "finish"]
    (track,) = [event for event in events if event["name"] == "thread_name" and event["tid"] == again["tid"]]
    assert track["args"]["name"] == "calls of no live request"
    assert again["args"]["request"] == "r1"
    assert again["args"]["when"] == "after the call before; not noted"


def test_a_request_that_lives_at_the_end_is_drawn_to_the_end(record, life, tmp_path):
    path = record(life)
    with TimedTrace(path) as trace:
        calls = list(trace)
        began = trace.times.began_at
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[: calls[3].group.line - 1]
    path.write_bytes(b"".join(kept))
    rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)
    rows[rows[:, 3] <= calls[2].end].tofile(f"{path}.timings")
    last = tracks(draw(path))["r1 state"][-1]
    assert last["name"] == "settled"
    assert (last["ts"] + last["dur"]) * 1000 == calls[2].end - began


def test_two_drawings_of_a_trace_are_equal_to_the_byte(record, failing, tmp_path):
    path = record(failing)
    write_perfetto(path, tmp_path / "one.json")
    write_perfetto(path, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_the_shipped_workload_is_drawn_whole(tmp_path):
    path, out = tmp_path / "run.jsonl", tmp_path / "run.json"
    with shipped_workload() as shipped:
        workload = read_workload(shipped, name="shipped workload").cut(limit=20, max_new_tokens=6)
    size = size_run(workload, page_size=128, max_batch=4, pages=None, row_tokens=None, headroom=1, paged=True)
    with TraceRecorder(path) as recorder:
        run_workload(workload, size, recorder=recorder)
    drawn = write_perfetto(path, out)
    events = events_of(out)
    with TraceReader(path) as reader:
        calls = sum(1 for _ in reader.groups())
    assert drawn == PerfettoExport(calls, recorder.steps, untimed=0, torn=False)
    assert sum(event.get("cat") == "call" for event in events) == calls
    targets = [step.target for step in steps_of(path) if step.machine == "request"]
    states = [event["name"] for event in events if event.get("cat") == "state"]
    assert sum(name in {state.name for state in REQUEST.states} for name in states) == len(targets) - targets.count(
        "released"
    )


def test_nanoseconds_survive_a_year(record, life):
    """Times are decimal fractions; a float of microseconds would have lost its last digit after some days."""
    path = record(life)
    rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)
    year = 365 * 24 * 3600 * 10**9
    rows[1:, 2:] += year
    rows.tofile(f"{path}.timings")
    drawn = {event["ts"] for event in draw(path) if event["ph"] == "X"}
    first = rows[0, 2]
    exact = {Decimal(int(begin - first)) / 1000 for begin in rows[:, 2]}
    assert exact <= drawn
    assert math.ulp(float(max(exact))) > 0.001


def test_a_failed_drawing_leaves_what_was_there(record, life, tmp_path):
    path, out = record(life), tmp_path / "out" / "picture.json"
    out.parent.mkdir()
    out.write_text("before")
    rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4)
    rows[-1, 0] += 1
    rows.tofile(f"{path}.timings")
    with pytest.raises(TraceError, match="row "):
        write_perfetto(path, out)
    assert out.read_text() == "before"
    assert list(out.parent.iterdir()) == [out]


def test_a_trace_without_times_is_refused_before_anything_is_written(record, life, tmp_path):
    out = tmp_path / "picture.json"
    with pytest.raises(TraceError, match=r"record it with TraceRecorder\(path, timings=True\)"):
        write_perfetto(record(life, timings=False), out)
    assert not out.exists()


@pytest.mark.parametrize("suffix", ["", ".tokens", ".timings"])
def test_the_files_of_the_trace_are_never_drawn_over(record, life, suffix):
    path = record(life)
    target = path.parent / f"{path.name}{suffix}"
    before = target.read_bytes()
    with pytest.raises(TraceError, match="is a file of the trace itself; name another one"):
        write_perfetto(path, target)
    assert target.read_bytes() == before


def test_a_picture_behind_a_link_replaces_what_the_link_names(record, life, tmp_path):
    out, link = tmp_path / "picture.json", tmp_path / "link.json"
    link.symlink_to(out)
    write_perfetto(record(life), link)
    assert link.is_symlink()
    assert events_of(out)


def test_a_pipe_is_written_as_it_is(record, life):
    path = record(life)
    reading, writing = os.pipe()
    try:
        small = path.with_suffix(".json")
        write_perfetto(path, small)
        assert small.stat().st_size < 65_536, "it has to fit into the pipe"
        write_perfetto(path, f"/dev/fd/{writing}")
        os.close(writing)
        with os.fdopen(reading, "rb", closefd=False) as file:
            assert file.read() == small.read_bytes()
    finally:
        os.close(reading)


def test_a_step_of_a_machine_that_has_none_is_refused_by_line(record, life, tmp_path):
    path = record(life)
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if b'"machine":"execution"' in line)
    lines[place] = lines[place].replace(b'"machine":"execution"', b'"machine":"sequence"')
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError, match=rf"^line {place + 1}: machine 'sequence' follows another one"):
        write_perfetto(path, tmp_path / "picture.json")


def test_drawing_holds_no_more_for_a_longer_trace(long_trace, tmp_path):
    peaks = []
    for count in (1000, 4000):
        path = long_trace(count)
        tracemalloc.start()
        assert write_perfetto(path, tmp_path / "long.json").calls > 2 * count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
