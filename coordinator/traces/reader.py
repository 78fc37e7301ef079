"""Reading a trace.

It may come from anywhere, so nothing in it is believed: each line is bounded, checked field by field and named by its
number when it is wrong, and no more than one call is held at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Final

import msgspec
import numpy as np
from attrs import define, field, frozen

from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.traces.format import (
    FORMAT,
    LINE_BYTES_MAX,
    STEPS_OF_A_CALL_MAX,
    VERSION,
    CallRecord,
    Header,
    Record,
    StepRecord,
)
from context_cache.coordinator.traces.header import FINGERPRINTS
from context_cache.coordinator.traces.journal import JournaledBytes, open_journaled
from context_cache.coordinator.traces.recorder import tokens_of

__all__ = ["Group", "RecordedStep", "TraceError", "TraceReader", "decode_call", "decode_step"]

_REDACTED_TOKENS_MAX: Final = 2**26
_DECODER: Final = msgspec.json.Decoder(Record)
_GROUP_BYTES_MAX: Final = 2**27
"""A call is held in memory with its steps; they are short, and each of them is bounded."""
_STEP: Final = b'{"line":"step",'


class TraceError(Exception):
    """A trace that cannot be used. One sentence: where, what, what to do instead."""


@frozen
class RecordedStep:
    """A step and where it stands: its number, counted from 1 over the whole trace, and its line."""

    number: int
    line: int
    step: StepRecord


@define
class Group:
    """One call and the steps that it caused.

    number: of the call, from 1. line: where it stands. raw: its line and those of its steps. first_step: number of the
    first of its steps, whether it has any or not.
    """

    number: int
    line: int
    record: CallRecord
    first_step: int
    raw: list[bytes] = field(factory=list)

    def steps(self) -> list[RecordedStep]:
        """Its steps. Raises TraceError."""
        return [
            RecordedStep(self.first_step + index, self.line + 1 + index, decode_step(raw, self.line + 1 + index))
            for index, raw in enumerate(self.raw[1:])
        ]


class TraceReader:
    """An open trace; a context manager.

    header: checked. torn: after the end, whether the last call was incomplete and left out.

    Raises TraceError for a file that is no trace of this version; OSError if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.torn = False
        self._file: BinaryIO = open_journaled(path)
        self._tokens: JournaledBytes | None = None
        self._line = 0
        try:
            self.header = self._read_header()
            if self.header.tokens:
                self._tokens = self._open_tokens()
        except BaseException:
            self.close()
            raise

    def tokens(self, at: int, count: int, line: int) -> Int32Array:
        """Token ids by offset and count. Raises TraceError when the token file does not have them."""
        if self._tokens is None:
            if count > _REDACTED_TOKENS_MAX:
                raise TraceError(f"line {line}: {count} tokens, more than any sequence has; the line was edited")
            return np.zeros(count, np.int32)
        data = self._tokens.read(4 * at, 4 * count) if at >= 0 else b""
        if len(data) != 4 * count:
            raise TraceError(
                f"line {line}: tokens {at} to {at + count} lie outside {tokens_of(self.path)}, which has "
                f"{self._tokens.size // 4}; keep the files of a trace together and unchanged"
            )
        return np.frombuffer(data, "<i4").astype(np.int32, copy=False)

    def groups(self) -> Iterator[Group]:
        """The calls in order. Raises TraceError at the first line that is wrong."""
        group: Group | None = None
        number = steps = size = 0
        while True:
            line = self._next_line()
            if not line or not line.endswith(b"\n"):
                break
            if line.startswith(_STEP):
                if group is None:
                    raise TraceError(f"line {self._line}: a step before the first call; the trace was cut or edited")
                if len(group.raw) > STEPS_OF_A_CALL_MAX:
                    raise TraceError(
                        f"line {self._line}: call {number} has more than {STEPS_OF_A_CALL_MAX} steps, which no call "
                        "causes; the trace was edited"
                    )
                size += len(line)
                if size > _GROUP_BYTES_MAX:
                    raise TraceError(
                        f"line {self._line}: the steps of call {number} have more than {_GROUP_BYTES_MAX} bytes, which "
                        "no recorder writes; the trace was edited"
                    )
                steps += 1
                group.raw.append(line)
                continue
            record = _decode(line, self._line)
            if isinstance(record, StepRecord):
                raise TraceError(f'line {self._line}: a step begins with {{"line":"step", as the recorder writes it')
            if isinstance(record, Header):
                raise TraceError(f"line {self._line}: a second header; two traces in one file must be split")
            if group is not None:
                yield group
            number, size = number + 1, 0
            group = Group(number, self._line, record, steps + 1, [line])
        if line:
            # A call is written in one piece. A torn step is the call's before it; a torn call leaves that one whole. Of
            # a few bytes nobody can say which it is, so they count as a step.
            self.torn = True
            if group is not None and not line.startswith(_STEP) and not _STEP.startswith(line):
                yield group
        elif group is not None:
            yield group

    def close(self) -> None:
        self._file.close()
        if self._tokens is not None:
            self._tokens.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next_line(self) -> bytes:
        self._line += 1
        line = self._file.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(
                f"line {self._line}: longer than {LINE_BYTES_MAX} bytes, which no recorder writes; this is no trace, "
                "or it was damaged"
            )
        return line

    def _read_header(self) -> Header:
        line = self._next_line()
        if not line:
            raise TraceError(f"{self.path} is empty; a trace begins with a header")
        # The version first: of another version nothing else can be expected to be as it is here.
        try:
            seen = _SEEN.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            seen = _Seen()
        if seen.format != FORMAT:
            raise TraceError(
                f'line 1: no header of a trace ("format":"{FORMAT}" is missing); record one with: context-cache run '
                "--trace FILE"
            )
        if seen.version != VERSION:
            raise TraceError(
                f"line 1: version {seen.version} of the trace format, and this program reads version {VERSION}; "
                "record it again, or use the version that recorded it"
            )
        header = _decode(line, 1)
        if not isinstance(header, Header):
            raise TraceError('line 1: the header must be the line of kind "header"')
        unknown = sorted(set(header.machines) - set(FINGERPRINTS))
        if unknown:
            raise TraceError(
                f"line 1: unknown machine {unknown[0]!r}; this program has {', '.join(FINGERPRINTS)}"
            )
        return header

    def _open_tokens(self) -> JournaledBytes:
        try:
            return JournaledBytes(tokens_of(self.path))
        except OSError as error:
            raise TraceError(
                f"{tokens_of(self.path)} cannot be read ({error.strerror}); the trace names tokens in it, keep the "
                "files of a trace together"
            ) from None


class _Seen(msgspec.Struct):
    """What is looked at before a header is believed to be one."""

    format: object = None
    version: object = None


_SEEN: Final = msgspec.json.Decoder(_Seen)


def decode_step(raw: bytes, line: int) -> StepRecord:
    """A line that must be a step of a known machine. Raises TraceError."""
    record = _decode(raw, line)
    if not isinstance(record, StepRecord):
        raise TraceError(f"line {line}: not a step")
    if record.machine not in FINGERPRINTS:
        raise TraceError(
            f"line {line}: unknown machine {record.machine!r}; this program has {', '.join(FINGERPRINTS)}"
        )
    return record


def decode_call(raw: bytes, line: int) -> CallRecord:
    """A line that must be a call. Raises TraceError."""
    record = _decode(raw, line)
    if isinstance(record, Header | StepRecord):
        raise TraceError(f"line {line}: not a call")
    return record


def _decode(raw: bytes, line: int) -> Record:
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"line {line}: {str(error)[:300]}; the line was damaged or edited") from None
    except RecursionError:
        raise TraceError(f"line {line}: nested too deeply; no recorder writes such a line") from None
