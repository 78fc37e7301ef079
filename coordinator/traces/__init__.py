"""Traces: a coordinator's memory of what happened, and doing it again.

``format``    what a line is.
``recorder``  :class:`TraceRecorder`, given to a coordinator.
``timings``   the times beside a trace. ``perfetto``: a picture of them. ``spans``: OpenTelemetry, also live.
"""

from context_cache.coordinator.traces.recorder import TraceRecorder

__all__ = ["TraceRecorder"]
