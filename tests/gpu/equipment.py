"""The CuPy backend as the suites that were written for the host backend see it.

Those tests look into device arrays with NumPy, write into them, and enqueue Python functions as the model's work. Here
that works too: an array that reads and writes through the host, and a stream on which a Python function runs at once,
after everything that was enqueued before. What only a stream that runs late can show (its pending work, holding it)
skips with the reason. Only this file and the tests beside it know cupy; it is loaded by path, because test modules
cannot import each other.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from context_cache.backends.cupy_backend import BackendUnavailable, CupyBackend, CupyStream

NOT_LATE = "needs the host stream, which runs late and can be looked into; a CUDA stream runs by itself"


def unavailable() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        CupyBackend()
    except BackendUnavailable as error:
        return str(error)
    return None


class LookingStream(CupyStream):
    """A CUDA stream with the parts of ``HostStream`` that make sense on it."""

    def __init__(self, backend: Any, made: CupyStream) -> None:
        super().__init__(made.name, made.ptr, made)
        self._backend = backend

    def enqueue(self, work: Any, label: str) -> None:
        self._backend.synchronize(self)
        work()

    def run(self, count: int | None = None) -> None:
        if count is not None:
            pytest.skip(NOT_LATE)
        self._backend.synchronize(self)

    def let_go(self) -> None:
        """Nothing was held."""

    def hold(self) -> None:
        pytest.skip(NOT_LATE)

    @property
    def pending(self) -> tuple[str, ...]:
        pytest.skip(NOT_LATE)

    completed = position = held = pending


def _array_class(backend: Any) -> Any:
    base = backend.cupy.ndarray

    class LookingArray(base):
        """Reads and comparisons happen on the host, on a copy; writes wait until they are done."""

        def host(self) -> np.ndarray:
            backend.settle()
            return backend.to_host(self)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.host() if dtype is None else self.host().astype(dtype)

        def __setitem__(self, key: Any, value: Any) -> None:
            target = self[key]
            values = np.broadcast_to(np.asarray(value), target.shape).astype(target.dtype)
            if target.size:
                backend.write(target, np.ascontiguousarray(values))

        @property
        def ctypes(self) -> Any:
            return SimpleNamespace(data=self.data.ptr)

        def copy(self, order: str = "C") -> np.ndarray:
            return self.host()

    def through_host(name: str) -> Any:
        return lambda self, *arguments: getattr(self.host(), name)(*arguments)

    def compared(how: Any) -> Any:
        return lambda self, other: how(self.host(), np.asarray(other))

    for name in ("tolist", "tobytes", "all", "any", "item", "__int__", "__float__", "__bool__"):
        setattr(LookingArray, name, through_host(name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(LookingArray, f"__{name}__", compared(getattr(operator, name)))
    LookingArray.__hash__ = None  # type: ignore[assignment]
    return LookingArray


class LookingBackend(CupyBackend):
    """A CuPy backend whose arrays and streams the tests can look into."""

    def __init__(self) -> None:
        super().__init__()
        self._class = _array_class(self)

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        return super().array(shape, dtype).view(self._class)

    def settle(self) -> None:
        """Expressions of cupy run on its current stream."""
        self.cupy.cuda.get_current_stream().synchronize()

    def write(self, target: Any, values: np.ndarray) -> None:
        plain = target.view(self.cupy.ndarray)
        plain[...] = self.cupy.asarray(values)
        self.settle()

    def new_stream(self, name: str = "cupy") -> LookingStream:
        return LookingStream(self, super().new_stream(name))
