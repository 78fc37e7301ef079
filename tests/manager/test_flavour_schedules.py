"""Random schedules of every flavour: the invariants hold after every step, and nothing is lost in the end.

Attention-only schedules with a closer look at pages are in ``test_schedules``.
"""

from __future__ import annotations

from collections import Counter

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
    ReuseMode,
    require_coverage,
)

PAGE = 4
ROOT = b"root".ljust(32)
# What the sequences of a deployment may be; the paged ones live together with plain ones, as they do in a coordinator.
DEPLOYMENTS = {
    "eagle": ("eagle", "vanilla"),
    "draft": ("draft", "vanilla"),
    "shared-kv": ("shared-kv", "vanilla"),
    "hybrid": ("hybrid",),
    "recurrent": ("recurrent",),
    "hybrid-mtp": ("mtp", "hybrid"),
}
PAGED = ("eagle", "draft", "mtp")
# Few and branching late, so that sequences meet each other's records.
PROMPTS = st.sampled_from([(0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0)])


class Observer:
    """Fails when a resource is handed out twice or freed twice."""

    def __init__(self, capacities: ResourceDemand) -> None:
        self.free = {type: set(range(capacities.counts[type])) for type in ResourceType}

    def leased(self, type, indices) -> None:
        assert len(set(indices.tolist())) == len(indices)
        assert set(indices.tolist()) <= self.free[type]
        self.free[type] -= set(indices.tolist())

    def freed(self, type, indices) -> None:
        assert len(set(indices.tolist())) == len(indices)
        assert not set(indices.tolist()) & self.free[type]
        self.free[type] |= set(indices.tolist())


