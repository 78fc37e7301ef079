"""Scenarios 110 to 112: media at positions, and a hit that is retried cold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.coordinator import DecodingKvHeadroom, Digest, LookupPolicy
from context_cache.coordinator.manager import (
    AcquireResult,
    AcquireStatus,
    ContextCacheManager,
    ResourceDemand,
    require_coverage,
)

IMAGE = Digest(b"image-one" + bytes(23))
OTHER_IMAGE = Digest(b"image-two" + bytes(23))
PLACEHOLDER = 7777


def prompt_with_media(last=11, placeholder=PLACEHOLDER, digest=IMAGE):
    """11 positions, a media run at positions 2 to 9, text elsewhere."""
    tokens = [1, 2, *[placeholder] * 8, last]
    media = [None, None, *[digest] * 8, None]
    return tokens, media


def produce(h):
    tokens, media = prompt_with_media()
    handle = h.begin(tokens, media=media)
    h.run_prefill(handle)
    assert list(h.records().values()) == [[0, 1]]
    assert h.finish(handle) is h.OK


def start_of(h, tokens, media=()):
    handle = h.begin(tokens, media=media)
    start = h.starts[0]
    assert h.finish(handle) is h.OK
    return start


def test_a_media_run_may_cross_the_reuse_boundary(h):
    """Scenario 110. All matching pages are kept although the run goes on at position 8."""
    produce(h)
    assert h.metrics()["media_aware_sequences"] == 1
    tokens, media = prompt_with_media(last=12)
    assert start_of(h, tokens, media) == 8


def test_another_media_digest_shares_nothing(h):
    """Scenario 110. The run begins in block 0, so already the first block differs."""
    produce(h)
    tokens, media = prompt_with_media(last=12, digest=OTHER_IMAGE)
    assert start_of(h, tokens, media) == 0


def test_placeholder_ids_under_a_media_digest_are_not_hashed(h):
    """Scenario 110."""
    produce(h)
    tokens, media = prompt_with_media(last=12, placeholder=4242)
    assert start_of(h, tokens, media) == 8


def test_text_never_matches_media(h):
    """Scenario 110, the forbidden half: the placeholder ids as plain text are another prompt."""
    produce(h)
    tokens, _ = prompt_with_media(last=12)
    assert start_of(h, tokens) == 0


@pytest.mark.parametrize("length", [1, 10, 12])
def test_a_media_list_of_another_length_is_refused(h, length):
    """Scenario 111."""
    tokens, _ = prompt_with_media()
    h.refuses(h.try_begin, [h.sequence_admission(tokens, 0, media=[IMAGE] * length)])
    h.refuses(h.try_begin, [h.sequence_admission([1, 2, 3], 1), h.sequence_admission(tokens, 0, media=[None] * length)])


def test_a_joiner_with_a_media_list_of_another_length_is_refused(h, T):
    """Scenario 111 for admit_sequence."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    admission = h.sequence_admission(T(5), 1, media=[IMAGE] * 4)
    h.refuses(h.coordinator.admit_sequence, handle, admission, DecodingKvHeadroom(1, 0))


def test_generated_tokens_after_media_are_text(h):
    """Scenario 111. Decode-end publication extends the media list with "absent"."""
    tokens = [1, 2, *[PLACEHOLDER] * 5]
    media = [None, None, *[IMAGE] * 5]
    handle = h.begin(tokens, media=media)
    h.run_prefill(handle)
    h.decode(handle, 902, completed=[0])
    assert h.records()[2] == [0, 1]
    assert h.finish(handle) is h.OK
    assert start_of(h, [*tokens, 901, 5], [*media, None, None]) == 8
    assert start_of(h, [*tokens, 901, 5], [*media, IMAGE, None]) == 4, "media at the position of a generated token"
    assert start_of(h, [*tokens, 900, 5], [*media, None, None]) == 4


def test_an_all_zero_media_digest_is_not_absent(h):
    """10.5: absent is None, and nothing else."""
    zero = Digest(bytes(32))
    handle = h.begin([1, 2, 3, 4, 5], media=[zero] * 5)
    h.run_prefill(handle)
    h.finish(handle)
    assert start_of(h, [1, 2, 3, 4, 6]) == 0
    assert start_of(h, [1, 2, 3, 4, 6], [None] * 5) == 0
    assert start_of(h, [9, 9, 9, 9, 9], [zero] * 5) == 4


# ---- forced cold ------------------------------------------------------------


class RefusesFirstHit(ContextCacheManager):
    """A manager that refuses the first cache derived plan once: the fault seam of scenario 112."""

    refusals = 0
    armed = False

    def acquire(self, plan):
        if self.armed and plan.matched_token_length > 0:
            self.armed = False
            self.refusals += 1
            return AcquireResult(status=AcquireStatus.INSUFFICIENT_CAPACITY, plan=plan, lease=None)
        return super().acquire(plan)


