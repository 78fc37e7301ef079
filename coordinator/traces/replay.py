"""Replaying: the recorded calls are made again and recorded again, and the two recordings are compared line by line.

A replay is a recording, so whatever a recorder writes is compared, and nothing can be compared that is not written. The
first difference ends it. Failures that were recorded are made to happen again where they happened: a device verb raises
before it does anything, a drain reports that it failed, a publication raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import define, evolve, frozen
from msgspec.structs import replace

from context_cache.backends.base import Backend
from context_cache.coordinator.errors import ContextCacheError
from context_cache.coordinator.traces.again import make_again, offsets_of
from context_cache.coordinator.traces.files import TraceFiles, timings_of, tokens_of
from context_cache.coordinator.traces.format import CallRecord, Header, Identity, StepRecord
from context_cache.coordinator.traces.header import FINGERPRINTS, changed_machines
from context_cache.coordinator.traces.journal import discard_journal, locked_folder, locked_shared
from context_cache.coordinator.traces.reader import (
    Group,
    RecordedStep,
    TraceError,
    TraceReader,
    decode_call,
    decode_step,
)
from context_cache.coordinator.traces.recorder import CallRecorder
from context_cache.coordinator.traces.stage import BYTES_MAX, Stage, fault_of, open_backend
from context_cache.coordinator.types import RequestView

__all__ = [
    "Difference",
    "LastCall",
    "Replay",
    "ReplayResult",
    "differing_fields",
    "first_difference",
    "replay",
    "rerecord",
    "rewriting",
]

_FAILED: Final = b'"failed":'
_REPEATABLE: Final = frozenset({"ContractViolation", "InvariantViolation", "DeviceError", "OwnersLeft"})


@frozen
class Difference:
    """Where a replay parts from its trace.

    call: number of the call, line: its line. step: number of the step, or None when the call itself differs.
    expected, actual: the two records; None where one side has none. fields: names of the fields that differ.
    record: the call. before: the request as it was before the call, if it is one of the coordinator's.
    """

    call: int
    line: int
    record: CallRecord
    step: int | None
    expected: StepRecord | CallRecord | None
    actual: StepRecord | CallRecord | None
    fields: tuple[str, ...]
    before: RequestView | None = None


@define
class ReplayResult:
    """calls, steps: how many were made and compared. difference: the first one, or None.

    torn: the trace ended in the middle of a call, which was left out.
    unrepeatable: the name of what ended a call from outside (an interrupt between two actions, say); the calls before
    it are equal, and nothing can be said of the rest.
    changed_machines: machines whose tables are not those that were recorded.
    """

    calls: int = 0
    steps: int = 0
    difference: Difference | None = None
    torn: bool = False
    unrepeatable: str | None = None
    changed_machines: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether everything was made again and came out the same."""
        return self.difference is None and self.unrepeatable is None


class LastCall:
    """A sink that keeps the lines of the last call, and says of tokens what the trace says.

    offsets: where the tokens of the call lie, in the order in which they are kept.
    """

    def __init__(self, *, tokens: bool) -> None:
        self.last: list[bytes] = []
        self.offsets: Iterator[int] = iter(())
        self.line: Callable[[bytes], object] = self._line
        self.tokens: Callable[[bytes], int] | None = self._tokens if tokens else None

    def _line(self, data: bytes) -> None:
        self.last.append(data)

    def _tokens(self, data: bytes) -> int:
        return 4 * next(self.offsets, 0)

    def times(self, rows: npt.NDArray[np.int64]) -> None:
        """Nobody asks how long a replay takes."""

    def close(self) -> None:
        """Nothing is open."""


