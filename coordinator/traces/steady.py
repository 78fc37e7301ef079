"""Steps as lines, and calls that are made again and again.

A decode step is two calls whose lines are those of the step before, but for where its tokens lie. They are recognised
by one comparison of what happened with what happened then; nothing is put into words again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from attrs import define

from context_cache.coordinator.core import Request
from context_cache.coordinator.traces.doors import NotedAct
from context_cache.coordinator.traces.encode import Encoder
from context_cache.coordinator.traces.format import StepRecord
from context_cache.coordinator.types import BatchAdvance, DecodingKvHeadroom, PrepareDecodeResult, Status
from context_cache.machines import REQUEST, StepParts

__all__ = ["SteadyCall", "StepLines", "steady_call"]

_KEPT_MAX: Final = 8192
_REQUEST: Final = REQUEST.name
_AGAIN: Final = frozenset({"prepare_decode_step", "complete_decode_step"})
_PLAIN_END: Final = b',"status":"OK"}\n'

Happened: TypeAlias = "Sequence[StepParts | NotedAct]"


class SteadyCall(Protocol):
    """A call that is likely to be made again, with the same steps."""

    @property
    def steps(self) -> list[StepParts]:
        """What happened in it: steps, and no act."""

    def line(self, arguments: tuple[Any, ...], result: Any) -> bytes | None:
        """The lines of a call with the same steps that ended well, or None if it was another kind of call."""


@define(eq=False)
class _Prepared:
    """prepare_decode_step: with the same headroom, all of it is the same."""

    steps: list[StepParts]
    headroom: DecodingKvHeadroom
    whole: bytes

    def line(self, arguments: tuple[Any, ...], result: PrepareDecodeResult) -> bytes | None:
        if result.refusal is not None or arguments[1] != self.headroom:
            return None
        return self.whole


@define(eq=False)
class _Completed:
    """complete_decode_step: a step in which every sequence brought one token differs in its tokens alone."""

    steps: list[StepParts]
    encoder: Encoder
    request: Request
    head: bytes
    tail: bytes

    def line(self, arguments: tuple[Any, ...], result: object) -> bytes | None:
        advances, request = arguments[1], self.request
        if type(advances) is not BatchAdvance or result is not Status.OK or not request.plain_steps:
            return None
        if len(arguments) > 2 and (len(arguments[2]) or (len(arguments) > 3 and arguments[3] is not None)):
            return None
        if advances.counts.tobytes() != request.one_each:
            return None
        tokens = advances.token_ids
        return b"%b[%d,%d]%b" % (self.head, self.encoder.keep_tokens(tokens), tokens.size, self.tail)


def steady_call(
    name: str,
    encoder: Encoder,
    arguments: tuple[Any, ...],
    result: Any,
    happened: Happened,
    head: bytes,
    steps: bytes,
) -> SteadyCall | None:
    """What to keep of a call that ended well and asked for no identity; ``head`` and ``steps`` are its lines."""
    if name not in _AGAIN:
        return None
    plain = [item for item in happened if type(item) is tuple]
    if not plain or len(plain) != len(happened):
        return None
    if name == "prepare_decode_step" and len(arguments) == 2 and result.refusal is None:
        return _Prepared(plain, arguments[1], head + steps)
    if name == "complete_decode_step" and arguments:
        before, found, after = head.partition(b'"tokens":')
        rest = after[after.index(b"]") + 1 :] if found else b""
        # Anything else in the line, such as sequences that ended, belongs to this one step.
        if rest == _PLAIN_END:
            return _Completed(plain, encoder, arguments[0]._request, before + found, rest + steps)
    return None


class StepLines:
    """Makes the lines of steps. What a step says beside its acts and slots is mostly what it said the last time."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        # By subject and id of the firing, which the kept step keeps alive: the step, its line up to where acts and
        # slots stand, and the rest.
        self._kept: dict[tuple[str, int], tuple[StepParts, bytes, bytes]] = {}

    def of(self, happened: Happened) -> tuple[bytes, int]:
        """The lines of the steps of a call, in order, and how many steps.

        Acts stand under the step of a request that follows them.
        """
        acts: list[bytes] = []
        lines: list[bytes] = []
        steps = 0
        for item in happened:
            if isinstance(item, NotedAct):
                acts.append(item.line)
                continue
            steps += 1
            before, after = self._parts(item)
            lines.append(before)
            if acts and item[1].machine == _REQUEST:
                lines += (b'"acts":[', b",".join(acts), b"],")
                acts = []
            if item[3]:
                lines.append(_slots(item[3]))
            lines.append(after)
        return b"".join(lines), steps

    def _parts(self, parts: StepParts) -> tuple[bytes, bytes]:
        subject, firing, ran, _, failed = parts
        key = (subject, id(firing))
        kept = self._kept.get(key)
        if kept is not None:
            step, before, after = kept
            if step[2] == ran and step[4] == failed:
                return before, after
        line = _line(parts)
        # Behind acts and slots the outcome follows; the word is in no name before it.
        at = line.rindex(b'"outcome":')
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        self._kept[key] = (parts, line[:at], line[at:])
        return line[:at], line[at:]


def _line(parts: StepParts) -> bytes:
    """The line of a step without its acts and slots."""
    subject, firing, ran, _, failed = parts
    record = StepRecord(
        machine=firing.machine,
        subject=subject,
        row=firing.row,
        event=firing.event,
        source=firing.source,
        target=firing.target,
        guards=dict(firing.guards),
        ran=list(ran),
        outcome=firing.outcome,
        failed=failed,
        ended=firing.work_ended,
    )
    return msgspec.json.encode(record) + b"\n"


@lru_cache(4096)
def _slots(slots: tuple[int, ...]) -> bytes:
    """The field of slots as ranges: ``(0, 1, 2, 5)`` as ``"slots":"0-2,5",``."""
    parts: list[str] = []
    first = last = None
    for slot in (*slots, None):
        if last is not None and slot == last + 1:
            last = slot
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = slot
    return f'"slots":"{",".join(parts)}",'.encode()
