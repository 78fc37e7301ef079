"""From a call with its arguments and its outcome to the record of it.

Arguments are written down as the coordinator understands them: a list of advances and the same advances as arrays are
one record. What it cannot understand is an :class:`Unusable` record; such a call is refused and changes nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from context_cache.backends.base import DeviceArray
from context_cache.coordinator.advances import as_batch_advance
from context_cache.coordinator.arguments import Int32Array, as_index, as_int32
from context_cache.coordinator.core import Core
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.identity import BlockKeyExtras, HashMemo
from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.doors import error_name
from context_cache.coordinator.types import (
    AdmitSequenceResult,
    BatchAdvance,
    BeginRequestResult,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    PrepareDecodeResult,
    Status,
    slot_tuple,
)

__all__ = ["CannotReadAgain", "Encoder", "NotKept"]

Fields: TypeAlias = dict[str, Any]


class NotKept(Exception):
    """Token ids could not be kept; the cause says why."""


class CannotReadAgain(Exception):
    """A call used up its arguments."""


class Encoder:
    """Writes calls of one coordinator down.

    tokens: keeps raw token ids and says at which byte they begin; None: they are not kept, nor digests of the caller.
    """

    def __init__(self, core: Core, tokens: Callable[[bytes], int] | None) -> None:
        self._core = core
        self._tokens = tokens
        self._redact = tokens is None
        # A prompt that is offered again after a refusal is written once.
        self._prompts: weakref.WeakKeyDictionary[HashMemo, int] = weakref.WeakKeyDictionary()
        self._media: dict[bytes, int] = {}
        self._active: tuple[int, int | None] = (0, None)
        self._last_prepared: tuple[str, DecodingKvHeadroom, bytes] | None = None

    def keep_tokens(self, tokens: Int32Array) -> int:
        """Keep token ids: at which offset, in tokens, or -1."""
        if self._tokens is None:
            return -1
        data = (tokens if sys.byteorder == "little" else tokens.astype("<i4")).tobytes()
        try:
            return self._tokens(data) // 4
        except Exception as error:
            raise NotKept from error

    def look(self) -> None:
        """Before compact_batch: see what it will change and a runtime may have set, the caches' active batches."""
        draft = self._core.draft_cache
        self._active = (self._core.cache.active_batch_size, None if draft is None else draft.active_batch_size)

    def call(
        self,
        name: str,
        arguments: tuple[Any, ...],
        options: Fields,
        result: Any,
        error: BaseException | None,
        identity: list[lines.Identity],
        *,
        refused: bool = False,
    ) -> bytes:
        """The line of a call that returned ``result`` or raised ``error``.

        refused: it raised ContractViolation and did nothing. Its arguments may be anything, raw token ids in the place
        of lengths too, so a redacted trace does not say them.

        Raises NotKept; CannotReadAgain for a call that took arguments which nobody can look at a second time.
        """
        if name == "prepare_decode_step" and result is not None and result.refusal is None and len(arguments) == 2:
            return self._prepared(*arguments)
        raised = None if error is None else error_name(error)
        if refused and self._redact and (len(arguments) > 1 or options):
            return self._unusable(name, arguments, options, raised, identity)
        try:
            record = _ENCODERS[name](self, result, *arguments, **options)
            if raised is not None or identity:
                record = replace(record, raised=raised, identity=identity)
            line = msgspec.json.encode(record)
            if error is not None:
                # Arguments that were refused may be anything, also what no reader of the trace would take.
                _DECODER.decode(line)
        except NotKept:
            # The arguments are well; the place for them is not.
            raise
        except Exception as unreadable:
            if error is None:
                # It was understood when the call was made, and would be refused if it were made again without it.
                raise CannotReadAgain(
                    f"{name} was given something that cannot be written down behind the call ({unreadable}); give "
                    "lists, tuples or arrays"
                ) from None
            # Whatever is wrong with the arguments, the coordinator has refused them and said so to its caller.
            return self._unusable(name, arguments, options, raised, identity)
        return line + b"\n"

    def _unusable(
        self,
        name: str,
        arguments: tuple[Any, ...],
        options: Fields,
        raised: str | None,
        identity: list[lines.Identity],
    ) -> bytes:
        request = self.request_id(arguments[0] if arguments else options.get("request"))
        record = lines.Unusable(call=name, request=request, raised=raised, identity=identity)
        return msgspec.json.encode(record) + b"\n"

    def _prepared(self, request: RequestHandle, headroom: DecodingKvHeadroom) -> bytes:
        """The line of a prepared step, which has nothing in it but the two."""
        kept = self._last_prepared
        if kept is None or kept[0] != request.id or kept[1] != headroom:
            record = lines.PrepareDecodeStep(request=request.id, headroom=_headroom(headroom), status="OK")
            kept = self._last_prepared = (request.id, headroom, msgspec.json.encode(record) + b"\n")
        return kept[2]

    def close(self, request: str, error: BaseException | None) -> bytes:
        """The line of a drop."""
        raised = None if error is None else error_name(error)
        return msgspec.json.encode(lines.Close(request=request, raised=raised)) + b"\n"

    def request_id(self, handle: object) -> str | None:
        """Id of a request by its handle; None if it is none of this coordinator's."""
        request = handle.request_of(self._core) if isinstance(handle, RequestHandle) else None
        return None if request is None else request.id

    def _size(self, handle: RequestHandle) -> int:
        if self.request_id(handle) is None:
            raise TypeError("of a request of another coordinator nothing is known when the call is made again")
        return handle.batch_size

    # Admission --------------------------------------------------------------------------------------------------

    def begin_request(
        self,
        result: BeginRequestResult | None,
        admission: ContextCacheBatchAdmission,
        headroom: DecodingKvHeadroom,
        stream: object,
    ) -> lines.BeginRequest:
        gave = None if result is None else result.admission
        return lines.BeginRequest(
            sequences=[self._sequence(sequence) for sequence in admission.sequences],
            headroom=_headroom(headroom),
            speculative=bool(admission.speculative_request),
            contract=admission.token_state_contract.name,
            lookup=admission.lookup_policy.name,
            commit=admission.commit_policy.name,
            replay_tail=admission.replay_tail_length,
            other_stream=stream is not self._core.stream,
            status=None if result is None else result.status.name,
            gave=None if gave is None else gave.request.id,
            starts=[] if gave is None else list(gave.prefill_starts),
            insufficient=result is not None and result.insufficient_capacity,
        )

    def admit_sequence(
        self,
        result: AdmitSequenceResult | None,
        request: RequestHandle,
        admission: ContextCacheSequenceAdmission,
        headroom: DecodingKvHeadroom,
    ) -> lines.AdmitSequence:
        return lines.AdmitSequence(
            request=self.request_id(request),
            sequence=self._sequence(admission),
            headroom=_headroom(headroom),
            status=None if result is None else result.status.name,
            start=0 if result is None else result.prefill_start,
            insufficient=result is not None and result.insufficient_capacity,
        )

    def _sequence(self, sequence: ContextCacheSequenceAdmission) -> lines.Sequence:
        tokens, lookup = sequence.token_ids, sequence.lookup_policy
        at = self._prompts.get(sequence.memo)
        if at is None:
            at = self._prompts[sequence.memo] = self.keep_tokens(tokens)
        runs = groupby(sequence.per_position_media_hash)
        return lines.Sequence(
            tokens=(at, int(tokens.size)),
            resident=(sequence.resident.slot, sequence.resident.epoch),
            lookup=None if lookup is None else lookup.name,
            media=[(None if digest is None else self._named(digest), len(list(run))) for digest, run in runs],
            extras=None if self._redact else _extras(sequence.key_extras),
        )

    def _named(self, digest: bytes) -> str:
        if not self._redact:
            return digest.hex()
        ordinal = self._media.setdefault(digest, len(self._media))
        return ordinal.to_bytes(16, "big").hex()

    # Steps --------------------------------------------------------------------------------------------------------

    def _advance(
        self, advances: BatchAdvance | list[ContextCacheSequenceAdvance], count: int, common: object
    ) -> Fields:
        batch = as_batch_advance(advances, count)
        return {
            "tokens": (self.keep_tokens(batch.token_ids), int(batch.token_ids.size)),
            "counts": batch.counts.tolist(),
            "committed": batch.committed.tolist(),
            "common": None if common is None else _lengths(common, "common_state_lengths"),
        }

    def finalize_prefill_publication(
        self, status: Status | None, request: RequestHandle, advances: Any, common_state_lengths: object = None
    ) -> lines.FinalizePrefill:
        return lines.FinalizePrefill(
            request=self.request_id(request),
            **self._advance(advances, self._size(request), common_state_lengths),
            status=_name(status),
        )

    def finalize_sequence_admission(
        self, status: Status | None, request: RequestHandle, slot: int, advance: ContextCacheSequenceAdvance
    ) -> lines.FinalizeSequence:
        return lines.FinalizeSequence(
            request=self.request_id(request),
            slot=as_index(slot, "slot"),
            **self._advance([advance], 1, None),
            status=_name(status),
        )

    def complete_decode_step(
        self,
        status: Status | None,
        request: RequestHandle,
        advances: Any,
        publishable_completed_slots: Any = (),
        common_state_lengths: object = None,
    ) -> lines.CompleteDecodeStep:
        completed = list(slot_tuple(publishable_completed_slots, "publishable_completed_slots"))
        return lines.CompleteDecodeStep(
            request=self.request_id(request),
            **self._step(status, request, advances, completed, common_state_lengths),
            completed=completed,
            status=_name(status),
        )

    def _step(
        self, status: Status | None, request: RequestHandle, advances: Any, completed: list[int], common: object
    ) -> Fields:
        fields = self._advance(advances, self._size(request), common)
        found = request.request_of(self._core)
        plain = status is Status.OK and not completed and common is None and found is not None and found.plain_steps
        if plain and fields["counts"] == [1] * len(fields["counts"]):
            # Every sequence brought one token, and the rule of a plain step leaves nothing else to say.
            fields.update(counts=None, committed=None)
        return fields

    def prepare_decode_step(
        self, result: PrepareDecodeResult | None, request: RequestHandle, headroom: DecodingKvHeadroom
    ) -> lines.PrepareDecodeStep:
        refusal = None if result is None else result.refusal
        return lines.PrepareDecodeStep(
            request=self.request_id(request),
            headroom=_headroom(headroom),
            status=None if result is None else result.status.name,
            refused=[] if refusal is None else list(refusal.failed_slots),
            too_long=[] if refusal is None else list(refusal.too_long_slots),
            missing=None if refusal is None else refusal.missing.counts,
        )

    # Compaction and hidden rows ---------------------------------------------------------------------------------

    def begin_batch_compaction(
        self,
        status: Status | None,
        request: RequestHandle,
        old_to_new: Any,
        new_batch_size: int,
        device_batch_mapping: DeviceArray,
    ) -> lines.BeginBatchCompaction:
        found = request.request_of(self._core) if status is Status.OK else None
        pending = None if found is None else found.mapping
        return lines.BeginBatchCompaction(
            request=self.request_id(request),
            mapping=_lengths(old_to_new, "old_to_new") if pending is None else pending.mapping.tolist(),
            new_size=as_index(new_batch_size, "new_batch_size"),
            tensor=_tensor(device_batch_mapping),
            status=_name(status),
        )

    def publish_hybrid_mtp_endpoint(
        self,
        status: Status | None,
        request: RequestHandle,
        slot: int,
        resident_length: int,
        base_hidden: DeviceArray,
        boundary_row: int,
    ) -> lines.PublishMtpEndpoint:
        return lines.PublishMtpEndpoint(
            request=self.request_id(request),
            slot=as_index(slot, "slot"),
            length=as_index(resident_length, "resident_length"),
            hidden=_tensor(base_hidden, written=False),
            row=as_index(boundary_row, "boundary_row"),
            status=_name(status),
        )

    def restore_hybrid_mtp_boundary_hidden(
        self, status: Status | None, request: RequestHandle, slot: int, base_hidden: DeviceArray, destination_row: int
    ) -> lines.RestoreMtpBoundary:
        return lines.RestoreMtpBoundary(
            request=self.request_id(request),
            slot=as_index(slot, "slot"),
            hidden=_tensor(base_hidden),
            row=as_index(destination_row, "destination_row"),
            status=_name(status),
        )

    # Calls without arguments of their own ---------------------------------------------------------------------------

    def prepare_prefill(self, status: Status | None, request: RequestHandle) -> lines.PreparePrefill:
        return lines.PreparePrefill(request=self.request_id(request), status=_name(status))

    def enqueue_prefill_captures(self, status: Status | None, request: RequestHandle) -> lines.EnqueuePrefillCaptures:
        return lines.EnqueuePrefillCaptures(request=self.request_id(request), status=_name(status))

    def compact_batch(self, status: Status | None, request: RequestHandle) -> lines.CompactBatch:
        return lines.CompactBatch(request=self.request_id(request), active=self._active, status=_name(status))

    def retract_sequence_admission(self, left: bool | None, request: RequestHandle) -> lines.RetractSequence:
        return lines.RetractSequence(request=self.request_id(request), left=left)

    def finish(self, status: Status | None, request: RequestHandle) -> lines.Finish:
        return lines.Finish(request=self.request_id(request), status=_name(status))

    def shutdown(self, status: Status | None) -> lines.Shutdown:
        return lines.Shutdown(status=_name(status))


