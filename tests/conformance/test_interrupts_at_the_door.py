"""An interrupt may come between any two bytecodes of a call. None may leave the coordinator believing that somebody is
inside, or every later call would be refused for ever."""

from __future__ import annotations

import random
import signal
import threading

import pytest

from context_cache.coordinator import ContractViolation

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals arrive on the main thread only"
)

INTERRUPTS = 1500


class _Interrupt(BaseException):
    """What the alarm raises; nothing else does."""


@pytest.fixture
def alarms():
    """Starts an alarm after a moment that is never the same."""

    def ring(number, frame):
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, ring)
    moments = random.Random(7)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, moments.uniform(2e-5, 1.5e-4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", ["metrics", "retract", "sequence"])
def test_no_interrupt_leaves_the_door_shut(h, T, alarms, call):
    handle = h.begin(T(8), 0)
    h.run_prefill(handle)
    calls = {
        "metrics": h.coordinator.metrics,
        "retract": lambda: h.coordinator.retract_sequence_admission(handle),
        "sequence": lambda: h.coordinator.sequence(handle, 0),
    }
    for _ in range(INTERRUPTS):
        try:
            alarms()
            while True:
                calls[call]()
        except _Interrupt:
            pass
        assert not h.coordinator._entry.inside
    calls[call]()


def test_a_call_from_inside_a_call_is_refused_and_does_not_open_the_door(h, T, monkeypatch):
    """The other half: what is inside stays inside when somebody else knocks."""
    handle = h.begin(T(8), 0)
    refusals = []
    request = handle._request
    original = h.coordinator._core.fire

    def fire(*arguments):
        for _ in range(2):
            with pytest.raises(ContractViolation, match="in progress") as refusal:
                h.coordinator.metrics()
            refusals.append(refusal.value)
        return original(*arguments)

    monkeypatch.setattr(h.coordinator._core, "fire", fire)
    h.run_prefill(handle)
    assert len(refusals) >= 2
    assert request.state == "settled"
    monkeypatch.undo()
    h.coordinator.metrics()
