"""Recording: every public call of a coordinator and every step that it caused, as lines of a trace.

Rule 1: a recorder never stops a request. Whatever goes wrong in it switches it off and is logged; the coordinator goes
on, and the trace is good up to there.
Rule 2: what is written is decided by the calls alone. No clock, no address, no keyed hash; two runs of one script write
the same bytes. Times go to a file beside the trace.
Rule 3: a decode step is recorded without looking at its sequences: its lines are the ones of the step before, but for
the tokens.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from context_cache.backends.base import LifecycleDevice
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.guarded import CALLS
from context_cache.coordinator.identity import BlockHasher
from context_cache.coordinator.manager import ResourceType
from context_cache.coordinator.traces.doors import Acts, NotedAct, WatchedDevice, watched_publisher
from context_cache.coordinator.traces.encode import Encoder, NotKept
from context_cache.coordinator.traces.files import TraceFiles, timings_of, tokens_of
from context_cache.coordinator.traces.format import Identity
from context_cache.coordinator.traces.header import header_of
from context_cache.coordinator.traces.identities import IdentityBook, ScriptedHasher, WatchedHasher
from context_cache.coordinator.traces.steady import SteadyCall, StepLines, steady_call
from context_cache.coordinator.watching import Publisher
from context_cache.machines import REQUEST, Step, StepParts

__all__ = ["CallRecorder", "Sink", "TraceFiles", "TraceRecorder", "timings_of", "tokens_of"]

_log = logging.getLogger("context_cache.traces")

_TIMES_MAX: Final = 8192
_REQUEST: Final = REQUEST.name
_EVENTS: Final = {call: event for event, call in CALLS.items()}
"""What a call fires at its request, where it is not called as the call is."""


class Sink(Protocol):
    """Where lines, token ids and times go. Whatever it raises switches the recorder off."""

    @property
    def line(self) -> Callable[[bytes], object]:
        """Takes the header, or one call with its steps, complete with line ends."""

    @property
    def tokens(self) -> Callable[[bytes], int] | None:
        """Takes raw little-endian int32 token ids and says at which byte they begin; None: they are not wanted."""

    def times(self, rows: npt.NDArray[np.int64]) -> None:
        """int64[n, 4]; see :func:`timings_of`."""

    def close(self) -> None:
        """Nothing more will come."""


class TornCall(Exception):
    """An interrupt came between the end of a call and the recorder."""


class CallRecorder:
    """Turns what happens at one coordinator into lines for a sink; give it as ``recorder`` and to no other.

    sink:   one that wants no tokens gets no digests of the caller either: such a trace is replayed by ordinals alone.
    seed:   written into the header, for the reader.
    timed:  whether the sink wants times.
    script: answers for the block hashes (a redacted trace that is replayed); None: real hashes.

    take:   takes the parts of a step (see ``machines.PartsRecorder``).
    """

    looks_before: frozenset[str] = frozenset({"compact_batch"})

    def __init__(
        self,
        sink: Sink,
        *,
        seed: int | None = None,
        timed: bool = False,
        script: Iterator[Identity] | None = None,
    ) -> None:
        self._sink = sink
        self._line: Callable[[bytes], object] = sink.line
        self._seed = seed
        self._script = script
        self._used = False
        # Steps and acts of the call in progress, as they came. Taking one is an append and nothing else: what they
        # look like as lines is worked out once for the whole call, and mostly known from the call before.
        self._happened: list[StepParts | NotedAct] = []
        self.take: Callable[[StepParts], None] = self._happened.append
        self.acts: Final = Acts(self._happened.append)
        self._device: WatchedDevice | None = None
        self._book = IdentityBook()
        self._encoder: Encoder | None = None
        self.failure: BaseException | None = None
        self._off = False
        self._lines = StepLines()
        self._steady: dict[str, SteadyCall] = {}
        self._timed = timed
        self._times: list[tuple[int, int, int, int]] = []
        self.began_at = 0
        self.steps = 0

    def before_answers(self, ask: Callable[[int], None]) -> None:
        """Let ``ask`` know the number of each identity before it is worked out; it may raise."""
        self._book.before = ask

    # What the coordinator asks once ---------------------------------------------------------------------------------

    def hasher(self, hasher: BlockHasher) -> BlockHasher:
        if self._used:
            raise ContractViolation("this recorder records a coordinator already; give each coordinator its own")
        if self._off:
            raise ContractViolation("this recorder is closed, and nothing would be recorded; make a new one")
        if self._script is not None:
            return ScriptedHasher(self._book, self._script)
        return WatchedHasher(hasher, self._book)

    def device(self, device: LifecycleDevice) -> LifecycleDevice:
        self._used = True
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
        self._encoder = Encoder(core, self._sink.tokens)
        redacted = self._sink.tokens is None
        # From a seed the tokens of a generated script could be worked out.
        seed = None if redacted or self._seed is None else int(self._seed)
        header = header_of(core, tokens=not redacted, seed=seed)
        try:
            self._sink.line(msgspec.json.encode(header) + b"\n")
        except Exception as error:
            self._switch_off(error)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    # What happens -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self._off or self._encoder is None:
            return
        try:
            self._encoder.look()
        except Exception as failure:
            self._switch_off(failure)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    def returned(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        try:
            happened = self._happened
            if self._off:
                happened.clear()
                return
            # Most calls are the call of a moment ago, made again. This is on the way of every decode step, so it is
            # one comparison in the interpreter's own code, and nothing is put into words twice.
            steady = self._steady.get(name)
            if steady is not None and steady.steps == happened and not options and not self._book.answers:
                line = steady.line(arguments, result)
                if line is not None:
                    self._line(line)
                    self.steps += len(happened)
                    if self._timed:
                        self._times.append((self.steps, -1, self.began_at, perf_counter_ns()))
                        if len(self._times) >= _TIMES_MAX:
                            self._give_times()
                    happened.clear()
                    return
            self._write(name, arguments, options, result, None)
        except Exception as failure:
            self._switch_off(failure)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    def raised(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], error: BaseException) -> None:
        try:
            if self._off:
                self._happened.clear()
            else:
                self._write(name, arguments, options, None, error)
        except Exception as failure:
            self._switch_off(failure)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    def dropped(self, request: Request, drop: Callable[[], None]) -> None:
        self.began_at = perf_counter_ns()
        raised: BaseException | None = None
        try:
            drop()
        except BaseException as error:
            raised = error
            raise
        finally:
            try:
                if self._off or self._encoder is None:
                    self._happened.clear()
                else:
                    self._check_whole("close", raised)
                    lines, steps = self._lines.of(self._happened)
                    self._finish(self._encoder.close(request.id, raised) + lines, steps)
            except Exception as failure:
                self._switch_off(failure)
            except BaseException as interrupt:
                self._interrupted(interrupt)
                raise

    def record(self, step: Step) -> None:
        """A whole step instead of its parts."""
        self.take((step.subject, step.firing, step.ran, step.slots, step.failed))

    def close(self) -> None:
        """Write what is still to be written. The coordinator may live on; it is not recorded any more, nor kept."""
        if self._off:
            return
        failure: Exception | None = None
        for last in (self._give_times, self._sink.close):
            try:
                last()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            self._switch_off(failure)
        self._release()

    # ------------------------------------------------------------------------------------------------------------------

    def _write(
        self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], result: Any, error: BaseException | None
    ) -> None:
        """The lines of a call that is not like the one before."""
        encoder, happened = self._encoder, self._happened
        assert encoder is not None, "calls come to a coordinator that was attached"
        self._check_whole(name, error)
        answers = self._book.take()
        refused = isinstance(error, ContractViolation) and not answers and not any(map(_did, happened))
        head = encoder.call(name, arguments, options, result, error, answers, refused=refused)
        lines, steps = self._lines.of(happened)
        if error is None and not answers:
            steady = steady_call(name, encoder, arguments, result, happened, head, lines)
            if steady is not None:
                self._steady[name] = steady
        self._finish(head + lines, steps)

    def _finish(self, lines: bytes, steps: int) -> None:
        """Write a call and its steps in one piece, number the steps and keep their times."""
        happened = self._happened
        self._line(lines)
        if self._timed and steps:
            ended = perf_counter_ns()
            if steps < len(happened):
                _note_acts(self._times, self.steps, happened)
            self._times.append((self.steps + steps, -1, self.began_at, ended))
            if len(self._times) >= _TIMES_MAX:
                self._give_times()
        self.steps += steps
        happened.clear()
        self.acts.next_call()

    def _give_times(self) -> None:
        if self._times:
            times, self._times = self._times, []
            self._sink.times(np.array(times, "<i8"))

    def _check_whole(self, name: str, error: BaseException | None) -> None:
        """Raise if what happened belongs to two calls: the one before was torn apart before anybody was told of it."""
        own = [item[1] for item in self._happened if type(item) is tuple and item[1].machine == _REQUEST]
        event = _EVENTS.get(name, name)
        late = isinstance(error, ContractViolation) and any(firing.outcome == "done" for firing in own)
        several = len(own) > 1 and name != "shutdown"
        if late or several or any(firing.event != event for firing in own):
            raise TornCall(f"a call before {name} was torn apart by an interrupt, and cannot be told from it")

    def _switch_off(self, error: BaseException) -> None:
        if isinstance(error, NotKept) and error.__cause__ is not None:
            error = error.__cause__
        self._release()
        _log.error("the trace recorder failed and is switched off; the coordinator goes on", exc_info=error)
        _forget_frames(error)
        self.failure = error

    def _interrupted(self, interrupt: BaseException) -> None:
        """A trace has no holes: what an interrupt tore apart ends it. The interrupt itself is its caller's."""
        self._release()
        _log.error("an interrupt switched the trace recorder off; the coordinator goes on", exc_info=interrupt)
        self.failure = _twin(interrupt)

    def _release(self) -> None:
        """Off, for good: nothing of the coordinator is kept, nothing is noted, nothing grows."""
        self._off = True
        self._happened.clear()
        self._encoder = self._device = None
        self._steady.clear()
        self._lines = StepLines()
        self._times.clear()
        self._book.close()
        self.acts.off = True


