"""Devices: the protocol of verbs, the host backend with its stream that runs late, and wrappers for tests."""

from context_cache.backends.base import (
    Backend,
    BackendUnavailable,
    DeviceArray,
    DeviceError,
    DeviceOutOfMemory,
    DrainResult,
    Event,
    LifecycleDevice,
    Stream,
    Synchronizer,
    drain_with,
)
from context_cache.backends.faults import FaultyBackend, FaultySynchronizer
from context_cache.backends.hazards import HazardError, HazardMonitor
from context_cache.backends.host import HostBackend, HostEvent, HostStream
from context_cache.backends.recording import RecordingBackend
from context_cache.backends.staging import StagingRing

__all__ = [
    "Backend",
    "BackendUnavailable",
    "DeviceArray",
    "DeviceError",
    "DeviceOutOfMemory",
    "DrainResult",
    "Event",
    "FaultyBackend",
    "FaultySynchronizer",
    "HazardError",
    "HazardMonitor",
    "HostBackend",
    "HostEvent",
    "HostStream",
    "LifecycleDevice",
    "RecordingBackend",
    "StagingRing",
    "Stream",
    "Synchronizer",
    "drain_with",
]
