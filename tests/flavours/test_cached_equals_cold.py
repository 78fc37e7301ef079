"""Scenario 120: cached equals cold, for every flavour, through whole runs.

The embedded model's state is a pure function of the prefix, written and read back through the rows that the device has,
on a stream that runs late. The expected tokens are computed here in plain integers, so a run with reuse, one without,
and the function itself have to agree.
"""

from __future__ import annotations

import random

import pytest

from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES, FLAVOURS

PAGE = 4
PAGED = [name for name in FLAVOUR_NAMES if not FLAVOURS[name].has_recurrent]
CHECKPOINTS = [name for name in FLAVOUR_NAMES if FLAVOURS[name].has_recurrent]
TAIL = 4


def prompt(family, length):
    return [1000 * family + n for n in range(length)]


def off(requests):
    return [(tokens, count, {"lookup_policy": "bypass"}) for tokens, count, *_ in requests]


def agree(play, cold, flavour, requests, **options):
    """Play with the cache on and off; the answers are those of the function."""
    on = play(flavour, requests, **options)
    wanted = {ordinal: cold(r[0], r[1]) for ordinal, r in enumerate(requests)}
    assert on.outputs == wanted
    without = play(flavour, off(requests), **options)
    assert without.outputs == wanted
    assert without.report.reused_tokens == 0
    assert all(start == 0 for _, start in without.starts)
    return on


@pytest.mark.parametrize("flavour", PAGED)
def test_every_start_length_of_a_page(play, cold, flavour):
    """Scenario 120. Every page multiple that a prompt of 17 tokens can start at."""
    requests = []
    for family in range(1, 18):
        requests += [(prompt(family, family), 1), (prompt(family, 17 + family % 3), 6)]
    on = agree(play, cold, flavour, requests, max_batch=1)
    starts = {start for ordinal, start in on.starts if ordinal % 2}
    assert starts == ({0, 4, 8, 12} if flavour == "eagle" else {0, 4, 8, 12, 16})


@pytest.mark.parametrize("flavour", CHECKPOINTS)
def test_every_start_length_of_a_checkpoint(play, cold, flavour):
    """Scenario 120. Checkpoints lie at every exact length, on a page boundary or not."""
    requests, tail = [], TAIL if flavour == "hybrid-mtp" else 0
    for length in range(1, 18):
        requests += [(prompt(length, length + tail), 1), (prompt(length, 18 + length % 5 + tail), 6)]
    on = agree(play, cold, flavour, requests, max_batch=1)
    assert {start for ordinal, start in on.starts if ordinal % 2} == set(range(1, 18))
    assert on.report.hybrid_restores == 17


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
@pytest.mark.parametrize("output", [1, 2, 3, 4, 5, 9])
def test_answers_are_reused_by_the_next_turn(play, cold, flavour, output):
    """Scenario 120. A chat: each prompt is the one before, its answer, and one more token."""
    requests, history = [], prompt(1, 5)
    for turn in range(5):
        requests.append((list(history), output))
        history += [*cold(history, output), 500 + turn]
    on = agree(play, cold, flavour, requests, max_batch=1)
    assert on.report.reused_tokens > 0


def schedule(seed, count=40):
    """Prompts over few tokens share prefixes of all lengths; some are answered at length, some with one token."""
    rng = random.Random(seed)
    roots = [[rng.choice((1, 2)) for _ in range(30)] for _ in range(3)]
    requests = []
    for _ in range(count):
        tokens = rng.choice(roots)[: rng.randint(1, 30)] + [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 6))]
        options = {} if rng.random() < 0.85 else {"lookup_policy": "bypass"}
        if rng.random() < 0.2:
            options["commit_policy"] = "prefill_state_only"
        requests.append((tokens, rng.choice((1, 2, 5, 12, 20)), options))
    return requests


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_under_eviction_and_compaction(play, cold, flavour, seed):
    """Scenario 120. Pools that hold little more than one row: eviction, refusals, preemption, compaction."""
    kind = FLAVOURS[flavour]
    batch = 1 if kind.mtp else 2 + seed % 3
    options = {"max_batch": batch}
    if kind.has_attention:
        options["pages"] = 15 + seed % 3
    if kind.has_recurrent:
        options["snapshot_slots"] = 1 + seed
    on = agree(play, cold, flavour, schedule(seed), **options)
    assert on.report.evicted_records > 0
    if batch > 1:
        assert on.report.compactions > 0
        if kind.has_attention and batch > 2:
            assert on.report.refused_admissions > 0


@pytest.mark.parametrize("flavour", [name for name in FLAVOUR_NAMES if name not in ("recurrent", "hybrid-mtp")])
def test_preempted_sequences_come_back_with_their_tokens(play, cold, flavour):
    """Scenario 120. Sequences that grow past the pool are ended, queued again with what they have, and go on."""
    requests = [(prompt(n + 1, 5), 40) for n in range(4)]
    on = agree(play, cold, flavour, requests, max_batch=4, pages=20)
    assert on.report.preemptions > 0
    assert on.report.recomputed_tokens > 0


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_a_record_limit_of_one(play, cold, flavour):
    """Scenario 120. Every publication evicts the record before it."""
    on = agree(play, cold, flavour, schedule(99), max_records=1)
    assert on.report.records <= 1


def test_all_flavours_give_the_same_answers(play):
    """Scenario 120. Outputs depend on the prompt alone, not on drafts, snapshots or batches."""
    requests = schedule(7)
    outputs = [play(flavour, requests).outputs for flavour in FLAVOUR_NAMES]
    assert all(one == outputs[0] for one in outputs)
