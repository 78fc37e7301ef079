"""The harness of the flavours: one coordinator over drafts, recurrent state and snapshots, and a model stub beside it.

``flavour("eagle")`` makes a harness with the set-up of the scenarios of that flavour; ``flavour_class`` is the class,
for Hypothesis. It speaks the language of the attention-only harness and adds drafts, snapshots, captures and common
lengths.

The model stub computes a state that is a pure function of the whole prefix: K/V of a position, draft K/V (which, where
the draft looks one token ahead, depends on that token too), recurrent and convolution state, the hidden row. It works
on the stream, through the rows and lengths that the device has when the work runs. What it reads back must be what it
would have computed itself; ``model.wrong`` lists what was not.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

from context_cache.backends import FaultyBackend, RecordingBackend
from context_cache.coordinator import (
    CommitPolicy,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheManager,
    ContractViolation,
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    LookupPolicy,
    SpecConfig,
    SpecMode,
    Status,
    TokenStateContract,
    allocate_resources,
    validate_deployment,
)
from context_cache.coordinator.manager import ResourceId, ResourceType
from context_cache.coordinator.testing import check_invariants

PAGE = 4
BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE
RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT
KINDS = (BASE, DRAFT, RECURRENT, PARTIAL)

# The flat states of spec 50.1.
STATES = frozenset(
    "admitted prefilling prefill_frozen settled settled_frozen seating decoding decoding_frozen decode_retry "
    "decode_retry_frozen compacting broken finishing finishing_frozen finishing_prefill_frozen finishing_retry "
    "finishing_retry_frozen quarantined poisoned released".split()
)
TOKEN = frozenset(
    "prefilling prefill_frozen decoding decoding_frozen decode_retry decode_retry_frozen compacting".split()
)
ENDED = frozenset("quarantined poisoned released".split())
IDLE = frozenset("admitted settled settled_frozen finishing finishing_frozen".split())
NEVER_THE_VIEW = frozenset(
    "admitted settled_frozen broken finishing finishing_frozen finishing_prefill_frozen finishing_retry "
    "finishing_retry_frozen quarantined poisoned released".split()
)
CAPTURING = frozenset("prefilling broken".split())

ATTENTION = LayerGeometry.attention(1, 4)
STATE = LayerGeometry.recurrent(heads=1, head_dim=2, state=2, conv_dim=2, conv_kernel=2)
DRAFTING = {"draft_layers": (ATTENTION,), "verify_size": 4, "steps": 3, "top_k": 1}


class Flavour(NamedTuple):
    layers: tuple[LayerGeometry, ...]
    pools: tuple[int, int, int, int]
    headroom: tuple[int, int]
    spec: SpecConfig | None = None
    future: int = 0  # tokens that a draft position looks ahead
    batch: int = 2  # sequences of one request

    @property
    def speculative(self) -> bool:
        return self.spec is not None

    @property
    def paged(self) -> bool:
        return self.pools[1] > 0

    @property
    def has_attention(self) -> bool:
        return self.pools[0] > 0

    @property
    def checkpoints(self) -> bool:
        return self.pools[2] > 0

    @property
    def frozen(self) -> bool:
        """Whether a speculative request freezes its prompt endpoint."""
        return self.speculative and not self.checkpoints


FLAVOURS = {
    "vanilla": Flavour((ATTENTION,), (8, 0, 0, 0), (1, 0)),
    "eagle": Flavour((ATTENTION,), (8, 8, 0, 0), (4, 4), SpecConfig(mode=SpecMode.EAGLE, **DRAFTING), future=1),
    "draft": Flavour((ATTENTION,), (8, 8, 0, 0), (4, 4), SpecConfig(mode=SpecMode.DFLASH, **DRAFTING)),
    "shared-kv": Flavour(
        (ATTENTION,), (8, 0, 0, 0), (4, 0), SpecConfig(mode=SpecMode.SHARED_KV, **{**DRAFTING, "draft_layers": ()})
    ),
    "hybrid": Flavour((ATTENTION, STATE), (8, 0, 4, 4), (1, 0)),
    "recurrent": Flavour((STATE,), (0, 0, 4, 0), (1, 0)),
    "hybrid-mtp": Flavour(
        (ATTENTION, STATE),
        (8, 8, 4, 4),
        (4, 4),
        SpecConfig(mode=SpecMode.MTP, hidden_dim=8, **DRAFTING),
        future=1,
        batch=1,
    ),
}


def number(prefix: Sequence[int], salt: str) -> int:
    """A number from 1 to 2000, exact in float16, that depends on the whole prefix."""
    return 1 + zlib.crc32(salt.encode() + np.asarray(prefix, dtype=np.int32).tobytes()) % 2000


class Model:
    """The stub. Each piece of work is enqueued on the stream and looks at rows and lengths only when it runs."""

    def __init__(self, h: Any) -> None:
        self.h = h
        self.wrong: list[str] = []
        self.written: dict[tuple[Any, int], int] = {}
        rows = h.row_pages * PAGE + 1
        self.hidden = h.backend.array((rows, h.flavour.spec.hidden_dim), "float16") if h.mtp else None

    # ---- what a prefix computes

    def expected(self, tokens: Sequence[int], position: int) -> int:
        return number(tokens[: position + 1], "kv")

    def expected_draft(self, tokens: Sequence[int], position: int) -> int:
        return number(tokens[: position + 1 + self.h.flavour.future], "draft")

    def complain(self, what: str, found: Any, wanted: Any) -> None:
        if not np.all(np.asarray(found) == wanted):
            self.wrong.append(f"{what}: found {np.asarray(found).reshape(-1)[:4].tolist()}, a cold run has {wanted}")

    # ---- reading and writing through rows

    def _cells(self, table: Any, cache: Any, resident: int, position: int) -> list[Any]:
        page = int(np.asarray(table.device_rows())[resident, 0, position // PAGE])
        if page < 0:
            self.wrong.append(f"row {resident} has no page for position {position}")
            return []
        return [pool[half, page, position % PAGE] for pool in cache.kv_pools if pool is not None for half in (0, 1)]

    def read(self, who: str, resident: int, tokens: Sequence[int], end: int, draft_end: int, paired: bool) -> None:
        h = self.h
        if h.table is not None:
            for position in range(end):
                for cell in self._cells(h.table, h.cache_manager, resident, position):
                    self.complain(f"{who} position {position}", cell, self.expected(tokens, position))
        if paired:
            for position in range(draft_end):
                for cell in self._cells(h.draft_table, h.draft_cache, resident, position):
                    self.complain(f"{who} draft position {position}", cell, self.expected_draft(tokens, position))
        if h.flavour.checkpoints:
            state = [*h.cache_manager.recurrent_states, *h.cache_manager.conv_states]
            for tensor in state:
                self.complain(f"{who} state", tensor[resident], number(tokens[:end], "state") if end else 0)

    def write(self, resident: int, tokens: Sequence[int], begin: int, end: int) -> None:
        h = self.h
        if h.table is not None:
            for position in range(begin, end):
                for cell in self._cells(h.table, h.cache_manager, resident, position):
                    cell[...] = self.expected(tokens, position)
        if h.flavour.checkpoints:
            for tensor in [*h.cache_manager.recurrent_states, *h.cache_manager.conv_states]:
                tensor[resident] = number(tokens[:end], "state")

    def write_draft(self, resident: int, tokens: Sequence[int], begin: int, end: int) -> None:
        for position in range(begin, end):
            for cell in self._cells(self.h.draft_table, self.h.draft_cache, resident, position):
                cell[...] = self.expected_draft(tokens, position)

    # ---- what the runtime enqueues

    def prefill(self, handle: Any, lookahead: Sequence[int], end: int | None = None) -> None:
        """Prefill every slot from where it starts (or stopped) up to ``end`` tokens."""
        h = self.h
        paired = h.paired(handle)
        jobs = []
        for slot in range(h.size(handle)):
            view = h.seq(handle, slot)
            tokens = [*np.asarray(view.token_ids).tolist(), lookahead[slot]]
            key = (handle.id, view.resident.slot)
            begin = self.written.get(key, int(view.reuse_token_length))
            until = len(tokens) - 1 if end is None else end
            self.written[key] = until
            jobs.append((slot, view.resident.slot, tokens, begin, until))

        def work() -> None:
            for slot, resident, tokens, begin, until in jobs:
                who = f"{handle.id} slot {slot} prefill from {begin}:"
                first = max(begin - 1, 0) if h.mtp and paired else begin
                self.complain(f"{who} base length", h.cache_manager.lengths[slot], begin)
                self.read(who, resident, tokens, begin, first, paired)
                self.write(resident, tokens, begin, until)
                h.cache_manager.lengths[slot] = until
                if paired and h.mtp:
                    if begin:
                        row, wanted = self.hidden[begin - 1], number(tokens[:begin], "hidden")
                        self.complain(f"{who} boundary hidden row", row, wanted)
                    for position in range(begin, until):
                        self.hidden[position] = number(tokens[: position + 1], "hidden")
                if paired:
                    self.complain(f"{who} draft length", h.draft_cache.lengths[slot], begin)
                    self.write_draft(resident, tokens, first, until)
                    h.draft_cache.lengths[slot] = until

        h.stream.enqueue(work, "model prefill")

    def decode(self, handle: Any, accepted: Sequence[Sequence[int] | None], common: Sequence[int]) -> None:
        """One step: slots with None hold. Rejected positions of the headroom are written and left behind."""
        h = self.h
        paired = h.paired(handle)
        jobs = []
        for slot, news in enumerate(accepted):
            view = h.seq(handle, slot)
            tokens = np.asarray(view.token_ids).tolist()
            room = len(view.base_pages) * PAGE - int(view.committed_state_length)
            jobs.append(
                (
                    slot,
                    view.resident.slot,
                    tokens,
                    news,
                    int(view.committed_state_length),
                    int(view.common_state_length),
                    int(common[slot]) if common else 0,
                    min(room, 4),
                )
            )

        def work() -> None:
            for slot, resident, tokens, news, committed, old, new, room in jobs:
                who = f"{handle.id} slot {slot} step from {committed}:"
                self.complain(f"{who} base length", h.cache_manager.lengths[slot], committed)
                if paired:
                    self.complain(f"{who} draft length", h.draft_cache.lengths[slot], old)
                self.read(who, resident, tokens, committed, old, paired)
                if news is None:
                    continue
                if h.table is not None:
                    for position in range(committed, committed + room):
                        for cell in self._cells(h.table, h.cache_manager, resident, position):
                            cell[...] = 2047
                full = [*tokens, *news]
                self.write(resident, full, committed, committed + len(news))
                h.cache_manager.lengths[slot] = committed + len(news)
                if paired:
                    self.write_draft(resident, full, old, new)
                    h.draft_cache.lengths[slot] = new

        h.stream.enqueue(work, "model step")


def make_harness(harness_class: Any) -> Any:
    class FlavourHarness(harness_class):
        """One coordinator of one flavour."""

        FLAVOURS = FLAVOURS
        FLAT_STATES, TOKEN_STATES, IDLE, CAPTURING = STATES, TOKEN, IDLE, CAPTURING
        OUTSTANDING = STATES - IDLE - ENDED
        BASE, DRAFT, RECURRENT, PARTIAL, KINDS = BASE, DRAFT, RECURRENT, PARTIAL, KINDS

        def __init__(
            self,
            name: str,
            *,
            pools: tuple[int, int, int, int] | None = None,
            row_pages: int = 4,
            max_batch: int = 2,
            max_records: int | None = 16,
            enforce_min_pool: bool = True,
            partly: bool = False,
            enabled_bytes: tuple[int, int] | None = None,
        ) -> None:
            self.name, self.flavour = name, FLAVOURS[name]
            self.pools = self.flavour.pools if pools is None else pools
            self.host = self.new_backend()
            self.recording = RecordingBackend(self.host)
            self.backend = FaultyBackend(self.recording, partly=partly)
            self.stream = self.backend.new_stream()
            self.deployment = DeploymentConfig(
                max_batch=max_batch,
                kv_capacity_tokens=row_pages * PAGE,
                page_size=PAGE,
                layers=self.flavour.layers,
                spec_config=self.flavour.spec,
                enforce_min_pool=enforce_min_pool,
            )
            self.profile = validate_deployment(self.deployment)
            self.row_pages, self.max_batch, self.pages_total = row_pages, max_batch, self.pools[0]
            draft_pages = self.pools[1] if self.flavour.paged else None
            self.resources = allocate_resources(self.deployment, self.pools[0], self.backend, draft_pages=draft_pages)
            self.table, self.draft_table = self.resources.base_page_table, self.resources.draft_page_table
            self.cache_manager, self.draft_cache = self.resources.base_cache, self.resources.draft_cache
            self.sync = self.Synchronizer(self.host, self.recording.log)
            self.recorder = self.Recorder()
            if enabled_bytes is None:
                enabled_bytes = (
                    self.pools[2] * self.profile.recurrent_slot_bytes if self.pools[2] else 0,
                    self.pools[3] * self.profile.partial_slot_bytes if self.pools[3] else 0,
                )
            self.coordinator = ContextCacheCoordinator(
                ContextCacheConfig(
                    enabled=True,
                    max_records=max_records,
                    recurrent_snapshot_pool_bytes=enabled_bytes[0],
                    partial_kv_snapshot_pool_bytes=enabled_bytes[1],
                ),
                self.deployment,
                self.resources,
                backend=self.backend,
                stream=self.stream,
                synchronizer=self.sync,
                recorder=self.recorder,
                identity_key=bytes(range(32)),
            )
            self.manager = self.coordinator.manager
            self.epochs = [0] * (max_batch + 8)
            self.handles: list[Any] = []
            self.speculative: dict[Any, bool] = {}
            self._mark = 0
            self.model = Model(self)

        @property
        def mtp(self) -> bool:
            return self.flavour.speculative and self.flavour.checkpoints

        def paired(self, handle: Any) -> bool:
            return self.speculative[handle.id] and self.flavour.paged

        def freezes(self, handle: Any) -> bool:
            return self.speculative[handle.id] and self.flavour.frozen

        # ---- admission

        def try_begin(
            self,
            sequences: Iterable[Any],
            *,
            headroom: tuple[int, int] | None = None,
            speculative: bool | None = None,
            lookup: LookupPolicy = LookupPolicy.USE_CACHE,
            commit: CommitPolicy | None = None,
            contract: TokenStateContract = TokenStateContract.COMMITTED_PLUS_LOOKAHEAD,
            stream: Any = None,
        ) -> Any:
            spec = self.flavour.speculative if speculative is None else speculative
            if commit is None:
                commit = (
                    CommitPolicy.PREFILL_STATE_ONLY
                    if spec and self.flavour.checkpoints
                    else CommitPolicy.INCLUDING_GENERATED_TOKENS
                )
            result = self.coordinator.begin_request(
                ContextCacheBatchAdmission(
                    sequences=tuple(sequences),
                    speculative_request=spec,
                    token_state_contract=contract,
                    lookup_policy=lookup,
                    commit_policy=commit,
                ),
                self.headroom(headroom, spec),
                self.stream if stream is None else stream,
            )
            if result.admission is not None:
                self.speculative[result.admission.request.id] = spec
            return result

        def headroom(self, value: tuple[int, int] | None, speculative: bool) -> DecodingKvHeadroom:
            """The flavour's own for a speculative request, (1, 0) for a plain one."""
            if value is None:
                value = self.flavour.headroom if speculative else (1, 0)
            return DecodingKvHeadroom(*value)

        # ---- steps

        def prefill_common(self, handle: Any) -> list[int] | None:
            if not self.freezes(handle):
                return None
            return [self.seq(handle, slot).token_count for slot in range(self.size(handle))]

        def finalize(self, handle: Any, lookahead: int = 901, common: Any = "all") -> Status:
            common = self.prefill_common(handle) if common == "all" else common
            return self.coordinator.finalize_prefill_publication(
                handle, self.prefill_advances(handle, lookahead), common
            )

        def capture(self, handle: Any) -> None:
            assert self.coordinator.enqueue_prefill_captures(handle) is Status.OK

        def run_prefill(self, handle: Any, lookahead: int = 901, captures: bool = True) -> None:
            """Prepare, capture, let the device work, finalise: slot s gets the lookahead token 901 + s."""
            assert self.coordinator.prepare_prefill(handle) is Status.OK
            if captures:
                self.capture(handle)
            self.synchronize()
            assert self.finalize(handle, lookahead) is Status.OK
            assert handle.state == ("prefill_frozen" if self.freezes(handle) else "settled")

        def prepare_decode(self, handle: Any, headroom: Any = None) -> Any:
            if isinstance(headroom, int):
                headroom = (headroom, headroom if self.paired(handle) else 0)
            if headroom is None and not self.speculative[handle.id]:
                headroom = (1, 0)
            return self.coordinator.prepare_decode_step(handle, self.headroom(headroom, self.speculative[handle.id]))

        def step_common(self, handle: Any, tokens: Sequence[Any]) -> list[int] | None:
            """As a runtime reports it: common lags by one round; a slot that holds keeps its own."""
            if not self.freezes(handle):
                return None
            views = [self.seq(handle, slot) for slot in range(len(tokens))]
            return [
                int(view.common_state_length if token is None else view.committed_state_length)
                for view, token in zip(views, tokens, strict=True)
            ]

        def complete(self, handle: Any, *tokens: Any, completed: Sequence[int] = (), common: Any = "lagging") -> Status:
            """Some tokens a slot (one number or a list), None holds the slot."""
            common = self.step_common(handle, tokens) if common == "lagging" else common
            advances = []
            for slot, token in enumerate(tokens):
                count = 1 if isinstance(token, int) else len(token or ())
                advances.append(
                    self.HOLD if token is None else self.advance(token, self.committed(handle, slot) + count)
                )
            return self.coordinator.complete_decode_step(handle, advances, completed, common)

        def decode(self, handle: Any, *tokens: Any, headroom: Any = None, **options: Any) -> None:
            assert self.prepare_decode(handle, headroom).status is Status.OK
            self.synchronize()
            assert self.complete(handle, *tokens, **options) is Status.OK

        def hidden(self, rows: int = 4) -> Any:
            """A token-major tensor of hidden rows, row r filled with r + 1."""
            tensor = self.backend.array((rows, self.flavour.spec.hidden_dim), "float16")
            tensor[...] = np.arange(1, rows + 1, dtype=np.float16)[:, None]
            return tensor

        def publish_mtp(self, handle: Any, length: int, hidden: Any = None, row: int = 0) -> Status:
            hidden = self.hidden() if hidden is None else hidden
            return self.coordinator.publish_hybrid_mtp_endpoint(handle, 0, length, hidden, row)

        def restore_mtp(self, handle: Any, hidden: Any = None, row: int = 0) -> Status:
            hidden = self.hidden() if hidden is None else hidden
            return self.coordinator.restore_hybrid_mtp_boundary_hidden(handle, 0, hidden, row)

        # ---- whole stretches with the model at work

        def play_prefill(self, handle: Any, lookahead: Sequence[int], mtp_length: int | None = None) -> None:
            assert self.coordinator.prepare_prefill(handle) is Status.OK
            self.play_prepared_prefill(handle, lookahead, mtp_length)

        def play_prepared_prefill(self, handle: Any, lookahead: Sequence[int], mtp_length: int | None = None) -> None:
            """The model prefills and the endpoint is published as the flavour does it."""
            if self.mtp and self.paired(handle):
                start = int(self.seq(handle).reuse_token_length)
                if start:
                    assert self.restore_mtp(handle, self.model.hidden, start - 1) is Status.OK
                if mtp_length is not None and mtp_length > start:
                    self.model.prefill(handle, lookahead, mtp_length)
                    assert self.publish_mtp(handle, mtp_length, self.model.hidden, mtp_length - 1) is Status.OK
                    assert handle.state == "prefilling"
            self.model.prefill(handle, lookahead)
            self.capture(handle)
            self.synchronize()
            advances = [self.advance(token, self.seq(handle, slot).token_count) for slot, token in enumerate(lookahead)]
            answer = self.coordinator.finalize_prefill_publication(handle, advances, self.prefill_common(handle))
            assert answer is Status.OK

        def play_step(self, handle: Any, tokens: Sequence[Any], completed: Sequence[int] = ()) -> Status:
            """The device half and the completion of a prepared step."""
            lists = [[token] if isinstance(token, int) else token for token in tokens]
            common = self.step_common(handle, lists)
            self.model.decode(handle, lists, common or self.model_common(handle, lists))
            self.synchronize()
            return self.complete(handle, *lists, completed=completed, common=common)

        def model_common(self, handle: Any, tokens: Sequence[Any]) -> list[int]:
            """Where no common length is reported (MTP), the draft keeps up with the base."""
            return [self.committed(handle, slot) + len(news or ()) for slot, news in enumerate(tokens)]

        # ---- what can be seen

        def draft_pages(self, handle: Any, slot: int = 0) -> list[int]:
            return [int(page) for page in self.seq(handle, slot).draft_pages]

        def common(self, handle: Any, slot: int = 0) -> int:
            return int(self.seq(handle, slot).common_state_length)

        def hit_slots(self, handle: Any, slot: int = 0) -> tuple[int | None, int | None]:
            view = self.seq(handle, slot)
            return tuple(
                None if value is None or int(value) < 0 else int(value)
                for value in (view.recurrent_slot, view.partial_slot)
            )

        def captured(self, handle: Any, slot: int = 0) -> str:
            return str(self.seq(handle, slot).capture_state).lower()

        def row(self, slot: int) -> list[int]:
            return self.empty_row if self.table is None else super().row(slot)

        def v_row(self, slot: int) -> list[int]:
            return self.empty_row if self.table is None else super().v_row(slot)

        def device_row(self, slot: int, half: int = 0) -> list[int]:
            return self.empty_row if self.table is None else super().device_row(slot, half)

        def draft_row(self, slot: int) -> list[int]:
            return self.empty_row if self.draft_table is None else np.asarray(self.draft_table.host_row(slot)).tolist()

        def device_draft_row(self, slot: int) -> list[int]:
            self.synchronize()
            if self.draft_table is None:
                return self.empty_row
            return np.asarray(self.draft_table.device_rows())[slot, 0].tolist()

        def device_draft_lengths(self, count: int) -> list[int]:
            self.synchronize()
            return np.asarray(self.draft_cache.device_lengths())[:count].tolist()

        def set_draft_lengths(self, lengths: Sequence[int]) -> None:
            self.synchronize()
            self.draft_cache.lengths[: len(lengths)] = lengths

        def check_device_rows(self) -> None:
            self.synchronize()
            for table in (self.table, self.draft_table):
                if table is None:
                    continue
                device = np.asarray(table.device_rows())
                for slot in set(range(self.max_batch)) - set(table.dirty_rows):
                    assert device[slot, 0].tolist() == np.asarray(table.host_row(slot)).tolist(), f"row {slot}"
                    assert device[slot, 1].tolist() == np.asarray(table.host_v_row(slot)).tolist(), f"row {slot}"

        def free(self, kind: Any = BASE) -> list[int]:
            return [int(index) for index in self.manager.pools.free_list(kind)]

        def active(self, index: int, kind: Any = BASE) -> int:
            return int(self.manager.pools.active_count(ResourceId(kind, index)))

        def cached(self, index: int, kind: Any = BASE) -> int:
            return int(self.manager.pools.cache_count(ResourceId(kind, index)))

        def all_active(self, kind: Any = BASE) -> dict[int, int]:
            return {i: self.active(i, kind) for i in range(self.pools[kind]) if self.active(i, kind)}

        def all_cached(self, kind: Any = BASE) -> dict[int, int]:
            return {i: self.cached(i, kind) for i in range(self.pools[kind]) if self.cached(i, kind)}

        def held(self) -> dict[Any, dict[int, int]]:
            return {kind: self.all_active(kind) for kind in KINDS}

        def record(self, record_id: int) -> dict[str, Any]:
            """One record as plain values."""
            record = self.manager.records.get(record_id)

            def plain_slot(value: Any) -> int | None:
                return None if value is None or int(value) < 0 else int(value)

            return {
                "blocks": int(record.key.full_block_count),
                "base": [int(page) for page in record.base_page_path],
                "draft": None if record.spec_page_path is None else [int(page) for page in record.spec_page_path],
                "recurrent": plain_slot(record.recurrent_slot),
                "partial": plain_slot(record.partial_slot),
                "length": record.exact_checkpoint_length,
            }

        def record_ids(self) -> list[int]:
            return [int(i) for i in self.manager.records.lru_to_mru()]

        def dump(self) -> dict[str, Any]:
            extra = {}
            for handle in self.handles:
                if handle.valid:
                    for slot in range(self.size(handle)):
                        view = self.seq(handle, slot)
                        extra[f"{handle.id}/{slot}"] = self.plain(
                            [
                                list(view.draft_pages),
                                view.published_exact_length,
                                view.frozen_spec_prefill_length,
                                self.captured(handle, slot),
                                self.hit_slots(handle, slot),
                            ]
                        )
            drafts = [self.draft_row(slot) for slot in range(self.max_batch)]
            active = self.draft_cache.active_batch_size if self.draft_cache is not None else 0
            return {**super().dump(), "flavour": extra, "draft_rows": drafts, "draft_batch": active}

        # ---- invariants

        def check(self) -> None:
            """The invariants of spec 20.9 and 50.1 for all four pools, seen from outside."""
            assert self.model.wrong == []
            self.manager.check_invariants()
            check_invariants(self.coordinator)
            store, pools = self.manager.records, self.manager.pools
            cache: dict[Any, Counter[int]] = {kind: Counter() for kind in KINDS}
            blocks = set()
            for record_id in store.lru_to_mru():
                record = store.get(record_id)
                found = self.record(record_id)
                cache[BASE].update(found["base"])
                cache[DRAFT].update(found["draft"] or ())
                for kind, slot in ((RECURRENT, found["recurrent"]), (PARTIAL, found["partial"])):
                    cache[kind].update(() if slot is None else (slot,))
                assert found["draft"] is None or len(found["draft"]) == len(found["base"])
                if found["length"] is not None:
                    assert found["recurrent"] is not None, "a checkpoint without its state"
                if not self.flavour.has_attention:
                    assert found["base"] == []
                    continue
                assert len(found["base"]) == found["blocks"]
                for digest, page in zip(record.logical_block_hashes, record.base_page_path, strict=True):
                    blocks.add(bytes(digest))
                    assert self.manager.index.get(digest) == page, f"page {page} of {record_id} is not canonical"
            assert len(blocks) == len(self.manager.index)
            for kind in KINDS:
                free = self.free(kind)
                assert len(set(free)) == len(free), f"{kind.name}: twice on the free list: {free}"
                reclaimable = 0
                for index in range(self.pools[kind]):
                    active, cached = self.active(index, kind), self.cached(index, kind)
                    assert cached == cache[kind][index], f"{kind.name} {index}: cache count"
                    assert (index in free) == (active == cached == 0), f"{kind.name} {index}: free list"
                    reclaimable += active == 0 and cached > 0
                assert pools.free_count(kind) == len(free)
                assert pools.reclaimable_count(kind) == reclaimable
            self.check_requests()

        def check_requests(self) -> None:
            pins: dict[Any, Counter[int]] = {kind: Counter() for kind in KINDS}
            reserved = {RECURRENT: 0, PARTIAL: 0}
            bound: set[int] = set()
            withheld, holders = False, []
            for handle in self.handles:
                state = str(handle.state)
                assert state in STATES, f"request {handle.id}: unknown state {state!r}"
                if state in ENDED:
                    assert not handle.valid
                    withheld |= state != "released"
                    continue
                assert handle.valid
                if state in TOKEN:
                    holders.append(handle.id)
                for slot in range(self.size(handle)):
                    self.check_sequence(handle, slot, pins, reserved)
                    bound.add(self.seq(handle, slot).resident.slot)
            assert len(holders) <= 1, f"several requests hold the execution token: {holders}"
            assert self.coordinator.execution_holder == (holders[0] if holders else None)
            for kind in KINDS:
                spare = reserved.get(kind, 0)
                for index in range(self.pools[kind]):
                    more = self.active(index, kind) - pins[kind][index]
                    assert more >= 0, f"{kind.name} {index}: {more + pins[kind][index]} pins, more are in leases"
                    if not withheld and more:
                        assert kind in reserved, f"{kind.name} {index} is pinned by nobody"
                        spare -= more
                if kind is RECURRENT and not withheld:
                    assert spare == 0, f"{kind.name}: reservations and pins do not agree"
                if kind is PARTIAL and not withheld:
                    assert spare >= 0, f"{kind.name}: pinned by nobody"
            if not withheld:
                for slot in set(range(self.max_batch)) - bound:
                    assert self.row(slot) == self.draft_row(slot) == self.empty_row, f"nobody lives on row {slot}"
            for handle in self.handles:
                if handle.id == self.coordinator.length_view:
                    assert str(handle.state) not in NEVER_THE_VIEW

        def check_sequence(self, handle: Any, slot: int, pins: Any, reserved: Any) -> None:
            state, view = str(handle.state), self.seq(handle, slot)
            base, draft = self.pages(handle, slot), self.draft_pages(handle, slot)
            pins[BASE].update(base)
            pins[DRAFT].update(draft)
            for kind, pinned in zip((RECURRENT, PARTIAL), self.hit_slots(handle, slot), strict=True):
                pins[kind].update(() if pinned is None else (pinned,))
            capture = self.captured(handle, slot)
            assert capture in ("none", "reserved", "captured")
            if capture != "none":
                assert state in CAPTURING, f"{state} with a capture that is {capture}"
                assert capture == "captured" or state == "broken"
                reserved[RECURRENT] += 1
                reserved[PARTIAL] += 1
            if state not in ("admitted", "prefilling", "broken"):
                assert self.hit_slots(handle, slot) == (None, None), "hit pins are given up at the finalisation"
            committed = int(view.committed_state_length)
            # An MTP endpoint is published before the finalisation says that its tokens are committed (40.11).
            assert view.published_full_block_count * PAGE <= max(committed, int(view.published_exact_length))
            assert int(view.published_exact_length) <= view.token_count
            assert 0 <= view.common_state_length <= committed
            if self.flavour.has_attention:
                assert len(base) * PAGE >= committed
            else:
                assert base == []
            assert bool(draft) == self.paired(handle)
            rows = (self.row(view.resident.slot), self.draft_row(view.resident.slot))
            named = [[page for page in row if page >= 0] for row in rows]
            if state == "admitted":
                assert named == [[], []], "only admitted, yet a row names its pages"
            elif state != "broken":
                assert named == [base, draft], f"rows {rows}, lease {base} and {draft}"
            if str(view.state).lower().endswith(("seated", "terminal")):
                assert view.token_count == committed + 1

        def end_everything(self) -> None:
            self.heal()
            for handle in self.handles:
                with suppress(ContractViolation):
                    handle.close()
            assert self.coordinator.shutdown() is Status.OK
            assert all(counts == {} for counts in self.held().values()), "something leaked"
            self.check()
            self.check_device_rows()
            self.manager.evict_all()
            for kind in KINDS:
                assert sorted(self.free(kind)) == list(range(self.pools[kind])), kind.name
            for slot in range(self.max_batch):
                assert self.row(slot) == self.draft_row(slot) == self.empty_row

    return FlavourHarness


