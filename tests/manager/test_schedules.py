"""Random schedules: the invariants hold after every step, and nothing is lost in the end."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from context_cache.coordinator.manager import (
    AcquireStatus,
    ContextCacheManager,
    LookupPolicy,
    PublicationStatus,
    ResourceDemand,
    ResourceType,
    require_coverage,
)

PAGE = 4
BASE = ResourceType.BASE_KV_PAGE


class FreePages:
    """Fails when a page is handed out twice or freed twice."""

    def __init__(self, capacity: int) -> None:
        self.free = set(range(capacity))

    def leased(self, type, indices) -> None:
        pages = set(indices.tolist())
        assert len(pages) == len(indices)
        assert pages <= self.free, f"{pages - self.free} handed out while in use"
        self.free -= pages

    def freed(self, type, indices) -> None:
        pages = set(indices.tolist())
        assert len(pages) == len(indices)
        assert not pages & self.free, f"{pages & self.free} freed twice"
        self.free |= pages


class Schedule(RuleBasedStateMachine):
    """Sequences over a tree of prompts: letter i of a prompt is one of two children of the prefix before it."""

    @initialize(
        capacity=st.integers(1, 12),
        max_records=st.one_of(st.none(), st.integers(0, 5)),
        touch_on_hit=st.booleans(),
    )
    def start(self, capacity, max_records, touch_on_hit):
        self.observer = FreePages(capacity)
        self.manager = ContextCacheManager(
            ResourceDemand(capacity), PAGE, max_records=max_records, observer=self.observer, touch_on_hit=touch_on_hit
        )
        self.capacity = capacity
        self.leases = {}  # lease -> the hashes of its whole sequence

    @staticmethod
    def chain(bits):
        """One hash per block, each a function of the whole prefix."""
        return [bytes([len(bits[: n + 1]), *bits[: n + 1]]).ljust(32, b"\0") for n in range(len(bits))]

    @rule(
        bits=st.lists(st.integers(0, 1), max_size=6),
        tail=st.integers(0, PAGE - 1),
        policy=st.sampled_from(LookupPolicy),
        headroom=st.integers(0, 9),
    )
    def acquire(self, bits, tail, policy, headroom):
        hashes, tokens = self.chain(bits), len(bits) * PAGE + tail
        plan = self.manager.plan(hashes, tokens, policy)
        assert plan.reuse_token_length < tokens or tokens == 0
        plan = require_coverage(plan, -(-(tokens + headroom) // PAGE))
        before = self.manager.dump()
        result = self.manager.acquire(plan)
        if result.status is AcquireStatus.INSUFFICIENT_CAPACITY:
            assert self.manager.dump() == before
            # A cold plan needs every page that the hit would have bound, so it cannot fit either.
            cold = self.manager.plan(hashes, tokens, LookupPolicy.BYPASS)
            cold = require_coverage(cold, -(-(tokens + headroom) // PAGE))
            assert self.manager.acquire(cold).status is AcquireStatus.INSUFFICIENT_CAPACITY
            return
        lease = result.lease
        assert lease.base_pages[: len(plan.base_pages)].tolist() == list(plan.base_pages)
        assert lease.page_count == len(plan.base_pages) + plan.demand.base_kv_pages
        self.leases[lease] = bits

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def grow(self, data):
        leases = data.draw(st.lists(st.sampled_from(list(self.leases)), max_size=3))
        counts = data.draw(st.lists(st.integers(0, 4), min_size=len(leases), max_size=len(leases)))
        before, views = self.manager.dump(), [lease.base_pages.tolist() for lease in leases]
        pools = self.manager.pools
        room = pools.free_count(BASE) + pools.reclaimable_count(BASE)
        expected = []
        for position, count in enumerate(counts):
            if count <= room:
                room -= count
            else:
                expected.append(position)
        refused = self.manager.grow_all(leases, np.array(counts, dtype=np.int32))
        assert list(refused) == expected
        if refused:
            assert self.manager.dump() == before
        else:
            for lease, view in zip(leases, views, strict=True):
                assert lease.base_pages.tolist()[: len(view)] == view

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=2))
    def publish(self, data, more):
        lease = data.draw(st.sampled_from(list(self.leases)))
        bits = self.leases[lease] = self.leases[lease] + more
        blocks = min(len(bits), lease.page_count)
        if blocks == 0:
            return
        pages = lease.base_pages.tolist()
        result = self.manager.publish(lease, self.chain(bits), blocks * PAGE + 1)
        assert lease.base_pages.tolist() == pages
        assert result.block_count == blocks
        if result.record_id is not None:
            assert self.manager.records.lru_to_mru()[-1] == result.record_id
            assert self.manager.index.lookup_prefix(self.chain(bits)[:blocks]) == result.base_pages.tolist()
        else:
            assert result.status is PublicationStatus.PUBLISHED
            assert self.manager.max_records == 0

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(list(self.leases)))
        del self.leases[lease]
        lease.release()

    @rule()
    def evict_all(self):
        self.manager.evict_all()
        assert len(self.manager.index) == 0

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        assert self.observer.free == set(self.manager.pools.free_list(BASE))
        dump = self.manager.dump()
        active, cache = dump["pools"]["BASE_KV_PAGE"]["active"], dump["pools"]["BASE_KV_PAGE"]["cache"]
        held = [page for lease in self.leases for page in lease.base_pages.tolist()]
        listed = [page for record in dump["records"] for page in record["base"]]
        for page in range(self.capacity):
            assert active[page] == held.count(page)
            assert cache[page] == listed.count(page)
        assert len(dump["records"]) <= self.manager.max_records

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for lease in self.leases:
            lease.release()
        self.manager.evict_all()
        self.manager.check_invariants()
        assert sorted(self.manager.pools.free_list(BASE)) == list(range(self.capacity))


Schedule.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedule = Schedule.TestCase