@pytest.fixture
def seam(harness):
    manager = RefusesFirstHit(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    return harness(manager=manager), manager


def test_a_hit_that_does_not_fit_is_retried_cold(seam, T):
    """Scenario 112. The sequence counts as bypass, not as a hit, and still publishes."""
    h, manager = seam
    assert h.coordinator.manager is manager
    producer = h.begin(T(5))
    h.run_prefill(producer)
    h.finish(producer)
    before = h.metrics()
    manager.armed = True
    handle = h.begin(T(6))
    assert manager.refusals == 1
    assert h.starts == [0]
    after = h.metrics()
    for name, more in {
        "admitted_sequences": 1,
        "forced_cold_sequences": 1,
        "lookup_bypass_sequences": 1,
        "hit_sequences": 0,
        "matched_tokens": 0,
        "reused_tokens": 0,
    }.items():
        assert after[name] - before[name] == more, name
    h.run_prefill(handle)
    assert h.metrics()["publication_attempts"] - before["publication_attempts"] == 1
    h.finish(handle)
    h.end_everything()


def test_a_rewound_hit_is_retried_cold_too(seam, T):
    """Scenario 112 and 40.4: FULL_INPUT_REWIND is cache derived although nothing is left to reuse."""
    h, manager = seam
    producer = h.begin(T(5))
    h.run_prefill(producer)
    h.finish(producer)
    manager.armed = True
    h.begin(T(4))
    assert manager.refusals == 1
    assert h.metrics()["forced_cold_sequences"] == 1


def test_a_joiner_is_retried_cold_too(seam, T):
    """Scenario 112 for admit_sequence (40.4 serves both)."""
    h, manager = seam
    handle = h.begin(T(5))
    h.run_prefill(handle)
    manager.armed = True
    result = h.admit(handle, T(6), 1)
    assert (result.status, result.prefill_start) == (h.OK, 0)
    assert h.metrics()["forced_cold_sequences"] == 1


def test_a_bypass_is_never_retried(harness, T):
    """Scenario 112, the forbidden half: a cold plan that does not fit is a refusal at once."""

    class RefusesAll(ContextCacheManager):
        calls = 0

        def acquire(self, plan):
            self.calls += 1
            return AcquireResult(status=AcquireStatus.INSUFFICIENT_CAPACITY, plan=plan, lease=None)

    manager = RefusesAll(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    h = harness(manager=manager)
    for lookup in (LookupPolicy.BYPASS, LookupPolicy.USE_CACHE):
        result = h.try_begin([h.sequence_admission(T(5), 0)], lookup=lookup)
        assert (result.status, result.insufficient_capacity) == (h.REQUEST_FAILED, True)
    assert manager.calls == 2
    assert h.counters()["forced_cold_sequences"] == 0


@given(
    capacity=st.integers(1, 7),
    history=st.lists(
        st.tuples(st.lists(st.sampled_from(range(3)), min_size=1, max_size=4), st.booleans(), st.booleans()), max_size=8
    ),
    prompt=st.lists(st.sampled_from(range(3)), min_size=1, max_size=5),
    tail=st.integers(0, 3),
    extra=st.integers(0, 3),
)
def test_with_the_real_manager_a_cold_retry_never_helps(capacity, history, prompt, tail, extra):
    """Scenario 112, property: for random states, "hit plan infeasible" implies "cold plan infeasible"."""

    def chain(letters):
        # A block's digest names its whole prefix, as a chained hash does.
        return [Digest(bytes(letters[: n + 1]).ljust(16, b"\xff")) for n in range(len(letters))]

    manager = ContextCacheManager(ResourceDemand(base_kv_pages=capacity), 4, max_records=4)
    live = []
    for letters, publish, keep in history:
        hashes = chain(letters)
        got = manager.acquire(manager.plan(hashes, len(letters) * 4, LookupPolicy.USE_CACHE))
        if got.lease is None:
            continue
        if publish:
            manager.publish(got.lease, hashes, len(letters) * 4)
        if keep:
            live.append(got.lease)
        else:
            manager.release(got.lease)
    length = len(prompt) * 4 + tail
    needed = -(-(length + extra) // 4)
    hit = require_coverage(manager.plan(chain(prompt), length, LookupPolicy.USE_CACHE), needed)
    cold = require_coverage(manager.plan(chain(prompt), length, LookupPolicy.BYPASS), needed)
    before = manager.dump()
    refused = manager.acquire(hit)
    if refused.status is AcquireStatus.INSUFFICIENT_CAPACITY:
        assert manager.dump() == before
        assert manager.acquire(cold).status is AcquireStatus.INSUFFICIENT_CAPACITY
        assert manager.dump() == before
    else:
        manager.release(refused.lease)
    for lease in live:
        manager.release(lease)
    manager.check_invariants()
