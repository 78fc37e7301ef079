"""One CUDA device: opening it, its memory, streams and events, and what its errors mean.

Memory comes straight from the driver, not from a pool: giving it back then waits for whatever still uses it, so memory
of a coordinator that ended badly, with copies pending, can never be handed to the next one too early.

After a sticky error (an illegal address, a failed launch) every CUDA call of the process fails. From then on the device
counts as lost: verbs raise without a device call, and nothing is freed. The driver takes it all back at exit.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import BackendUnavailable, DeviceError, DeviceOutOfMemory

__all__ = ["CupyEvent", "CupyStream", "Device", "Owned"]

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY: Final = 2
_INSUFFICIENT_DRIVER: Final = 35
_NO_DEVICE: Final = 100
_NOT_READY: Final = 600
# The context is gone: ECC, NVLink and containment errors, illegal address, launch time-out, destroyed context, assert,
# hardware stack, illegal instruction, misaligned address, address space, program counter, launch failure and its kin.
_STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
_OLDEST: Final = (7, 0)
_INSTALL: Final = "install context-cache-coordinator[cuda13] (CUDA 13) or context-cache-coordinator[cuda12] (CUDA 12)"


class Owned:
    """A CUDA handle or address that is given back when nobody refers to it any more, without ever raising."""

    __slots__ = ("__weakref__", "_device", "_free", "value")

    def __init__(self, device: Device, value: int, free: Callable[[int], Any]) -> None:
        self._device, self.value, self._free = device, value, free

    def __del__(self) -> None:
        try:  # noqa: SIM105 - at the very end of the interpreter, contextlib may be gone, and so may half of the rest
            self._device.give_back(self._free, self.value)
        except Exception:
            pass


class _PinnedMemory:
    """Page-locked host memory that NumPy can look into."""

    def __init__(self, owned: Owned, size: int) -> None:
        self._owned = owned
        self.__array_interface__ = {"data": (owned.value, False), "shape": (size,), "typestr": "|u1", "version": 3}


class CupyStream:
    """A CUDA stream: made by ``CupyBackend.new_stream``, or the runtime's own, given to ``wrap_stream``.

    ptr: the ``cudaStream_t`` as a number.
    """

    __slots__ = ("__weakref__", "_name", "_owner", "ptr", "scratch", "scratch_size")

    def __init__(self, name: str, ptr: int, owner: Any) -> None:
        self._name, self.ptr, self._owner = name, ptr, owner
        # Device memory for host inputs. Used again in the order of this stream only, which is what makes that safe.
        self.scratch: list[Owned] = []
        self.scratch_size = 0

    @property
    def name(self) -> str:
        return self._name

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol: version and pointer, so that cupy and torch can take this stream."""
        return 0, self.ptr

    def __repr__(self) -> str:
        return f"CupyStream({self._name!r}, ptr={self.ptr:#x})"


class CupyEvent:
    """A mark in a stream. Its CUDA event goes back into a pool of the device, without a device call."""

    __slots__ = ("_pool", "handle", "stream_name")

    def __init__(self, handle: int, pool: list[int], stream_name: str) -> None:
        self.handle, self._pool, self.stream_name = handle, pool, stream_name

    def __del__(self) -> None:
        self._pool.append(self.handle)


