"""The checker that embedding programs use says so when a fact is broken, and is silent when none is."""

import numpy as np
import pytest

from context_cache.coordinator import InvariantViolation
from context_cache.coordinator.testing import check_invariants, page_owners


@pytest.fixture
def running(h, T):
    """A founder and an unfinalised joiner, the batch seating."""
    handle = h.begin(T(8), 0)
    h.run_prefill(handle)
    h.admit(handle, [*T(8), 701], 2)
    return handle


def test_nothing_is_said_about_a_healthy_coordinator(h, running):
    check_invariants(h.coordinator)
    h.finish(running)
    check_invariants(h.coordinator)


@pytest.mark.parametrize(
    ("breakage", "fact"),
    [
        (lambda core: core.rows.base._rows.__setitem__((0, 0), 5), "row 0 does not name its lease's pages"),
        (lambda core: core.rows.base.set_row(1, [5]), "row 1 names pages, but no request has it"),
        (lambda core: core.ledger.published_blocks.__setitem__(0, 9), "published more than it has committed"),
        (lambda core: core.ledger.token_count.__setitem__(0, 3), "slot 0 lists 3"),
        (lambda core: core.ledger.committed.__setitem__(0, 99), "committed more than its pages hold"),
        (lambda core: core.ledger.owners.__setitem__(0, "r9"), "owned by r9"),
        (lambda core: core.ledger.owners.__setitem__(1, "r9"), "owned by nobody's request"),
        (lambda core: core.ledger.page_count.__setitem__(0, 1), "counts other pages than its lease"),
        (lambda core: setattr(core.token, "request", None), "the token's state and its holder disagree"),
        (lambda core: setattr(core.view, "request", None), "the view's state and its owner disagree"),
    ],
)
def test_a_broken_fact_is_named(h, running, breakage, fact):
    core = h.coordinator._core
    kept = (core.rows.base._rows.copy(), core.ledger.owners.copy(), core.token.request, core.view.request)
    columns = {name: getattr(core.ledger, name).copy() for name in ("published_blocks", "token_count", "committed")}
    pages = core.ledger.page_count.copy()
    breakage(core)
    with pytest.raises(InvariantViolation, match=fact):
        check_invariants(h.coordinator)
    core.rows.base._rows[:] = kept[0]
    core.ledger.owners[:], core.token.request, core.view.request = kept[1:]
    for name, column in columns.items():
        getattr(core.ledger, name)[:] = column
    core.ledger.page_count[:] = pages
    check_invariants(h.coordinator)


def test_a_leaked_page_is_named_with_nobody_holding_it(h, running):
    """C027. The report names the page; pages of living requests name their owners and states."""
    pools = h.coordinator.manager.pools
    leaked = pools.allocate_pages(0, 1)
    owners = page_owners(h.coordinator)
    assert owners[int(leaked[0])] == ()
    assert owners[int(h.pages(running)[0])] == ("r1 (seating)", "r1 (seating)")
    with pytest.raises(InvariantViolation, match=rf"active counts of \[{int(leaked[0])}\]"):
        check_invariants(h.coordinator)
    pools.unpin(0, np.asarray(leaked))
    check_invariants(h.coordinator)
