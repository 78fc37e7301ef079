"""The life of one request, from admission to the last page returned.

Rule 1: every change of a request's state is a row of ``REQUEST``. Nothing else may assign it.
Rule 2: this file knows no device. What touches memory is a device action: a verb of the call object's device.
Rule 3: pages go back only after proof that the device is done: after the drain of the row, or from a state without
        outstanding work.
Rule 4: one step of a request is one event, whatever the number of its sequences.

Couplings: the execution token is taken by the first step of a row and given back on entering a state that does not
hold it; a failed drain poisons the coordinator; a row that writes device lengths takes the length view.

Not here: whether arguments are valid, whether the caller may act (token, poison), and whether a slot is an unfinalised
joiner. Those are planned before the event and end in an error or a status; no row fires. "skipped if not dirty" is the
page table's affair: an upload without dirty rows is no action.
"""

from __future__ import annotations

from typing import Final, Protocol

from context_cache.backends.base import DeviceArray, DrainResult, Int32Array, LifecycleDevice
from context_cache.machines.spec import (
    Couple,
    DeviceAction,
    Drain,
    Guard,
    HostStep,
    MachineSpec,
    Not,
    State,
    Transition,
    each,
)

__all__ = [
    "REQUEST",
    "AdmissionCall",
    "CompactionCall",
    "DecodeCall",
    "EndCall",
    "JoinerCall",
    "PrefillCall",
    "PublishingCall",
]


class _DeviceCall(Protocol):
    """What every call object offers: the device it may ask, and what its request leaves behind when a drain fails."""

    @property
    def device(self) -> LifecycleDevice: ...
    def drain(self) -> DrainResult: ...
    def withhold(self) -> None: ...


class PublishingCall(_DeviceCall, Protocol):
    """A completion: advances to apply, endpoints to publish."""

    joiner_waits: bool

    def apply_advances(self) -> None: ...
    def publish(self) -> None: ...


class AdmissionCall(Protocol):
    """begin_request: the leases are acquired, the ledger rows planned."""

    def take_leases(self) -> None: ...


class _LengthsCall(_DeviceCall, Protocol):
    """A call that may write the device length vector; ``lengths`` is int32[n], in logical order."""

    @property
    def lengths(self) -> Int32Array: ...


class PrefillCall(_LengthsCall, Protocol):
    plain_checkpoint: bool

    def bind_rows(self) -> None: ...


class JoinerCall(_LengthsCall, Protocol):
    """admit_sequence and retract_sequence_admission: one sequence, one row."""

    view_current: bool
    joiner_waits: bool

    def bind_joiner(self) -> None: ...
    def unbind_joiner(self) -> None: ...
    def release_joiner(self) -> None: ...


class DecodeCall(_LengthsCall, Protocol):
    growth_possible: bool
    view_current: bool
    only_sequence: bool

    def grow(self) -> None: ...


class CompactionCall(_LengthsCall, Protocol):
    mapping: Int32Array
    mapping_tensor: DeviceArray
    new_size: int
    retired_residents: tuple[int, ...]
    view_current: bool
    survivors_remain: bool
    joiner_waits: bool

    def unbind_retired(self) -> None: ...
    def retire(self) -> None: ...


class EndCall(_DeviceCall, Protocol):
    def unbind_rows(self) -> None: ...
    def release(self) -> None: ...


def _view_current(call: DecodeCall | JoinerCall | CompactionCall) -> bool:
    return call.view_current


def _joiner_waits(call: JoinerCall | PublishingCall | CompactionCall) -> bool:
    return call.joiner_waits


def _growth_possible(call: DecodeCall) -> bool:
    return call.growth_possible


def _only_sequence(call: DecodeCall) -> bool:
    return call.only_sequence


def _survivors_remain(call: CompactionCall) -> bool:
    return call.survivors_remain


def _plain_checkpoint(call: PrefillCall) -> bool:
    return call.plain_checkpoint


