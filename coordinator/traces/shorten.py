"""Shorter prompts in recorded calls, with every length that follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen
from msgspec.structs import replace

from context_cache.coordinator.traces import format as lines

__all__ = ["Prompt", "prompts_of", "shortened"]


@frozen
class Prompt:
    """The prompt of one sequence: index of the call that admits it, its place in that call, its length in tokens."""

    call: int
    place: int
    length: int


def prompts_of(records: Sequence[lines.CallRecord]) -> list[Prompt]:
    """Every prompt that was admitted, longest first."""
    found: list[Prompt] = []
    for index, record in enumerate(records):
        if isinstance(record, lines.BeginRequest) and record.gave is not None:
            found += [Prompt(index, place, one.tokens[1]) for place, one in enumerate(record.sequences)]
        elif isinstance(record, lines.AdmitSequence) and record.status == "OK":
            found.append(Prompt(index, 0, record.sequence.tokens[1]))
    return sorted(found, key=lambda prompt: -prompt.length)


@define
class _Batch:
    """Which slot the shortened sequence has in its request, if it is still there; and the pending mapping."""

    slots: int
    slot: int | None
    mapping: list[int] = field(factory=list)


def shortened(records: Sequence[lines.CallRecord], prompt: Prompt, length: int) -> list[lines.CallRecord]:
    """The same calls, the prompt cut to ``length`` tokens and every later length of its sequence with it."""
    less = prompt.length - length
    out: list[lines.CallRecord] = []
    batches: dict[str, _Batch] = {}
    for index, record in enumerate(records):
        admits = index == prompt.call
        if isinstance(record, lines.BeginRequest):
            if admits:
                sequences = list(record.sequences)
                sequences[prompt.place] = _cut(sequences[prompt.place], length)
                record = replace(record, sequences=sequences)
            if record.gave is not None:
                batches[record.gave] = _Batch(len(record.sequences), prompt.place if admits else None)
        else:
            batch = batches.get(getattr(record, "request", None) or "")
            if batch is not None:
                record = _followed(record, batch, less, length if admits else None)
        out.append(record)
    return out


def _followed(record: lines.CallRecord, batch: _Batch, less: int, admitted: int | None) -> lines.CallRecord:
    """One later call of a request, and what it does to the places of its sequences."""
    match record:
        case lines.AdmitSequence():
            if admitted is not None:
                record = replace(record, sequence=_cut(record.sequence, admitted))
            if record.status == "OK":
                batch.slot = batch.slots if admitted is not None else batch.slot
                batch.slots += 1
        case lines.RetractSequence(left=True):
            batch.slots -= 1
            batch.slot = None if batch.slot == batch.slots else batch.slot
        case lines.BeginBatchCompaction():
            batch.mapping = record.mapping
        case lines.CompactBatch(status="OK"):
            kept = [to for to in batch.mapping if to >= 0]
            if batch.slot is not None and batch.slot < len(batch.mapping):
                moved = batch.mapping[batch.slot]
                batch.slot = moved if moved >= 0 else None
            batch.slots = len(kept)
        case lines.FinalizePrefill() | lines.CompleteDecodeStep():
            if batch.slot is not None:
                record = replace(
                    record,
                    committed=_lowered(record.committed, batch.slot, less),
                    common=_lowered(record.common, batch.slot, less),
                )
        case lines.FinalizeSequence():
            if record.slot == batch.slot:
                record = replace(record, committed=_lowered(record.committed, 0, less))
        case lines.PublishMtpEndpoint():
            if record.slot == batch.slot:
                record = replace(record, length=max(0, record.length - less))
        case _:
            pass
    return record


def _cut(sequence: lines.Sequence, length: int) -> lines.Sequence:
    media: list[tuple[str | None, int]] = []
    room = length
    for digest, times in sequence.media:
        if room > 0:
            media.append((digest, min(times, room)))
        room -= times
    return replace(sequence, tokens=(sequence.tokens[0], length), media=media)


def _lowered(lengths: list[int] | None, slot: int, less: int) -> list[int] | None:
    if lengths is None or slot >= len(lengths) or lengths[slot] < 0:
        return lengths
    return [max(0, value - less) if index == slot else value for index, value in enumerate(lengths)]
