"""Requests as OpenTelemetry spans: from a trace, and while they live. The SDK's exporter in memory is the judge."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from context_cache.backends import DeviceError
from context_cache.coordinator import ContextCacheManager, InvariantViolation
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.spans import SpanExport, SpanRecorder, export_spans
from context_cache.coordinator.traces.timings import TimedTrace
from context_cache.machines import Firing, Step

NOON = 1_800_000_000 * 10**9


@pytest.fixture
def provider():
    return TracerProvider(span_limits=SpanLimits(max_events=10_000), shutdown_on_exit=False)


@pytest.fixture
def tracer(provider):
    return provider.get_tracer("test")


@pytest.fixture
def finished(provider):
    """What was exported so far, by request."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def spans():
        found = exporter.get_finished_spans()
        by_request = {span.attributes["context_cache.request.id"]: span for span in found}
        assert len(by_request) == len(found)
        return by_request

    return spans


def events_of(span):
    return [event.name for event in span.events]


def steps_of(path):
    with TraceReader(path) as reader:
        return [found.step for group in reader.groups() for found in group.steps()]


@pytest.fixture
def live(harness_class, tracer):
    """``live(script)`` runs a script on a harness whose recorder makes spans, and closes the recorder."""

    def run(script):
        recorder = SpanRecorder(tracer)

        class Live(harness_class):
            Recorder = staticmethod(lambda: recorder)

        h = Live()
        try:
            script(h)
        finally:
            h.abandon()
            recorder.close()
        return h

    return run


# ---- a recorded trace


def test_every_request_of_a_trace_is_a_span_and_its_transitions_are_events(record, life, tracer, finished):
    path = record(life)
    assert export_spans(path, tracer, ended_at=NOON) == SpanExport(spans=2, unended=0, untimed=0, torn=False)
    for name, span in finished().items():
        assert span.name == "context_cache.request"
        own = [step for step in steps_of(path) if step.machine == "request" and step.subject == name]
        events = [event for event in span.events if event.attributes["context_cache.machine"] == "request"]
        assert [event.name for event in events] == [step.event for step in own]
        for event, step in zip(events, own, strict=True):
            found = {key.removeprefix("context_cache."): value for key, value in event.attributes.items()}
            assert found.pop("guards", ()) == tuple(
                guard if held else f"not {guard}" for guard, held in step.guards.items()
            )
            assert found.pop("ended", None) == step.ended
            assert found == {
                "machine": "request", "row": step.row, "event": step.event, "source": step.source,
                "target": step.target, "outcome": step.outcome,
            }  # fmt: skip


def test_what_the_admission_says_is_an_attribute_of_the_span(record, life, tracer, finished):
    export_spans(record(life), tracer, ended_at=NOON)
    found = {key.removeprefix("context_cache.request."): value for key, value in finished()["r1"].attributes.items()}
    assert found == {
        "id": "r1", "sequences": 1, "prompt_tokens": 6, "reused_tokens": 0, "speculative": False,
        "token_state_contract": "COMMITTED_PLUS_LOOKAHEAD", "lookup_policy": "USE_CACHE",
        "commit_policy": "INCLUDING_GENERATED_TOKENS", "state": "released",
    }  # fmt: skip


def test_transitions_of_the_coordinators_machines_belong_to_the_request_of_the_call(record, life, tracer, finished):
    path = record(life)
    export_spans(path, tracer, ended_at=NOON)
    with TimedTrace(path) as trace:
        calls = [(call.request, timed.found.step) for call in trace for timed in call.steps]
    for name, span in finished().items():
        steps = [step for request, step in calls if request == name]
        assert events_of(span) == [
            step.event if step.machine == "request" else f"{step.machine}.{step.event}" for step in steps
        ]
        assert {"execution.take", "execution.give_back", "view.claim"} <= set(events_of(span))
    everything = [event for span in finished().values() for event in events_of(span)]
    assert "coordinator.shutdown" not in everything, "no request's row shut the coordinator down"


def test_spans_and_events_have_the_times_of_the_trace_on_the_given_calendar(record, life, tracer, finished):
    path = record(life)
    export_spans(path, tracer, ended_at=NOON)
    with TimedTrace(path) as trace:
        calls = list(trace)
        shift = NOON - trace.times.ended_at
    own = [timed for call in calls if call.request == "r1" for timed in call.steps]
    span = finished()["r1"]
    assert [event.timestamp for event in span.events] == [timed.at + shift for timed in own]
    assert (span.start_time, span.end_time) == (own[0].at + shift, own[-1].at + shift)


def test_without_a_calendar_the_trace_ended_when_its_times_were_written(record, life, tracer, finished):
    path = record(life)
    os.utime(f"{path}.timings", ns=(NOON, NOON))
    export_spans(path, tracer)
    with TimedTrace(path) as trace:
        finish = next(call for call in trace if call.group.raw[0].startswith(b'{"line":"finish"'))
        before_the_end = trace.times.ended_at - finish.end
    assert finished()["r1"].end_time == NOON - before_the_end