view_current: Final = Guard("view_current", _view_current)
joiner_waits: Final = Guard("joiner_waits", _joiner_waits)
growth_possible: Final = Guard("growth_possible", _growth_possible)
only_sequence: Final = Guard("only_sequence", _only_sequence)
survivors_remain: Final = Guard("survivors_remain", _survivors_remain)
plain_checkpoint: Final = Guard("plain_checkpoint", _plain_checkpoint)


def _take_leases(call: AdmissionCall) -> None:
    call.take_leases()


def _bind_rows(call: PrefillCall) -> None:
    call.bind_rows()


def _bind_joiner(call: JoinerCall) -> None:
    call.bind_joiner()


def _unbind_joiner(call: JoinerCall) -> None:
    call.unbind_joiner()


def _release_joiner(call: JoinerCall) -> None:
    call.release_joiner()


def _grow(call: DecodeCall) -> None:
    call.grow()


def _apply_advances(call: PublishingCall) -> None:
    call.apply_advances()


def _publish(call: PublishingCall) -> None:
    call.publish()


def _unbind_retired(call: CompactionCall) -> None:
    call.unbind_retired()


def _retire(call: CompactionCall) -> None:
    call.retire()


def _unbind_rows(call: EndCall) -> None:
    call.unbind_rows()


def _release(call: EndCall) -> None:
    call.release()


def _withhold(call: _DeviceCall) -> None:
    call.withhold()


def _upload_base_rows(call: _DeviceCall) -> bool:
    return call.device.upload_base_rows()


def _reset_base_lengths(call: _LengthsCall) -> bool:
    return call.device.reset_base_lengths(call.lengths)


def _install_base_lengths(call: _LengthsCall) -> bool:
    return call.device.install_base_lengths(call.lengths)


def _compact_base_lengths(call: CompactionCall) -> bool:
    return call.device.compact_base_lengths(call.mapping_tensor, call.mapping.size, call.new_size)


def _copy_mapping(call: CompactionCall) -> bool:
    return call.device.copy_mapping(call.mapping, call.mapping_tensor)


def _clear_resident_state(call: CompactionCall) -> bool:
    return call.device.clear_resident_state(call.retired_residents)


def _drain(call: _DeviceCall) -> DrainResult:
    return call.drain()


TAKE_LEASES: Final = HostStep("take_leases", _take_leases)
BIND_ROWS: Final = HostStep("bind_rows", _bind_rows)
BIND_JOINER: Final = HostStep("bind_joiner", _bind_joiner)
UNBIND_JOINER: Final = HostStep("unbind_joiner", _unbind_joiner)
RELEASE_JOINER: Final = HostStep("release_joiner", _release_joiner)
GROW: Final = HostStep("grow", _grow)
APPLY_ADVANCES: Final = HostStep("apply_advances", _apply_advances)
PUBLISH: Final = HostStep("publish", _publish, publishes=True)
UNBIND_RETIRED: Final = HostStep("unbind_retired", _unbind_retired)
RETIRE: Final = HostStep("retire", _retire)
UNBIND_ROWS: Final = HostStep("unbind_rows", _unbind_rows)
RELEASE: Final = HostStep("release", _release)
WITHHOLD: Final = HostStep("withhold", _withhold)

UPLOAD_BASE_ROWS: Final = DeviceAction("upload_base_rows", _upload_base_rows)
UPLOAD_CLEARED_ROWS: Final = DeviceAction("upload_cleared_rows", _upload_base_rows, clears=True)
RESET_BASE_LENGTHS: Final = DeviceAction("reset_base_lengths", _reset_base_lengths)
INSTALL_BASE_LENGTHS: Final = DeviceAction("install_base_lengths", _install_base_lengths)
COMPACT_BASE_LENGTHS: Final = DeviceAction("compact_base_lengths", _compact_base_lengths)
COPY_MAPPING: Final = DeviceAction("copy_mapping", _copy_mapping)
CLEAR_RESIDENT_STATE: Final = DeviceAction("clear_resident_state", _clear_resident_state)
DRAIN: Final = Drain("drain", _drain)