def _name(status: Status | None) -> str | None:
    return None if status is None else status.name


def _lengths(values: Any, what: str) -> list[int]:
    """Numbers that were given to a call and are read again now. Raises TypeError where that may give other ones."""
    if not isinstance(values, Sequence | Set | np.ndarray) and not hasattr(values, "__array__"):
        raise TypeError(f"{what} is {type(values).__name__}, which may be read only once")
    lengths: list[int] = as_int32(values, what).tolist()
    return lengths


def _headroom(headroom: DecodingKvHeadroom) -> tuple[int, int]:
    return (headroom.base_extra_tokens, headroom.draft_extra_tokens)


def _tensor(tensor: DeviceArray, *, written: bool = True) -> lines.Tensor:
    flags = getattr(tensor, "flags", None)
    writable = not written or bool(getattr(flags, "writeable", True))
    return lines.Tensor(
        shape=[int(size) for size in tensor.shape],
        dtype=str(tensor.dtype),
        plain=bool(getattr(flags, "c_contiguous", True)) and writable,
    )


def _extras(extras: BlockKeyExtras) -> lines.Extras | None:
    record = lines.Extras(
        media=[
            lines.Span(
                content=span.content_digest.hex(), placement=span.placement_digest.hex(),
                offset=span.offset_within_block, order=span.item_order, modality=span.modality,
            )
            for span in extras.media
        ],
        adapter=None if extras.adapter is None else (extras.adapter.id.hex(), str(extras.adapter.generation)),
        position=_hex(extras.position_digest),
        embedding=_hex(extras.custom_embedding_digest),
        isolation=_hex(extras.isolation_digest),
    )  # fmt: skip
    return None if record == lines.Extras() else record


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


_DECODER: Final = msgspec.json.Decoder(lines.Record)
_ENCODERS: Final[dict[str, Callable[..., lines.CallRecord]]] = {
    "begin_request": Encoder.begin_request,
    "admit_sequence": Encoder.admit_sequence,
    "prepare_prefill": Encoder.prepare_prefill,
    "enqueue_prefill_captures": Encoder.enqueue_prefill_captures,
    "finalize_prefill_publication": Encoder.finalize_prefill_publication,
    "finalize_sequence_admission": Encoder.finalize_sequence_admission,
    "complete_decode_step": Encoder.complete_decode_step,
    "prepare_decode_step": Encoder.prepare_decode_step,
    "retract_sequence_admission": Encoder.retract_sequence_admission,
    "compact_batch": Encoder.compact_batch,
    "begin_batch_compaction": Encoder.begin_batch_compaction,
    "publish_hybrid_mtp_endpoint": Encoder.publish_hybrid_mtp_endpoint,
    "restore_hybrid_mtp_boundary_hidden": Encoder.restore_hybrid_mtp_boundary_hidden,
    "finish": Encoder.finish,
    "shutdown": Encoder.shutdown,
}
