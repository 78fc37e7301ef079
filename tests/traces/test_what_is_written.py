"""What a recorder keeps and what it must not: arguments that are used up, a redacted trace, recorders that are off."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest

from context_cache.coordinator import BatchAdvance, ContractViolation
from context_cache.coordinator.traces import TraceRecorder, doors
from context_cache.coordinator.traces.encode import CannotReadAgain
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.replay import rerecord


@pytest.fixture
def h(recorded, harness_class, tmp_path):
    return recorded(tmp_path / "t", harness_class)


def decoding(h, prompts=((1, 2, 3, 4, 5), (7, 8, 9))):
    handle = h.begin_batch(prompts)
    h.run_prefill(handle)
    h.decode(handle, *(20 + slot for slot in range(len(prompts))))
    return handle


# ---- arguments that are read once ------------------------------------------------------------------------------------


class Once:
    """Gives its items to the first who asks, and is no iterator."""

    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        items, self.items = self.items, []
        return iter(items)


@pytest.mark.parametrize("form", [iter, Once, lambda items: map(int, items), lambda items: dict.fromkeys(items).keys()])
def test_a_mapping_that_is_used_up_is_written_as_it_was(h, tmp_path, replay_equal, form):
    handle = decoding(h)
    assert h.coordinator.begin_batch_compaction(handle, form([-1, 0]), 1, h.mapping_tensor()) is h.OK
    assert h.coordinator.compact_batch(handle) is h.OK
    assert h.finish(handle) is h.OK
    h.recorder.close()
    assert h.recorder.failure is None
    found = [json.loads(line) for line in (tmp_path / "t").read_bytes().splitlines()]
    assert [line["mapping"] for line in found if line["line"] == "begin_batch_compaction"] == [[-1, 0]]
    replay_equal(tmp_path / "t")


@pytest.mark.parametrize("form", [iter, Once])
def test_common_lengths_that_are_used_up_end_the_trace_and_not_the_call(
    recorded, flavour_class, tmp_path, replay_equal, form
):
    """Forbidden: a call that is written as refused and was not, or with other numbers."""
    h = recorded(tmp_path / "t", lambda: flavour_class("eagle"))
    handle = h.begin(h.T(6))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    common = h.prefill_common(handle)
    assert common
    assert h.finalize(handle, common=form(common)) is h.OK
    assert isinstance(h.recorder.failure, CannotReadAgain)
    assert "common_state_lengths" in str(h.recorder.failure)
    handle.close()
    h.recorder.close()
    assert replay_equal(tmp_path / "t").calls == 2


# ---- redacted --------------------------------------------------------------------------------------------------------


def test_a_refused_call_says_none_of_its_numbers_when_redacted(recorded, harness_class, tmp_path, replay_equal):
    """A caller that mixed lengths and token ids up was refused; the ids are as secret as any."""
    path = tmp_path / "t"
    h = recorded(TraceRecorder(path, redact=True), harness_class)
    handle = decoding(h, [(1, 2, 3, 4, 5)])
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()

    def numbers(*values):
        return [np.array([value], np.int32) for value in values]

    coordinator, fine = h.coordinator, BatchAdvance(*numbers(1, 1, 7))
    for call in (
        lambda: coordinator.complete_decode_step(handle, BatchAdvance(*numbers(991991, 1, 991992))),
        lambda: coordinator.complete_decode_step(handle, fine, [991993]),
        lambda: coordinator.complete_decode_step(handle, fine, common_state_lengths=[991994]),
        lambda: coordinator.begin_batch_compaction(handle, [991995], 991996, h.mapping_tensor()),
        lambda: coordinator.finalize_sequence_admission(handle, 991997, h.advance(991998, 991999)),
        lambda: h.prepare_decode(handle, 991990),
    ):
        with pytest.raises(ContractViolation):
            call()
    assert h.complete(handle, 30) is h.OK
    handle.close()
    h.recorder.close()
    assert h.recorder.failure is None
    assert b"99199" not in path.read_bytes()
    assert replay_equal(path).calls == 14


@pytest.mark.parametrize("redact", [False, True])
def test_a_redacted_trace_has_no_seed_to_work_its_tokens_out_from(recorded, harness_class, tmp_path, redact):
    recorder = TraceRecorder(tmp_path / "t", redact=redact, seed=np.int64(5))
    recorded(recorder, harness_class)
    recorder.close()
    assert recorder.failure is None
    with TraceReader(tmp_path / "t") as reader:
        assert reader.header.seed == (None if redact else 5)


def test_a_seed_in_an_older_redacted_trace_is_not_handed_on(recorded, harness_class, script, tmp_path, lines_of):
    recorder = TraceRecorder(tmp_path / "t", redact=True, timings=False)
    script(recorded(recorder, lambda: harness_class(pages=8, enforce_min_pool=False)))
    recorder.close()
    lines = lines_of(tmp_path / "t")
    lines.write(tmp_path / "old", {0: {**lines.records[0], "seed": 5}})
    rerecord(tmp_path / "old", tmp_path / "new")
    with TraceReader(tmp_path / "new") as reader:
        assert reader.header.seed is None


# ---- closed ----------------------------------------------------------------------------------------------------------


def test_a_recorder_that_was_closed_before_is_refused(recorded, harness_class, tmp_path):
    recorder = TraceRecorder(tmp_path / "t")
    recorder.close()
    with pytest.raises(ContractViolation, match="this recorder is closed"):
        recorded(recorder, harness_class)


def reached(start):
    """Ids of everything that an object keeps alive, by way of this package's objects and plain containers."""
    waiting, seen = [start], set()
    while waiting:
        one = waiting.pop()
        ours = type(one).__module__.startswith("context_cache") and not isinstance(one, type)
        if id(one) not in seen and (ours or isinstance(one, dict | list | tuple | set)):
            seen.add(id(one))
            waiting += gc.get_referents(one)
    return seen


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_a_recorder_that_is_off_keeps_nothing_of_its_coordinator(tmp_path, harness_class, recorded, how):
    """Nor what the coordinator does later, nor the caches on the device."""
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, harness_class)
    decoding(h)
    if how == "closed":
        recorder.close()
    else:
        recorder._line = lambda data: 1 / 0
        h.begin([6], 2).close()
        assert isinstance(recorder.failure, ZeroDivisionError)
    for _ in range(3):
        h.begin([9] * 6, 2).close()
    core = h.coordinator._core
    assert not {id(core), id(core.cache), id(core.rows)} & reached(recorder)
    assert recorder._happened == []
    assert recorder._book.answers == []
    assert recorder._times == []
    recorder.close()


def test_nothing_is_worked_out_for_a_closed_recorder(tmp_path, harness_class, recorded, monkeypatch):
    h = recorded(tmp_path / "t", harness_class)
    h.recorder.close()
    monkeypatch.setattr(doors, "_digest", lambda parts: 1 / 0)
    handle = decoding(h)
    h.compact(handle, [-1, 0])
    assert h.finish(handle) is h.OK
