"""What the calls of one coordinator share: resources, ledger, machines, counters. Not part of the public API.

The public class checks who may call and when; the call objects (``calls``) plan and do; this is what both stand on.
Handles keep the core alive, the core knows no handle: a handle that is lost loses nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from context_cache.backends.base import Backend, DeviceArray, LifecycleDevice, Stream, Synchronizer
from context_cache.coordinator.config import ContextCacheConfig, ContextCacheDeploymentProfile, DeploymentConfig
from context_cache.coordinator.device import DeviceFace
from context_cache.coordinator.device_state import ContextCachePhysicalResources
from context_cache.coordinator.identity import BlockHasher
from context_cache.coordinator.ledger import BOUND, SEATED, TERMINAL, Ledger
from context_cache.coordinator.manager import ContextCacheManager
from context_cache.coordinator.metrics import Counters
from context_cache.coordinator.rows import Rows
from context_cache.coordinator.snapshots import HybridSnapshotStorage
from context_cache.coordinator.types import ContextCacheBatchAdmission, TokenStateContract
from context_cache.coordinator.watching import Publisher, Watcher, publish_offer
from context_cache.machines import (
    COORDINATOR,
    EXECUTION,
    REQUEST,
    VIEW,
    Ending,
    Recorder,
    RecorderSwitch,
    Runner,
    Subject,
)

if TYPE_CHECKING:
    from context_cache.coordinator.policies import PublicationPolicy

__all__ = ["ENDED_STATES", "WITHHELD_STATES", "Core", "Request"]

WITHHELD_STATES = frozenset({"quarantined", "poisoned"})
ENDED_STATES = WITHHELD_STATES | {"released"}
NO_LIMIT = np.int32(2**31 - 1)
_ONE = np.ones(1, np.int32).tobytes()
_NO_SLOTS: npt.NDArray[np.int64] = np.zeros(0, np.int64)
_NO_LENGTHS: npt.NDArray[np.int32] = np.zeros(0, np.int32)
PHASES = {state.name: state.phase for state in REQUEST.states}


@frozen(eq=False)
class PendingMapping:
    """mapping: int32[old size]. tensor: the caller's device copy of it, flat. new_size: number of survivors."""

    mapping: npt.NDArray[np.int32]
    tensor: DeviceArray
    new_size: int


