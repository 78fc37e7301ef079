"""What a recorder costs: the shipped workload run without one and with one, taking turns."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from context_cache.coordinator.cli.bench.measure import Bench
from context_cache.coordinator.cli.scheduler import run_workload
from context_cache.coordinator.cli.sizing import HEADROOM_TOKENS, size_run
from context_cache.coordinator.cli.workload import read_workload
from context_cache.coordinator.cli.workloads import shipped_workload
from context_cache.coordinator.traces import TraceRecorder

if TYPE_CHECKING:
    from context_cache.coordinator.cli.bench.cases import ScaledBudgets

__all__ = ["bench_record"]

_BATCH = 32
_BUDGET = 1.15


def bench_record(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """Time inside the coordinator per decode step of a whole run: bare, recorded without and with token ids."""
    with shipped_workload() as path:
        workload = read_workload(path, name="shipped workload")
    size = size_run(
        workload, page_size=128, max_batch=_BATCH, pages=None, row_tokens=None, headroom=HEADROOM_TOKENS, paged=True
    )
    samples: dict[str, list[float]] = {"run_bare": [], "run_recorded": [], "run_recorded_with_tokens": []}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        for _ in range(repeats):
            for name, found in samples.items():
                recorder = None
                if name != "run_bare":
                    recorder = TraceRecorder(trace, redact=name == "run_recorded")
                report = run_workload(workload, size, backend=bench.backend, recorder=recorder)
                if recorder is not None:
                    recorder.close()
                found.append(report.coordinator_seconds * 1e6 / report.decode_steps)
    for name, found in samples.items():
        bench.figure(name, found, "a decode step, with its share of all else")
    # Neighbours in time, so that what else the machine does meanwhile is in both.
    pairs = zip(samples["run_recorded"], samples["run_bare"], strict=True)
    bench.ratio("recorded / bare run, token ids apart", statistics.median(one / other for one, other in pairs), _BUDGET)
