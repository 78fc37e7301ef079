"""The calls of recorded traces, as the explorer is told them: steps, times, and what was given in a few words."""

from __future__ import annotations

import json

import pytest

from context_cache.backends import DeviceError, FaultyBackend, HostBackend
from context_cache.coordinator import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentRef,
    allocate_resources,
)
from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES, check_options
from context_cache.coordinator.cli.scheduler import run_workload
from context_cache.coordinator.cli.sizing import size_run
from context_cache.coordinator.cli.workload import read_workload
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.explore import calls_of, facts_of
from context_cache.coordinator.traces.reader import TraceError, TraceReader, decode_call
from context_cache.coordinator.traces.timings import TimedTrace
from context_cache.diagrams.explorer import ExplorerTrace


@pytest.fixture
def recorded(tmp_path):
    """Run a small workload of one flavour and record it; the path of the trace."""

    def run(flavour="vanilla", **options):
        requests, path = tmp_path / "requests.jsonl", tmp_path / f"{flavour}.jsonl"
        lines = [{"token_ids": list(range(start, start + 40)), "max_new_tokens": 5} for start in (0, 0, 7, 90)]
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
        workload = read_workload(requests)
        kind, batch, slots = check_options(flavour, max_batch=None, pages=None, snapshot_slots=None)
        size = size_run(workload, page_size=4, max_batch=batch, headroom=kind.width, paged=kind.has_attention)
        with TraceRecorder(path, **options) as recorder:
            run_workload(workload, size, flavour=kind, snapshot_slots=slots, recorder=recorder)
        return path

    return run


@pytest.fixture
def broken(tmp_path):
    """A trace of a request whose first prefill fails on the device."""
    path, backend = tmp_path / "broken.jsonl", FaultyBackend(HostBackend())
    deployment = DeploymentConfig(
        max_batch=2, kv_capacity_tokens=16, page_size=4, layers=(LayerGeometry.attention(kv_heads=1, head_dim=4),)
    )
    resources, stream = allocate_resources(deployment, 8, backend), backend.new_stream()
    with TraceRecorder(path) as recorder:
        cache = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True), deployment, resources, backend=backend, stream=stream,
            recorder=recorder, identity_key=bytes(32),
        )  # fmt: skip
        admission = ContextCacheSequenceAdmission([1, 2, 3, 4, 5], resident=ResidentRef(0, 1))
        begun = cache.begin_request(ContextCacheBatchAdmission([admission]), DecodingKvHeadroom(1, 0), stream)
        backend.arm(1)
        with pytest.raises(DeviceError):
            cache.prepare_prefill(begun.admission.request)
        cache.finish(begun.admission.request)
        cache.shutdown()
    return path


def calls(path):
    timed = (path.parent / f"{path.name}.timings").exists()
    with TimedTrace(path) if timed else TraceReader(path) as trace:
        return list(calls_of(trace))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_every_call_comes_with_its_steps(recorded):
    path = recorded()
    found = []
    for call in calls(path):
        found.append(call.name)
        found += [(step.machine, step.row, step.outcome) for step in call.steps]
    assert found == [
        (line["machine"], line["row"], line["outcome"]) if line["line"] == "step" else line["line"]
        for line in lines(path)
    ]


def test_a_call_knows_its_request_and_how_it_ended(recorded):
    first, second, *_ = calls(recorded())
    assert (first.name, first.request, first.result) == ("begin_request", "r1", "OK")
    assert (second.name, second.request, second.result) == ("prepare_prefill", "r1", "OK")


def test_calls_and_acts_have_their_times(recorded):
    found = calls(recorded())
    began = [call.began for call in found if call.steps]
    assert None not in began
    assert began == sorted(began)
    assert all(call.took >= 0 for call in found if call.steps)
    acting = [(call, place) for call in found for place, step in enumerate(call.steps) if step.acts]
    assert acting
    for call, place in acting:
        assert len(call.act_times[place]) == len(call.steps[place].acts)
        assert sum(call.act_times[place]) <= call.took


def test_without_the_file_of_times_there_are_no_times(recorded):
    for call in calls(recorded(timings=False)):
        assert (call.began, call.took, call.act_times) == (None, None, {})


