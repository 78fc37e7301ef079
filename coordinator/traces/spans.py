"""Requests as OpenTelemetry spans, from a trace or while they live.

A span is the life of one request, from its admission to the return of its last page; every transition on the way is an
event of it. Transitions of the coordinator's own machines belong to the request whose row took them: a trace names the
request of each call, and while it happens a row says what it took when it ends. The others belong to no span.

Rule 1: a recorder never stops a request. A tracer that raises costs the spans: the coordinator logs it and goes on.
Rule 2: every span that was begun is ended, by its request or by ``close``.

What is imported here is the API alone; which SDK makes spans of it, and where they go, is the application's affair.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import define, frozen

from context_cache.coordinator.errors import ContextCacheError, ContractViolation
from context_cache.coordinator.traces.format import BeginRequest, StepRecord
from context_cache.coordinator.traces.timings import TimedCall, TimedTrace
from context_cache.machines import REQUEST, Firing, Step
from context_cache.machines.step import DONE

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

__all__ = ["SpanExport", "SpanRecorder", "SpansUnavailable", "export_spans"]

Attributes: TypeAlias = "dict[str, str | bool | int | tuple[str, ...]]"

_NAME: Final = "context_cache.request"
_FINAL: Final = frozenset(state.name for state in REQUEST.states if state.final)
_FAILURES: Final = frozenset({"broken", "quarantined", "poisoned"})
"""States out of which no request comes as it went in: all that is left is to end it."""
_COUPLINGS_MAX: Final = 64
"""A row takes a handful; what no row claims is forgotten."""


class SpansUnavailable(ContextCacheError):
    """The package ``opentelemetry-api`` is missing."""


@define
class _Open:
    """The span of a live request. state: the last one. failed: whether its status says so already."""

    span: Span
    state: str
    failed: bool = False


class _Spans:
    """Makes spans of steps. roots: without a parent; else the parent is what is current when a request is admitted."""

    def __init__(self, tracer: Tracer, *, roots: bool) -> None:
        try:
            from opentelemetry.context import Context
            from opentelemetry.trace import Status, StatusCode
        except ImportError:
            raise SpansUnavailable(
                "spans need the package opentelemetry-api, which is not installed; run: pip install "
                "'context-cache-coordinator[otel]'"
            ) from None
        self._failure = partial(Status, StatusCode.ERROR)
        self._tracer = tracer
        self._context = Context() if roots else None
        self._open: dict[str, _Open] = {}
        self._unclaimed: deque[tuple[Step, int]] = deque(maxlen=_COUPLINGS_MAX)
        self.begun = 0

    def __contains__(self, request: str) -> bool:
        """Whether the request has a span that is not ended."""
        return request in self._open

    def __len__(self) -> int:
        """How many spans are not ended."""
        return len(self._open)

    def step(self, step: Step, at: int, facts: Mapping[str, str | bool | int], caller: str | None = None) -> None:
        """Take a step that ended ``at``, in nanoseconds since 1970.

        facts: attributes of the request's span, if the step begins it. caller: id of the request whose call caused the
        step, if that is known.
        """
        if step.machine != REQUEST.name:
            found = None if caller is None else self._open.get(caller)
            if found is None:
                self._unclaimed.append((step, at))
            else:
                _add(found.span, step, at)
            return
        coupled = [(one, when) for one, when in self._unclaimed if f"{one.machine}.{one.event}" in step.ran]
        self._unclaimed.clear()
        found = self._open.get(step.subject)
        if found is None:
            if step.source != REQUEST.initial or step.target == REQUEST.initial:
                return
            found = self._begin(step, at, facts)
        for one, when in coupled:
            _add(found.span, one, when)
        _add(found.span, step, at)
        found.state = step.target
        ends = step.target in _FINAL
        if not found.failed and (step.target in _FAILURES or (ends and step.outcome != DONE)):
            found.failed = True
            where = f" at {step.failed}" if step.failed else ""
            found.span.set_status(self._failure(f"{step.event} in {step.source}: {step.outcome}{where}"))
        if ends:
            self._end(step.subject, at)

    def end(self, at: int) -> None:
        """End what is still open."""
        for request in tuple(self._open):
            self._end(request, at)

    def _begin(self, step: Step, at: int, facts: Mapping[str, str | bool | int]) -> _Open:
        span = self._tracer.start_span(
            _NAME, context=self._context, start_time=at, attributes={"context_cache.request.id": step.subject, **facts}
        )
        self.begun += 1
        found = self._open[step.subject] = _Open(span, step.target)
        return found

    def _end(self, request: str, at: int) -> None:
        found = self._open.pop(request)
        found.span.set_attribute("context_cache.request.state", found.state)
        found.span.end(at)


def _add(span: Span, step: Step, at: int) -> None:
    """A transition as an event of a span."""
    attributes: Attributes = {
        "context_cache.machine": step.machine,
        "context_cache.row": step.row,
        "context_cache.event": step.event,
        "context_cache.source": step.source,
        "context_cache.target": step.target,
        "context_cache.outcome": step.outcome,
    }
    if step.guards:
        attributes["context_cache.guards"] = tuple(name if held else f"not {name}" for name, held in step.guards)
    if step.failed is not None:
        attributes["context_cache.failed"] = step.failed
    if step.work_ended is not None:
        attributes["context_cache.ended"] = step.work_ended
    name = step.event if step.machine == REQUEST.name else f"{step.machine}.{step.event}"
    span.add_event(name, attributes, at)


class SpanRecorder:
    """Makes spans while requests live; give it as ``recorder`` to one coordinator, and close it at the end.

    tracer: of ``opentelemetry.trace.get_tracer``. A span's parent is the span that is current when the request is
    admitted, and its events have the time at which they were recorded.

    Raises SpansUnavailable if the package ``opentelemetry-api`` is missing.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._spans = _Spans(tracer, roots=False)
        self._closed = False

    def record(self, step: Step) -> None:
        """Take one step. Raises ContractViolation for one of a second coordinator, which switches it off there."""
        if self._closed:
            return
        if step.source == REQUEST.initial and step.machine == REQUEST.name and step.subject in self._spans:
            raise ContractViolation("this recorder records a coordinator already; give each coordinator its own")
        facts = {"context_cache.request.sequences": len(step.slots)}
        self._spans.step(step, time.time_ns(), facts)

    def close(self) -> None:
        """End the spans of requests that have not ended. The coordinator may live on; no more spans are made of it."""
        self._closed = True
        self._spans.end(time.time_ns())

    def __enter__(self) -> SpanRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@frozen
