"""What the rows of the request table are made of: the facts that guards look at, and the steps.

A step is a named value; what it does is a method of the call object or a verb of its device. One protocol per kind of
call says what a call object must offer; ``coordinator.calls`` implements them. Actions for the draft model ask whether
the request is *paired* and are skipped otherwise.
"""

from __future__ import annotations

from typing import Final, Protocol

from context_cache.backends.base import (
    DeviceArray,
    DrainResult,
    HiddenCopy,
    Int32Array,
    LifecycleDevice,
    SnapshotCopies,
)
from context_cache.machines.spec import Couple, DeviceAction, Drain, Guard, HostStep


class DeviceCall(Protocol):
    """What every call object offers: the device it may ask, and what its request leaves behind when a drain fails.

    ``paired``: a speculative request of a deployment that owns paged draft state.
    """

    @property
    def device(self) -> LifecycleDevice: ...
    @property
    def paired(self) -> bool: ...
    def drain(self) -> DrainResult: ...
    def withhold(self) -> None: ...


class AdmissionCall(Protocol):
    """begin_request: the leases are acquired, the ledger rows planned."""

    def take_leases(self) -> None: ...


class LengthsCall(DeviceCall, Protocol):
    """A call that may write device length vectors; both arrays int32[n], in logical order."""

    @property
    def lengths(self) -> Int32Array: ...
    @property
    def draft_lengths(self) -> Int32Array: ...


class CaptureCall(DeviceCall, Protocol):
    """A call that may copy state into reserved snapshot slots."""

    captures_planned: bool
    captures: SnapshotCopies
    hidden: HiddenCopy

    def stage_captures(self) -> bool | None: ...
    def mark_captured(self) -> bool | None: ...
    def publish(self) -> None: ...
    def retire_reservations(self) -> bool | None: ...


class PublishingCall(CaptureCall, Protocol):
    """A completion: advances to apply, endpoints to publish."""

    joiner_waits: bool
    frozen_policy: bool

    def apply_advances(self) -> None: ...
    def freeze(self) -> None: ...
    def release_hit_pins(self) -> bool | None: ...


class PrefillCall(LengthsCall, CaptureCall, Protocol):
    plain_checkpoint: bool
    restores: SnapshotCopies

    def bind_rows(self) -> None: ...


class JoinerCall(LengthsCall, Protocol):
    """admit_sequence and retract_sequence_admission: one sequence, one row."""

    view_current: bool
    joiner_waits: bool

    def bind_joiner(self) -> None: ...
    def unbind_joiner(self) -> bool | None: ...
    def release_joiner(self) -> None: ...


class DecodeCall(LengthsCall, Protocol):
    growth_possible: bool
    view_current: bool
    only_sequence: bool

    def grow(self) -> bool | None: ...


class TerminalCall(DeviceCall, Protocol):
    """A call before which a frozen endpoint is published."""

    def publish_frozen(self) -> None: ...


class CompactionCall(LengthsCall, TerminalCall, Protocol):
    mapping: Int32Array
    mapping_tensor: DeviceArray
    new_size: int
    retired_residents: tuple[int, ...]
    view_current: bool
    survivors_remain: bool
    joiner_waits: bool

    def unbind_retired(self) -> None: ...
    def retire(self) -> None: ...


class EndCall(TerminalCall, Protocol):
    def unbind_rows(self) -> bool | None: ...
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


def _captures_planned(call: CaptureCall) -> bool:
    return call.captures_planned


def _frozen_policy(call: PublishingCall) -> bool:
    return call.frozen_policy


view_current: Final = Guard("view_current", _view_current)
joiner_waits: Final = Guard("joiner_waits", _joiner_waits)
growth_possible: Final = Guard("growth_possible", _growth_possible)
only_sequence: Final = Guard("only_sequence", _only_sequence)
survivors_remain: Final = Guard("survivors_remain", _survivors_remain)
plain_checkpoint: Final = Guard("plain_checkpoint", _plain_checkpoint)
captures_planned: Final = Guard("captures_planned", _captures_planned)
frozen_policy: Final = Guard("frozen_policy", _frozen_policy)


def _take_leases(call: AdmissionCall) -> None:
    call.take_leases()


def _bind_rows(call: PrefillCall) -> None:
    call.bind_rows()


def _bind_joiner(call: JoinerCall) -> None:
    call.bind_joiner()


def _unbind_joiner(call: JoinerCall) -> bool | None:
    return call.unbind_joiner()


