"""Lifecycles as tables: the framework, the runner, and the tables themselves.

``spec``  what a machine is; refuses nonsense at import.
``runner``  fires events on top of ``transitions``.
``step``  what happened, as data.
``document``  a table as JSON values, and its fingerprint.
``request``, ``sequence``, ``coordinator``  the tables.
"""

from context_cache.machines.coordinator import COORDINATOR, EXECUTION, VIEW
from context_cache.machines.document import document, fingerprint
from context_cache.machines.request import REQUEST
from context_cache.machines.runner import Call, Ending, EventRefused, LifecycleError, Runner, Subject
from context_cache.machines.sequence import CAPTURE, CAPTURE_CODES, SEQUENCE, STATE_CODES, ask_table
from context_cache.machines.spec import (
    Couple,
    DeviceAction,
    Drain,
    Guard,
    HostStep,
    MachineSpec,
    Not,
    SpecError,
    State,
    Transition,
    each,
)
from context_cache.machines.step import (
    Difference,
    Firing,
    ListRecorder,
    PartsRecorder,
    Recorder,
    RecorderSwitch,
    Step,
    StepParts,
    Witness,
    compare_steps,
    witnessed_by,
)

ALL_MACHINES = (REQUEST, SEQUENCE, CAPTURE, COORDINATOR, EXECUTION, VIEW)

__all__ = [
    "ALL_MACHINES",
    "CAPTURE",
    "CAPTURE_CODES",
    "COORDINATOR",
    "EXECUTION",
    "REQUEST",
    "SEQUENCE",
    "STATE_CODES",
    "VIEW",
    "Call",
    "Couple",
    "DeviceAction",
    "Difference",
    "Drain",
    "Ending",
    "EventRefused",
    "Firing",
    "Guard",
    "HostStep",
    "LifecycleError",
    "ListRecorder",
    "MachineSpec",
    "Not",
    "PartsRecorder",
    "Recorder",
    "RecorderSwitch",
    "Runner",
    "SpecError",
    "State",
    "Step",
    "StepParts",
    "Subject",
    "Transition",
    "Witness",
    "ask_table",
    "compare_steps",
    "document",
    "each",
    "fingerprint",
    "witnessed_by",
]
