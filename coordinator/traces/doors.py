"""The doors of a watched coordinator: what goes through is noted, and may be made to fail as it failed before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import starmap
from time import perf_counter_ns
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec
from attrs import define

from context_cache.backends.base import (
    DeviceArray,
    DeviceError,
    DrainResult,
    HiddenCopy,
    Int32Array,
    LifecycleDevice,
    SnapshotCopies,
)
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.page_table import KVPageTable
from context_cache.coordinator.traces.format import Act
from context_cache.coordinator.watching import Offer, Publisher

__all__ = ["Acts", "NotedAct", "WatchedDevice", "error_name", "watched_publisher"]

NOT_IDLE = "not_idle"
_R = TypeVar("_R")
_ONCE: Final[tuple[tuple[()]]] = ((),)


def error_name(error: BaseException) -> str:
    """The class of an error, or of the one that it stands for when a recorded failure is repeated.

    Whatever is a DeviceError, or one of the coordinator's own errors, is called that: what happens next depends on it.
    """
    for kind in (DeviceError, ContractViolation, InvariantViolation):
        if isinstance(error, kind):
            return kind.__name__
    name: str = getattr(error, "stands_for", type(error).__name__)
    return name


@define(eq=False)
class NotedAct:
    """An act between the steps of its call: its line, and when it began and ended (``perf_counter_ns``)."""

    line: bytes
    begin: int
    end: int


class Acts:
    """What goes through the doors.

    note:   takes each, in order.
    faults: (verb, n-th use of it in this call) -> what to raise, or the drain's result, instead of doing it.
    off:    nothing is noted any more; everything goes straight through.
    armed:  the fault of the use in progress. What lies behind the door raises it where the first work would be
            enqueued: a failed upload leaves the host unsure of its rows, and a fault at the door would not.
    """

    __slots__ = ("_note_act", "_uses", "armed", "faults", "off")

    def __init__(self, note: Callable[[NotedAct], None]) -> None:
        self._note_act = note
        self.faults: dict[tuple[str, int], BaseException | DrainResult] = {}
        self.armed: BaseException | None = None
        self.off = False
        self._uses: Counter[str] = Counter()

    def next_call(self) -> None:
        """Count the uses of verbs anew."""
        self._uses.clear()

    def enqueue(self, verb: str, parts: tuple[Any, ...], run: Callable[[], bool]) -> bool:
        """Let an action with these arguments through. A fault is raised before anything is enqueued."""
        if self.off:
            return run()
        digest, nth = _digest(parts), self._use(verb)
        begin = perf_counter_ns()
        done: list[bool] = []
        try:
            self._through(verb, nth, run, done)
        except BaseException as error:
            self._note(Act(verb=verb, digest=digest, failed=error_name(error), nth=None if done else nth), begin)
            raise
        enqueued = done[0]
        if enqueued:
            self._note_act(
                NotedAct(b'{"verb":"%b","digest":"%b"}' % (verb.encode(), digest.encode()), begin, perf_counter_ns())
            )
        return enqueued

    def drain(self, run: Callable[[], DrainResult]) -> DrainResult:
        """Let a drain through."""
        if self.off:
            return run()
        nth = self._use("drain")
        begin = perf_counter_ns()
        fault = self.faults.get(("drain", nth)) if self.faults else None
        result = fault if isinstance(fault, DrainResult) else run()
        if result.ok:
            self._note(Act(verb="drain"), begin)
        else:
            failed = NOT_IDLE if result.interrupt is None else error_name(result.interrupt)
            self._note(Act(verb="drain", failed=failed, nth=nth), begin)
        return result

    def publish(self, slot: int, run: Callable[[], None]) -> None:
        """Let a publication through; only one that fails is noted."""
        if self.off:
            run()
            return
        nth = self._use("publish")
        begin = perf_counter_ns()
        done: list[None] = []
        try:
            self._through("publish", nth, run, done)
        except BaseException as error:
            act = Act(verb="publish", slot=slot, failed=error_name(error), nth=None if done else nth)
            self._note(act, begin)
            raise

    def fail_if_armed(self) -> None:
        """Raise the fault of the use in progress, if there is one."""
        if self.armed is not None:
            raise self.armed

    def _through(self, verb: str, nth: int, run: Callable[[], _R], done: list[_R]) -> None:
        """Run it and put what it returns into ``done``.

        In one operation, as far as interrupts go: one that comes with ``done`` filled came from outside the action,
        and raising it instead of the action would not be the same.
        """
        fault = self.faults.get((verb, nth)) if self.faults else None
        if not isinstance(fault, BaseException):
            done.extend(starmap(run, _ONCE))
            return
        self.armed = fault
        try:
            run()
        finally:
            self.armed = None
        raise fault

    def _use(self, verb: str) -> int:
        self._uses[verb] += 1
        return self._uses[verb]

    def _note(self, act: Act, begin: int) -> None:
        self._note_act(NotedAct(msgspec.json.encode(act), begin, perf_counter_ns()))


def watched_publisher(publisher: Publisher, acts: Acts) -> Publisher:
    """``publisher``, noted."""

    def publish(offer: Offer, core: Core, request: Request, resident: int) -> None:
        acts.publish(resident, partial(publisher, offer, core, request, resident))

    return publish


class WatchedDevice:
    """A device whose verbs are noted with eight digits over what they were given."""

    __slots__ = ("_acts", "_draft_table", "_inner", "_table")

    def __init__(self, inner: LifecycleDevice, acts: Acts) -> None:
        self._inner, self._acts = inner, acts
        self._table: KVPageTable | None = None
        self._draft_table: KVPageTable | None = None

    def attach(self, core: Core) -> None:
        """The coordinator is built; its page tables can be looked at."""
        self._table, self._draft_table = core.rows.base, core.rows.draft

    def upload_base_rows(self) -> bool:
        table = self._table
        # Every decode step comes here, and mostly with nothing to carry.
        if table is None or not table.any_dirty:
            return self._inner.upload_base_rows()
        return self._upload("upload_base_rows", table, self._inner.upload_base_rows)

    def upload_draft_rows(self) -> bool:
        return self._upload("upload_draft_rows", self._draft_table, self._inner.upload_draft_rows)

    def _upload(self, verb: str, table: KVPageTable | None, upload: Callable[[], bool]) -> bool:
        pending = None if table is None or self._acts.off else table.pending()
        if pending is None:
            # Nothing to carry, so nothing that could fail: not a use of the verb.
            return upload()
        return self._acts.enqueue(verb, pending, upload)

    def reset_base_lengths(self, lengths: Int32Array) -> bool:
        return self._lengths("reset_base_lengths", lengths, self._inner.reset_base_lengths)

    def reset_draft_lengths(self, lengths: Int32Array) -> bool:
        return self._lengths("reset_draft_lengths", lengths, self._inner.reset_draft_lengths)

    def install_base_lengths(self, lengths: Int32Array) -> bool:
        return self._lengths("install_base_lengths", lengths, self._inner.install_base_lengths)

    def install_draft_lengths(self, lengths: Int32Array) -> bool:
        return self._lengths("install_draft_lengths", lengths, self._inner.install_draft_lengths)

    def _lengths(self, verb: str, lengths: Int32Array, run: Callable[[Int32Array], bool]) -> bool:
        return self._acts.enqueue(verb, (lengths,), partial(run, lengths))

    def compact_base_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        return self._acts.enqueue(
            "compact_base_lengths",
            ((old_size, new_size),),
            partial(self._inner.compact_base_lengths, mapping, old_size, new_size),
        )

    def compact_draft_lengths(self, mapping: DeviceArray, old_size: int, new_size: int) -> bool:
        return self._acts.enqueue(
            "compact_draft_lengths",
            ((old_size, new_size),),
            partial(self._inner.compact_draft_lengths, mapping, old_size, new_size),
        )

    def copy_mapping(self, mapping: Int32Array, tensor: DeviceArray) -> bool:
        return self._acts.enqueue(
            "copy_mapping", (mapping,), partial(self._inner.copy_mapping, mapping, tensor)
        )

    def clear_resident_state(self, slots: tuple[int, ...]) -> bool:
        return self._acts.enqueue(
            "clear_resident_state", (slots,), partial(self._inner.clear_resident_state, slots)
        )

    def zero_recurrent(self, copies: SnapshotCopies) -> bool:
        return self._copies("zero_recurrent", copies, self._inner.zero_recurrent)

    def restore_recurrent(self, copies: SnapshotCopies) -> bool:
        return self._copies("restore_recurrent", copies, self._inner.restore_recurrent)

    def restore_partial(self, copies: SnapshotCopies) -> bool:
        return self._copies("restore_partial", copies, self._inner.restore_partial)

    def capture_recurrent(self, copies: SnapshotCopies) -> bool:
        return self._copies("capture_recurrent", copies, self._inner.capture_recurrent)

    def capture_partial(self, copies: SnapshotCopies) -> bool:
        return self._copies("capture_partial", copies, self._inner.capture_partial)

    def _copies(self, verb: str, copies: SnapshotCopies, run: Callable[[SnapshotCopies], bool]) -> bool:
        parts = (
            copies.slots, copies.rows, copies.partial_slots, copies.base_pages, copies.tokens, copies.draft_pages,
            copies.zero_rows,
        )  # fmt: skip
        return self._acts.enqueue(verb, parts, partial(run, copies))

    def capture_hidden(self, copy: HiddenCopy) -> bool:
        return self._hidden("capture_hidden", copy, self._inner.capture_hidden)

    def restore_hidden(self, copy: HiddenCopy) -> bool:
        return self._hidden("restore_hidden", copy, self._inner.restore_hidden)

    def _hidden(self, verb: str, copy: HiddenCopy, run: Callable[[HiddenCopy], bool]) -> bool:
        return self._acts.enqueue(verb, ((copy.slot, copy.row, copy.logical_slot),), partial(run, copy))

    def drain(self) -> DrainResult:
        return self._acts.drain(self._inner.drain)


def _digest(parts: tuple[Any, ...]) -> str:
    """Eight hexadecimal digits. For telling equal from different, not against anybody."""
    value = 0
    for part in parts:
        data = part.tobytes() if hasattr(part, "tobytes") else repr(part).encode()
        value = crc32(data, value)
    return f"{value:08x}"