class Guard:
    """Around one verb: the device is current, and what CUDA reports leaves as a :class:`DeviceError`."""

    __slots__ = ("_device", "_previous", "_stream", "_verb")

    def __init__(self, device: Device, verb: str, stream: str) -> None:
        self._device, self._verb, self._stream = device, verb, stream

    def __enter__(self) -> None:
        device = self._device
        if device.lost is not None:
            raise DeviceError(self._verb, self._stream, device.lost)
        try:
            self._previous = device.runtime.getDevice()
            if self._previous != device.index:
                device.runtime.setDevice(device.index)
        except device.errors as error:
            raise device.explain(self._verb, self._stream, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        device = self._device
        if self._previous != device.index and device.lost is None:
            device.quietly(device.runtime.setDevice, self._previous)
        if error is not None and isinstance(error, device.errors):
            raise device.explain(self._verb, self._stream, error) from error


class Device:
    """The CUDA device number ``index`` (None: the one that is current).

    lost: CUDA's words of the sticky error that was seen, else None.

    Raises BackendUnavailable, in one sentence, without cupy, a driver, a GPU, or one that is new enough.
    """

    def __init__(self, index: int | None = None) -> None:
        self.lost: str | None = None
        self.cupy: Any = _import_cupy()
        self.runtime: Any = self.cupy.cuda.runtime
        count = _count_devices(self.runtime)
        self.index: int = self.runtime.getDevice() if index is None else index
        if not 0 <= self.index < count:
            raise BackendUnavailable(
                f"there is no CUDA device {self.index}, only {count}; choose from 0 to {count - 1}, or change "
                "CUDA_VISIBLE_DEVICES"
            )
        cuda = self.cupy.cuda
        self.errors: tuple[type[Exception], ...] = (
            self.runtime.CUDARuntimeError,
            cuda.driver.CUDADriverError,
            cuda.compiler.CompileException,
            cuda.memory.OutOfMemoryError,
        )
        capability = str(self.cupy.cuda.Device(self.index).compute_capability)
        if (int(capability[:-1]), int(capability[-1])) < _OLDEST:
            raise BackendUnavailable(
                f"CUDA device {self.index} has compute capability {capability[:-1]}.{capability[-1]}, and the kernels "
                "need 7.0 or newer; use a GPU from Volta on, or the host backend"
            )
        self._events: list[int] = []
        try:
            with self.guard("open", "-"):
                pointer = self.runtime.streamCreateWithFlags(self.runtime.streamNonBlocking)
        except DeviceError as error:
            raise BackendUnavailable(
                f"CUDA device {self.index} cannot be opened ({error.cause}); another process may use all of it: see "
                "nvidia-smi, or choose another device with CUDA_VISIBLE_DEVICES"
            ) from error
        self._internal = CupyStream("internal", pointer, None)

    @property
    def internal(self) -> CupyStream:
        """For set-up work of this backend; never waits for a stream of the runtime."""
        return self._internal

    def as_cupy_stream(self, stream: CupyStream) -> Any:
        """The same stream as an object of cupy."""
        cuda = self.cupy.cuda
        # cupy 14 takes the stream protocol; what came before it knows pointers alone.
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.ptr)

    # ---- errors ----

    def guard(self, verb: str, stream: str) -> Guard:
        return Guard(self, verb, stream)

    def explain(self, verb: str, stream: str, error: BaseException) -> DeviceError:
        """What an error of CUDA is to the caller. Notes when the device is lost."""
        status = getattr(error, "status", None)
        cause = self._words(error, status)
        if status in _STICKY:
            self.lose(cause)
        if status == _OUT_OF_MEMORY or isinstance(error, MemoryError | self.errors[3]):
            return DeviceOutOfMemory(verb, stream, cause)
        return DeviceError(verb, stream, cause)

    def _words(self, error: BaseException, status: int | None) -> str:
        text = str(error).strip()
        if status is not None and not text.startswith("cudaError"):
            # The driver has other names for the same numbers; one name for one error.
            try:
                text = str(self.runtime.CUDARuntimeError(status))
            except Exception:
                return text
        return text or type(error).__name__

    def lose(self, cause: str) -> None:
        """No device call from now on."""
        if self.lost is None:
            self.lost = cause
            _log.error("CUDA device %d is lost for this process: %s", self.index, cause)

    def keep_for_ever(self, thing: Any) -> None:
        """The destructor of this object would call the device, also at exit, when it may be lost: it never runs."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def give_back(self, free: Callable[[int], Any], value: int) -> None:
        """For destructors. Never raises; does nothing when the device is lost or the process ends."""
        if self.lost is None and not sys.is_finalizing():
            self.quietly(free, value)

    def quietly(self, call: Callable[[int], Any], value: int) -> None:
        """One call of clean-up, after which nobody asks how it went."""
        try:
            call(value)
        except Exception as error:
            if getattr(error, "status", None) in _STICKY:
                self.lose(str(error))

    # ---- memory ----

    def allocate(self, size: int) -> Owned:
        """Device memory, whatever it holds. Raises DeviceOutOfMemory with the numbers."""
        with self.guard("array", "-"):
            try:
                return Owned(self, self.runtime.malloc(max(size, 1)), self.runtime.free)
            except self.errors as error:
                raise self._out_of_memory(size, error) from error

    def _out_of_memory(self, size: int, error: Exception) -> DeviceError:
        answer = self.explain("array", "-", error)
        if not isinstance(answer, DeviceOutOfMemory):
            return answer
        try:
            free, total = self.runtime.memGetInfo()
        except self.errors:
            return answer
        return DeviceOutOfMemory(
            "array", "-", f"{answer.cause}; {_gib(size)} asked for, {_gib(free)} of {_gib(total)} free"
        )

    def zeroed(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A zeroed array. Waits for the zeroes, on a stream of its own."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        owned = self.allocate(size)
        stream = self._internal.ptr
        with self.guard("array", "-"):
            self.runtime.memsetAsync(owned.value, 0, max(size, 1), stream)
            self.runtime.streamSynchronize(stream)
        return self.view(owned.value, size, owned, shape, kind)

    def view(
        self,
        address: int,
        size: int,
        owner: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None = None,
    ) -> Any:
        """A cupy array over memory that ``owner`` keeps alive."""
        memory = self.cupy.cuda.UnownedMemory(address, max(size, 1), owner, self.index)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray(shape, dtype, pointer, strides=strides)

    def upload(self, values: npt.NDArray[Any]) -> Owned:
        """Device memory with these values; waits for the copy, on a stream of its own."""
        owned = self.allocate(values.nbytes)
        with self.guard("array", "-"):
            stream = self._internal.ptr
            self.runtime.memcpyAsync(
                owned.value, values.ctypes.data, values.nbytes, self.runtime.memcpyHostToDevice, stream
            )
            self.runtime.streamSynchronize(stream)
        return owned

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Zeroed page-locked host memory."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        with self.guard("pinned", "-"):
            pointer = self.runtime.hostAlloc(max(size, 1), self.runtime.hostAllocPortable)
        flat: npt.NDArray[Any] = np.asarray(_PinnedMemory(Owned(self, pointer, self.runtime.freeHost), max(size, 1)))
        flat[:] = 0
        return flat[:size].view(kind).reshape(shape)

    def scratch(self, stream: CupyStream, size: int) -> int:
        """Address of at least ``size`` bytes that belong to this stream. Outgrown ones stay: work may read them."""
        if size > stream.scratch_size:
            grown = max(1 << 16, 1 << (size - 1).bit_length())
            stream.scratch.append(self.allocate(grown))
            stream.scratch_size = grown
        return stream.scratch[-1].value

    # ---- streams and events ----

    def new_stream(self, name: str) -> CupyStream:
        with self.guard("new_stream", name):
            pointer = self.runtime.streamCreateWithFlags(self.runtime.streamNonBlocking)
        return CupyStream(name, pointer, Owned(self, pointer, self.runtime.streamDestroy))

    def record(self, stream: CupyStream) -> CupyEvent:
        with self.guard("record_event", stream.name):
            try:
                handle = self._events.pop()
            except IndexError:
                handle = self.runtime.eventCreateWithFlags(self.runtime.eventDisableTiming)
            event = CupyEvent(handle, self._events, stream.name)
            self.runtime.eventRecord(handle, stream.ptr)
            return event

    def passed(self, event: CupyEvent, verb: str = "event_done") -> bool:
        """Never waits."""
        with self.guard(verb, event.stream_name):
            try:
                status = self.runtime.eventQuery(event.handle)
            except self.runtime.CUDARuntimeError as error:
                status = error.status
            if status == _NOT_READY:
                return False
            if status:
                raise self.runtime.CUDARuntimeError(status)
            return True


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _import_cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise BackendUnavailable(f"cupy is installed without its part {error.name}; {_INSTALL}") from error
        raise BackendUnavailable(f"the package cupy is not installed; {_INSTALL}") from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = lines[0] if lines else type(error).__name__
        raise BackendUnavailable(
            f"cupy is installed and does not load ({words}); {_INSTALL}, whichever this machine has"
        ) from error


def _count_devices(runtime: Any) -> int:
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        raise BackendUnavailable(_why_no_device(runtime, error)) from error
    if count == 0:
        raise BackendUnavailable(_NO_GPU)
    return count


_NO_GPU: Final = (
    "no CUDA GPU is visible to this process; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use the host backend"
)


def _why_no_device(runtime: Any, error: Exception) -> str:
    status = getattr(error, "status", None)
    if status == _NO_DEVICE:
        return _NO_GPU
    if status == _INSUFFICIENT_DRIVER:
        try:
            driver, needed = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
        except Exception:
            driver, needed = 0, 0
        if driver == 0:
            return "no NVIDIA driver was found; install the driver of this machine's GPU, or use the host backend"
        return (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10} and this cupy was built for CUDA "
            f"{needed // 1000}.{needed % 1000 // 10}; install a newer driver, or the cupy of that CUDA: {_INSTALL}"
        )
    return f"CUDA does not start ({error}); check the driver with `nvidia-smi`, or use the host backend"
