"""Cases of public bug reports: abort and request identity, release under a running device, completion signals.

Left out, because the thing is not offered here:
C001 a queue before admission: the coordinator knows a request only once it holds its leases.
C008 export of finished pages: finished requests keep nothing.
C011 sliding windows: a lease is append-only, nothing is trimmed.
C012 preemption and host store: a request leaves only by finish, drop or compaction.
C013, C017 leases with an expiry: a lease ends with its request and by nothing else.
C014 copies between pages: partial pages are not shared.
C016, C018, C019 asynchronous loads and stores with events of their own: there is one stream and one drain.
"""

from __future__ import annotations

import pytest

from context_cache.coordinator import ContextCacheSequenceAdvance, ContractViolation, ResidentRef

EIGHT = {"pages": 8, "row_pages": 4, "max_batch": 3, "enforce_min_pool": False}


@pytest.fixture
def eight(harness):
    """8 pages of 4 tokens, as the cases assume."""
    return harness(**EIGHT)


def balanced(h):
    """The books balance: every page is free, leased or cached-idle, and the three add up to the pool."""
    free = set(h.free())
    leased = set(h.all_active())
    idle = {page for page in h.all_cached() if page not in leased}
    assert len(free) == len(h.free())
    assert not free & leased
    assert not free & idle
    assert len(free) + len(leased) + len(idle) == h.pages_total
    h.check()


def test_a_refused_admission_leaves_no_pin_on_what_it_matched(eight, T):
    """C002. The lookup pins two pages, the lease does not come about: both are evictable again."""
    h = eight
    producer = h.begin(T(9))
    h.run_prefill(producer)
    h.finish(producer)
    holder = h.begin(list(range(101, 116)), 1)
    hungry = h.begin([201, 202, 203], 2)
    assert len(h.free()) == 1
    result = h.try_begin([h.sequence_admission([*T(8), *range(301, 308)], 0)])
    assert (result.status, result.insufficient_capacity) == (h.REQUEST_FAILED, True)
    assert [h.active(page) for page in (0, 1)] == [0, 0]
    balanced(h)
    h.drop(holder)
    h.drop(hungry)
    newcomer = h.begin_batch([list(range(401, 416)), list(range(501, 516))], [0, 1])
    assert sorted(h.pages(newcomer, 0) + h.pages(newcomer, 1)) == list(range(8))
    assert h.records() == {}


def test_an_abort_in_the_middle_of_a_prefill_gives_pages_and_row_back(eight, T):
    """C003. The row can be taken again at once, with nothing left on the device."""
    h = eight
    handle = h.begin(T(12))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.drop(handle)
    assert handle.state == "released"
    assert sorted(h.free()) == list(range(8))
    assert h.device_row(0) == [-1] * 4
    balanced(h)
    again = h.begin(T(12))
    h.run_prefill(again)
    assert h.starts == [0], "the aborted prefill published nothing"


def test_all_requests_may_be_aborted_and_submitted_again(eight, T):
    """C004. A running and an admitted request end the same way, and both prompts are accepted again."""
    h = eight
    running, waiting = h.begin(T(6), 0), h.begin([51, 52, 53], 1)
    h.run_prefill(running)
    for handle in (running, waiting):
        h.drop(handle)
    assert (running.state, waiting.state) == ("released", "released")
    again = [h.begin(T(6), 0), h.begin([51, 52, 53], 1)]
    for handle in again:
        h.run_prefill(handle)
        assert h.finish(handle) is h.OK
    balanced(h)


def test_ending_a_batch_ends_all_its_branches_and_releases_shared_pages_once(eight, T):
    """C005. Three sequences share two prompt pages and own one page each."""
    h = eight
    producer = h.begin(T(9))
    h.run_prefill(producer)
    h.finish(producer)
    parent = h.begin_batch([[*T(8), tail] for tail in (11, 12, 13)])
    assert h.starts == [8, 8, 8]
    h.run_prefill(parent)
    assert [h.active(page) for page in (0, 1)] == [3, 3]
    assert len(h.all_active()) == 5
    h.drop(parent)
    assert h.all_active() == {}
    balanced(h)
    h.manager.evict_all()
    assert sorted(h.free()) == list(range(8))


def test_requests_that_end_straight_after_prefill_release_everything(eight, T):
    """C006. Nothing grows from the first to the third."""
    h = eight
    free = []
    for _ in range(3):
        handle = h.begin(T(6))
        h.run_prefill(handle)
        assert h.finish(handle) is h.OK
        assert h.row(0) == [-1] * 4
        assert h.all_active() == {}
        balanced(h)
        free.append(len(h.free()))
    assert free == [7, 7, 7]


def test_ids_are_made_inside_and_are_never_the_same(eight, T):
    """C007, the second outcome: ids are the coordinator's own, so nobody can overwrite an owner."""
    h = eight
    one, two = h.begin(T(3), 0), h.begin(T(3), 1)
    ended = one.id
    assert one.id != two.id
    h.drop(one)
    three = h.begin(T(3), 0)
    assert three.id not in (ended, two.id)
    assert h.finish(one) is h.OK, "the stale handle reaches nobody else's request"
    assert three.state == "admitted"
    assert three.valid


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_below_one_page_completes_and_keeps_nothing(eight, T, length):
    """C009. There is no full page to keep; that is no error."""
    h = eight
    handle = h.begin(T(length))
    h.run_prefill(handle)
    assert h.metrics()["publication_attempts"] == 0
    assert h.finish(handle) is h.OK
    assert h.records() == {}
    assert sorted(h.free()) == list(range(8))


def test_pages_of_an_aborted_request_are_held_until_the_device_is_done(eight, T):
    """C010. While the drain waits nobody else can have the pages; a failed drain keeps them for good."""
    h = eight
    handle = h.begin(T(9))
    assert h.pages(handle) == [0, 1, 2]
    assert h.coordinator.prepare_prefill(handle) is h.OK
    seen = []
    h.sync.before = lambda: seen.append((h.free(), h.all_active()))
    h.sync.fail = True
    h.drop(handle)
    assert seen == [([3, 4, 5, 6, 7], {0: 1, 1: 1, 2: 1})]
    assert h.free() == [3, 4, 5, 6, 7]
    assert h.try_begin([h.sequence_admission(list(range(50, 65)), 1)]).status is h.POISONED
    h.heal()
    assert h.coordinator.shutdown() is h.OK
    assert sorted(h.free()) == list(range(8))


def test_a_completion_that_arrives_after_the_abort_reaches_nobody(eight, T):
    """C015. The caller's report about an ended request is refused by name and changes nothing."""
    h = eight
    handle = h.begin(T(9))
    other = h.begin([51, 52], 1)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.drop(handle)
    before = h.dump()
    with pytest.raises(ContractViolation):
        h.coordinator.finalize_prefill_publication(handle, [ContextCacheSequenceAdvance((901,), 9)])
    with pytest.raises(ContractViolation):
        h.coordinator.complete_decode_step(handle, [ContextCacheSequenceAdvance((901,), 9)], ())
    assert h.dump() == before
    h.run_prefill(other)


def test_a_row_of_a_withheld_request_is_not_handed_out(eight, T):
    """C010 for the row: see also scenario 77."""
    h = eight
    h.poison(0)
    assert h.try_begin([h.sequence_admission(T(3), ResidentRef(0, 50))]).status is h.POISONED
    assert h.row(0) != [-1] * 4
