"""The embedded model's tokens depend on request, position and seed, and on nothing else."""

from __future__ import annotations

import numpy as np

from context_cache.coordinator.cli.embedded import EmbeddedModel


def test_tokens_do_not_depend_on_the_batch_or_on_the_run_of_steps():
    model = EmbeddedModel(seed=3)
    ordinals, positions = np.array([5, 0, 12]), np.array([100, 7, 3])
    tokens = model.tokens(ordinals, positions, 20)
    assert tokens.shape == (20, 3)
    assert tokens.dtype == np.int32
    for column, (ordinal, position) in enumerate(zip(ordinals, positions, strict=True)):
        assert np.array_equal(tokens[:, column], model.sequence(ordinal, position, 20))
        assert np.array_equal(tokens[9:, column], model.sequence(ordinal, position + 9, 11))


def test_tokens_are_valid_and_do_not_repeat():
    tokens = EmbeddedModel().tokens(np.arange(50), np.zeros(50, dtype=np.int64), 200)
    assert tokens.min() >= 0
    assert np.unique(tokens).size > 0.999 * tokens.size


def test_another_seed_gives_other_tokens():
    first, second = (EmbeddedModel(seed).sequence(1, 1, 100) for seed in (0, 2**63 - 1))
    assert not np.any(first == second)
