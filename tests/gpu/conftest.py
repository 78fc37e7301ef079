"""What the tests on a GPU share. Without a GPU, everything that asks for ``backend`` skips and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def backend(equipment: Any) -> Any:
    """A CuPy backend whose arrays the tests can look into."""
    reason = equipment.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return equipment.LookingBackend()


@pytest.fixture
def stream(backend: Any) -> Any:
    return backend.new_stream("test")


@pytest.fixture
def cupy(backend: Any) -> Any:
    return backend.cupy


@pytest.fixture
def put(backend: Any) -> Callable[[np.ndarray], Any]:
    """Copies of host arrays on the device."""

    def copy(values: np.ndarray) -> Any:
        array = backend.array(values.shape, str(values.dtype))
        array[...] = values
        return array

    return copy


_SPIN = r"""
extern "C" __global__ void spin(const volatile int* go, long long limit) {
    const long long start = clock64();
    while (*go == 0 && clock64() - start < limit) {
    }
}
"""


class Spinner:
    """Keeps a stream busy until ``stop``, or for about twenty seconds, lest a failed test hang."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._go = backend.pinned((1,), "int32")
        self._kernel = backend.cupy.RawKernel(_SPIN, "spin")
        # Loading code may wait for running kernels, so the first launch is one that ends at once.
        self._go[0] = 1
        warm = backend.new_stream("warm-up")
        self._kernel((1,), (1,), (self._go.ctypes.data, 1), stream=warm)
        backend.synchronize(warm)

    def start(self, stream: Any) -> None:
        self._go[0] = 0
        self._kernel((1,), (1,), (self._go.ctypes.data, 40_000_000_000), stream=stream)

    def stop(self) -> None:
        self._go[0] = 1


@pytest.fixture
def spinner(backend: Any) -> Iterator[Spinner]:
    made = Spinner(backend)
    yield made
    made.stop()
    backend.cupy.cuda.runtime.deviceSynchronize()