def test_spans_of_a_trace_have_no_parent(record, life, tracer, finished):
    path = record(life)
    with tracer.start_as_current_span("export", attributes={"context_cache.request.id": "none"}):
        export_spans(path, tracer, ended_at=NOON)
    assert finished()["r1"].parent is None
    assert finished()["r2"].parent is None


def test_a_request_that_was_broken_or_quarantined_has_the_status_of_its_first_failure(
    record, failing, tracer, finished
):
    """r1 breaks, and its drain fails; what went wrong first is what a reader wants to see."""
    export_spans(record(failing), tracer, ended_at=NOON)
    broken, well = finished()["r1"], finished()["r2"]
    assert broken.status.status_code is StatusCode.ERROR
    assert broken.status.description == "prepare_prefill in admitted: failed at upload_base_rows"
    assert broken.attributes["context_cache.request.state"] == "released", "by the shutdown that drained"
    failed = next(event for event in broken.events if event.name == "prepare_prefill")
    assert failed.attributes["context_cache.failed"] == "upload_base_rows"
    assert "coordinator.drain_failed" in events_of(broken)
    assert well.status.status_code is StatusCode.UNSET


def test_a_quarantined_request_has_the_status_error(record, tracer, finished):
    def script(h):
        handle = h.begin(h.T(6), 0)
        h.run_prefill(handle)
        h.prepare_decode(handle)
        h.sync.fail = True
        handle.close()
        assert handle.state == "quarantined"

    export_spans(record(script), tracer, ended_at=NOON)
    assert finished()["r1"].status.status_code is StatusCode.ERROR
    assert finished()["r1"].status.description == "drop in decoding: drain_failed at drain"


def test_a_request_that_lives_at_the_end_of_the_trace_ends_with_it(record, life, tracer, finished):
    path = record(life)
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if line.startswith(b'{"line":"finish"'))
    path.write_bytes(b"".join(lines[:place]))
    with TimedTrace(path) as trace:
        kept = sum(line.startswith(b'{"line":"step"') for line in lines[:place])
        rows = [row for row in trace.times if row.step <= kept]
    with open(f"{path}.timings", "r+b") as file:
        file.truncate(32 * len(rows))
    assert export_spans(path, tracer, ended_at=NOON).unended == 2
    for span in finished().values():
        assert span.end_time == NOON
        assert span.attributes["context_cache.request.state"] == "settled"


def test_a_refused_admission_has_no_span(record, tracer, finished):
    def script(h):
        handle = h.begin(h.T(14), 0)
        assert h.try_begin([h.sequence_admission(h.T(14), 1)]).insufficient_capacity
        handle.close()

    path = record(script, harness={"pages": 5, "enforce_min_pool": False})
    assert export_spans(path, tracer, ended_at=NOON).spans == 1
    assert set(finished()) == {"r1"}


def test_a_trace_without_times_makes_no_span(record, life, tracer, finished):
    with pytest.raises(TraceError, match="timings=True"):
        export_spans(record(life, timings=False), tracer)
    assert finished() == {}


# ---- while it happens


def test_live_spans_have_the_events_that_the_trace_of_the_same_script_has(record, live, life, tracer, finished):
    live(life)
    lived = {name: events_of(span) for name, span in finished().items()}
    assert set(lived) == {"r1", "r2"}
    path = record(life)
    other = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    other.add_span_processor(SimpleSpanProcessor(exporter))
    export_spans(path, other.get_tracer("test"), ended_at=NOON)
    told = {span.attributes["context_cache.request.id"]: events_of(span) for span in exporter.get_finished_spans()}
    assert lived == told


def test_a_live_span_knows_its_request_its_sequences_and_its_parent(live, tracer, finished):
    def script(h):
        with tracer.start_as_current_span("generate", attributes={"context_cache.request.id": "parent"}):
            handle = h.begin_batch([h.T(5), h.T(6)])
        h.run_prefill(handle)
        h.coordinator.finish(handle)

    live(script)
    span = finished()["r1"]
    assert span.attributes["context_cache.request.sequences"] == 2
    assert span.attributes["context_cache.request.state"] == "released"
    assert span.parent.span_id == finished()["parent"].context.span_id
    assert span.start_time <= span.events[0].timestamp <= span.events[-1].timestamp <= span.end_time


def test_a_live_span_ends_with_its_request_not_with_the_recorder(harness_class, tracer, finished):
    with SpanRecorder(tracer) as recorder:

        class Live(harness_class):
            Recorder = staticmethod(lambda: recorder)

        h = Live()
        first, second = h.begin(h.T(6), 0), h.begin(h.T(5), 1)
        first.close()
        assert set(finished()) == {"r1"}
        assert second.valid
    assert finished()["r2"].attributes["context_cache.request.state"] == "admitted", "closing the recorder ended it"
    h.coordinator.finish(second)
    h.begin(h.T(5), 1)
    h.abandon()
    recorder.close()
    assert set(finished()) == {"r1", "r2"}, "a closed recorder makes no more spans"


