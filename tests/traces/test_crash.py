"""The death of the recording process: every call that had returned can be read and replayed, and nothing is made up."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces import journal as journal_module
from context_cache.coordinator.traces.journal import JournaledFile, journal_of, open_journaled
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.recorder import tokens_of
from context_cache.coordinator.traces.replay import replay

# Records and dies after so many returned calls. Each call that has returned is said on standard output, unbuffered.
CHILD = """
import os, signal, sys
import numpy as np
from context_cache.backends import HostBackend
from context_cache.coordinator import *
from context_cache.coordinator.traces import TraceRecorder

path, calls, redact, how = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "redact", sys.argv[4]
backend = HostBackend()
stream = backend.new_stream()
deployment = DeploymentConfig(
    max_batch=2, kv_capacity_tokens=65536, page_size=64, layers=(LayerGeometry.attention(1, 1),)
)
coordinator = ContextCacheCoordinator(
    ContextCacheConfig(enabled=True), deployment, allocate_resources(deployment, 2048, backend),
    backend=backend, stream=stream, recorder=TraceRecorder(path, redact=redact),
)
made = 0

def returned():
    global made
    made += 1
    os.write(1, b".")
    if made == calls:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

prompt = np.arange(900, dtype=np.int32)
result = coordinator.begin_request(
    ContextCacheBatchAdmission((ContextCacheSequenceAdmission(prompt, resident=ResidentRef(0, 1)),)),
    DecodingKvHeadroom(1, 0), stream,
)
returned()
handle = result.admission.request
coordinator.prepare_prefill(handle)
returned()
backend.synchronize(stream)
coordinator.finalize_prefill_publication(handle, [ContextCacheSequenceAdvance((1,), 900)])
returned()
length = 900
while True:
    assert coordinator.prepare_decode_step(handle, DecodingKvHeadroom(1, 0)).refusal is None
    returned()
    length += 1
    coordinator.complete_decode_step(handle, [ContextCacheSequenceAdvance((length,), length)])
    returned()
