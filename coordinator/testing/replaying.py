"""Traces in tests: that one replays, and writing it anew when the tables were changed on purpose."""

from __future__ import annotations

import os
from pathlib import Path

from context_cache.coordinator.traces.describe import difference_text
from context_cache.coordinator.traces.journal import locked_folder
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
    with locked_folder(Path(path).absolute().parent):
        result = replay(path)
        if result.equal and not result.torn:
            return False
        rerecord(Path(path), Path(path))
        return True
