"""The last steps of every request that lives, for the report of a failing test."""

from __future__ import annotations

from collections import deque
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

from context_cache.machines import ALL_MACHINES, RecorderSwitch, Step

__all__ = ["LastSteps"]

_FINAL: Final = {(spec.name, state.name) for spec in ALL_MACHINES for state in spec.states if state.final}


class LastSteps:
    """Steps of what has not ended, coordinator by coordinator. A ``machines.Witness``, one for a whole session.

    A coordinator knows its witnesses from the moment it is made, and a fixture may make one for many tests. So steps
    are kept over the tests, and the report of one shows those of the coordinators that it used.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_switch: WeakKeyDictionary[RecorderSwitch, dict[tuple[str, str], deque[Step]]] = WeakKeyDictionary()
        self._used: WeakSet[RecorderSwitch] = WeakSet()

    def begin_test(self) -> None:
        """From here on coordinators are used by another test."""
        self._used.clear()

    def saw(self, switch: RecorderSwitch, step: Step) -> None:
        self._used.add(switch)
        if step.outcome == "declined":
            return
        subjects = self._by_switch.setdefault(switch, {})
        key = (step.machine, step.subject)
        if (step.machine, step.target) in _FINAL:
            subjects.pop(key, None)
            return
        subjects.setdefault(key, deque(maxlen=self._count)).append(step)

    def report(self) -> str:
        """Steps of live requests, oldest first; empty if there are none."""
        parts: list[str] = []
        for switch, subjects in self._by_switch.items():
            if switch in self._used:
                for (machine, _), steps in subjects.items():
                    if machine == "request":
                        parts += [str(step) for step in steps]
        return "\n".join(parts)
