"""The device budgets, measured: what a bind, a compaction, a snapshot and a steady decode step cost on this GPU.

    python benchmarks/h200.py --trace conversation_trace.jsonl > benchmarks/results/h200.md

Prints Markdown: the device budgets, then ``context-cache bench`` and ``context-cache run`` on this GPU. Every share of
the bandwidth is against a device-to-device copy of the same run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from context_cache.backends import RecordingBackend
from context_cache.backends.cupy_backend import BackendUnavailable, CupyBackend
from context_cache.coordinator import (
    BatchAdvance,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    KVPageTable,
    LayerGeometry,
    ResidentSlotPool,
    allocate_resources,
)

ROWS, WIDTH = 256, 64
Row = tuple[str, str, str, str]


class CountingRuntime:
    """``cupy.cuda.runtime`` that counts what puts work into a stream (kernels are counted by the launcher)."""

    ENQUEUES = ("memcpyAsync", "memsetAsync")

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self.ENQUEUES:
            return value

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return value(*arguments)

        return counted


def enqueues(backend: CupyBackend, work: Callable[[], object]) -> int:
    """How many copies and kernels ``work`` enqueues."""
    device, kernels = backend._device, backend._kernels
    runtime, functions = device.runtime, dict(kernels._functions)
    counting = CountingRuntime(runtime)

    def counted(function: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            counting.count += 1
            return function(*arguments, **options)

        return launch

    device.runtime = counting
    kernels._functions = {name: counted(function) for name, function in functions.items()}
    try:
        work()
    finally:
        device.runtime, kernels._functions = runtime, functions
    return counting.count


def host_time(backend: CupyBackend, stream: Any, work: Callable[[], object], before: Callable[[], object]) -> float:
    """Median host microseconds of ``work``; the device is idle at each start."""
    times = []
    for number in range(220):
        before()
        backend.synchronize(stream)
        start = time.perf_counter_ns()
        work()
        if number >= 20:
            times.append((time.perf_counter_ns() - start) / 1e3)
    backend.synchronize(stream)
    return statistics.median(times)


def device_time(backend: CupyBackend, stream: Any, work: Callable[[], object], repeat: int = 20) -> float:
    """Median device seconds of ``work``. The device is busy until all of it is enqueued, lest it wait for the host."""
    cuda, runtime = backend._device.cupy.cuda, backend._device.runtime
    external = backend._device.as_cupy_stream(stream)
    busy = backend.array((2, 1 << 28), "uint8")
    ahead = (busy[0].data.ptr, busy[1].data.ptr, 1 << 28, runtime.memcpyDeviceToDevice, stream.ptr)
    times = []
    for number in range(repeat + 3):
        start, stop = cuda.Event(), cuda.Event()
        for _ in range(4):
            runtime.memcpyAsync(*ahead)
        start.record(external)
        work()
        stop.record(external)
        stop.synchronize()
        if number >= 3:
            times.append(cuda.get_elapsed_time(start, stop) / 1e3)
    return statistics.median(times)


def bind(backend: CupyBackend, stream: Any) -> list[Row]:
    table = KVPageTable(max_batch=ROWS, max_pages_per_seq=WIDTH, num_pages=ROWS * WIDTH * 2, backend=backend)
    ids = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    flip = [0]

    def dirty() -> None:
        flip[0] ^= 1
        table.set_rows([(slot, ids[slot] + flip[0]) for slot in range(ROWS)])

    dirty()
    count = enqueues(backend, lambda: table.upload(stream))
    whole = host_time(backend, stream, lambda: table.upload(stream), dirty)
    staged = backend.pinned((ROWS, WIDTH), "int32")
    slots = backend.pinned((ROWS,), "int32")
    staged[:], slots[:] = ids, np.arange(ROWS)
    verb = host_time(
        backend,
        stream,
        lambda: backend.upload_rows(table.device_array, staged, slots, ROWS * WIDTH * 2, stream),
        lambda: None,
    )
    event = host_time(backend, stream, lambda: backend.record_event(stream), lambda: None)
    what = f"bind of {ROWS} rows of {WIDTH} pages"
    return [
        (f"{what}: enqueues", "at most 3", f"{count}", _ok(count <= 3)),
        (f"{what}: verb and event, host", "under 40 us", f"{verb + event:.1f} us", _ok(verb + event < 40)),
        (f"{what}: whole `upload` with checks and staging, host", "", f"{whole:.1f} us", ""),
        ("one event, host", "", f"{event:.1f} us", ""),
    ]


def compaction(backend: CupyBackend, stream: Any) -> list[Row]:
    layer = LayerGeometry.attention(kv_heads=1, head_dim=8)
    deployment = DeploymentConfig(
        max_batch=ROWS, kv_capacity_tokens=WIDTH * 4, page_size=4, layers=(layer,), enforce_min_pool=False
    )
    recording = RecordingBackend(backend)
    resources = allocate_resources(deployment, ROWS * WIDTH, recording)
    config, slots = ContextCacheConfig(enabled=True), ResidentSlotPool(ROWS)
    rows: list[Row] = []
    with ContextCacheCoordinator(config, deployment, resources, backend=recording, stream=stream) as cache:
        founders = [ContextCacheSequenceAdmission([i, 1, 2, 3, 4], resident=slots.acquire()) for i in range(ROWS)]
        begun = cache.begin_request(ContextCacheBatchAdmission(founders), DecodingKvHeadroom(1), stream)
        with begun.admission.request as request:
            cache.prepare_prefill(request)
            backend.synchronize(stream)
            cache.finalize_prefill_publication(request, [ContextCacheSequenceAdvance([9], 5)] * ROWS)
            lengths = np.full(ROWS, 5, np.int32)

            def step() -> None:
                nonlocal lengths
                cache.prepare_decode_step(request, DecodingKvHeadroom(1))
                lengths = lengths + np.int32(1)
                cache.complete_decode_step(request, BatchAdvance.one_token_each(np.full(ROWS, 7, np.int32), lengths))

            step()
            step()
            recording.log.clear()
            count = enqueues(backend, step)  # a token inside a page: nothing grows
            found = f"{count} ({_verbs(recording)})"
            rows.append(("steady decode step, batch 256: enqueues", "0", found, _ok(count == 0)))
            mapping = [-1 if i % 2 else i // 2 for i in range(ROWS)]
            tensor = backend.array((ROWS,), "int32")

            def compact() -> None:
                cache.begin_batch_compaction(request, mapping, ROWS // 2, tensor)
                cache.compact_batch(request)

            recording.log.clear()
            count = enqueues(backend, compact)
            what = "compaction of 256 to 128, copies and kernels, the upload of the cleared rows among them"
            rows.append((what, "at most 4", f"{count} ({_verbs(recording)})", _ok(count <= 4)))
    length, mapped = backend.array((1 << 20,), "int32"), backend.array((1 << 20,), "int32")
    for size in (256, 1 << 20):
        seconds = device_time(backend, stream, lambda size=size: backend.compact_lengths(length, mapped, size, stream))
        rows.append((f"compact_lengths of {size:,}, device", "", f"{seconds * 1e6:.1f} us", ""))
    return rows


def _verbs(recording: RecordingBackend) -> str:
    return ", ".join(recording.log) or "no verb"


def ceiling(backend: CupyBackend, stream: Any, size: int) -> float:
    """Bytes read and written per second by the device's own copy."""
    runtime = backend._device.runtime
    source, dest = backend.array((size,), "uint8"), backend.array((size,), "uint8")
    _randomise(backend, [source])
    seconds = device_time(
        backend,
        stream,
        lambda: runtime.memcpyAsync(dest.data.ptr, source.data.ptr, size, runtime.memcpyDeviceToDevice, stream.ptr),
    )
    return 2 * size / seconds


