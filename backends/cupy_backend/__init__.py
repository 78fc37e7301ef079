"""The CuPy backend: the verbs on one CUDA stream of the runtime, on arrays that are borrowed or allocated here.

Importing this package needs no GPU and no cupy; making a :class:`CupyBackend` does, and says in one sentence what is
missing.
"""

from context_cache.backends.base import BackendUnavailable, DeviceOutOfMemory
from context_cache.backends.cupy_backend.backend import CupyBackend
from context_cache.backends.cupy_backend.device import CupyEvent, CupyStream

__all__ = ["BackendUnavailable", "CupyBackend", "CupyEvent", "CupyStream", "DeviceOutOfMemory"]