class Replay:
    """A trace on a fresh coordinator, call by call.

    backend: opened already. bytes_max: most host memory that the trace may ask for. sink: takes what is recorded again.
    changed_machines: whose tables are not those that were recorded.
    Raises TraceError for a header that cannot be used.
    """

    def __init__(
        self, header: Header, backend: Backend, *, bytes_max: int = BYTES_MAX, sink: LastCall | None = None
    ) -> None:
        self._answers: list[Identity] = []
        self._sink = LastCall(tokens=header.tokens) if sink is None else sink
        script = None if header.tokens else self._script()
        self._recorder = CallRecorder(self._sink, script=script)
        self._answers_max = 0
        self._recorder.before_answers(self._ask)
        self.stage = Stage(header, self._recorder, backend, bytes_max=bytes_max)
        self._sink.last.clear()
        self.changed_machines = changed_machines(header)

    def _script(self) -> Iterator[Identity]:
        # Refilled call by call; a question beyond what is recorded for the call gets no answer.
        while True:
            yield self._answers.pop(0) if self._answers else Identity()

    def _ask(self, answered: int) -> None:
        # A publication that failed over an identity has no answer of it in the trace.
        if answered >= self._answers_max:
            self._recorder.acts.fail_if_armed()

    def make(self, group: Group, reader: TraceReader) -> list[bytes]:
        """Make one call again; its lines and those of its steps. Raises TraceError if the record makes no sense."""
        self._sink.last.clear()
        self._sink.offsets = iter(offsets_of(group.record))
        self._answers[:] = group.record.identity
        self._answers_max = len(group.record.identity)
        faults = self._recorder.acts.faults
        if any(_FAILED in raw for raw in group.raw):
            for found in group.steps():
                for act in found.step.acts:
                    if act.failed is not None and act.nth is not None:
                        faults[act.verb, act.nth] = fault_of(act)
        self.stage.synchronize()
        try:
            make_again(group.record, self.stage, reader.tokens, group.line)
        except TraceError:
            raise
        except BaseException as error:
            # The recorder wrote it down; whether it was to be raised is decided by comparing. A bug of ours is one too.
            # An interrupt that the trace does not know is meant for the replay.
            if not isinstance(error, Exception) and type(error).__name__ != group.record.raised:
                raise
            if isinstance(error, MemoryError) and group.record.raised != MemoryError.__name__:
                raise TraceError(f"line {group.line}: this machine has not the memory to replay it") from None
        finally:
            faults.clear()
        if self._recorder.failure is not None:
            raise TraceError(f"line {group.line}: the call could not be recorded again: {self._recorder.failure}")
        self.stage.forget_ended(getattr(group.record, "request", None))
        return b"".join(self._sink.last).splitlines(keepends=True)

    def end(self) -> None:
        """Close what is still open."""
        self.stage.end()


def replay(
    path: str | os.PathLike[str],
    *,
    backend: str = "host",
    until: int | None = None,
    bytes_max: int = BYTES_MAX,
    seen: Callable[[Group, list[bytes]], None] = lambda group, actual: None,
) -> ReplayResult:
    """Replay a trace and compare.

    until: stop after that many calls. seen: told of each call and the lines that it gave.

    Raises TraceError for a trace that cannot be used, OSError if it cannot be opened, BackendUnavailable.
    """
    with TraceReader(path) as reader:
        play = Replay(reader.header, open_backend(backend), bytes_max=bytes_max)
        result = ReplayResult(changed_machines=play.changed_machines)
        try:
            for group in reader.groups():
                if until is not None and group.number > until:
                    break
                actual = play.make(group, reader)
                seen(group, actual)
                if actual != group.raw:
                    result.difference = first_difference(group, actual)
                    if result.difference is not None:
                        result.unrepeatable = _from_outside(group, actual)
                        break
                result.calls += 1
                result.steps += len(group.raw) - 1
        finally:
            play.end()
        result.torn = reader.torn
    if result.unrepeatable is not None:
        result.difference = None
    if result.difference is not None:
        before = _request_before(path, result.difference, backend, bytes_max)
        result.difference = evolve(result.difference, before=before)
    return result


class _Writing(LastCall):
    """Keeps what is recorded again, and its tokens in their new places."""

    def __init__(self, files: TraceFiles, *, tokens: bool) -> None:
        super().__init__(tokens=tokens)
        self.tokens = files.tokens


