"""Scenarios 86 to 92b: quarantine, finish, drop, shutdown, lost handles, and what device errors leave behind.

91b is a scenario of paired speculative requests; its attention-only counterparts are here.
"""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import ContextCacheSequenceAdvance, ContractViolation, ResidentRef

B_TOKENS = [51, 52, 53, 54, 55]
EMPTY = [-1] * 4


def advance(token, committed):
    return ContextCacheSequenceAdvance(accepted_token_ids=(token,), committed_state_length=committed)


def prepared(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    return handle


def settled(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    return handle


# ---- quarantine and shutdown ------------------------------------------------------------


def test_a_failed_drain_keeps_the_pages_until_a_shutdown_succeeds(h, T):
    """Scenario 86."""
    handle = prepared(h, T(5))
    h.sync.fail = True
    h.mark()
    h.drop(handle)
    assert h.log == ["drain"], "no device call after a failed drain"
    assert handle.state == "quarantined"
    assert not handle.valid
    assert h.coordinator.inspect(handle.id).state == "quarantined"
    assert h.coordinator.state == "poisoned"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.length_view is None
    refused = [h.sequence_admission(B_TOKENS, ResidentRef(1, 9))]
    assert h.try_begin(refused).status is h.POISONED
    assert h.all_active() == {0: 1, 1: 1}
    assert len(h.free()) == 10

    for _ in range(2):
        h.mark()
        assert h.coordinator.shutdown() is h.POISONED
        assert h.log == ["drain"]
        assert h.coordinator.inspect(handle.id).state == "poisoned"
        assert h.all_active() == {0: 1, 1: 1}
        assert len(h.free()) == 10

    h.sync.fail = False
    h.mark()
    assert h.coordinator.shutdown() is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert h.row(0) == h.device_row(0) == EMPTY
    assert handle.state == "released"
    assert sorted(h.free()) == list(range(12))
    with pytest.raises(ContractViolation):
        h.try_begin(refused)


def test_a_poisoned_coordinator_stays_poisoned_for_live_requests(h, T):
    """Scenario 86, 50.3: a shutdown that cannot close (a live handle) never clears the poison."""
    live = settled(h, T(5), 0)
    h.poison(1)
    assert h.coordinator.shutdown() is h.REQUEST_FAILED
    assert h.coordinator.state == "poisoned"
    assert h.try_begin([h.sequence_admission(B_TOKENS, ResidentRef(2, 9))]).status is h.POISONED
    h.decode(live, 902)
    assert h.finish(live) is h.OK
    assert h.coordinator.shutdown() is h.OK


def two_quarantined(h, T):
    a, b = h.begin(T(5), 0), h.begin(B_TOKENS, 1)
    h.sync.fail = True
    assert h.coordinator.prepare_prefill(a) is h.OK
    h.drop(a)
    assert h.coordinator.prepare_prefill(b) is h.OK, "the token is free again, live requests go on under poison"
    h.drop(b)
    assert h.sync.calls == 2
    assert (a.state, b.state) == ("quarantined", "quarantined")
    h.sync.fail = False
    return a, b


def test_shutdown_drains_quarantined_requests_newest_first(h, T):
    """Scenario 87."""
    a, b = two_quarantined(h, T)
    order = []
    h.sync.before = lambda: order.append((h.sync.calls, a.state, b.state))
    assert h.coordinator.shutdown() is h.OK
    assert order == [(3, "quarantined", "quarantined"), (4, "quarantined", "released")]
    assert (a.state, b.state) == ("released", "released")
    assert sorted(h.free()) == list(range(12))


def test_shutdown_stops_at_the_first_failed_drain(h, T):
    """Scenario 87. B is poisoned, A is not tried; a good shutdown after that ends both."""
    a, b = two_quarantined(h, T)
    h.sync.fail_calls = {3}
    assert h.coordinator.shutdown() is h.POISONED
    assert h.sync.calls == 3
    assert (a.state, b.state) == ("quarantined", "poisoned")
    assert h.all_active() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert h.coordinator.shutdown() is h.OK
    assert h.sync.calls == 5
    assert (a.state, b.state) == ("released", "released")
    assert sorted(h.free()) == list(range(12))


def test_a_clearing_upload_that_raises_does_not_stop_shutdown(h, T):
    """Scenario 87 and 40.17: quiescence is proven, so both are released."""
    a, b = two_quarantined(h, T)
    h.fail(1)
    assert h.coordinator.shutdown() is h.OK
    h.heal()
    assert (a.state, b.state) == ("released", "released")
    assert sorted(h.free()) == list(range(12))


# ---- finish ------------------------------------------------------------


def test_finish_is_idempotent(h, T):
    """Scenario 88."""
    handle = settled(h, T(5))
    assert h.finish(handle) is h.OK
    before, verbs = h.dump(), list(h.recording.log)
    assert h.finish(handle) is h.OK
    h.drop(handle)
    assert h.dump() == before
    assert list(h.recording.log) == verbs
    assert not handle.valid
    assert handle.state == "released"


def test_finish_of_an_admitted_request_makes_no_device_call(h, T):
    """Scenario 88."""
    handle = h.begin(T(5))
    h.mark()
    assert h.finish(handle) is h.OK
    assert h.log == []
    assert sorted(h.free()) == list(range(12))


def test_finish_after_prepare_prefill_drains_once_and_publishes_nothing(h, T):
    """Scenario 88."""
    handle = prepared(h, T(5))
    seen = []
    h.sync.before = lambda: seen.append((h.row(0), h.all_active()))
    h.mark()
    assert h.finish(handle) is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert seen == [([0, 1, -1, -1], {0: 1, 1: 1})], "the row is cleared after the drain, the pages go last"
    assert h.device_row(0) == EMPTY
    assert h.records() == {}
    assert h.metrics()["publication_attempts"] == 0
    assert sorted(h.free()) == list(range(12))


def test_finish_of_a_settled_request_clears_its_row_without_a_drain(h, T):
    """Scenario 88."""
    handle = settled(h, T(5))
    assert h.device_row(0) == [0, 1, -1, -1]
    h.mark()
    assert h.finish(handle) is h.OK
    assert h.log == ["upload_rows"]
    assert h.device_row(0) == EMPTY
    assert h.device_row(0, 1) == EMPTY


@pytest.mark.parametrize("how", ["finish", "drop"])
def test_a_row_that_cannot_be_cleared_poisons_but_releases(h, T, how):
    """Scenario 88b. The next upload of another live request carries the row."""
    handle, other = settled(h, T(5), 0), h.begin(B_TOKENS, 1)
    h.fail(1)
    if how == "finish":
        assert h.finish(handle) is h.POISONED
    else:
        h.drop(handle)
    h.heal()
    assert handle.state == "released"
    assert not handle.valid
    assert h.coordinator.state == "poisoned"
    assert h.active(0) == h.active(1) == 0
    assert h.free()[-1] == 1
    assert h.row(0) == EMPTY
    assert h.device_row(0) == [0, 1, -1, -1], "the device still holds the old row"
    assert h.coordinator.prepare_prefill(other) is h.OK
    assert h.device_row(0) == EMPTY
    assert h.device_row(1) == [2, 3, -1, -1]


def test_a_raising_synchroniser_is_a_failed_drain(h, T, caplog):
    """Scenario 89. Logged, not propagated."""
    handle = prepared(h, T(5))
    h.sync.error = RuntimeError("device gone")
    with caplog.at_level(logging.WARNING):
        assert h.finish(handle) is h.POISONED
    assert handle.state == "quarantined"
    assert h.coordinator.state == "poisoned"
    assert "device gone" in caplog.text


def test_a_raising_synchroniser_in_a_compaction_is_a_failed_drain(h, T):
    """Scenario 89 for compact_batch (30.5)."""
    handle = settled(h, T(5))
    assert h.begin_compaction(handle, [-1]) is h.OK
    h.sync.error = DeviceError("synchronize", h.stream.name, "device gone")
    assert h.coordinator.compact_batch(handle) is h.POISONED
    assert handle.state == "quarantined"
    assert h.all_active() == {0: 1, 1: 1}


def test_a_drain_that_passes_its_limit_has_failed(harness, T):
    """Scenario 89b with the coordinator's own synchroniser: the stream never ends."""
    h = harness(drain_timeout_seconds=0.02, own_synchronizer=False)
    handle = prepared(h, T(5))
    h.stream.hold()
    assert h.finish(handle) is h.POISONED
    assert handle.state == "quarantined"
    assert h.all_active() == {0: 1, 1: 1}
    assert h.coordinator.shutdown() is h.POISONED
    h.stream.let_go()
    assert h.coordinator.shutdown() is h.OK
    assert sorted(h.free()) == list(range(12))


@pytest.mark.parametrize("limit", [None, 2.5])
def test_the_limit_of_the_configuration_reaches_the_synchroniser(harness, T, limit):
    """Scenario 89b: None waits for ever."""
    h = harness(drain_timeout_seconds=limit)
    h.finish(prepared(h, T(5)))
    assert h.sync.timeouts == [limit]


@pytest.mark.parametrize("how", ["finish", "drop", "compact_batch", "retract", "admit"])
def test_an_interrupted_drain_quarantines_and_is_raised_again(h, T, how):
    """Scenario 89b. A KeyboardInterrupt first has the effect of a failed drain."""
    if how in ("finish", "drop"):
        handle = prepared(h, T(5))
    else:
        handle = settled(h, T(5))
        if how == "compact_batch":
            assert h.begin_compaction(handle, [-1]) is h.OK
        elif how == "retract":
            assert h.admit(handle, B_TOKENS, 1).status is h.OK
        else:
            h.fail(1)
    held = h.all_active()
    call = {
        "finish": lambda: h.finish(handle),
        "drop": lambda: h.drop(handle),
        "compact_batch": lambda: h.coordinator.compact_batch(handle),
        "retract": lambda: h.coordinator.retract_sequence_admission(handle),
        "admit": lambda: h.admit(handle, B_TOKENS, 1),
    }[how]
    h.sync.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call()
    h.heal()
    assert handle.state == "quarantined"
    assert not handle.valid
    assert h.coordinator.state == "poisoned"
    assert held.items() <= h.all_active().items()
    h.end_everything()


def test_an_interrupted_shutdown_leaves_the_request_poisoned(h, T):
    """Scenario 89b and 30.5, in shutdown."""
    handle = h.poison(0)
    h.sync.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        h.coordinator.shutdown()
    h.sync.error = None
    assert h.coordinator.inspect(handle.id).state == "poisoned"
    assert h.coordinator.shutdown() is h.OK
    assert handle.state == "released"


# ---- shutdown ------------------------------------------------------------


def test_shutdown_with_live_handles_releases_nothing(h, T):
    """Scenario 90."""
    a, b = settled(h, T(5), 0), h.begin(B_TOKENS, 1)
    before = h.dump()
    h.mark()
    assert h.coordinator.shutdown() is h.REQUEST_FAILED
    assert h.dump() == before
    assert h.log == []
    assert h.coordinator.state == "serving"
    h.drop(a)
    assert h.coordinator.shutdown() is h.REQUEST_FAILED
    h.drop(b)
    assert h.coordinator.shutdown() is h.OK
    assert h.coordinator.state == "closed"
    with pytest.raises(ContractViolation):
        h.try_begin([h.sequence_admission(T(5), ResidentRef(2, 9))])
    assert h.coordinator.shutdown() is h.OK
    assert h.metrics()["admitted_sequences"] == 2


def test_close_with_owners_left_raises(h, T):
    """40.17: a coordinator that still owns requests is not destroyed silently."""
    handle = settled(h, T(5))
    with pytest.raises(Exception, match=r"."):
        h.coordinator.close()
    assert h.all_active() == {0: 1, 1: 1}
    assert h.finish(handle) is h.OK
    h.coordinator.close()
    assert h.coordinator.state == "closed"


def test_a_handle_is_a_context_manager_whose_end_is_a_drop(h, T):
    """40.1 and 40.17."""
    with h.begin(T(5)) as handle:
        h.run_prefill(handle)
    assert handle.state == "released"
    assert h.all_active() == {}
    assert h.records() == {1: [0]}


# ---- lost handles ------------------------------------------------------------


@contextmanager
def warned(caplog):
    """A warning is given, as a log record or as a Python warning."""
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        caplog.clear()
        yield
        gc.collect()
    assert caught or [r for r in caplog.records if r.levelno >= logging.WARNING], "a lost handle must be heard of"


def test_a_lost_handle_of_a_settled_request_is_reaped_by_the_next_call(h, T, caplog):
    """Scenario 90b. The finaliser itself releases nothing and touches no device."""
    handle = h.begin(T(5), 0, keep=False)
    h.run_prefill(handle)
    lost = handle.id
    h.mark()
    with warned(caplog):
        del handle
        gc.collect()
    assert h.log == []
    assert h.all_active() == {0: 1, 1: 1}
    assert h.row(0) == [0, 1, -1, -1]

    other = h.begin(B_TOKENS, 1)
    assert h.log == ["upload_rows"], "settled: no drain, the row is cleared and uploaded"
    assert h.row(0) == h.device_row(0) == EMPTY
    assert (h.active(0), h.active(1)) == (0, 0)
    assert h.coordinator.state == "serving"
    assert h.records() == {1: [0]}
    assert lost != other.id


def test_a_lost_handle_with_outstanding_work_is_drained_by_the_call_that_reaps_it(h, T, caplog):
    """Scenario 90b after prepare_prefill; the orphan's token is free afterwards."""
    handle = h.begin(T(5), 0, keep=False)
    other = h.begin(B_TOKENS, 1)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    assert h.coordinator.execution_holder == handle.id
    h.mark()
    with warned(caplog):
        del handle
        gc.collect()
    assert h.sync.calls == 0
    assert h.coordinator.prepare_prefill(other) is h.OK
    assert h.log[:2] == ["drain", "upload_rows"]
    assert h.sync.calls == 1
    assert h.coordinator.execution_holder == other.id
    assert h.all_active() == {2: 1, 3: 1}
    assert h.device_row(0) == EMPTY


def test_a_lost_handle_whose_drain_fails_is_quarantined(h, T, caplog):
    """Scenario 90b. The reaping call, begin_request, answers POISONED."""
    handle = h.begin(T(5), 0, keep=False)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    lost = handle.id
    with warned(caplog):
        del handle
        gc.collect()
    h.sync.fail = True
    result = h.try_begin([h.sequence_admission(B_TOKENS, ResidentRef(1, 9))])
    assert result.status is h.POISONED
    assert h.coordinator.inspect(lost).state == "quarantined"
    assert h.coordinator.execution_holder is None
    assert h.all_active() == {0: 1, 1: 1}
    h.sync.fail = False
    assert h.coordinator.shutdown() is h.OK
    assert sorted(h.free()) == list(range(12))


def test_shutdown_reaps_lost_handles_first(h, T, caplog):
    """Scenario 90b, 40.17."""
    handle = h.begin(T(5), 0, keep=False)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    with warned(caplog):
        del handle
        gc.collect()
    h.mark()
    assert h.coordinator.shutdown() is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert sorted(h.free()) == list(range(12))


def test_a_lost_handle_of_an_ended_request_is_silent(h, T, caplog):
    """Scenario 90b, the forbidden half: an ended request is no orphan."""
    handle = h.begin(T(5), 0, keep=False)
    assert h.finish(handle) is h.OK
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        del handle
        gc.collect()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


# ---- device errors ------------------------------------------------------------


def everything_but_the_end_is_refused(h, handle):
    c = h.coordinator
    for call in (
        lambda: c.prepare_prefill(handle),
        lambda: c.enqueue_prefill_captures(handle),
        lambda: c.finalize_prefill_publication(handle, [advance(901, 5)]),
        lambda: c.complete_decode_step(handle, [advance(902, 6)], ()),
        lambda: h.begin_compaction(handle, [0]),
        lambda: c.compact_batch(handle),
        lambda: h.admit(handle, B_TOKENS, ResidentRef(2, 99)),
        lambda: c.finalize_sequence_admission(handle, 0, advance(902, 6)),
    ):
        h.refuses(call)
    before = h.dump()
    assert c.retract_sequence_admission(handle) is False
    assert h.dump() == before


@pytest.mark.parametrize("action", [1, 2])
@pytest.mark.parametrize("end", ["drop", "finish"])
def test_a_prefill_that_could_not_be_enqueued_is_broken(h, T, action, end):
    """Scenario 91: action 2 fails; and the same for action 1."""
    handle = h.begin(T(5))
    h.fail(action)
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(handle)
    h.heal()
    assert handle.state == "broken"
    assert handle.valid
    assert h.coordinator.execution_holder is None
    assert h.coordinator.length_view is None
    assert h.coordinator.state == "serving"
    everything_but_the_end_is_refused(h, handle)
    h.refuses(h.prepare_decode, handle)

    seen = []
    h.sync.before = lambda: seen.append(h.all_active())
    h.mark()
    if end == "drop":
        h.drop(handle)
    else:
        assert h.finish(handle) is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert seen == [{0: 1, 1: 1}]
    assert h.device_row(0) == EMPTY
    assert h.records() == {}
    assert sorted(h.free()) == list(range(12))


def lengths_as_they_arrive(h):
    """Run the stream piece by piece; the first entry of the length vector after each piece."""
    seen = []
    while h.stream.pending:
        h.stream.run(1)
        value = int(np.asarray(h.cache_manager.device_lengths())[0])
        if not seen or seen[-1] != value:
            seen.append(value)
    return seen


def test_the_length_copy_of_a_broken_request_keeps_its_own_staging(h, T):
    """Scenario 91b, attention-only: A is broken with its installed lengths still pending, B is prepared at once.

    It goes wrong when staging is one buffer: A's copy, which runs late, would carry B's lengths.
    """
    a = settled(h, T(5), 0)
    b = settled(h, B_TOKENS, 1)
    c = h.begin([*B_TOKENS, 56], 2)
    assert h.starts == [4]
    h.synchronize()
    h.fail(2)
    with pytest.raises(DeviceError):
        h.begin_compaction(a, [0])
    h.heal()
    assert a.state == "broken"
    assert h.coordinator.prepare_prefill(c) is h.OK
    assert lengths_as_they_arrive(h)[-2:] == [5, 4]
    assert h.device_lengths(1) == [4]
    h.drop(b)


def test_the_length_copy_of_a_quarantined_request_keeps_its_own_staging(h, T):
    """Scenario 91b, attention-only: A is quarantined with its copy pending (00.6), B is prepared at once."""
    h.finish(settled(h, T(5)))
    a = h.begin(T(6), 0)
    assert h.starts == [4]
    b = h.begin(B_TOKENS, 1)
    assert h.starts == [0]
    h.synchronize()
    assert h.coordinator.prepare_prefill(a) is h.OK
    h.sync.fail = True
    h.drop(a)
    h.sync.fail = False
    assert h.coordinator.prepare_prefill(b) is h.OK
    assert lengths_as_they_arrive(h)[-2:] == [4, 0]
    assert h.device_row(0) == [0, 2, -1, -1], "A's row is treated as bound"
    assert h.device_row(1) == h.row(1)


def test_many_pending_length_copies_keep_their_own_staging(late_stream, h, T):
    """Scenario 91b, more uses than a pair of buffers: three requests end withheld with their copies pending."""
    h.finish(settled(h, T(9)))
    prompts = ([*T(8), 9], [*T(4), 99, 98], [71, 72])
    handles = [h.begin(prompt, slot) for slot, prompt in enumerate(prompts)]
    h.synchronize()
    seen = []
    h.sync.fail = True
    for handle in handles:
        assert h.coordinator.prepare_prefill(handle) is h.OK
        h.stream.enqueue(lambda: seen.append(int(np.asarray(h.cache_manager.device_lengths())[0])), "look")
        h.drop(handle)
    assert seen == [], "nothing has run yet"
    h.synchronize()
    assert seen == [8, 4, 0]


def test_many_installs_keep_their_own_staging(h, T):
    """Scenario 91b for install_lengths: settled requests take turns on a stream that has not run for a long time."""
    a, b = settled(h, T(5), 0), settled(h, [*B_TOKENS, 56], 1)
    h.synchronize()
    seen, expected = [], []
    for turn in range(9):
        handle = (a, b)[turn % 2]
        expected.append(h.committed(handle))
        assert h.prepare_decode(handle).status is h.OK
        h.stream.enqueue(lambda: seen.append(int(np.asarray(h.cache_manager.device_lengths())[0])), "look")
        assert h.complete(handle, 900 + turn) is h.OK
    h.synchronize()
    assert seen == expected == [5, 6, 6, 7, 7, 8, 8, 9, 9]


def test_the_mapping_copy_keeps_its_own_staging(h, T):
    """Scenario 91b, the mapping (30.5): A's mapping is pending when B uploads another one.

    A is quarantined while compacting, its copy not yet run; B compacts with another mapping into another tensor.
    """
    a = h.begin_batch([T(5), T(6)], [0, 1])
    h.run_prefill(a)
    b = settled(h, B_TOKENS, 2)
    h.synchronize()
    assert h.begin_compaction(a, [-1, 0]) is h.OK
    first = h.mapping_device
    h.sync.fail = True
    h.drop(a)
    h.sync.fail = False
    assert h.begin_compaction(b, [0]) is h.OK
    second = h.mapping_device
    h.synchronize()
    assert np.asarray(h.backend.to_host(first)).tolist()[:2] == [-1, 0]
    assert np.asarray(h.backend.to_host(second)).tolist()[:1] == [0]


def grown_but_not_uploaded(h, T):
    handle = settled(h, T(5))
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, 4)
    h.heal()
    assert handle.state == "decode_retry"
    assert h.pages(handle) == [0, 1, 2], "the growth is kept"
    assert h.coordinator.execution_holder == handle.id
    return handle


@pytest.mark.parametrize("headroom", [4, 1])
def test_a_failed_upload_of_a_step_is_retried_although_nothing_grows(h, T, headroom):
    """Scenario 92."""
    handle = grown_but_not_uploaded(h, T)
    assert h.device_row(0) == [0, 1, -1, -1]
    h.mark()
    assert h.prepare_decode(handle, headroom).status is h.OK
    assert h.log == ["upload_rows"]
    assert h.device_row(0) == [0, 1, 2, -1]
    assert handle.state == "decoding"
    assert h.complete(handle, 902) is h.OK


def test_a_failed_length_install_of_a_step_is_retried(h, T):
    """Scenario 92 for the other action of the row: the lengths are installed by the second call."""
    a = settled(h, T(5), 0)
    b = settled(h, [*B_TOKENS, 56], 1)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(a, 4)
    h.heal()
    assert a.state == "decode_retry"
    h.mark()
    assert h.prepare_decode(a, 4).status is h.OK
    assert h.log == ["reset_lengths", "upload_rows"]
    assert h.device_lengths(1) == [5]
    assert h.device_row(0) == h.row(0)
    assert h.coordinator.length_view == a.id
    h.complete(a, 902)
    h.drop(b)


def test_an_upload_that_fails_after_the_install_is_retried(h, T):
    """Scenario 92, second action of two: the lengths are there already, only the row is missing."""
    a = settled(h, T(5), 0)
    settled(h, [*B_TOKENS, 56], 1)
    h.fail(2)
    with pytest.raises(DeviceError):
        h.prepare_decode(a, 4)
    h.heal()
    assert a.state == "decode_retry"
    assert h.prepare_decode(a, 4).status is h.OK
    assert h.device_lengths(1) == [5]
    assert h.device_row(0) == h.row(0)


def test_refused_growth_in_a_retry_changes_nothing_or_ends_the_request(harness, T):
    """Scenario 92 and 40.13: with the former headroom it can be called again; the only sequence is finishing."""
    h = harness(pages=3, enforce_min_pool=False)
    handle = settled(h, T(5))
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, 4)
    h.heal()
    result = h.prepare_decode(handle, 8)
    assert result.status is h.REQUEST_FAILED
    assert handle.state == "finishing_retry"
    h.mark()
    assert h.finish(handle) is h.OK
    assert h.log == ["drain", "upload_rows"], "the work of the failed step is still outstanding"
    h.end_everything()


