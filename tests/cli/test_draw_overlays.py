"""A trace or a coverage laid over the pictures: counts, order, refusals, where things stood, durations, what was never
taken."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from context_cache.backends import HostBackend
from context_cache.coordinator import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractViolation,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    ResidentRef,
    allocate_resources,
)
from context_cache.coordinator.cli.app import command_line
from context_cache.coordinator.cli.overlaying import coverage_overlays, trace_overlays
from context_cache.coordinator.testing.coverage import Coverage, needs
from context_cache.coordinator.traces import TraceRecorder
from context_cache.machines import REQUEST

ONE = DecodingKvHeadroom(1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two requests: r1 decodes once and finishes, r2 is asked for what it does not take and stays prefilling."""
    path = tmp_path_factory.mktemp("overlay") / "t.jsonl"
    backend = HostBackend()
    stream = backend.new_stream()
    layers = [LayerGeometry.attention(kv_heads=1, head_dim=4)]
    deployment = DeploymentConfig(max_batch=2, kv_capacity_tokens=64, page_size=4, layers=layers)
    with TraceRecorder(path) as recorder:
        cache = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True), deployment, allocate_resources(deployment, 64, backend), backend=backend,
            stream=stream, recorder=recorder,
        )  # fmt: skip
        handles = []
        for slot in range(2):
            prompt = ContextCacheSequenceAdmission(np.arange(9), resident=ResidentRef(slot, 1))
            begun = cache.begin_request(ContextCacheBatchAdmission([prompt]), ONE, stream)
            handles.append(begun.admission.request)
            cache.prepare_prefill(handles[-1])
            if slot == 0:
                cache.finalize_prefill_publication(handles[0], [ContextCacheSequenceAdvance([1], 9)])
        with pytest.raises(ContractViolation):
            cache.complete_decode_step(handles[1], [ContextCacheSequenceAdvance([2], 10)])
        cache.finish(handles[0])
    for handle in handles:
        handle.close()
    return path


def row_of(source, event):
    (number,) = [n for n, row in enumerate(REQUEST.transitions) if (row.source, row.event) == (source, event)]
    return number


def test_rows_carry_how_often_they_fired_and_others_carry_nothing(trace):
    request = trace_overlays(str(trace), None, None)["request"]
    assert request.rows[row_of("new", "begin_request")].count == 2
    assert request.rows[row_of("settled", "finish")].count == 1
    assert row_of("admitted", "finish") not in request.rows
    assert request.fade


def test_a_refused_event_is_shown_at_its_state(trace):
    assert "refused x1" in trace_overlays(str(trace), None, None)["request"].states["prefilling"].text


def test_the_last_step_is_where_things_stood(trace):
    request = trace_overlays(str(trace), "r1", None)["request"]
    assert request.states["released"].last
    assert request.rows[row_of("settled", "finish")].last
    assert sum(mark.last for mark in request.rows.values()) == 1
    early = trace_overlays(str(trace), None, 1)["request"]
    assert early.states["admitted"].last
    assert set(early.rows) == {row_of("new", "begin_request")}


