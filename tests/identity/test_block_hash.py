"""Identity of blocks (spec 10): what makes two digests equal, and what must make them differ.

No digest value is pinned: the function is keyed and process local. Only equality and inequality are tested.
"""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.coordinator import AdapterKey, BlockKeyExtras, ContractViolation, Digest, MediaSpanKey
from context_cache.coordinator.identity import BlockHasher

P = 4
KEY = bytes(range(32))
D1, D2, D3 = (Digest(bytes([n]) * 16) for n in (1, 2, 3))
ZERO = Digest(bytes(16))
SPAN = MediaSpanKey(content_digest=D1, placement_digest=D2, offset_within_block=1, item_order=0, modality=1)


def hashes(tokens, extras=None, media=None, page_size=P, block_extras=None):
    options = {} if block_extras is None else {"block_extras": block_extras}
    return BlockHasher(KEY).hash_full_blocks(
        tokens,
        page_size,
        BlockKeyExtras() if extras is None else extras,
        media=() if media is None else media,
        **options,
    )


def first(tokens=(1, 2, 3, 4), **options):
    return hashes(list(tokens), **options)[0]


# ---- 10.1: the function ------------------------------------------------------------


def test_a_digest_is_plain_bytes_of_at_least_128_bits():
    """10.1, 10.2."""
    digest = first()
    assert type(digest) is bytes
    assert len(digest) >= 16


def test_another_key_is_another_function():
    """10.1: keyed. With the same key two hashers agree, without a key no two do."""
    tokens = list(range(12))
    assert BlockHasher(KEY).hash_full_blocks(tokens, P) == BlockHasher(KEY).hash_full_blocks(tokens, P)
    assert BlockHasher(bytes(32)).hash_full_blocks(tokens, P) != BlockHasher(KEY).hash_full_blocks(tokens, P)
    assert BlockHasher().hash_full_blocks(tokens, P) != BlockHasher().hash_full_blocks(tokens, P)


def test_one_hasher_is_not_changed_by_use():
    """10.1: the keyed state is copied, not consumed."""
    hasher = BlockHasher(KEY)
    before = hasher.hash_full_blocks([1, 2, 3, 4], P)
    hasher.hash_full_blocks([9] * 40, P)
    assert hasher.hash_full_blocks([1, 2, 3, 4], P) == before


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4],
        (1, 2, 3, 4),
        np.array([1, 2, 3, 4], dtype=np.int32),
        np.array([1, 9, 2, 9, 3, 9, 4, 9], dtype=np.int32)[::2],
        memoryview(np.array([1, 2, 3, 4], dtype=np.int32)),
    ],
    ids=["list", "tuple", "int32 array", "strided array", "buffer"],
)
def test_lists_arrays_and_buffers_of_the_same_ids_agree(tokens):
    """10.1: token ids enter as int32 arrays or buffers, lists are converted once."""
    assert hashes(tokens) == hashes([1, 2, 3, 4])


def test_token_ids_are_signed_32_bit():
    """10.1: the whole range is legal and distinct."""
    edges = [-(2**31), -1, 0, 1, 2**31 - 1]
    digests = [first([edge, 0, 0, 0]) for edge in edges]
    assert len(set(digests)) == len(edges)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_a_token_id_beyond_32_bit_is_refused_and_never_wraps(token):
    """10.1: 2**32 + 1 must not be hashed as 1."""
    with pytest.raises((ContractViolation, OverflowError, ValueError)):
        hashes([token, 2, 3, 4])


# ---- 10.2: value types ------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [AdapterKey(D1, 1), SPAN, BlockKeyExtras(isolation_digest=D1)], ids=lambda v: type(v).__name__
)
def test_value_types_are_frozen_and_hashable(value):
    """10.2."""
    field = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, field, None)
    assert hash(value) == hash(attrs.evolve(value))
    assert value == attrs.evolve(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdapterKey(D1, -1),
        lambda: AdapterKey(D1, 2**64),
        lambda: attrs.evolve(SPAN, modality=256),
        lambda: attrs.evolve(SPAN, modality=-1),
        lambda: AdapterKey(Digest(b"short"), 1),
        lambda: BlockKeyExtras(isolation_digest=Digest(b"")),
        lambda: BlockKeyExtras(position_digest=Digest(b"x" * 15)),
    ],
    ids=["generation -1", "generation 2**64", "modality 256", "modality -1", "short id", "empty isolation", "15 bytes"],
)
def test_values_outside_their_range_are_refused(make):
    """10.2: a digest has at least 16 bytes, a generation is unsigned 64 bit, a modality 0 to 255."""
    with pytest.raises(ContractViolation):
        make()