def _randomise(backend: CupyBackend, arrays: list[Any]) -> None:
    cupy = backend._device.cupy
    for array in arrays:
        flat = array.view(cupy.uint8).reshape(-1)
        noise = cupy.random.randint(0, 256, min(flat.size, 1 << 24), dtype=cupy.uint8)
        for start in range(0, flat.size, noise.size):
            flat[start : start + noise.size] = noise[: flat.size - start]
    cupy.cuda.runtime.deviceSynchronize()


def snapshots(backend: CupyBackend, stream: Any, chunks: list[int]) -> list[Row]:
    """All layers and all slots of a batch in one launch, at least 256 MiB moved each."""
    rows: list[Row] = []
    best = ceiling(backend, stream, 1 << 30)
    rows.append(("device-to-device copy of 1 GiB, read and written", "", f"{best / 1e12:.3f} TB/s", ""))
    for size in (1 << 27, 1 << 28):
        rate = ceiling(backend, stream, size)
        rows.append((f"device-to-device copy of {size >> 20} MiB", "", f"{rate / 1e12:.3f} TB/s", ""))

    batch, layers, page = 64, 24, 128
    indices = backend.pinned((3, batch), "int32")
    slots, pages, tokens = indices
    pools = tuple(backend.array((2, 4 * batch, page, 8, 128), "float16") for _ in range(layers))
    slabs = tuple(backend.array((batch, 2, page, 8, 128), "float16") for _ in range(layers))
    states = tuple(backend.array((batch, 32, 128, 128), "float32") for _ in range(4))
    saved = tuple(backend.array((batch, 32, 128, 128), "float32") for _ in range(4))
    _randomise(backend, [*pools, *slabs, *states, *saved])
    rng = np.random.default_rng(0)
    default = backend._kernels.chunk

    def measure(name: str, work: Callable[[], object], moved: int, check: Callable[[], object] | None = None) -> None:
        work()
        count = enqueues(backend, work)
        backend.synchronize(stream)
        for chunk in chunks:
            backend._kernels.chunk = chunk
            share = 2 * moved / device_time(backend, stream, work) / best
            limit = _ok(share >= 0.9) if chunk == default and moved >= 1 << 28 else ""
            note = f"{share:.1%} of the copy, {share * best / 1e12:.3f} TB/s, {count} enqueues"
            rows.append((f"{name}, {moved >> 20} MiB, {chunk >> 10} KiB a block", "at least 90 %", note, limit))
        backend._kernels.chunk = default

    token = 8 * 128 * 2
    for full in (True, False):
        slots[:], pages[:] = rng.permutation(batch), rng.permutation(4 * batch)[:batch]
        tokens[:] = page if full else rng.integers(1, page + 1, batch)
        moved = int(tokens.sum()) * token * 2 * layers
        kind = "whole pages" if full else "pages filled at random"
        measure(
            f"capture_pages, {kind}", lambda: backend.capture_pages(slabs, slots, pools, pages, tokens, stream), moved
        )
        measure(
            f"restore_pages, {kind}", lambda: backend.restore_pages(pools, pages, slabs, slots, tokens, stream), moved
        )
    moved = sum(int(state.nbytes) for state in states)
    measure("copy_rows (recurrent state)", lambda: backend.copy_rows(saved, slots, states, slots, stream), moved)
    seconds = device_time(backend, stream, lambda: backend.zero_rows(states, slots, stream))
    rows.append((f"zero_rows, {moved >> 20} MiB", "", f"{moved / seconds / 1e12:.3f} TB/s written", ""))
    return rows


