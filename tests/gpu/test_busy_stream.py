"""A kernel that spins keeps the stream busy while the host goes on: nothing is released, overwritten or waited for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from context_cache.backends import DeviceError, StagingRing
from context_cache.backends.cupy_backend import CupyStream
from context_cache.coordinator import KVPageTable

pytestmark = pytest.mark.gpu

# Far more than any enqueue takes, far less than the spinner spins.
SOON = 3.0


def test_an_event_tells_when_its_work_has_ended_and_never_waits(backend, stream, spinner):
    before = backend.record_event(stream)
    spinner.start(stream)
    event = backend.record_event(stream)
    started = time.monotonic()
    assert backend.event_done(before)
    assert not backend.event_done(event)
    assert backend.synchronize(stream, 0.05) is False
    assert 0.05 <= time.monotonic() - started < SOON
    spinner.stop()
    assert backend.synchronize(stream, 30) is True
    assert backend.event_done(event)
    backend.wait_event(event)
    assert backend.synchronize(stream)


def test_uploads_of_a_busy_stream_keep_their_own_rows_and_do_not_wait(backend, stream, spinner):
    table = KVPageTable(max_batch=3, max_pages_per_seq=4, num_pages=10, backend=backend)
    table.upload(stream)
    seen = [backend.array((3, 2, 4), "int32") for _ in range(7)]
    slots = backend.array((3,), "int32")
    slots[:] = [0, 1, 2]
    assert backend.synchronize(stream)
    spinner.start(stream)
    started = time.monotonic()
    for page, look in enumerate(seen):
        table.set_rows([(0, [page]), (2, [page, page + 1])])
        assert table.upload(stream)
        table.gather_rows(look, slots, 3, stream)
    assert time.monotonic() - started < SOON, "seven uploads fit into the ring"
    assert not backend.event_done(backend.record_event(stream))
    spinner.stop()
    assert backend.synchronize(stream)
    for page, look in enumerate(seen):
        rows = backend.to_host(look)
        assert rows[:, 0].tolist() == [[page, -1, -1, -1], [-1] * 4, [page, page + 1, -1, -1]]
        assert rows[2, 1].tolist() == [page + 10, page + 11, -1, -1]


def test_a_full_ring_waits_for_its_oldest_use_only(backend, stream, spinner):
    """Two streams: the oldest use ended, the younger ones wait behind the spinner."""
    ring = StagingRing(backend, lambda: backend.pinned((1,), "int32"), depth=2, limit=2)
    other, lengths = backend.new_stream("other"), backend.array((1,), "int32")
    spinner.start(stream)
    for where in (other, stream):
        use = ring.take()
        backend.reset_lengths(lengths, use.buffer, where)
        ring.commit(use, where)
    started = time.monotonic()
    ring.take()
    assert time.monotonic() - started < SOON
    spinner.stop()
    assert backend.synchronize(stream)


def test_nothing_is_released_before_the_device_is_done(harness_class, equipment, backend, spinner):
    class OnTheDevice(harness_class):
        new_backend = equipment.LookingBackend

    h = OnTheDevice(drain_timeout_seconds=0.05, own_synchronizer=False)
    handle = h.begin([1, 2, 3, 4, 5], 0)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    held = h.all_active()
    spinner.start(h.stream)
    assert h.finish(handle) is not h.OK
    assert (h.coordinator.state, handle.state) == ("poisoned", "quarantined")
    assert h.all_active() == held, "the device may still write these pages"
    spinner.stop()
    assert backend.synchronize(h.stream)
    assert h.coordinator.shutdown() is h.OK
    assert h.all_active() == {}


def test_a_request_after_a_quarantined_one_has_its_own_inputs(harness_class, equipment, backend, spinner):
    """The first coordinator is dropped with copies pending; its memory must not become the second one's."""

    class OnTheDevice(harness_class):
        new_backend = staticmethod(lambda: backend)

    first = OnTheDevice(drain_timeout_seconds=0.05, own_synchronizer=False)
    stream, table = first.stream, first.table
    second = OnTheDevice(drain_timeout_seconds=30.0, own_synchronizer=False)
    spinner.start(stream)
    handle = first.begin([1, 2, 3, 4, 5], 1)
    assert first.coordinator.prepare_prefill(handle) is first.OK
    other = second.begin(list(range(50, 59)), 1)
    assert second.coordinator.prepare_prefill(other) is second.OK
    assert backend.synchronize(second.stream)
    assert second.device_row(1) == second.row(1)
    assert second.device_lengths(1) == [0]
    row = first.row(1)
    spinner.stop()
    assert backend.synchronize(stream)
    assert np.asarray(table.device_rows())[1, 0].tolist() == row
    second.end_everything()
    first.end_everything()


@pytest.mark.parametrize("kind", ["cupy", "pointer", "protocol", "torch"])
def test_the_stream_of_the_runtime_is_used_as_it_is(backend, cupy, put, spinner, kind):
    if kind == "torch":
        torch = pytest.importorskip("torch")
        theirs = torch.cuda.Stream()
        pointer = theirs.cuda_stream
    else:
        theirs = cupy.cuda.Stream(non_blocking=True)
        pointer = theirs.ptr
    if kind == "protocol":

        class Protocol:
            def __cuda_stream__(self):
                return 0, theirs.ptr

        stream = backend.wrap_stream(Protocol(), "theirs")
    else:
        stream = backend.wrap_stream(pointer if kind == "pointer" else theirs, "theirs")
    assert isinstance(stream, CupyStream)
    assert (stream.name, stream.ptr) == ("theirs", pointer)
    lengths = put(np.zeros(3, np.int32))
    spinner.start(stream)
    backend.add_lengths(lengths, 5, 3, stream)
    assert not (theirs.query() if kind == "torch" else theirs.done)
    spinner.stop()
    theirs.synchronize()
    assert backend.to_host(lengths).tolist() == [5, 5, 5]


def test_what_is_no_stream_is_refused(backend):
    for thing in (None, "stream", True, 1.5):
        with pytest.raises(TypeError, match="wrap_stream"):
            backend.wrap_stream(thing)


def test_an_error_names_verb_stream_and_cause(backend):
    """A launch with too many threads is refused at once, by the driver interface; the device stays usable."""
    stream = backend.new_stream("named")
    with (
        pytest.raises(DeviceError, match=r"'probe' on stream 'named' failed: cudaErrorInvalidValue"),
        backend._verb("probe", stream),
    ):
        backend._kernels._functions["add_lengths"]((1,), (4096,), (0, 0, 0, 0), stream=stream)
    assert backend.lost is None
    lengths = backend.array((4,), "int32")
    backend.add_lengths(lengths, 1, 4, stream)
    assert backend.synchronize(stream)
    assert backend.to_host(lengths).tolist() == [1] * 4
