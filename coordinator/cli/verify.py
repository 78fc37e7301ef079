"""Cached equals cold: what a sequence holds, against the states computed from its token list alone.

A check is one piece of work on the stream, like a kernel: it reads through the rows that the device has then, between
the work before it and whatever comes after. The first difference is kept; the scheduler asks for it when it has
synchronised anyway.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from context_cache.coordinator.cli.function import (
    BASE,
    CONV_MIX,
    DRAFT,
    HIDDEN,
    STATE_MIX,
    VALUE_MIX,
    Words,
    mix,
)
from context_cache.coordinator.cli.platform import Platform
from context_cache.coordinator.cli.stub import PagedState, StubModel
from context_cache.coordinator.cli.workload import Workload

__all__ = ["SAMPLE_MAX", "Difference", "Verifier"]

SAMPLE_MAX: Final = 400
"""A workload of at most so many requests is verified as a whole, of a larger one so many requests."""

_START: Final = np.zeros(1, np.uint64)


@frozen
class Difference:
    """Where cached and cold differ. page: None for what is not paged."""

    ordinal: int
    line: int
    position: int
    page: int | None
    what: str
    when: str

    def __str__(self) -> str:
        where = "" if self.page is None else f", page {self.page}"
        return (
            f"request {self.ordinal + 1} (line {self.line}), position {self.position}{where}: the {self.what} "
            f"{self.when} is not what a cold run computes; this is a bug, please report it"
        )


class Verifier:
    """Checks the requests of a sample; ``verified`` says how many of them have been checked to their end."""

    def __init__(self, workload: Workload, model: StubModel, platform: Platform, *, seed: int) -> None:
        self._requests = workload.requests
        self._model, self._platform = model, platform
        count = len(self._requests)
        chosen = np.ones(count, np.bool_)
        if count > SAMPLE_MAX:
            chosen[:] = False
            chosen[np.random.default_rng(seed).choice(count, SAMPLE_MAX, replace=False)] = True
        self._chosen = chosen
        self.difference: Difference | None = None
        self.verified = 0

    def started(self, ordinal: int, slot: int, tokens: NDArray[np.int32], reused: int) -> None:
        """Enqueue the check of what a prefill is about to start from: ``tokens`` is its whole input."""
        if not reused or not self._chosen[ordinal]:
            return
        mtp = self._model.hidden is not None
        # With MTP the last draft entry of a hit saw another next token and is computed again.
        draft = reused - 1 if mtp else reused

        def work() -> None:
            known = tokens[: reused + self._model.flavour.future]
            self._compare(ordinal, slot, known, reused, draft, "that is reused")
            if mtp and self.difference is None:
                wanted = mix(BASE.stretch(_START, BASE.inputs(known[:reused]))[-1:], HIDDEN)
                found = self._model.hidden_words[reused - 1 : reused]
                self._note(ordinal, found, wanted, "hidden row", "that is reused", first=reused - 1)

        self._platform.enqueue(work, "verify start")

    def retired(self, ordinal: int, slot: int, committed: int, common: int) -> None:
        """Enqueue the check of everything that a sequence holds when it has all of its tokens."""
        if not self._chosen[ordinal]:
            return
        prompt = self._requests[ordinal].prompt()

        def work() -> None:
            generated = self._model.tokens[slot, prompt.size : committed + 1]
            known = np.concatenate((prompt, generated))
            self._compare(ordinal, slot, known, committed, common, "at its end")
            if self.difference is None:
                states = BASE.stretch(_START, BASE.inputs(known[:committed]))
                wanted = self._model.sampled(states[prompt.size - 1 :])
                self._note(ordinal, generated, wanted, "generated token", "at its end", first=prompt.size)
            self.verified += 1

        self._platform.enqueue(work, "verify end")

    def _compare(
        self, ordinal: int, slot: int, known: NDArray[np.int32], length: int, draft_length: int, when: str
    ) -> None:
        model = self._model
        states = BASE.stretch(_START, BASE.inputs(known[:length]))
        if model.base is not None:
            self._compare_pages(ordinal, slot, model.base, states, "", when)
        if model.recurrent is not None:
            last = states[-1:]
            wanted = (last, mix(last, STATE_MIX), mix(last, CONV_MIX))
            found = model.recurrent.entries(np.array([slot]))
            names = ("recurrent state", "recurrent state", "convolution state")
            for name, one, other in zip(names, found, wanted, strict=True):
                self._note(ordinal, one, other, name, when, first=length - 1)
        if model.draft is not None and draft_length:
            future = model.flavour.future
            inputs = DRAFT.inputs(known[future : draft_length + future])
            if model.hidden is not None:
                inputs = inputs + mix(states[:draft_length], HIDDEN)
            self._compare_pages(ordinal, slot, model.draft, DRAFT.stretch(_START, inputs), "draft ", when)

    def _compare_pages(
        self, ordinal: int, slot: int, paged: PagedState, states: Words, whose: str, when: str
    ) -> None:
        slots, positions = np.array([slot]), np.arange(states.size)
        keys, values = paged.entries(slots, positions)
        for name, found, wanted in (("K", keys, states), ("V", values, mix(states, VALUE_MIX))):
            if self.difference is None and not np.array_equal(found, wanted):
                self._note(
                    ordinal, found, wanted, f"{whose}{name} entry", when, pages=paged.pages(slots, positions)
                )

    def _note(
        self,
        ordinal: int,
        found: Words | NDArray[np.int32],
        wanted: Words | NDArray[np.int32],
        what: str,
        when: str,
        *,
        first: int = 0,
        pages: NDArray[np.int32] | None = None,
    ) -> None:
        if self.difference is not None or np.array_equal(found, wanted):
            return
        index = int((found != wanted).nonzero()[0][0])
        page = None if pages is None else int(pages[index])
        line = self._requests[ordinal].line
        self.difference = Difference(ordinal, line, first + index, page, what, when)
