"""The fast path writes what the slow path writes: the same schedule, recorded with both, is the same to the byte.

The fast path recognises a decode step that is like the one before. Whatever makes a step unlike it (a joiner, a
completion, a slot that has ended or holds, another batch, other headroom, other forms of arguments) has to be seen.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from context_cache.coordinator import BatchAdvance, DecodingKvHeadroom
from context_cache.coordinator.traces import recorder as recorder_module
from context_cache.coordinator.traces.recorder import CallRecorder
from context_cache.machines import Step

CHECKPOINTED = ("hybrid", "recurrent")


class Counting:
    """A sink; ``steady`` counts what came by the fast path."""

    def __init__(self):
        self.data, self.bytes = b"", b""
        self.line, self.tokens = self.take, self.take_tokens

    def take(self, data):
        self.data += data

    def take_tokens(self, data):
        self.bytes += data
        return len(self.bytes) - len(data)

    def times(self, rows):
        pass

    def close(self):
        pass


def play(h, rng, steps):
    """Batches that take turns, mostly with steps that are alike."""
    live = []
    for _ in range(steps):
        kind = rng.choice(["begin"] * 2 + ["join", "compact", "end"] + ["steps"] * 9)
        taken = [h.seq(handle, s).resident.slot for handle in live for s in range(h.size(handle))]
        free = [slot for slot in range(h.max_batch) if slot not in taken]
        if kind == "begin" and free:
            count = rng.randint(1, len(free))
            prompts = [[rng.choice((1, 2)) for _ in range(rng.randint(1, 9))] for _ in range(count)]
            result = h.try_begin([h.sequence_admission(p, s) for p, s in zip(prompts, free, strict=False)])
            if result.status is h.OK:
                handle = result.admission.request
                h.handles.append(handle)
                live.append(handle)
                h.run_prefill(handle)
            continue
        if not live:
            continue
        handle = rng.choice(live)
        if kind == "join" and free:
            if h.admit(handle, [rng.choice((1, 2)) for _ in range(rng.randint(1, 6))], free[0]).status is h.OK:
                size = h.size(handle)
                h.seat(size)
                h.synchronize()
                advance = h.advance(3, h.seq(handle, size - 1).token_count)
                assert h.coordinator.finalize_sequence_admission(handle, size - 1, advance) is h.OK
        elif kind == "compact":
            kept = [rng.random() < 0.7 for _ in range(h.size(handle))]
            mapping = [sum(kept[:slot]) if keep else -1 for slot, keep in enumerate(kept)]
            h.compact(handle, mapping)
            if not any(kept):
                live.remove(handle)
                assert h.finish(handle) is h.OK
        elif kind == "end":
            live.remove(handle)
            h.finish(handle) if rng.random() < 0.5 else handle.close()
        else:
            for _ in range(rng.choice((1, 2, 5))):
                if handle not in live:
                    break
                step(h, rng, handle, live)


def step(h, rng, handle, live):
    headroom = rng.choice((1, 1, 1, 1, 2, 5))
    if rng.random() < 0.1:
        h.refuses(h.prepare_decode, handle, -1)
    if h.prepare_decode(handle, headroom).status is not h.OK:
        if handle.state == "finishing":
            live.remove(handle)
            assert h.finish(handle) is h.OK
        return
    h.synchronize()
    views = [h.seq(handle, slot) for slot in range(h.size(handle))]
    seated = ["seated" in str(view.state).lower() for view in views]
    held = [not here or rng.random() < 0.05 for here in seated]
    completed = [slot for slot, here in enumerate(seated) if here and rng.random() < 0.06]
    committed = [view.committed_state_length + 1 for view in views]
    form = rng.choice(("list", "arrays", "arrays", "arrays", "one each"))
    if form == "list" or (any(held) and form == "one each"):
        advances = [h.HOLD if hold else h.advance(7, c) for hold, c in zip(held, committed, strict=True)]
    elif any(held):
        advances = BatchAdvance(
            np.array([7 for hold in held if not hold], np.int32),
            np.array([0 if hold else 1 for hold in held], np.int32),
            np.array([-1 if hold else c for hold, c in zip(held, committed, strict=True)], np.int32),
        )
    else:
        tokens = np.array([rng.choice((1, 2, 3)) for _ in held], np.int32)
        advances = BatchAdvance.one_token_each(tokens, np.array(committed, np.int32))
    arguments = rng.choice(((), (completed,), (tuple(completed),), (np.array(completed, np.int64), None)))
    if completed and not arguments:
        arguments = (completed,)
    if rng.random() < 0.1:
        h.refuses(h.coordinator.complete_decode_step, handle, advances, [99])
    options = {}
    if len(arguments) == 1 and rng.random() < 0.2:
        options, arguments = {"publishable_completed_slots": arguments[0]}, ()
    assert h.coordinator.complete_decode_step(handle, advances, *arguments, **options) is h.OK
    # What the model does.
    h.set_device_lengths([h.committed(handle, slot) for slot in range(h.size(handle))])


def record(recorded, harness_class, seed, steps):
    rng = random.Random(seed)
    sink = Counting()
    pages, batch = rng.choice((12, 20, 40)), rng.choice((2, 3, 4))
    h = recorded(
        CallRecorder(sink),
        lambda: harness_class(pages=pages, max_batch=batch, row_pages=8, enforce_min_pool=False),
    )
    play(h, rng, steps)
    h.end_everything()
    assert h.recorder.failure is None
    return sink.data, sink.bytes


def compare(recorded, harness_class, monkeypatch, seed, steps=60):
    fast = record(recorded, harness_class, seed, steps)
    with monkeypatch.context() as patch:
        patch.setattr(recorder_module, "steady_call", lambda *arguments: None)
        slow = record(recorded, harness_class, seed, steps)
    assert fast == slow, f"seed {seed}"
    return fast


@pytest.mark.parametrize("seed", range(16))
def test_the_fast_path_writes_what_the_slow_path_writes(recorded, harness_class, monkeypatch, seed):
    compare(recorded, harness_class, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_the_fast_path_writes_what_the_slow_path_writes_for_long(recorded, harness_class, monkeypatch, first):
    for seed in range(first, first + 50):
        compare(recorded, harness_class, monkeypatch, seed, 150)
        recorded.end()
        recorded.made.clear()


def slots_of(text):
    """``0-2,5`` as numbers."""
    ends = [part.split("-") for part in text.split(",") if part]
    return tuple(slot for end in ends for slot in range(int(end[0]), int(end[-1]) + 1))


@pytest.mark.parametrize("seed", range(6))
def test_the_lines_of_steps_are_the_steps_that_were_made(recorded, harness_class, seed):
    """A replay writes lines in the same way as the recorder, so it would not notice one that says something else."""
    sink, made = Counting(), []
    recorder = CallRecorder(sink)
    write = recorder.take
    recorder.take = lambda parts: (made.append(Step(parts[0], parts[1], tuple(parts[2]), *parts[3:])), write(parts))
    h = recorded(recorder, lambda: harness_class(pages=20, max_batch=4, row_pages=8, enforce_min_pool=False))
    play(h, random.Random(seed), 60)
    h.end_everything()
    lines = [json.loads(line) for line in sink.data.splitlines()]
    steps = [line for line in lines if line["line"] == "step"]
    assert len(steps) == len(made) > 50
    for line, step in zip(steps, made, strict=True):
        named = ("machine", "subject", "row", "event", "source", "target", "outcome")
        assert [line[name] for name in named] == [getattr(step, name) for name in named]
        assert tuple(line.get("guards", {}).items()) == step.guards
        assert tuple(line.get("ran", ())) == step.ran
        assert slots_of(line.get("slots", "")) == step.slots
        assert (line.get("failed"), line.get("ended")) == (step.failed, step.work_ended)


def test_such_a_schedule_replays(recorded, harness_class, monkeypatch, make_trace, tmp_path, replay_equal):
    for seed in range(2):
        data, tokens = record(recorded, harness_class, seed, 60)
        path = make_trace(tmp_path / "t", data)
        (tmp_path / "t.tokens").write_bytes(tokens)
        assert replay_equal(path).calls > 40


def test_the_fast_path_is_taken(recorded, harness_class, monkeypatch):
    """Else the comparison would be of the slow path with itself."""
    slow = []
    inner = CallRecorder._write
    monkeypatch.setattr(CallRecorder, "_write", lambda self, name, *rest: (slow.append(name), inner(self, name, *rest)))
    h = recorded(CallRecorder(Counting()), lambda: harness_class(row_pages=16, pages=60))
    handle = h.begin(h.T(4), headroom=50)
    h.run_prefill(handle)
    for _ in range(40):
        assert h.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(1, 0)).status is h.OK
        h.synchronize()
        lengths = np.array([h.committed(handle) + 1], np.int32)
        advances = BatchAdvance.one_token_each(np.array([5], np.int32), lengths)
        assert h.coordinator.complete_decode_step(handle, advances) is h.OK
    assert slow.count("prepare_decode_step") < 6
    assert slow.count("complete_decode_step") < 6


def test_many_lines_are_forgotten_without_harm(recorded, harness_class, monkeypatch):
    """The store of known lines is emptied when it is full."""
    wanted = record(recorded, harness_class, 1, 40)
    monkeypatch.setattr("context_cache.coordinator.traces.steady._KEPT_MAX", 3)
    assert record(recorded, harness_class, 1, 40) == wanted
