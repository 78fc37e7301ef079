"""Recording: every public call of a coordinator and every step that it caused, as lines of a trace.

Rule 1: a recorder never stops a request. Whatever goes wrong in it switches it off and is logged; the coordinator goes
on, and the trace is good up to there.
Rule 2: what is written is decided by the calls alone. No clock, no address, no digest; two runs of one script write the
same bytes. Times go to a file beside the trace.
Rule 3: a decode step is recorded without looking at its sequences: its lines are the ones of the step before, but for
the tokens.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from context_cache.backends.base import LifecycleDevice
from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.identity import BlockHasher
from context_cache.coordinator.manager import ResourceType
from context_cache.coordinator.traces.doors import Acts, WatchedDevice, watched_publisher
from context_cache.coordinator.traces.encode import Encoder
from context_cache.coordinator.traces.format import Act, Identity, StepRecord
from context_cache.coordinator.traces.header import header_of
from context_cache.coordinator.traces.identities import IdentityBook, ScriptedHasher, WatchedHasher
from context_cache.coordinator.traces.journal import JournaledFile
from context_cache.coordinator.types import DecodingKvHeadroom, Status
from context_cache.coordinator.watching import Publisher
from context_cache.machines import REQUEST, Firing, Step

__all__ = ["CallRecorder", "Sink", "TraceRecorder", "timings_of", "tokens_of"]

_log = logging.getLogger("context_cache.traces")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

_KEPT_LINES_MAX: Final = 8192
_TIMES_MAX: Final = 65_536
_REQUEST: Final = REQUEST.name
_NOTHING: Final = object()


def tokens_of(path: str | os.PathLike[str]) -> str:
    """Where the token ids of a trace lie: raw little-endian int32."""
    return f"{os.fspath(path)}.tokens"


def timings_of(path: str | os.PathLike[str]) -> str:
    """Where the times of a trace lie: little-endian int64 rows (step, act or -1, begin, end), nanoseconds."""
    return f"{os.fspath(path)}.timings"


class Sink(Protocol):
    """Where lines, token ids and times go. Whatever it raises switches the recorder off."""

    def line(self, data: bytes) -> None:
        """The header, or one call with its steps, complete with line ends."""

    def tokens(self, tokens: Int32Array) -> int:
        """Keep token ids; their offset in tokens, or -1."""

    def times(self, rows: array[int]) -> None:
        """Rows of four numbers; see :func:`timings_of`."""

    def close(self) -> None:
        """Nothing more will come."""


class CallRecorder:
    """Turns what happens at one coordinator into lines for a sink; give it as ``recorder`` and to no other.

    redact: keep neither token ids nor digests of the caller; such a trace is replayed by ordinals alone.
    seed:   written into the header, for the reader.
    timed:  whether the sink wants times.
    script: answers for the block hashes (a redacted trace that is replayed); None: real hashes.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        redact: bool = False,
        seed: int | None = None,
        timed: bool = False,
        script: Iterator[Identity] | None = None,
    ) -> None:
        self._sink = sink
        self._redact = redact
        self._seed = seed
        self._script = script
        self.acts: Final = Acts()
        self._device: WatchedDevice | None = None
        self._book = IdentityBook()
        self._encoder: Encoder | None = None
        self._core: Core | None = None
        self.failure: BaseException | None = None
        self._off = False
        # The call in progress.
        self._name = ""
        self._arguments: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {}
        self._result: Any = _NOTHING
        self._error: BaseException | None = None
        self._lines: list[bytes] = []
        # (subject, id of firing) -> what the line was made of, and the line. The firing is kept, so its id is its own.
        self._kept: dict[tuple[str, int], tuple[Firing, Sequence[str], tuple[int, ...], bytes]] = {}
        self._prepared: dict[tuple[str, int, int], bytes] = {}
        self._times: array[int] | None = array("q") if timed else None
        self._began = 0
        self._steps = 0

    @property
    def steps(self) -> int:
        """How many steps were recorded; steps are numbered from 1."""
        return self._steps

    # What the coordinator asks once ---------------------------------------------------------------------------------

    def hasher(self, hasher: BlockHasher) -> BlockHasher:
        if self._core is not None:
            raise ContractViolation("this recorder records a coordinator already; give each coordinator its own")
        if self._script is not None:
            return ScriptedHasher(self._book, self._script)
        return WatchedHasher(hasher, self._book)

    def device(self, device: LifecycleDevice) -> LifecycleDevice:
        self._device = WatchedDevice(device, self.acts)
        return self._device

    def publisher(self, publisher: Publisher) -> Publisher:
        return watched_publisher(publisher, self.acts)

    def attach(self, core: Core) -> None:
        manager = core.manager
        used = any(manager.pools.free_count(kind) != manager.pools.capacity(kind) for kind in ResourceType)
        if used or len(manager.records):
            raise ContractViolation("a trace begins with an empty manager; the given one has pages or records in use")
        assert self._device is not None, "the coordinator asks for the device first"
        self._device.attach(core)
        self._core = core
        self._encoder = Encoder(core, self._sink.tokens, redact=self._redact)
        header = header_of(core, tokens=not self._redact, seed=self._seed)
        try:
            self._sink.line(msgspec.json.encode(header) + b"\n")
        except Exception as error:
            self._switch_off(error)

    # What happens -----------------------------------------------------------------------------------------------------

    def call(
        self, method: Callable[Concatenate[_S, _P], _R], coordinator: _S, /, *arguments: _P.args, **options: _P.kwargs
    ) -> _R:
        if self._off:
            return method(coordinator, *arguments, **options)
        self._name, self._arguments, self._options = method.__name__, arguments, options
        if self._name == "compact_batch" and self._encoder is not None:
            self._encoder.look()
        if self._times is not None:
            self._began = perf_counter_ns()
        try:
            result = method(coordinator, *arguments, **options)
        except BaseException as error:
            self._result, self._error = None, error
            raise
        self._result = result
        return result

    def dropped(self, request: Request, drop: Callable[[], None]) -> None:
        if self._off:
            drop()
            return
        if self._times is not None:
            self._began = perf_counter_ns()
        raised: BaseException | None = None
        try:
            drop()
        except BaseException as error:
            raised = error
            raise
        finally:
            self._write(lambda encoder: encoder.close(request.id, raised))

    def settled(self) -> None:
        if self._result is _NOTHING or self._off:
            return
        self._write(self._call_line)
        self._result, self._error = _NOTHING, None
        self._arguments, self._options = (), {}

    def take(
        self, subject: str, firing: Firing, ran: Sequence[str], slots: tuple[int, ...], failed: str | None
    ) -> None:
        """One step (see ``machines.FiringRecorder``)."""
        if self._off:
            return
        self._steps += 1
        acts: Sequence[Act] = ()
        if firing.machine == _REQUEST and self.acts.noted:
            acts = self.acts.noted
            self._note_times(len(acts))
            self.acts.noted, self.acts.times = [], []
        elif self._times is not None:
            self._note_times(0)
        key = (subject, id(firing))
        kept = self._kept.get(key)
        if kept is not None and kept[1] == ran and kept[2] is slots and failed is None and not acts:
            self._lines.append(kept[3])
            return
        line = _step_line(subject, firing, ran, acts, slots, failed)
        self._lines.append(line)
        if failed is None and not acts:
            if len(self._kept) >= _KEPT_LINES_MAX:
                self._kept.clear()
            self._kept[key] = (firing, ran, slots, line)

    def record(self, step: Step) -> None:
        """The same as :meth:`take`, for a whole step."""
        self.take(step.subject, step.firing, step.ran, step.slots, step.failed)

    def close(self) -> None:
        """Write what is still to be written. The coordinator may live on; it is not recorded any more."""
        if self._off:
            return
        try:
            self._give_times()
            self._sink.close()
        except OSError as error:
            self._switch_off(error)
        self._off = True

    # ------------------------------------------------------------------------------------------------------------------

    def _call_line(self, encoder: Encoder) -> bytes:
        name, arguments, result = self._name, self._arguments, self._result
        if name == "prepare_decode_step" and self._error is None and result.refusal is None and not self._options:
            return self._prepared_line(encoder, *arguments)
        if name == "complete_decode_step" and result is Status.OK and not self._options and not self._book.answers:
            line = encoder.plain_step(*arguments)
            if line is not None:
                return line
        return encoder.call(name, arguments, self._options, result, self._error, self._book.take())

    def _prepared_line(self, encoder: Encoder, handle: RequestHandle, headroom: DecodingKvHeadroom) -> bytes:
        key = (handle.id, headroom.base_extra_tokens, headroom.draft_extra_tokens)
        line = self._prepared.get(key)
        if line is None:
            if len(self._prepared) >= _KEPT_LINES_MAX:
                self._prepared.clear()
            line = encoder.call("prepare_decode_step", (handle, headroom), {}, self._result, None, [])
            self._prepared[key] = line
        return line

    def _write(self, make: Callable[[Encoder], bytes]) -> None:
        """One call and its steps, in one piece."""
        if self._encoder is None or self._off:
            return
        lines, self._lines = self._lines, []
        self.acts.next_call()
        try:
            self._sink.line(make(self._encoder) + b"".join(lines))
            if self._times is not None and len(self._times) >= _TIMES_MAX:
                self._give_times()
        except Exception as error:
            self._switch_off(error)
        except BaseException as interrupt:
            # A trace has no holes: what an interrupt tore apart ends it.
            self._switch_off(interrupt)
            raise

    def _note_times(self, acts: int) -> None:
        times = self._times
        if times is None:
            return
        for index in range(acts):
            times.extend((self._steps, index, *self.acts.times[index]))
        times.extend((self._steps, -1, self._began, perf_counter_ns()))

    def _give_times(self) -> None:
        if self._times:
            self._sink.times(self._times)
            self._times = array("q")

    def _switch_off(self, error: BaseException) -> None:
        self._off = True
        self.failure = error
        _log.error("the trace recorder failed and is switched off; the coordinator goes on", exc_info=error)