"""


def bytes_of(path):
    with open_journaled(path) as file:
        return file.read()


def die(path, calls, *, redact=False, how="kill"):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path, str(calls), "redact" if redact else "keep", how],
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if how == "kill" else 9), done.stderr.decode()[-2000:]
    assert len(done.stdout) == calls


@pytest.mark.parametrize("redact", [False, True], ids=["tokens", "redacted"])
@pytest.mark.parametrize("calls", [1, 3, 16])
def test_every_call_that_had_returned_is_there(tmp_path, replay_equal, calls, redact):
    path = tmp_path / "t"
    die(path, calls, redact=redact)
    assert path.stat().st_size == 0, "short recordings lie in the journal alone"
    assert journal_of(path).exists()
    result = replay_equal(path)
    assert result.calls == calls
    assert result.torn is False


@pytest.mark.parametrize(("calls", "redact"), [(6500, False), (6501, True)])
def test_a_recording_beyond_its_journal_is_whole(tmp_path, replay_equal, calls, redact):
    """The file has what went through the journal, the journal has the rest; nothing is in both or in neither."""
    path = tmp_path / "t"
    die(path, calls, redact=redact)
    assert path.stat().st_size > 2**20
    result = replay_equal(path)
    assert result.calls == calls


@pytest.mark.parametrize("how", ["exit"])
def test_an_exit_without_a_farewell_is_like_a_kill(tmp_path, replay_equal, how):
    die(tmp_path / "t", 12, how=how)
    assert replay_equal(tmp_path / "t").calls == 12


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2600, 2601, 2602, 2603, 5200, 20_000, 60_000])
def test_long_recordings_of_processes_that_died_are_whole(tmp_path, replay_equal, calls):
    die(tmp_path / "t", calls)
    assert replay_equal(tmp_path / "t").calls == calls


def test_the_journal_of_a_crash_does_not_leak_into_the_next_recording(
    tmp_path, recorded, harness_class, script, small_trace, replay_equal
):
    path = tmp_path / "t"
    die(path, 40)
    recorder = TraceRecorder(path)
    script(recorded(recorder, lambda: harness_class(pages=8, enforce_min_pool=False)))
    # While it is recorded, too: what a reader finds is this recording.
    with TraceReader(path) as reader:
        assert reader.header.capacities[0] == 8
    assert bytes_of(path) == small_trace.read_bytes()
    recorder.close()
    assert path.read_bytes() == small_trace.read_bytes()
    assert Path(tokens_of(path)).read_bytes() == Path(tokens_of(small_trace)).read_bytes()
    assert not list(tmp_path.glob("*.journal"))
    replay_equal(path)


def test_a_redacted_recording_leaves_nothing_of_a_crashed_one(tmp_path, recorded, harness_class, script, replay_equal):
    """Token ids of the earlier recording least of all, in its journal either."""
    path = tmp_path / "t"
    die(path, 40)
    recorder = TraceRecorder(path, redact=True, timings=False)
    script(recorded(recorder, lambda: harness_class(pages=8, enforce_min_pool=False)))
    recorder.close()
    assert [found.name for found in tmp_path.iterdir()] == ["t"]
    replay_equal(path)


def test_a_clean_close_leaves_no_journal(small_trace):
    assert small_trace.exists()
    assert not list(small_trace.parent.glob("*.journal"))


# ---- torn ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(small_trace):
    return small_trace.read_bytes()


def calls_in(data):
    return sum(not line.startswith((b'{"line":"step"', b'{"line":"header"')) for line in data.splitlines())


def last_call(data):
    """Where the last call that caused steps begins and ends."""
    lines = data.splitlines(keepends=True)
    last = max(i for i in range(len(lines)) if lines[i].startswith(b'{"line":"step"'))
    first = max(i for i in range(last) if not lines[i].startswith(b'{"line":"step"'))
    return len(b"".join(lines[:first])), len(b"".join(lines[: last + 1]))


def test_a_call_that_was_cut_in_a_line_is_left_out_and_told(data, make_trace, tmp_path, small_trace):
    """At each byte of the last call that caused steps; the calls before it are there, each of them."""
    begin, end = last_call(data)
    # Of fewer bytes nobody can say whether they begin a call or belong to the one before.
    for at in range(begin + len('{"line":"sx'), end):
        if data[at - 1 : at] == b"\n":
            continue
        path = make_trace(tmp_path / "t", data[:at], small_trace)
        with TraceReader(path) as reader:
            groups = list(reader.groups())
            assert reader.torn, f"cut at {at}"
        assert len(groups) == calls_in(data[:begin])


@pytest.mark.parametrize("part", range(10))
def test_a_trace_that_was_cut_replays_up_to_there(data, make_trace, tmp_path, small_trace, replay_equal, part):
    first = data.index(b"\n") + 1
    at = first + (len(data) - first) * part // 10 + part
    while data[at - 1 : at] == b"\n":
        at += 1
    result = replay_equal(make_trace(tmp_path / "t", data[:at], small_trace))
    assert result.torn
    started = calls_in(data[:at].rsplit(b"\n", 1)[0])
    assert result.calls in (started, started - 1)


def test_a_trace_cut_behind_a_call_is_whole(data, make_trace, tmp_path, small_trace, replay_equal):
    begin, end = last_call(data)
    for at in (begin, end):
        result = replay_equal(make_trace(tmp_path / "t", data[:at], small_trace))
        assert not result.torn
        assert result.calls == calls_in(data[:at])


def test_a_call_cut_between_two_of_its_steps_misses_one(data, make_trace, tmp_path, small_trace):
    """Nothing in the file tells this from a recording in which the step was not made; so it is a difference."""
    begin, end = last_call(data)
    at = data.rindex(b"\n", begin, end - 1) + 1
    result = replay(make_trace(tmp_path / "t", data[:at], small_trace))
    assert result.difference.expected is None
    assert result.difference.actual is not None


# ---- the journal by itself -------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_whatever_its_size(tmp_path):
    """Around the end of the journal, where a piece goes to the file together with what waited."""
    room = journal_module._ROOM
    large = 3 * 2**20
    for sizes in ([1], [room], [room + 1], [room - 1, 1, 1], [5, room - 5, 1], [large, 2], [10, large, 10], [0]):
        path = tmp_path / "f"
        file, wanted = JournaledFile(path), b""
        for number, size in enumerate(sizes):
            piece = bytes([65 + number]) * size
            assert file.append(piece) == len(wanted)
            wanted += piece
            assert bytes_of(path) == wanted, sizes
        file.abandon()
        assert bytes_of(path) == wanted
        file = JournaledFile(path)
        file.append(wanted)
        file.close()
        file.close()
        assert path.read_bytes() == wanted
        assert not journal_of(path).exists()


def test_a_death_between_any_two_writes_loses_nothing_that_was_there(tmp_path, monkeypatch):
    """A spill writes the journal's bytes, says that it has none, writes the piece, says where it is; it may stop."""
    first, second = b"a" * (journal_module._ROOM - 100), b"b" * 300
    writes = []

    class Died(BaseException):
        pass

    real = os.write
    for stop in range(3):
        for partly in (0, 1, 150):

            def dying(file, data, stop=stop, partly=partly):
                writes.append(1)
                if len(writes) > stop:
                    real(file, data[:partly])
                    raise Died
                return real(file, data)

            writes.clear()
            path = tmp_path / "f"
            file = JournaledFile(path)
            file.append(first)
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", dying)
                if stop < 2:
                    with pytest.raises(Died):
                        file.append(second)
                else:
                    file.append(second)
            found = bytes_of(path)
            assert found.startswith(first), (stop, partly)
            assert (first + second).startswith(found)
            file.close()
            assert path.read_bytes() == found
            assert not journal_of(path).exists()


