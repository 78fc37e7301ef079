"""The files of a trace against full disks, other recorders, other processes and what lay there before."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
from pathlib import Path

import pytest

from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.journal import JournaledFile, journal_of
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.replay import rerecord, rewriting
from context_cache.coordinator.traces.stage import BYTES_MAX


def make_small(harness_class):
    return lambda: harness_class(pages=8, enforce_min_pool=False)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def journals(folder):
    return sorted(found.name for found in folder.iterdir() if "journal" in found.name)


def died(path, recorded, harness_class, script, **options):
    """What a recorder that died leaves: all of it in journals."""
    recorder = TraceRecorder(path, **options)
    script(recorded(recorder, make_small(harness_class)))
    recorder._files.abandon()
    assert journal_of(path).exists()


# ---- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".tokens", ".timings"])
def test_a_disk_that_is_full_at_the_close_costs_nothing(
    recorded, harness_class, script, small_trace, tmp_path, replay_equal, monkeypatch, suffix
):
    """What has no room in its file stays in its journal; the other files are closed all the same."""
    path, real, before = tmp_path / "t", os.write, descriptors()
    recorder = TraceRecorder(path)
    script(recorded(recorder, make_small(harness_class)))
    full = os.stat(f"{path}{suffix}").st_ino

    def write(file, data):
        if os.fstat(file).st_ino == full:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    recorder.close()
    monkeypatch.setattr(os, "write", real)
    assert recorder.failure.errno == errno.ENOSPC
    assert journals(tmp_path) == [f"t{suffix}.journal"]
    assert descriptors() == before
    assert replay_equal(path).calls == replay_equal(small_trace).calls


def test_times_that_cannot_be_given_do_not_keep_the_trace_open(
    recorded, harness_class, script, small_trace, tmp_path, monkeypatch
):
    before = descriptors()
    recorder = TraceRecorder(tmp_path / "t")
    script(recorded(recorder, make_small(harness_class)))

    def fails(rows):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(recorder._files, "times", fails)
    recorder.close()
    assert recorder.failure.errno == errno.EIO
    assert (tmp_path / "t").read_bytes() == small_trace.read_bytes()
    assert journals(tmp_path) == []
    assert descriptors() == before


def test_an_interrupted_close_can_be_made_again(recorded, harness_class, script, small_trace, tmp_path, monkeypatch):
    """Wherever it came: nothing is written twice and nothing is left."""
    for stop in range(1, 4):
        path, real, writes = tmp_path / f"t{stop}", os.write, []
        recorder = TraceRecorder(path)
        script(recorded(recorder, make_small(harness_class)))

        def write(file, data, real=real, writes=writes, stop=stop):
            writes.append(1)
            written = real(file, data)
            if len(writes) == stop:
                raise KeyboardInterrupt
            return written

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                recorder.close()
        recorder.close()
        assert recorder.failure is None
        assert path.read_bytes() == small_trace.read_bytes()
        assert journals(tmp_path) == []


def test_a_recorder_that_is_lost_closes_its_files(tmp_path):
    before = descriptors()
    recorder = TraceRecorder(tmp_path / "t")
    recorder._files.line(b"what was written\n")
    del recorder
    gc.collect()
    assert descriptors() == before
    assert (tmp_path / "t").read_bytes() == b"what was written\n"
    assert journals(tmp_path) == []


# ---- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".tokens", ".timings"])
def test_a_second_recorder_is_refused_and_the_first_goes_on(
    recorded, harness_class, script, small_trace, tmp_path, suffix
):
    path = tmp_path / "t"
    recorder = TraceRecorder(path)
    h = recorded(recorder, make_small(harness_class))
    before = descriptors()
    with pytest.raises(OSError, match="another recorder is writing this file"):
        TraceRecorder(f"{path}{suffix}")
    assert descriptors() == before
    script(h)
    recorder.close()
    assert path.read_bytes() == small_trace.read_bytes()
    assert journals(tmp_path) == []
    TraceRecorder(path).close()


def test_a_journal_that_somebody_has_mapped_is_not_touched(tmp_path):
    """Shortening it would be their death."""
    path = tmp_path / "f"
    first = JournaledFile(path)
    first.append(b"the first")
    mapped = os.open(journal_of(path), os.O_RDONLY)
    first.abandon()
    content = os.pread(mapped, 2**20, 0)
    second = JournaledFile(path)
    second.append(b"the second one")
    assert os.pread(mapped, 2**20, 0) == content
    os.close(mapped)
    second.close()


def test_a_link_in_the_place_of_a_journal_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("t.journal", "t.journal.new"):
        (tmp_path / name).symlink_to(victim)
    with TraceRecorder(tmp_path / "t"):
        pass
    assert victim.read_bytes() == b"precious"


def test_the_child_of_a_fork_leaves_its_parent_s_trace_alone(
    recorded, harness_class, script, small_trace, tmp_path
):
    """Whether it records, closes or just ends."""
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, make_small(harness_class))
    child = os.fork()
    if child == 0:
        try:
            h.begin(h.T(5))
            recorder._files.line(b"nothing of this")
            recorder.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    script(h)
    recorder.close()
    assert recorder.failure is None
    assert (tmp_path / "t").read_bytes() == small_trace.read_bytes()


@pytest.mark.parametrize(
    ("blocked", "redact"), [("t.tokens", True), ("t.timings", False), ("t.timings.journal", False)]
)
def test_a_start_that_fails_leaves_what_was_there(small_trace, tmp_path, blocked, redact):
    path = tmp_path / "t"
    shutil.copy(small_trace, path)
    shutil.copy(f"{small_trace}.tokens", tmp_path / "t.tokens")
    if blocked == "t.tokens":
        os.unlink(tmp_path / "t.tokens")
    (tmp_path / blocked).mkdir()
    names, before = sorted(os.listdir(tmp_path)), descriptors()
    with pytest.raises(OSError, match="irectory"):
        TraceRecorder(path, redact=redact)
    assert path.read_bytes() == small_trace.read_bytes()
    assert sorted(os.listdir(tmp_path)) == names
    assert descriptors() == before


# ---- rewriting -------------------------------------------------------------------------------------------------------


def test_a_rewritten_trace_has_nothing_of_the_one_before(
    recorded, harness_class, script, small_trace, tmp_path, replay_equal
):
    """Least of all the journals of a recorder that died: a reader would go on in them."""
    path = tmp_path / "t"
    died(path, recorded, harness_class, script)
    rerecord(small_trace, path)
    assert sorted(os.listdir(tmp_path)) == ["t", "t.tokens"]
    assert path.read_bytes() == small_trace.read_bytes()
    replay_equal(path)


def test_a_trace_whose_recorder_died_is_rewritten_in_its_own_place(
    recorded, harness_class, script, small_trace, tmp_path
):
    path = tmp_path / "t"
    died(path, recorded, harness_class, script)
    rerecord(path, path)
    assert path.read_bytes() == small_trace.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["t", "t.tokens"]


def test_a_rewritten_redacted_trace_has_no_tokens_beside_it(recorded, harness_class, script, tmp_path, replay_equal):
    source, path = tmp_path / "source", tmp_path / "t"
    died(path, recorded, harness_class, script)
    (tmp_path / "t.tokens").write_bytes(b"secret")
    recorder = TraceRecorder(source, redact=True, timings=False)
    script(recorded(recorder, make_small(harness_class)))
    recorder.close()
    rerecord(source, path)
    assert sorted(os.listdir(tmp_path)) == ["source", "t"]
    replay_equal(path)


@pytest.mark.parametrize("name", ["t", "t.tokens"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_replaced(small_trace, tmp_path, name, kind):
    (os.mkdir if kind == "folder" else os.mkfifo)(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        rerecord(small_trace, tmp_path / "t")
    assert os.listdir(tmp_path) == [name]


def test_a_trace_that_is_being_recorded_is_not_replaced(recorded, harness_class, script, small_trace, tmp_path):
    recorder = TraceRecorder(tmp_path / "t")
    h = recorded(recorder, make_small(harness_class))
    with pytest.raises(OSError, match="another recorder is writing this file"):
        rerecord(small_trace, tmp_path / "t")
    script(h)
    recorder.close()
    assert (tmp_path / "t").read_bytes() == small_trace.read_bytes()


def test_two_that_rewrite_one_trace_do_not_meet(small_trace, tmp_path, replay_equal):
    """The last one wins, with all of its files."""
    path = tmp_path / "t"
    with (
        TraceReader(small_trace) as one,
        TraceReader(small_trace) as other,
        rewriting(one, path, "host", BYTES_MAX) as (play, write),
    ):
        groups = list(one.groups())
        for group in groups[:5]:
            write(play.make(group, one))
        with rewriting(other, path, "host", BYTES_MAX) as (second, write_second):
            for group in other.groups():
                write_second(second.make(group, other))
        assert path.read_bytes() == small_trace.read_bytes()
        for group in groups[5:]:
            write(play.make(group, one))
    assert path.read_bytes() == small_trace.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["t", "t.tokens"]
    replay_equal(path)


def test_a_lock_of_the_folder_is_waited_for(small_trace, tmp_path):
    """A process that replaces files there holds it; it is given back afterwards."""
    rerecord(small_trace, tmp_path / "t")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    assert Path(tmp_path / "t").exists()
