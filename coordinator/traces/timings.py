"""The times beside a trace, put back to the calls and steps that they belong to.

A recorder notes when a call that caused steps began and ended, and the same of each act. When a step ended inside its
call is not noted, but narrowed down: not before its own acts, and the last one with its call. Steps between two known
times share the room evenly. So what is drawn of a call is right to within the call, and of device work exactly.

The file of times is as untrusted as the trace: rows that do not belong to the trace beside it are refused by number.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
from attrs import frozen

from context_cache.coordinator.traces.format import Act
from context_cache.coordinator.traces.journal import JournaledBytes
from context_cache.coordinator.traces.reader import Group, RecordedStep, TraceError, TraceReader
from context_cache.coordinator.traces.recorder import timings_of
from context_cache.machines import REQUEST
from context_cache.machines.step import DONE

__all__ = ["TimedAct", "TimedCall", "TimedStep", "TimedTrace", "Timing", "Timings", "median_durations", "without_times"]

_ROW_BYTES: Final = 32
_ROWS_AT_ONCE: Final = 1024
_CALL: Final = -1
_TOGETHER: Final = "keep the files of one recording together and unchanged"


class Timing(NamedTuple):
    """One row: step, act (-1: the call whose last step it is), begin and end in nanoseconds of one clock."""

    step: int
    act: int
    begin: int
    end: int


class Timings:
    """The times beside a trace, in order; a context manager. Iterating reads a block of rows at a time.

    Raises TraceError if the trace has no times, or if the file is none of times.
    """

    def __init__(self, trace_path: str | os.PathLike[str]) -> None:
        self.path = timings_of(trace_path)
        try:
            self._bytes = JournaledBytes(self.path)
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be read ({error.strerror}), so the trace has no times; record it with "
                "TraceRecorder(path, timings=True), which is the default"
            ) from None
        size = self._bytes.size
        if size % _ROW_BYTES:
            self.close()
            raise TraceError(
                f"{self.path} has {size} bytes, which is no multiple of {_ROW_BYTES}, so it was cut or holds no times; "
                f"{_TOGETHER}"
            )

    def __len__(self) -> int:
        """How many rows."""
        return self._bytes.size // _ROW_BYTES

    def __iter__(self) -> Iterator[Timing]:
        """Every row. Raises TraceError for one that no recorder writes."""
        before = 0
        for first in range(0, len(self), _ROWS_AT_ONCE):
            for number, row in enumerate(self._rows(first, min(_ROWS_AT_ONCE, len(self) - first)), first + 1):
                if row.step < max(before, 1) or row.act < _CALL or not 0 <= row.begin <= row.end:
                    raise TraceError(
                        f"{self.path}: row {number} is {list(row)} after step {before}, and no recorder writes that "
                        "(steps never go back, nothing ends before it begins); the file was damaged, record again"
                    )
                before = row.step
                yield row

    @property
    def began_at(self) -> int:
        """When the first call with times began; 0 if there is none."""
        return next((row.begin for row in self if row.act == _CALL), 0)

    @property
    def ended_at(self) -> int:
        """When the last call with times ended; 0 if there is none."""
        return self._rows(len(self) - 1, 1)[0].end if len(self) else 0

    def close(self) -> None:
        self._bytes.close()

    def __enter__(self) -> Timings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, first: int, count: int) -> list[Timing]:
        data = self._bytes.read(first * _ROW_BYTES, count * _ROW_BYTES)
        return [Timing(*row) for row in np.frombuffer(data, "<i8").reshape(-1, 4).tolist()]


class TimedAct(NamedTuple):
    """An act of a step, and when it began and ended."""

    act: Act
    begin: int
    end: int


@frozen
class TimedStep:
    """A step of a call. at: when it ended, as closely as that is known. acts: what it asked of the device."""

    found: RecordedStep
    at: int
    acts: tuple[TimedAct, ...]


@frozen
class TimedCall:
    """A call. timed: whether its times were noted; those of a call without steps are not, and it stands as a point
    where the call before it ended."""

    group: Group
    begin: int
    end: int
    timed: bool
    steps: tuple[TimedStep, ...]

    @property
    def request(self) -> str | None:
        """Id of the request that it made or was made on; None if there is none."""
        record = self.group.record
        return getattr(record, "gave", None) or getattr(record, "request", None)


def without_times(group: Group, now: int = 0) -> TimedCall:
    """A call whose times are not known, as a point."""
    return TimedCall(group, now, now, False, tuple(TimedStep(found, now, ()) for found in group.steps()))


class TimedTrace:
    """A trace and its times together; a context manager. Iterating yields the calls that have times, in order.

    After the last one: untimed, how many calls followed whose times were lost with the recording process; torn, as the
    reader's.

    Raises TraceError for a trace or times that cannot be used, or that do not belong together; OSError if the trace
    cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = TraceReader(path)
        try:
            self.times = Timings(path)
        except BaseException:
            self._reader.close()
            raise
        self.header = self._reader.header
        self.untimed = 0

    @property
    def torn(self) -> bool:
        """After the end: whether the trace broke off in the middle of a call."""
        return self._reader.torn

    def __iter__(self) -> Iterator[TimedCall]:
        for call in self.calls():
            if self.untimed and not len(self.times):
                raise TraceError(
                    f"{self.times.path} is empty and the trace is not: its recorder was never closed, so the times "
                    "were lost; record again and close the recorder, or use it in a with statement"
                )
            if not self.untimed:
                yield call

    def calls(self) -> Iterator[TimedCall]:
        """Every call, also those whose times were lost."""
        rows = _Rows(self.times)
        now = self.times.began_at
        for group in self._reader.groups():
            steps = group.steps()
            if self.untimed or (steps and rows.ended):
                self.untimed += 1
                yield without_times(group, now)
            elif steps:
                call = rows.take(group, steps, now)
                now = call.end
                yield call
            else:
                yield TimedCall(group, now, now, False, ())
        if not rows.ended and not self.torn:
            raise rows.stranger("which the trace does not have")

    def close(self) -> None:
        self._reader.close()
        self.times.close()

    def __enter__(self) -> TimedTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Rows:
    """The rows of times, taken call by call."""

    def __init__(self, times: Timings) -> None:
        self._path = times.path
        self._rows = iter(times)
        self._row = next(self._rows, None)
        self._number = 1

    @property
    def ended(self) -> bool:
        return self._row is None

    def stranger(self, why: str) -> TraceError:
        """What to raise for the next row."""
        step = "the end" if self._row is None else f"step {self._row.step}"
        return TraceError(f"{self._path}: row {self._number} names {step}, {why}; {_TOGETHER}")

    def take(self, group: Group, steps: Sequence[RecordedStep], now: int) -> TimedCall:
        """The times of a call with steps; ``now`` is when the call before it ended."""
        spans = [tuple(self._act(found, index, act) for index, act in enumerate(found.step.acts)) for found in steps]
        row = self._next(steps[-1].number, _CALL)
        acts = [time for spent in spans for one in spent for time in (one.begin, one.end)]
        known = [now, row.begin, *acts, row.end]
        if known != sorted(known):
            raise TraceError(
                f"{self._path}: the times of call {group.number} lie outside it or inside another call; {_TOGETHER}"
            )
        places = _places(row.begin, row.end, [spent[-1].end if spent else None for spent in spans])
        timed = tuple(TimedStep(*parts) for parts in zip(steps, places, spans, strict=True))
        return TimedCall(group, row.begin, row.end, True, timed)

    def _act(self, found: RecordedStep, index: int, act: Act) -> TimedAct:
        row = self._next(found.number, index)
        return TimedAct(act, row.begin, row.end)

    def _next(self, step: int, act: int) -> Timing:
        row = self._row
        if row is None or (row.step, row.act) != (step, act):
            what = "the end of its call" if act == _CALL else f"act {act}"
            raise self.stranger(f"where the trace has step {step} with {what}")
        self._row = next(self._rows, None)
        self._number += 1
        return row


