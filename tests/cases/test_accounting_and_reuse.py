"""Cases of public bug reports: accounting, and prefix identity, isolation and stale reuse.

Left out, because the thing is not offered here:
C023 a lower cache tier.
C029 a pluggable hash and a second comparison: the digest is keyed and cryptographic (spec 10.1), a collision is not
     provoked by an input.
C036 exchange of weights under a running coordinator: other weights are another adapter generation, or another
     coordinator. Throwing the cache away is ``manager.evict_all`` and tested as C037.
C039 loads that can fail: pages are only ever written by the model.
C040 is in ``tests/identity``.
"""

from __future__ import annotations

import itertools

import pytest

from context_cache.coordinator import AdapterKey, BlockKeyExtras, ContractViolation, Digest, LookupPolicy
from context_cache.coordinator.manager import ContextCacheManager, ResourceDemand, ResourceId, ResourceType

BASE = ResourceType.BASE_KV_PAGE
EIGHT = {"pages": 8, "row_pages": 4, "max_batch": 3, "enforce_min_pool": False}


@pytest.fixture
def eight(harness):
    return harness(**EIGHT)


def produce(h, tokens, **options):
    handle = h.begin(tokens, **options)
    h.run_prefill(handle)
    assert h.finish(handle) is h.OK


def start_of(h, tokens, **options):
    handle = h.begin(tokens, **options)
    start = h.starts[0]
    assert h.finish(handle) is h.OK
    return start


# ---- accounting ------------------------------------------------------------


def test_two_ends_of_one_request_release_its_pages_once(eight, T):
    """C020. The second end is a no-op, whatever order: finish, drop, the end of the context manager."""
    h = eight
    for ends in itertools.permutations(("finish", "drop", "with")):
        with h.begin(T(9)) as handle:
            h.run_prefill(handle)
            for end in ends:
                if end == "finish":
                    assert h.finish(handle) is h.OK
                elif end == "drop":
                    h.drop(handle)
        assert len(set(h.free())) == len(h.free())
        h.check()
    h.manager.evict_all()
    assert sorted(h.free()) == list(range(8))


def test_a_page_that_is_free_cannot_be_released():
    """C021, C022. The release is refused as a clear error, and the books are as before."""
    manager = ContextCacheManager(ResourceDemand(base_kv_pages=8), 4)
    pools = manager.pools
    (page,) = pools.allocate(ResourceDemand(base_kv_pages=1))
    pools.release_active(page)
    before = pools.free_list(BASE)
    for call in (pools.release_active, pools.release_cache, pools.add_active, pools.add_cache):
        with pytest.raises(ContractViolation):
            call(page)
    with pytest.raises(ContractViolation):
        pools.release_active(ResourceId(BASE, -1))
    with pytest.raises(ContractViolation):
        pools.release_active(ResourceId(BASE, 8))
    assert pools.free_list(BASE) == before
    assert len(set(before)) == 8


def test_a_count_below_zero_is_refused_and_a_new_pin_protects_again():
    """C022."""
    pools = ContextCacheManager(ResourceDemand(base_kv_pages=8), 4).pools
    (page,) = pools.allocate(ResourceDemand(base_kv_pages=1))
    pools.add_cache(page)
    pools.release_active(page)
    with pytest.raises(ContractViolation):
        pools.release_active(page)
    assert (pools.active_count(page), pools.cache_count(page), pools.reclaimable_count(BASE)) == (0, 1, 1)
    pools.add_active(page)
    assert pools.active_count(page) == 1
    assert pools.reclaimable_count(BASE) == 0


@pytest.mark.parametrize("first", ["lease", "record"])
def test_a_page_is_released_by_whichever_holder_comes_last(eight, T, first):
    """C024. Lease first or record first: free once, in both orders."""
    h = eight
    handle = h.begin(T(5))
    h.run_prefill(handle)
    if first == "lease":
        h.finish(handle)
        assert 0 not in h.free()
        h.manager.evict_all()
    else:
        h.manager.evict_all()
        assert 0 not in h.free()
        h.finish(handle)
    assert sorted(h.free()) == list(range(8))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_holders_of_a_shared_prefix_may_end_in_any_order(eight, T, order):
    """C025. A parent of two pages and two forks with one own page each."""
    h = eight
    parent = h.begin(T(8), 0, headroom=1)
    h.run_prefill(parent)
    forks = [h.begin([*T(8), 71], 1), h.begin([*T(8), 72], 2)]
    assert [h.active(page) for page in (0, 1)] == [3, 3]
    holders = [parent, *forks]
    for left, who in enumerate(order):
        h.drop(holders[who])
        assert [h.active(page) for page in (0, 1)] == [2 - left] * 2
        h.check()
    h.manager.evict_all()
    assert sorted(h.free()) == list(range(8))


