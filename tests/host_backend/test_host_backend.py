"""The host backend: a stream that runs late and in order, events, staging, and the wrappers of tests.

The fake is trusted only because it is strict: work reads its host inputs when it runs, so that a missing fence shows up
as wrong data.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from context_cache.backends import (
    DeviceError,
    DrainResult,
    FaultyBackend,
    FaultySynchronizer,
    HostBackend,
    HostStream,
    RecordingBackend,
    StagingRing,
    drain_with,
)


@pytest.fixture
def backend():
    return HostBackend()


@pytest.fixture
def stream(backend):
    return backend.new_stream()


def ints(*values):
    return np.array(values, dtype=np.int32)


# ---- the stream ------------------------------------------------------------------------------------------------------


def test_work_runs_late_and_in_order(backend, stream):
    """Nothing runs at the enqueue; a synchronise runs all of it, oldest first."""
    ran = []
    for name in "abc":
        stream.enqueue(lambda name=name: ran.append(name), name)
    assert ran == []
    assert tuple(stream.pending) == ("a", "b", "c")
    assert stream.run(1) == 1
    assert ran == ["a"]
    assert tuple(stream.pending) == ("b", "c")
    assert backend.synchronize(stream) is True
    assert ran == ["a", "b", "c"]
    assert not stream.pending
    assert stream.run() == 0


def test_work_reads_its_inputs_when_it_runs(backend, stream):
    """Why late running finds missing fences: the second content is what arrives."""
    lengths, staged = backend.array((3,), "int32"), backend.pinned((2,), "int32")
    staged[:] = [5, 6]
    backend.reset_lengths(lengths, staged, stream)
    staged[:] = [7, 8]
    backend.synchronize(stream)
    assert backend.to_host(lengths).tolist() == [7, 8, 0]


def test_a_held_stream_runs_nothing(backend, stream):
    """hold blocks, let_go unblocks, and the work still runs only at a synchronise."""
    ran = []
    stream.enqueue(lambda: ran.append(1), "one")
    stream.hold()
    assert stream.run() == 0
    began = time.monotonic()
    assert backend.synchronize(stream, 0.02) is False
    assert time.monotonic() - began < 5
    assert ran == []
    stream.let_go()
    assert ran == []
    assert backend.synchronize(stream, 0.02) is True
    assert ran == [1]


def test_a_wait_without_end_is_an_error(backend, stream):
    """One thread: a synchronise of a held stream without a limit could never return."""
    stream.enqueue(lambda: None, "one")
    stream.hold()
    with pytest.raises(DeviceError):
        backend.synchronize(stream)


def test_two_streams_are_independent(backend):
    """Synchronising one leaves the other's work where it is."""
    one, two = backend.new_stream(), backend.new_stream()
    ran = []
    one.enqueue(lambda: ran.append("one"), "one")
    two.enqueue(lambda: ran.append("two"), "two")
    backend.synchronize(two)
    assert ran == ["two"]
    assert isinstance(one, HostStream)
    assert tuple(one.pending) == ("one",)


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_event_is_done_once_all_before_it_ran(backend, stream):
    """And not earlier; what comes after it does not matter."""
    stream.enqueue(lambda: None, "a")
    stream.enqueue(lambda: None, "b")
    event = backend.record_event(stream)
    stream.enqueue(lambda: None, "c")
    assert backend.event_done(event) is False
    stream.run(1)
    assert backend.event_done(event) is False
    stream.run(1)
    assert backend.event_done(event) is True
    assert tuple(stream.pending) == ("c",)


def test_an_event_of_an_idle_stream_is_done(backend, stream):
    assert backend.event_done(backend.record_event(stream)) is True


def test_waiting_for_an_event_runs_what_is_before_it_only(backend, stream):
    """As a device would have come exactly so far at the least."""
    ran = []
    for name in "abc":
        stream.enqueue(lambda name=name: ran.append(name), name)
        if name == "b":
            event = backend.record_event(stream)
    backend.wait_event(event)
    assert ran == ["a", "b"]
    assert backend.event_done(event)
    backend.wait_event(event)
    assert ran == ["a", "b"]