class TraceRecorder(CallRecorder):
    """Records one coordinator into ``path``, with ``path.tokens`` and ``path.timings`` beside it.

    Give it as ``recorder`` when the coordinator is built, and close it (or leave its ``with`` block) at the end. Each
    call is safe against a death of the process as soon as it has returned. An existing trace is replaced.

    Raises OSError when the files cannot be made or another recorder writes them, and then nothing has changed; later
    errors of the disk switch the recorder off and are logged.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, redact: bool = False, seed: int | None = None, timings: bool = True
    ) -> None:
        self._files = TraceFiles(path, redact=redact, timings=timings)
        super().__init__(self._files, seed=seed, timed=timings)
        self._forgotten = weakref.finalize(self, _close, self._files)
        _open_recorders.add(self)

    def close(self) -> None:
        super().close()
        # Of a recorder that failed the files are still open; what they cannot take stays in their journals.
        _close(self._files)
        self._forgotten.detach()

    def leave(self) -> None:
        """In the child of a fork: the trace is the parent's."""
        self._release()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_open_recorders: Final[weakref.WeakSet[TraceRecorder]] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for recorder in list(_open_recorders):
        recorder.leave()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _close(files: TraceFiles) -> None:
    """What is still open of a recorder that failed, or was collected or lived to the end without being closed."""
    try:
        files.close()
    except OSError as error:
        _log.error("a trace could not be closed; its journal holds the rest: %s", error)


def _forget_frames(error: BaseException | None) -> None:
    """A traceback keeps what its frames hold, handles of requests too."""
    while error is not None:
        following = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = following


def _twin(interrupt: BaseException) -> BaseException:
    """The same without a traceback; the one that is raised on gets another one on its way."""
    kind = type(interrupt)
    try:
        twin: BaseException = kind.__new__(kind, *interrupt.args)
    except Exception:
        twin = RuntimeError(f"{kind.__name__}: {interrupt}")
    return twin


def _did(item: StepParts | NotedAct) -> bool:
    """Whether it is more than a refusal."""
    return isinstance(item, NotedAct) or item[1].row >= 0


def _note_acts(times: list[tuple[int, int, int, int]], steps: int, happened: list[StepParts | NotedAct]) -> None:
    """Times of acts, under the step of a request that follows them."""
    waiting: list[NotedAct] = []
    for item in happened:
        if isinstance(item, NotedAct):
            waiting.append(item)
            continue
        steps += 1
        if item[1].machine == _REQUEST:
            times.extend((steps, index, act.begin, act.end) for index, act in enumerate(waiting))
            waiting.clear()
