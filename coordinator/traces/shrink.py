"""Making a failing trace small: requests, then calls, then tokens are left out as long as it fails in the same way.

A trace fails in one of two ways. Its replay differs: then the same step has to differ in the same way. Or it replays
equal and holds a failure (a call that raised, a drain that failed, something withheld): then the same call has to fail
at the same row and action. Whatever else happens on the way may change; calls that no longer make sense are refused by
the coordinator, and left out in turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from attrs import evolve, frozen
from msgspec.structs import replace

from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.reader import Group, TraceError, TraceReader, decode_step
from context_cache.coordinator.traces.replay import Replay, differing_fields, rewriting
from context_cache.coordinator.traces.shorten import prompts_of, shortened
from context_cache.coordinator.traces.stage import BYTES_MAX, open_backend

__all__ = ["Shrunk", "shrink"]

_T = TypeVar("_T")

# What a step says of the coordinator's behaviour. Page numbers and subjects change when something is left out.
_BEHAVIOUR: Final = ("machine", "row", "event", "source", "target", "guards", "ran", "outcome", "failed", "ended")

Symptom: TypeAlias = tuple[Any, ...]
Candidate: TypeAlias = list[Group]


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
        self.differs = False

    def run(self, candidate: Candidate, *, differs: bool) -> tuple[int, Symptom] | None:
        """Replay; (index of the call, what is wrong with it) for the first call that shows something, or None."""
        play = Replay(self._reader.header, open_backend(self._backend), bytes_max=self._bytes_max)
        try:
            for index, group in enumerate(candidate):
                actual = play.make(group, self._reader)
                found = _difference(group, actual) if differs else _failure(actual)
                # Calls that make no sense without those that were left out differ too; they are not looked for.
                if found is not None and (not self.symptom or found == self.symptom):
                    return index, found
            return None
        finally:
            play.end()

    def fails(self, candidate: Candidate) -> bool:
        """Whether a shorter trace shows the same symptom."""
        if monotonic() > self._until:
            return False
        self.tries += 1
        self._progress(int(monotonic() - self._began))
        try:
            found = self.run(candidate, differs=self.differs)
        except TraceError:
            return False
        return found is not None and found[1] == self.symptom

    def cut(self, candidate: Candidate) -> Candidate:
        """Nothing behind the call that fails."""
        found = self.run(candidate, differs=self.differs)
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
        found = shrinker.run(everything, differs=True)
        shrinker.differs = found is not None
        if found is None:
            failures = _failures(shrinker, everything)
            if failures is None:
                raise TraceError(
                    "it replays as recorded and holds no failure, so there is nothing to shrink; shrink a trace whose "
                    "replay differs, or in which a call fails"
                )
            found = failures
        index, shrinker.symptom = found
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
            " ".join(str(part) for part in shrinker.symptom if not isinstance(part, tuple)),
            shrinker.tries,
        )


# What is wrong with a call ------------------------------------------------------------------------------------------


def _difference(group: Group, actual: list[bytes]) -> Symptom | None:
    if actual == group.raw:
        return None
    expected = [found.step for found in group.steps()]
    made = [decode_step(raw, 0) for raw in actual[1:]]
    for index in range(max(len(expected), len(made))):
        one = expected[index] if index < len(expected) else None
        other = made[index] if index < len(made) else None
        fields = tuple(name for name in differing_fields(one, other) if name in (*_BEHAVIOUR, "kind"))
        if fields:
            what = other if one is None else one
            assert what is not None, "one side has a step"
            values = tuple(repr((getattr(one, name, None), getattr(other, name, None))) for name in fields)
            return (type(group.record).__name__, what.machine, what.event, fields, values)
    return None


def _failure(actual: list[bytes]) -> Symptom | None:
    if not actual:
        return None
    record = msgspec.json.decode(actual[0])
    raised = record.get("raised")
    for raw in actual[1:]:
        step = decode_step(raw, 0)
        if step.outcome not in ("done", "refused"):
            return (record["line"], step.machine, "row", step.row, step.outcome, step.failed or "", raised or "")
    if raised not in (None, "ContractViolation"):
        return (record["line"], "raised", raised)
    return None


def _failures(shrinker: _Shrinker, groups: Candidate) -> tuple[int, Symptom] | None:
    """The last failure: what went before is what led to it."""
    last: tuple[int, Symptom] | None = None
    for index, group in enumerate(groups):
        found = _failure(group.raw)
        if found is not None:
            last = (index, found)
    if last is None:
        return None
    shrinker.symptom = last[1]
    return last if shrinker.run(groups[: last[0] + 1], differs=False) is not None else None


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
            write(_as_expected(group, actual) if last and shrinker.differs else actual)


def _as_expected(group: Group, actual: list[bytes]) -> list[bytes]:
    """The lines of the call that differs, with the behaviour that was recorded in the place of what happens now."""
    expected = [found.step for found in group.steps()]
    made = [decode_step(raw, 0) for raw in actual[1:]]
    steps: list[lines.StepRecord] = []
    for index, step in enumerate(expected):
        now = made[index] if index < len(made) else step
        steps.append(replace(now, **{name: getattr(step, name) for name in _BEHAVIOUR}))
    return [actual[0], *(msgspec.json.encode(step) + b"\n" for step in steps)]
