"""Plans from checkpoints: only lengths that are stored behind the sequence's own blocks are tried, longest first."""

import attrs
import numpy as np
import pytest

from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.identity import BlockHasher, HashChain
from context_cache.coordinator.manager import (
    CacheRecord,
    CacheRecordKey,
    CacheRecordStore,
    PlanKind,
    RecordFlavour,
    ResourceDemand,
    ReuseMode,
    plan_checkpoint,
    require_coverage,
)

PLAIN, MTP = RecordFlavour.PLAIN, RecordFlavour.MTP


def test_a_checkpoint_is_found_under_its_exact_prefix_and_behind_its_block(desk):
    """Scenario 11."""
    d = desk(4, 0, 2, 2)
    d.cache_at("AB", 6)
    records = d.manager.records
    digest, (a, b) = d.exact("AB", 6), d.hashes("AB")
    assert records.find_hybrid(digest, 6).id == 1
    assert records.find_hybrid(digest, 5) is None
    assert records.find_hybrid(digest, 6, MTP) is None
    assert records.checkpoint_lengths(a, PLAIN) == (6,)
    for block, flavour in ((b"chain root".ljust(32), PLAIN), (b, PLAIN), (a, MTP)):
        assert records.checkpoint_lengths(block, flavour) == ()
    asked = []

    def exact(length):
        asked.append(length)
        return d.exact("AB", length)

    assert d.manager.plan_checkpoint([a], 6, exact_digest=exact).reuse_token_length == 0
    assert asked == []
    assert d.manager.plan_checkpoint([a], 7, exact_digest=exact).reuse_token_length == 6
    assert asked == [6]


def test_lengths_are_distinct_and_longest_first(desk):
    """Tails that differ share a length; the length stays until the last of them is gone."""
    d = desk(20, 0, 9, 9)
    for letters, length in (("A", 5), ("A", 7), ("A", 4), ("A", 3)):
        d.cache_at(letters, length)
    (a,) = d.hashes("A")
    with d.hybrid("A", 7, bypass=True) as lease:
        d.manager.publish_hybrid(lease, [a], b"another tail".ljust(32), 7, d.reserve(lease, True))
    records = d.manager.records
    assert records.checkpoint_lengths(a, PLAIN) == (7, 5, 4)
    assert records.checkpoint_lengths(b"chain root".ljust(32), PLAIN) == (3,)
    d.manager.check_invariants()
    records.erase(2)
    assert records.checkpoint_lengths(a, PLAIN) == (7, 5, 4)
    records.erase(5)
    assert records.checkpoint_lengths(a, PLAIN) == (5, 4)
    records.check()


def test_a_checkpoint_has_to_be_strictly_shorter(desk):
    """Scenario 20."""
    d = desk(8, 0, 2, 2)
    d.cache_at("A", 6)
    plan = d.plan_hybrid("A", 7)
    assert (plan.mode, plan.kind) == (ReuseMode.HYBRID, PlanKind.STANDARD)
    assert (plan.matched_token_length, plan.reuse_token_length, plan.base_pages) == (6, 6, (0,))
    assert (plan.recurrent_slot, plan.partial_slot, plan.protected_record) == (0, 0, 1)
    assert plan.demand == ResourceDemand(1)
    miss = d.plan_hybrid("A", 6)
    assert (miss.kind, miss.reuse_token_length, miss.demand) == (PlanKind.NO_REUSABLE_PREFIX, 0, ResourceDemand(2))


def test_a_damaged_candidate_is_only_a_miss(desk):
    """Scenario 21. The checkpoint at 10 lost its partial slot."""
    d = desk(8, 0, 4, 4)
    d.cache_at("AB", 10)
    d.cache_at("AB", 6)
    records = d.manager.records
    records._by_recency[1] = attrs.evolve(records.get(1), partial_slot=None)
    assert d.plan_hybrid("ABC", 12).reuse_token_length == 6


@pytest.mark.parametrize(
    "damage",
    [
        {"recurrent_slot": None},
        {"spec_page_path": [9, 9], "base_page_path": [0, 1]},
        {"logical_block_hashes": [b"A" * 32, b"X" * 32]},
        {"base_page_path": [0]},
    ],
)
def test_each_damage_is_a_miss(desk, damage):
    d = desk(8, 8, 4, 4)
    d.cache_at("AB", 10, mtp=True)
    records = d.manager.records
    assert d.plan_hybrid("ABC", 12, mtp=True).reuse_token_length == 10
    records._by_recency[1] = attrs.evolve(records.get(1), **damage)
    expected = 10 if "spec_page_path" in damage else 0
    assert d.plan_hybrid("ABC", 12, mtp=True).reuse_token_length == expected


