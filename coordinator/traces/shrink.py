"""Making a failing trace small: requests, then calls, then tokens are left out as long as it fails in the same way.

A trace fails in one of two ways. Its replay differs: then the same step has to differ in the same way. Or it replays
equal and holds a failure (a call that raised, an action or a drain that failed, something withheld, a poisoned
coordinator): then the same call has to fail at the same row and action. Whatever else happens on the way may change;
calls that no longer make sense are refused by the coordinator, and left out in turn.

Where all behaviour is as recorded, the difference lies in what changes when something is left out (subjects, slots,
arguments of the device, what the call returned). Then only that may go without which these say exactly the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count, zip_longest
from time import monotonic
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from attrs import evolve, frozen
from msgspec.structs import replace

from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.describe import printable
from context_cache.coordinator.traces.reader import Group, TraceError, TraceReader, decode_call, decode_step
from context_cache.coordinator.traces.replay import Replay, ReplayResult, differing_fields, replay, rewriting
from context_cache.coordinator.traces.shorten import prompts_of, shortened
from context_cache.coordinator.traces.stage import BYTES_MAX, open_backend

__all__ = ["Shrunk", "shrink"]

_T = TypeVar("_T")

# What a step says of the coordinator's behaviour. Page numbers and subjects change when something is left out.
_BEHAVIOUR: Final = ("machine", "row", "event", "source", "target", "guards", "ran", "outcome", "failed", "ended")

_POISONED: Final = "POISONED"

Symptom: TypeAlias = tuple[Any, ...]
Candidate: TypeAlias = list[Group]
Shows: TypeAlias = Callable[[Group, list[bytes]], Symptom | None]
"""Looks for a symptom in a call and the lines that it gave when it was made again."""


@frozen
class Shrunk:
    """calls, requests, tokens: (before, after). differs: the replay differs; False: it holds a failure. symptom: which
    one, in words. tries: how many shorter traces were replayed."""

    calls: tuple[int, int]
    requests: tuple[int, int]
    tokens: tuple[int, int]
    differs: bool
    symptom: str
    tries: int


class _Shrinker:
    def __init__(
        self, reader: TraceReader, backend: str, bytes_max: int, seconds: float, progress: Callable[[int], None]
    ) -> None:
        self._reader, self._backend, self._bytes_max = reader, backend, bytes_max
        self._progress = progress
        self._began = monotonic()
        self._until = self._began + seconds
        self.tries = 0
        self.symptom: Symptom = ()
        self.shows: Shows = _differs

    @property
    def differs(self) -> bool:
        return self.shows is not _fails

    def run(self, candidate: Candidate, shows: Shows) -> tuple[int, Symptom] | None:
        """Replay; (index of the call, what is wrong with it) for the first call that shows something, or None."""
        play = Replay(self._reader.header, open_backend(self._backend), bytes_max=self._bytes_max)
        try:
            for index, group in enumerate(candidate):
                actual = play.make(group, self._reader)
                found = shows(group, actual)
                # Calls that make no sense without those that were left out differ too; they are not looked for.
                if found is not None and (not self.symptom or found == self.symptom):
                    return index, found
            return None
        finally:
            play.end()

    def replay(self) -> ReplayResult:
        """The whole trace, up to its first difference."""
        return replay(self._reader.path, backend=self._backend, bytes_max=self._bytes_max)

    def fails(self, candidate: Candidate) -> bool:
        """Whether a shorter trace shows the same symptom."""
        if monotonic() > self._until:
            return False
        self.tries += 1
        self._progress(int(monotonic() - self._began))
        try:
            found = self.run(candidate, self.shows)
        except TraceError:
            return False
        return found is not None and found[1] == self.symptom

    def cut(self, candidate: Candidate) -> Candidate:
        """Nothing behind the call that fails."""
        found = self.run(candidate, self.shows)
        assert found is not None, "only failing traces are cut"
        return candidate[: found[0] + 1]


def shrink(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    backend: str = "host",
    bytes_max: int = BYTES_MAX,
    seconds: float = 60.0,
    progress: Callable[[int], None] = lambda seconds: None,
) -> Shrunk:
    """Write the smallest trace found that fails as ``path`` does to ``out``, ready to be replayed as a test.

    Where the replay differs, ``out`` says what was expected there: it fails until the code is right again.
    seconds: after this long the smallest one so far is taken. progress: told how many have passed.

    Raises TraceError when nothing fails in the trace, or it cannot be used; OSError.
    """
    with TraceReader(path) as reader:
        everything = list(reader.groups())
        shrinker = _Shrinker(reader, backend, bytes_max, seconds, progress)
        index, shrinker.symptom = _search(everything, shrinker)
        kept = everything[: index + 1]
        kept = _without(kept, _requests(kept), lambda group: _request_of(group.record), shrinker)
        kept = _fewer_calls(kept, shrinker)
        if reader.header.tokens:
            kept = _fewer_tokens(kept, shrinker)
            kept = _fewer_calls(kept, shrinker)
        kept = shrinker.cut(kept)
        _write(kept, reader, out, backend, bytes_max, shrinker)
        return Shrunk(
            (len(everything), len(kept)),
            (len(_requests(everything)), len(_requests(kept))),
            (_tokens(everything), _tokens(kept)),
            shrinker.differs,
            printable(" ".join(str(part) for part in shrinker.symptom if not isinstance(part, tuple))),
            shrinker.tries,
        )


# What is wrong with a call ------------------------------------------------------------------------------------------


def _search(groups: Candidate, shrinker: _Shrinker) -> tuple[int, Symptom]:
    """The call to look at and what is wrong with it. Raises TraceError if nothing is."""
    for shows in (_differs, _says_otherwise):
        found = shrinker.run(groups, shows)
        if found is not None:
            shrinker.shows = shows
            _check_repeatable(shrinker)
            if shows is _says_otherwise and "kind" in found[1][-2]:
                raise TraceError(
                    f"call {groups[found[0]].number} is made again as another call, which no shorter trace can expect; "
                    "look at it with: context-cache replay"
                )
            return found
    shrinker.shows = _fails
    found = _last_failure(groups)
    if found is None:
        raise TraceError(
            "it replays as recorded and holds no failure, so there is nothing to shrink; shrink a trace whose replay "
            "differs, or in which a call fails"
        )
    return found


def _check_repeatable(shrinker: _Shrinker) -> None:
    """Raises TraceError if the first difference is that a call was ended from outside."""
    result = shrinker.replay()
    if result.unrepeatable is not None:
        calls = result.calls
        raise TraceError(
            f"call {calls + 1} was ended from outside by {result.unrepeatable}, which cannot be repeated, so there is "
            f"nothing to shrink; the {calls} calls before it are equal, replay them alone with --until {calls}"
        )


def _steps_of(group: Group, actual: list[bytes]) -> list[tuple[lines.StepRecord | None, lines.StepRecord | None]]:
    """The steps as they were recorded and as they came out, side by side."""
    return list(zip_longest((found.step for found in group.steps()), (decode_step(raw, 0) for raw in actual[1:])))


def _differs(group: Group, actual: list[bytes]) -> Symptom | None:
    """The first step that behaves differently."""
    if actual == group.raw:
        return None
    for one, other in _steps_of(group, actual):
        fields = tuple(name for name in differing_fields(one, other) if name in (*_BEHAVIOUR, "kind"))
        if fields:
            what = other if one is None else one
            assert what is not None, "one side has a step"
            values = tuple(repr((getattr(one, name, None), getattr(other, name, None))) for name in fields)
            return (_name(group.record), what.machine, what.event, fields, values)
    return None


def _says_otherwise(group: Group, actual: list[bytes]) -> Symptom | None:
    """The first record of a call that says something else although all of its steps behave alike."""
    if actual == group.raw or _differs(group, actual) is not None:
        return None
    now = decode_call(actual[0], 0) if actual else None
    sides: list[tuple[msgspec.Struct | None, msgspec.Struct | None]] = [*_steps_of(group, actual), (group.record, now)]
    for index, (one, other) in enumerate(sides):
        fields = differing_fields(one, other)
        if fields:
            what = ("the call",) if index == len(sides) - 1 else (f"step {index + 1} of the call",)
            values = tuple(repr((getattr(one, name, None), getattr(other, name, None))) for name in fields)
            return (_name(group.record), *what, ", ".join(fields), fields, values)
    return None


def _fails(group: Group, actual: list[bytes]) -> Symptom | None:
    """The first failure in the lines of a call."""
    if not actual:
        return None
    call = _name(group.record)
    record = decode_call(actual[0], 0)
    for step in (decode_step(raw, 0) for raw in actual[1:]):
        if step.outcome not in ("done", "refused"):
            return (call, step.machine, "row", step.row, step.outcome, step.failed or "", record.raised or "")
        for act in step.acts:
            if act.failed is not None:
                return (call, step.machine, "row", step.row, act.verb, act.failed)
    if record.raised not in (None, "ContractViolation"):
        return (call, "raised", record.raised)
    if getattr(record, "status", None) == _POISONED:
        return (call, "returned", _POISONED)
    return None


def _last_failure(groups: Candidate) -> tuple[int, Symptom] | None:
    """The last failure: what went before is what led to it. A poisoned coordinator says so of every later call."""
    found = [(index, symptom) for index, group in enumerate(groups) if (symptom := _fails(group, group.raw))]
    causes = [one for one in found if one[1][1:] != ("returned", _POISONED)]
    return causes[-1] if causes else found[0] if found else None


# Leaving out ----------------------------------------------------------------------------------------------------------


def _without(
    groups: Candidate, names: Sequence[_T], name_of: Callable[[Group], _T], shrinker: _Shrinker
) -> Candidate:
    """Leave out as many ``names`` as possible, in ever smaller portions.

    From the end, because what comes later depends on what came before; and small portions at every place, because two
    calls may make sense only together (a joiner's admission and the end of its prefill).
    """
    left = list(names)
    size = max(1, len(left) // 2)
    while left:
        start = len(left) - size
        while start >= 0:
            dropped = set(left[start : start + size])
            candidate = [group for group in groups if name_of(group) not in dropped]
            if len(candidate) < len(groups) and shrinker.fails(candidate):
                groups = candidate
                left = [name for name in left if name not in dropped]
                start = min(start, len(left) - size)
            elif start == 0:
                break
            else:
                start = max(0, start - (size if size > 3 else 1))
        if size == 1:
            break
        size //= 2
    return groups


def _fewer_calls(groups: Candidate, shrinker: _Shrinker) -> Candidate:
    return _without(groups, [group.number for group in groups], lambda group: group.number, shrinker)


def _fewer_tokens(groups: Candidate, shrinker: _Shrinker) -> Candidate:
    """Shorter prompts, each as short as it can be."""
    for which in prompts_of([group.record for group in groups]):
        for length in _shorter(which.length):
            records = shortened([group.record for group in groups], which, length)
            candidate = [
                evolve(group, record=record) for group, record in zip(groups, records, strict=True)
            ]
            if shrinker.fails(candidate):
                groups = candidate
                break
    return groups


def _shorter(length: int) -> Iterable[int]:
    """Lengths to try, shortest first."""
    tried = 1
    while tried < length:
        yield tried
        tried *= 2


def _name(record: lines.CallRecord) -> str:
    return str(record.__struct_config__.tag)


def _request_of(record: lines.CallRecord) -> str | None:
    return record.gave if isinstance(record, lines.BeginRequest) else getattr(record, "request", None)


def _requests(groups: Candidate) -> list[str | None]:
    return list(dict.fromkeys(name for name in (_request_of(group.record) for group in groups) if name is not None))


def _tokens(groups: Candidate) -> int:
    total = 0
    for group in groups:
        record = group.record
        if isinstance(record, lines.BeginRequest):
            total += sum(sequence.tokens[1] for sequence in record.sequences)
        elif isinstance(record, lines.AdmitSequence):
            total += record.sequence.tokens[1]
        else:
            total += getattr(record, "tokens", (0, 0))[1]
    return total


# Writing --------------------------------------------------------------------------------------------------------------


def _write(
    groups: Candidate,
    reader: TraceReader,
    out: str | os.PathLike[str],
    backend: str,
    bytes_max: int,
    shrinker: _Shrinker,
) -> None:
    with rewriting(reader, out, backend, bytes_max) as (play, write):
        for number, group in zip(count(1), groups, strict=False):
            actual = play.make(group, reader)
            last = number == len(groups)
            write(_as_recorded(group, actual, shrinker) if last and shrinker.differs else actual)


def _as_recorded(group: Group, actual: list[bytes], shrinker: _Shrinker) -> list[bytes]:
    """The lines of the call that differs, with what was recorded in the place of what happens now."""
    call = actual[0]
    if shrinker.shows is _differs:
        expected = [found.step for found in group.steps()]
        made = [decode_step(raw, 0) for raw in actual[1:]]
        steps: list[lines.StepRecord] = []
        for index, step in enumerate(expected):
            now = made[index] if index < len(made) else step
            steps.append(replace(now, **{name: getattr(step, name) for name in _BEHAVIOUR}))
        return [call, *(_line(step) for step in steps)]
    # Only what the symptom names: the rest changed because something was left out.
    fields = shrinker.symptom[-2]
    for index, (one, other) in enumerate(_steps_of(group, actual)):
        assert one is not None, "steps behave alike, so there are as many"
        assert other is not None, "steps behave alike, so there are as many"
        if differing_fields(one, other) == fields:
            actual[index + 1] = _line(replace(other, **{name: getattr(one, name) for name in fields}))
            return actual
    recorded = {name: getattr(group.record, name) for name in fields}
    return [_line(replace(decode_call(call, 0), **recorded)), *actual[1:]]


def _line(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record) + b"\n"
