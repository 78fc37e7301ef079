"""Traces in tests: that one replays, and writing it anew when the tables were changed on purpose."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from context_cache.coordinator.traces.describe import difference_text
from context_cache.coordinator.traces.replay import replay, rerecord

__all__ = ["assert_replays", "update_trace"]


def assert_replays(path: str | os.PathLike[str], *, backend: str = "host") -> None:
    """Replay a recorded trace on a fresh coordinator; every transition must come out as recorded.

    Raises AssertionError with the first difference; TraceError for a trace that cannot be used; OSError.
    """
    result = replay(path, backend=backend)
    if result.difference is not None:
        raise AssertionError(f"{os.fspath(path)}:\n{difference_text(result.difference)}")
    if result.unrepeatable is not None:
        raise AssertionError(
            f"{os.fspath(path)}: call {result.calls + 1} was ended from outside by {result.unrepeatable}, which a "
            "replay cannot repeat; cut the trace before it"
        )
    if result.torn:
        raise AssertionError(f"{os.fspath(path)}: the last call is incomplete; a committed trace must be whole")


def update_trace(path: str | os.PathLike[str]) -> bool:
    """Write a trace anew from its own calls if it does not replay or is torn; whether that was needed.

    Several tests may name one trace, and run in several processes: the first one writes it, the others wait and find it
    written. Raises TraceError, OSError.
    """
    with _alone_in(Path(path).parent):
        result = replay(path)
        if result.equal and not result.torn:
            return False
        rerecord(Path(path), Path(path))
        return True


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else who asks for the same folder goes on meanwhile. Nothing is left behind."""
    held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Some network file systems lock no folders; there one process at a time has to do.
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
