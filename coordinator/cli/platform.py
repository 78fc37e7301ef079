"""Where a run happens: a backend, the stream of the model, and how the embedded model reaches device memory.

The embedded model computes on the host. What it reads and writes of the coordinator's memory lies where the backend put
it: on the host backend an array is used as it is, on a GPU each access is a copy to or from the device, so that a
wrong page-table row, length or snapshot on the device shows as it would in a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from attrs import frozen

from context_cache.backends import Backend, BackendUnavailable, HostBackend
from context_cache.backends.host import HostStream

__all__ = ["Platform", "open_platform"]


class Platform(Protocol):
    """What a run needs of the place where it happens."""

    @property
    def backend(self) -> Backend:
        """Allocates, and runs the coordinator's verbs."""

    @property
    def stream(self) -> Any:
        """The stream of the model and of the coordinator."""

    def enqueue(self, work: Callable[[], None], label: str) -> None:
        """Run a function of the model in the order of the stream."""

    def view(self, array: Any) -> Any:
        """A device array that functions of the model index and assign to with NumPy arrays."""


@frozen
class HostPlatform:
    """The host backend: arrays are NumPy's, and functions run when the stream does."""

    backend: HostBackend
    stream: HostStream

    def enqueue(self, work: Callable[[], None], label: str) -> None:
        self.stream.enqueue(work, label)

    def view(self, array: Any) -> Any:
        return array


@frozen
class CupyPlatform:
    """One GPU. A function of the model runs on the host as soon as all that was enqueued before it is done."""

    backend: Any
    stream: Any

    def enqueue(self, work: Callable[[], None], label: str) -> None:
        self.backend.synchronize(self.stream)
        work()
        # The coordinator's stream does not wait for the one on which the views copied.
        self.backend.cupy.cuda.get_current_stream().synchronize()

    def view(self, array: Any) -> Any:
        return _View(self.backend.cupy, array)


class _View:
    """An array of the device, indexed and assigned to from the host."""

    __slots__ = ("_array", "_cupy")

    def __init__(self, cupy: Any, array: Any) -> None:
        self._cupy, self._array = cupy, array

    def _key(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(self._key(part) for part in key)
        if isinstance(key, np.ndarray):
            return self._cupy.asarray(key)
        return int(key) if isinstance(key, np.integer) else key

    def __getitem__(self, key: Any) -> Any:
        found = self._cupy.asnumpy(self._array[self._key(key)])
        return found if found.ndim else found[()]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array[self._key(key)] = self._cupy.asarray(value, dtype=self._array.dtype)


def open_platform(name: str) -> Platform:
    """The platform behind ``--backend``: host, cupy, or auto for the best one that works here.

    Raises BackendUnavailable for cupy where something is missing: one sentence, with what to install.
    """
    if name != "host":
        try:
            return _open_cupy()
        except BackendUnavailable:
            if name == "cupy":
                raise
    backend = HostBackend()
    return HostPlatform(backend, backend.new_stream("embedded"))


def _open_cupy() -> CupyPlatform:
    from context_cache.backends.cupy_backend import CupyBackend

    backend = CupyBackend()
    return CupyPlatform(backend, backend.new_stream("embedded"))