def test_a_media_span_may_begin_before_its_block():
    """10.2: offset_within_block may be negative."""
    early = attrs.evolve(SPAN, offset_within_block=-3)
    assert first(extras=BlockKeyExtras(media=(early,))) != first(extras=BlockKeyExtras(media=(SPAN,)))


# ---- 10.3: consequences ------------------------------------------------------------


def test_same_inputs_give_the_same_digest():
    """10.3."""
    extras = BlockKeyExtras(media=(SPAN,), adapter=AdapterKey(D1, 3), position_digest=D2, isolation_digest=D3)
    media = [None, D1, None, None]
    assert first(extras=extras, media=media) == first(extras=attrs.evolve(extras), media=list(media))


@pytest.mark.parametrize("position", range(4))
def test_every_token_matters(position):
    """10.3."""
    tokens = [1, 2, 3, 4]
    tokens[position] = 99
    assert first(tokens) != first()


def test_the_order_of_tokens_matters():
    """10.3."""
    assert first([2, 1, 3, 4]) != first([1, 2, 3, 4])


def test_a_different_parent_changes_every_descendant():
    """10.3: equal blocks behind different parents are different blocks."""
    one, two = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), hashes([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert all(a != b for a, b in zip(one, two, strict=True))
    assert len({*hashes([7, 7, 7, 7] * 3)}) == 3, "the same block at three depths"


@pytest.mark.parametrize("field", ["position_digest", "custom_embedding_digest", "isolation_digest"])
def test_an_optional_digest_that_is_absent_differs_from_zero(field):
    """10.3."""
    absent = first()
    zero = first(extras=BlockKeyExtras(**{field: ZERO}))
    one = first(extras=BlockKeyExtras(**{field: D1}))
    assert len({absent, zero, one}) == 3


def test_one_digest_in_three_fields_gives_three_results():
    """10.3."""
    fields = ("position_digest", "custom_embedding_digest", "isolation_digest")
    assert len({first(extras=BlockKeyExtras(**{field: D1})) for field in fields}) == 3


def test_no_adapter_differs_from_the_zero_adapter():
    """10.3."""
    none = first()
    zero = first(extras=BlockKeyExtras(adapter=AdapterKey(ZERO, 0)))
    assert none != zero
    assert zero != first(extras=BlockKeyExtras(adapter=AdapterKey(ZERO, 1)))
    assert zero != first(extras=BlockKeyExtras(adapter=AdapterKey(D1, 0)))
    assert first(extras=BlockKeyExtras(adapter=AdapterKey(ZERO, 2**64 - 1))) != zero


@pytest.mark.parametrize(
    "change",
    [
        {"content_digest": D3},
        {"placement_digest": D3},
        {"offset_within_block": 2},
        {"item_order": 1},
        {"modality": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_each_field_of_a_media_span_matters(change):
    """10.3."""
    assert first(extras=BlockKeyExtras(media=(SPAN,))) != first(
        extras=BlockKeyExtras(media=(attrs.evolve(SPAN, **change),))
    )


def test_order_and_number_of_media_spans_matter():
    """10.3."""
    other = attrs.evolve(SPAN, item_order=1)
    variants = [(), (SPAN,), (other,), (SPAN, other), (other, SPAN), (SPAN, SPAN)]
    assert len({first(extras=BlockKeyExtras(media=spans)) for spans in variants}) == len(variants)


def test_digests_of_different_length_do_not_run_together():
    """10.1: a list carries its length. Moving a byte from one digest to the next is another input."""
    a = BlockKeyExtras(position_digest=Digest(b"a" * 17), custom_embedding_digest=Digest(b"a" * 16))
    b = BlockKeyExtras(position_digest=Digest(b"a" * 16), custom_embedding_digest=Digest(b"a" * 17))
    assert first(extras=a) != first(extras=b)
    assert first(media=[Digest(b"a" * 17), Digest(b"a" * 16), None, None]) != first(
        media=[Digest(b"a" * 16), Digest(b"a" * 17), None, None]
    )


def test_request_wide_extras_reach_every_block():
    """10.3, 10.6: generated blocks too."""
    tokens = list(range(12))
    plain, tenant = hashes(tokens), hashes(tokens, extras=BlockKeyExtras(isolation_digest=D1))
    assert not {*plain} & {*tenant}


def test_extras_may_be_given_per_block():
    """10.3: a change in block 1 leaves block 0 alone and reaches block 2."""
    tokens = list(range(12))
    none, some = BlockKeyExtras(), BlockKeyExtras(isolation_digest=D1)
    plain = hashes(tokens, block_extras=[none, none, none])
    mixed = hashes(tokens, block_extras=[none, some, none])
    assert plain == hashes(tokens)
    assert mixed[0] == plain[0]
    assert mixed[1] != plain[1]
    assert mixed[2] != plain[2]


# ---- media digests at positions (10.5) ------------------------------------------------------------


def test_a_media_digest_replaces_the_token_id():
    """10.3: under a digest the token id is not consumed."""
    media = [None, D1, D1, None]
    assert first([1, 500, 501, 4], media=media) == first([1, 600, 601, 4], media=media)
    assert first([1, 500, 501, 4], media=media) != first([2, 500, 501, 4], media=media)
    assert first([1, 500, 501, 4], media=media) != first([1, 500, 501, 4], media=[None, D1, D2, None])
    assert first([1, 500, 501, 4], media=media) != first([1, 500, 501, 4])


@pytest.mark.parametrize("position", range(4))
def test_the_position_of_a_media_digest_matters(position):
    """10.5."""
    at = [None] * 4
    at[position] = D1
    others = [[D1 if n == other else None for n in range(4)] for other in range(4) if other != position]
    tokens = [7, 7, 7, 7]
    assert first(tokens, media=at) not in {first(tokens, media=other) for other in others}


def test_absent_entries_are_text():
    """10.5: an empty list, none at all and a list of None are the same; a zero digest is not."""
    assert first() == first(media=[]) == first(media=[None] * 4)
    assert BlockHasher(KEY).hash_full_blocks([1, 2, 3, 4], P, media=None) == [first()]
    assert first(media=[ZERO, None, None, None]) != first()


def test_a_token_never_looks_like_a_digest():
    """10.1: it is marked whether a position is a token or a digest, so no choice of ids collides."""
    # The ids are chosen so that their bytes are those of the digest.
    ids = np.frombuffer(bytes(D1), dtype="<i4").tolist()
    assert first(ids) != first([1, 2, 3, 4], media=[D1, None, None, None])
    assert first(ids) != first(ids, media=[D1] * 4)


def test_a_text_block_after_a_media_block_depends_on_it():
    """10.5: media in block 0 reaches block 1 by the chain, in both directions of the text-only mark."""
    tokens = list(range(8))
    with_media = hashes(tokens, media=[D1, *[None] * 7])
    without = hashes(tokens)
    assert with_media[0] != without[0]
    assert with_media[1] != without[1]
    late = hashes(tokens, media=[*[None] * 7, D1])
    assert late[0] == without[0]
    assert late[1] != without[1]


@pytest.mark.parametrize("length", [1, 7, 9, 12])
def test_a_media_list_of_another_length_is_refused(length):
    """10.5, 111."""
    with pytest.raises(ContractViolation):
        hashes(list(range(8)), media=[None] * length)


# ---- full blocks ------------------------------------------------------------


@pytest.mark.parametrize("length", range(13))
def test_there_is_one_digest_per_complete_block(length):
    """10.3: len // P of them, an empty input gives none."""
    assert len(hashes(list(range(length)))) == length // P


def test_the_partial_tail_never_influences_the_full_blocks():
    """10.3."""
    full = hashes(list(range(8)))
    for tail in ([], [1], [2, 3], [9, 9, 9]):
        assert hashes([*range(8), *tail]) == full
    assert hashes([*range(8), 1], media=[*[None] * 8, D1]) == full


def test_the_page_size_is_part_of_the_identity():
    """10.3: the token count is hashed, so a block of 4 never equals a block of 2."""
    assert not {*hashes([1, 2, 3, 4], page_size=4)} & {*hashes([1, 2, 3, 4], page_size=2)}


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_size_that_is_not_positive_is_refused(page_size):
    """10.3, errors."""
    with pytest.raises(ContractViolation):
        hashes([1, 2, 3, 4], page_size=page_size)
    with pytest.raises(ContractViolation):
        BlockHasher(KEY).chain(page_size)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_per_block_extras_is_refused(count):
    """10.3, errors: the count equals the number of full blocks, here 2."""
    with pytest.raises(ContractViolation):
        hashes(list(range(9)), block_extras=[BlockKeyExtras()] * count)


def test_missing_tokens_are_refused():
    """10.3, errors."""
    with pytest.raises((ContractViolation, TypeError)):
        hashes(None)


# ---- the chain of a sequence (10.7) ------------------------------------------------------------


def test_a_chain_grown_token_by_token_equals_one_shot():
    """10.7: extend takes all tokens from the first unhashed one and says how many it consumed."""
    tokens = np.arange(21, dtype=np.int32)
    chain = BlockHasher(KEY).chain(P)
    hashed = 0
    for end in range(22):
        hashed += chain.extend(tokens[hashed:end])
        assert hashed == end // P * P
        assert list(chain.digests) == hashes(tokens[:end].tolist())


def test_extend_to_hashes_only_what_is_new():
    """10.7: extend_to takes the whole sequence."""
    tokens = np.arange(20, dtype=np.int32)
    chain = BlockHasher(KEY).chain(P)
    chain.extend_to(tokens[:9])
    kept = list(chain.digests)
    assert kept == hashes(range(9))
    # What is hashed already is not looked at again: each token is hashed once.
    changed = tokens.copy()
    changed[0] = 77
    chain.extend_to(changed)
    assert list(chain.digests) == hashes(tokens.tolist())
    assert list(chain.digests)[:2] == kept


def test_extending_by_nothing_changes_nothing():
    """10.7."""
    chain = BlockHasher(KEY).chain(P)
    assert chain.extend(np.array([], dtype=np.int32)) == 0
    assert chain.extend(np.array([1, 2, 3], dtype=np.int32)) == 0
    assert list(chain.digests) == []


def test_a_fork_shares_the_past_and_nothing_else():
    """10.7."""
    chain = BlockHasher(KEY).chain(P)
    chain.extend_to(np.arange(8, dtype=np.int32))
    fork = chain.fork()
    chain.extend(np.array([1, 2, 3, 4], dtype=np.int32))
    fork.extend(np.array([5, 6, 7, 8], dtype=np.int32))
    assert list(chain.digests) == hashes([*range(8), 1, 2, 3, 4])
    assert list(fork.digests) == hashes([*range(8), 5, 6, 7, 8])


def test_a_chain_with_extras_and_media_equals_one_shot():
    """10.7 with 10.5 and 10.6."""
    extras = BlockKeyExtras(adapter=AdapterKey(D1, 7), isolation_digest=D2, media=(SPAN,))
    tokens = np.arange(13, dtype=np.int32)
    media = [None, D1, D1, *[None] * 5, D2, *[None] * 4]
    expected = hashes(tokens.tolist(), extras=extras, media=media)
    whole = BlockHasher(KEY).chain(P, extras)
    whole.extend_to(tokens, media)
    assert list(whole.digests) == expected
    steps = BlockHasher(KEY).chain(P, extras)
    done = 0
    for end in (3, 6, 11, 13):
        done += steps.extend(tokens[done:end], media[done:end])
    assert list(steps.digests) == expected


# ---- random inputs ------------------------------------------------------------

DIGESTS = st.one_of(
    st.binary(min_size=16, max_size=18), st.sampled_from([bytes(16), bytes(17), b"\x01" * 16])
).map(Digest)
IDS = st.one_of(st.integers(0, 3), st.integers(-(2**31), 2**31 - 1))
SPANS = st.builds(
    MediaSpanKey,
    content_digest=DIGESTS,
    placement_digest=DIGESTS,
    offset_within_block=st.integers(-3, 3),
    item_order=st.integers(0, 3),
    modality=st.integers(0, 3),
)
EXTRAS = st.builds(
    BlockKeyExtras,
    media=st.lists(SPANS, max_size=2).map(tuple),
    adapter=st.none() | st.builds(AdapterKey, id=DIGESTS, generation=st.integers(0, 2)),
    position_digest=st.none() | DIGESTS,
    custom_embedding_digest=st.none() | DIGESTS,
    isolation_digest=st.none() | DIGESTS,
)


@st.composite
def inputs(draw):
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(IDS, min_size=size, max_size=3 * size))
    media = draw(st.lists(st.none() | DIGESTS, min_size=len(tokens), max_size=len(tokens)))
    return size, tokens, media, draw(EXTRAS)


def meaning(size, tokens, media, extras, blocks):
    """What a digest stands for: everything that is consumed, in its place."""
    kept = [("digest", bytes(m)) if m is not None else ("token", t) for t, m in zip(tokens, media, strict=True)]
    return size, tuple(kept[: blocks * size]), extras


@given(inputs(), inputs())
def test_two_different_inputs_never_have_the_same_digest(one, two):
    """10.1: the serialisation is injective. Checked for every pair of blocks of two random inputs."""
    seen = {}
    for size, tokens, media, extras in (one, two):
        for number, digest in enumerate(hashes(tokens, extras=extras, media=media, page_size=size), start=1):
            mine = meaning(size, tokens, media, extras, number)
            assert seen.setdefault(digest, mine) == mine


@st.composite
def neighbours(draw):
    """An input and one that differs in a single place."""
    size, tokens, media, extras = draw(inputs())
    place = draw(st.integers(0, size - 1))  # in block 0, so that every digest has to differ
    what = draw(st.sampled_from(["token", "digest", "extras"]))
    tokens2, media2, extras2 = list(tokens), list(media), extras
    if what == "token":
        tokens2[place], media2[place] = draw(IDS), None
    elif what == "digest":
        media2[place] = draw(DIGESTS)
    else:
        extras2 = draw(EXTRAS)
    return (size, tokens, media, extras), (size, tokens2, media2, extras2)


@given(neighbours())
def test_digests_are_equal_exactly_when_the_inputs_are(pair):
    """10.3, both halves, near each other."""
    one, two = pair
    same = meaning(*one, 1) == meaning(*two, 1)
    first_one = hashes(one[1], extras=one[3], media=one[2], page_size=one[0])
    first_two = hashes(two[1], extras=two[3], media=two[2], page_size=two[0])
    assert (first_one[0] == first_two[0]) == same
    if not same:
        assert not {*first_one} & {*first_two}


@given(inputs(), st.lists(st.integers(0, 12), max_size=5))
def test_any_way_to_grow_a_chain_equals_one_shot(given_input, cuts):
    """10.7."""
    size, tokens, media, extras = given_input
    array = np.array(tokens, dtype=np.int32)
    expected = hashes(tokens, extras=extras, media=media, page_size=size)
    chain = BlockHasher(KEY).chain(size, extras)
    done = 0
    for end in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        if end > done:
            done += chain.extend(array[done:end], media[done:end])
    assert list(chain.digests) == expected


# ---- between processes ------------------------------------------------------------


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_identities_do_not_depend_on_the_hash_seed_of_the_process(seed):
    """Case C040: with the same key two processes agree."""
    program = (
        "from context_cache.coordinator import AdapterKey, BlockKeyExtras, Digest\n"
        "from context_cache.coordinator.identity import BlockHasher\n"
        "extras = BlockKeyExtras(adapter=AdapterKey(Digest(b'a' * 16), 3))\n"
        "for digest in BlockHasher(bytes(range(32))).hash_full_blocks(list(range(12)), 4, extras):\n"
        "    print(digest.hex())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    extras = BlockKeyExtras(adapter=AdapterKey(Digest(b"a" * 16), 3))
    assert out.split() == [digest.hex() for digest in hashes(list(range(12)), extras=extras)]
