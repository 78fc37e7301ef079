"""The embedded model's kernels: the states of ``function``, written and read back where a runtime's would be.

K entry of a token: its state; V entry: a mix of it; both at the page and offset that the device's page-table row names.
Draft entries hold a draft state; recurrent rows the state behind the last token; hidden rows (MTP) a mix. A kernel
knows the past only through these: it reads the entry before its first position, so whatever was uploaded, restored,
shared or given away wrongly makes other states and other tokens.

Rule 1: every kernel is enqueued and looks at rows, lengths and tokens when it runs. Rule 2: no kernel loops over tokens
of a prefill or over sequences of a step; the verify positions of a speculative round are a loop, because each needs
the token that the one before it sampled.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from context_cache.coordinator import ContextCachePhysicalResources, HybridCacheManager, KVPageTable
from context_cache.coordinator.cli.flavours import Flavour
from context_cache.coordinator.cli.function import (
    BASE,
    CONV_MIX,
    DRAFT,
    HIDDEN,
    STATE_MIX,
    VALUE_MIX,
    Words,
    mix,
    sample,
    take,
)
from context_cache.coordinator.cli.platform import Platform

__all__ = ["PagedState", "RecurrentState", "StubModel"]

Slots = NDArray[np.int64]

_AGREE: Final = np.uint64(0xA24BAED4963EE407)
_START: Final = np.zeros(1, np.uint64)  # the state before the first token


class PagedState:
    """The K/V entries of one model, 8 bytes each, addressed through its page table.

    ``faults``: told of each row that names no page where one is needed.
    """

    def __init__(self, table: KVPageTable, cache: HybridCacheManager, platform: Platform, faults: list[str]) -> None:
        self.page_size: Final = cache.page_size
        self._rows = platform.view(table.device_array)
        self._words: Words = platform.view(cache.kv_pools[0].reshape(2 * cache.num_pages, -1).view(np.uint64))
        self._faults = faults

    def pages(self, slots: Slots, positions: Slots, half: int = 0) -> NDArray[np.int32]:
        """Ids of the K (half 0) or V (half 1) pages of these positions; the slots broadcast."""
        ids: NDArray[np.int32] = self._rows[slots, half, positions // self.page_size]
        if ids.size and int(ids.min()) < 0:
            where = np.broadcast_to(positions, ids.shape)[ids < 0]
            self._faults.append(f"a page-table row names no page for position {int(where[0])}")
            ids = np.maximum(ids, 0)
        return ids

    def entries(self, slots: Slots, positions: Slots) -> tuple[Words, Words]:
        """K and V entries."""
        offsets = positions % self.page_size
        keys, values = (self._words[self.pages(slots, positions, half), offsets] for half in (0, 1))
        return keys, values

    def read(self, slots: Slots, positions: Slots) -> Words:
        """The states of these positions; other ones if the K or the V entry is not what was written."""
        keys, values = self.entries(slots, positions)
        states: Words = keys ^ values ^ mix(keys, VALUE_MIX)
        return states

    def write(self, slots: Slots, positions: Slots, states: Words) -> None:
        offsets = positions % self.page_size
        self._words[self.pages(slots, positions), offsets] = states
        self._words[self.pages(slots, positions, 1), offsets] = mix(states, VALUE_MIX)


class RecurrentState:
    """Recurrent and convolution rows of the resident slots."""

    def __init__(self, cache: HybridCacheManager, platform: Platform) -> None:
        self._states: Words = platform.view(cache.recurrent_states[0].reshape(cache.max_batch, -1).view(np.uint64))
        self._convs: Words = platform.view(cache.conv_states[0].reshape(cache.max_batch, -1).view(np.uint64))

    def entries(self, slots: Slots) -> tuple[Words, Words, Words]:
        """Two words of the recurrent row and one of the convolution row."""
        return self._states[slots, 0], self._states[slots, 1], self._convs[slots, 0]

    def read(self, slots: Slots) -> Words:
        first, second, conv = self.entries(slots)
        states: Words = first ^ second ^ mix(first, STATE_MIX) ^ conv ^ mix(first, CONV_MIX)
        return states

    def write(self, slots: Slots, states: Words) -> None:
        self._states[slots, 0] = states
        self._states[slots, 1] = mix(states, STATE_MIX)
        self._convs[slots, 0] = mix(states, CONV_MIX)


class StubModel:
    """Base model, draft and token buffer of one run.

    tokens: int32[max_batch, row_tokens and more], by resident slot; the token behind the committed ones is the
    lookahead.
    hidden: float16[row_tokens and more, 4], by position, of the one sequence of an MTP run; None otherwise.
    counts, produced: what the last step accepted, int64[n] and int32[n, width]; read them after a synchronise.
    faults: what no kernel should ever see; empty in a sound run.
    """

    def __init__(
        self,
        flavour: Flavour,
        resources: ContextCachePhysicalResources,
        platform: Platform,
        *,
        row_tokens: int,
        seed: int,
    ) -> None:
        self.flavour: Final = flavour
        self._platform = platform
        self._cache = resources.base_cache
        self._lengths: Any = platform.view(resources.base_cache.lengths)
        self._draft_lengths: Any = None
        self._seed = np.uint64(seed % 2**64)
        self.faults: Final[list[str]] = []
        self.base: PagedState | None = None
        if flavour.has_attention:
            self.base = PagedState(resources.base_page_table, self._cache, platform, self.faults)
        self.draft: PagedState | None = None
        if resources.draft_cache is not None and resources.draft_page_table is not None:
            self.draft = PagedState(resources.draft_page_table, resources.draft_cache, platform, self.faults)
            self._draft_lengths = platform.view(resources.draft_cache.lengths)
        self.recurrent = RecurrentState(self._cache, platform) if flavour.has_recurrent else None
        self._offsets = np.arange(flavour.width)
        # A round looks at positions that it will not keep: behind the last token of a full row there are two rounds.
        longest = row_tokens + 2 * flavour.width
        self.tokens: Final = np.zeros((self._cache.max_batch, longest), np.int32)  # the model's own, on the host
        self.hidden: Final[Any] = platform.backend.array((longest, 4), "float16") if flavour.mtp else None
        self.counts: Slots = np.zeros(0, np.int64)
        self.produced: NDArray[np.int32] = np.zeros((0, flavour.width), np.int32)

    @property
    def hidden_words(self) -> Words:
        """uint64[positions], the hidden rows of an MTP run."""
        words: Words = self._platform.view(self.hidden.view(np.uint64)[:, 0])
        return words

    def sampled(self, states: Words) -> NDArray[np.int32]:
        """The token that follows each state."""
        return sample(states, self._seed)

    # What the runtime enqueues ----------------------------------------------------------------------------------

    def load(self, slot: int, prompt: NDArray[np.int32]) -> None:
        """Copy a prompt into the token buffer; with MTP, forget the hidden rows of the sequence before."""

        def work() -> None:
            self.tokens[slot, : prompt.size] = prompt
            if self.hidden is not None:
                self.hidden_words[...] = _AGREE

        self._platform.enqueue(work, "load prompt")

    def prefill(self, logical: int, slot: int, end: int, *, sample_next: bool = True) -> None:
        """Base prefill of one sequence, from its device length up to ``end`` tokens."""
        self._platform.enqueue(lambda: self._prefill(logical, np.array([slot]), end, sample_next), "prefill")

    def prefill_draft(self, logical: int, slot: int, end: int) -> None:
        """Draft prefill, behind the base's; with MTP one position earlier, which saw another next token."""
        self._platform.enqueue(lambda: self._prefill_draft(logical, np.array([slot]), end), "draft prefill")

    def decode(self, slots: Slots, limits: Slots | None = None) -> None:
        """One step of the sequences in these resident slots, in logical order; at most ``limits`` tokens each."""
        self._platform.enqueue(lambda: self._decode(slots, limits), "decode")

    # Kernels ----------------------------------------------------------------------------------------------------

    def _before(self, slots: Slots, positions: Slots) -> Words:
        """States of the positions before these, as far as rows and pages hold them."""
        recurrent = None if self.recurrent is None else self.recurrent.read(slots)
        if self.base is None:
            assert recurrent is not None, "a model has attention or recurrent layers"
            return recurrent
        if int(positions.min()) == 0:  # only ever a prefill, of one sequence
            return _START if recurrent is None else recurrent
        paged = self.base.read(slots, positions - 1)
        if recurrent is None:
            return paged
        states: Words = recurrent + (paged - recurrent) * _AGREE  # either one, while they agree
        return states

    def _prefill(self, logical: int, slot: Slots, end: int, sample_next: bool) -> None:
        lengths = self._lengths
        begin = int(lengths[logical])
        positions = np.arange(begin, end)
        states = BASE.stretch(self._before(slot, positions[:1]), BASE.inputs(self.tokens[slot[0], begin:end]))
        if self.base is not None:
            self.base.write(slot, positions, states)
        if self.recurrent is not None:
            self.recurrent.write(slot, states[-1:])
        if self.hidden is not None:
            self.hidden_words[begin:end] = mix(states, HIDDEN)
        lengths[logical] = end
        if sample_next:
            self.tokens[slot, end] = self.sampled(states[-1:])

    def _paged_draft(self) -> tuple[PagedState, Any, int]:
        """The draft's pages, its device lengths, and how many later tokens it looks at."""
        assert self.draft is not None, "only a draft with pages computes"
        return self.draft, self._draft_lengths, self.flavour.future

    def _prefill_draft(self, logical: int, slot: Slots, end: int) -> None:
        draft, lengths, future = self._paged_draft()
        begin = int(lengths[logical])
        if self.hidden is not None and begin:
            begin -= 1
        positions = np.arange(begin, end)
        before = draft.read(slot, positions[:1] - 1) if begin else _START
        inputs = DRAFT.inputs(self.tokens[slot[0], begin + future : end + future])
        if self.hidden is not None:
            inputs = inputs + self.hidden_words[begin:end]
        draft.write(slot, positions, DRAFT.stretch(before, inputs))
        lengths[logical] = end

    def _decode(self, slots: Slots, limits: Slots | None) -> None:
        lengths = self._lengths
        positions = lengths[: slots.size].astype(np.int64)
        if self.draft is not None and self.hidden is None:
            self._feed_draft(slots, positions)  # what the round before accepted
        states = BASE.step(self._before(slots, positions), BASE.inputs(self.tokens[slots, positions]))
        width = self.flavour.width
        if width > 1:
            self._verify_round(slots, positions, states, limits)
        else:
            if self.base is not None:
                self.base.write(slots, positions, states)
            if self.recurrent is not None:
                self.recurrent.write(slots, states)
            following = self.sampled(states)
            self.tokens[slots, positions + 1] = following
            self.produced = following[:, np.newaxis]
            self.counts = np.ones(slots.size, np.int64)
        lengths[: slots.size] += self.counts.astype(np.int32)
        if self.draft is not None and self.hidden is not None:
            self._feed_draft(slots, positions + self.counts)

    def _verify_round(self, slots: Slots, positions: Slots, states: Words, limits: Slots | None) -> None:
        """Write every verify position; those behind the accepted ones hold what was rejected."""
        width = self.flavour.width
        counts = take(states, width)
        if limits is not None:
            counts = np.minimum(counts, limits)
        computed = np.empty((slots.size, width), np.uint64)
        produced = np.empty((slots.size, width), np.int32)
        computed[:, 0] = states
        for offset in range(width):
            produced[:, offset] = following = self.sampled(computed[:, offset])
            if offset + 1 < width:
                computed[:, offset + 1] = BASE.step(computed[:, offset], BASE.inputs(following))
        accepted = self._offsets < counts[:, np.newaxis]
        where, rows = positions[:, np.newaxis] + self._offsets, slots[:, np.newaxis]
        if self.base is not None:
            self.base.write(rows, where, np.where(accepted, computed, ~computed))
        if self.hidden is not None:
            self.hidden_words[where] = np.where(accepted, mix(computed, HIDDEN), ~computed)
        self.tokens[np.broadcast_to(rows, where.shape)[accepted], where[accepted] + 1] = produced[accepted]
        if self.recurrent is not None:
            self.recurrent.write(slots, computed[np.arange(slots.size), counts - 1])
        self.counts, self.produced = counts, produced

    def _feed_draft(self, slots: Slots, ends: Slots) -> None:
        """Draft entries from the draft's device lengths up to ``ends``, at most ``width`` each."""
        draft, lengths, future = self._paged_draft()
        begins = lengths[: slots.size].astype(np.int64)
        fed = self._offsets < (ends - begins)[:, np.newaxis]
        if fed.any():
            where, rows = begins[:, np.newaxis] + self._offsets, slots[:, np.newaxis]
            inputs = DRAFT.inputs(self.tokens[rows, where + future])
            if self.hidden is not None:
                inputs = inputs + self.hidden_words[where]
            states, computed = draft.read(slots, begins - 1), np.empty(where.shape, np.uint64)
            for offset in range(self.flavour.width):
                computed[:, offset] = states = DRAFT.step(states, inputs[:, offset])
            draft.write(np.broadcast_to(rows, where.shape)[fed], where[fed], computed[fed])
        lengths[: slots.size] = ends
