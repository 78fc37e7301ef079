"""The verbs of ``backends.base.Backend`` on a CUDA device.

What each enqueues: a copy of its host inputs, if it has any, and one kernel or one copy; the number of layers, rows and
slots does not matter. Host inputs that lie in one staging buffer travel in one copy, others in one each. Nothing here
waits but ``synchronize``, ``wait_event``, and memory being made or given back.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import DeviceArray, Int32Array
from context_cache.backends.cupy_backend.device import CupyEvent, CupyStream, Device, Guard
from context_cache.backends.cupy_backend.kernels import Kernels
from context_cache.backends.cupy_backend.plans import Plans

__all__ = ["CupyBackend"]

# Types that torch has and NumPy has not: bytes as they are.
_STORAGE: Final = {"bfloat16": "uint16"}
_POLL_SECONDS: Final = 50e-6
# Host inputs of one staging buffer travel together, if the gaps between them are at most this many bytes.
_GAPS: Final = 1 << 16

Tensors = tuple[DeviceArray, ...]


class CupyBackend:
    """Verbs on one CUDA device.

    device: number of the device; None: the one that is current.

    Streams come from :meth:`new_stream` or :meth:`wrap_stream`, arrays from :meth:`array` or :meth:`borrow`. Raises
    BackendUnavailable where there is no cupy, no driver or no GPU that is new enough.
    """

    name = "cupy"

    def __init__(self, device: int | None = None) -> None:
        self._device = Device(device)
        self._kernels = Kernels(self._device)
        self._plans = Plans(self._device)

    @property
    def device(self) -> int:
        """Number of the device."""
        return self._device.index

    @property
    def cupy(self) -> Any:
        """The module cupy, for whoever works with the arrays."""
        return self._device.cupy

    @property
    def lost(self) -> str | None:
        """CUDA's words of the sticky error after which this process cannot use the device; None: all is well."""
        return self._device.lost

    # ---- arrays ----

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """A zeroed array in memory of its own. Raises DeviceOutOfMemory."""
        return self._device.zeroed(shape, dtype)

    def borrow(self, obj: Any) -> DeviceArray:
        """A cupy array over the memory of ``obj``, which it keeps alive; nothing is copied.

        obj: a cupy array, a torch tensor, or anything with ``__cuda_array_interface__`` or DLPack. Types of torch that
        NumPy does not have come as unsigned integers of their size (bfloat16 as uint16, the float8 types as uint8).
        Raises TypeError for anything else and ValueError for memory of another device.
        """
        cupy = self._device.cupy
        if isinstance(obj, cupy.ndarray):
            array = obj
        elif "torch" in sys.modules and isinstance(obj, sys.modules["torch"].Tensor):
            array = self._borrow_torch(obj)
        elif hasattr(obj, "__cuda_array_interface__"):
            array = self._borrow_interface(obj, obj)
        elif hasattr(obj, "__dlpack__"):
            with self._guard_named("borrow"):
                array = cupy.from_dlpack(obj)
        else:
            raise TypeError(f"borrow: {type(obj).__name__} has neither __cuda_array_interface__ nor __dlpack__")
        if array.size and int(array.data.device_id) != self.device:
            raise ValueError(f"borrow: the memory is on device {array.data.device_id}, this backend on {self.device}")
        return array

    def _borrow_torch(self, tensor: Any) -> DeviceArray:
        if not tensor.is_cuda:
            raise TypeError(f"borrow: the torch tensor is on {tensor.device}, not on a CUDA device")
        torch = sys.modules["torch"]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        name = str(tensor.dtype).removeprefix("torch.")
        dtype = "uint8" if name.startswith("float8") else _STORAGE.get(name, name)
        # The bits travel as integers, because cupy does not know every type of torch.
        return self._borrow_interface(tensor.detach().view(bits), tensor).view(dtype)

    def _borrow_interface(self, obj: Any, owner: Any) -> DeviceArray:
        interface = obj.__cuda_array_interface__
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = interface.get("strides")
        address = int(interface["data"][0])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if strides is not None and size:
            size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step > 0)
        if size:
            with self._guard_named("borrow"):
                where = int(self._device.runtime.pointerGetAttributes(address).device)
            if where != self.device:
                raise ValueError(f"borrow: the memory is on device {where}, this backend on {self.device}")
        return self._device.view(address, size, owner, shape, dtype, None if strides is None else tuple(strides))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Page-locked host memory of its own, zeroed. It is freed only when nothing reads it any more."""
        return self._device.pinned(shape, dtype)

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        with self._guard_named("to_host"), self._device.as_cupy_stream(self._device.internal):
            copy: npt.NDArray[Any] = self._device.cupy.asnumpy(array)
            return copy

    # ---- streams and events ----

    def new_stream(self, name: str = "cupy") -> CupyStream:
        """A non-blocking stream. The first stream of a backend also compiles and loads the kernels."""
        self._kernels.load()
        return self._device.new_stream(name)

    def wrap_stream(self, stream: Any, name: str = "runtime") -> CupyStream:
        """The runtime's own stream: a cupy or torch stream, anything with ``__cuda_stream__``, or the pointer.

        Wrap it once and give the result to the coordinator: streams are compared by identity. The original is kept
        alive; a bare pointer is the caller's to keep.
        """
        self._kernels.load()
        if isinstance(stream, CupyStream):
            return stream
        if isinstance(stream, int) and not isinstance(stream, bool):
            pointer = stream
        elif hasattr(stream, "cuda_stream"):
            pointer = stream.cuda_stream
        elif hasattr(stream, "ptr"):
            pointer = stream.ptr
        elif hasattr(stream, "__cuda_stream__"):
            pointer = stream.__cuda_stream__()[1]
        else:
            raise TypeError(f"wrap_stream: {type(stream).__name__} is no CUDA stream and no pointer to one")
        return CupyStream(name, int(pointer), stream)

    def record_event(self, stream: CupyStream) -> CupyEvent:
        return self._device.record(_stream(stream))

    def event_done(self, event: CupyEvent) -> bool:
        return self._device.passed(event)

    def wait_event(self, event: CupyEvent) -> None:
        with self._device.guard("wait_event", event.stream_name):
            self._device.runtime.eventSynchronize(event.handle)

    def synchronize(self, stream: CupyStream, timeout: float | None = None) -> bool:
        if timeout is None:
            with self._verb("synchronize", stream):
                self._device.runtime.streamSynchronize(stream.ptr)
            return True
        deadline = time.monotonic() + timeout
        event = self._device.record(_stream(stream))
        while not self._device.passed(event, "synchronize"):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    # ---- page table and lengths ----

    def upload_rows(
        self,
        table: DeviceArray,
        staged_ids: Int32Array,
        staged_slots: Int32Array,
        num_pages: int,
        stream: CupyStream,
    ) -> None:
        with self._verb("upload_rows", stream):
            rows, width = staged_ids.shape
            to = _table(table, width)
            if rows:
                ids, slots = self._send(stream, staged_ids, staged_slots)
                self._kernels.flat("upload_rows", rows * width, (to, ids, slots, rows, width, num_pages), stream)

    def reset_lengths(self, lengths: DeviceArray, staged: Int32Array, stream: CupyStream) -> None:
        with self._verb("reset_lengths", stream):
            self._copy_in(_ints(lengths, staged.size, "lengths"), _host_ints(staged), staged.nbytes, stream)

    def upload_mapping(self, tensor: DeviceArray, staged: Int32Array, stream: CupyStream) -> None:
        with self._verb("upload_mapping", stream):
            self._copy_in(_ints(tensor, staged.size, "mapping"), _host_ints(staged), staged.nbytes, stream)

    def compact_lengths(self, lengths: DeviceArray, mapping: DeviceArray, old_size: int, stream: CupyStream) -> None:
        with self._verb("compact_lengths", stream):
            to, via = _device_ints(lengths, old_size, "lengths"), _device_ints(mapping, old_size, "mapping")
            if old_size:
                self._kernels.compact(to, via, old_size, stream)

    def copy_lengths(self, lengths: DeviceArray, source: DeviceArray, count: int, stream: CupyStream) -> None:
        with self._verb("copy_lengths", stream):
            copy = self._copy_in if isinstance(source, np.ndarray) else self._copy
            copy(_ints(lengths, count, "lengths"), _ints(source, count, "source"), 4 * count, stream)

    def add_lengths(self, lengths: DeviceArray, increments: DeviceArray | int, count: int, stream: CupyStream) -> None:
        with self._verb("add_lengths", stream):
            to = _device_ints(lengths, count, "lengths")
            if isinstance(increments, int | np.integer | np.ndarray) and np.ndim(increments) == 0:
                each, scalar = 0, int(increments)
            elif isinstance(increments, np.ndarray):
                _ints(increments, count, "increments")
                (each,), scalar = self._send(stream, increments[:count]), 0
            else:
                each, scalar = _device_ints(increments, count, "increments"), 0
            if count:
                self._kernels.flat("add_lengths", count, (to, each, scalar, count), stream)

    def gather_rows(
        self, dest: DeviceArray, table: DeviceArray, slots: DeviceArray, count: int, stream: CupyStream
    ) -> None:
        with self._verb("gather_rows", stream):
            width = int(np.prod(table.shape[1:], dtype=np.int64))
            to, source = _device_ints(dest, count * width, "dest"), _device_ints(table, 0, "table")
            via = _device_ints(slots, count, "slots")
            if count:
                self._kernels.flat("gather_rows", count * width, (to, source, via, count, width), stream)

    # ---- recurrent state and snapshots ----

    def clear_resident_row(self, tensors: Tensors, slot: int, stream: CupyStream) -> None:
        with self._verb("clear_resident_row", stream):
            self._zero(tensors, 0, int(slot), 1, stream)

    def zero_rows(self, tensors: Tensors, rows: Int32Array, stream: CupyStream) -> None:
        with self._verb("zero_rows", stream):
            if tensors and rows.size:
                (at,) = self._send(stream, rows)
                self._zero(tensors, at, 0, rows.size, stream)

    def _zero(self, tensors: Tensors, rows: int, single: int, count: int, stream: CupyStream) -> None:
        if tensors and count:
            plan = self._plans.rows(tensors)
            arguments = (plan.address, plan.tensors, rows, single, count)
            self._kernels.parts("zero_rows", plan.size, count, plan.tensors, arguments, stream)

    def copy_rows(
        self,
        dest_tensors: Tensors,
        dest_rows: Int32Array,
        source_tensors: Tensors,
        source_rows: Int32Array,
        stream: CupyStream,
    ) -> None:
        with self._verb("copy_rows", stream):
            if dest_tensors and dest_rows.size:
                plan = self._plans.pairs(dest_tensors, source_tensors)
                to, source = self._send(stream, dest_rows, source_rows)
                arguments = (plan.address, plan.tensors, to, source, dest_rows.size)
                self._kernels.parts("copy_rows", plan.size, dest_rows.size, plan.tensors, arguments, stream)

    def capture_pages(
        self,
        slabs: Tensors,
        slots: Int32Array,
        pools: Tensors,
        pages: Int32Array,
        tokens: Int32Array,
        stream: CupyStream,
    ) -> None:
        with self._verb("capture_pages", stream):
            self._copy_pages(slabs, slots, pools, pages, tokens, 1, stream)

    def restore_pages(
        self,
        pools: Tensors,
        pages: Int32Array,
        slabs: Tensors,
        slots: Int32Array,
        tokens: Int32Array,
        stream: CupyStream,
    ) -> None:
        with self._verb("restore_pages", stream):
            self._copy_pages(slabs, slots, pools, pages, tokens, 0, stream)

    def _copy_pages(
        self,
        slabs: Tensors,
        slots: Int32Array,
        pools: Tensors,
        pages: Int32Array,
        tokens: Int32Array,
        to_slab: int,
        stream: CupyStream,
    ) -> None:
        if not slabs or not slots.size:
            return
        plan = self._plans.pages(slabs, pools)
        at = self._send(stream, slots, pages, tokens)
        arguments = (plan.address, plan.tensors, *at, slots.size, to_slab)
        share = self._kernels.parts_of_a_page
        self._kernels.parts("copy_pages", plan.size, slots.size, 2 * plan.tensors, arguments, stream, share)

    def copy_row(
        self, dest: DeviceArray, dest_row: int, source: DeviceArray, source_row: int, stream: CupyStream
    ) -> None:
        with self._verb("copy_row", stream):
            size = _row_bytes(dest)
            if size != _row_bytes(source):
                raise ValueError(f"copy_row: rows of {size} and {_row_bytes(source)} bytes do not match")
            if not 0 <= dest_row < dest.shape[0] or not 0 <= source_row < source.shape[0]:
                raise ValueError(f"copy_row: rows {dest_row} and {source_row} of {dest.shape} and {source.shape}")
            to = int(dest.data.ptr) + int(dest_row) * int(dest.strides[0])
            self._copy(to, int(source.data.ptr) + int(source_row) * int(source.strides[0]), size, stream)

    # ---- the parts of a verb ----

    def _verb(self, name: str, stream: CupyStream) -> Guard:
        return self._device.guard(name, _stream(stream).name)

    def _guard_named(self, name: str) -> Guard:
        return self._device.guard(name, "-")

    # The kinds are named, so that an address of the wrong side is an error of CUDA and not a fault of the process.
    def _copy(self, dest: int, source: int, size: int, stream: CupyStream) -> None:
        if size:
            runtime = self._device.runtime
            runtime.memcpyAsync(dest, source, size, runtime.memcpyDeviceToDevice, stream.ptr)

    def _copy_in(self, dest: int, source: int, size: int, stream: CupyStream) -> None:
        if size:
            runtime = self._device.runtime
            runtime.memcpyAsync(dest, source, size, runtime.memcpyHostToDevice, stream.ptr)

    def _send(self, stream: CupyStream, *arrays: Int32Array) -> list[int]:
        """Enqueue copies of host arrays into the stream's scratch memory; their addresses there."""
        sources = [_host_ints(array) for array in arrays]
        first = min(sources)
        span = max(source + array.nbytes for source, array in zip(sources, arrays, strict=True)) - first
        base, needed = arrays[0].base, sum(array.nbytes for array in arrays)
        if base is not None and span - needed <= _GAPS and all(one.base is base for one in arrays):
            at = self._device.scratch(stream, span)
            self._copy_in(at, first, span, stream)
            return [at + source - first for source in sources]
        size = sum(_aligned(array.nbytes) for array in arrays)
        at = self._device.scratch(stream, size)
        places = []
        for source, array in zip(sources, arrays, strict=True):
            self._copy_in(at, source, array.nbytes, stream)
            places.append(at)
            at += _aligned(array.nbytes)
        return places


