"""The public face: every call that a runtime makes.

Each method does the same four things: it enters (one caller at a time, orphans reaped), checks the handle, the token
and everything else that can be refused, plans a call object, and fires one event of the request's machine. What the
event does is a row of ``machines.request``; what may be wrong with the arguments is here.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import numpy as np

from context_cache.backends.base import Backend, DeviceArray, Stream, Synchronizer
from context_cache.coordinator.advances import (
    as_batch_advance,
    plan_decode_step,
    plan_full_input,
    plan_plain_step,
    refuse_common_lengths,
)
from context_cache.coordinator.arguments import Int32Array, expect
from context_cache.coordinator.calls.admission import (
    Acquired,
    BeginCall,
    JoinCall,
    PrepareCall,
    acquire_sequence,
    check_headroom,
    check_input,
    check_resident,
    effective_policy,
    give_up,
)
from context_cache.coordinator.calls.compaction import CompactionCall, check_mapping, check_tensor
from context_cache.coordinator.calls.decode import DecodeCall, plan_growth
from context_cache.coordinator.calls.ending import EndingCall
from context_cache.coordinator.calls.progress import CompletionCall
from context_cache.coordinator.config import (
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    validate_deployment,
    validate_pool,
)
from context_cache.coordinator.core import ENDED_STATES, Core, PendingMapping, Request
from context_cache.coordinator.device_state import ContextCachePhysicalResources
from context_cache.coordinator.entry import Entry
from context_cache.coordinator.errors import ContextCacheError, ContractViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.ledger import BOUND
from context_cache.coordinator.manager import ContextCacheManager, ResourceDemand, ResourceType
from context_cache.coordinator.metrics import CoordinatorMetrics
from context_cache.coordinator.types import (
    AdmissionResult,
    AdmitSequenceResult,
    BatchAdvance,
    BeginRequestResult,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    PrepareDecodeResult,
    RequestView,
    SequenceState,
    Status,
    slot_tuple,
)
from context_cache.machines import Recorder

__all__ = ["ContextCacheCoordinator", "OwnersLeft"]

_log = logging.getLogger("context_cache.coordinator")

_PREPARED = PrepareDecodeResult(Status.OK)
_NO_SLOTS: tuple[int, ...] = ()
_CALLS = {"finalize_prefill": "finalize_prefill_publication", "drop": "close"}
"""Events whose names are shorter than the call that fires them."""
_KEPT_ALIVE: list[Core] = []
"""Cores whose coordinator was lost while they owned requests: the device may still use their memory."""


class OwnersLeft(ContextCacheError):
    """The coordinator could not be closed: requests are live, or the device could not be proven quiet."""


def _lost(core: Core) -> None:
    if core.requests:
        _KEPT_ALIVE.append(core)
        _log.error(
            "a coordinator was lost while it owned %d request(s); their memory is kept, close coordinators explicitly",
            len(core.requests),
        )


class ContextCacheCoordinator:
    """Owns the life of requests in a paged context cache. See ``docs/architecture.md`` and the README's example.

    config:        must be enabled.
    deployment:    validated here.
    resources:     borrowed: K/V pools, length vector and page table; they must outlive the coordinator.
    backend, stream: the device, and the one stream on which all its work is enqueued.
    synchronizer:  ``(stream, timeout_seconds) -> bool``; default: ``backend.synchronize``.
    recorder:      takes every recorded step.
    identity_key:  key of the block hashes, at least 16 bytes; default: random.
    manager:       a prepared manager instead of a new one (for tests, or for ``touch_on_hit``); its base pool and page
                   size must be the deployment's.

    Raises ContractViolation when the configuration is not enabled, the deployment breaks a rule, or the resources do
    not agree with it. A context manager: leaving it closes the coordinator.
    """

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        resources: ContextCachePhysicalResources,
        *,
        backend: Backend,
        stream: Stream,
        synchronizer: Synchronizer | None = None,
        recorder: Recorder | None = None,
        identity_key: bytes | None = None,
        manager: ContextCacheManager | None = None,
    ) -> None:
        expect(config, ContextCacheConfig, "config")
        expect(deployment, DeploymentConfig, "deployment")
        expect(resources, ContextCachePhysicalResources, "resources")
        if backend is None or stream is None:
            raise ContractViolation("a coordinator needs a backend and one of its streams")
        if config.enabled is not True:
            raise ContractViolation("the context cache is not enabled; set ContextCacheConfig(enabled=True)")
        profile = validate_deployment(deployment)
        _check_resources(deployment, resources)
        pages = resources.base_cache.num_pages
        if manager is None:
            manager = ContextCacheManager(
                ResourceDemand(base_kv_pages=pages), deployment.page_size, max_records=config.max_records
            )
        elif config.max_records not in (None, manager.max_records):
            raise ContractViolation(
                f"config.max_records is {config.max_records}, the given manager keeps {manager.max_records}; "
                "set it in one place"
            )
        elif manager.page_size != deployment.page_size or manager.pools.capacity(ResourceType.BASE_KV_PAGE) != pages:
            raise ContractViolation(
                f"the manager has {manager.pools.capacity(ResourceType.BASE_KV_PAGE)} pages of {manager.page_size} "
                f"tokens, the deployment {pages} of {deployment.page_size}; build it with the deployment's numbers"
            )
        self._core = Core(
            config,
            deployment,
            profile,
            resources,
            manager,
            backend,
            stream,
            synchronizer or backend.synchronize,
            recorder,
            identity_key,
        )
        self._entry = Entry(self._core)
        self._finalizer = weakref.finalize(self, _lost, self._core)
        self._finalizer.atexit = False

    # What can be read at any time.

    @property
    def profile(self) -> ContextCacheDeploymentProfile:
        """What the deployment was validated as."""
        return self._core.profile

    @property
    def manager(self) -> ContextCacheManager:
        """The host bookkeeping, read only: changing it behind the coordinator breaks its invariants."""
        return self._core.manager

    @property
    def stream(self) -> Stream:
        """The stream given at construction."""
        return self._core.stream

    @property
    def state(self) -> str:
        """``serving``, ``poisoned`` or ``closed``."""
        return self._core.service.state

    @property
    def execution_holder(self) -> str | None:
        """Id of the request between a prepare call and its completion."""
        holder = self._core.token.request
        return None if holder is None else holder.id

    @property
    def length_view(self) -> str | None:
        """Id of the request whose batch the device length vector describes."""
        owner = self._core.view.request
        return None if owner is None else owner.id

    @property
    def length_view_partial(self) -> bool:
        """Whether a joiner's entry in the length vector may be only its reuse length."""
        return self._core.view.state == "partial"

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Every request that still owns pages, in order of admission."""
        return tuple(self._core.requests)

    def supports_live_sequence_admission(self) -> bool:
        """Whether ``admit_sequence`` is possible: not speculative, no checkpoint reuse, attention present."""
        profile = self._core.profile
        return profile.has_attention and not profile.speculative and not profile.uses_checkpoints

    def sequence(self, request: RequestHandle, slot: int) -> SequenceState:
        """What the ledger knows of logical ``slot``, copied. Raises ContractViolation for a slot out of range."""
        with self._entry:
            found = self._request(request)
            self._check_slot(found, slot)
            return self._core.ledger.view(int(found.order[slot]))

    def inspect(self, request_id: str) -> RequestView:
        """One request by id, quarantined and poisoned ones included; a released one has no sequences left.

        Raises ContractViolation for an id that was never given.
        """
        with self._entry:
            return self._inspect(request_id)

    def _inspect(self, request_id: str) -> RequestView:
        core = self._core
        expect(request_id, str, "request_id")
        request = core.requests.get(request_id)
        if request is None:
            if not core.was_given(request_id):
                raise ContractViolation(f"there is no request {request_id!r}; ids look like 'r1'", request=request_id)
            return RequestView(request_id, "released", "released", (), (), ())
        slots = core.owned_slots(request)
        return RequestView(
            request.id,
            request.state,
            request.phase,
            tuple(core.ledger.ref(slot) for slot in slots),
            tuple(tuple(core.ledger.lease(slot).base_pages.tolist()) for slot in slots),
            tuple(np.flatnonzero(core.ledger.state[request.order] == BOUND).tolist()) if request.joiners else (),
        )

    def metrics(self) -> CoordinatorMetrics:
        """Counters, pools and records now. Pages of all four kinds: free, leased, cached and idle, withheld."""
        with self._entry:
            core = self._core
            withheld = {
                page
                for request in core.withheld()
                for slot in request.order.tolist()
                for page in core.ledger.lease(slot).base_pages.tolist()
            }
            return core.counters.snapshot(core.manager, len(core.requests), len(withheld))

    # Admission.

    def begin_request(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom, stream: Stream
    ) -> BeginRequestResult:
        """Lease pages for the founders of a request: all of them, or none. No device call.

        Returns OK with a handle and the prefill start of each sequence, REQUEST_FAILED with ``insufficient_capacity``,
        or POISONED. Raises ContractViolation for another stream than the coordinator's, a closed coordinator, a
        speculative request, no or too many sequences, bad resident slots, or an input that does not fit a row.
        """
        with self._entry:
            core = self._core
            if stream is not core.stream:
                raise ContractViolation(
                    f"stream {getattr(stream, 'name', stream)!r} is not the coordinator's {core.stream.name!r}; "
                    "one coordinator uses one stream"
                )
            expect(admission, ContextCacheBatchAdmission, "admission")
            expect(headroom, DecodingKvHeadroom, "headroom")
            if admission.speculative_request:
                raise ContractViolation("a speculative request needs a speculative deployment; this one is not")
            if core.poisoned:
                return BeginRequestResult(Status.POISONED)
            if core.closed:
                raise ContractViolation("the coordinator is closed; build a new one to admit requests")
            check_headroom(core, headroom)
            acquired = self._acquire_all(admission, headroom)
            if acquired is None:
                core.counters.refused_admissions += 1
                return BeginRequestResult(Status.REQUEST_FAILED, insufficient_capacity=True)
            request: Request | None = None
            try:
                request = Request(core.new_request_id(), admission)
                starts = tuple(item.result.plan.reuse_token_length for item in acquired)
                core.fire(request, "begin_request", BeginCall(core, request, "begin_request", acquired))
                handle = RequestHandle(core, self._entry, request)
                return BeginRequestResult(Status.OK, AdmissionResult(handle, starts))
            except BaseException:
                give_up(core, request, acquired)
                raise

    def admit_sequence(
        self, request: RequestHandle, admission: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom
    ) -> AdmitSequenceResult:
        """Let one sequence join a running batch: lease its pages and bind its row. It becomes the last logical slot.

        Accepted when the request is settled or seating. Returns OK with the prefill start; REQUEST_FAILED with
        ``insufficient_capacity`` and nothing changed; POISONED. Raises ContractViolation in any other state, when the
        batch is full, or for a bad resident slot or input; DeviceError when binding failed: the joiner has left again
        and the request is as before (or quarantined, if even that drain failed).
        """
        with self._entry:
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
            check_headroom(core, headroom)
            check_resident(core, admission.resident, set())
            check_input(core, admission, headroom)
            policy = effective_policy(found.batch, admission)
            result = acquire_sequence(core, admission, policy, headroom)
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

    def finalize_sequence_admission(
        self, request: RequestHandle, slot: int, advance: ContextCacheSequenceAdvance
    ) -> Status:
        """A joiner's prefill has completed: the whole input is committed. Publishes its prefix.

        Lookahead contract: one sampled token; fully committed: none.

        Returns OK, or POISONED with the ledger untouched (the joiner then holds in later steps). Raises
        ContractViolation when the slot is not an unfinalised joiner or the advance is another one.
        """
        with self._entry:
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
                core, found, "finalize_sequence_admission", plan, (slot,),
                decode_end=False, waits=found.joiners > 1, touched=(slot,),
            )  # fmt: skip
            core.fire(found, "finalize_sequence_admission", call)
            return Status.OK

    def retract_sequence_admission(self, request: RequestHandle) -> bool:
        """Undo the admission of the last sequence, if it is an unfinalised joiner: drain, clear its row, release.

        True when it has left. False, and nothing changed, when the last sequence is anything else or the only one, or
        the request is in another state. False with the coordinator poisoned when the drain failed (the request is
        quarantined) or the clearing upload raised (the joiner has left). Raises only for an invalid handle.
        """
        with self._entry:
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

    # Prefill.

    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind the rows and enqueue them with the reuse lengths; the request becomes the length view.

        Raises ContractViolation unless the request is admitted and the token is free; DeviceError: the request is
        broken, only finish or drop remain.
        """
        with self._entry:
            core, found = self._core, self._request(request)
            self._check_token(found)
            self._require(found, "prepare_prefill")
            core.fire(found, "prepare_prefill", PrepareCall(core, found, "prepare_prefill"))
            return Status.OK

    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Enqueue captures of recurrent state behind the prefill. Attention-only models have none: nothing happens."""
        with self._entry:
            core, found = self._core, self._request(request)
            self._require(found, "enqueue_prefill_captures")
            core.fire(found, "enqueue_prefill_captures", PrepareCall(core, found, "enqueue_prefill_captures"))
            return Status.OK

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
        with self._entry:
            core, found = self._core, self._request(request)
            self._require(found, "finalize_prefill")
            refuse_common_lengths(common_state_lengths)
            batch = as_batch_advance(advances, len(found.slots))
            plan = plan_full_input(core, found, batch, np.arange(len(found.slots)), found.lookahead)
            call = CompletionCall(core, found, "finalize_prefill", plan, found.slots, decode_end=False, waits=False)
            core.fire(found, "finalize_prefill", call)
            return Status.OK

    # Decode steps.

    def prepare_decode_step(self, request: RequestHandle, headroom: DecodingKvHeadroom) -> PrepareDecodeResult:
        """Give every seated sequence the pages for ``headroom`` more positions and enqueue the rows that grew.

        Returns OK; or REQUEST_FAILED with the slots that do not fit, nothing changed: retire them by compaction and
        try again (a request whose only sequence does not fit is finishing). A step that needs no page makes no device
        call. Raises ContractViolation in a state that cannot decode or while another request holds the token;
        DeviceError: call again, or finish.
        """
        with self._entry:
            core, found = self._core, self._request(request)
            if core.token.request is not found:
                self._check_token(found)
            if not core.request_runner.declares(found._state, "prepare_decode_step"):
                self._require(found, "prepare_decode_step")
            if type(headroom) is not DecodingKvHeadroom:
                expect(headroom, DecodingKvHeadroom, "headroom")
            if headroom.base_extra_tokens <= 0 or headroom.draft_extra_tokens != 0:
                check_headroom(core, headroom)
            growth, refusal = plan_growth(core, found, headroom)
            core.request_runner.fire(found, "prepare_decode_step", DecodeCall(core, found, growth, refusal))
            if refusal is None:
                return _PREPARED
            core.counters.refused_growth += 1
            return PrepareDecodeResult(Status.REQUEST_FAILED, refusal)

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
        with self._entry:
            core, found = self._core, self._request(request)
            if found._state != "decoding":
                self._require(found, "complete_decode_step")
            if common_state_lengths is not None:
                refuse_common_lengths(common_state_lengths)
            completed: tuple[int, ...] = ()
            if publishable_completed_slots is not _NO_SLOTS:
                completed = slot_tuple(publishable_completed_slots, "publishable_completed_slots")
            plan = plan_plain_step(core, found, advances, completed)
            if plan is None:
                plan = plan_decode_step(core, found, as_batch_advance(advances, len(found.slots)), completed)
            call = CompletionCall(
                core, found, "complete_decode_step", plan, completed, decode_end=True, waits=found.joiners > 0
            )
            core.request_runner.fire(found, "complete_decode_step", call)
            return Status.OK

    # Compaction.

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
        with self._entry:
            core, found = self._core, self._request(request)
            self._check_token(found)
            self._require(found, "begin_batch_compaction")
            size = len(found.slots)
            mapping = check_mapping(old_to_new, new_batch_size, size)
            pending = PendingMapping(mapping, check_tensor(device_batch_mapping, size), int(new_batch_size))
            call = CompactionCall(core, found, "begin_batch_compaction", pending)
            core.fire(found, "begin_batch_compaction", call)
            found.mapping = pending
            return Status.OK

    def compact_batch(self, request: RequestHandle) -> Status:
        """Clear the retired rows, compact the lengths, drain, release the retired leases.

        Returns OK, or POISONED when the drain failed: the whole request is quarantined, survivors included. Raises
        ContractViolation when no mapping is uploaded or the cache's active batch is not the request's; DeviceError:
        broken.
        """
        with self._entry:
            core, found = self._core, self._request(request)
            self._require(found, "compact_batch")
            pending = found.mapping
            assert pending is not None, "compacting is entered with a mapping only"
            if core.cache.active_batch_size != len(found.slots):
                raise ContractViolation(
                    f"the cache's active batch is {core.cache.active_batch_size}, the request has {len(found.slots)} "
                    "sequences; set the active batch size before compacting"
                )
            if not core.fire(found, "compact_batch", CompactionCall(core, found, "compact_batch", pending)):
                return Status.POISONED
            found.mapping = None
            return Status.OK

    # End of life.

    def finish(self, request: RequestHandle) -> Status:
        """End a request: drain if work is outstanding, clear its rows, release its pages. Works in every live state.

        OK for a handle that is not valid any more. POISONED when the drain failed (quarantined) or the clearing
        upload raised (released). Raises ContractViolation for another coordinator's handle.
        """
        with self._entry:
            core, found = self._core, self._any_request(request)
            if found.state in ENDED_STATES:
                return Status.OK
            call = EndingCall(core, found, "finish")
            released = core.fire(found, "finish", call)
            return Status.OK if released and call.clearing_error is None else Status.POISONED

    def shutdown(self) -> Status:
        """Try to release what is withheld, newest first, and close if nothing is left. Repeatable, never raises.

        POISONED: a drain failed; that request is poisoned, older ones were not tried. REQUEST_FAILED: live handles
        exist. OK: closed, no more admissions.
        """
        with self._entry:
            core = self._core
            if core.closed:
                return Status.OK
            for request in core.withheld():
                if not core.fire(request, "shutdown", EndingCall(core, request, "shutdown")):
                    return Status.POISONED
            live = bool(core.requests)
            core.tell_service("shutdown", owners_left=live)
            return Status.REQUEST_FAILED if live else Status.OK

    def close(self) -> None:
        """``shutdown``, insisting on success.

        Raises OwnersLeft when live requests remain, or the device could not be proven quiet; nothing is lost then,
        and the call may be repeated.
        """
        status = self.shutdown()
        if status is Status.REQUEST_FAILED:
            live = ", ".join(request.id for request in self._core.live())
            raise OwnersLeft(f"the coordinator still owns live requests ({live}); finish or close their handles first")
        if status is Status.POISONED:
            held = ", ".join(request.id for request in self._core.withheld())
            raise OwnersLeft(
                f"the device could not be proven quiet, requests {held} stay withheld; "
                "repair the device and close again"
            )

    def __reduce__(self) -> NoReturn:
        raise ContractViolation("a coordinator cannot be pickled or copied; save what inspect() and metrics() return")

    def __enter__(self) -> ContextCacheCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The caller's error matters more than ours: try, and log what could not be closed.
        try:
            self.close()
        except ContextCacheError as unfinished:
            _log.error("%s", unfinished)

    # Guards.

    def _request(self, handle: RequestHandle) -> Request:
        if type(handle) is RequestHandle and handle._core is self._core and handle._request._state not in ENDED_STATES:
            return handle._request
        request = self._any_request(handle)
        if request._state in ENDED_STATES:
            raise ContractViolation(
                f"request {request.id} is {request.state}; its handle is not valid any more",
                request=request.id, state=request.state,
            )  # fmt: skip
        return request

    def _any_request(self, handle: RequestHandle) -> Request:
        request = handle.request_of(self._core) if isinstance(handle, RequestHandle) else None
        if request is None:
            raise ContractViolation(
                "the handle is not one of this coordinator; use the coordinator that admitted the request"
            )
        return request

    def _check_token(self, request: Request) -> None:
        holder = self._core.token.request
        if holder is not None and holder is not request:
            raise ContractViolation(
                f"request {holder.id} is between a prepare call and its completion ({holder.state}); complete, finish "
                f"or drop it before request {request.id} prepares",
                holder=holder.id, request=request.id,
            )  # fmt: skip

    def _require(self, request: Request, event: str) -> None:
        runner = self._core.request_runner
        if not runner.declares(request.state, event):
            refusal = runner.refuse(request, event)
            accepted = tuple(_CALLS.get(name, name) for name in refusal.accepted)
            raise ContractViolation(
                f"request {request.id} is {request.state} and does not take {_CALLS.get(event, event)!r}; "
                f"it takes: {', '.join(accepted)}",
                request=request.id, state=request.state, event=event, accepted=accepted,
            )  # fmt: skip

    def _check_slot(self, request: Request, slot: int) -> None:
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer) or not 0 <= slot < len(request.slots):
            raise ContractViolation(
                f"slot {slot!r} is outside 0..{len(request.slots) - 1} of request {request.id}", slot=slot
            )

    def _acquire_all(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom
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
                result = acquire_sequence(core, sequence, policy, headroom)
                if result.lease is None:
                    return None
                acquired.append(Acquired(sequence, result, result.lease, policy))
            complete = True
            return acquired
        finally:
            if not complete:
                for item in acquired:
                    item.lease.release()


def _check_resources(deployment: DeploymentConfig, resources: ContextCachePhysicalResources) -> None:
    cache, table = resources.base_cache, resources.base_page_table
    validate_pool(deployment, cache.num_pages)
    for what, found, expected in (
        ("the page table's number of pages", table.num_pages, cache.num_pages),
        ("the cache's max_batch", cache.max_batch, deployment.max_batch),
        ("the page table's max_batch", table.max_batch, deployment.max_batch),
        ("the cache's page size", cache.page_size, deployment.page_size),
        ("the page table's row width in pages", table.max_pages_per_seq, deployment.row_pages),
    ):
        if found != expected:
            raise ContractViolation(f"{what} is {found}, expected {expected}; allocate both for this deployment")
