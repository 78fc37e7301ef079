"""Recorded traces to export: scripts against a host coordinator, with failures where a test wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.reader import TraceReader


@pytest.fixture
def record(harness_class: Any, tmp_path: Path) -> Callable[..., Path]:
    """``record(script)`` runs ``script(h)`` on a recorded harness and returns the trace; options go to the recorder."""

    def run(
        script: Callable[[Any], None], name: str = "trace.jsonl", harness: dict[str, Any] | None = None, **options: Any
    ) -> Path:
        path = tmp_path / name
        with TraceRecorder(path, **options) as recorder:

            class Traced(harness_class):
                Recorder = staticmethod(lambda: recorder)

            h = Traced(**(harness or {}))
            try:
                script(h)
            finally:
                h.abandon()
        assert recorder.failure is None
        return path

    return run


def _life(h: Any) -> None:
    """Two requests that take turns; the first one ends by finish, the second one is closed."""
    first = h.begin(h.T(6), 0)
    h.run_prefill(first)
    second = h.begin(h.T(5), 1)
    h.run_prefill(second)
    h.decode(first, 31)
    h.decode(first, 32)
    h.decode(second, 41)
    assert h.coordinator.finish(first) is h.OK
    second.close()


def _failing(h: Any) -> None:
    """A refused event, a failed upload, a failed drain, and a shutdown that releases what was withheld."""
    broken = h.begin(h.T(6), 0)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(broken)
    assert broken.state == "broken"
    h.heal()
    quarantined = h.begin(h.T(5), 1)
    h.sync.fail = True
    assert h.coordinator.finish(broken) is h.POISONED
    h.heal()
    assert h.try_begin([h.sequence_admission(h.T(4), 2)]).status is h.POISONED
    quarantined.close()
    assert h.coordinator.shutdown() is h.OK


@pytest.fixture
def life() -> Callable[[Any], None]:
    return _life


@pytest.fixture
def failing() -> Callable[[Any], None]:
    return _failing


@pytest.fixture
def long_trace(record: Callable[..., Path]) -> Callable[[int], Path]:
    """The same decode step again and again, as many times as asked for."""
    path = record(_life)
    lines = path.read_bytes().splitlines(keepends=True)
    with TraceReader(path) as reader:
        groups = list(reader.groups())
    prepared = [group for group in groups if group.raw[0].startswith(b'{"line":"prepare_decode_step"')]
    second = prepared[1].number - 1
    steps = [line for group in groups[second : second + 2] for line in group.raw]
    before = lines[: lines.index(steps[0])]

    def make(count: int) -> Path:
        path.write_bytes(b"".join(before) + b"".join(steps) * count)
        first = sum(line.startswith(b'{"line":"step"') for line in before)
        rows = np.fromfile(f"{path}.timings", "<i8").reshape(-1, 4).tolist()
        rows = [row for row in rows if row[0] <= first]
        clock = rows[-1][3]
        for call in range(2 * count):
            rows.append([first + 2 * call + 2, -1, clock + 100 * call, clock + 100 * call + 60])
        np.array(rows, "<i8").tofile(f"{path}.timings")
        return path

    return make