# ---- verbs -----------------------------------------------------------------------------------------------------------


def test_upload_rows_writes_k_and_derives_v(backend, stream):
    """V id = K id + num_pages, an unused entry is -1 in both halves, other rows are not touched."""
    table = backend.array((3, 2, 4), "int32")
    table[:] = 99
    backend.upload_rows(table, np.array([[1, 2, -1, -1], [3, -1, -1, -1]], dtype=np.int32), ints(2, 0), 10, stream)
    assert (backend.to_host(table) == 99).all()
    backend.synchronize(stream)
    assert backend.to_host(table).tolist() == [
        [[3, -1, -1, -1], [13, -1, -1, -1]],
        [[99] * 4, [99] * 4],
        [[1, 2, -1, -1], [11, 12, -1, -1]],
    ]


def test_compact_lengths_moves_survivors_down_in_place(backend, stream):
    lengths = backend.array((4,), "int32")
    lengths[:] = [5, 6, 7, 8]
    mapping = backend.array((3,), "int32")
    mapping[:] = [0, -1, 1]
    backend.compact_lengths(lengths, mapping, 3, stream)
    assert backend.to_host(lengths).tolist() == [5, 6, 7, 8]
    backend.synchronize(stream)
    assert backend.to_host(lengths).tolist()[:2] == [5, 7]
    assert backend.to_host(lengths).tolist()[3] == 8


def test_compact_lengths_follows_a_mapping_uploaded_just_before(backend, stream):
    """The mapping is read on the device, in stream order."""
    lengths, mapping = backend.array((3,), "int32"), backend.array((3,), "int32")
    lengths[:] = [5, 6, 7]
    backend.upload_mapping(mapping, ints(-1, 0, 1), stream)
    backend.compact_lengths(lengths, mapping, 3, stream)
    backend.synchronize(stream)
    assert backend.to_host(lengths).tolist()[:2] == [6, 7]
    assert backend.to_host(mapping).tolist() == [-1, 0, 1]


def test_gather_rows_copies_rows_by_slot(backend, stream):
    table = backend.array((3, 2, 2), "int32")
    table[:] = np.arange(12).reshape(3, 2, 2)
    dest, slots = backend.array((3, 2, 2), "int32"), backend.array((3,), "int32")
    slots[:] = [2, 0, 1]
    backend.gather_rows(dest, table, slots, 2, stream)
    backend.synchronize(stream)
    assert backend.to_host(dest).tolist() == [[[8, 9], [10, 11]], [[0, 1], [2, 3]], [[0, 0], [0, 0]]]


def test_clear_resident_row_zeroes_that_row_of_every_tensor(backend, stream):
    one, two = backend.array((3, 2), "float32"), backend.array((3, 1, 2), "float32")
    one[:], two[:] = 1, 2
    backend.clear_resident_row((one, two), 1, stream)
    backend.synchronize(stream)
    assert one.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert two.tolist() == [[[2, 2]], [[0, 0]], [[2, 2]]]


def test_a_host_copy_is_a_copy(backend):
    array = backend.array((2,), "int32")
    copy = backend.to_host(array)
    copy[:] = 9
    assert array.tolist() == [0, 0]


# ---- staging ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(backend):
    return StagingRing(backend, lambda: backend.pinned((2,), "int32"), depth=2, limit=4)


def stage(backend, ring, stream, target, values):
    use = ring.take()
    try:
        use.buffer[:] = values
        backend.reset_lengths(target, use.buffer, stream)
    finally:
        ring.commit(use, stream)


def test_a_buffer_is_taken_again_only_after_its_copy_ran(backend, stream, ring):
    """Three copies are pending at a time; each carries its own content."""
    targets = [backend.array((2,), "int32") for _ in range(3)]
    for number, target in enumerate(targets):
        stage(backend, ring, stream, target, [number, number])
    backend.synchronize(stream)
    assert [t.tolist() for t in targets] == [[0, 0], [1, 1], [2, 2]]


