"""Equipment for the tests of the tables: call objects that do as a script says, and write down what was asked of them.

Test modules cannot import this file (``--import-mode=importlib``); they ask for the fixtures ``scripted_call`` (the
class) and ``make_call`` (the right call object for any machine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from context_cache.backends.base import DeviceError, DrainResult, HiddenCopy, SnapshotCopies
from context_cache.machines import MachineSpec

HOST_VERBS = frozenset(
    "take_leases bind_rows bind_joiner unbind_joiner release_joiner grow apply_advances freeze release_hit_pins "
    "stage_captures mark_captured publish publish_frozen retire_reservations unbind_retired retire unbind_rows release "
    "withhold hold_token free_token own_view drop_view drain".split()
)
DEVICE_VERBS = frozenset(
    "upload_base_rows upload_draft_rows reset_base_lengths reset_draft_lengths install_base_lengths "
    "install_draft_lengths compact_base_lengths compact_draft_lengths copy_mapping clear_resident_state zero_recurrent "
    "restore_recurrent restore_partial restore_hidden capture_recurrent capture_partial capture_hidden".split()
)


class _ScriptedDevice:
    """The device of a scripted call: it has the verbs of a device and no other."""

    def __init__(self, call: ScriptedCall) -> None:
        self._call = call

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb in DEVICE_VERBS:
            return partial(self._call.do, verb)
        raise AttributeError(verb)


class ScriptedCall:
    """Stands in for a call object of any row.

    facts:   guard name -> whether it holds. Every look is kept in ``looked``.
    script:  number of the verb, counted from 0 -> what it does instead of succeeding: an exception is raised, a
             ``DrainResult`` is returned, a function is called.
    refuses: couplings that no machine takes. All others are taken.
    idle:    verbs that find nothing to do.
    paired:  whether the request has paged draft state, so that the actions for the draft are taken.

    ``log`` holds the verbs and the couplings offered (``machine.event``), in order; ``arguments`` what a verb got.
    """

    def __init__(
        self,
        facts: Mapping[str, bool] | None = None,
        script: Mapping[int, Any] | None = None,
        *,
        refuses: Iterable[str] = (),
        idle: Iterable[str] = (),
        paired: bool = True,
    ) -> None:
        self.paired = paired
        self.facts = dict(facts or {})
        self.script = dict(script or {})
        self.refuses, self.idle = frozenset(refuses), frozenset(idle)
        self.slots: tuple[int, ...] = (0, 2)
        self.lengths = np.array([5, 7], np.int32)
        self.draft_lengths = np.array([4, 6], np.int32)
        self.captures = SnapshotCopies(slots=(1,), rows=(0,))
        self.restores = SnapshotCopies(slots=(2,), rows=(3,))
        self.hidden = HiddenCopy(slot=1, tensor="the caller's hidden states", row=8, logical_slot=0)
        self.mapping = np.array([0, -1, 1], np.int32)
        self.mapping_tensor = "the caller's tensor"
        self.new_size = 2
        self.retired_residents = (4,)
        self.device = _ScriptedDevice(self)
        self.log: list[str] = []
        self.looked: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.clearing_errors: list[DeviceError] = []
        self._verbs = 0

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("facts", {}):
            self.looked.append(name)
            return self.facts[name]
        if name in HOST_VERBS:
            return partial(self.do, name)
        raise AttributeError(name)

    def do(self, verb: str, *arguments: Any) -> Any:
        number, self._verbs = self._verbs, self._verbs + 1
        self.log.append(verb)
        self.arguments[verb] = arguments
        act = self.script.get(number)
        if isinstance(act, BaseException):
            raise act
        if isinstance(act, DrainResult):
            assert verb == "drain", f"the script wants verb {number} to be the drain, it is {verb}"
            return act
        if act is not None:
            act()
        if verb == "drain":
            return DrainResult(ok=True)
        if verb in self.idle:
            return False
        return True if verb in DEVICE_VERBS else None

    def couple(self, machine: str, event: str) -> bool:
        self.log.append(f"{machine}.{event}")
        return f"{machine}.{event}" not in self.refuses

    def clearing_failed(self, error: DeviceError) -> None:
        self.clearing_errors.append(error)


class Asked(int):
    """A call of the sequence or of the capture table, whose guards look at the bits of a number."""

    slots = (0,)

    def __init__(self, ask: int) -> None:
        self.log: list[str] = []


@pytest.fixture(scope="session")
def scripted_call() -> type[ScriptedCall]:
    return ScriptedCall


@pytest.fixture(scope="session")
def make_call() -> Callable[..., Any]:
    """``make_call(spec, {"view_current": True}, {2: DeviceError(...)})``."""

    def make(spec: MachineSpec, facts: Mapping[str, bool] | None = None, script: Any = None, **options: Any) -> Any:
        known = facts or {}
        if spec.name == "sequence":
            return Asked(known.get("brings_tokens", False) + 2 * known.get("named", False))
        if spec.name == "capture":
            return Asked(known.get("reservation_granted", False))
        return ScriptedCall(facts, script, **options)

    return make