def _release_joiner(call: JoinerCall) -> None:
    call.release_joiner()


def _grow(call: DecodeCall) -> bool | None:
    return call.grow()


def _apply_advances(call: PublishingCall) -> None:
    call.apply_advances()


def _freeze(call: PublishingCall) -> None:
    call.freeze()


def _release_hit_pins(call: PublishingCall) -> bool | None:
    return call.release_hit_pins()


def _stage_captures(call: CaptureCall) -> bool | None:
    return call.stage_captures()


def _mark_captured(call: CaptureCall) -> bool | None:
    return call.mark_captured()


def _retire_reservations(call: CaptureCall) -> bool | None:
    return call.retire_reservations()


def _publish(call: CaptureCall) -> None:
    call.publish()


def _publish_frozen(call: TerminalCall) -> None:
    call.publish_frozen()


def _unbind_retired(call: CompactionCall) -> None:
    call.unbind_retired()


def _retire(call: CompactionCall) -> None:
    call.retire()


def _unbind_rows(call: EndCall) -> bool | None:
    return call.unbind_rows()


def _release(call: EndCall) -> None:
    call.release()


def _withhold(call: DeviceCall) -> None:
    call.withhold()


TAKE_LEASES: Final = HostStep("take_leases", _take_leases)
BIND_ROWS: Final = HostStep("bind_rows", _bind_rows)
BIND_JOINER: Final = HostStep("bind_joiner", _bind_joiner)
UNBIND_JOINER: Final = HostStep("unbind_joiner", _unbind_joiner)
RELEASE_JOINER: Final = HostStep("release_joiner", _release_joiner)
GROW: Final = HostStep("grow", _grow)
APPLY_ADVANCES: Final = HostStep("apply_advances", _apply_advances)
FREEZE: Final = HostStep("freeze", _freeze)
RELEASE_HIT_PINS: Final = HostStep("release_hit_pins", _release_hit_pins)
STAGE_CAPTURES: Final = HostStep("stage_captures", _stage_captures)
MARK_CAPTURED: Final = HostStep("mark_captured", _mark_captured)
RETIRE_RESERVATIONS: Final = HostStep("retire_reservations", _retire_reservations)
PUBLISH: Final = HostStep("publish", _publish, publishes=True)
PUBLISH_FROZEN: Final = HostStep("publish_frozen", _publish_frozen, publishes=True)
UNBIND_RETIRED: Final = HostStep("unbind_retired", _unbind_retired)
RETIRE: Final = HostStep("retire", _retire)
UNBIND_ROWS: Final = HostStep("unbind_rows", _unbind_rows)
RELEASE: Final = HostStep("release", _release)
WITHHOLD: Final = HostStep("withhold", _withhold)


def _upload_base_rows(call: DeviceCall) -> bool:
    return call.device.upload_base_rows()


def _upload_draft_rows(call: DeviceCall) -> bool:
    return call.paired and call.device.upload_draft_rows()


def _reset_base_lengths(call: LengthsCall) -> bool:
    return call.device.reset_base_lengths(call.lengths)


def _reset_draft_lengths(call: LengthsCall) -> bool:
    return call.paired and call.device.reset_draft_lengths(call.draft_lengths)


def _install_base_lengths(call: LengthsCall) -> bool:
    return call.device.install_base_lengths(call.lengths)


def _install_draft_lengths(call: LengthsCall) -> bool:
    return call.paired and call.device.install_draft_lengths(call.draft_lengths)


def _compact_base_lengths(call: CompactionCall) -> bool:
    return call.device.compact_base_lengths(call.mapping_tensor, call.mapping.size, call.new_size)


def _compact_draft_lengths(call: CompactionCall) -> bool:
    return call.paired and call.device.compact_draft_lengths(call.mapping_tensor, call.mapping.size, call.new_size)


def _copy_mapping(call: CompactionCall) -> bool:
    return call.device.copy_mapping(call.mapping, call.mapping_tensor)


def _clear_resident_state(call: CompactionCall) -> bool:
    return call.device.clear_resident_state(call.retired_residents)


def _zero_recurrent(call: PrefillCall) -> bool:
    return call.device.zero_recurrent(call.restores)


def _restore_recurrent(call: PrefillCall) -> bool:
    return call.device.restore_recurrent(call.restores)


def _restore_partial(call: PrefillCall) -> bool:
    return call.device.restore_partial(call.restores)


def _capture_recurrent(call: CaptureCall) -> bool:
    return call.device.capture_recurrent(call.captures)


