"""An interrupt in the recorder, or between a call and the recorder: it is raised, and no trace says what was not so."""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress

import pytest

from context_cache.coordinator import ContractViolation
from context_cache.coordinator.traces.doors import Acts
from context_cache.coordinator.traces.encode import Encoder
from context_cache.coordinator.traces.recorder import CallRecorder, TornCall
from context_cache.coordinator.traces.replay import replay


@pytest.fixture
def h(recorded, harness_class, tmp_path):
    return recorded(tmp_path / "t", harness_class)


@pytest.fixture
def good_up_to_there(h, tmp_path, replay_equal):
    """Close the recorder that is off; its trace replays, and has so many calls."""

    def check(kind, calls):
        assert isinstance(h.recorder.failure, kind)
        h.recorder.close()
        assert replay_equal(tmp_path / "t").calls == calls

    return check


def interrupts(*arguments, **options):
    raise KeyboardInterrupt


def test_an_interrupt_while_a_refusal_is_written_ends_the_trace(h, good_up_to_there, monkeypatch):
    handle = h.begin(h.T(5))
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "call", interrupts)
        with pytest.raises(KeyboardInterrupt):
            h.prepare_decode(handle)
    h.run_prefill(handle)
    handle.close()
    good_up_to_there(KeyboardInterrupt, 1)


def test_an_interrupt_while_a_drop_is_written_ends_the_trace(h, good_up_to_there, monkeypatch):
    handle = h.begin(h.T(5))
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "close", interrupts)
        with pytest.raises(KeyboardInterrupt):
            handle.close()
    assert handle.state == "released"
    h.begin(h.T(5)).close()
    good_up_to_there(KeyboardInterrupt, 1)


def test_an_interrupt_while_a_look_is_taken_ends_the_trace(h, good_up_to_there, monkeypatch):
    handle = h.begin(h.T(5))
    h.run_prefill(handle)
    h.decode(handle, 3)
    assert h.begin_compaction(handle, [0]) is h.OK
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "look", interrupts)
        with pytest.raises(KeyboardInterrupt):
            h.coordinator.compact_batch(handle)
    assert isinstance(h.recorder.failure, KeyboardInterrupt)
    good_up_to_there(KeyboardInterrupt, 6)


@pytest.mark.parametrize("following", ["other", "same", "refused", "drop", "orphan"])
def test_a_call_that_nobody_was_told_of_ends_the_trace(h, good_up_to_there, monkeypatch, following):
    """Forbidden: that its steps are written under the call that follows."""
    handle = h.begin(h.T(5))
    h.run_prefill(handle)
    h.decode(handle, 1)
    h.decode(handle, 2)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    with monkeypatch.context() as patch:
        # As if it came before the first line of the recorder.
        patch.setattr(CallRecorder, "returned", interrupts)
        patch.setattr(CallRecorder, "raised", lambda *arguments: None)
        with pytest.raises(KeyboardInterrupt):
            h.complete(handle, 3)
    assert h.recorder.failure is None
    match following:
        case "other":
            h.prepare_decode(handle)
        case "same" | "refused":
            with pytest.raises(ContractViolation):
                h.complete(handle, 3)
        case "drop":
            handle.close()
        case "orphan":
            h.handles.remove(handle)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                del handle
                gc.collect()
            h.begin(h.T(3), 1)
    good_up_to_there(TornCall, 8)


@pytest.mark.parametrize("verb", ["upload_base_rows", "reset_base_lengths"])
def test_an_interrupt_behind_an_action_cannot_be_repeated(h, tmp_path, monkeypatch, verb):
    """The action was done. A replay in which it fails instead would go another way, and call it a difference."""
    through = Acts._through
    armed = []

    def interrupted(self, name, nth, run, done):
        through(self, name, nth, run, done)
        if name == verb and not armed:
            armed.append(name)
            raise KeyboardInterrupt

    handle = h.begin(h.T(5))
    with monkeypatch.context() as patch:
        patch.setattr(Acts, "_through", interrupted)
        with pytest.raises(KeyboardInterrupt):
            h.run_prefill(handle)
    assert armed
    handle.close()
    h.recorder.close()
    assert h.recorder.failure is None
    result = replay(tmp_path / "t")
    assert result.difference is None
    assert result.unrepeatable == "KeyboardInterrupt"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, OSError, RuntimeError])
def test_the_failure_of_a_recorder_keeps_no_handle(h, monkeypatch, kind):
    """Tracebacks hold frames, and frames hold handles: a request whose handle is lost is an orphan at once."""
    monkeypatch.setattr("logging.Logger.error", lambda *arguments, **options: None)

    def fails(*arguments, **options):
        raise kind(28, "why") from ValueError("behind it")

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "call", fails)
        with suppress(KeyboardInterrupt, SystemExit):
            h.begin(h.T(5), keep=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    failure = h.recorder.failure
    assert type(failure) is kind
    assert failure.args == (28, "why")
    assert (failure.__traceback__, failure.__cause__, failure.__context__) == (None, None, None)
    assert len(h.coordinator._core.orphans) == 1