@contextmanager
def rewriting(
    reader: TraceReader, out: str | os.PathLike[str], backend: str, bytes_max: int
) -> Iterator[tuple[Replay, Callable[[list[bytes]], object]]]:
    """A replay whose lines are written to ``out``: the replay, and what takes the lines of a call.

    ``out`` is replaced when the block ends well, and is as it was when it does not. Of two that rewrite one trace at
    the same time the last one wins, with all of its files. Nothing else of the trace that was there is left beside it:
    no times, no journal of a recorder that died, and no tokens beside a redacted one.

    Raises OSError also when ``out`` is being recorded or is no regular file.
    """
    tokens, folder = reader.header.tokens, Path(out).absolute().parent
    with locked_shared(out), locked_shared(tokens_of(out)):
        pass
    with TemporaryDirectory(prefix=".rewriting-", dir=folder) as made:
        part = Path(made) / "trace"
        files = TraceFiles(part, redact=not tokens, timings=False)
        try:
            sink = _Writing(files, tokens=tokens)
            play = Replay(reader.header, open_backend(backend), bytes_max=bytes_max, sink=sink)
            try:
                header = replace(reader.header, machines=FINGERPRINTS, seed=reader.header.seed if tokens else None)
                files.line(msgspec.json.encode(header) + b"\n")
                yield play, lambda lines: files.line(b"".join(lines))
            finally:
                play.end()
        finally:
            files.close()
        _replace(part, out, tokens=tokens)


def _replace(part: Path, out: str | os.PathLike[str], *, tokens: bool) -> None:
    with locked_folder(Path(out).absolute().parent), locked_shared(out), locked_shared(tokens_of(out)):
        # First what an older trace left: beside the new one it would be taken for its own.
        Path(timings_of(out)).unlink(missing_ok=True)
        for name in (out, tokens_of(out), timings_of(out)):
            discard_journal(name)
        if tokens:
            os.replace(tokens_of(part), tokens_of(out))
        else:
            Path(tokens_of(out)).unlink(missing_ok=True)
        os.replace(part, out)


def rerecord(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Make the calls of a trace again and write what happens now; how many calls. ``out`` may be ``path``.

    Raises TraceError, OSError.
    """
    calls = 0
    with TraceReader(path) as reader, rewriting(reader, out, "host", BYTES_MAX) as (play, write):
        for group in reader.groups():
            write(play.make(group, reader))
            calls += 1
    return calls


def first_difference(group: Group, actual: list[bytes]) -> Difference | None:
    """The first step that differs, or else the call; None if the lines say the same in other words."""
    expected = group.steps()
    made = [decode_step(raw, 0) for raw in actual[1:]]
    for index in range(max(len(expected), len(made))):
        wanted: RecordedStep | None = expected[index] if index < len(expected) else None
        found = made[index] if index < len(made) else None
        fields = differing_fields(None if wanted is None else wanted.step, found)
        if fields:
            number = group.first_step + index
            line = group.line + 1 + index
            return Difference(
                group.number, line, group.record, number, None if wanted is None else wanted.step, found, fields
            )
    again = decode_call(actual[0], 0) if actual else None
    fields = differing_fields(group.record, again)
    return Difference(group.number, group.line, group.record, None, group.record, again, fields) if fields else None


def differing_fields(one: msgspec.Struct | None, other: msgspec.Struct | None) -> tuple[str, ...]:
    """Names of the fields in which two records differ; ``kind`` if they are not of one kind or one is missing."""
    if one is None or other is None or type(one) is not type(other):
        return () if one is other else ("kind",)
    return tuple(
        name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)
    )


def _from_outside(group: Group, actual: list[bytes]) -> str | None:
    """What ended the recorded call, if no action of it did and the call cannot end so by itself."""
    raised = group.record.raised
    if raised is None or raised in _REPEATABLE:
        return None
    if any(act.failed and act.nth is not None for found in group.steps() for act in found.step.acts):
        return None
    return raised if not actual or decode_call(actual[0], 0).raised != raised else None


def _request_before(
    path: str | os.PathLike[str], difference: Difference, backend: str, bytes_max: int
) -> RequestView | None:
    """The request of a call as it was before the call: found by replaying up to there once more."""
    request = getattr(difference.record, "request", None)
    if request is None:
        return None
    with TraceReader(path) as reader:
        play = Replay(reader.header, open_backend(backend), bytes_max=bytes_max)
        try:
            for group in reader.groups():
                if group.number == difference.call:
                    return play.stage.coordinator.inspect(request)
                play.make(group, reader)
        except ContextCacheError:
            return None
        finally:
            play.end()
    return None
