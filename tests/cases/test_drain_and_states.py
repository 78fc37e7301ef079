"""Cases of public bug reports: streams and device errors, drain, quarantine and poison, state-machine behaviour.

Left out, because the thing is not offered here:
C067, C068, C069, C072 several streams, threads and devices: one coordinator, one stream, one caller at a time.
C073 stream capture: a matter of the device backend.
C075 classes of device errors: a device error ends its request as broken, a failed drain poisons; there is no third.
C076 timings by events: metrics are counters.
C078, C079 waiting callers and a queue: every call returns at once, admission control is the scheduler's.
C106 is met by 88b (a clearing that fails answers POISONED); C112 by 87 (shutdown stops at the first failed drain).
C109, C110, C111, C118 set-up of the machine classes: tested with the framework.
C113 cost per request: measured by the benchmark, never by a timed test.
C115 saving a live coordinator: not offered.
C119 triggers inside callbacks: rows call no triggers of their own machine.
"""

from __future__ import annotations

import gc
import itertools
import logging
import subprocess
import sys
import threading

import pytest

from context_cache.backends import DeviceError, HostBackend
from context_cache.coordinator import (
    ContextCacheSequenceAdvance,
    ContractViolation,
    DeploymentConfig,
    LayerGeometry,
    allocate_resources,
)