class Request(Subject):
    """One request inside the coordinator. ``state`` is a state of the request table.

    order:          int64[n], logical slot -> resident slot. Compaction permutes it, nothing else moves.
    slots:          (0, ..., n-1), for recorded steps.
    row_starts:     int64[n], where each row begins in the ledger's flat token array.
    joiners:        how many sequences are unfinalised joiners, terminals: how many are terminal; counts over the
                    ledger's state column, kept here so that a plain step need not look at the column.
    mapping:        the compaction mapping between begin_batch_compaction and compact_batch.
    plain_steps:    every sequence brings one token in a step.
    policy:         how it publishes. paired: it has draft pages and draft rows.
    room, draft_room: int32[n], positions that the pages of each seated sequence hold; NO_LIMIT for a sequence that will
                    hold (joiner, terminal) and so asks for nothing.
    positions_left, draft_left: lower bounds of the positions that every seated sequence may still write. A step that
                    asks for no more is decided without looking at any sequence.
    one_each:       the bytes of int32[n] ones, the counts of a plain step.
    """

    __slots__ = (
        "batch",
        "draft_left",
        "draft_room",
        "joiners",
        "lookahead",
        "mapping",
        "one_each",
        "order",
        "paired",
        "plain_steps",
        "policy",
        "positions_left",
        "room",
        "row_starts",
        "slots",
        "terminals",
        "withheld_since",
    )

    def __init__(
        self, request_id: str, batch: ContextCacheBatchAdmission, policy: PublicationPolicy, paired: bool
    ) -> None:
        super().__init__(request_id, REQUEST.initial)
        self.batch = batch
        self.policy = policy
        self.paired = paired
        self.lookahead = batch.token_state_contract is TokenStateContract.COMMITTED_PLUS_LOOKAHEAD
        self.plain_steps = self.lookahead and policy.one_token
        self.order: npt.NDArray[np.int64] = _NO_SLOTS
        self.row_starts: npt.NDArray[np.int64] = _NO_SLOTS
        self.slots: tuple[int, ...] = ()
        self.room: npt.NDArray[np.int32] = _NO_LENGTHS
        self.draft_room: npt.NDArray[np.int32] = _NO_LENGTHS
        self.draft_left = 0
        self.one_each = b""
        self.joiners = 0
        self.terminals = 0
        self.positions_left = 0
        self.withheld_since = 0
        self.mapping: PendingMapping | None = None

    @property
    def phase(self) -> str:
        """The group of the state."""
        return PHASES[self.state]

    def order_by(self, order: npt.NDArray[np.int64], ledger: Ledger) -> None:
        """Take a new order of resident slots."""
        self.order = order
        self.slots = tuple(range(order.size))
        self.row_starts = order * ledger.width
        self.one_each = _ONE * order.size

    def recount(self, ledger: Ledger) -> None:
        """Derive the counts again after sequence states, pages or the order have changed."""
        states = ledger.state[self.order]
        seated = states == SEATED
        held = ledger.positions_held(self.order)
        draft_held = ledger.draft_page_count[self.order] * ledger.page_size
        if seated.all():
            self.joiners = self.terminals = 0
            self.room, self.draft_room = held, draft_held
        else:
            self.joiners = int(np.count_nonzero(states == BOUND))
            self.terminals = int(np.count_nonzero(states == TERMINAL))
            self.room = np.where(seated, held, NO_LIMIT)
            self.draft_room = np.where(seated, draft_held, NO_LIMIT)
        self.positions_left = self.draft_left = 0


class _Region(Subject):
    """A region of the coordinator's machine; ``request`` is the holder of the token, or the owner of the view."""

    __slots__ = ("request",)

    def __init__(self, region_id: str, initial: str) -> None:
        super().__init__(region_id, initial)
        self.request: Request | None = None


