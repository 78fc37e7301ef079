"""A recorder that fails never stops a request: the run goes on as without it, and the trace is good up to there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from context_cache.coordinator import BatchAdvance, ContractViolation
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces import recorder as recorder_module
from context_cache.coordinator.traces.encode import Encoder
from context_cache.coordinator.traces.recorder import CallRecorder
from context_cache.coordinator.traces.steady import StepLines


def make_small(harness_class):
    return lambda: harness_class(pages=8, enforce_min_pool=False)


def told(h):
    """What a script that has ended leaves: books, counters, verbs."""
    return [h.plain(h.manager.dump()), h.counters(), list(h.recording.log), h.coordinator.state]


@pytest.fixture
def unrecorded(harness_class, script):
    h = make_small(harness_class)()
    script(h)
    return told(h)


class Sink:
    """Keeps what it is given, and raises from the n-th write on."""

    def __init__(self, fails, error, tokens=True):
        self.left, self.error, self.lines, self.bytes = fails, error, [], b""
        self.line = self.take
        self.tokens = self.take_tokens if tokens else None
        self.calls = 0

    def check(self):
        self.calls += 1
        self.left -= 1
        if self.left <= 0:
            raise self.error

    def take(self, data):
        self.check()
        self.lines.append(data)

    def take_tokens(self, data):
        self.check()
        self.bytes += data
        return len(self.bytes) - len(data)

    def times(self, rows):
        pass

    def close(self):
        pass


def logged_once(caplog):
    found = [record for record in caplog.records if record.name == "context_cache.traces"]
    assert len(found) == 1, found
    assert found[0].levelno == logging.ERROR
    assert "switched off" in found[0].message
    assert found[0].exc_info


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("?"), MemoryError()], ids=repr)
@pytest.mark.parametrize("fails", [1, 2, 3, 9, 20, 21, 22, 33, 47])
def test_a_sink_that_fails_at_any_write_changes_nothing(
    recorded, harness_class, script, unrecorded, caplog, make_trace, tmp_path, replay_equal, fails, error
):
    sink = Sink(fails, error)
    recorder = CallRecorder(sink)
    h = recorded(recorder, make_small(harness_class))
    script(h)
    assert told(h) == unrecorded
    logged_once(caplog)
    assert recorder.failure is error
    assert sink.calls == fails, "a recorder that is off asks for nothing more"
    if sink.lines:
        path = make_trace(tmp_path / "t", b"".join(sink.lines))
        Path(f"{path}.tokens").write_bytes(sink.bytes)
        assert replay_equal(path).calls == len(sink.lines) - 1


def test_an_interrupt_in_the_sink_is_raised_and_ends_the_trace(recorded, harness_class):
    """It is the caller's; what it tore apart ends the trace, and the coordinator can be used as before."""
    recorder = CallRecorder(Sink(3, KeyboardInterrupt()))
    h = recorded(recorder, make_small(harness_class))
    with pytest.raises(KeyboardInterrupt):
        h.begin(h.T(5))
    assert isinstance(recorder.failure, KeyboardInterrupt)
    h.recorder = recorder
    handle = h.begin(h.T(5), 1)
    h.run_prefill(handle)
    handle.close()