def prepared(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    return handle


def settled(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    return handle


# ---- streams and device errors ------------------------------------------------------------

SCRIPT = """
from context_cache.backends import HostBackend
from context_cache.coordinator import *

backend = HostBackend()
stream = backend.new_stream()
deployment = DeploymentConfig(
    max_batch=2, kv_capacity_tokens=16, page_size=4, layers=(LayerGeometry.attention(kv_heads=1, head_dim=4),)
)
resources = allocate_resources(deployment, 8, backend)
coordinator = ContextCacheCoordinator(
    ContextCacheConfig(enabled=True), deployment, resources, backend=backend, stream=stream
)
sequence = ContextCacheSequenceAdmission(token_ids=[1, 2, 3, 4, 5], resident=ResidentRef(0, 1))
begun = coordinator.begin_request(
    ContextCacheBatchAdmission(sequences=(sequence,)), DecodingKvHeadroom(base_extra_tokens=1), stream
)
handle = begun.admission.request
coordinator.prepare_prefill(handle)
"""


def run_script(text):
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)


def test_a_script_that_simply_ends_says_at_most_one_line():
    """C070. Exit status 0, no traceback out of a finaliser."""
    done = run_script(SCRIPT)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stdout == ""
    # One line for the lost handle and one for the coordinator that still owned it.
    assert len(done.stderr.strip().splitlines()) <= 2


def test_a_script_that_closes_says_nothing():
    """C070, the other half."""
    done = run_script(SCRIPT + "handle.close()\ncoordinator.close()\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("pages", [0, -1, 5])
def test_a_configuration_error_is_the_only_message(pages, capsys):
    """C071. A constructor that raises leaves no half-built object whose finaliser has something to add."""
    deployment = DeploymentConfig(
        max_batch=2, kv_capacity_tokens=16, page_size=4, layers=(LayerGeometry.attention(kv_heads=1, head_dim=4),)
    )
    with pytest.raises(ContractViolation):
        allocate_resources(deployment, pages, HostBackend())
    gc.collect()
    assert capsys.readouterr().err == ""


def test_clean_up_on_a_dead_device_makes_no_further_call_and_raises_nothing(h, T):
    """C074. Two live requests, every verb and every drain fails from now on: pages are withheld, not free."""
    a, b = settled(h, T(5), 0), settled(h, [51, 52, 53, 54, 55], 1)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(b, 4)
    h.fail(*range(1, 100))
    h.sync.error = RuntimeError("an illegal memory access was encountered")
    held = h.all_active()
    h.mark()
    h.drop(b)
    assert h.log == ["drain"]
    assert b.state == "quarantined"
    assert h.coordinator.state == "poisoned"
    assert h.all_active() == held
    assert h.coordinator.shutdown() is h.POISONED
    assert h.log == ["drain", "drain"], "clean-up after a failed drain makes no device call"
    assert set(h.all_active()) >= {2, 3}
    assert not set(h.pages(a)) & set(h.free())


# ---- drain, quarantine, poison ------------------------------------------------------------


def test_a_poisoned_coordinator_says_so_at_once(h, T):
    """C077. Health is a property, and the next submission is refused within the same step."""
    h.poison(0)
    assert h.coordinator.state == "poisoned"
    calls = h.sync.calls
    assert h.try_begin([h.sequence_admission(T(5), 1)]).status is h.POISONED
    assert h.sync.calls == calls, "the refusal does not ask the device"


def test_shutdown_is_not_done_while_somebody_owns_work(h, T):
    """C080."""
    handle = prepared(h, T(5))
    assert h.coordinator.shutdown() is h.REQUEST_FAILED
    assert h.coordinator.state == "serving"
    h.drop(handle)
    assert h.coordinator.shutdown() is h.OK


def test_a_second_close_changes_nothing(h, T):
    """C081, one after the other."""
    h.finish(settled(h, T(5)))
    h.coordinator.close()
    free = h.free()
    h.coordinator.close()
    assert h.coordinator.shutdown() is h.OK
    assert h.free() == free


def test_a_close_inside_a_close_is_refused_and_each_resource_is_released_once(h, T):
    """C081, from inside the drain: one caller at a time (00.6)."""
    handle = h.poison(0)
    seen = []

    def enter():
        with pytest.raises(ContractViolation):
            h.coordinator.shutdown()
        seen.append(handle.state)

    h.sync.before = enter
    assert h.coordinator.shutdown() is h.OK
    assert seen == ["quarantined"]
    assert sorted(h.free()) == list(range(12))


def test_a_stuck_stream_ends_in_quarantine_within_the_limit(harness, T):
    """C082. The call returns, and no page from quarantine is ever handed out."""
    h = harness(drain_timeout_seconds=0.02, own_synchronizer=False)
    handle = prepared(h, T(5))
    other = h.begin([51, 52], 1)
    h.stream.hold()
    h.drop(handle)
    assert handle.state == "quarantined"
    assert not {0, 1} & set(h.free())
    assert h.try_begin([h.sequence_admission(T(5), 2)]).status is h.POISONED
    h.drop(other)
    assert not {0, 1} & set(h.free())
    h.stream.let_go()
    assert h.coordinator.shutdown() is h.OK


def test_a_clean_stop_does_not_look_like_a_crash(h, T, caplog):
    """C083."""
    with caplog.at_level(logging.DEBUG):
        h.finish(settled(h, T(5)))
        h.coordinator.close()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert h.coordinator.state == "closed"


# ---- state machine ------------------------------------------------------------


def test_the_failure_of_one_request_does_not_swallow_the_end_of_another(h, T):
    """C101. R1's drain raises; R2 ends as if nothing had happened."""
    one, two = prepared(h, T(5), 0), h.begin([51, 52], 1)
    h.sync.error = RuntimeError("R1")
    h.drop(one)
    h.sync.error = None
    h.drop(two)
    assert (one.state, two.state) == ("quarantined", "released")


def test_an_interrupt_does_not_block_later_calls(h, T):
    """C102, C105. The interrupt reaches the caller; both requests can be ended afterwards."""
    one, two = prepared(h, T(5), 0), h.begin([51, 52], 1)
    h.sync.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        h.finish(one)
    h.sync.error = None
    h.run_prefill(two)
    assert h.finish(two) is h.OK
    assert h.coordinator.shutdown() is h.OK
    assert (one.state, two.state) == ("released", "released")


def test_a_refusal_says_who_where_and_why(h, T):
    """C103. A refused event names the request and its state; a refusal for capacity is a result, not an exception."""
    handle = h.begin(T(5))
    error = h.refuses(h.prepare_decode, handle)
    assert str(handle.id) in str(error)
    assert "admitted" in str(error)


def test_a_failed_upload_leaves_no_request_that_claims_to_be_bound(h, T):
    """C104."""
    handle = h.begin(T(5))
    h.fail(1)
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(handle)
    assert handle.state == "broken"
    assert h.all_active() == {0: 1, 1: 1}


def test_a_question_has_no_side_effects(h, T):
    """C107. Asked three times, no step is recorded and nothing changes."""
    handle = settled(h, T(5))
    before, steps = h.dump(), len(h.recorder.steps)
    for _ in range(3):
        h.coordinator.supports_live_sequence_admission()
        h.coordinator.inspect(handle.id)
        h.coordinator.metrics()
        h.seq(handle)
        repr(handle)
        assert (handle.valid, handle.state) == (True, "settled")
    assert h.dump() == before
    assert len(h.recorder.steps) == steps


def test_a_state_cannot_be_assigned(h, T):
    """C108. Not by the handle, and there is no trigger that goes straight to a state."""
    handle = h.begin(T(5))
    with pytest.raises(AttributeError):
        handle.state = "released"
    assert not [name for name in dir(handle) if name.startswith(("to_", "trigger"))]
    assert handle.state == "admitted"


def test_every_change_of_state_is_recorded(h, T):
    """C108, the other half: the recorded steps form an unbroken path from the first to the last state."""
    handle = settled(h, T(5))
    h.decode(handle, 902)
    h.compact(handle, [-1])
    h.finish(handle)
    path = [(str(s.source), str(s.target)) for s in h.recorder.steps if s.machine == "request"]
    assert path, "no step of the request was recorded"
    for (_, target), (source, _) in itertools.pairwise(path):
        assert source == target
    assert path[-1][1] == "released"


def test_retired_requests_are_not_kept_in_memory(h, T):
    """C114. After 300 requests the coordinator holds none of them."""

    def requests():
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing).__name__ in ("Request", "RequestHandle", "Lease"))

    h.finish(h.begin(T(5), keep=False))
    h.recorder.steps.clear()
    few = requests()
    for _ in range(300):
        handle = h.begin(T(5), keep=False)
        h.run_prefill(handle)
        h.finish(handle)
        del handle
    h.recorder.steps.clear()
    assert requests() <= few + 3