def _places(begin: int, end: int, acted: Sequence[int | None]) -> list[int]:
    """When each step of a call ended: after its acts, the last one with the call, the others evenly between."""
    places: list[int] = []
    before = begin
    for index, known in enumerate([*acted[:-1], end]):
        if known is None:
            continue
        count = index + 1 - len(places)
        places += [before + (known - before) * part // count for part in range(1, count + 1)]
        before = known
    return places


def median_durations(trace_path: str | os.PathLike[str]) -> dict[tuple[str, int], int]:
    """How long a row takes, in nanoseconds: the median over the calls that fired it and that ended well.

    Keys are (machine, number of the row). A row of a request takes its whole call, couplings included. Calls that fired
    several requests' rows say nothing of one of them and are left out. Eight bytes are kept for each call.

    Raises TraceError and OSError, as ``TimedTrace``.
    """
    taken: dict[tuple[str, int], array[int]] = {}
    with TimedTrace(trace_path) as trace:
        for call in trace:
            steps = [timed.found.step for timed in call.steps]
            own = [step for step in steps if step.machine == REQUEST.name] or steps
            if len(own) == 1 and own[0].outcome == DONE:
                key = (own[0].machine, own[0].row)
                taken.setdefault(key, array("q")).append(call.end - call.begin)
    return {key: int(np.median(durations)) for key, durations in sorted(taken.items())}
