"""Exact-prefix digests (10.4): a prefix of any length has an identity, and only its tail is hashed for it."""

from __future__ import annotations

from itertools import combinations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.identity import AdapterKey, BlockHasher, BlockKeyExtras, Digest, HashChain, MediaSpanKey

P = 4
HASHER = BlockHasher(b"k" * 32)
ONE, TWO = Digest(b"\x01" * 16), Digest(b"\x02" * 16)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def chain_of(tokens, extras=BlockKeyExtras(), media=(), page_size=P, hasher=HASHER) -> HashChain:  # noqa: B008
    chain = hasher.chain(page_size, extras)
    chain.extend_to(tokens, media)
    return chain


def exact(tokens, length=None, **more) -> Digest:
    media = more.get("media", ())
    return chain_of(tokens, **more).exact_digest(tokens, tokens.size if length is None else length, media)


def test_the_empty_prefix_is_the_root_and_whole_blocks_are_their_last_digest():
    tokens = ids(*range(1, 12))
    chain = chain_of(tokens)
    assert chain.exact_digest(tokens, 0) == chain.root
    assert [chain.exact_digest(tokens, length) for length in (4, 8)] == chain.digests
    assert chain.exact_digest(ids(), 8) == chain.digests[1], "a whole block needs no tokens"


def test_the_root_is_the_same_for_every_chain_of_a_hasher():
    roots = {
        HASHER.chain(P).root,
        HASHER.chain(7).root,
        HASHER.chain(P, BlockKeyExtras(isolation_digest=ONE)).root,
        chain_of(ids(1, 2, 3, 4)).root,
        chain_of(ids(1, 2, 3, 4)).fork().root,
        BlockHasher(b"k" * 32).chain(P).root,
    }
    assert len(roots) == 1
    assert BlockHasher().chain(P).root not in roots


def test_all_prefixes_of_a_sequence_differ():
    tokens = ids(*([5] * 11))
    chain = chain_of(tokens)
    digests = [chain.exact_digest(tokens, length) for length in range(12)]
    assert len(set(digests)) == 12
    assert all(len(digest) >= 16 for digest in digests)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=23), st.data())
def test_a_prefix_has_one_identity_whatever_follows_it(tokens, data):
    """Publication hashes the prefix in its own chain, a consumer in a longer one; both must find the same
    checkpoint."""
    length = data.draw(st.integers(0, len(tokens)))
    media = data.draw(st.lists(st.sampled_from([None, ONE, TWO]), min_size=len(tokens), max_size=len(tokens)))
    extras = data.draw(st.sampled_from([BlockKeyExtras(), BlockKeyExtras(isolation_digest=ONE)]))
    whole = ids(*tokens)
    consumer = chain_of(whole, extras, media)
    producer = chain_of(whole[:length], extras, media[:length])
    before = list(consumer.digests)
    digest = consumer.exact_digest(whole, length, media)
    assert digest == producer.exact_digest(whole[:length], length, media[:length])
    assert consumer.exact_digest(whole, length, media) == digest
    consumer.extend_to(np.concatenate((whole, ids(*range(8)))), media)
    assert consumer.digests[: len(before)] == before
    assert consumer.digests == chain_of(np.concatenate((whole, ids(*range(8)))), extras, media).digests


def test_a_tail_is_never_a_block():
    """The same two tokens as a tail of a long page and as a full short page; the count is part of the stream."""
    tokens = ids(1, 2)
    assert exact(tokens) != exact(tokens, page_size=2)
    assert exact(ids(1, 2, 3)) != exact(ids(1, 2, 3, 0))
    assert exact(ids(1, 2, 3, 4, 1, 2, 3)) != exact(ids(1, 2, 3))


def test_every_part_of_the_key_changes_the_digest():
    span = MediaSpanKey(ONE, TWO, 0, 0, 1)
    tokens = ids(1, 2, 3, 4, 5, 6)
    variants = [
        exact(tokens),
        exact(ids(1, 2, 3, 4, 5, 7)),
        exact(ids(9, 2, 3, 4, 5, 6)),
        exact(tokens, hasher=BlockHasher(b"x" * 32)),
        exact(tokens, media=[None] * 5 + [ONE]),
        exact(tokens, media=[None] * 5 + [TWO]),
        exact(tokens, media=[None] * 4 + [ONE, None]),
        exact(tokens, media=[ONE] + [None] * 5),
        exact(tokens, extras=BlockKeyExtras(media=(span,))),
        exact(tokens, extras=BlockKeyExtras(media=(attrs.evolve(span, modality=2),))),
        exact(tokens, extras=BlockKeyExtras(adapter=AdapterKey(Digest(b"\x00" * 16)))),
        *[
            exact(tokens, extras=BlockKeyExtras(**{name: digest}))
            for name in ("position_digest", "custom_embedding_digest", "isolation_digest")
            for digest in (ONE, Digest(b"\x00" * 16))
        ],
    ]
    assert all(one != other for one, other in combinations(variants, 2))


def test_where_a_media_digest_stands_the_token_is_not_part_of_the_key():
    media = [None, None, None, None, ONE, None]
    assert exact(ids(1, 2, 3, 4, 50, 6), media=media) == exact(ids(1, 2, 3, 4, 60, 6), media=media)
    assert exact(ids(1, 2, 3, 4, 50, 6), media=media) != exact(ids(1, 2, 3, 4, 50, 7), media=media)


def test_positions_behind_the_media_list_are_text():
    tokens = ids(1, 2, 3, 4, 5, 6)
    assert exact(tokens, media=[None] * 6) == exact(tokens)
    chain = chain_of(tokens)
    assert chain.exact_digest(tokens, 6, [None, ONE]) == chain.exact_digest(tokens, 6)
    assert chain.exact_digest(tokens, 6, [None] * 4 + [ONE]) == exact(tokens, media=[None] * 4 + [ONE, None])


@pytest.mark.parametrize("length", [-1, -4, 12, 13, 11])
def test_a_length_beyond_what_is_known_is_refused(length):
    tokens = ids(*range(10))
    chain = chain_of(tokens)
    with pytest.raises(ContractViolation, match="extend the chain first") as refusal:
        chain.exact_digest(tokens, length)
    assert refusal.value.length == length
    assert chain.exact_digest(tokens, 10) == exact(tokens)


def test_a_tail_behind_an_unhashed_block_is_refused():
    tokens = ids(*range(10))
    chain = HASHER.chain(P)
    assert chain.exact_digest(tokens, 3) == exact(tokens[:3])
    with pytest.raises(ContractViolation):
        chain.exact_digest(tokens, 5)
    with pytest.raises(ContractViolation):
        chain_of(tokens).exact_digest(tokens[:5], 6)