def test_a_live_failure_is_the_status_and_the_withheld_request_ends_at_shutdown(live, failing, finished):
    live(failing)
    broken = finished()["r1"]
    assert broken.status.status_code is StatusCode.ERROR
    assert broken.status.description == "prepare_prefill in admitted: failed at upload_base_rows"
    assert "coordinator.drain_failed" in events_of(broken)
    assert broken.attributes["context_cache.request.state"] == "released"
    assert finished()["r2"].status.status_code is StatusCode.UNSET


def test_what_no_row_took_belongs_to_no_span(live, finished):
    """The first shutdown finds a live request: its step is nobody's, also not the request's that is closed next."""

    def script(h):
        handle = h.begin(h.T(6), 0)
        assert h.coordinator.shutdown() is h.REQUEST_FAILED
        handle.close()

    live(script)
    assert not [name for name in events_of(finished()["r1"]) if name.startswith("coordinator.")]


@pytest.fixture
def invariant(monkeypatch):
    """A script in which publishing finds the books in contradiction: the coordinator's own step follows the row's."""

    def broken(*arguments, **options):
        raise InvariantViolation("the books contradict each other")

    def script(h):
        handle = h.begin(h.T(6), 0)
        with monkeypatch.context() as patch:
            patch.setattr(ContextCacheManager, "publish", broken)
            with pytest.raises(InvariantViolation):
                h.run_prefill(handle)
        handle.close()

    return script


def test_a_trace_knows_the_request_of_a_step_that_no_row_took(record, invariant, tracer, finished):
    export_spans(record(invariant), tracer, ended_at=NOON)
    assert "coordinator.invariant_broken" in events_of(finished()["r1"])


def test_while_it_happens_nobody_knows_whose_such_a_step_is(live, invariant, finished):
    live(invariant)
    assert "coordinator.invariant_broken" not in events_of(finished()["r1"])


def a_step(source, target, outcome="done"):
    return Step("r7", Firing("request", 0, "finish", source, target, (), outcome, None))


@pytest.mark.parametrize("step", [a_step("new", "new", "raised"), a_step("settled", "decoding")])
def test_a_request_whose_admission_did_not_happen_has_no_span(tracer, finished, step):
    with SpanRecorder(tracer) as recorder:
        recorder.record(step)
    assert finished() == {}


def test_a_request_that_was_released_by_a_failing_row_has_the_status_error(tracer, finished):
    with SpanRecorder(tracer) as recorder:
        recorder.record(a_step("new", "admitted"))
        recorder.record(a_step("admitted", "released", "raised"))
    assert finished()["r7"].status.description == "finish in admitted: raised"


class BrokenTracer:
    def start_span(self, *arguments, **options):
        raise RuntimeError("no connection")


def test_a_tracer_that_raises_never_stops_a_request(harness_class, life, caplog):
    recorder = SpanRecorder(BrokenTracer())

    class Live(harness_class):
        Recorder = staticmethod(lambda: recorder)

    h = Live()
    with caplog.at_level(logging.ERROR, "context_cache.machines"):
        life(h)
    assert "the recorder raised and is switched off" in caplog.text
    h.check()
    h.abandon()
    recorder.close()


def test_a_second_coordinator_is_not_mixed_into_the_spans_of_the_first(harness_class, tracer, finished, caplog):
    recorder = SpanRecorder(tracer)

    class Live(harness_class):
        Recorder = staticmethod(lambda: recorder)

    one, two = Live(), Live()
    one.begin(one.T(6), 0)
    with caplog.at_level(logging.ERROR, "context_cache.machines"):
        handle = two.begin(two.T(6), 0)
    assert "give each coordinator its own" in caplog.text
    assert handle.valid
    two.abandon()
    assert finished() == {}
    one.abandon()
    assert events_of(finished()["r1"]) == ["begin_request", "drop"]
    recorder.close()


def test_a_device_error_reaches_the_runtime_as_without_a_recorder(live):
    def script(h):
        handle = h.begin(h.T(6), 0)
        h.fail(1)
        with pytest.raises(DeviceError, match="injected failure"):
            h.coordinator.prepare_prefill(handle)
        assert handle.state == "broken"
        h.heal()

    live(script)


WITHOUT = """
import sys
sys.modules["opentelemetry"] = sys.modules["opentelemetry.trace"] = sys.modules["opentelemetry.context"] = None
from context_cache.coordinator.traces.spans import SpanRecorder, SpansUnavailable, export_spans
for attempt in (lambda: SpanRecorder(None), lambda: export_spans("nothing", None)):
    try:
        attempt()
    except SpansUnavailable as error:
        print(error)
"""


def test_without_the_package_one_sentence_names_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all("pip install 'context-cache-coordinator[otel]'" in line for line in said)