def test_only_tails_of_the_own_chain_are_hashed(monkeypatch):
    """Scenario 21b."""
    hasher, extend, exact = BlockHasher(), [], []
    root = hasher.chain(4).root
    store = CacheRecordStore(4, root)

    def add(tokens, length):
        chain = hasher.chain(4)
        chain.extend_to(tokens)
        blocks = length // 4
        key = CacheRecordKey(chain.exact_digest(tokens, length), blocks)
        store.insert(
            CacheRecord(0, key, chain.digests[:blocks], range(blocks), None, 0, 0 if length % 4 else None, length)
        )

    own = np.arange(1, 12, dtype=np.int32)
    for length in range(4, 1004):
        add(np.arange(length, length + length, dtype=np.int32) + 1000 * length, length)
    add(own, 6)
    assert len(store) == 1001
    add_text, tail_hash = HashChain._add_text, HashChain.exact_digest

    def watched(chain, raw):
        extend.append(len(raw) // 16)
        add_text(chain, raw)

    monkeypatch.setattr(HashChain, "_add_text", watched)
    chain = hasher.chain(4)
    chain.extend_to(own)

    def digest(length):
        exact.append(length)
        return tail_hash(chain, own, length)

    plan = plan_checkpoint(store, chain.digests, 11, 4, exact_digest=digest)
    assert plan.reuse_token_length == 6
    assert (extend, exact) == ([2], [6])


def test_a_long_prompt_without_checkpoints_asks_for_nothing(desk):
    d = desk(40, 0, 2, 2)
    d.cache_at("A", 6)
    plan = d.plan_hybrid("XYZ" * 10, 120)
    assert plan.reuse_token_length == 0
    assert plan.demand == ResourceDemand(30)


def test_without_attention_nothing_is_demanded(desk):
    """Scenario 48, the plan."""
    d = desk(0, 0, 2)
    d.cache_at("A", 3, attention=False)
    plan = d.plan_hybrid("A", 5, attention=False)
    assert (plan.reuse_token_length, plan.base_pages, plan.demand) == (3, (), ResourceDemand())
    assert not plan.has_attention
    assert d.plan_hybrid("X", 5, attention=False, bypass=True).demand == ResourceDemand()
    assert require_coverage(plan, 0) is plan
    with pytest.raises(ContractViolation, match="owns no base pages"):
        require_coverage(plan, 1)


def test_an_aligned_checkpoint_without_attention_has_hashes_but_no_pages(desk):
    d = desk(0, 0, 2)
    d.cache_at("AB", 8, attention=False)
    plan = d.plan_hybrid("ABC", 13, attention=False)
    assert (plan.reuse_token_length, plan.matched_hashes) == (8, tuple(d.hashes("AB")))
    assert d.plan_hybrid("ABC", 13).reuse_token_length == 0, "a sequence with attention needs the pages"


@pytest.mark.parametrize(("length", "kept"), [(5, 1), (8, 1), (4, 0), (3, 0), (9, 2)])
def test_an_mtp_checkpoint_keeps_its_boundary_block_private(desk, length, kept):
    d = desk(12, 12, 2, 2)
    d.cache_at("ABC", length, mtp=True)
    plan = d.plan_hybrid("ABC", 10, mtp=True)
    assert (plan.mode, plan.reuse_token_length) == (ReuseMode.HYBRID_MTP, length)
    assert (plan.base_pages, plan.draft_pages) == (tuple(range(kept)),) * 2
    assert plan.demand == ResourceDemand(3 - kept, 3 - kept)
    assert (plan.recurrent_slot, plan.partial_slot) == (0, 0)


@pytest.mark.parametrize(("length", "reuse"), [(5, 5), (8, 0), (4, 0), (3, 3)])
def test_a_plain_sequence_may_use_an_mtp_checkpoint_whose_shape_fits(desk, length, reuse):
    """20.7: an unaligned one has the plain shape, an aligned one keeps a block less."""
    d = desk(12, 12, 2, 2)
    d.cache_at("ABC", length, mtp=True)
    plan = d.plan_hybrid("ABC", 10)
    assert plan.reuse_token_length == reuse
    assert (plan.draft_pages, plan.demand.draft_kv_pages, plan.owns_paged_spec_state) == ((), 0, False)


def test_a_plain_checkpoint_is_preferred_and_useless_to_an_mtp_sequence(desk):
    d = desk(12, 12, 4, 4)
    d.cache_at("AB", 5, mtp=True)
    d.cache_at("AB", 5)
    assert d.plan_hybrid("AB", 6).protected_record == 2
    assert d.plan_hybrid("AB", 6, mtp=True).protected_record == 1
    d.manager.books.evict((d.manager.records.get(1),))
    assert d.plan_hybrid("AB", 6, mtp=True).reuse_token_length == 0


def test_cold_plans_and_refusals(desk):
    d = desk(12, 12, 2, 2)
    d.cache_at("AB", 5, mtp=True)
    assert d.plan_hybrid("AB", 9, mtp=True, bypass=True).demand == ResourceDemand(3, 3)
    assert d.plan_hybrid("AB", 9, bypass=True).demand == ResourceDemand(3)
    for plan in (d.plan_hybrid("", 0), d.plan_hybrid("", 0, mtp=True)):
        assert (plan.kind, plan.demand) == (PlanKind.STANDARD, ResourceDemand())
    for call in (d.manager.plan_checkpoint, d.manager.plan_mtp):
        for arguments in ((d.hashes("AB"), 7), ([], -1), (d.hashes("A"), 4, "bypass")):
            with pytest.raises(ContractViolation, match="plan:"):
                call(*arguments, exact_digest=lambda length: d.exact("AB", length))


def test_planning_changes_nothing(desk):
    """Scenario 23."""
    d = desk(12, 12, 4, 4)
    d.cache_at("AB", 5, mtp=True)
    d.cache_at("AB", 8)
    before = d.manager.dump()
    for tokens in range(12):
        for mtp in (True, False):
            assert d.plan_hybrid("ABC", tokens, mtp=mtp) == d.plan_hybrid("ABC", tokens, mtp=mtp)
    assert d.manager.dump() == before


def test_a_corrupted_checkpoint_index_is_noticed(desk):
    d = desk(4, 0, 2, 2)
    d.cache_at("A", 6)
    d.manager.records.checkpoints._behind.clear()
    with pytest.raises(InvariantViolation, match="checkpoint index"):
        d.manager.check_invariants()
