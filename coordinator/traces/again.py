"""Making a recorded call again: from its record to arguments, and to the method of the coordinator."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from context_cache.coordinator.arguments import Int32Array
from context_cache.coordinator.coordinator import ContextCacheCoordinator
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.identity import AdapterKey, BlockKeyExtras, Digest, MediaSpanKey
from context_cache.coordinator.manager import LookupPolicy
from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.stage import Stage
from context_cache.coordinator.types import (
    BatchAdvance,
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    ResidentRef,
    TokenStateContract,
)

__all__ = ["TokenSource", "make_again", "offsets_of"]

TokenSource = Callable[[int, int, int], Int32Array]
"""(offset, count, line) -> token ids; raises TraceError."""

_E = TypeVar("_E", bound=enum.Enum)
_TOKENS_OF_A_CALL_MAX: Final = 2**26
_MEDIA_BEYOND_MAX: Final = 2**20


def offsets_of(record: lines.CallRecord) -> list[int]:
    """Where the tokens of a call lie, in the order in which a recorder keeps them."""
    if isinstance(record, lines.BeginRequest):
        return [sequence.tokens[0] for sequence in record.sequences]
    if isinstance(record, lines.AdmitSequence):
        return [record.sequence.tokens[0]]
    tokens = getattr(record, "tokens", None)
    return [] if tokens is None else [tokens[0]]


def make_again(record: lines.CallRecord, stage: Stage, tokens: TokenSource, line: int) -> None:
    """Make the call. Raises what it raises; TraceError, and no call is made, if the record makes no sense."""
    call = _prepared(record, stage, tokens, line)
    call()


def _prepared(record: lines.CallRecord, stage: Stage, tokens: TokenSource, line: int) -> Callable[[], Any]:
    """The call with its arguments, not made yet."""
    coordinator = stage.coordinator
    if isinstance(record, lines.Shutdown):
        return coordinator.shutdown
    if isinstance(record, lines.BeginRequest):
        return _begin(record, stage, tokens, line)
    handle = stage.handle(record.request)
    match record:
        case lines.Close():
            return handle.close if hasattr(handle, "close") else lambda: None
        case lines.Unusable():
            return _refused(record, coordinator, handle, line)
        case lines.AdmitSequence():
            _check_positions([record.sequence], line)
            sequence = _sequence(record.sequence, tokens, line)
            headroom = DecodingKvHeadroom(*record.headroom)
            return lambda: coordinator.admit_sequence(handle, sequence, headroom)
        case lines.FinalizeSequence():
            advance = _advance(record, tokens, line, stage)
            size = advance.committed.size
            single = ContextCacheSequenceAdvance(
                tuple(advance.token_ids.tolist()), int(advance.committed[0]) if size else -1
            )
            return lambda: coordinator.finalize_sequence_admission(handle, record.slot, single)
        case lines.FinalizePrefill():
            batch = _advance(record, tokens, line, stage)
            return lambda: coordinator.finalize_prefill_publication(handle, batch, record.common)
        case lines.CompleteDecodeStep():
            step = _advance(record, tokens, line, stage, steps=True)
            return lambda: coordinator.complete_decode_step(handle, step, tuple(record.completed), record.common)
        case lines.PrepareDecodeStep():
            wanted = DecodingKvHeadroom(*record.headroom)
            return lambda: coordinator.prepare_decode_step(handle, wanted)
        case lines.BeginBatchCompaction():
            tensor = stage.tensor(record.tensor, line)
            return lambda: coordinator.begin_batch_compaction(handle, record.mapping, record.new_size, tensor)
        case lines.CompactBatch():
            return lambda: _compact(coordinator, handle, record)
        case lines.PublishMtpEndpoint():
            hidden = stage.tensor(record.hidden, line)
            return lambda: coordinator.publish_hybrid_mtp_endpoint(
                handle, record.slot, record.length, hidden, record.row
            )
        case lines.RestoreMtpBoundary():
            target = stage.tensor(record.hidden, line)
            return lambda: coordinator.restore_hybrid_mtp_boundary_hidden(handle, record.slot, target, record.row)
        case lines.PreparePrefill():
            return lambda: coordinator.prepare_prefill(handle)
        case lines.EnqueuePrefillCaptures():
            return lambda: coordinator.enqueue_prefill_captures(handle)
        case lines.RetractSequence():
            return lambda: coordinator.retract_sequence_admission(handle)
        case lines.Finish():
            return lambda: coordinator.finish(handle)


def _check_positions(sequences: list[lines.Sequence], line: int) -> None:
    """A call that would fill memory is no call of a runtime. Media that do not fit their tokens are: it is refused."""
    tokens = sum(sequence.tokens[1] for sequence in sequences)
    media = sum(times for sequence in sequences for _, times in sequence.media)
    if tokens > _TOKENS_OF_A_CALL_MAX or media > tokens + _MEDIA_BEYOND_MAX:
        raise TraceError(
            f"line {line}: {tokens} tokens and media for {media} positions, more than any call of a runtime has; the "
            "line was edited"
        )


def _begin(record: lines.BeginRequest, stage: Stage, tokens: TokenSource, line: int) -> Callable[[], None]:
    _check_positions(record.sequences, line)
    try:
        admission = ContextCacheBatchAdmission(
            tuple(_sequence(sequence, tokens, line) for sequence in record.sequences),
            record.speculative,
            _named(TokenStateContract, record.contract, line),
            _named(LookupPolicy, record.lookup, line),
            _named(CommitPolicy, record.commit, line),
            record.replay_tail,
        )
        headroom = DecodingKvHeadroom(*record.headroom)
    except ContractViolation as error:
        raise TraceError(f"line {line}: {error}") from None
    stream: Any = object() if record.other_stream else stage.stream

    def begin() -> None:
        result = stage.coordinator.begin_request(admission, headroom, stream)
        if result.admission is not None:
            # By the recorded name: a trace that was shortened numbers its requests anew.
            stage.keep(record.gave or result.admission.request.id, result.admission.request)

    return begin


def _compact(coordinator: ContextCacheCoordinator, handle: Any, record: lines.CompactBatch) -> None:
    core = coordinator._core
    for cache, active in zip((core.cache, core.draft_cache), record.active, strict=True):
        if cache is not None and active is not None and active != cache.active_batch_size:
            cache.set_active_batch_size(min(active, cache.max_batch))
    coordinator.compact_batch(handle)


_ARGUMENTS: Final = {
    "begin_request": 2, "admit_sequence": 2, "finalize_prefill_publication": 1, "finalize_sequence_admission": 2,
    "complete_decode_step": 1, "prepare_decode_step": 1, "begin_batch_compaction": 3,
    "publish_hybrid_mtp_endpoint": 4, "restore_hybrid_mtp_boundary_hidden": 3, "prepare_prefill": 0,
    "enqueue_prefill_captures": 0, "compact_batch": 0, "retract_sequence_admission": 0, "finish": 0, "shutdown": 0,
}  # fmt: skip
"""How many arguments a call has behind its request (begin_request: behind the admission)."""
_TOO_MANY: Final = 9


def _refused(
    record: lines.Unusable, coordinator: ContextCacheCoordinator, handle: Any, line: int
) -> Callable[[], Any]:
    """The call with arguments that are sure to be refused, as those that were not written down."""
    if record.call not in _ARGUMENTS:
        raise TraceError(f"line {line}: {record.call!r} is no call of a coordinator")
    methods: dict[str, Callable[..., Any]] = {
        "begin_request": coordinator.begin_request,
        "admit_sequence": coordinator.admit_sequence,
        "finalize_prefill_publication": coordinator.finalize_prefill_publication,
        "finalize_sequence_admission": coordinator.finalize_sequence_admission,
        "complete_decode_step": coordinator.complete_decode_step,
        "prepare_decode_step": coordinator.prepare_decode_step,
        "begin_batch_compaction": coordinator.begin_batch_compaction,
        "publish_hybrid_mtp_endpoint": coordinator.publish_hybrid_mtp_endpoint,
        "restore_hybrid_mtp_boundary_hidden": coordinator.restore_hybrid_mtp_boundary_hidden,
        "prepare_prefill": coordinator.prepare_prefill,
        "enqueue_prefill_captures": coordinator.enqueue_prefill_captures,
        "compact_batch": coordinator.compact_batch,
        "retract_sequence_admission": coordinator.retract_sequence_admission,
        "finish": coordinator.finish,
        "shutdown": coordinator.shutdown,
    }
    # A wrong number of arguments is Python's to refuse, the rest is the coordinator's.
    count = _TOO_MANY if record.raised == TypeError.__name__ else _ARGUMENTS[record.call]
    strange = [object() for _ in range(count)]
    return lambda: methods[record.call](handle, *strange)


def _sequence(record: lines.Sequence, tokens: TokenSource, line: int) -> ContextCacheSequenceAdmission:
    at, count = record.tokens
    media: list[Digest | None] = []
    for digest, times in record.media:
        media += [None if digest is None else Digest(bytes.fromhex(digest))] * times
    try:
        return ContextCacheSequenceAdmission(
            tokens(at, count, line),
            BlockKeyExtras() if record.extras is None else _extras(record.extras),
            tuple(media),
            ResidentRef(*record.resident),
            None if record.lookup is None else _named(LookupPolicy, record.lookup, line),
        )
    except ContractViolation as error:
        raise TraceError(f"line {line}: {error}") from None


def _extras(record: lines.Extras) -> BlockKeyExtras:
    return BlockKeyExtras(
        media=tuple(
            MediaSpanKey(
                Digest(bytes.fromhex(span.content)),
                Digest(bytes.fromhex(span.placement)),
                span.offset,
                span.order,
                span.modality,
            )
            for span in record.media
        ),
        adapter=None
        if record.adapter is None
        else AdapterKey(Digest(bytes.fromhex(record.adapter[0])), int(record.adapter[1])),
        position_digest=_digest(record.position),
        custom_embedding_digest=_digest(record.embedding),
        isolation_digest=_digest(record.isolation),
    )


def _digest(text: str | None) -> Digest | None:
    return None if text is None else Digest(bytes.fromhex(text))


def _advance(
    record: lines.FinalizePrefill | lines.FinalizeSequence | lines.CompleteDecodeStep,
    tokens: TokenSource,
    line: int,
    stage: Stage,
    *,
    steps: bool = False,
) -> BatchAdvance:
    """steps: what is not said follows from the state of the request, as after a decode step."""
    at, count = record.tokens
    most = stage.tokens_max
    if at < 0 and count > most:
        raise TraceError(
            f"line {line}: a completion with {count} tokens, more than the {most} that all rows together have; the "
            "line was edited"
        )
    ids = tokens(at, count, line)
    if record.counts is None or record.committed is None:
        return BatchAdvance.one_token_each(ids, _one_more(record.request, stage, count, steps=steps))
    return BatchAdvance(ids, np.array(record.counts, np.int32), np.array(record.committed, np.int32))


def _one_more(request: str | None, stage: Stage, count: int, *, steps: bool) -> Int32Array:
    """The committed lengths after a step in which every sequence brought one token."""
    found = getattr(stage.handle(request), "_request", None) if steps else None
    if found is None or found.order.size != count:
        return np.zeros(count, np.int32)
    following: Int32Array = stage.coordinator._core.lengths_of(found) + np.int32(1)
    return following


def _named(kind: type[_E], name: str, line: int) -> _E:
    try:
        return kind[name]
    except KeyError:
        known = ", ".join(kind.__members__)
        raise TraceError(f"line {line}: {name!r} is no {kind.__name__}; known are {known}") from None