def _stream(stream: Any) -> CupyStream:
    if not isinstance(stream, CupyStream):
        raise TypeError(
            f"{type(stream).__name__} is no stream of the CuPy backend; use backend.new_stream() or "
            "backend.wrap_stream(stream)"
        )
    return stream


def _aligned(size: int) -> int:
    return (size + 255) // 256 * 256


def _host_ints(array: Int32Array) -> int:
    """Address of a staged array."""
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError(f"host inputs are contiguous int32 arrays, got {array.dtype} with strides {array.strides}")
    return int(array.ctypes.data)


def _ints(array: DeviceArray, count: int, what: str) -> int:
    """Address of at least ``count`` contiguous int32, on the device, or on the host where a plain copy follows."""
    if array.dtype != np.int32 or not array.flags.c_contiguous or array.size < count:
        raise ValueError(f"{what}: at least {count} contiguous int32 are needed, got {array.dtype}{array.shape}")
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _device_ints(array: DeviceArray, count: int, what: str) -> int:
    """The same for a kernel, which would end this process's use of the device if it were given host memory."""
    if isinstance(array, np.ndarray):
        raise ValueError(f"{what}: an array on the device is needed, got one of NumPy; copy it there first")
    return _ints(array, count, what)


def _table(table: DeviceArray, width: int) -> int:
    """Address of a page table with rows of this width."""
    if tuple(table.shape[1:]) != (2, width):
        raise ValueError(f"table: rows of (2, {width}) are needed, got an array of {table.shape}")
    return _ints(table, 0, "table")


def _row_bytes(array: DeviceArray) -> int:
    width, item = int(array.shape[1]), int(array.itemsize)
    if array.ndim != 2 or int(array.strides[1]) != item:
        raise ValueError(f"copy_row: two-dimensional arrays with rows in one piece are needed, got {array.shape}")
    return width * item