def test_a_request_that_does_not_fit_fails_as_a_whole_and_may_be_tried_again(harness, T):
    """C026. Rows and free pages are as before; with enough free pages the same request succeeds."""
    h = harness(pages=8, row_pages=8, max_batch=3, enforce_min_pool=False)
    holder = h.begin(list(range(101, 120)), 1)
    assert len(h.free()) == 3
    before = h.dump()
    result = h.try_begin([h.sequence_admission(T(18), 0)])
    assert (result.status, result.insufficient_capacity) == (h.REQUEST_FAILED, True)
    assert h.dump() == before
    h.drop(holder)
    handle = h.begin(T(18))
    assert len(h.pages(handle)) == 5


def test_closing_with_a_live_request_names_it(eight, T):
    """C027. The check at the end names the owner; in the middle of an ordinary step it has nothing to say."""
    h = eight
    handle = h.begin(T(5))
    h.check()
    h.run_prefill(handle)
    h.check()
    with pytest.raises(Exception, match=str(handle.id)):
        h.coordinator.close()
    h.drop(handle)
    h.coordinator.close()


def test_a_discarded_plan_has_changed_nothing(eight, T):
    """C028. Four cached-idle pages survive any number of plans, also of plans that would evict them."""
    h = eight
    produce(h, T(9))
    produce(h, [51, 52, 53, 54, 55, 56, 57, 58, 59])
    before = h.manager.dump()
    for record_id in list(h.records()):
        hashes = h.manager.records.get(record_id).logical_block_hashes
        for length in (8, 9, 12, 4000):
            h.manager.plan(list(hashes), length, LookupPolicy.USE_CACHE)
    assert h.manager.dump() == before
    assert start_of(h, [*T(8), 99]) == 8


def test_refused_admissions_are_not_counted_as_hits(eight, T):
    """C136. A request with 2 matching pages, refused once and then admitted: one request, two hit pages."""
    h = eight
    produce(h, T(9))
    holder = h.begin_batch([list(range(101, 116)), [201, 202, 203]], [1, 2])
    assert h.try_begin([h.sequence_admission([*T(8), *range(301, 308)], 0)]).status is h.REQUEST_FAILED
    before = h.metrics()
    h.drop(holder)
    h.begin([*T(8), *range(301, 308)])
    after = h.metrics()
    assert before["hit_sequences"] == 0
    assert (after["hit_sequences"], after["matched_tokens"], after["reused_tokens"]) == (1, 8, 8)


# ---- identity and reuse ------------------------------------------------------------


def test_another_generation_of_an_adapter_reuses_nothing(eight, T):
    """C030. Its name alone is no identity; base-model pages are another identity again."""
    h = eight
    name = Digest(b"adapter-a" + bytes(7))
    one, two = (BlockKeyExtras(adapter=AdapterKey(name, generation)) for generation in (1, 2))
    produce(h, T(5), extras=one)
    produce(h, T(5))
    assert start_of(h, T(6), extras=one) == 4
    assert start_of(h, T(6), extras=two) == 0
    assert start_of(h, T(6)) == 4


def test_a_salt_isolates_in_both_directions(eight, T):
    """C031. Both halves: s1 reuses, s2 and no salt do not, and the reverse."""
    h = eight
    s1, s2 = (BlockKeyExtras(isolation_digest=Digest(bytes([n]) * 16)) for n in (1, 2))
    produce(h, T(9), extras=s1)
    assert start_of(h, T(9), extras=s1) == 8
    assert start_of(h, T(9), extras=s2) == 0
    assert start_of(h, T(9)) == 0
    produce(h, [51, 52, 53, 54, 55])
    assert start_of(h, [51, 52, 53, 54, 55], extras=s1) == 0


def test_an_empty_salt_is_refused():
    """C031, the rule: a digest has at least 16 bytes, so an empty salt cannot be mistaken for none."""
    with pytest.raises(ContractViolation):
        BlockKeyExtras(isolation_digest=Digest(b""))