TAKE_TOKEN: Final = Couple("execution", "take")
GIVE_BACK: Final = Couple("execution", "give_back")
UNDO_TAKE: Final = Couple("execution", "undo_take")
START_LENGTHS: Final = Couple("view", "start_lengths")
CLAIM_VIEW: Final = Couple("view", "claim")
FORGET_VIEW: Final = Couple("view", "forget")
ENTRY_FINALIZED: Final = Couple("view", "entry_finalized")
DRAIN_FAILED: Final = Couple("coordinator", "drain_failed")

INSTALL_LENGTHS: Final = (START_LENGTHS, INSTALL_BASE_LENGTHS, CLAIM_VIEW)
WAY_OUT: Final = (UNBIND_ROWS, UPLOAD_CLEARED_ROWS, RELEASE)
JOINER_WAY_OUT: Final = (DRAIN, UNBIND_JOINER, UPLOAD_CLEARED_ROWS, RELEASE_JOINER)
COMPACT: Final = (
    UNBIND_RETIRED, UPLOAD_BASE_ROWS, START_LENGTHS, COMPACT_BASE_LENGTHS, CLEAR_RESIDENT_STATE, DRAIN, RETIRE,
)  # fmt: skip

_ENDED: Final = (GIVE_BACK, FORGET_VIEW)
_WITHHELD: Final = (DRAIN_FAILED, GIVE_BACK, FORGET_VIEW, WITHHOLD)