def test_refused_growth_in_a_retry_of_several_sequences_can_be_called_again(harness, T):
    """Scenario 92 and 40.13, other sequences present: unchanged, then OK with the former headroom."""
    h = harness(pages=6, enforce_min_pool=False)
    handle = h.begin_batch([T(5), T(6)])
    h.run_prefill(handle)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, 3)
    h.heal()
    assert [len(h.pages(handle, slot)) for slot in (0, 1)] == [2, 3]
    before = h.dump()
    assert h.prepare_decode(handle, 10).status is h.REQUEST_FAILED
    assert h.dump() == before
    assert handle.state == "decode_retry"
    assert h.prepare_decode(handle, 3).status is h.OK
    assert h.device_row(1) == h.row(1)


@pytest.mark.parametrize("end", ["drop", "finish"])
def test_a_step_to_be_retried_accepts_nothing_else(h, T, end):
    """Scenario 92b. The token is held until the end, so another request's prepare is refused."""
    other = h.begin(B_TOKENS, 1)
    handle = settled(h, T(5))
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, 4)
    h.heal()
    assert handle.state == "decode_retry"
    everything_but_the_end_is_refused(h, handle)
    error = h.refuses(h.coordinator.prepare_prefill, other)
    assert str(handle.id) in str(error)
    h.mark()
    if end == "drop":
        h.drop(handle)
    else:
        assert h.finish(handle) is h.OK
    assert h.log == ["drain", "upload_rows"]
    assert h.device_row(0) == EMPTY
    assert h.all_active() == {0: 1, 1: 1}
    assert h.coordinator.execution_holder is None
    assert h.coordinator.prepare_prefill(other) is h.OK