def test_calls_whose_times_were_lost_are_told_without(recorded):
    """A process that died leaves every call and not every time; what it did last is what one wants to see."""
    path = recorded()
    times = path.parent / f"{path.name}.timings"
    whole, names = times.read_bytes(), [call.name for call in calls(path)]
    for kept in (0, 32):
        times.write_bytes(whole[:kept])
        found = calls(path)
        assert [call.name for call in found] == names
        assert (found[0].took is None) is (kept == 0)
        assert found[-1].took is None


def test_times_of_another_trace_are_refused(recorded):
    path = recorded()
    (path.parent / f"{path.name}.timings").write_bytes(b"\xff" * 320)
    with pytest.raises(TraceError, match="the file was damaged"):
        calls(path)


def test_a_device_error_is_told_where_it_was(broken):
    found = {call.name: call for call in calls(broken)}
    assert found["prepare_prefill"].result == "raised DeviceError"
    (failed,) = [step for step in found["prepare_prefill"].steps if step.outcome == "failed"]
    assert (failed.event, failed.target, failed.failed) == ("prepare_prefill", "broken", "upload_base_rows")
    assert [act.failed for act in failed.acts] == ["DeviceError"]


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_every_flavour_can_be_explored(recorded, flavour):
    path = recorded(flavour)
    trace = ExplorerTrace("t")
    for call in calls(path):
        assert "Struct" not in call.arguments
        trace.add(call)
    assert trace.steps == sum(line["line"] == "step" for line in lines(path))
    json.dumps(trace.columns())


@pytest.mark.parametrize(
    ("line", "name", "arguments", "result"),
    [
        ({"line": "finish", "request": "r1", "status": "OK"}, "finish", "", "OK"),
        ({"line": "close", "request": None}, "close", "", ""),
        ({"line": "finish", "request": "r1", "raised": "DeviceError"}, "finish", "", "raised DeviceError"),
        (
            {"line": "begin_request", "headroom": [1, 0], "starts": [0, 4], "speculative": True, "sequences":
             [{"tokens": [0, 9], "resident": [0, 1]}, {"tokens": [9, 5], "resident": [1, 1]}], "gave": "r1"},
            "begin_request", "2 sequences of 9, 5 tokens; headroom 1 + 0; speculative; starts 0, 4", "",
        ),
        (
            {"line": "admit_sequence", "request": "r1", "headroom": [2, 1], "start": 8,
             "sequence": {"tokens": [-1, 9], "resident": [0, 1]}},
            "admit_sequence", "1 sequence of 9 tokens; headroom 2 + 1; start 8", "",
        ),
        (
            {"line": "complete_decode_step", "request": "r1", "tokens": [0, 1], "completed": [0]},
            "complete_decode_step", "1 token; completed 0", "",
        ),
        (
            {"line": "complete_decode_step", "request": "r1", "tokens": [0, 3], "counts": list(range(20))},
            "complete_decode_step", "3 tokens; counts 0, 1, ... 19 (20 in all)", "",
        ),
        (
            {"line": "begin_batch_compaction", "request": "r1", "mapping": [1, 0], "new_size": 2,
             "tensor": {"shape": [3], "dtype": "int32"}},
            "begin_batch_compaction", "mapping 1, 0; new size 2; tensor 3 int32", "",
        ),
        ({"line": "retract_sequence_admission", "request": "r1", "left": False}, "retract_sequence_admission",
         "left False", ""),
        ({"line": "unusable", "request": "r1", "call": "finish", "raised": "ContractViolation"}, "finish",
         "arguments that could not be understood", "raised ContractViolation"),
    ],
    ids=lambda value: value["line"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_call_in_words(tmp_path, recorded, line, name, arguments, result):
    path = recorded()
    header = path.read_text().split("\n", 1)[0]
    decode_call(json.dumps(line).encode(), 2)
    path.write_text(f"{header}\n{json.dumps(line)}\n")
    (path.parent / f"{path.name}.timings").unlink()
    (call,) = calls(path)
    assert (call.name, call.arguments, call.result) == (name, arguments, result)


def test_what_was_recorded_is_named_in_the_head(recorded):
    with TraceReader(recorded("hybrid", redact=True, seed=7)) as reader:
        facts = dict(facts_of(reader.header))
    assert facts["flavour"] == "hybrid"
    assert facts["page"] == "4 tokens"
    assert "seed" not in facts  # the tokens could be made again from it
    assert facts["tokens"] == "redacted"
    assert "recurrent slots" in facts
    assert "draft pages" not in facts
