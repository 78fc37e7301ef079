"""Traces: a coordinator's memory of what happened, and doing it again.

``format``     what a line is. ``recorder``, ``steady``, ``encode``, ``doors``, ``identities``, ``journal``: writing.
``reader``     reading, with care. ``replay``, ``again``, ``stage``: making the calls again and comparing.
``shrink``     making a failing trace small. ``describe``: records in words.
``timings``    the times beside a trace. ``perfetto``: a picture of them. ``spans``: OpenTelemetry, also live.

Reading and writing lines needs msgspec, which the extra ``cli`` brings.
"""

from importlib.util import find_spec

if find_spec("msgspec") is None:
    raise ImportError(
        "traces need msgspec, which a bare installation leaves out; install context-cache-coordinator[cli]"
    )

from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.recorder import TraceRecorder
from context_cache.coordinator.traces.replay import ReplayResult, replay

__all__ = ["ReplayResult", "TraceError", "TraceRecorder", "replay"]
