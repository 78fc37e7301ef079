"""The thin facade between a runtime's view of a batch and the coordinator's calls.

A runtime thinks in sampled tokens and finish reasons; the coordinator in advances, completed slots and mappings. The
adapter keeps two arrays per batch (input lengths, generated counts) and translates. It owns no pages and makes no
decision, except one: when a step cannot get its pages, it ends the sequences that the coordinator names, compacts them
out and prepares again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from context_cache.backends.base import DeviceArray
from context_cache.coordinator.arguments import Int32Array, as_index, as_int32
from context_cache.coordinator.coordinator import ContextCacheCoordinator
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.identity import BlockKeyExtras, Digest
from context_cache.coordinator.manager import LookupPolicy
from context_cache.coordinator.spec_common import SpecCommonStateTracker
from context_cache.coordinator.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    BatchAdvance,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    GrowthRefusal,
    ResidentRef,
    Status,
    TokenStateContract,
)

__all__ = [
    "AdmitOutcome",
    "ContextCacheRequest",
    "FinishReason",
    "PreparedStep",
    "RuntimeSequence",
    "SpecCommonStateTracker",
]

Reasons = npt.NDArray[np.uint8]


class FinishReason(enum.IntEnum):
    """Why a sequence ended, as a uint8 code; RUNNING has not."""

    RUNNING = 0
    ENDED = 1
    CANCELLED = 2
    ERROR = 3


class AdmitOutcome(enum.Enum):
    """What a live admission came to. NO_CAPACITY: try again at a later settled point."""

    ADMITTED = "admitted"
    NO_CAPACITY = "no_capacity"
    FAILED = "failed"


def _token_ids(values: Any) -> Int32Array:
    return as_int32(values, "token_ids")


@frozen(eq=False, kw_only=True)
class RuntimeSequence:
    """One sequence as a runtime has it.

    media_readable: False when the bytes of a media item cannot be read on the host, so that they cannot be named.
    wants_audio, wants_hidden_states: outputs that a reused prefix would not produce.
    Any of these, or ``bypass``, keeps the sequence away from cached state.
    """

    token_ids: Int32Array = field(converter=_token_ids)
    resident: ResidentRef
    key_extras: BlockKeyExtras = field(factory=BlockKeyExtras)
    media: Sequence[Digest | None] = ()
    bypass: bool = False
    media_readable: bool = True
    wants_audio: bool = False
    wants_hidden_states: bool = False

    def admission(self) -> ContextCacheSequenceAdmission:
        """The same for the coordinator."""
        bypass = self.bypass or not self.media_readable or self.wants_audio or self.wants_hidden_states
        return ContextCacheSequenceAdmission(
            self.token_ids,
            self.key_extras,
            () if bypass else tuple(self.media),
            self.resident,
            LookupPolicy.BYPASS if bypass else None,
        )


@frozen
class PreparedStep:
    """What came of preparing a step.

    ended:      logical slots, numbered before the step, that could not get their pages and left as errors.
    old_to_new: the mapping of the compaction by which they left, or None.
    refusal:    why, or None.
    prepared:   whether a step is prepared and waits to be completed.
    empty:      nobody is left to decode: finish the request.
    poisoned:   the drain of the compaction failed: the request is quarantined.

    Neither prepared nor empty nor poisoned: an upload is incomplete and the step does not fit; prepare with less
    headroom, or end the request.
    """

    ended: tuple[int, ...] = ()
    old_to_new: tuple[int, ...] | None = None
    refusal: GrowthRefusal | None = None
    prepared: bool = False
    empty: bool = False
    poisoned: bool = False


_PLAIN = PreparedStep(prepared=True)
_OPEN_STEP = frozenset({"decoding", "decoding_frozen"})
_RETRY = frozenset({"decode_retry", "decode_retry_frozen"})


class ContextCacheRequest:
    """One running request of a runtime.

    A speculative batch may bring several tokens per slot and step; where the deployment wants common lengths, they are
    tracked here and reported with each completion.

    compact_runtime: called with the mapping, int32[n], between the upload of a mapping and the compaction of the cache;
                     the runtime compacts its own per-slot state there. The device copy of the mapping is
                     ``mapping_tensor``.
    """

    def __init__(
        self,
        coordinator: ContextCacheCoordinator,
        handle: RequestHandle,
        sequences: Sequence[ContextCacheSequenceAdmission],
        prefill_starts: Sequence[int],
        *,
        mapping_tensor: DeviceArray,
        compact_runtime: Callable[[Int32Array], None] | None = None,
        lookahead: bool = True,
        common: SpecCommonStateTracker | None = None,
    ) -> None:
        self.coordinator, self.handle = coordinator, handle
        self.prefill_starts = list(prefill_starts)
        self.mapping_tensor = mapping_tensor
        self._compact_runtime = compact_runtime
        self._lookahead = lookahead
        self._common = common
        self._inputs = np.array([sequence.token_ids.size for sequence in sequences], np.int32)
        self._generated = np.zeros(self._inputs.size, np.int32)
        self._seated = np.zeros(self._inputs.size, bool)
        self._ones = np.ones(self._inputs.size, np.int32)
        self._before: Int32Array | None = None
        # Sequences that were compacted out by a preparation that then raised: told with the next one.
        self._untold: PreparedStep | None = None

    @classmethod
    def begin(
        cls,
        coordinator: ContextCacheCoordinator,
        admission: ContextCacheBatchAdmission,
        *,
        headroom: DecodingKvHeadroom,
        mapping_tensor: DeviceArray,
        compact_runtime: Callable[[Int32Array], None] | None = None,
    ) -> tuple[AdmitOutcome, ContextCacheRequest | None]:
        """Admit founders. NO_CAPACITY: nothing was taken; FAILED: the coordinator is poisoned."""
        result = coordinator.begin_request(admission, headroom, coordinator.stream)
        if result.admission is None:
            outcome = AdmitOutcome.NO_CAPACITY if result.insufficient_capacity else AdmitOutcome.FAILED
            return outcome, None
        lookahead = admission.token_state_contract is TokenStateContract.COMMITTED_PLUS_LOOKAHEAD
        profile, common = coordinator.profile, None
        if admission.speculative_request and profile.paged_spec and not profile.has_recurrent:
            common = SpecCommonStateTracker([sequence.token_ids.size for sequence in admission.sequences])
        return AdmitOutcome.ADMITTED, cls(
            coordinator, result.admission.request, admission.sequences, result.admission.prefill_starts,
            mapping_tensor=mapping_tensor, compact_runtime=compact_runtime, lookahead=lookahead, common=common,
        )  # fmt: skip

    @property
    def batch_size(self) -> int:
        """Number of sequences, joiners included."""
        return int(self._inputs.size)

    @property
    def lengths(self) -> Int32Array:
        """int32[n]: input + generated tokens of each sequence."""
        return self._inputs + self._generated

    @property
    def common_lengths(self) -> Int32Array | None:
        """int32[n]: common lengths that the next completion reports; None where the deployment keeps none."""
        return None if self._common is None else self._common.lengths

    def prepare_prefill(self) -> None:
        """Bind the founders' rows. Raises what the coordinator raises."""
        self.coordinator.prepare_prefill(self.handle)

    def complete_prefill(self, sampled: Int32Array | Sequence[int] = ()) -> None:
        """The founders' prefill has ended: one sampled token per slot, or none when fully committed."""
        tokens = as_int32(sampled, "sampled")
        expected = self.batch_size if self._lookahead else 0
        if tokens.size != expected:
            raise ContractViolation(f"{tokens.size} tokens were sampled for {self.batch_size} slots; give {expected}")
        counts = self._ones if self._lookahead else np.zeros(self.batch_size, np.int32)
        try:
            advance = BatchAdvance(tokens, counts, self._inputs)
            if self._common is None:
                self.coordinator.finalize_prefill_publication(self.handle, advance)
            else:
                self.coordinator.finalize_prefill_publication(self.handle, advance, self._common.lengths)
        finally:
            # Also when publishing raised: the prefill has ended all the same.
            if self.handle.state != "prefilling":
                self._generated += counts
                self._seated[:] = True

    def admit(self, sequence: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom) -> AdmitOutcome:
        """Let a sequence join; on ADMITTED it is the last slot, and its prefill starts at ``prefill_starts[-1]``."""
        self._refuse_open_step("admit a sequence")
        result = self.coordinator.admit_sequence(self.handle, sequence, headroom)
        if result.status is not Status.OK:
            return AdmitOutcome.NO_CAPACITY if result.insufficient_capacity else AdmitOutcome.FAILED
        self.prefill_starts.append(result.prefill_start)
        self._inputs = np.append(self._inputs, np.int32(sequence.token_ids.size))
        self._generated = np.append(self._generated, np.int32(0))
        self._seated = np.append(self._seated, False)
        self._ones = np.ones(self._inputs.size, np.int32)
        return AdmitOutcome.ADMITTED

    def complete_admission(self, slot: int, sampled: int) -> bool:
        """A joiner's prefill has ended with one sampled token. False: poisoned, the slot holds from now on."""
        slot = as_index(slot, "slot")
        if not 0 <= slot < self.batch_size:
            raise ContractViolation(f"slot {slot} is outside 0..{self.batch_size - 1}", slot=slot)
        accepted = (as_index(sampled, "sampled"),) if self._lookahead else ()
        advance = ContextCacheSequenceAdvance(accepted, int(self._inputs[slot]))
        status: Status | None = None
        waiting = not self._seated[slot]
        try:
            status = self.coordinator.finalize_sequence_admission(self.handle, slot, advance)
        finally:
            # Also when publishing raised: the joiner is seated all the same.
            if waiting and self.handle.valid and self.coordinator.sequence(self.handle, slot).state == "seated":
                self._generated[slot] += len(accepted)
                self._seated[slot] = True
        return status is Status.OK

    def retract(self) -> bool:
        """Undo the last admission before its slot joined the runtime's batch."""
        if not self.coordinator.retract_sequence_admission(self.handle):
            return False
        self.prefill_starts.pop()
        self._inputs, self._generated = self._inputs[:-1], self._generated[:-1]
        self._seated, self._ones = self._seated[:-1], self._ones[:-1]
        return True

    def prepare_decode_step(self, headroom: DecodingKvHeadroom) -> PreparedStep:
        """Prepare one step for every sequence; those that cannot get their pages are ended and compacted out.

        Raises ContractViolation when a step is prepared already (after a DeviceError it may be called again).
        """
        self._refuse_open_step("prepare another step")
        result = self.coordinator.prepare_decode_step(self.handle, headroom)
        if result.refusal is None:
            self._before = self._generated
            untold, self._untold = self._untold, None
            return _PLAIN if untold is None else untold
        if self.handle.phase == "finishing":
            return PreparedStep(result.refusal.failed_slots, None, result.refusal, empty=True)
        if self.handle.state in _RETRY:
            return PreparedStep(refusal=result.refusal)
        return self._without(result.refusal, headroom)

    def _without(self, refusal: GrowthRefusal, headroom: DecodingKvHeadroom) -> PreparedStep:
        """Compact the named slots out and prepare for the others, which fit together."""
        failed = refusal.failed_slots
        keep = np.ones(self.batch_size, bool)
        keep[list(failed)] = False
        mapping = self.compact(keep)
        if mapping is None:
            return PreparedStep(failed, None, refusal, poisoned=True)
        old_to_new = tuple(mapping.tolist())
        if not keep.any():
            return PreparedStep(failed, old_to_new, refusal, empty=True)
        self._untold = PreparedStep(failed, old_to_new, refusal, prepared=True)
        again = self.coordinator.prepare_decode_step(self.handle, headroom)
        if again.refusal is not None:
            raise ContractViolation(
                "the slots that were not named did not fit together; the pools changed during the call"
            )
        self._before = self._generated
        told, self._untold = self._untold, None
        return told

    def complete_decode_step(
        self,
        token_ids: Int32Array,
        counts: Int32Array | None = None,
        reasons: Reasons | None = None,
        *,
        publishable: Sequence[int] | None = None,
    ) -> None:
        """The prepared step has ended.

        token_ids: int32[k], slot after slot. counts: int32[n], tokens per slot (several only in a speculative batch);
        None: one each. reasons: uint8[n]
        FinishReason codes; None: all are running. A slot without a token must have ended as cancelled or error, or
        hold as terminal or unfinalised. Slots that ended normally are published; ``publishable`` overrides which.

        Raises ContractViolation when no step is prepared, or the batch has changed since.
        """
        if self._before is None:
            raise ContractViolation("no decode step is prepared; call prepare_decode_step first")
        if self._before.size != self._inputs.size:
            raise ContractViolation("the batch changed between preparing and completing the step")
        if counts is None and reasons is None and publishable is None and self._common is None:
            committed = self._inputs + self._generated
            if not self._lookahead:
                committed += 1
            self._complete(BatchAdvance(token_ids, self._ones, committed), (), self._generated + 1)
            return
        taken = self._ones if counts is None else as_int32(counts, "counts")
        ended = np.zeros(self.batch_size, np.uint8) if reasons is None else np.asarray(reasons)
        if ended.dtype.kind not in "iu":
            raise ContractViolation(f"reasons must be FinishReason codes, one integer per slot, got {ended.dtype}")
        if taken.shape != (self.batch_size,) or ended.shape != (self.batch_size,):
            raise ContractViolation(f"counts and reasons must have one entry for each of {self.batch_size} slots")
        silent = ((taken == 0) & (ended == FinishReason.ENDED) & self._seated).nonzero()[0]
        if publishable is None and silent.size:
            raise ContractViolation(
                f"slot {int(silent[0])} ended normally without a token; it must be cancelled or error"
            )
        after = (self._generated + taken).astype(np.int32)
        committed = self._inputs + after - (1 if self._lookahead else 0)
        committed = np.where(taken > 0, committed, HOLD_COMMITTED_STATE_LENGTH).astype(np.int32)
        if publishable is None:
            publishable = ((ended == FinishReason.ENDED) & (taken > 0)).nonzero()[0].tolist()
        self._complete(BatchAdvance(token_ids, taken, committed), publishable, after)

    def _complete(self, advance: BatchAdvance, publishable: Sequence[int], after: Int32Array) -> None:
        try:
            if self._common is None:
                self.coordinator.complete_decode_step(self.handle, advance, publishable)
            else:
                # A slot that holds keeps its common length, and says so with the hold mark.
                common = np.where(advance.counts > 0, self._common.lengths, np.int32(HOLD_COMMITTED_STATE_LENGTH))
                self.coordinator.complete_decode_step(self.handle, advance, publishable, common)
        finally:
            # Also when publishing raised: the step has ended all the same. A refusal leaves it open.
            if self.handle.state not in _OPEN_STEP:
                if self._common is not None:
                    self._common.record(advance.counts)
                self._generated = after
                self._before = None

    def compact(self, keep: npt.NDArray[np.bool_]) -> Int32Array | None:
        """Retire the slots that are not kept; the mapping, int32[n], or None when the drain failed (quarantined)."""
        self._refuse_open_step("compact the batch")
        keep = np.asarray(keep)
        if keep.dtype != np.bool_ or keep.shape != (self.batch_size,):
            raise ContractViolation(f"keep must have one bool for each of {self.batch_size} slots")
        mapping = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
        survivors = int(keep.sum())
        self.coordinator.begin_batch_compaction(self.handle, mapping, survivors, self.mapping_tensor)
        if self._compact_runtime is not None:
            self._compact_runtime(mapping)
        if self.coordinator.compact_batch(self.handle) is not Status.OK:
            return None
        if self._common is not None:
            self._common.compact(mapping)
        self.prefill_starts = [start for start, kept in zip(self.prefill_starts, keep, strict=True) if kept]
        self._inputs, self._generated, self._seated = self._inputs[keep], self._generated[keep], self._seated[keep]
        self._ones = np.ones(survivors, np.int32)
        return mapping

    def finish(self) -> Status:
        """End the request. Raises ContractViolation between preparing and completing a step."""
        self._refuse_open_step("finish")
        return self.coordinator.finish(self.handle)

    def _refuse_open_step(self, what: str) -> None:
        if self._before is not None:
            raise ContractViolation(f"a decode step is prepared and not completed; complete it before you {what}")
