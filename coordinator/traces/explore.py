"""A trace as something to look at: its calls in words, with their steps and times, one after another.

The steps are the records as they were read. What the calls were given is put into a few words, because a page has room
for no more, and token ids are none of its business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from context_cache.coordinator.traces.describe import short
from context_cache.coordinator.traces.format import CallRecord, Header, StepRecord
from context_cache.coordinator.traces.journal import open_journaled
from context_cache.coordinator.traces.reader import Group, TraceReader
from context_cache.coordinator.traces.recorder import timings_of

__all__ = ["ExploredCall", "calls_of", "facts_of"]

_TIMES_READ: Final = 32 * 4096
_ELSEWHERE: Final = frozenset({"request", "identity", "status", "raised", "gave"})
"""Fields that are shown in a place of their own, or not at all."""


@frozen
class ExploredCall:
    """One public call: its name, what it was given and what came of it in words, its steps, and how long it took.

    began, took: nanoseconds; None without a file of times. act_times: of the step at that place, nanoseconds each.
    """

    name: str
    request: str | None
    arguments: str
    result: str
    steps: Sequence[StepRecord]
    began: int | None = None
    took: int | None = None
    act_times: Mapping[int, Sequence[int]] = field(factory=dict)


def calls_of(reader: TraceReader, *, done: Callable[[int], None] = lambda size: None) -> Iterator[ExploredCall]:
    """Every call in order, one held at a time; the times are read along if the file beside the trace can be.

    done: told after each call how many bytes of the trace it was. Raises TraceError at the first line that is wrong.
    """
    with _Times(reader.path) as times:
        for group in reader.groups():
            steps = [found.step for found in group.steps()]
            began, took, act_times = times.of(group, steps)
            record = group.record
            request: str | None = getattr(record, "gave", None) or getattr(record, "request", None)
            yield ExploredCall(
                _name(record), request, _arguments(record), _result(record), steps, began, took, act_times
            )
            done(sum(map(len, group.raw)))


def facts_of(header: Header) -> tuple[tuple[str, str], ...]:
    """(label, value) of what the recorded coordinator was built of."""
    deployment, capacities = header.deployment, header.capacities
    facts = [
        ("flavour", header.flavour),
        ("layers", f"{len(deployment.layers)}"),
        ("max batch", f"{deployment.max_batch:,}"),
        ("page", f"{deployment.page_size:,} tokens"),
    ]
    labels = ("pages", "draft pages", "recurrent slots", "partial-KV slots")
    facts += [(label, f"{count:,}") for label, count in zip(labels, capacities, strict=True) if count]
    if header.seed is not None:
        facts.append(("seed", f"{header.seed}"))
    if not header.tokens:
        facts.append(("tokens", "redacted"))
    return tuple(facts)


def _name(record: CallRecord) -> str:
    # An unusable call says in a field which one it was.
    name: str = getattr(record, "call", None) or str(record.__struct_config__.tag)
    return name


def _result(record: CallRecord) -> str:
    if record.raised is not None:
        return f"raised {record.raised}"
    return getattr(record, "status", None) or ""


def _arguments(record: CallRecord) -> str:
    words = []
    for part in msgspec.structs.fields(record):
        value = getattr(record, part.name)
        if part.name not in _ELSEWHERE and value != part.default and value != [] and value is not None:
            spell = _SPELLED.get(part.name, _plain)
            words.append(spell(part.name.replace("_", " "), value))
    return "; ".join(words)


def _plain(name: str, value: Any) -> str:
    return name if value is True else f"{name} {short(value)}"


def _sequences(name: str, sequences: Sequence[Any]) -> str:
    what = "sequence" if len(sequences) == 1 else "sequences"
    return f"{len(sequences)} {what} of {short([sequence.tokens[1] for sequence in sequences])} tokens"


_SPELLED: Final[dict[str, Callable[[str, Any], str]]] = {
    "tokens": lambda name, value: f"{value[1]} {'token' if value[1] == 1 else 'tokens'}",
    "sequences": _sequences,
    "sequence": lambda name, value: _sequences(name, [value]),
    "headroom": lambda name, value: f"headroom {value[0]} + {value[1]}",
    "tensor": lambda name, value: f"{name} {short(value.shape)} {value.dtype}",
    "hidden": lambda name, value: f"{name} {short(value.shape)} {value.dtype}",
    "call": lambda name, value: "arguments that could not be understood",
}


class _Times:
    """The file of times, read along with the trace; without one, or where it makes no sense, there are no times."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO | None = None
        self._rows: npt.NDArray[np.int64] = np.zeros((0, 4), np.int64)
        self._at = 0
        with suppress(OSError):
            self._file = open_journaled(timings_of(os.fspath(path)))

    def of(self, group: Group, steps: Sequence[StepRecord]) -> tuple[int | None, int | None, dict[int, list[int]]]:
        """When the call began, how long it took, and the same of the acts of its steps."""
        began, took = None, None
        acts: dict[int, list[int]] = {}
        while (row := self._next_until(group.first_step + len(steps) - 1)) is not None:
            step, act, begin, end = row
            place = step - group.first_step
            if place < 0 or end < begin:
                continue
            if act < 0:
                began, took = begin, end - begin
            elif act == len(acts.get(place, ())) < len(steps[place].acts):
                acts.setdefault(place, []).append(end - begin)
        return began, took, acts

    def _next_until(self, step: int) -> tuple[int, int, int, int] | None:
        if self._at == len(self._rows):
            if self._file is None:
                return None
            data = self._file.read(_TIMES_READ)
            self._rows, self._at = np.frombuffer(data[: len(data) // 32 * 32], "<i8").reshape(-1, 4), 0
            if not len(self._rows):
                return None
        one, act, begin, end = self._rows[self._at].tolist()
        if one > step:
            return None
        self._at += 1
        return one, act, begin, end

    def __enter__(self) -> _Times:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