_STATES: Final = (
    State("new", "not admitted yet", phase="new"),
    State("admitted", "leases held, rows not bound", phase="admitted", holds="pages"),
    State("prefilling", "prefill prepared, running, or done but not finalised", phase="executing",
          holds="pages, rows, token", outstanding=True),
    State("settled", "nothing outstanding, every sequence seated", phase="executing", holds="pages, rows",
          on_enter=(GIVE_BACK,)),
    State("seating", "a joiner is bound and not finalised", phase="executing", holds="pages, rows, perhaps token",
          outstanding=True),
    State("decoding", "decode step prepared, not completed", phase="executing", holds="pages, rows, token",
          outstanding=True),
    State("decode_retry", "pages grown, row or length upload incomplete", phase="executing",
          holds="pages, rows, token", outstanding=True),
    State("compacting", "mapping uploaded, lengths not compacted", phase="executing", holds="pages, rows, token",
          outstanding=True),
    State("broken", "device state unknown after an action that must not be repeated", phase="executing",
          holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("finishing", "the only sequence could not grow, or nobody is left", phase="finishing",
          holds="pages, rows", on_enter=_ENDED),
    State("finishing_retry", "growth refused while an upload is incomplete", phase="finishing",
          holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("quarantined", "a drain failed: everything is withheld until a shutdown drains", phase="quarantined",
          holds="pages, rows (withheld)", outstanding=True, on_enter=_WITHHELD),
    State("poisoned", "the drain failed again at shutdown; a later shutdown may succeed", phase="poisoned",
          holds="pages, rows (withheld)", outstanding=True, on_enter=_WITHHELD),
    State("released", "every page and row returned", phase="released", final=True, on_enter=_ENDED),
)  # fmt: skip

_ROWS: Final = (
    Transition(event="begin_request", source="new", target="admitted", steps=(TAKE_LEASES,)),
    Transition(event="prepare_prefill", source="admitted", target="prefilling", on_failure="broken",
               steps=(TAKE_TOKEN, BIND_ROWS, UPLOAD_BASE_ROWS, START_LENGTHS, RESET_BASE_LENGTHS, CLAIM_VIEW)),
    Transition(event="enqueue_prefill_captures", source="prefilling", target="prefilling",
               guards=(Not(plain_checkpoint),)),
    Transition(event="finalize_prefill", source="prefilling", target="settled", on_publish_failure="settled",
               work_ended="by_runtime_sync", steps=(APPLY_ADVANCES, PUBLISH)),

    # A joiner: admitted at a settled point, seated by its own prefill, finalised or retracted.
    *(
        Transition(event="admit_sequence", source=source, target="seating", guards=(guard,), on_failure=source,
                   on_drain_failure="quarantined", failure_steps=(*JOINER_WAY_OUT, UNDO_TAKE),
                   steps=(TAKE_TOKEN, *install, BIND_JOINER, UPLOAD_BASE_ROWS))
        for source in ("settled", "seating")
        for guard, install in ((view_current, ()), (Not(view_current), INSTALL_LENGTHS))
    ),
    *(
        Transition(event="finalize_sequence_admission", source="seating", target=target, guards=(guard,),
                   on_publish_failure=target, work_ended="by_runtime_sync",
                   steps=(APPLY_ADVANCES, ENTRY_FINALIZED, PUBLISH))
        for guard, target in ((Not(joiner_waits), "settled"), (joiner_waits, "seating"))
    ),
    *(
        Transition(event="retract_sequence_admission", source="seating", target=target, guards=(guard,),
                   on_drain_failure="quarantined", steps=JOINER_WAY_OUT)
        for guard, target in ((Not(joiner_waits), "settled"), (joiner_waits, "seating"))
    ),

    # The decode step.
    *(
        Transition(event="prepare_decode_step", source=source, target="decoding", guards=(growth_possible, guard),
                   on_failure="decode_retry", hot=True, steps=(TAKE_TOKEN, *install, GROW, UPLOAD_BASE_ROWS))
        for source in ("settled", "seating", "decode_retry")
        for guard, install in ((view_current, ()), (Not(view_current), INSTALL_LENGTHS))
    ),
    *each(("settled", "seating", "decode_retry"), event="prepare_decode_step", hot=True,
          guards=(Not(growth_possible), Not(only_sequence))),
    Transition(event="prepare_decode_step", source="settled", target="finishing", hot=True,
               guards=(Not(growth_possible), only_sequence)),
    Transition(event="prepare_decode_step", source="decode_retry", target="finishing_retry", hot=True,
               guards=(Not(growth_possible), only_sequence)),
    Transition(event="complete_decode_step", source="decoding", target="settled", guards=(Not(joiner_waits),),
               on_publish_failure="settled", work_ended="by_runtime_sync", hot=True, steps=(APPLY_ADVANCES, PUBLISH)),
    Transition(event="complete_decode_step", source="decoding", target="seating", guards=(joiner_waits,),
               on_publish_failure="seating", work_ended="by_runtime_sync", hot=True,
               steps=(APPLY_ADVANCES, GIVE_BACK, PUBLISH)),

    # Compaction.
    *(
        Transition(event="begin_batch_compaction", source=source, target="compacting", guards=(guard,),
                   on_failure="broken", steps=(TAKE_TOKEN, *install, COPY_MAPPING))
        for source in ("settled", "seating")
        for guard, install in ((view_current, ()), (Not(view_current), INSTALL_LENGTHS))
    ),
    Transition(event="compact_batch", source="compacting", target="settled",
               guards=(survivors_remain, Not(joiner_waits)), on_failure="broken", on_drain_failure="quarantined",
               steps=(*COMPACT, CLAIM_VIEW)),
    Transition(event="compact_batch", source="compacting", target="seating",
               guards=(survivors_remain, joiner_waits), on_failure="broken", on_drain_failure="quarantined",
               steps=(*COMPACT, CLAIM_VIEW, GIVE_BACK)),
    Transition(event="compact_batch", source="compacting", target="finishing",
               guards=(Not(survivors_remain),), on_failure="broken", on_drain_failure="quarantined", steps=COMPACT),

    # End of life: one way out.
    *(row for event in ("finish", "drop") for row in (
        Transition(event=event, source="admitted", target="released", steps=(RELEASE,)),
        *each(("settled", "finishing"), event=event, target="released", steps=WAY_OUT),
        *each(("prefilling", "seating", "decoding", "decode_retry", "compacting", "broken", "finishing_retry"),
              event=event, target="released", on_drain_failure="quarantined", steps=(DRAIN, *WAY_OUT)),
    )),
    *each(("quarantined", "poisoned"), event="shutdown", target="released", on_drain_failure="poisoned",
          steps=(DRAIN, *WAY_OUT)),
)  # fmt: skip

REQUEST: Final = MachineSpec(name="request", initial="new", states=_STATES, transitions=_ROWS)
