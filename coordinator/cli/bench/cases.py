"""The measurements. Each builds its own small world, so their order does not matter."""

from __future__ import annotations

import gc
import hashlib
from typing import Any, Final

import numpy as np
from transitions import Machine

from context_cache.coordinator import (
    BatchAdvance,
    BlockHasher,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    RequestHandle,
    ResidentRef,
    allocate_resources,
)
from context_cache.coordinator.cli.bench.measure import Bench, once_us, times_us
from context_cache.coordinator.cli.bench.recording import bench_record
from context_cache.coordinator.cli.platform import open_platform
from context_cache.coordinator.manager import ContextCacheManager, LookupPolicy, ResourceType
from context_cache.machines import EXECUTION, REQUEST, Runner, Step, Subject

__all__ = ["CASES", "ScaledBudgets"]

PAGE: Final = 128
HEADROOM: Final = DecodingKvHeadroom(1)


class ScaledBudgets:
    """Budgets in microseconds of the reference machine, made comparable: measured floors here over the floors there."""

    # A reference machine of two cores: NumPy lengths + token append for 1, 32 and 256 sequences, and SHA-256 of 32,768
    # tokens with a copy per 128-token page.
    DECODE_FLOOR_THERE: Final = {1: 6.0, 32: 13.0, 256: 18.0}
    HASH_FLOOR_THERE: Final = 320.0

    def __init__(self) -> None:
        self.decode_floor: dict[int, float] = {}
        self.hash_floor = self.HASH_FLOOR_THERE

    def decode(self, microseconds: float, batch: int = 1) -> float:
        """A budget whose cost is Python and NumPy calls."""
        return microseconds * self.decode_floor[batch] / self.DECODE_FLOOR_THERE[batch]

    def hashing(self, microseconds: float) -> float:
        """A budget whose cost is hashing."""
        return microseconds * self.hash_floor / self.HASH_FLOOR_THERE


class World:
    """A coordinator on a backend with ``batch`` rows of ``row_pages`` pages."""

    def __init__(
        self, backend: str, batch: int, row_pages: int, pages: int, recorder: Any = None, max_records: int | None = None
    ) -> None:
        platform = open_platform(backend)
        self.backend, self.stream = platform.backend, platform.stream
        deployment = DeploymentConfig(
            max_batch=batch, kv_capacity_tokens=row_pages * PAGE, page_size=PAGE, enforce_min_pool=False,
            layers=(LayerGeometry.attention(kv_heads=1, head_dim=1),),
        )  # fmt: skip
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True, max_records=max_records), deployment,
            allocate_resources(deployment, pages, self.backend),
            backend=self.backend, stream=self.stream, recorder=recorder,
        )  # fmt: skip

    def begin(self, *prompts: Any) -> RequestHandle:
        sequences = [
            prompt
            if isinstance(prompt, ContextCacheSequenceAdmission)
            else ContextCacheSequenceAdmission(prompt, resident=ResidentRef(slot, 1))
            for slot, prompt in enumerate(prompts)
        ]
        result = self.coordinator.begin_request(ContextCacheBatchAdmission(sequences), HEADROOM, self.stream)
        assert result.admission is not None, "the bench's pool is too small"
        return result.admission.request

    def sync(self) -> None:
        self.backend.synchronize(self.stream)

    def prefill(self, handle: RequestHandle, lengths: list[int]) -> None:
        self.coordinator.prepare_prefill(handle)
        self.sync()
        count = np.ones(len(lengths), np.int32)
        self.coordinator.finalize_prefill_publication(handle, BatchAdvance(count, count, np.array(lengths, np.int32)))