def _ok(good: bool) -> str:
    return "met" if good else "**missed**"


def commands(trace: Path | None) -> list[list[str]]:
    """The commands whose output belongs to the results."""
    chosen = [["bench", "--backend", "cupy"], ["run", "--backend", "cupy"]]
    if trace is not None:
        chosen.append(["run", str(trace), "--backend", "cupy", "--pages", "50000", "--limit", "2000"])
    return chosen


def show(command: list[str]) -> bool:
    """Print a command of ``context-cache`` and what it says; whether it ended with 0."""
    program = "from context_cache.coordinator.cli import main; main()"
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *command], env=environment, capture_output=True, text=True, check=False
    )
    named = " ".join(Path(word).name if word.endswith(".jsonl") else word for word in command)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines()]
    lines = [f"\n## `context-cache {named}`\n", "```text", *lines, "```", f"\nExit status {done.returncode}."]
    print(*lines, sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", default="8", help="KiB that one block copies, to compare")
    parser.add_argument("--trace", type=Path, help="a trace for `context-cache run`; without it that run is left out")
    arguments = parser.parse_args()
    try:
        backend = CupyBackend()
    except BackendUnavailable as error:
        print(f"h200.py: {error}", file=sys.stderr)
        return 2
    stream = backend.new_stream("bench")
    cuda = backend._device.cupy.cuda
    name = cuda.runtime.getDeviceProperties(backend.device)["name"].decode()
    versions = ", ".join(f"{p} {_version(p)}" for p in ("cupy-cuda13x", "cupy-cuda12x", "numpy") if _version(p))
    driver, runtime = cuda.runtime.driverGetVersion(), cuda.runtime.runtimeGetVersion()
    print(f"# Device budgets on {name}\n")
    asked = " ".join(Path(word).name if word.endswith(".jsonl") else word for word in sys.argv[1:])
    print(f"`python benchmarks/h200.py {asked}`, {datetime.date.today()}, Python {sys.version.split()[0]}, {versions},")
    print(f"CUDA driver {driver}, runtime {runtime}.\n")
    print("| What | Budget | Measured | |\n|---|---|---|---|")
    chunks = sorted({int(value) << 10 for value in arguments.chunks.split(",")} | {backend._kernels.chunk})
    for part in (bind, compaction):
        for row in part(backend, stream):
            print("| " + " | ".join(row) + " |", flush=True)
    for row in snapshots(backend, stream, chunks):
        print("| " + " | ".join(row) + " |", flush=True)
    good = True
    for command in commands(arguments.trace):
        good = show(command) and good
    return 0 if good else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
