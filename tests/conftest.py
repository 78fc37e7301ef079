"""Shared test equipment: one harness that holds a coordinator, its host backend and a synchroniser that can fail.

The harness speaks the language of the conformance scenarios: page size 4, a row of 4 pages, 12 base pages, a batch of
at most 3 sequences, 16 records, headroom 1. ``T(n)`` is the token list 1, 2, ..., n. Whatever a scenario does not
mention keeps these values. Test modules cannot import this file (``--import-mode=importlib``); they ask for the
fixtures ``h`` (one harness), ``harness`` (a factory), ``harness_class`` and ``T``.

CONTEXT_CACHE_TEST_BACKEND=cupy runs the suites that ask for ``new_backend`` on a GPU (see ``gpu/equipment.py``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import settings

from context_cache.backends import FaultyBackend, HostBackend, RecordingBackend
from context_cache.coordinator import (
    BlockKeyExtras,
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractViolation,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    LookupPolicy,
    ResidentRef,
    Status,
    TokenStateContract,
    allocate_resources,
)
from context_cache.coordinator.manager import ResourceId, ResourceType
from context_cache.coordinator.testing import check_invariants

# Machines differ in speed, runs must not differ in what they try.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("suite")

BACKEND = os.environ.get("CONTEXT_CACHE_TEST_BACKEND", "host")


def load_equipment() -> Any:
    """``gpu/equipment.py``, by path: test modules cannot import each other."""
    path = Path(__file__).parent / "gpu" / "equipment.py"
    spec = importlib.util.spec_from_file_location("gpu_equipment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def equipment() -> Any:
    """The module ``gpu/equipment.py``."""
    return load_equipment()


if BACKEND == "host":
    new_backend = HostBackend
elif BACKEND == "cupy":
    new_backend = load_equipment().LookingBackend
else:
    raise RuntimeError(f"CONTEXT_CACHE_TEST_BACKEND is {BACKEND!r}; use host or cupy")

PAGE = 4
BASE = ResourceType.BASE_KV_PAGE
HOLD = ContextCacheSequenceAdvance(
    accepted_token_ids=(), committed_state_length=ContextCacheSequenceAdvance.HOLD_COMMITTED_STATE_LENGTH
)

# States of spec 50.1 that an attention-only, non-speculative request can be in, and those that hold the token.
FLAT_STATES = frozenset(
    "admitted prefilling settled seating decoding decode_retry compacting broken finishing finishing_retry quarantined "
    "poisoned released".split()
)
TOKEN_STATES = frozenset("prefilling decoding decode_retry compacting".split())  # seating: until the next completion
BOUND_STATES = frozenset(
    "prefilling settled seating decoding decode_retry compacting broken finishing finishing_retry".split()
)
OUTSTANDING = frozenset("prefilling seating decoding decode_retry compacting broken finishing_retry".split())


def tokens_to(count: int) -> list[int]:
    """T(n) of the scenarios."""
    return list(range(1, count + 1))


def plain(value: Any) -> Any:
    """A comparable, order-preserving copy: no arrays, no attrs objects, no views into live data."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.name
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    return value