BUGS = {
    "call": (Encoder, "call"),
    "close": (Encoder, "close"),
    "look": (Encoder, "look"),
    "steps": (StepLines, "of"),
    "steady": (recorder_module, "steady_call"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_recorder_changes_nothing(
    recorded, harness_class, script, unrecorded, caplog, tmp_path, replay_equal, monkeypatch, name
):
    def bug(*arguments, **options):
        raise ZeroDivisionError("a bug")

    owner, attribute = BUGS[name]
    h = recorded(tmp_path / "t", make_small(harness_class))
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, bug)
        script(h)
    assert told(h) == unrecorded
    logged_once(caplog)
    assert isinstance(h.recorder.failure, ZeroDivisionError)
    h.recorder.close()
    replay_equal(tmp_path / "t")


def test_a_file_that_is_full_changes_nothing(recorded, harness_class, script, unrecorded, caplog):
    """Written at once, because a device has no journal beside it."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    recorder = TraceRecorder("/dev/full", redact=True, timings=False)
    h = recorded(recorder, make_small(harness_class))
    script(h)
    assert told(h) == unrecorded
    logged_once(caplog)
    assert recorder.failure.errno == errno.ENOSPC


@pytest.mark.parametrize("suffix", ["", ".tokens", ".timings"])
def test_a_disk_that_is_full_when_the_journal_is_emptied(
    recorded, harness_class, script, unrecorded, caplog, tmp_path, replay_equal, monkeypatch, suffix
):
    """What the journal holds stays in it, and is read from there."""
    monkeypatch.setattr("context_cache.coordinator.traces.journal._ROOM", 100)
    monkeypatch.setattr(recorder_module, "_TIMES_MAX", 20)
    path, real = tmp_path / "t", os.write
    recorder = TraceRecorder(path)
    h = recorded(recorder, make_small(harness_class))
    full = os.stat(f"{path}{suffix}").st_ino

    def write(file, data):
        if os.fstat(file).st_ino == full:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    script(h)
    assert told(h) == unrecorded
    monkeypatch.setattr(os, "write", real)
    logged_once(caplog)
    recorder.close()
    # Written as it went: with so small a journal little is in the files when the disk is full.
    replay_equal(path)


def test_a_folder_that_disappears_changes_nothing(recorded, harness_class, script, unrecorded, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    h = recorded(folder / "t", make_small(harness_class))
    handle = h.begin(h.T(4))
    handle.close()
    shutil.rmtree(folder)
    h = recorded(tmp_path / "other", make_small(harness_class))
    script(h)
    assert told(h) == unrecorded
    for one, recorder in recorded.made:
        recorder.close()
        assert one.coordinator.state


@pytest.mark.parametrize("path", ["nowhere/t", ".", "t\0t", "x" * 300])
def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path, path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, ValueError)):
        TraceRecorder(f"{tmp_path}/{path}")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blocked", ["t.tokens", "t.timings", "t.journal", "t.tokens.journal"])
def test_a_file_beside_that_cannot_be_written_is_an_error_at_once(tmp_path, blocked):
    (tmp_path / blocked).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="directory"):
        TraceRecorder(tmp_path / "t")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_recorder_that_failed_gives_its_files_back_when_closed(recorded, harness_class, tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, make_small(harness_class))
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "call", lambda *arguments: 1 / 0)
        h.begin(h.T(4)).close()
    assert recorder.failure is not None
    recorder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_recorder_that_is_closed_early_stops_and_the_coordinator_goes_on(
    recorded, harness_class, script, unrecorded, tmp_path, replay_equal
):
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, make_small(harness_class))
    recorder.close()
    size = (tmp_path / "t").stat().st_size
    script(h)
    recorder.close()
    assert told(h) == unrecorded
    assert (tmp_path / "t").stat().st_size == size
    assert recorder.failure is None
    assert replay_equal(tmp_path / "t").calls == 0


def test_a_recorder_belongs_to_one_coordinator(recorded, harness_class, tmp_path):
    h = recorded(tmp_path / "t", make_small(harness_class))
    with pytest.raises(ContractViolation, match="give each coordinator its own"):
        recorded(h.recorder, make_small(harness_class))


def test_a_sink_takes_each_call_with_its_steps_in_one_piece(recorded, harness_class, script):
    """So that a call is there as a whole or not at all; and times, when asked for, are rows of four."""
    sink = Sink(10**9, OSError())
    h = recorded(CallRecorder(sink), make_small(harness_class))
    script(h)
    for piece in sink.lines:
        assert piece.endswith(b"\n")
        assert not piece.startswith(b'{"line":"step"')
        assert all(line.startswith(b'{"line":"step"') for line in piece.splitlines()[1:])
    assert np.frombuffer(sink.bytes, "<i4").max() < 1000


def test_times_do_not_pile_up_while_steps_are_alike(recorded, harness_class, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "_TIMES_MAX", 16)
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, lambda: harness_class(row_pages=64, pages=200))
    handle = h.begin(h.T(4), headroom=200)
    h.run_prefill(handle)
    for token in range(60):
        assert h.prepare_decode(handle).status is h.OK
        h.synchronize()
        lengths = np.array([h.committed(handle) + 1], np.int32)
        advances = BatchAdvance.one_token_each(np.array([token], np.int32), lengths)
        assert h.coordinator.complete_decode_step(handle, advances) is h.OK
        assert len(recorder._times) < 16
    handle.close()