def _capture_partial(call: CaptureCall) -> bool:
    return call.device.capture_partial(call.captures)


def _capture_hidden(call: CaptureCall) -> bool:
    return call.device.capture_hidden(call.hidden)


def _restore_hidden(call: CaptureCall) -> bool:
    return call.device.restore_hidden(call.hidden)


def _drain(call: DeviceCall) -> DrainResult:
    return call.drain()


UPLOAD_BASE_ROWS: Final = DeviceAction("upload_base_rows", _upload_base_rows)
UPLOAD_DRAFT_ROWS: Final = DeviceAction("upload_draft_rows", _upload_draft_rows)
UPLOAD_CLEARED_ROWS: Final = DeviceAction("upload_cleared_rows", _upload_base_rows, clears=True)
UPLOAD_CLEARED_DRAFT_ROWS: Final = DeviceAction("upload_cleared_draft_rows", _upload_draft_rows, clears=True)
RESET_BASE_LENGTHS: Final = DeviceAction("reset_base_lengths", _reset_base_lengths)
RESET_DRAFT_LENGTHS: Final = DeviceAction("reset_draft_lengths", _reset_draft_lengths)
INSTALL_BASE_LENGTHS: Final = DeviceAction("install_base_lengths", _install_base_lengths)
INSTALL_DRAFT_LENGTHS: Final = DeviceAction("install_draft_lengths", _install_draft_lengths)
COMPACT_BASE_LENGTHS: Final = DeviceAction("compact_base_lengths", _compact_base_lengths)
COMPACT_DRAFT_LENGTHS: Final = DeviceAction("compact_draft_lengths", _compact_draft_lengths)
COPY_MAPPING: Final = DeviceAction("copy_mapping", _copy_mapping)
CLEAR_RESIDENT_STATE: Final = DeviceAction("clear_resident_state", _clear_resident_state)
ZERO_RECURRENT: Final = DeviceAction("zero_recurrent", _zero_recurrent)
RESTORE_RECURRENT: Final = DeviceAction("restore_recurrent", _restore_recurrent)
RESTORE_PARTIAL: Final = DeviceAction("restore_partial", _restore_partial)
CAPTURE_RECURRENT: Final = DeviceAction("capture_recurrent", _capture_recurrent)
CAPTURE_PARTIAL: Final = DeviceAction("capture_partial", _capture_partial)
CAPTURE_HIDDEN: Final = DeviceAction("capture_hidden", _capture_hidden)
RESTORE_HIDDEN: Final = DeviceAction("restore_hidden", _restore_hidden)
DRAIN: Final = Drain("drain", _drain)

TAKE_TOKEN: Final = Couple("execution", "take")
GIVE_BACK: Final = Couple("execution", "give_back")
UNDO_TAKE: Final = Couple("execution", "undo_take")
START_LENGTHS: Final = Couple("view", "start_lengths")
CLAIM_VIEW: Final = Couple("view", "claim")
FORGET_VIEW: Final = Couple("view", "forget")
ENTRY_FINALIZED: Final = Couple("view", "entry_finalized")
DRAIN_FAILED: Final = Couple("coordinator", "drain_failed")

RESTORE: Final = (ZERO_RECURRENT, RESTORE_RECURRENT, RESTORE_PARTIAL)
CAPTURE: Final = (STAGE_CAPTURES, CAPTURE_RECURRENT, CAPTURE_PARTIAL, MARK_CAPTURED)
CAPTURE_MTP: Final = (STAGE_CAPTURES, CAPTURE_RECURRENT, CAPTURE_PARTIAL, CAPTURE_HIDDEN, MARK_CAPTURED)
INSTALL_LENGTHS: Final = (START_LENGTHS, INSTALL_BASE_LENGTHS, INSTALL_DRAFT_LENGTHS, CLAIM_VIEW)
WAY_OUT: Final = (UNBIND_ROWS, UPLOAD_CLEARED_ROWS, UPLOAD_CLEARED_DRAFT_ROWS, RELEASE)
JOINER_WAY_OUT: Final = (DRAIN, UNBIND_JOINER, UPLOAD_CLEARED_ROWS, RELEASE_JOINER)
COMPACT: Final = (
    UNBIND_RETIRED, UPLOAD_BASE_ROWS, UPLOAD_DRAFT_ROWS, START_LENGTHS, COMPACT_BASE_LENGTHS, COMPACT_DRAFT_LENGTHS,
    CLEAR_RESIDENT_STATE, DRAIN, RETIRE,
)  # fmt: skip
