"""Public calls that let sequences in: founders, and joiners of a running batch."""

from __future__ import annotations

import numpy as np

from context_cache.backends.base import Stream
from context_cache.coordinator.advances import (
    as_batch_advance,
    plan_full_input,
)
from context_cache.coordinator.arguments import expect
from context_cache.coordinator.calls.admission import (
    Acquired,
    BeginCall,
    JoinCall,
    acquire_sequence,
    check_headroom,
    check_input,
    check_resident,
    effective_policy,
    give_up,
)
from context_cache.coordinator.calls.progress import CompletionCall
from context_cache.coordinator.core import Request
from context_cache.coordinator.entry import public_call
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.guarded import Guarded
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.ledger import BOUND
from context_cache.coordinator.policies import PublicationPolicy, select_policy
from context_cache.coordinator.types import (
    AdmissionResult,
    AdmitSequenceResult,
    BeginRequestResult,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    Status,
)

__all__ = ["AdmissionCalls"]


class AdmissionCalls(Guarded):
    """begin_request, and the life of a joiner until it is finalised or retracted."""

    def supports_live_sequence_admission(self) -> bool:
        """Whether ``admit_sequence`` is possible: not speculative, no checkpoint reuse, attention present."""
        profile = self._core.profile
        return profile.has_attention and not profile.speculative and not profile.uses_checkpoints

    @public_call
    def begin_request(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom, stream: Stream
    ) -> BeginRequestResult:
        """Lease pages for the founders of a request: all of them, or none. No device call.

        Returns OK with a handle and the prefill start of each sequence, REQUEST_FAILED with ``insufficient_capacity``,
        or POISONED. Raises ContractViolation for another stream than the coordinator's, a closed coordinator, a
        speculative request, no or too many sequences, bad resident slots, or an input that does not fit a row.
        """
        core = self._core
        if stream is not core.stream:
            raise ContractViolation(
                f"stream {getattr(stream, 'name', stream)!r} is not the coordinator's {core.stream.name!r}; "
                "one coordinator uses one stream"
            )
        expect(admission, ContextCacheBatchAdmission, "admission")
        expect(headroom, DecodingKvHeadroom, "headroom")
        publication, paired = select_policy(core.profile, admission)
        if core.poisoned:
            return BeginRequestResult(Status.POISONED)
        if core.closed:
            raise ContractViolation("the coordinator is closed; build a new one to admit requests")
        check_headroom(headroom, paired)
        acquired = self._acquire_all(admission, headroom, publication, paired)
        if acquired is None:
            core.counters.refused_admissions += 1
            return BeginRequestResult(Status.REQUEST_FAILED, insufficient_capacity=True)
        request: Request | None = None
        try:
            request = Request(core.new_request_id(), admission, publication, paired)
            starts = tuple(item.result.plan.reuse_token_length for item in acquired)
            core.fire(request, "begin_request", BeginCall(core, request, "begin_request", acquired))
            handle = RequestHandle(core, self._entry, request)
            return BeginRequestResult(Status.OK, AdmissionResult(handle, starts))
        except BaseException:
            give_up(core, request, acquired)
            raise

    @public_call
    def admit_sequence(
        self, request: RequestHandle, admission: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom
    ) -> AdmitSequenceResult:
        """Let one sequence join a running batch: lease its pages and bind its row. It becomes the last logical slot.

        Accepted when the request is settled or seating. Returns OK with the prefill start; REQUEST_FAILED with
        ``insufficient_capacity`` and nothing changed; POISONED. Raises ContractViolation in any other state, when the
        batch is full, or for a bad resident slot or input; DeviceError when binding failed: the joiner has left again
        and the request is as before (or quarantined, if even that drain failed).
        """
        core, found = self._core, self._request(request)
        self._check_token(found)
        expect(admission, ContextCacheSequenceAdmission, "admission")
        expect(headroom, DecodingKvHeadroom, "headroom")
        self._require(found, "admit_sequence")
        if not self.supports_live_sequence_admission():
            raise ContractViolation("this deployment cannot admit sequences into a running batch")
        if core.poisoned:
            return AdmitSequenceResult(Status.POISONED)
        if len(found.slots) >= core.deployment.max_batch:
            raise ContractViolation(f"the batch of request {found.id} is full with {len(found.slots)} sequences")
        check_headroom(headroom, found.paired)
        check_resident(core, admission.resident, set())
        check_input(core, admission, headroom)
        policy = effective_policy(found.batch, admission)
        result = acquire_sequence(core, admission, policy, headroom, found.policy, found.paired)
        if result.lease is None:
            core.counters.refused_admissions += 1
            return AdmitSequenceResult(Status.REQUEST_FAILED, insufficient_capacity=True)
        acquired = [Acquired(admission, result, result.lease, policy)]
        try:
            call = JoinCall(core, found, "admit_sequence", acquired)
        except BaseException:
            give_up(core, None, acquired)
            raise
        # From here on the row's way out returns the lease, whatever happens.
        core.fire(found, "admit_sequence", call)
        call.count()
        return AdmitSequenceResult(Status.OK, prefill_start=result.plan.reuse_token_length)

    @public_call
    def finalize_sequence_admission(
        self, request: RequestHandle, slot: int, advance: ContextCacheSequenceAdvance
    ) -> Status:
        """A joiner's prefill has completed: the whole input is committed. Publishes its prefix.

        Lookahead contract: one sampled token; fully committed: none.

        Returns OK, or POISONED with the ledger untouched (the joiner then holds in later steps). Raises
        ContractViolation when the slot is not an unfinalised joiner or the advance is another one.
        """
        core, found = self._core, self._request(request)
        if found.state not in ("settled", "seating"):
            self._require(found, "finalize_sequence_admission")
        self._check_slot(found, slot)
        if core.poisoned:
            return Status.POISONED
        if core.ledger.state[found.order[slot]] != BOUND:
            raise ContractViolation(f"slot {slot} of request {found.id} is no unfinalised joiner", slot=slot)
        batch = as_batch_advance([advance], 1)
        plan = plan_full_input(core, found, batch, np.array([slot], np.int64), found.lookahead)
        call = CompletionCall(
            core, found, "finalize_sequence_admission", plan,
            prefill=(slot,), waits=found.joiners > 1, touched=(slot,),
        )  # fmt: skip
        core.fire(found, "finalize_sequence_admission", call)
        return Status.OK

    @public_call
    def retract_sequence_admission(self, request: RequestHandle) -> bool:
        """Undo the admission of the last sequence, if it is an unfinalised joiner: drain, clear its row, release.

        True when it has left. False, and nothing changed, when the last sequence is anything else or the only one, or
        the request is in another state. False with the coordinator poisoned when the drain failed (the request is
        quarantined) or the clearing upload raised (the joiner has left). Raises only for an invalid handle.
        """
        core, found = self._core, self._request(request)
        if not core.request_runner.declares(found.state, "retract_sequence_admission"):
            return False
        # A joiner whose founders have all left is the request; it leaves by compaction, finish or drop.
        if len(found.slots) == 1 or core.ledger.state[found.order[-1]] != BOUND:
            return False
        call = JoinCall(core, found, "retract_sequence_admission", [])
        if not core.fire(found, "retract_sequence_admission", call) or call.clearing_error is not None:
            return False
        core.counters.retracted_sequences += 1
        return True

    def _acquire_all(
        self,
        admission: ContextCacheBatchAdmission,
        headroom: DecodingKvHeadroom,
        publication: PublicationPolicy,
        paired: bool,
    ) -> list[Acquired] | None:
        """Acquire every founder, or give everything back. None: refused for capacity."""
        core = self._core
        limit = core.deployment.max_batch
        if not 1 <= len(admission.sequences) <= limit:
            raise ContractViolation(f"a request has 1 to {limit} sequences, got {len(admission.sequences)}")
        taken: set[int] = set()
        for sequence in admission.sequences:
            check_resident(core, sequence.resident, taken)
            taken.add(sequence.resident.slot)
            check_input(core, sequence, headroom)
        acquired: list[Acquired] = []
        complete = False
        try:
            for sequence in admission.sequences:
                policy = effective_policy(admission, sequence)
                result = acquire_sequence(core, sequence, policy, headroom, publication, paired)
                if result.lease is None:
                    return None
                acquired.append(Acquired(sequence, result, result.lease, policy))
            complete = True
            return acquired
        finally:
            if not complete:
                for item in acquired:
                    item.lease.release()
