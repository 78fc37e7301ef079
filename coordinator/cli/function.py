"""What the embedded model computes: a state for every position that depends on all tokens up to it and nothing else.

``s[i] = A * s[i-1] + B * token[i] + C`` modulo 2**64, with s[-1] = 0. A is odd, so it has an inverse, and a whole
stretch is one cumulative sum: ``s[i] = A**i * (A * s[-1] + sum of A**-j * (B * token[j] + C))``. Everything else that a
device holds (V entries, convolution state, hidden rows, tokens) is a mix of a state that maps 0 to 0. Unsigned arrays
wrap silently, which is what the arithmetic wants.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BASE",
    "CONV_MIX",
    "DRAFT",
    "HIDDEN",
    "STATE_MIX",
    "VALUE_MIX",
    "Recurrence",
    "Words",
    "mix",
    "sample",
    "take",
]

Words = NDArray[np.uint64]

_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SAMPLE: Final = np.uint64(0x9E3779B97F4A7C15)
_TAKE: Final = np.uint64(0xD6E8FEB86659FD93)
_30, _27, _31, _33 = (np.uint64(bits) for bits in (30, 27, 31, 33))

VALUE_MIX: Final = np.uint64(0xC2B2AE3D27D4EB4F)
STATE_MIX: Final = np.uint64(0x165667B19E3779F9)
CONV_MIX: Final = np.uint64(0x27D4EB2F165667C5)
HIDDEN: Final = np.uint64(0x85EBCA77C2B2AE63)


def mix(words: Words, salt: np.uint64) -> Words:
    """Spread the bits of each word; 0 stays 0. ``salt``: an odd number that names the purpose."""
    mixed = words * salt
    mixed = (mixed ^ (mixed >> _30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _27)) * _MIX_2
    result: Words = mixed ^ (mixed >> _31)
    return result


def sample(states: Words, seed: np.uint64) -> NDArray[np.int32]:
    """The token that follows each state, in [0, 2**31)."""
    tokens: NDArray[np.int32] = (mix(states ^ seed, _SAMPLE) >> _33).astype(np.int32)
    return tokens


def take(states: Words, width: int) -> NDArray[np.int64]:
    """How many tokens a round accepts whose first position has this state: 1 to ``width``."""
    accepted: NDArray[np.int64] = (mix(states, _TAKE) % np.uint64(width)).astype(np.int64) + 1
    return accepted


class Recurrence:
    """``s[i] = A * s[i-1] + x[i]``, for whole stretches and for single steps of many sequences."""

    def __init__(self, factor: int, token_factor: int, constant: int) -> None:
        self._factor = np.uint64(factor)
        self._inverse = np.uint64(pow(factor, -1, 2**64))
        self._token_factor, self._constant = np.uint64(token_factor), np.uint64(constant)
        self._powers = self._inverses = np.ones(1, np.uint64)

    def inputs(self, tokens: NDArray[Any]) -> Words:
        """What each token adds."""
        words: Words = tokens.astype(np.uint64) * self._token_factor + self._constant
        return words

    def step(self, before: Words, inputs: Words) -> Words:
        """One position of several sequences: uint64[n] both."""
        after: Words = before * self._factor + inputs
        return after

    def stretch(self, before: Words, inputs: Words) -> Words:
        """Consecutive positions of one sequence, uint64[k], behind the state ``before``, uint64[1]."""
        count = inputs.size
        if count > self._powers.size:
            size = max(count, 2 * self._powers.size)
            ones = np.ones(size, np.uint64)
            ones[1:] = self._factor
            self._powers = np.multiply.accumulate(ones)
            ones[1:] = self._inverse
            self._inverses = np.multiply.accumulate(ones)
        sums = np.add.accumulate(inputs * self._inverses[:count])
        states: Words = (sums + before * self._factor) * self._powers[:count]
        return states


BASE: Final = Recurrence(0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x14057B7EF767814F)
DRAFT: Final = Recurrence(0xDA942042E4DD58B5, 0x9FB21C651E98DF25, 0x632BE59BD9B4E019)