@pytest.fixture(scope="session")
def flavour_class(harness_class: Any) -> Any:
    """The class itself: ``flavour_class("hybrid", pools=(8, 0, 1, 1))``."""
    return make_harness(harness_class)


@pytest.fixture
def flavour(flavour_class: Any) -> Iterator[Callable[..., Any]]:
    """A factory: ``flavour("eagle")``. What it made is ended after the test."""
    made: list[Any] = []

    def make(name: str, **options: Any) -> Any:
        made.append(flavour_class(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.abandon()


class Publishing:
    """Lets the n-th publication from now on raise, before it has changed anything."""

    def __init__(self) -> None:
        self.calls = 0
        self.failing: frozenset[int] = frozenset()
        self.error: Exception = RuntimeError("publish")

    def fail(self, *calls: int) -> None:
        self.calls, self.failing = 0, frozenset(calls)

    def count(self) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise self.error


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Publishing:
    """Every kind of publication passes here first."""
    control = Publishing()

    def guarded(name: str) -> Callable[..., Any]:
        inner = getattr(ContextCacheManager, name)

        def publish(self: Any, *arguments: Any, **options: Any) -> Any:
            control.count()
            return inner(self, *arguments, **options)

        return publish

    for name in ("publish", "publish_hybrid", "publish_hybrid_mtp"):
        monkeypatch.setattr(ContextCacheManager, name, guarded(name))
    return control