class SpanExport:
    """spans: how many were made. unended: requests that live at the end of the trace; their spans end with it.

    untimed: calls at the end whose times were lost with the recording process, and which are in no span. torn: the
    trace ended in the middle of a call, which was left out.
    """

    spans: int
    unended: int
    untimed: int
    torn: bool


def export_spans(
    trace_path: str | os.PathLike[str], tracer: Tracer, *, ended_at: int | None = None
) -> SpanExport:
    """Make a root span of every request of a trace.

    ended_at: when the last call ended, in nanoseconds since 1970, because a trace has no calendar: its clock only
    counts. Default: when its file of times was last written.

    Raises TraceError for a trace that cannot be used, has no times, or times of another trace; OSError if it cannot be
    opened; SpansUnavailable if the package ``opentelemetry-api`` is missing.
    """
    spans = _Spans(tracer, roots=True)
    with TimedTrace(trace_path) as trace:
        if ended_at is None:
            ended_at = os.stat(trace.times.path).st_mtime_ns
        epoch = now = ended_at - trace.times.ended_at
        for call in trace:
            facts = _facts(call)
            for timed in call.steps:
                spans.step(_as_step(timed.found.step), epoch + timed.at, facts, call.request)
            now = epoch + call.end
        unended = len(spans)
        spans.end(now)
        return SpanExport(spans.begun, unended, trace.untimed, trace.torn)


def _facts(call: TimedCall) -> dict[str, str | bool | int]:
    """What the admission of a request says of it."""
    record = call.group.record
    if not isinstance(record, BeginRequest):
        return {}
    return {
        "context_cache.request.sequences": len(record.sequences),
        "context_cache.request.prompt_tokens": sum(one.tokens[1] for one in record.sequences),
        "context_cache.request.reused_tokens": sum(record.starts),
        "context_cache.request.token_state_contract": record.contract,
        "context_cache.request.lookup_policy": record.lookup,
        "context_cache.request.commit_policy": record.commit,
        "context_cache.request.speculative": record.speculative,
    }


def _as_step(record: StepRecord) -> Step:
    firing = Firing(
        record.machine, record.row, record.event, record.source, record.target, tuple(record.guards.items()),
        record.outcome, record.ended,
    )  # fmt: skip
    return Step(record.subject, firing, tuple(record.ran), failed=record.failed)