class FlavourSchedule(RuleBasedStateMachine):
    """Sequences over a tree of prompts: bit i says which of two children of the prefix before it block i is."""

    @initialize(
        deployment=st.sampled_from(list(DEPLOYMENTS)),
        pages=st.integers(4, 16),
        drafts=st.integers(4, 16),
        slots=st.integers(1, 5),
        partials=st.integers(1, 5),
        max_records=st.sampled_from([None, None, 6, 3, 1, 0]),
        touch_on_hit=st.booleans(),
    )
    def start(self, deployment, pages, drafts, slots, partials, max_records, touch_on_hit):
        self.kinds = DEPLOYMENTS[deployment]
        checkpoints = deployment in ("hybrid", "recurrent", "hybrid-mtp")
        attention = deployment != "recurrent"
        self.capacities = ResourceDemand(
            pages if attention else 0,
            drafts if self.kinds[0] in PAGED else 0,
            slots if checkpoints else 0,
            partials if checkpoints and attention else 0,
        )
        self.observer = Observer(self.capacities)
        self.manager = ContextCacheManager(
            self.capacities, PAGE, max_records=max_records, observer=self.observer, touch_on_hit=touch_on_hit,
            chain_root=ROOT,
        )  # fmt: skip
        self.leases = {}  # lease -> the bits of its whole sequence
        self.content = {}  # recurrent slot -> exact digest that it was published for

    @staticmethod
    def digest(bits, length):
        blocks, tail = divmod(length, PAGE)
        if not length:
            return ROOT
        return bytes([blocks, tail, *bits[: blocks + (tail > 0)]]).ljust(32, b"\0")

    def hashes(self, bits, blocks):
        return [self.digest(bits, PAGE * (n + 1)) for n in range(blocks)]

    def plan(self, kind, bits, tokens, policy):
        hashes = self.hashes(bits, tokens // PAGE)
        manager = self.manager
        if kind == "vanilla":
            return manager.plan(hashes, tokens, policy)
        if kind in ("eagle", "draft", "shared-kv"):
            return manager.plan_spec(
                hashes, tokens, policy, owns_paged=kind in PAGED, future_dependency_tokens=int(kind == "eagle")
            )

        def exact(length):
            named = [
                manager.records.checkpoint_lengths(block, flavour) for block in (ROOT, *hashes) for flavour in (0, 1)
            ]
            assert any(length in lengths for lengths in named), "a length that the index does not name was asked for"
            return self.digest(bits, length)

        if kind == "mtp":
            return manager.plan_mtp(hashes, tokens, policy, exact_digest=exact)
        return manager.plan_checkpoint(
            hashes, tokens, policy, exact_digest=exact, has_attention=kind != "recurrent"
        )  # fmt: skip

    @rule(
        data=st.data(),
        bits=PROMPTS,
        tokens=st.integers(0, 5 * PAGE),
        policy=st.sampled_from([LookupPolicy.USE_CACHE, LookupPolicy.USE_CACHE, LookupPolicy.BYPASS]),
        headroom=st.integers(0, 5),
    )
    def acquire(self, data, bits, tokens, policy, headroom):
        self.admit(data.draw(st.sampled_from(self.kinds)), bits, tokens, policy, headroom)

    @rule(data=st.data(), bits=PROMPTS, tokens=st.integers(PAGE, 4 * PAGE), more=st.integers(1, 2 * PAGE))
    def live_and_continue(self, data, bits, tokens, more):
        """A whole life, published at its end, and a longer sequence of the same prompt after it."""
        kinds = [data.draw(st.sampled_from(self.kinds)) for _ in range(2)]
        lease = self.admit(kinds[0], bits, tokens, LookupPolicy.USE_CACHE, 0)
        if lease is not None:
            self.publish_up_to(lease, tokens)
            del self.leases[lease]
            lease.release()
        self.admit(kinds[1], bits, tokens + more, LookupPolicy.USE_CACHE, 0)

    def admit(self, kind, bits, tokens, policy, headroom):
        before = self.manager.dump()
        plan = self.plan(kind, bits, tokens, policy)
        assert plan.reuse_token_length < tokens or tokens == 0
        assert self.manager.dump() == before
        need = -(-(tokens + headroom) // PAGE)
        plan = require_coverage(plan, need if plan.has_attention else 0, need if plan.owns_paged_spec_state else 0)
        if plan.recurrent_slot is not None:
            assert self.content[plan.recurrent_slot] == self.digest(bits, plan.reuse_token_length)
        result = self.manager.acquire(plan)
        if result.status is AcquireStatus.INSUFFICIENT_CAPACITY:
            assert self.manager.dump() == before
            return None
        lease = result.lease
        assert lease.base_pages.tolist()[: len(plan.base_pages)] == list(plan.base_pages)
        assert lease.draft_pages.tolist()[: len(plan.draft_pages)] == list(plan.draft_pages)
        assert lease.page_count == (need if plan.has_attention else 0)
        assert lease.draft_page_count == (need if plan.owns_paged_spec_state else 0)
        self.leases[lease] = bits
        return lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def grow(self, data):
        leases = data.draw(st.lists(st.sampled_from(list(self.leases)), max_size=3))
        base = [data.draw(st.integers(0, 3)) for _ in leases]
        draft = [data.draw(st.integers(0, 3)) if lease.plan.owns_paged_spec_state else 0 for lease in leases]
        before, pools = self.manager.dump(), self.manager.pools
        room = [pools.free_count(type) + pools.reclaimable_count(type) for type in list(ResourceType)[:2]]
        expected = []
        for position, (count, more) in enumerate(zip(base, draft, strict=True)):
            if count <= room[0] and more <= room[1]:
                room = [room[0] - count, room[1] - more]
            else:
                expected.append(position)
        assert list(self.manager.grow_all(leases, base, draft)) == expected
        if expected:
            assert self.manager.dump() == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), length=st.integers(1, 28))
    def publish(self, data, length):
        self.publish_up_to(data.draw(st.sampled_from(list(self.leases))), length)

    def publish_up_to(self, lease, length):
        bits, plan = self.leases[lease], lease.plan
        pages = min(lease.page_count, lease.draft_page_count) if plan.owns_paged_spec_state else lease.page_count
        length = min(length, pages * PAGE if plan.has_attention else length)
        before = lease.base_pages.tolist(), lease.draft_pages.tolist()
        if lease.mode in (ReuseMode.VANILLA, ReuseMode.SPEC):
            dependency = plan.replay_dependency
            if length < PAGE * (dependency.block_count if dependency else 1):
                return
            result = self.manager.publish(lease, self.hashes(bits, length // PAGE), length)
        else:
            mtp = lease.mode is ReuseMode.HYBRID_MTP
            needs_partial = mtp or (plan.has_attention and length % PAGE != 0)
            reservation = next(
                (each for each in lease.reservations if (each.partial_slot is not None) == needs_partial), None
            )
            if reservation is None:
                reservation = self.manager.reserve_snapshots(lease, needs_partial)
            if reservation is None or not length:
                return
            publish = self.manager.publish_hybrid_mtp if mtp else self.manager.publish_hybrid
            hashes, digest = self.hashes(bits, (length - mtp) // PAGE), self.digest(bits, length)
            slot = reservation.recurrent_slot
            if self.manager.pools.dump()["RECURRENT_SNAPSHOT"]["cache"][slot]:
                return  # a slot holds one checkpoint
            result = publish(lease, hashes, digest, length, reservation)
            if result.status is PublicationStatus.PUBLISHED:
                self.content[slot] = digest
        assert (lease.base_pages.tolist(), lease.draft_pages.tolist()) == before
        if result.record_id is None:
            assert self.manager.max_records == 0
        else:
            assert self.manager.records.lru_to_mru()[-1] == result.record_id

    @precondition(lambda self: any(lease.mode in (ReuseMode.HYBRID, ReuseMode.HYBRID_MTP) for lease in self.leases))
    @rule(data=st.data(), partial=st.booleans(), what=st.sampled_from(["reserve", "reserve", "restored", "retire"]))
    def snapshots(self, data, partial, what):
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.mode.value.startswith("hybrid")]))
        if what == "restored":
            self.manager.release_restored_snapshots(lease)
            assert (lease.recurrent_slot, lease.partial_slot) == (None, None)
        elif what == "retire" and lease.reservations:
            self.manager.retire_reservation(lease, data.draw(st.sampled_from(lease.reservations)))
        elif what == "reserve":
            before = self.manager.dump()
            if self.manager.reserve_snapshots(lease, partial and lease.has_attention) is None:
                assert self.manager.dump() == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(list(self.leases)))
        del self.leases[lease]
        lease.release()

    @rule()
    def evict_all(self):
        self.manager.evict_all()
        assert len(self.manager.index) == len(self.manager.drafts) == 0

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        dump = self.manager.dump()
        held, listed = Counter(), Counter()
        for lease in self.leases:
            held.update([(0, page) for page in lease.base_pages.tolist()])
            held.update([(1, page) for page in lease.draft_pages.tolist()])
            for pair in ((lease.recurrent_slot, lease.partial_slot), *map(_slots, lease.reservations)):
                held.update([(2 + kind, slot) for kind, slot in enumerate(pair) if slot is not None])
        for record in dump["records"]:
            listed.update([(0, page) for page in record["base"]])
            listed.update([(1, page) for page in record["draft"] or ()])
            listed.update([(2 + kind, record[name]) for kind, name in enumerate(("recurrent", "partial"))])
        for type in ResourceType:
            counts = dump["pools"][type.name]
            assert self.observer.free[type] == set(counts["free"])
            assert counts["active"] == [held[type, index] for index in range(self.capacities.counts[type])]
            assert counts["cache"] == [listed[type, index] for index in range(self.capacities.counts[type])]
        boundaries = Counter(
            (hash, count, record["id"])
            for record in dump["records"]
            if record["draft"]
            for count, hash in enumerate(record["hashes"], 1)
        )
        assert boundaries == Counter((*key, id) for key, ids in dump["drafts"].items() for id in ids)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for lease in self.leases:
            lease.release()
        self.manager.evict_all()
        self.manager.check_invariants()
        for type in ResourceType:
            assert len(self.manager.pools.free_list(type)) == self.capacities.counts[type]


def _slots(reservation):
    return reservation.recurrent_slot, reservation.partial_slot


FlavourSchedule.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestFlavourSchedule = FlavourSchedule.TestCase