def _tokens(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def bench_floors(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """What any implementation must do: the hash of a prompt, the arrays of a step, a bare trigger."""
    tokens = _tokens(32_768, 1)
    raw = memoryview(tokens).cast("B")
    root = hashlib.sha256(b"k" * 64)

    def hash_floor() -> None:
        hasher = root.copy()
        digests = []
        for begin in range(0, len(raw), PAGE * 4):
            hasher.update(raw[begin : begin + PAGE * 4])
            digests.append(hasher.copy().digest())

    scaled.hash_floor = bench.figure(
        "floor_hash_32768", times_us(hash_floor, repeats, inner=4), "SHA-256, a copy a page"
    )
    for batch in (1, 32, 256):
        lengths, order = np.zeros(batch, np.int32), np.random.default_rng(0).permutation(batch)
        width = 4096
        matrix = np.zeros((batch, width), np.int32)
        fresh = np.ones(batch, np.int32)

        def step_floor(lengths: Any = lengths, order: Any = order, matrix: Any = matrix, fresh: Any = fresh) -> None:
            now = lengths[order] + 1
            now %= matrix.shape[1]
            lengths[order] = now
            matrix.reshape(-1)[order * matrix.shape[1] + now] = fresh

        scaled.decode_floor[batch] = bench.figure(
            f"floor_decode_{batch}", times_us(step_floor, repeats, inner=300), "NumPy lengths + token append"
        )


def bench_hash(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """Hash a prompt of 32,768 tokens."""
    tokens, hasher = _tokens(32_768, 1), BlockHasher()

    def hash_prompt() -> None:
        hasher.chain(PAGE).extend_to(tokens)

    ours = bench.figure("hash_32768", times_us(hash_prompt, repeats, inner=4), "keyed, chained, a digest a page")
    bench.ratio("hash / floor", ours / scaled.hash_floor, 1.3)


def bench_admit(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """Admit 16k tokens of which 12k are cached."""
    world = World(bench.backend, 1, 160, 1024)
    prompt = _tokens(16_384, 2)
    warm = world.begin(prompt[:12_288])
    world.prefill(warm, [12_288])
    world.coordinator.finish(warm)
    known = ContextCacheSequenceAdmission(prompt, resident=ResidentRef(0, 1))
    handles: list[RequestHandle] = []

    def close() -> None:
        handles.pop().close()

    def admit_known() -> None:
        handles.append(world.begin(known))

    def admit_new() -> None:
        handles.append(world.begin(ContextCacheSequenceAdmission(prompt, resident=ResidentRef(0, 1))))

    admit_known()
    close()
    excluded = bench.figure("admit_16k_hit_12k", times_us(admit_known, repeats * 10, after=close), "hash excluded")
    included = bench.figure("admit_16k_hit_12k_hashed", times_us(admit_new, repeats * 10, after=close), "hash included")
    bench.ratio("admit, hash excluded / 60 us scaled", excluded / scaled.decode(60), 1.0)
    bench.ratio("admit, hash included / 260 us scaled", included / (scaled.decode(60) + scaled.hashing(200)), 1.0)
    world.coordinator.close()


def bench_decode(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """prepare + complete of a decode step, machine events and ledger included; steps that grow apart."""
    medians = {}
    for batch, budget in ((1, 30.0), (32, 35.0), (256, 55.0)):
        plain, growing = _decode_samples(bench.backend, batch, 60 * repeats)
        medians[batch] = bench.figure(f"decode_{batch}", plain, "prepare + complete, no page needed")
        if growing:
            bench.figure(f"decode_{batch}_growing", growing, "some sequence needs a page, rows uploaded")
        bench.ratio(f"decode batch {batch} / {budget:g} us scaled", medians[batch] / scaled.decode(budget, batch), 1.0)
    bench.ratio("decode batch 256 / batch 1", medians[256] / medians[1], 2.0)


def _decode_samples(backend: str, batch: int, steps: int) -> tuple[list[float], list[float]]:
    from time import perf_counter_ns

    row_pages = 8 + -(-steps // PAGE)
    world = World(backend, batch, row_pages, batch * row_pages)
    # Lengths that spread the page boundaries, as a running batch has them; few of them for a large batch, so that
    # steps without growth are there to be measured.
    starts = np.random.default_rng(3).integers(1, 24, batch) * 16
    lengths = [int(length) for length in starts]
    handle = world.begin(*(_tokens(length, 100 + index) for index, length in enumerate(lengths)))
    world.prefill(handle, lengths)
    committed, ones = np.array(lengths, np.int32), np.ones(batch, np.int32)
    plain: list[float] = []
    growing: list[float] = []
    coordinator = world.coordinator
    for step in range(steps):
        committed = committed + 1
        advance = BatchAdvance(ones, ones, committed)
        free = coordinator.manager.pools.free_count(ResourceType.BASE_KV_PAGE)
        start = perf_counter_ns()
        coordinator.prepare_decode_step(handle, HEADROOM)
        coordinator.complete_decode_step(handle, advance)
        spent = (perf_counter_ns() - start) / 1e3
        world.sync()
        if step >= 16:
            (plain if coordinator.manager.pools.free_count(ResourceType.BASE_KV_PAGE) == free else growing).append(
                spent
            )
    coordinator.finish(handle)
    coordinator.close()
    return plain, growing


def bench_publish(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """Publish 16k tokens after prefill, and again after 256 more; a new prompt each time, in one long-lived world."""
    first: list[float] = []
    second: list[float] = []
    world = World(bench.backend, 1, 140, 2048)
    gc.collect()
    coordinator, one = world.coordinator, np.ones(1, np.int32)

    def advance(length: int) -> BatchAdvance:
        return BatchAdvance(one, one, np.array([length], np.int32))

    for index in range(repeats * 3 + 4):
        handle = world.begin(_tokens(16_384, 200 + index))
        coordinator.prepare_prefill(handle)
        world.sync()
        prefilled, completed = advance(16_384), advance(16_640)
        first.append(once_us(coordinator.finalize_prefill_publication, handle, prefilled))
        for length in range(16_385, 16_640):
            coordinator.prepare_decode_step(handle, HEADROOM)
            coordinator.complete_decode_step(handle, advance(length))
        coordinator.prepare_decode_step(handle, HEADROOM)
        second.append(once_us(coordinator.complete_decode_step, handle, completed, (0,)))
        coordinator.finish(handle)
    coordinator.close()
    # The first rounds fill the pool and the caches of the interpreter.
    after_prefill = bench.figure("publish_16k", first[4:], "finalize_prefill_publication")
    after_more = bench.figure("publish_256_more", second[4:], "complete_decode_step of a completed slot")
    bench.ratio("publish 16k / 80 us scaled", after_prefill / scaled.decode(80), 1.0)
    bench.ratio("publish 256 more / 25 us scaled", after_more / scaled.decode(25), 1.0)


def bench_evict(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """Admit 64 pages that must evict 64 records of one page, with more and more records kept."""
    medians = {}
    for kept in (1_000, 10_000, 100_000):
        world = World(bench.backend, 1, 80, kept)
        manager = world.coordinator.manager
        serial = iter(range(10**9))
        _publish_single(manager, kept, serial)
        prompt = ContextCacheSequenceAdmission(
            _tokens(64 * PAGE - 1, 4), resident=ResidentRef(0, 1), lookup_policy=LookupPolicy.BYPASS
        )
        handles: list[RequestHandle] = []

        def admit(world: World = world, prompt: Any = prompt, handles: Any = handles) -> None:
            handles.append(world.begin(prompt))

        def refill(manager: Any = manager, handles: Any = handles, serial: Any = serial) -> None:
            handles.pop().close()
            _publish_single(manager, 64, serial)

        admit()
        refill()
        medians[kept] = bench.figure(
            f"admit_evicting_{kept}", times_us(admit, repeats * 5, after=refill), f"64 of {kept:,} records leave"
        )
        world.coordinator.close()
    bench.ratio("admit evicting, 100,000 records / 100 us scaled", medians[100_000] / scaled.decode(100), 1.0)
    bench.ratio("admit evicting, 100,000 / 1,000 records", medians[100_000] / medians[1_000], 1.3)


def _publish_single(manager: ContextCacheManager, count: int, serial: Any) -> None:
    """``count`` records of one page each."""
    for _ in range(count):
        digest = next(serial).to_bytes(16, "little")
        lease = manager.acquire(manager.plan([], PAGE, LookupPolicy.BYPASS)).lease
        assert lease is not None, "the bench's pool is too small"
        manager.publish(lease, [digest], PAGE)
        lease.release()


class _Kept:
    """A recorder that keeps the last step, as the cheapest recorder that is one."""

    def __init__(self) -> None:
        self.step: Step | None = None

    def record(self, step: Step) -> None:
        self.step = step


class _StubCall:
    """Answers every guard of a decode step and does nothing, so that only the machine is measured."""

    slots = (0,)
    growth_possible = view_current = holds_token = True
    only_sequence = joiner_waits = took_token = plain_checkpoint = captures_planned = frozen_policy = paired = False

    @property
    def device(self) -> _StubCall:
        return self

    def couple(self, machine: str, event: str) -> bool:
        return False

    def clearing_failed(self, error: Exception) -> None:
        raise AssertionError from error

    def nothing(self) -> bool:
        return False

    def upload_base_rows(self) -> bool:
        return False

    grow = apply_advances = publish = hold_token = free_token = nothing


class _Light:
    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = "off"


def bench_events(bench: Bench, scaled: ScaledBudgets, repeats: int) -> None:
    """One recorded machine event against a bare ``transitions`` trigger with one guard and two callbacks."""
    library = Machine(model=None, states=["off", "on"], initial="off", auto_transitions=False, send_event=True)
    for source, target in (("off", "on"), ("on", "off")):
        library.add_transition(
            "flip", source, target,
            conditions=[lambda event: True], before=[lambda event: None], after=[lambda event: None],
        )  # fmt: skip
    light, flip = _Light(), library.events["flip"].trigger
    bare = bench.figure("bare_trigger", times_us(lambda: flip(light), repeats, inner=2000), "one guard, two callbacks")

    call, runner = _StubCall(), Runner(REQUEST, _Kept())
    hot, ordinary = Subject("r1", "settled"), Subject("r2", "prefilling")

    def step() -> None:
        runner.fire(hot, "prepare_decode_step", call)
        runner.fire(hot, "complete_decode_step", call)

    hot_event = bench.figure(
        "hot_event",
        [sample / 2 for sample in times_us(step, repeats, inner=2000)],
        "a row of the decode step, recorded",
    )
    other_event = bench.figure(
        "ordinary_event",
        times_us(lambda: runner.fire(ordinary, "enqueue_prefill_captures", call), repeats, inner=2000),
        "a row picked by transitions, recorded",
    )
    token_runner, token = Runner(EXECUTION, _Kept()), Subject("coordinator", "free")

    def take_and_return() -> None:
        token_runner.offer(token, "take", call)
        token_runner.offer(token, "give_back", call)

    bench.figure("coupled_event", [sample / 2 for sample in times_us(take_and_return, repeats, inner=2000)], "recorded")
    bench.ratio("hot event / bare trigger", hot_event / bare, 0.5)
    bench.ratio("ordinary event / bare trigger", other_event / bare, 1.5)


CASES: Final = {
    "hash": bench_hash,
    "admit": bench_admit,
    "decode": bench_decode,
    "publish": bench_publish,
    "evict": bench_evict,
    "events": bench_events,
    "record": bench_record,
}
"""Name on the command line -> measurement; the floors are always measured first."""
