"""A staging ring whose events cannot be recorded: no buffer is taken twice, and the end of it is a device error."""

from __future__ import annotations

import pytest

from context_cache.backends import DeviceError, FaultyBackend, HostBackend, StagingRing


@pytest.fixture
def backend():
    return FaultyBackend(HostBackend())


@pytest.fixture
def stream(backend):
    return backend.new_stream()


@pytest.fixture
def ring(backend):
    return StagingRing(backend, lambda: backend.pinned((2,), "int32"), depth=2, limit=4)


def lose(backend, ring, stream):
    """One use whose event cannot be recorded; its buffer."""
    use = ring.take()
    backend.fail_events = True
    with pytest.raises(DeviceError):
        ring.commit(use, stream)
    backend.fail_events = False
    return use


def test_a_ring_without_a_provable_buffer_raises_a_device_error(backend, ring, stream):
    lost = [lose(backend, ring, stream) for _ in range(4)]
    assert len({id(use) for use in lost}) == 4
    assert ring.buffers == 4
    for _ in range(3):
        with pytest.raises(DeviceError):
            ring.take()
    assert ring.buffers == 4


def test_a_drain_gives_every_lost_buffer_back(backend, ring, stream):
    for _ in range(4):
        lose(backend, ring, stream)
    ring.drained()
    for _ in range(10):
        ring.commit(ring.take(), stream)
    assert ring.buffers <= 4


def test_a_lost_buffer_is_passed_over_while_another_is_free(backend, ring, stream):
    lost = lose(backend, ring, stream)
    for _ in range(10):
        use = ring.take()
        assert use is not lost
        ring.commit(use, stream)
        backend.synchronize(stream)
    assert ring.buffers == 2


def test_a_full_ring_waits_for_the_oldest_use_that_has_an_event(backend, ring, stream):
    lost = [lose(backend, ring, stream) for _ in range(2)]
    stream.enqueue(lambda: None, "copy")
    first, second = ring.take(), ring.take()
    ring.commit(first, stream)
    stream.enqueue(lambda: None, "copy")
    ring.commit(second, stream)
    assert ring.take() is first
    assert stream.completed == 1
    assert first not in lost


def test_a_ring_that_gets_no_more_memory_waits_for_a_buffer_it_has(backend, stream):
    made = []

    def make():
        if len(made) == 2:
            raise MemoryError("no page-locked memory left")
        made.append(backend.pinned((2,), "int32"))
        return made[-1]

    ring = StagingRing(backend, make, depth=2, limit=4)
    for _ in range(2):
        stream.enqueue(lambda: None, "copy")
        ring.commit(ring.take(), stream)
    assert ring.take() is not None
    assert stream.completed == 1


@pytest.mark.parametrize("verb", ["event_done", "wait_event"])
def test_an_event_that_cannot_be_asked_is_a_device_error_and_costs_no_buffer(backend, ring, stream, verb, monkeypatch):
    for _ in range(4):
        stream.enqueue(lambda: None, "copy")
        ring.commit(ring.take(), stream)

    def gone(event):
        raise DeviceError(verb, stream.name, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(backend, verb, gone)
        for _ in range(6):
            with pytest.raises(DeviceError):
                ring.take()
    for _ in range(4):
        ring.commit(ring.take(), stream)
    assert ring.buffers == 4


@pytest.mark.parametrize("verb", ["record_event", "event_done", "wait_event"])
def test_a_faulty_backend_fails_every_event_verb_while_it_is_told_to(backend, stream, verb):
    event = backend.record_event(stream)
    call = {
        "record_event": lambda: backend.record_event(stream),
        "event_done": lambda: backend.event_done(event),
        "wait_event": lambda: backend.wait_event(event),
    }[verb]
    backend.fail_events = True
    with pytest.raises(DeviceError) as caught:
        call()
    assert caught.value.verb == verb
    backend.fail_events = False
    call()
