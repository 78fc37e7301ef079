"""A machine's table as plain data: what is committed beside the pictures, compared by a diff, and named by a trace.

The document has everything that a reader of the table sees, in table order. The fingerprint leaves the words out:
two tables with one fingerprint behave the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from context_cache.machines.spec import Couple, DeviceAction, Drain, HostStep, MachineSpec, State, Step, Transition

__all__ = ["FORMAT", "Document", "document", "fingerprint"]

FORMAT: Final = 1
"""Version of the document's shape."""

Document: TypeAlias = dict[str, Any]

_WORDS: Final = frozenset({"meaning", "holds", "region"})


def document(spec: MachineSpec) -> Document:
    """``spec`` as JSON values: ``format, name, initial, follows, states, rows``, everything in table order.

    A state has ``name, phase, region, meaning, holds, outstanding, final, on_enter``; a row ``row`` (its number),
    ``event, source, target, guards`` (as ``name`` or ``not name``), ``steps, failure_steps, publish_failure_steps,
    on_failure, on_drain_failure, on_publish_failure, work_ended, hot``. A step is ``{"kind": ..., "name": ...}`` with
    the kinds ``host``, ``publish``, ``enqueue``, ``clear``, ``wait`` and ``couple``.
    """
    return {
        "format": FORMAT,
        "name": spec.name,
        "initial": spec.initial,
        "follows": spec.follows,
        "states": [_state(state) for state in spec.states],
        "rows": [_row(number, row) for number, row in enumerate(spec.transitions)],
    }


def fingerprint(spec: MachineSpec) -> str:
    """32 hexadecimal digits that change with whatever the machine does, and not with how its states are described."""
    plain = document(spec)
    plain["states"] = [
        {key: value for key, value in state.items() if key not in _WORDS} for state in plain["states"]
    ]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _state(state: State) -> Document:
    return {
        "name": state.name,
        "phase": state.phase,
        "region": state.region,
        "meaning": state.meaning,
        "holds": state.holds,
        "outstanding": state.outstanding,
        "final": state.final,
        "on_enter": _steps(state.on_enter),
    }


def _row(number: int, row: Transition) -> Document:
    return {
        "row": number,
        "event": row.event,
        "source": row.source,
        "target": row.target,
        "guards": [str(guard) for guard in row.guards],
        "steps": _steps(row.steps),
        "failure_steps": _steps(row.failure_steps),
        "publish_failure_steps": _steps(row.publish_failure_steps),
        "on_failure": row.on_failure,
        "on_drain_failure": row.on_drain_failure,
        "on_publish_failure": row.on_publish_failure,
        "work_ended": row.work_ended,
        "hot": row.hot,
    }


def _steps(steps: Iterable[Step]) -> list[Document]:
    return [{"kind": _kind(step), "name": step.name} for step in steps]


def _kind(step: Step) -> str:
    match step:
        case HostStep():
            return "publish" if step.publishes else "host"
        case DeviceAction():
            return "clear" if step.clears else "enqueue"
        case Drain():
            return "wait"
        case Couple():
            return "couple"
