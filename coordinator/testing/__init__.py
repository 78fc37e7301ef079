"""Help for tests of programs that embed the coordinator.

``check_invariants`` looks at a coordinator from outside the calls that changed it: every fact is compared from two
sides. It is slow (it looks at every page) and meant for tests; call it at any moment between two calls.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from context_cache.coordinator.coordinator import ContextCacheCoordinator
from context_cache.coordinator.core import ENDED_STATES, WITHHELD_STATES, Core, Request
from context_cache.coordinator.errors import InvariantViolation
from context_cache.coordinator.ledger import BOUND, LEASED, QUARANTINED, SEATED, STATE_NAMES, TERMINAL
from context_cache.coordinator.manager import ResourceType

__all__ = ["check_invariants", "page_owners"]

_TOKEN_STATES = frozenset({"prefilling", "decoding", "decode_retry", "compacting"})


def check_invariants(coordinator: ContextCacheCoordinator) -> None:
    """Raise InvariantViolation naming the first fact that does not hold.

    Checked: the manager's own invariants; pins against leases; ledger against request states; rows against leases; the
    token and the view against the states that may hold them.
    """
    core = coordinator._core
    core.manager.check_invariants()
    pins: Counter[int] = Counter()
    seen: dict[int, str] = {}
    for request in core.requests.values():
        _check_request(core, request, seen, pins)
    pool = ResourceType.BASE_KV_PAGE
    active = core.manager.pools.pool(pool).active
    for page in np.flatnonzero(active).tolist():
        _require(int(active[page]) == pins[page], f"page {page} has {int(active[page])} pins and {pins[page]} leases")
    for slot in range(core.deployment.max_batch):
        if slot not in seen:
            _require(core.ledger.owners[slot] is None, f"resident slot {slot} is owned by nobody's request")
            _require(core.table.bound_epoch(slot) == 0, f"row {slot} is bound, but no request has it")
            _require(int(core.table.host_row(slot).max()) == -1, f"row {slot} names pages, but no request has it")
    _check_regions(core)


def page_owners(coordinator: ContextCacheCoordinator) -> dict[int, tuple[str, ...]]:
    """Who holds each page that has an active reference: request ids with their state, for a leak report.

    A page that no request holds has an empty tuple: it leaked.
    """
    core = coordinator._core
    owners: dict[int, list[str]] = {}
    for request in core.requests.values():
        for slot in request.order.tolist():
            for page in core.ledger.lease(slot).base_pages.tolist():
                owners.setdefault(page, []).append(f"{request.id} ({request.state})")
    active = core.manager.pools.pool(ResourceType.BASE_KV_PAGE).active
    return {page: tuple(owners.get(page, ())) for page in np.flatnonzero(active).tolist()}


def _check_request(core: Core, request: Request, seen: dict[int, str], pins: Counter[int]) -> None:
    ledger, name = core.ledger, f"request {request.id} ({request.state})"
    _require(request.state not in ENDED_STATES - WITHHELD_STATES, f"{name} has ended and is still listed")
    states = {STATE_NAMES[code] for code in ledger.state[request.order].tolist()}
    for slot in request.order.tolist():
        _require(slot not in seen, f"resident slot {slot} belongs to {seen.get(slot)} and to {request.id}")
        seen[slot] = request.id
        _require(ledger.owners[slot] == request.id, f"{name}: resident slot {slot} is owned by {ledger.owners[slot]}")
        pages = ledger.lease(slot).base_pages
        pins.update(pages.tolist())
        committed, listed = int(ledger.committed[slot]), int(ledger.token_count[slot])
        _require(int(ledger.page_count[slot]) == pages.size, f"{name}: slot {slot} counts other pages than its lease")
        _require(
            committed <= pages.size * core.page_size, f"{name}: slot {slot} has committed more than its pages hold"
        )
        _require(
            int(ledger.published_blocks[slot]) * core.page_size <= committed,
            f"{name}: slot {slot} has published more than it has committed",
        )
        if ledger.state[slot] in (SEATED, TERMINAL):
            _require(listed == committed + request.lookahead, f"{name}: slot {slot} lists {listed}, has {committed}")
        if request.state in WITHHELD_STATES:
            _require(ledger.state[slot] == QUARANTINED, f"{name}: slot {slot} is not quarantined")
        elif request.state == "admitted":
            _require(ledger.state[slot] == LEASED, f"{name}: slot {slot} is not leased")
        elif request.state != "broken":
            row = core.table.host_row(slot)
            _require(np.array_equal(row[: pages.size], pages), f"{name}: row {slot} does not name its lease's pages")
            _require(bool((row[pages.size :] == -1).all()), f"{name}: row {slot} names more than its lease")
    if request.state not in WITHHELD_STATES:
        joiners = int(np.count_nonzero(ledger.state[request.order] == BOUND))
        if request.state in ("settled", "seating"):
            _require((joiners > 0) == (request.state == "seating"), f"{name} has {joiners} unfinalised joiners")
            _require("leased" not in states, f"{name} has a sequence whose row is not bound")


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
