"""The kernels of ``kernels.cu``: compiled once per device, all loaded together, launched by name."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from context_cache.backends.base import BackendUnavailable
from context_cache.backends.cupy_backend.device import CupyStream, Device

__all__ = ["Kernels"]

_SOURCE: Final = "kernels.cu"
_NAMES: Final = ("upload_rows", "compact_lengths", "add_lengths", "gather_rows", "zero_rows", "copy_rows", "copy_pages")
# Arguments with a count of 0, for the launch that makes the driver load the code.
_EMPTY: Final = {
    "upload_rows": (0, 0, 0, 0, 1, 0),
    "compact_lengths": (0, 0, 0),
    "add_lengths": (0, 0, 0, 0),
    "gather_rows": (0, 0, 0, 0, 1),
    "zero_rows": (0, 0, 0, 0, 0, 16),
    "copy_rows": (0, 0, 0, 0, 0, 16),
    "copy_pages": (0, 0, 0, 0, 0, 0, 0, 16),
}

THREADS: Final = 256
_COMPACT_THREADS: Final = 1024
_COMPACT_ITEMS: Final = 4
_GRID_LIMIT: Final = 65535  # of the second and the third dimension

Arguments = tuple[int, ...]


class Kernels:
    """Launches on one device.

    chunk: bytes of one part of a copy, a multiple of 16. parts_of_a_page: how many of them a block takes at most, where
    copies may be shorter than the grid is wide.
    """

    def __init__(self, device: Device, *, chunk: int = 1 << 13) -> None:
        self._device = device
        self._functions: dict[str, Any] = {}
        self.chunk = chunk
        self.parts_of_a_page = 3

    def load(self) -> None:
        """Compile and load, if that was not done yet. Raises BackendUnavailable where nothing can be compiled.

        All of them at once and before the first verb: the driver loads code lazily, and the load of one kernel may
        wait for another that is running.
        """
        if self._functions:
            return
        source = resources.files(__package__).joinpath(_SOURCE).read_text(encoding="utf-8")
        device = self._device
        with device.guard("compile", "-"):
            try:
                module = device.cupy.RawModule(code=source)
                functions = {name: module.get_function(name) for name in _NAMES}
            except device.errors:
                raise
            except OSError as error:
                raise BackendUnavailable(
                    f"cupy cannot keep compiled kernels ({error}); set CUPY_CACHE_DIR to a folder that can be written"
                ) from error
            except Exception as error:
                # cupy has a different error for this in every version; none of them is one of CUDA's.
                raise BackendUnavailable(
                    f"cupy cannot compile kernels ({_first_line(error)}); install NVRTC, which comes with the CUDA "
                    "toolkit and with the extra ctk of the cupy package"
                ) from error
            for name, function in functions.items():
                function((1,), (THREADS,), _EMPTY[name], stream=device.internal)
            device.runtime.streamSynchronize(device.internal.ptr)
        # Unloading a module is a device call.
        device.keep_for_ever((module, functions))
        self._functions = functions

    def flat(self, name: str, items: int, arguments: Arguments, stream: CupyStream) -> None:
        """One thread an item, at most; the kernel strides."""
        blocks = min((items + THREADS - 1) // THREADS, _GRID_LIMIT)
        self._functions[name]((blocks,), (THREADS,), arguments, stream=stream)

    def parts(
        self, name: str, size: int, copies: int, tensors: int, arguments: Arguments, stream: CupyStream, share: int = 1
    ) -> None:
        """Blocks for every ``share`` parts of ``size`` bytes, every copy and every tensor."""
        span = self.chunk * share
        grid = (
            max(1, (size + span - 1) // span),
            min(copies, _GRID_LIMIT),
            min(tensors, _GRID_LIMIT),
        )
        self._functions[name](grid, (THREADS,), (*arguments, self.chunk), stream=stream)

    def compact(self, lengths: int, mapping: int, count: int, stream: CupyStream) -> None:
        """One block, whatever the count."""
        wanted = (count + _COMPACT_ITEMS - 1) // _COMPACT_ITEMS
        threads = min(_COMPACT_THREADS, (wanted + 31) // 32 * 32)
        self._functions["compact_lengths"]((1,), (threads,), (lengths, mapping, count), stream=stream)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