class TraceRecorder(CallRecorder):
    """Records one coordinator into ``path``, with ``path.tokens`` and ``path.timings`` beside it.

    Give it as ``recorder`` when the coordinator is built, and close it (or leave its ``with`` block) at the end. Each
    call is safe against a death of the process as soon as it has returned. An existing trace is replaced.

    Raises OSError when the files cannot be made; later errors of the disk switch the recorder off and are logged.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, redact: bool = False, seed: int | None = None, timings: bool = True
    ) -> None:
        super().__init__(
            _Files(path, redact=redact, timings=timings), redact=redact, seed=seed, timed=timings
        )

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Files:
    """The three files of a trace."""

    def __init__(self, path: str | os.PathLike[str], *, redact: bool, timings: bool) -> None:
        self._open: list[JournaledFile] = []
        try:
            self._trace = self._make(path)
            self._tokens = None if redact else self._make(tokens_of(path))
            self._timings = self._make(timings_of(path)) if timings else None
        except BaseException:
            for file in self._open:
                file.abandon()
            raise
        for unused, name in ((redact, tokens_of(path)), (not timings, timings_of(path))):
            if unused and os.path.exists(name):
                # What an earlier trace of this name left would be taken for this one's.
                os.unlink(name)

    def _make(self, path: str | os.PathLike[str]) -> JournaledFile:
        file = JournaledFile(path)
        self._open.append(file)
        return file

    def line(self, data: bytes) -> None:
        self._trace.append(data)

    def tokens(self, tokens: Int32Array) -> int:
        if self._tokens is None:
            return -1
        return self._tokens.append(tokens.astype("<i4", copy=False).tobytes()) // 4

    def times(self, rows: array[int]) -> None:
        if self._timings is not None:
            self._timings.append(np.array(rows, "<i8").tobytes())

    def close(self) -> None:
        for file in self._open:
            file.close()


def _step_line(
    subject: str, firing: Firing, ran: Sequence[str], acts: Sequence[Act], slots: tuple[int, ...], failed: str | None
) -> bytes:
    record = StepRecord(
        machine=firing.machine,
        subject=subject,
        row=firing.row,
        event=firing.event,
        source=firing.source,
        target=firing.target,
        guards=dict(firing.guards),
        ran=list(ran),
        acts=list(acts),
        slots=_ranges(slots),
        outcome=firing.outcome,
        failed=failed,
        ended=firing.work_ended,
    )
    return msgspec.json.encode(record) + b"\n"


def _ranges(slots: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``0-2,5``."""
    parts: list[str] = []
    first = last = None
    for slot in (*slots, None):
        if last is not None and slot == last + 1:
            last = slot
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = slot
    return ",".join(parts)