def test_the_ring_is_bounded_and_then_waits_for_the_oldest(backend, stream, ring):
    """Case C063: however many uploads, at most the limit of buffers, and nothing is overwritten early."""
    targets = [backend.array((2,), "int32") for _ in range(50)]
    for number, target in enumerate(targets):
        stage(backend, ring, stream, target, [number, number])
    assert ring.buffers <= 4
    backend.synchronize(stream)
    assert [t.tolist()[0] for t in targets] == list(range(50))


def test_buffers_are_reused_once_their_copies_ran(backend, stream, ring):
    for number in range(20):
        stage(backend, ring, stream, backend.array((2,), "int32"), [number, number])
        backend.synchronize(stream)
    assert ring.buffers == 2


def test_a_use_that_raises_is_fenced_all_the_same(backend, stream):
    """30.1: if a copy fails after another was enqueued, staging is not reused too early."""
    ring = StagingRing(backend, lambda: backend.pinned((2,), "int32"), depth=1, limit=2)
    target, other = backend.array((2,), "int32"), backend.array((2,), "int32")

    def copy_that_fails_halfway():
        use = ring.take()
        try:
            use.buffer[:] = [1, 2]
            backend.reset_lengths(target, use.buffer, stream)
            raise DeviceError("upload_rows", stream.name, "second copy")
        finally:
            ring.commit(use, stream)

    with pytest.raises(DeviceError):
        copy_that_fails_halfway()
    stage(backend, ring, stream, other, [8, 9])
    backend.synchronize(stream)
    assert (target.tolist(), other.tolist()) == ([1, 2], [8, 9])


def test_a_buffer_whose_event_could_not_be_recorded_waits_for_a_drain(backend, stream):
    """Nothing tells when its copy ends, so only a proven drain gives the buffer back."""
    ring = StagingRing(backend, lambda: backend.pinned((2,), "int32"), depth=1, limit=3)
    target = backend.array((2,), "int32")
    lost = ring.take()
    lost.buffer[:] = [1, 2]
    backend.reset_lengths(target, lost.buffer, stream)
    # No commit: record_event has raised.
    for _ in range(5):
        use = ring.take()
        assert use.buffer is not lost.buffer
        use.buffer[:] = [8, 9]
        ring.commit(use, stream)
    backend.synchronize(stream)
    assert target.tolist() == [1, 2]
    ring.drained()
    taken = []
    for _ in range(ring.buffers):
        use = ring.take()
        taken.append(id(use.buffer))
    assert id(lost.buffer) in taken


# ---- wrappers --------------------------------------------------------------------------------------------------------


def verbs(backend, stream):
    lengths, mapping = backend.array((2,), "int32"), backend.array((2,), "int32")
    table = backend.array((2, 2, 2), "int32")
    return [
        lambda: backend.upload_rows(table, ints(1, 2).reshape(1, 2), ints(0), 4, stream),
        lambda: backend.reset_lengths(lengths, ints(1, 2), stream),
        lambda: backend.upload_mapping(mapping, ints(0, 1), stream),
        lambda: backend.compact_lengths(lengths, mapping, 2, stream),
        lambda: backend.clear_resident_row((), 0, stream),
    ]


NAMES = ["upload_rows", "reset_lengths", "upload_mapping", "compact_lengths", "clear_resident_row"]


def test_the_recording_wrapper_logs_verbs_in_order_and_drains(backend, stream):
    recording = RecordingBackend(backend)
    calls = verbs(recording, stream)
    assert recording.log == [], "allocation is no verb"
    for call in calls:
        call()
    recording.record_event(stream)
    recording.synchronize(stream)
    assert recording.log == [*NAMES, "drain"]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_exactly_the_chosen_action_fails(backend, stream, number):
    """The n-th enqueueing verb raises and enqueues nothing; those before and after pass."""
    faulty = FaultyBackend(backend, fail_action=number)
    for n, call in enumerate(verbs(faulty, stream), start=1):
        pending = len(stream.pending)
        if n == number:
            with pytest.raises(DeviceError) as caught:
                call()
            assert caught.value.verb == NAMES[n - 1]
            assert len(stream.pending) == pending
        else:
            call()


