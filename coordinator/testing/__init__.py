"""Help for tests of programs that embed the coordinator.

``check_invariants`` looks at a coordinator from outside the calls that changed it: every fact is compared from two
sides. It is slow (it looks at every page) and meant for tests; call it at any moment between two calls.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from context_cache.coordinator.coordinator import ContextCacheCoordinator
from context_cache.coordinator.core import ENDED_STATES, WITHHELD_STATES, Core, Request
from context_cache.coordinator.errors import InvariantViolation
from context_cache.coordinator.ledger import BOUND, CAPTURE_NONE, LEASED, QUARANTINED, SEATED, TERMINAL, Ledger
from context_cache.coordinator.manager import ResourceType
from context_cache.coordinator.page_table import KVPageTable

__all__ = ["assert_replays", "check_invariants", "page_owners"]

_TOKEN_STATES = frozenset(
    {
        "prefilling", "prefill_frozen", "decoding", "decoding_frozen", "decode_retry", "decode_retry_frozen",
        "compacting",
    }
)  # fmt: skip


def assert_replays(path: str | os.PathLike[str], *, backend: str = "host") -> None:
    """Replay a recorded trace on a fresh coordinator; every transition must come out as recorded.

    Raises AssertionError with the first difference, side by side; ImportError without the extra ``cli``, which brings
    what reads traces.
    """
    from context_cache.coordinator.testing.replaying import assert_replays as replay_and_compare

    replay_and_compare(path, backend=backend)


def check_invariants(coordinator: ContextCacheCoordinator) -> None:
    """Raise InvariantViolation naming the first fact that does not hold.

    Checked: the manager's own invariants; pins against leases; ledger against request states; rows against leases; the
    token and the view against the states that may hold them.
    """
    core = coordinator._core
    core.manager.check_invariants()
    pins: dict[ResourceType, Counter[int]] = {kind: Counter() for kind in ResourceType}
    seen: dict[int, str] = {}
    for request in core.requests.values():
        _check_request(core, request, seen, pins)
    for kind in ResourceType:
        active = core.manager.pools.pool(kind).active
        for index in np.flatnonzero(active).tolist():
            found, owned = int(active[index]), pins[kind][index]
            _require(found == owned, f"{kind.name} {index} has {found} pins, and leases own {owned}")
    for slot in range(core.deployment.max_batch):
        if slot not in seen:
            _require(core.ledger.owners[slot] is None, f"resident slot {slot} is owned by nobody's request")
            for table in _tables(core):
                _require(table.bound_epoch(slot) == 0, f"row {slot} is bound, but no request has it")
                _require(int(table.host_row(slot).max()) == -1, f"row {slot} names pages, but no request has it")
    _check_regions(core)


def _tables(core: Core) -> list[KVPageTable]:
    return [table for table in (core.rows.base, core.rows.draft) if table is not None]


def page_owners(coordinator: ContextCacheCoordinator) -> dict[int, tuple[str, ...]]:
    """Who holds each page that has an active reference: request ids with their state, for a leak report.

    A page that no request holds has an empty tuple: it leaked.
    """
    core = coordinator._core
    owners: dict[int, list[str]] = {}
    for request in core.requests.values():
        for slot in core.owned_slots(request):
            for page in core.ledger.lease(slot).base_pages.tolist():
                owners.setdefault(page, []).append(f"{request.id} ({request.state})")
    active = core.manager.pools.pool(ResourceType.BASE_KV_PAGE).active
    return {page: tuple(owners.get(page, ())) for page in np.flatnonzero(active).tolist()}


def _check_request(core: Core, request: Request, seen: dict[int, str], pins: dict[ResourceType, Counter[int]]) -> None:
    ledger, name = core.ledger, f"request {request.id} ({request.state})"
    _require(request.state not in ENDED_STATES - WITHHELD_STATES, f"{name} has ended and is still listed")
    for slot in request.order.tolist():
        _require(slot not in seen, f"resident slot {slot} belongs to {seen.get(slot)} and to {request.id}")
        seen[slot] = request.id
        _require(ledger.owners[slot] == request.id, f"{name}: resident slot {slot} is owned by {ledger.owners[slot]}")
        _count_pins(ledger, slot, pins)
        _check_lengths(core, request, slot, name)
        if request.state in WITHHELD_STATES:
            _require(ledger.state[slot] == QUARANTINED, f"{name}: slot {slot} is not quarantined")
        elif request.state == "admitted":
            _require(ledger.state[slot] == LEASED, f"{name}: slot {slot} is not leased")
        elif request.state != "broken":
            _check_rows(core, request, slot, name)
        staged = ledger.staged[slot] is not None
        _require(staged == (ledger.capture[slot] != CAPTURE_NONE), f"{name}: slot {slot} is staged without a capture")
        if staged:
            holds = request.state in ("prefilling", "broken", *WITHHELD_STATES)
            _require(holds, f"{name}: slot {slot} still has a staged checkpoint")
    if request.state in ("settled", "seating"):
        joiners = int(np.count_nonzero(ledger.state[request.order] == BOUND))
        _require((joiners > 0) == (request.state == "seating"), f"{name} has {joiners} unfinalised joiners")
        leased = bool((ledger.state[request.order] == LEASED).any())
        _require(not leased, f"{name} has a sequence whose row is not bound")


def _count_pins(ledger: Ledger, slot: int, pins: dict[ResourceType, Counter[int]]) -> None:
    lease = ledger.lease(slot)
    pins[ResourceType.BASE_KV_PAGE].update(lease.base_pages.tolist())
    pins[ResourceType.DRAFT_KV_PAGE].update(lease.draft_pages.tolist())
    held = [(lease.recurrent_slot, lease.partial_slot)]
    held += [(item.recurrent_slot, item.partial_slot) for item in lease.reservations]
    for recurrent, partial in held:
        if recurrent is not None:
            pins[ResourceType.RECURRENT_SNAPSHOT][recurrent] += 1
        if partial is not None:
            pins[ResourceType.PARTIAL_KV_SNAPSHOT][partial] += 1


def _check_lengths(core: Core, request: Request, slot: int, name: str) -> None:
    ledger, lease = core.ledger, core.ledger.lease(slot)
    committed, common, listed = int(ledger.committed[slot]), int(ledger.common[slot]), int(ledger.token_count[slot])
    _require(int(ledger.page_count[slot]) == lease.page_count, f"{name}: slot {slot} counts other pages than its lease")
    drafts = int(ledger.draft_page_count[slot])
    _require(drafts == lease.draft_page_count, f"{name}: slot {slot} counts other draft pages than its lease")
    held = int(ledger.positions_held(np.array([slot]))[0])
    _require(committed <= held, f"{name}: slot {slot} has committed more than its pages hold")
    _require(common <= committed, f"{name}: slot {slot} has more in common than it has committed")
    published = max(int(ledger.published_blocks[slot]) * core.page_size, int(ledger.published_exact[slot]))
    # An MTP endpoint lies inside the prefill, whose length is committed only when it is finalised.
    limit = listed if request.policy.mtp else committed
    _require(published <= limit, f"{name}: slot {slot} has published more than it has committed")
    if ledger.state[slot] in (SEATED, TERMINAL):
        _require(listed == committed + request.lookahead, f"{name}: slot {slot} lists {listed}, has {committed}")


def _check_rows(core: Core, request: Request, slot: int, name: str) -> None:
    lease = core.ledger.lease(slot)
    parts = [(core.rows.base, lease.base_pages)]
    if request.paired:
        parts.append((core.rows.draft, lease.draft_pages))
    for table, pages in parts:
        if table is None:
            continue
        row = table.host_row(slot)
        _require(np.array_equal(row[: pages.size], pages), f"{name}: row {slot} does not name its lease's pages")
        _require(bool((row[pages.size :] == -1).all()), f"{name}: row {slot} names more than its lease")


def _check_regions(core: Core) -> None:
    holder, view = core.token.request, core.view.request
    must_hold = [request for request in core.requests.values() if request.state in _TOKEN_STATES]
    _require(len(must_hold) <= 1, f"several requests are between two calls: {[r.id for r in must_hold]}")
    if must_hold:
        _require(holder is must_hold[0], f"request {must_hold[0].id} is {must_hold[0].state} without the token")
    elif holder is not None:
        _require(holder.state == "seating", f"request {holder.id} is {holder.state} and holds the token")
    _require((core.token.state == "held") == (holder is not None), "the token's state and its holder disagree")
    _require((core.view.state == "none") == (view is None), "the view's state and its owner disagree")
    if view is not None:
        _require(
            view.phase == "executing" and view.state != "broken", f"request {view.id} is {view.state} and the view"
        )


def _require(holds: bool, fact: str) -> None:
    if not holds:
        raise InvariantViolation(f"{fact}; this is a bug of the coordinator, report it with the calls that led here")
