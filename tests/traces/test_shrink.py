"""Shrinking: whatever makes a replay differ, and whatever failed, is kept; what cannot be repeated is said to be so."""

from __future__ import annotations

from contextlib import suppress

import pytest

from context_cache.backends.base import DeviceError
from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.replay import replay
from context_cache.coordinator.traces.shrink import shrink


def flipped(small_trace, lines_of, tmp_path, wanted, change):
    """A copy of the trace in which the last record that is ``wanted`` says something else."""
    lines = lines_of(small_trace)
    index = [index for index, record in enumerate(lines.records) if wanted(record)][-1]
    record = dict(lines.records[index])
    change(record)
    return lines.write(tmp_path / "flipped.jsonl", {index: record})


FLIPS = {
    "a digest": (lambda r: "digest" in str(r.get("acts")), lambda r: r["acts"][0].update(digest="0" * 8)),
    "slots": (lambda r: r.get("slots"), lambda r: r.update(slots="7")),
    "a subject": (lambda r: r.get("machine") == "request", lambda r: r.update(subject="r99")),
    "a result": (lambda r: r["line"] == "finish", lambda r: r.update(status="POISONED")),
    "a target": (lambda r: r.get("machine") == "request", lambda r: r.update(target="broken")),
}


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_whatever_differs_is_shrunk_to_a_trace_that_differs_there(small_trace, lines_of, tmp_path, flip):
    path = flipped(small_trace, lines_of, tmp_path, *flip)
    out = tmp_path / "small.jsonl"
    shrunk = shrink(path, out)
    assert shrunk.differs
    assert shrunk.calls[1] <= shrunk.calls[0]
    before, after = replay(path).difference, replay(out).difference
    assert after is not None
    assert after.fields == before.fields
    assert (getattr(after.expected, after.fields[0]), getattr(after.actual, after.fields[0])) == (
        getattr(before.expected, before.fields[0]), getattr(before.actual, before.fields[0])
    )  # fmt: skip
    assert after.call == shrunk.calls[1], "nothing lies behind it"


def test_what_a_result_does_not_need_is_left_out(small_trace, lines_of, tmp_path):
    path = flipped(small_trace, lines_of, tmp_path, *FLIPS["a result"])
    shrunk = shrink(path, tmp_path / "small.jsonl")
    assert shrunk.calls[1] < shrunk.calls[0] // 2
    assert "finish the call status" in shrunk.symptom


def test_a_clearing_upload_that_fails_is_a_failure(recorded, harness_class, tmp_path, replay_equal):
    h = recorded(tmp_path / "t.jsonl", lambda: harness_class(pages=8, enforce_min_pool=False))
    other = h.begin([9, 9, 9], 1)
    h.run_prefill(other)
    assert h.finish(other) is h.OK
    first = h.begin([7] * 6, 0)
    h.run_prefill(first)
    h.fail(1)
    assert h.finish(first) is not h.OK
    h.recorder.close()
    shrunk = shrink(tmp_path / "t.jsonl", tmp_path / "small.jsonl")
    assert not shrunk.differs
    assert shrunk.calls[1] < shrunk.calls[0]
    replay_equal(tmp_path / "small.jsonl")


def test_a_call_that_was_ended_from_outside_is_said_to_be_that(small_trace, lines_of, tmp_path):
    path = flipped(
        small_trace, lines_of, tmp_path,
        lambda r: r["line"] == "prepare_decode_step", lambda r: r.update(raised="KeyboardInterrupt"),
    )  # fmt: skip
    with pytest.raises(TraceError, match=r"ended from outside by KeyboardInterrupt.*--until"):
        shrink(path, tmp_path / "small.jsonl")


def test_a_trace_in_which_nothing_is_wrong_is_refused(recorded, harness_class, tmp_path):
    h = recorded(tmp_path / "t.jsonl", lambda: harness_class(pages=8, enforce_min_pool=False))
    first = h.begin([7] * 6, 0)
    h.run_prefill(first)
    h.end_everything()
    h.recorder.close()
    with pytest.raises(TraceError, match="holds no failure"):
        shrink(tmp_path / "t.jsonl", tmp_path / "small.jsonl")


def test_every_kind_of_failure_of_the_failure_suite_can_be_shrunk(recorded, harness_class, tmp_path, replay_equal):
    for action in range(1, 12):
        path = tmp_path / f"{action}.jsonl"
        h = recorded(path, lambda: harness_class(pages=8, enforce_min_pool=False))
        h.fail(action)
        first = h.begin([7] * 6, 0)
        with suppress(DeviceError):
            h.run_prefill(first)
            h.finish(first)
        h.recorder.close()
        if b'"failed":' not in path.read_bytes():
            continue
        shrunk = shrink(path, tmp_path / "small.jsonl")
        assert not shrunk.differs
        replay_equal(tmp_path / "small.jsonl")
