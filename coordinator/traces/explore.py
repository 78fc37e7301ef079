"""A trace as something to look at: its calls in words, with their steps and times, one after another.

The steps are the records as they were read. What the calls were given is put into a few words, because a page has room
for no more, and token ids are none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from attrs import field, frozen

from context_cache.coordinator.traces.describe import short
from context_cache.coordinator.traces.format import CallRecord, Header, StepRecord
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.timings import TimedTrace, without_times

__all__ = ["ExploredCall", "calls_of", "facts_of"]

_ELSEWHERE: Final = frozenset({"request", "identity", "status", "raised", "gave"})
"""Fields that are shown in a place of their own, or not at all."""


@frozen
class ExploredCall:
    """One public call: its name, what it was given and what came of it in words, its steps, and how long it took.

    began, took: nanoseconds; None where the times are not known. act_times: of the step at that place, one for each of
    its acts.
    """

    name: str
    request: str | None
    arguments: str
    result: str
    steps: Sequence[StepRecord]
    began: int | None = None
    took: int | None = None
    act_times: Mapping[int, Sequence[int]] = field(factory=dict)


def calls_of(
    trace: TraceReader | TimedTrace, *, done: Callable[[int], None] = lambda size: None
) -> Iterator[ExploredCall]:
    """Every call in order, one held at a time, with its times if the trace was opened with them.

    done: told after each call how many bytes of the trace it was. Raises TraceError at the first line that is wrong.
    """
    for call in trace.calls() if isinstance(trace, TimedTrace) else map(without_times, trace.groups()):
        record = call.group.record
        act_times = {
            place: [act.end - act.begin for act in step.acts] for place, step in enumerate(call.steps) if step.acts
        }
        yield ExploredCall(
            _name(record), call.request, _arguments(record), _result(record), [step.found.step for step in call.steps],
            call.begin if call.timed else None, call.end - call.begin if call.timed else None, act_times,
        )  # fmt: skip
        done(sum(map(len, call.group.raw)))


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
