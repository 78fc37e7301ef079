"""Traces: a coordinator's memory of what happened, and doing it again.

``format``    what a line is.
``recorder``  :class:`TraceRecorder`, given to a coordinator.
"""

from context_cache.coordinator.traces.recorder import TraceRecorder

__all__ = ["TraceRecorder"]