def test_a_call_inside_a_call_is_refused(h, T):
    """C117, C119 of one thread: entry from inside the drain is a contract violation, the outer call goes on."""
    one, two = prepared(h, T(5), 0), h.begin([51, 52], 1)
    refused = []

    def enter():
        for call in (
            lambda: h.finish(two),
            lambda: h.coordinator.prepare_prefill(two),
            lambda: h.try_begin([h.sequence_admission([61], 2)]),
        ):
            with pytest.raises(ContractViolation):
                call()
            refused.append(call)

    h.sync.before = enter
    assert h.finish(one) is h.OK
    assert len(refused) == 3
    assert (one.state, two.state) == ("released", "admitted")


def test_of_two_callers_at_a_time_exactly_one_wins(h, T):
    """C117. The second thread enters while the first is inside the drain: refused, and pages are released once."""
    handle = prepared(h, T(5))
    outcome = []

    def other_thread():
        try:
            outcome.append(h.finish(handle))
        except ContractViolation as error:
            outcome.append(error)

    def meanwhile():
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(10)

    h.sync.before = meanwhile
    assert h.finish(handle) is h.OK
    assert len(outcome) == 1
    assert isinstance(outcome[0], ContractViolation)
    assert h.sync.calls == 1
    assert sorted(h.free()) == list(range(12))


def test_a_state_can_be_read_while_a_call_is_running(h, T):
    """C116. Another thread asks for states during the drain of R1 and is answered, never with a half-made state."""
    one, two = prepared(h, T(5), 0), h.begin([51, 52], 1)
    seen = []

    def ask():
        thread = threading.Thread(target=lambda: seen.append((str(one.state), str(two.state), two.valid)))
        thread.start()
        thread.join(10)

    h.sync.before = ask
    assert h.finish(one) is h.OK
    assert seen == [("prefilling", "admitted", True)]


def test_invalid_progress_is_the_callers_error_and_escalates_to_nobody(h, T):
    """C084 for a running request: a refused step leaves the state, and the corrected one is accepted."""
    handle = settled(h, T(5))
    assert h.prepare_decode(handle).status is h.OK
    h.refuses(h.coordinator.complete_decode_step, handle, [ContextCacheSequenceAdvance((1, 2), 7)], ())
    assert handle.state == "decoding"
    assert h.complete(handle, 902) is h.OK
