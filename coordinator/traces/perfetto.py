"""A trace as a picture over time: the JSON of the Trace Event Format, which ui.perfetto.dev opens.

The coordinator is the process. A request has two tracks: the calls made on it, and the states that it was in, each from
the step that entered it to the next one. One track more shows what the device was asked to do, one each the states of
the coordinator, the execution token and the length view, and one the calls that belong to no live request. What was
refused or failed is an instant.

Rule 1: spans of one track never overlap, because the viewer drops those that do. Calls come one after another, and so
do acts and the states of one machine; times that say otherwise are refused before they come here.
Rule 2: what is drawn follows from the two files alone. Time begins with the first call.
Rule 3: nothing is held but what is open: the live requests and the call at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from attrs import define, field, frozen

from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.recorder import timings_of, tokens_of
from context_cache.coordinator.traces.timings import TimedCall, TimedStep, TimedTrace
from context_cache.machines import ALL_MACHINES, REQUEST
from context_cache.machines.step import DONE

__all__ = ["PerfettoExport", "write_perfetto"]

_PROCESS: Final = 1
_DEVICE: Final = 2
_CALLS: Final = 3
_REGIONS: Final = {
    spec.name: (number, spec.initial)
    for number, spec in enumerate((spec for spec in ALL_MACHINES if spec is not REQUEST and spec.follows is None), 4)
}
"""Track and first state of each machine of the coordinator itself."""
_FIRST_REQUEST: Final = 16
_ENDS: Final = frozenset({REQUEST.initial, *(state.name for state in REQUEST.states if state.final)})
"""States of a request that does not live: not yet, or not any more."""
_VALUES_SHOWN_MAX: Final = 8


@frozen
class PerfettoExport:
    """calls, steps: how many were drawn. untimed: calls at the end whose times were lost with the recording process.

    torn: the trace ended in the middle of a call, which was left out.
    """

    calls: int
    steps: int
    untimed: int
    torn: bool


def write_perfetto(trace_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> PerfettoExport:
    """Draw the trace, with the times beside it, into ``out_path``; the file appears when it is complete.

    Raises TraceError for a trace that cannot be used, has no times, or times of another trace; OSError if it cannot be
    opened or ``out_path`` cannot be written.
    """
    own = {os.path.realpath(name) for name in (trace_path, tokens_of(trace_path), timings_of(trace_path))}
    if os.path.realpath(out_path) in own:
        raise TraceError(f"{os.fspath(out_path)} is a file of the trace itself; name another one to draw it into")
    with TimedTrace(trace_path) as trace, _whole(Path(out_path)) as file:
        picture = _Picture(file.write, trace.header, trace.times.began_at)
        for call in trace:
            picture.call(call)
        picture.end()
        return PerfettoExport(picture.calls, picture.steps, trace.untimed, trace.torn)


@contextmanager
def _whole(out: Path) -> Iterator[BinaryIO]:
    """A file that is there when it is complete, or as it was before. A pipe or a device is written as it is."""
    if out.exists() and not out.is_file():
        with out.open("wb") as file:
            yield file
        return
    # What a link names is replaced, not the link.
    out = Path(os.path.realpath(out))
    beside = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        with beside.open("wb") as file:
            yield file
        beside.replace(out)
    finally:
        # Only there if the rename did not happen.
        with suppress(OSError):
            beside.unlink()


@define
class _Lane:
    """The states of one machine on their track. args: of the step that led to the state; empty until there was one."""

    track: int
    state: str
    since: int
    args: dict[str, Any] = field(factory=dict)


@define
class _Picture:
    """Events, written one a line as the calls come."""

    _write: Callable[[bytes], object]
    _header: lines.Header
    _began_at: int
    calls: int = 0
    steps: int = 0
    _now: int = field(init=False)
    _regions: dict[str, _Lane] = field(init=False)
    _requests: dict[str, _Lane] = field(factory=dict, init=False)
    _next_track: int = field(default=_FIRST_REQUEST, init=False)

    def __attrs_post_init__(self) -> None:
        self._now = self._began_at
        self._write(b'{"traceEvents":[\n')
        self._write(_metadata("process_name", 0, {"name": f"context cache coordinator ({self._header.flavour})"}))
        self._name(_DEVICE, "device")
        self._name(_CALLS, "calls of no live request")
        for machine, (track, _) in _REGIONS.items():
            self._name(track, machine)
        self._regions = {name: _Lane(track, initial, self._began_at) for name, (track, initial) in _REGIONS.items()}

    def call(self, call: TimedCall) -> None:
        """Draw a call, its steps and its acts."""
        for timed in call.steps:
            if timed.found.step.machine == REQUEST.name:
                self._live(timed.found.step.subject, call.begin)
        lane = None if call.request is None else self._requests.get(call.request)
        track = _CALLS if lane is None else lane.track - 1
        self._draw_call(call, track)
        for timed in call.steps:
            self._draw_step(timed, call.request)
        for subject in {timed.found.step.subject for timed in call.steps} & self._requests.keys():
            if self._requests[subject].state in _ENDS:
                del self._requests[subject]
        self.calls += 1
        self.steps += len(call.steps)
        self._now = call.end

    def end(self) -> None:
        """Close what is still open."""
        for lane in (*self._regions.values(), *self._requests.values()):
            self._close(lane, self._now)
        other = {
            "format": self._header.format,
            "version": self._header.version,
            "flavour": self._header.flavour,
            "seed": self._header.seed,
        }
        self._write(b'\n],"otherData":' + msgspec.json.encode(other) + b"}\n")

    def _live(self, request: str, at: int) -> None:
        """Give a request its tracks, unless it has them."""
        if request in self._requests:
            return
        track = self._next_track
        self._next_track += 2
        self._name(track, request)
        self._name(track + 1, f"{request} state")
        self._requests[request] = _Lane(track + 1, REQUEST.initial, at)

    def _draw_call(self, call: TimedCall, track: int) -> None:
        args = _summary(call.group.record)
        name = args.pop("line")
        args = {"call": call.group.number, "line": call.group.line, **args}
        if call.timed:
            self._span(name, "call", track, call.begin, call.end, args)
        else:
            self._instant(name, "call", track, call.begin, {**args, "when": "after the call before; not noted"})

    def _draw_step(self, timed: TimedStep, request: str | None) -> None:
        step = timed.found.step
        args = {"step": timed.found.number, "request": request, **_filled(step, but="line machine subject acts")}
        if step.machine == REQUEST.name:
            lane = self._requests[step.subject]
            args["request"] = step.subject
        elif step.machine in self._regions:
            lane = self._regions[step.machine]
        else:
            raise TraceError(
                f"line {timed.found.line}: machine {step.machine!r} follows another one and has no steps of its own; "
                "the trace was edited, record it again"
            )
        for act in timed.acts:
            asked = {"request": step.subject, "step": timed.found.number, **_filled(act.act, but="verb")}
            self._span(act.act.verb, "act", _DEVICE, act.begin, act.end, asked)
        if step.outcome != DONE:
            self._instant(f"{step.event} {step.outcome}", "failure", lane.track, timed.at, args)
        if step.row >= 0:
            self._close(lane, timed.at)
            lane.state, lane.since, lane.args = step.target, timed.at, args

    def _close(self, lane: _Lane, at: int) -> None:
        """Draw the state that ends. A request that is new or gone has none to draw."""
        if lane.track < _FIRST_REQUEST or lane.state not in _ENDS:
            self._span(lane.state, "state", lane.track, lane.since, at, lane.args)

    def _name(self, track: int, name: str) -> None:
        self._write(b",\n" + _metadata("thread_name", track, {"name": name}))
        self._write(b",\n" + _metadata("thread_sort_index", track, {"sort_index": track}))

    def _span(self, name: str, kind: str, track: int, begin: int, end: int, args: dict[str, Any]) -> None:
        self._event(name, kind, "X", track, begin, {"dur": _microseconds(end - begin)}, args)

    def _instant(self, name: str, kind: str, track: int, at: int, args: dict[str, Any]) -> None:
        self._event(name, kind, "i", track, at, {"s": "t"}, args)

    def _event(
        self, name: str, kind: str, phase: str, track: int, at: int, more: dict[str, Any], args: dict[str, Any]
    ) -> None:
        event = {
            "name": name,
            "cat": kind,
            "ph": phase,
            "pid": _PROCESS,
            "tid": track,
            "ts": _microseconds(at - self._began_at),
            **more,
            "args": args,
        }
        self._write(b",\n" + msgspec.json.encode(event))


def _metadata(name: str, track: int, args: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"name": name, "ph": "M", "pid": _PROCESS, "tid": track, "args": args})


def _microseconds(nanoseconds: int) -> msgspec.Raw:
    """The unit of the format; a decimal fraction keeps the nanoseconds, where a float would not for long."""
    return msgspec.Raw(b"%d.%03d" % divmod(nanoseconds, 1000))


def _summary(record: lines.CallRecord) -> dict[str, Any]:
    """The arguments and the outcome of a call, as long as a person would read them."""
    args = _filled(record, but="identity sequences sequence tokens")
    sequences = getattr(record, "sequences", None)
    if isinstance(record, lines.AdmitSequence):
        sequences = [record.sequence]
    if sequences is not None:
        args |= {"sequences": len(sequences), "prompt_tokens": sum(one.tokens[1] for one in sequences)}
    tokens = getattr(record, "tokens", None)
    if tokens is not None:
        args["tokens"] = tokens[1]
    return args


def _filled(record: msgspec.Struct, *, but: str) -> dict[str, Any]:
    """The fields that have another value than their default, long lists cut short."""
    skipped = but.split()
    found: dict[str, Any] = msgspec.to_builtins(record)
    return {name: _short(value) for name, value in found.items() if name not in skipped and value is not None}


def _short(value: Any) -> Any:
    return f"{len(value)} values" if isinstance(value, list) and len(value) > _VALUES_SHOWN_MAX else value