class Core:
    """Everything one coordinator owns, and what it borrows."""

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        profile: ContextCacheDeploymentProfile,
        resources: ContextCachePhysicalResources,
        manager: ContextCacheManager,
        backend: Backend,
        stream: Stream,
        synchronizer: Synchronizer,
        recorder: Recorder | None,
        hasher: BlockHasher,
        snapshots: HybridSnapshotStorage | None,
    ) -> None:
        self.config, self.deployment, self.profile = config, deployment, profile
        self.resources, self.manager, self.stream = resources, manager, stream
        self.cache, self.draft_cache = resources.base_cache, resources.draft_cache
        self.rows = Rows(resources.base_page_table, resources.draft_page_table)
        self.snapshots = snapshots
        self.page_size, self.row_pages = deployment.page_size, deployment.row_pages
        self.device: LifecycleDevice = DeviceFace(
            backend, resources, snapshots, stream, synchronizer, config.drain_timeout_seconds
        )
        self.publisher: Publisher = publish_offer
        self.hasher = hasher
        self.ledger = Ledger(
            deployment.max_batch, deployment.row_pages, deployment.page_size, paged=profile.has_attention
        )
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        # Filled by finalisers, possibly on another thread; append and popleft of a deque are atomic.
        self.orphans: deque[Request] = deque()
        self.service = Subject("coordinator", COORDINATOR.initial)
        self.token = _Region("coordinator", EXECUTION.initial)
        self.view = _Region("coordinator", VIEW.initial)
        self.watcher: Watcher | None = recorder if isinstance(recorder, Watcher) else None
        switch = RecorderSwitch(recorder)
        self.request_runner = Runner(REQUEST, switch)
        self.service_runner = Runner(COORDINATOR, switch)
        self.token_runner = Runner(EXECUTION, switch)
        self.view_runner = Runner(VIEW, switch)
        self._request_count = 0
        self._withheld_count = 0
        if self.watcher is not None:
            self.device = self.watcher.device(self.device)
            self.publisher = self.watcher.publisher(self.publisher)
            self.watcher.attach(self)

    def new_request_id(self) -> str:
        """``r1``, ``r2``, ... in order of admission; only of requests that are admitted."""
        self._request_count += 1
        return f"r{self._request_count}"

    def was_given(self, request_id: str) -> bool:
        """Whether the id was ever given to a request; ended requests are not remembered one by one."""
        number = request_id[1:]
        return (
            request_id[:1] == "r"
            and number.isdecimal()
            and len(number) <= 18
            and 1 <= int(number) <= self._request_count
        )

    @property
    def poisoned(self) -> bool:
        return self.service.state == "poisoned"

    @property
    def closed(self) -> bool:
        return self.service.state == "closed"

    def live(self) -> list[Request]:
        """Requests that have a valid handle (or lost it and wait to be reaped)."""
        return [request for request in self.requests.values() if request.state not in ENDED_STATES]

    def withheld(self) -> list[Request]:
        """Quarantined and poisoned requests, newest first."""
        held = [request for request in self.requests.values() if request.state in WITHHELD_STATES]
        return sorted(held, key=lambda request: -request.withheld_since)

    def withhold(self, request: Request) -> None:
        """A drain of the request failed. Only counts and marks: it cannot fail and asks the device nothing."""
        if request.withheld_since == 0:
            self._withheld_count += 1
            request.withheld_since = self._withheld_count
            self.counters.quarantined_requests += 1

    def owned_slots(self, request: Request) -> list[int]:
        """Resident slots of the request that still have their lease; all of them, unless an end was interrupted."""
        owners: list[int] = [slot for slot in request.order.tolist() if self.ledger.owners[slot] == request.id]
        return owners

    def give_back(self, request: Request, slot: int) -> None:
        """Release the lease of one resident slot and forget its row. May be repeated."""
        if self.ledger.owners[slot] == request.id:
            self.ledger.lease(slot).release()
            self.ledger.close(slot)

    def joined_order(self, request: Request, slot: int) -> npt.NDArray[np.int64]:
        """The request's order with one more resident slot at the end."""
        return np.append(request.order, np.int64(slot))

    def lengths_of(self, request: Request) -> npt.NDArray[np.int32]:
        """int32[n]: what the device length vector must hold for the request's batch."""
        lengths: npt.NDArray[np.int32] = self.ledger.committed[request.order]
        return lengths

    def common_lengths_of(self, request: Request) -> npt.NDArray[np.int32]:
        """int32[n]: what the draft's length vector must hold for the request's batch."""
        lengths: npt.NDArray[np.int32] = self.ledger.common[request.order]
        return lengths

    def set_active_batch(self, request: Request) -> None:
        """Lower the caches' active batch to the request's size; host views only."""
        for cache in (self.cache, self.draft_cache if request.paired else None):
            if cache is not None and cache.active_batch_size > request.order.size:
                cache.set_active_batch_size(request.order.size)

    def tell_service(self, event: str, *, owners_left: bool = True) -> None:
        """Fire one of the coordinator's own events, which no request caused."""
        self.service_runner.offer(self.service, event, _ServiceCall(owners_left))

    def fire(self, request: Request, event: str, call: Any) -> bool:
        """Fire an event of a request; False when its drain failed (the request is withheld then).

        A row that publishes may lead to a broken invariant; the entry guard poisons for it.
        """
        return self.request_runner.fire(request, event, call) is Ending.DONE

    def nanoseconds(self) -> int:
        """A monotonic clock, for counters only."""
        return time.perf_counter_ns()


class _ServiceCall:
    """A call object for events of the coordinator that no request caused."""

    slots: tuple[int, ...] = ()

    def __init__(self, owners_left: bool) -> None:
        self.owners_left = owners_left

    def couple(self, machine: str, event: str) -> bool:
        return False

    def clearing_failed(self, error: Exception) -> None:
        raise AssertionError("no row of the coordinator clears rows") from error