class RecordedSteps:
    """A recorder that keeps the steps it is given."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def record(self, step: Any) -> None:
        self.steps.append(step)

    __call__ = record


class SynchronizerUnderTest:
    """The injectable synchroniser: counts its calls, fails or raises on demand, looks around before it waits."""

    def __init__(self, host: HostBackend, log: list[str]) -> None:
        self.host = host
        self.log = log
        self.calls = 0
        self.fail = False  # every call from now on
        self.fail_calls: set[int] = set()  # these calls, counted from 1
        self.error: BaseException | None = None  # raised by every call from now on
        self.before: Callable[[], None] | None = None  # looks at the world before the device is waited for
        self.timeouts: list[float | None] = []

    def __call__(self, stream: Any, timeout: float | None = None) -> bool:
        self.calls += 1
        self.timeouts.append(timeout)
        self.log.append("drain")
        if self.before is not None:
            self.before()
        if self.error is not None:
            raise self.error
        if self.fail or self.calls in self.fail_calls:
            return False
        return self.host.synchronize(stream, timeout)


class Harness:
    """One coordinator with everything a scenario needs around it."""

    HOLD = HOLD
    OK = Status.OK
    REQUEST_FAILED = Status.REQUEST_FAILED
    POISONED = Status.POISONED
    T = staticmethod(tokens_to)
    plain = staticmethod(plain)
    FLAT_STATES = FLAT_STATES
    TOKEN_STATES = TOKEN_STATES
    BOUND_STATES = BOUND_STATES
    OUTSTANDING = OUTSTANDING
    Synchronizer = SynchronizerUnderTest
    Recorder = RecordedSteps
    new_backend = new_backend

    def __init__(
        self,
        *,
        pages: int = 12,
        row_pages: int = 4,
        max_batch: int = 3,
        max_records: int | None = 16,
        page_size: int = PAGE,
        enforce_min_pool: bool = True,
        drain_timeout_seconds: float | None = None,
        own_synchronizer: bool = True,
        manager: Any = None,
        identity_key: bytes | None = bytes(range(32)),
        partly: bool = False,
    ) -> None:
        self.host = self.new_backend()
        self.recording = RecordingBackend(self.host)
        # partly: what a failing verb had enqueued before it failed runs all the same.
        self.backend = FaultyBackend(self.recording, partly=partly)
        self.stream = self.backend.new_stream()
        self.deployment = DeploymentConfig(
            max_batch=max_batch,
            kv_capacity_tokens=row_pages * page_size,
            page_size=page_size,
            layers=(LayerGeometry.attention(kv_heads=1, head_dim=4),),
            enforce_min_pool=enforce_min_pool,
        )
        self.pages_total = pages
        self.row_pages = row_pages
        self.max_batch = max_batch
        self.resources = allocate_resources(self.deployment, pages, self.backend)
        self.table = self.resources.base_page_table
        self.cache_manager = self.resources.base_cache
        self.sync = SynchronizerUnderTest(self.host, self.recording.log)
        self.recorder = self.Recorder()
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(enabled=True, max_records=max_records, drain_timeout_seconds=drain_timeout_seconds),
            self.deployment,
            self.resources,
            backend=self.backend,
            stream=self.stream,
            synchronizer=self.sync if own_synchronizer else None,
            recorder=self.recorder,
            identity_key=identity_key,
            manager=manager,
        )
        self.manager = self.coordinator.manager
        self.epochs = [0] * (max_batch + 8)
        self.handles: list[Any] = []
        self._mark = 0

    # ---- what the device was asked to do ------

    def mark(self) -> None:
        """Forget the log so far."""
        self._mark = len(self.recording.log)

    @property
    def log(self) -> list[str]:
        """Verbs since the last mark, in order. Clearing resident state is left out: attention has none."""
        return [verb for verb in self.recording.log[self._mark :] if verb != "clear_resident_row"]

    def fail(self, *actions: int) -> None:
        """Let these enqueueing verbs raise, counted from now on, starting at 1."""
        self.backend.arm(*actions)

    def heal(self) -> None:
        self.backend.disarm()
        self.sync.fail = False
        self.sync.error = None
        self.sync.fail_calls = set()
        self.sync.before = None

    def synchronize(self) -> None:
        """What the runtime does before it reports progress: wait for the device. It is no drain of the coordinator."""
        self.host.synchronize(self.stream)

    # ---- admission ------

    def ref(self, slot: int) -> ResidentRef:
        self.epochs[slot] += 1
        return ResidentRef(slot, self.epochs[slot])

    def sequence_admission(
        self,
        tokens: Sequence[int],
        resident: int | ResidentRef = 0,
        *,
        extras: BlockKeyExtras | None = None,
        media: Sequence[Any] = (),
        lookup: LookupPolicy | None = None,
    ) -> ContextCacheSequenceAdmission:
        return ContextCacheSequenceAdmission(
            token_ids=list(tokens),
            key_extras=BlockKeyExtras() if extras is None else extras,
            per_position_media_hash=tuple(media),
            resident=self.ref(resident) if isinstance(resident, int) and 0 <= resident < len(self.epochs) else resident,
            lookup_policy=lookup,
        )

    def try_begin(
        self,
        sequences: Iterable[ContextCacheSequenceAdmission],
        *,
        headroom: int = 1,
        lookup: LookupPolicy = LookupPolicy.USE_CACHE,
        commit: CommitPolicy = CommitPolicy.INCLUDING_GENERATED_TOKENS,
        contract: TokenStateContract = TokenStateContract.COMMITTED_PLUS_LOOKAHEAD,
        stream: Any = None,
        **fields: Any,
    ) -> Any:
        admission = ContextCacheBatchAdmission(
            sequences=tuple(sequences),
            token_state_contract=contract,
            lookup_policy=lookup,
            commit_policy=commit,
            **fields,
        )
        return self.coordinator.begin_request(
            admission, DecodingKvHeadroom(headroom, 0), self.stream if stream is None else stream
        )

    def begin_batch(
        self,
        prompts: Sequence[Sequence[int]],
        residents: Sequence[int] | None = None,
        *,
        keep: bool = True,
        **options: Any,
    ) -> Any:
        """Admit one request of several sequences; must succeed."""
        slots = range(len(prompts)) if residents is None else residents
        result = self.try_begin(
            [self.sequence_admission(p, s) for p, s in zip(prompts, slots, strict=True)], **options
        )
        assert result.status is Status.OK, result
        handle = result.admission.request
        handle_starts = list(result.admission.prefill_starts)
        self.starts = handle_starts
        if keep:
            self.handles.append(handle)
        return handle

    def begin(
        self,
        tokens: Sequence[int],
        resident: int | ResidentRef = 0,
        *,
        keep: bool = True,
        extras: BlockKeyExtras | None = None,
        media: Sequence[Any] = (),
        override: LookupPolicy | None = None,
        **options: Any,
    ) -> Any:
        """Admit one request of one sequence; must succeed. ``starts`` then holds the prefill starts."""
        result = self.try_begin(
            [self.sequence_admission(tokens, resident, extras=extras, media=media, lookup=override)], **options
        )
        assert result.status is Status.OK, result
        handle = result.admission.request
        self.starts = list(result.admission.prefill_starts)
        if keep:
            self.handles.append(handle)
        return handle

    def admit(
        self, handle: Any, tokens: Sequence[int], resident: int | ResidentRef, *, headroom: int = 1, **options: Any
    ) -> Any:
        return self.coordinator.admit_sequence(
            handle, self.sequence_admission(tokens, resident, **options), DecodingKvHeadroom(headroom, 0)
        )

    # ---- steps ------

    @staticmethod
    def advance(token: int | Sequence[int], committed: int) -> ContextCacheSequenceAdvance:
        accepted = (token,) if isinstance(token, int) else tuple(token)
        return ContextCacheSequenceAdvance(accepted_token_ids=accepted, committed_state_length=committed)

    def size(self, handle: Any) -> int:
        for slot in range(self.max_batch + 1):
            try:
                self.coordinator.sequence(handle, slot)
            except ContractViolation:
                return slot
        raise AssertionError("more sequences than the batch allows")

    def prefill_advances(self, handle: Any, lookahead: int = 901) -> list[ContextCacheSequenceAdvance]:
        return [
            self.advance(lookahead + slot, self.seq(handle, slot).token_count) for slot in range(self.size(handle))
        ]

    def run_prefill(self, handle: Any, lookahead: int = 901) -> None:
        """Prepare, let the device work, finalise: slot s gets the lookahead token 901 + s."""
        assert self.coordinator.prepare_prefill(handle) is Status.OK
        self.synchronize()
        advances = self.prefill_advances(handle, lookahead)
        assert self.coordinator.finalize_prefill_publication(handle, advances) is Status.OK
        assert handle.state == "settled"

    def prepare_decode(self, handle: Any, headroom: int = 1) -> Any:
        return self.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(headroom, 0))

    def complete(self, handle: Any, *tokens: int | None, completed: Sequence[int] = ()) -> Status:
        """One token a slot, None holds the slot."""
        advances = [
            HOLD if token is None else self.advance(token, self.seq(handle, slot).committed_state_length + 1)
            for slot, token in enumerate(tokens)
        ]
        return self.coordinator.complete_decode_step(handle, advances, completed)

    def decode(self, handle: Any, *tokens: int | None, headroom: int = 1, completed: Sequence[int] = ()) -> None:
        """One whole decode step; must succeed."""
        assert self.prepare_decode(handle, headroom).status is Status.OK
        self.synchronize()
        assert self.complete(handle, *tokens, completed=completed) is Status.OK

    def mapping_tensor(self) -> Any:
        return self.backend.array((self.max_batch,), "int32")

    def begin_compaction(self, handle: Any, mapping: Sequence[int], new_batch: int | None = None) -> Status:
        size = sum(1 for value in mapping if value >= 0) if new_batch is None else new_batch
        self.mapping_device = self.mapping_tensor()
        return self.coordinator.begin_batch_compaction(handle, list(mapping), size, self.mapping_device)

    def compact(self, handle: Any, mapping: Sequence[int]) -> None:
        """A whole compaction; must succeed."""
        assert self.begin_compaction(handle, mapping) is Status.OK
        assert handle.state == "compacting"
        assert self.coordinator.compact_batch(handle) is Status.OK

    def finish(self, handle: Any) -> Status:
        return self.coordinator.finish(handle)

    def drop(self, handle: Any) -> None:
        handle.close()

    def seat(self, count: int) -> None:
        """What the runtime does when it appends a joiner: the active batch has ``count`` rows from now on."""
        self.cache_manager.set_active_batch_size(count)

    def set_device_lengths(self, lengths: Sequence[int]) -> None:
        """What the model does: it has written so many tokens of each execution row."""
        self.synchronize()
        self.cache_manager.lengths[: len(lengths)] = lengths

    def poison(self, resident: int, tokens: Sequence[int] = (81, 82, 83)) -> Any:
        """Poison the coordinator by a request on ``resident`` whose drain fails; the request stays quarantined."""
        handle = self.begin(tokens, resident)
        assert self.coordinator.prepare_prefill(handle) is Status.OK
        self.sync.fail = True
        self.drop(handle)
        self.sync.fail = False
        assert self.coordinator.state == "poisoned"
        return handle

    # ---- what can be seen ------

    def seq(self, handle: Any, slot: int = 0) -> Any:
        return self.coordinator.sequence(handle, slot)

    def pages(self, handle: Any, slot: int = 0) -> list[int]:
        return [int(page) for page in self.seq(handle, slot).base_pages]

    def committed(self, handle: Any, slot: int = 0) -> int:
        return int(self.seq(handle, slot).committed_state_length)

    def row(self, slot: int) -> list[int]:
        return np.asarray(self.table.host_row(slot)).tolist()

    def v_row(self, slot: int) -> list[int]:
        return np.asarray(self.table.host_v_row(slot)).tolist()

    def device_row(self, slot: int, half: int = 0) -> list[int]:
        self.synchronize()
        return np.asarray(self.table.device_rows())[slot, half].tolist()

    def check_device_rows(self) -> None:
        """Every row that is not marked dirty is on the device what it is on the host."""
        self.synchronize()
        device = np.asarray(self.table.device_rows())
        for slot in set(range(self.max_batch)) - set(self.table.dirty_rows):
            assert device[slot, 0].tolist() == self.row(slot), f"row {slot} is stale on the device"
            assert device[slot, 1].tolist() == self.v_row(slot), f"row {slot} is stale on the device"

    def device_lengths(self, count: int) -> list[int]:
        self.synchronize()
        return np.asarray(self.cache_manager.device_lengths())[:count].tolist()

    @property
    def empty_row(self) -> list[int]:
        return [-1] * self.row_pages

    def free(self) -> list[int]:
        return [int(page) for page in self.manager.pools.free_list(BASE)]

    def active(self, page: int) -> int:
        return int(self.manager.pools.active_count(ResourceId(BASE, page)))

    def cached(self, page: int) -> int:
        return int(self.manager.pools.cache_count(ResourceId(BASE, page)))

    def all_active(self) -> dict[int, int]:
        return {page: self.active(page) for page in range(self.pages_total) if self.active(page)}

    def all_cached(self) -> dict[int, int]:
        return {page: self.cached(page) for page in range(self.pages_total) if self.cached(page)}

    def records(self) -> dict[int, list[int]]:
        """Record id -> its base pages, least recently used first."""
        store = self.manager.records
        return {int(i): [int(p) for p in store.get(i).base_page_path] for i in store.lru_to_mru()}

    def metrics(self) -> dict[str, int]:
        value = plain(self.coordinator.metrics())
        assert isinstance(value, dict)
        return value

    def counters(self) -> dict[str, int]:
        """Metrics that a refusal must not change: clocks and counters of refusals are left out."""
        return {k: v for k, v in self.metrics().items() if "nanoseconds" not in k and "refus" not in k}

    def dump(self) -> dict[str, Any]:
        """Everything that "nothing changed" compares."""
        requests = {}
        for handle in self.handles:
            ledger = []
            if handle.valid:
                for slot in range(self.size(handle)):
                    view = self.seq(handle, slot)
                    ledger.append(
                        plain(
                            [
                                view.token_count,
                                view.committed_state_length,
                                view.common_state_length,
                                view.reuse_token_length,
                                view.published_full_block_count,
                                str(view.state),
                                view.resident,
                                view.base_pages,
                                np.array(view.token_ids),
                            ]
                        )
                    )
            requests[str(handle.id)] = (handle.valid, str(handle.state), ledger)
        return {
            "manager": plain(self.manager.dump()),
            "requests": requests,
            "rows": [(self.row(slot), self.v_row(slot)) for slot in range(self.max_batch)],
            "holder": self.coordinator.execution_holder,
            "view": plain(self.coordinator.length_view),
            "state": self.coordinator.state,
            "metrics": self.counters(),
            "active_batch": self.cache_manager.active_batch_size,
        }

    def refuses(self, call: Callable[..., Any], *arguments: Any, error: type[Exception] = ContractViolation) -> Any:
        """The call raises; neither the books nor the device have changed. Returns the error."""
        before, verbs, drains = self.dump(), list(self.recording.log), self.sync.calls
        with pytest.raises(error) as caught:
            call(*arguments)
        assert self.dump() == before
        assert list(self.recording.log) == verbs
        assert self.sync.calls == drains
        return caught.value

    # ---- invariants ------

    def check(self) -> None:
        """The invariants of spec 20.9 and 50.1, seen from outside."""
        self.manager.check_invariants()
        check_invariants(self.coordinator)
        store, pools = self.manager.records, self.manager.pools
        cache = [0] * self.pages_total
        block_pages = set()
        for record_id in store.lru_to_mru():
            record = store.get(record_id)
            assert len(record.base_page_path) == record.key.full_block_count
            for digest, page in zip(record.logical_block_hashes, record.base_page_path, strict=True):
                cache[page] += 1
                block_pages.add((bytes(digest), int(page)))
                assert self.manager.index.get(digest) == page, f"page {page} of record {record_id} is not canonical"
        assert len({digest for digest, _ in block_pages}) == len(self.manager.index)
        free = self.free()
        assert len(set(free)) == len(free), f"a page is twice on the free list: {free}"
        reclaimable = 0
        for page in range(self.pages_total):
            assert self.cached(page) == cache[page], f"page {page}: cache count"
            assert (page in free) == (self.active(page) == 0 and cache[page] == 0), f"page {page}: free list"
            reclaimable += self.active(page) == 0 and cache[page] > 0
        assert pools.free_count(BASE) == len(free)
        assert pools.reclaimable_count(BASE) == reclaimable
        self.check_requests()

    def check_requests(self) -> None:
        pins = [0] * self.pages_total
        bound: dict[int, list[int]] = {}
        withheld: set[int] = set()
        seated_by_token, holders = [], []
        for handle in self.handles:
            state = str(handle.state)
            assert state in FLAT_STATES, f"request {handle.id}: unknown state {state!r}"
            if state in ("quarantined", "poisoned", "released"):
                assert not handle.valid
                if state != "released":
                    withheld.add(handle.id)
                continue
            assert handle.valid
            if state in TOKEN_STATES:
                holders.append(handle.id)
            joiners = 0
            for slot in range(self.size(handle)):
                view = self.seq(handle, slot)
                pages = [int(page) for page in view.base_pages]
                for page in pages:
                    pins[page] += 1
                assert view.published_full_block_count * PAGE <= view.committed_state_length
                assert view.common_state_length <= view.committed_state_length
                assert len(pages) * PAGE >= view.committed_state_length
                row = self.row(view.resident.slot)
                named = [page for page in row if page >= 0]
                if state == "admitted":
                    assert named == [], f"request {handle.id} is only admitted, yet its row names pages"
                    assert str(view.state).lower().endswith("leased")
                elif state != "broken":
                    assert named == pages, f"request {handle.id}: row {row}, lease {pages}"
                if str(view.state).lower().endswith("bound") and state != "prefilling":
                    joiners += 1
                if str(view.state).lower().endswith(("seated", "terminal")):
                    assert view.token_count == view.committed_state_length + 1
                bound[view.resident.slot] = pages
            if state == "seating":
                assert joiners > 0, "seating without an unfinalised joiner"
                seated_by_token.append(handle.id)
            if state == "settled":
                assert joiners == 0, "settled with an unfinalised joiner"
        assert len(holders) <= 1, f"several requests hold the execution token: {holders}"
        holder = self.coordinator.execution_holder
        if holders:
            assert holder == holders[0]
        elif holder is not None:
            assert holder in seated_by_token, f"{holder} holds the token without being between two calls"
        for page in range(self.pages_total):
            if not withheld:
                assert self.active(page) == pins[page], f"page {page}: {self.active(page)} pins, {pins[page]} leases"
            else:
                assert self.active(page) >= pins[page]
        if not withheld:
            for slot in range(self.max_batch):
                if slot not in bound:
                    assert self.row(slot) == self.empty_row, f"nobody lives on row {slot}, yet it names pages"
        for handle in self.handles:
            if handle.id == self.coordinator.length_view:
                assert str(handle.state) in BOUND_STATES - {"broken", "finishing", "finishing_retry"}

    def abandon(self) -> None:
        """End what a test left behind, whatever its state, so that no finaliser has anything to say."""
        self.heal()
        with suppress(Exception):
            self.stream.let_go()
        for handle in self.handles:
            with suppress(Exception):
                handle.close()
        with suppress(Exception):
            self.coordinator.shutdown()

    def end_everything(self) -> None:
        """Drop all, drain all, shut down: afterwards no page has an owner and all rows are empty on the device."""
        self.heal()
        for handle in self.handles:
            with suppress(ContractViolation):
                handle.close()
        assert self.coordinator.shutdown() is Status.OK
        assert self.all_active() == {}
        self.check()
        self.check_device_rows()
        self.manager.evict_all()
        assert sorted(self.free()) == list(range(self.pages_total))
        for slot in range(self.max_batch):
            assert self.row(slot) == self.empty_row


@pytest.fixture(scope="session", name="new_backend")
def backend_factory() -> Callable[[], Any]:
    """Makes the backend under test: the host's, or what CONTEXT_CACHE_TEST_BACKEND names."""
    return new_backend


@pytest.fixture
def late_stream() -> None:
    """For tests that show something only a stream that runs late can show."""
    if BACKEND != "host":
        pytest.skip("needs the host stream, which runs late and can be looked into; a CUDA stream runs by itself")


@pytest.fixture(scope="session")
def harness_class() -> type[Harness]:
    """The class itself, for Hypothesis, which makes many harnesses in one test."""
    return Harness


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    """A factory: ``harness(pages=5, enforce_min_pool=False)``. What it made is ended after the test."""
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for one in made:
        one.abandon()


@pytest.fixture
def h(harness: Callable[..., Harness]) -> Harness:
    """A harness with the default set-up of the scenarios."""
    return harness()


@pytest.fixture(scope="session")
def T() -> Callable[[int], list[int]]:
    return tokens_to
