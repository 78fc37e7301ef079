"""The embedded model's function: whole stretches equal single steps in plain integers."""

from __future__ import annotations

import numpy as np
import pytest

from context_cache.coordinator.cli.function import BASE, DRAFT, VALUE_MIX, Recurrence, mix, sample, take

MASK = 2**64 - 1


def plain(recurrence, before, tokens):
    states = []
    for token in tokens:
        before = (before * int(recurrence._factor) + token * int(recurrence._token_factor)
                  + int(recurrence._constant)) & MASK  # fmt: skip
        states.append(before)
    return states


@pytest.mark.parametrize("recurrence", [BASE, DRAFT])
@pytest.mark.parametrize("before", [0, 1, MASK])
def test_a_stretch_is_what_single_steps_are(recurrence, before):
    tokens = np.random.default_rng(1).integers(0, 2**31, 500, dtype=np.int32)
    start = np.array([before], np.uint64)
    states = recurrence.stretch(start, recurrence.inputs(tokens))
    assert states.tolist() == plain(recurrence, before, tokens.tolist())
    cut = recurrence.stretch(states[199:200], recurrence.inputs(tokens[200:]))
    assert np.array_equal(cut, states[200:])
    step = recurrence.step(states[:-1], recurrence.inputs(tokens[1:]))
    assert np.array_equal(step, states[1:])


def test_an_empty_stretch_is_empty():
    empty = Recurrence(3, 5, 7).stretch(np.zeros(1, np.uint64), np.zeros(0, np.uint64))
    assert empty.size == 0


def test_every_token_changes_every_later_state_and_no_earlier_one():
    tokens = np.arange(40, dtype=np.int32)
    start = np.zeros(1, np.uint64)
    states = BASE.stretch(start, BASE.inputs(tokens))
    for position in (0, 17, 39):
        other = tokens.copy()
        other[position] += 1
        differs = states != BASE.stretch(start, BASE.inputs(other))
        assert differs.tolist() == [False] * position + [True] * (40 - position)


def test_a_mix_keeps_zero_and_separates_salts():
    words = np.arange(1000, dtype=np.uint64)
    mixed = mix(words, VALUE_MIX)
    assert mixed[0] == 0
    assert np.unique(mixed).size == 1000
    assert not np.any(mixed[1:] == mix(words, np.uint64(3))[1:])


def test_tokens_and_accepted_counts_are_in_range():
    states = np.arange(4000, dtype=np.uint64)
    tokens = sample(states, np.uint64(0))
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0
    assert not np.array_equal(tokens, sample(states, np.uint64(1)))
    counts = take(states, 4)
    assert sorted(set(counts.tolist())) == [1, 2, 3, 4]
    assert np.bincount(counts).min(where=np.arange(5) > 0, initial=4000) > 800