def edited(trace, tmp_path, change):
    """A copy of the trace with one of its lines changed."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    change(lines)
    copy = tmp_path / "edited.jsonl"
    copy.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    (tmp_path / "edited.jsonl.tokens").write_bytes((trace.parent / "t.jsonl.tokens").read_bytes())
    return str(copy)


def test_a_step_that_failed_is_on_the_way_that_it_took_and_not_on_the_one_it_did_not(trace, tmp_path):
    def fail(lines):
        at = next(n for n, line in enumerate(lines) if line.get("event") == "prepare_prefill")
        lines[at].update(outcome="failed", failed="upload_base_rows", target="broken")
        del lines[at + 1 :]

    row = row_of("admitted", "prepare_prefill")
    request = trace_overlays(edited(trace, tmp_path, fail), None, None)["request"]
    assert row not in request.rows
    assert request.failures[row, "device error"].count == 1
    assert request.failures[row, "device error"].last
    assert request.states["broken"].last


def test_states_that_were_visited_are_told_from_those_that_were_not(trace):
    states = trace_overlays(str(trace), None, None)["request"].states
    assert {"new", "admitted", "prefilling", "settled", "released"} <= set(states)
    assert "broken" not in states


def test_a_trace_of_other_tables_says_so(trace, tmp_path):
    path = edited(trace, tmp_path, lambda lines: lines[0]["machines"].update(request="0" * 32))
    assert "recorded with another table of request" in trace_overlays(path, None, None)["request"].title
    assert "another table" not in trace_overlays(str(trace), None, None)["request"].title


def test_a_step_of_a_machine_that_fires_no_events_is_refused_in_one_sentence(trace, tmp_path):
    def move(lines):
        next(line for line in lines if line.get("event") == "finish")["machine"] = "sequence"

    done = draw("request", "--trace", edited(trace, tmp_path, move), "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "fires no events" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_highlighted_state_keeps_what_the_trace_says_of_it(trace, tmp_path):
    done = draw("request", "--trace", trace, "--state", "prefilling", "--format", "dot", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert "refused x1" in (tmp_path / "request-at-prefilling.dot").read_text()


def test_of_one_request_each_row_names_its_steps_and_other_requests_are_left_out(trace):
    request = trace_overlays(str(trace), "r2", None)["request"]
    assert request.rows[row_of("new", "begin_request")].count == 1
    assert "#" in request.rows[row_of("new", "begin_request")].text
    assert row_of("settled", "finish") not in request.rows
    assert "r2" in request.title


def test_durations_are_there_with_times_and_only_then(trace, tmp_path):
    assert " us" in trace_overlays(str(trace), None, None)["request"].rows[row_of("settled", "finish")].text
    bare = tmp_path / "bare.jsonl"
    bare.write_bytes(trace.read_bytes())
    (tmp_path / "bare.jsonl.tokens").write_bytes((trace.parent / "t.jsonl.tokens").read_bytes())
    assert trace_overlays(str(bare), None, None)["request"].rows[row_of("settled", "finish")].text == ""


def test_a_coverage_paints_red_what_was_never_taken_and_nothing_else(tmp_path):
    taken = {need.fact for need in needs()} - {("request", "row", "3"), ("request", "failure", "1", "failed")}
    path = tmp_path / "coverage.json"
    path.write_text(Coverage(taken).to_json())
    overlays = coverage_overlays(str(path))
    assert set(overlays["request"].rows) == {3}
    assert set(overlays["request"].failures) == {(1, "device error")}
    assert not overlays["view"].rows
    assert not overlays["view"].failures


def draw(*arguments):
    return CliRunner().invoke(command_line, ["draw", *map(str, arguments)])


def test_the_marks_are_in_the_picture(trace, tmp_path):
    done = draw("request", "--trace", trace, "--request", "r1", "--format", "dot", "-o", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    (written,) = json.loads(done.stdout)["written"]
    text = (tmp_path / "request.dot").read_text()
    assert written.endswith("request.dot")
    assert "trace t.jsonl, r1" in text
    assert "x1" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request", "r1"), "add --trace"),
        (("--step", "1"), "add --trace"),
        (("--trace", "TRACE", "--request", "r9"), "no such request; it has r1 to r2"),
        (("--trace", "TRACE", "--step", "999"), "choose one from 1 to"),
        (("--trace", "TRACE", "--coverage", "TRACE"), "one after the other"),
        (("sequence", "--trace", "TRACE"), "fires no events"),
        (("--trace", "TRACE", "--format", "json"), "shows no marks"),
        (("--trace", "NOTHING"), "name a trace that can be read"),
        (("--coverage", "NOTHING"), "name a trace or a coverage file"),
        (("--check", "--trace", "TRACE"), "leave MACHINE and all options"),
        (("--check", "--step", "1"), "leave MACHINE and all options"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(trace, tmp_path, arguments, words):
    named = {"TRACE": trace, "NOTHING": tmp_path / "nothing.jsonl"}
    done = draw(*(named.get(part, part) for part in arguments), "-o", tmp_path)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