def test_the_count_starts_anew_when_armed(backend, stream):
    faulty = FaultyBackend(backend)
    for call in verbs(faulty, stream):
        call()
    faulty.arm(2)
    calls = verbs(faulty, stream)
    calls[0]()
    with pytest.raises(DeviceError):
        calls[1]()
    calls[1]()
    faulty.arm(1)
    faulty.disarm()
    for call in calls:
        call()


def test_a_part_of_a_failing_action_may_have_been_enqueued(backend, stream):
    """A real device error leaves it open how much was enqueued; both must be testable."""
    faulty = FaultyBackend(backend, fail_action=1, partly=True)
    lengths = faulty.array((2,), "int32")
    with pytest.raises(DeviceError):
        faulty.reset_lengths(lengths, ints(1, 2), stream)
    assert stream.pending
    backend.synchronize(stream)
    assert lengths.tolist() == [1, 2]


def test_a_device_error_carries_its_facts():
    error = DeviceError("upload_rows", "main", "out of memory")
    assert (error.verb, error.stream, error.cause) == ("upload_rows", "main", "out of memory")
    for part in ("upload_rows", "main", "out of memory"):
        assert part in str(error)


def test_the_faulty_synchroniser_fails_at_the_chosen_drain(backend, stream):
    faulty = FaultySynchronizer(backend.synchronize, fail_drain=2)
    stream.enqueue(lambda: None, "a")
    assert faulty(stream, None) is True
    stream.enqueue(lambda: None, "b")
    assert faulty(stream, None) is False
    assert stream.pending, "a failed drain has waited for nothing"
    assert faulty(stream, None) is True
    assert faulty.calls == 3


# ---- drain -----------------------------------------------------------------------------------------------------------


def test_a_good_drain(backend, stream):
    stream.enqueue(lambda: None, "a")
    assert drain_with(backend.synchronize, stream, None) == DrainResult(ok=True)
    assert not stream.pending


def test_a_drain_that_answers_no_has_failed(stream):
    result = drain_with(lambda stream, timeout: False, stream, 2.5)
    assert result.ok is False
    assert result.cause
    assert result.interrupt is None


def test_a_drain_that_passes_its_limit_has_failed(backend, stream):
    stream.enqueue(lambda: None, "a")
    stream.hold()
    result = drain_with(backend.synchronize, stream, 0.02)
    assert result.ok is False
    assert tuple(stream.pending) == ("a",)


@pytest.mark.parametrize(
    "error", [RuntimeError("gone"), DeviceError("synchronize", "main", "gone"), ValueError("gone")], ids=repr
)
def test_an_exception_of_the_synchroniser_is_a_failed_drain_and_is_logged(stream, error, caplog):
    """30.5: whatever Exception it raises; the cause is logged."""

    def raising(stream, timeout):
        raise error

    with caplog.at_level(logging.WARNING):
        result = drain_with(raising, stream, None)
    assert result.ok is False
    assert "gone" in str(result.cause)
    assert "gone" in caplog.text
    assert result.interrupt is None


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_is_a_failed_drain_that_remembers_it(stream, interrupt):
    """30.5: first the effect of a failed drain, then it is raised again, by whoever asked for the drain."""

    def raising(stream, timeout):
        raise interrupt

    result = drain_with(raising, stream, None)
    assert result.ok is False
    assert result.interrupt is interrupt


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_limit_is_passed_on(stream, limit):
    seen = []
    drain_with(lambda stream, timeout: seen.append(timeout) or True, stream, limit)
    assert seen == [limit]
