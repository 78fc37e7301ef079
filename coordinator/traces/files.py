"""The files of a trace: which they are, and writing all three of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from context_cache.coordinator.traces.journal import JournaledFile, journal_of

__all__ = ["TraceFiles", "timings_of", "tokens_of"]


def tokens_of(path: str | os.PathLike[str]) -> str:
    """Where the token ids of a trace lie: raw little-endian int32."""
    return f"{os.fspath(path)}.tokens"


def timings_of(path: str | os.PathLike[str]) -> str:
    """Where the times of a trace lie: little-endian int64 rows (step, act or -1, begin, end), nanoseconds.

    A row with -1 is a call, under the number of its last step; act 0, 1, ... are what that step of a request did.
    """
    return f"{os.fspath(path)}.timings"


class TraceFiles:
    """The three files of a trace. What lies at the path is touched when all of them can be made, and not before.

    Raises OSError when one cannot be made, or another recorder writes it.
    """

    def __init__(self, path: str | os.PathLike[str], *, redact: bool, timings: bool) -> None:
        self._open: list[JournaledFile] = []
        unused = [name for name, is_unused in ((tokens_of(path), redact), (timings_of(path), not timings)) if is_unused]
        try:
            self.line: Callable[[bytes], object] = self._make(path).append
            self.tokens: Callable[[bytes], int] | None = None if redact else self._make(tokens_of(path)).append
            self._timings = self._make(timings_of(path)) if timings else None
            for name in unused:
                _remove(name)
            for file in self._open:
                file.start()
        except BaseException:
            for file in self._open:
                file.discard()
            raise

    def _make(self, path: str | os.PathLike[str]) -> JournaledFile:
        file = JournaledFile(path, start=False)
        self._open.append(file)
        return file

    def times(self, rows: npt.NDArray[np.int64]) -> None:
        if self._timings is not None:
            self._timings.append(rows.tobytes())

    def close(self) -> None:
        """Close each of them, whatever becomes of the others; the first error is raised at the end."""
        failures: list[OSError] = []
        for file in self._open:
            try:
                file.close()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        """Give the files back as they are; one that is closed already stays closed."""
        for file in self._open:
            file.abandon()


def _remove(path: str) -> None:
    """Remove what an earlier trace left, which would be taken for this one's; its recorder may have died, too."""
    for left in (path, journal_of(path)):
        with suppress(FileNotFoundError):
            os.unlink(left)