def journal_bytes(base, data, before=b"", magic=b"CCJOURN2", used=None):
    """A journal: where it belongs, what it holds, what stands before it in the file."""
    return struct.pack("<8sQQQ", magic, base, len(data) if used is None else used, crc32(before)) + data


@pytest.mark.parametrize(
    "journal",
    [b"", b"CCJOURN2", b"X" * 2**20, journal_bytes(0, b"", used=2**60), journal_bytes(2**63, b"", used=2**63),
     journal_bytes(0, b"", used=50), journal_bytes(0, b"12345" * 10, magic=b"CCJOURN1")],
)  # fmt: skip
def test_a_journal_that_is_none_is_left_alone(make_trace, tmp_path, data, small_trace, replay_equal, journal):
    path = make_trace(tmp_path / "t", data, small_trace)
    journal_of(path).write_bytes(journal)
    assert replay_equal(path).torn is False


def test_a_journal_of_another_place_in_the_file_is_left_alone(make_trace, tmp_path, data, small_trace, replay_equal):
    path = make_trace(tmp_path / "t", data, small_trace)
    for base in (len(data) + 1, max(0, len(data) - 10)):
        journal_of(path).write_bytes(journal_bytes(base, b"?" * 2**12, data[:base][-4096:]))
        assert bytes_of(path) == data
        replay_equal(path)


def test_a_journal_is_the_rest_of_the_file_that_it_was_written_beside(tmp_path):
    """It fits the length of another file, and says something else of what stands before it or in its place."""
    path = tmp_path / "f"
    journal_of(path).write_bytes(journal_bytes(5000, b"rest of it", b"a" * 4096))
    for content, found in (
        (b"a" * 5000, b"a" * 5000 + b"rest of it"),
        (b"a" * 5000 + b"rest", b"a" * 5000 + b"rest of it"),
        (b"a" * 4999 + b"b", b"a" * 4999 + b"b"),
        (b"a" * 5000 + b"best", b"a" * 5000 + b"best"),
    ):
        path.write_bytes(content)
        assert bytes_of(path) == found