def test_an_identity_does_not_survive_the_recycling_of_its_page(eight):
    """C032. After a complete churn of the pool no entry names a page that holds something else."""
    h = eight
    produce(h, [1, 2, 3, 4, 5])
    for n in range(24):
        produce(h, [100 + n, 2, 3, 4, 5])
        h.check()
    assert start_of(h, [1, 2, 3, 4, 6]) == 0
    assert start_of(h, [123, 2, 3, 4, 6]) == 4


def test_with_reuse_off_no_page_ever_gets_an_identity(eight, T):
    """C033. 50 identical prompts through 8 pages."""
    h = eight
    for _ in range(50):
        produce(h, T(8), lookup=LookupPolicy.BYPASS)
    assert h.records() == {}
    assert h.all_cached() == {}
    assert h.metrics()["hit_sequences"] == 0
    assert sorted(h.free()) == list(range(8))


@pytest.mark.parametrize("pressure", range(1, 8))
def test_a_hit_is_always_a_contiguous_prefix(harness, T, pressure):
    """C034. Records of one, two and three blocks of one prompt; whatever is evicted, no block is used without its
    parents. A record holds its whole path, so the tail goes before its ancestors."""
    h = harness(pages=8, row_pages=8, max_batch=2, enforce_min_pool=False)
    for length in (13, 9, 5):
        produce(h, T(length))
    assert list(h.records().values()) == [[0, 1, 2], [0, 1], [0]]
    filler = h.begin(list(range(101, 101 + 4 * pressure - 1)), 1)
    for pages in h.records().values():
        assert pages == [0, 1, 2][: len(pages)]
    h.check()
    h.drop(filler)
    longest = max(map(len, h.records().values()), default=0)
    assert start_of(h, T(13)) == 4 * longest


def test_a_full_hit_on_a_page_boundary_recomputes_and_can_be_hit_again(eight, T):
    """C035. At least one token is computed, and the third run finds the same prefix."""
    h = eight
    produce(h, T(8))
    assert start_of(h, T(8)) == 4
    produce(h, T(8))
    assert start_of(h, T(8)) == 4
    assert len(h.records()) == 1
    assert start_of(h, T(9)) == 8


def test_a_reset_while_a_request_runs_leaves_nothing_findable_and_nobody_hurt(eight, T):
    """C037. All records go, the running request keeps its pages."""
    h = eight
    running = h.begin(T(9), 0)
    h.run_prefill(running)
    assert h.manager.evict_all() == 1
    assert h.records() == {}
    assert h.all_cached() == {}
    assert start_of(h, T(10), resident=1) == 0
    h.decode(running, 902)
    assert h.manager.evict_all() == 0, "a second reset has nothing to do"
    assert h.pages(running) == [0, 1, 2]
    assert h.finish(running) is h.OK
    assert sorted(h.free()) == list(range(8))


@pytest.mark.parametrize("end", ["drop", "finish"])
def test_pages_that_were_never_written_return_without_an_identity(eight, T, end):
    """C038. Prefill enqueued or not: without its finalisation nothing is findable."""
    h = eight
    for prepare in (False, True):
        handle = h.begin(T(9))
        if prepare:
            assert h.coordinator.prepare_prefill(handle) is h.OK
        h.drop(handle) if end == "drop" else h.finish(handle)
        assert h.records() == {}
        assert start_of(h, T(9)) == 0


def test_a_revived_page_is_not_handed_out_again(eight, T):
    """C044. A hit revives a cached-idle page; who then takes every other page never gets it."""
    h = eight
    produce(h, T(5))
    revived = h.begin(T(6), 0)
    assert 0 in h.pages(revived)
    others = h.begin_batch([list(range(101, 116)), [201, 202, 203, 204, 205, 206, 207]], [1, 2])
    taken = h.pages(others, 0) + h.pages(others, 1)
    assert 0 not in taken
    assert len(set(taken)) == 6
    assert h.free() == []


def test_pages_without_identity_go_before_cached_ones(eight, T):
    """C045."""
    h = eight
    produce(h, [*T(13), 14, 15])
    handle = h.begin([61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71], 0)
    h.finish(handle)
    taken = h.begin([91, 92, 93], 1)
    assert h.pages(taken)[0] not in h.all_cached()
    assert h.metrics()["evicted_records"] == 0
    assert start_of(h, [*T(12), 99], resident=2) == 12
