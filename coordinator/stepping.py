"""Public calls of a running request: its prefill, its decode steps, its compactions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from context_cache.backends.base import DeviceArray
from context_cache.coordinator.advances import (
    as_batch_advance,
    plan_decode_step,
    plan_full_input,
    plan_plain_step,
)
from context_cache.coordinator.arguments import Int32Array, as_index, expect
from context_cache.coordinator.calls.admission import (
    PrepareCall,
    check_headroom,
)
from context_cache.coordinator.calls.captures import (
    NO_CAPTURES,
    EnqueueCapturesCall,
    MtpCall,
    call_with,
    check_mtp_length,
    exact_digest,
    plan_captures,
    plan_restores,
)
from context_cache.coordinator.calls.compaction import CompactionCall, check_mapping, check_tensor
from context_cache.coordinator.calls.decode import DecodeCall, catch_up, plan_growth
from context_cache.coordinator.calls.progress import CompletionCall
from context_cache.coordinator.core import PendingMapping
from context_cache.coordinator.entry import public_call
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.guarded import Guarded
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.types import (
    BatchAdvance,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    PrepareDecodeResult,
    Status,
    slot_tuple,
)
from context_cache.machines import Ending

__all__ = ["StepCalls"]

_PREPARED = PrepareDecodeResult(Status.OK)
_NO_SLOTS: tuple[int, ...] = ()


class StepCalls(Guarded):
    """Everything between admission and the end of life."""

    # Prefill.

    @public_call
    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind the rows and enqueue them with the reuse lengths; the request becomes the length view.

        Raises ContractViolation unless the request is admitted and the token is free; DeviceError: the request is
        broken, only finish or drop remain.
        """
        core, found = self._core, self._request(request)
        self._check_token(found)
        self._require(found, "prepare_prefill")
        restores = plan_restores(core, found)
        core.fire(found, "prepare_prefill", PrepareCall(core, found, restores))
        core.counters.hybrid_restores += len(restores.slots)
        return Status.OK

    @public_call
    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Enqueue copies of the state at the end of the prompt, behind the prefill, for checkpoints to publish later.

        Only plain requests on checkpoint deployments have any; for all others nothing happens. A sequence for which no
        snapshot slot is free is skipped and counted. DeviceError: the request is broken; its reserved slots are held
        until its end has drained.
        """
        core, found = self._core, self._request(request)
        self._require(found, "enqueue_prefill_captures")
        captures = NO_CAPTURES
        if found.policy.captures:
            if any(core.ledger.staged[slot] is not None for slot in found.order.tolist()):
                raise ContractViolation(f"the captures of request {found.id} are enqueued already; ask once")
            lengths = [(slot, int(core.ledger.token_count[slot])) for slot in found.order.tolist()]
            captures = plan_captures(core, found, lengths, decode_end=False)
        call = call_with(
            core, captures, lambda: EnqueueCapturesCall(core, found, "enqueue_prefill_captures", captures)
        )
        core.fire(found, "enqueue_prefill_captures", call)
        return Status.OK

    @public_call
    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: BatchAdvance | Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | Int32Array | None = None,
    ) -> Status:
        """The prefill of every founder has completed on the device (the caller has synchronised).

        Lookahead contract: one sampled token per sequence, committed = input length. Fully committed: no token.
        Publishes the full blocks of every sequence. Raises ContractViolation, nothing changed, and may be called again
        corrected; what publishing raised is raised after all other slots were published, and the request is settled.
        """
        core, found = self._core, self._request(request)
        self._require(found, "finalize_prefill")
        batch = as_batch_advance(advances, len(found.slots))
        plan = plan_full_input(core, found, batch, np.arange(len(found.slots)), found.lookahead)
        plan.common = found.policy.prefill_common(common_state_lengths, plan.committed)
        # A policy that freezes the prompt's endpoint offers it only after the first verification.
        offered = () if found.policy.frozen else found.slots
        call = CompletionCall(core, found, "finalize_prefill", plan, prefill=offered, waits=False)
        core.fire(found, "finalize_prefill", call)
        return Status.OK

    @public_call
    def publish_hybrid_mtp_endpoint(
        self, request: RequestHandle, slot: int, resident_length: int, base_hidden: DeviceArray, boundary_row: int
    ) -> Status:
        """Publish a checkpoint of a hybrid + MTP sequence at a boundary inside its prefill: capture, drain, publish.

        resident_length: tokens whose state base and draft have, at most the token list. base_hidden: float16
        ``[rows, hidden_dim]`` or ``[slots, rows, hidden_dim]``; boundary_row: the row of the last of those tokens.

        Returns OK, also when there is nothing new to keep or no snapshot slot is free; POISONED when the drain failed.
        Raises ContractViolation, nothing enqueued; DeviceError: broken, slots held until the end has drained; what
        publishing raised: still prefilling, slots given back.
        """
        core, found = self._core, self._request(request)
        self._require(found, "publish_mtp_endpoint")
        resident = self._mtp_resident(found, slot)
        length, row = as_index(resident_length, "resident_length"), as_index(boundary_row, "boundary_row")
        ledger = core.ledger
        captures = NO_CAPTURES
        if not ledger.bypass[resident] and length > max(0, int(ledger.published_exact[resident])):
            check_mtp_length(core, found, resident, length, row)
            assert core.snapshots is not None
            core.snapshots.check_hidden(base_hidden, row, slot)
            # The digest first: it may fail, and then the hit is still there.
            exact_digest(core, resident, length)
            # The hit has been read by the prefill behind us; its pins make room for what is captured now.
            core.manager.release_restored_snapshots(ledger.lease(resident))
            captures = plan_captures(core, found, [(resident, length)], decode_end=False)
        call = call_with(
            core,
            captures,
            lambda: MtpCall(core, found, "publish_mtp_endpoint", captures, slot, base_hidden, row),
        )
        return Status.OK if core.fire(found, "publish_mtp_endpoint", call) else Status.POISONED

    @public_call
    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden: DeviceArray, destination_row: int
    ) -> Status:
        """Enqueue the hit's boundary hidden row into ``base_hidden`` at ``destination_row``. No drain.

        Possible until the sequence publishes or is finalised. Raises ContractViolation when the sequence holds no hit
        any more, or the tensor or row does not fit; DeviceError: nothing changed, ask again.
        """
        core, found = self._core, self._request(request)
        self._require(found, "restore_mtp_boundary")
        resident = self._mtp_resident(found, slot)
        row = as_index(destination_row, "destination_row")
        if core.ledger.lease(resident).recurrent_slot is None:
            raise ContractViolation(
                f"slot {slot} holds no restored snapshot; restore before publishing and before finalising",
                slot=slot,
            )
        assert core.snapshots is not None
        core.snapshots.check_hidden(base_hidden, row, slot, written=True)
        call = MtpCall(core, found, "restore_mtp_boundary", NO_CAPTURES, slot, base_hidden, row)
        core.fire(found, "restore_mtp_boundary", call)
        return Status.OK

    # Decode steps.

    @public_call
    def prepare_decode_step(self, request: RequestHandle, headroom: DecodingKvHeadroom) -> PrepareDecodeResult:
        """Give every seated sequence the pages for ``headroom`` more positions and enqueue the rows that grew.

        Returns OK; or REQUEST_FAILED with the slots that do not fit, nothing changed: retire them by compaction and
        try again (a request whose only sequence does not fit is finishing). A step that needs no page makes no device
        call. Raises ContractViolation in a state that cannot decode or while another request holds the token;
        DeviceError: call again, or finish.
        """
        core, found = self._core, self._request(request)
        if core.token.request is not found:
            self._check_token(found)
        if not core.request_runner.declares(found._state, "prepare_decode_step"):
            self._require(found, "prepare_decode_step")
        if type(headroom) is not DecodingKvHeadroom:
            expect(headroom, DecodingKvHeadroom, "headroom")
        if headroom.base_extra_tokens <= 0 or headroom.draft_extra_tokens != 0 or found.paired:
            check_headroom(headroom, found.paired)
        if found._state in ("decode_retry", "decode_retry_frozen"):
            catch_up(core, found)
        growth, refusal = plan_growth(core, found, headroom)
        core.request_runner.fire(found, "prepare_decode_step", DecodeCall(core, found, growth, refusal))
        if refusal is None:
            return _PREPARED
        core.counters.refused_growth += 1
        return PrepareDecodeResult(Status.REQUEST_FAILED, refusal)

    @public_call
    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: BatchAdvance | Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int] | Int32Array = _NO_SLOTS,
        common_state_lengths: Sequence[int] | Int32Array | None = None,
    ) -> Status:
        """The prepared step has completed on the device (the caller has synchronised).

        One advance per logical slot: one token and committed + 1 (fully committed: k tokens and committed + k), or
        HOLD. ``publishable_completed_slots``: sequences that ended normally; they are published and hold from now on.
        Raises ContractViolation, nothing changed; what publishing raised is raised after the other slots.
        """
        core, found = self._core, self._request(request)
        if found._state != "decoding" and found._state != "decoding_frozen":
            self._require(found, "complete_decode_step")
        completed: tuple[int, ...] = ()
        if publishable_completed_slots is not _NO_SLOTS:
            completed = slot_tuple(publishable_completed_slots, "publishable_completed_slots")
        plan = plan_plain_step(core, found, advances, completed) if common_state_lengths is None else None
        if plan is None:
            batch = as_batch_advance(advances, len(found.slots))
            plan = plan_decode_step(core, found, batch, completed, common_state_lengths)
        captures = NO_CAPTURES
        if completed and found.policy.captures:
            captures = plan_captures(core, found, plan.lengths_after(core, found, completed), decode_end=True)
        awaited = found.slots if found._state == "decoding_frozen" else ()
        waits = found.joiners > 0
        if captures is NO_CAPTURES:
            call = CompletionCall(
                core, found, "complete_decode_step", plan, prefill=awaited, ended=completed, waits=waits
            )
        else:
            call = call_with(
                core,
                captures,
                lambda: CompletionCall(
                    core, found, "complete_decode_step", plan, ended=completed, waits=waits, captures=captures
                ),
            )
        drained = core.request_runner.fire(found, "complete_decode_step", call) is Ending.DONE
        return Status.OK if drained else Status.POISONED

    # Compaction.

    @public_call
    def begin_batch_compaction(
        self,
        request: RequestHandle,
        old_to_new: Sequence[int] | Int32Array,
        new_batch_size: int,
        device_batch_mapping: DeviceArray,
    ) -> Status:
        """Enqueue a compaction mapping for the runtime's own per-slot state.

        old_to_new: int32[n], -1 retires, the survivors are 0, 1, 2, ... in order. device_batch_mapping: the caller's
        int32 device tensor of at least n entries. Raises ContractViolation, nothing enqueued; DeviceError: broken.
        """
        core, found = self._core, self._request(request)
        self._check_token(found)
        self._require(found, "begin_batch_compaction")
        size = len(found.slots)
        mapping = check_mapping(old_to_new, new_batch_size, size)
        pending = PendingMapping(mapping, check_tensor(device_batch_mapping, size), int(new_batch_size))
        call = CompactionCall(core, found, "begin_batch_compaction", pending)
        found.mapping = pending
        return Status.OK if core.fire(found, "begin_batch_compaction", call) else Status.POISONED

    @public_call
    def compact_batch(self, request: RequestHandle) -> Status:
        """Clear the retired rows, compact the lengths, drain, release the retired leases.

        Returns OK, or POISONED when the drain failed: the whole request is quarantined, survivors included. Raises
        ContractViolation when no mapping is uploaded or the cache's active batch is not the request's; DeviceError:
        broken.
        """
        core, found = self._core, self._request(request)
        self._require(found, "compact_batch")
        pending = found.mapping
        assert pending is not None, "compacting is entered with a mapping only"
        for cache in (core.cache, core.draft_cache if found.paired else None):
            if cache is not None and cache.active_batch_size != len(found.slots):
                raise ContractViolation(
                    f"the cache's active batch is {cache.active_batch_size}, the request has {len(found.slots)} "
                    "sequences; set the active batch size before compacting"
                )
        if not core.fire(found, "compact_batch", CompactionCall(core, found, "compact_batch", pending)):
            return Status.POISONED
        found.mapping = None
        return Status.OK
