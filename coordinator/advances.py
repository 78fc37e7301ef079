"""What a completion may claim: pure functions from arrays to a plan, or a refusal. Nothing here changes anything.

All rules of a step are checked before any of them is applied, over whole arrays: no loop over sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import define

from context_cache.coordinator.arguments import Int32Array, as_int32, expect
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.ledger import BOUND, SEATED, STATE_NAMES
from context_cache.coordinator.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    BatchAdvance,
    ContextCacheSequenceAdvance,
)
from context_cache.machines.sequence import BRINGS_TOKENS, NAMED, REFUSED, ask_table

__all__ = [
    "StepPlan",
    "as_batch_advance",
    "plan_decode_step",
    "plan_full_input",
    "plan_plain_step",
]

Slots = npt.NDArray[np.int64]

_COMPLETE: Final = np.array(ask_table("complete_decode_step"), np.uint8)
_NAMED_NEXT: Final = int(_COMPLETE[BRINGS_TOKENS + NAMED, SEATED])
_HOLD: Final = HOLD_COMMITTED_STATE_LENGTH
_INT32: Final = np.dtype(np.int32)


@define(eq=False)
class StepPlan:
    """What to write into the ledger. Not frozen, because a frozen one takes a microsecond more; nobody changes it.

    residents: int64[m], resident slots that advance. positions: int64[k], where each token goes in the flat token
    array. tokens: int32[k]. committed, token_count: int32[m], the new values. states: (residents, new codes) of the
    sequences whose state changes, or None. most: the largest number of positions any of them took. common: int32[m],
    new common lengths of a speculative request; None: they follow the committed ones.
    """

    residents: Slots
    positions: Slots
    tokens: Int32Array
    committed: Int32Array
    token_count: Int32Array
    states: tuple[Slots, npt.NDArray[np.uint8]] | None
    most: int
    common: Int32Array | None = None

    def lengths_after(self, core: Core, request: Request, slots: tuple[int, ...]) -> list[tuple[int, int]]:
        """(resident slot, committed length after the step) of logical slots; a slot that holds keeps its length."""
        moved = dict(zip(self.residents.tolist(), self.committed.tolist(), strict=True))
        residents = [int(request.order[slot]) for slot in slots]
        return [(resident, moved.get(resident, int(core.ledger.committed[resident]))) for resident in residents]


def as_batch_advance(advances: BatchAdvance | Sequence[ContextCacheSequenceAdvance], count: int) -> BatchAdvance:
    """Either form as arrays, shapes and dtypes checked against ``count`` sequences; values are checked by the plans.

    Raises ContractViolation: another number of advances, a dtype that is not int32, or not one dimension.
    """
    if isinstance(advances, BatchAdvance):
        tokens, counts, committed = advances.token_ids, advances.counts, advances.committed
        for name, array in (("token_ids", tokens), ("counts", counts), ("committed", committed)):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                raise ContractViolation(
                    f"BatchAdvance.{name} must be a one-dimensional int32 array, got {_kind(array)}"
                )
        if counts.size != count or committed.size != count:
            raise ContractViolation(
                f"BatchAdvance has {counts.size} counts and {committed.size} committed lengths for {count} sequences; "
                "give one of each per logical slot"
            )
        batch = advances
    else:
        expect(advances, list | tuple, "advances")
        listed = list(advances)
        for slot, item in enumerate(listed):
            expect(item, ContextCacheSequenceAdvance, f"advances[{slot}]")
        if len(listed) != count:
            raise ContractViolation(
                f"{len(listed)} advances were given for {count} sequences; give one per logical slot"
            )
        counts = np.array([len(item.accepted_token_ids) for item in listed], np.int32)
        tokens = as_int32([token for item in listed for token in item.accepted_token_ids], "accepted_token_ids")
        committed = as_int32([item.committed_state_length for item in listed], "committed_state_length")
        batch = BatchAdvance(tokens, counts, committed)
    return batch


def _check_counts(batch: BatchAdvance) -> None:
    """Raise ContractViolation: a negative count, counts that do not add up, a length below HOLD, HOLD with tokens."""
    counts, committed = batch.counts, batch.committed
    if counts.size and counts.min() < 0:
        raise ContractViolation(f"slot {int(counts.argmin())} has a negative token count {int(counts.min())}")
    total = int(counts.sum(dtype=np.int64))
    if total != batch.token_ids.size:
        raise ContractViolation(f"the counts add up to {total} tokens, but {batch.token_ids.size} were given")
    if committed.size and int(committed.min()) < _HOLD:
        raise ContractViolation(
            f"slot {int(committed.argmin())} has committed length {int(committed.min())}; use HOLD (-1) or a length"
        )
    wrong = ((committed == _HOLD) & (counts > 0)).nonzero()[0]
    if wrong.size:
        raise ContractViolation(
            f"slot {int(wrong[0])} holds but brings tokens; give it a committed length or no tokens"
        )


def plan_plain_step(core: Core, request: Request, batch: object, completed: tuple[int, ...]) -> StepPlan | None:
    """The plan of a plain step: every sequence is seated and brings one token. None: it is another kind of step.

    This is the step that a runtime makes ninety-nine times in a hundred, so it is recognised with as few array
    operations as possible: equal bytes are equal arrays. Whatever is not recognised is checked rule by rule elsewhere.
    """
    if type(batch) is not BatchAdvance or request.joiners or request.terminals or not request.plain_steps:
        return None
    tokens, counts, committed, order = batch.token_ids, batch.counts, batch.committed, request.order
    try:
        if not (tokens.dtype is counts.dtype is committed.dtype is _INT32) or not (
            tokens.shape == counts.shape == committed.shape == order.shape
        ):
            return None
    except AttributeError:  # not arrays: the checks of the general way say so
        return None
    following = core.ledger.committed[order]
    following += 1
    if counts.tobytes() != request.one_each or committed.tobytes() != following.tobytes():
        return None
    # The table's row (seated, brings_tokens, not named) keeps the state, so no state is written; a named sequence is
    # seated here, and its row leads to terminal.
    states = None
    if completed:
        if len(set(completed)) != len(completed) or not 0 <= min(completed) <= max(completed) < order.size:
            return None
        named = order[list(completed)]
        states = (named, np.full(named.size, _NAMED_NEXT, np.uint8))
    return StepPlan(order, request.row_starts + following, tokens, following, following + 1, states, 1)


def plan_decode_step(
    core: Core, request: Request, batch: BatchAdvance, completed: tuple[int, ...], common: object = None
) -> StepPlan:
    """Check one decode step of a request and work out the new ledger values.

    One token per sequence and committed + 1; where the policy or the token contract takes several, k > 0 tokens and
    committed + k; or HOLD. common: common state lengths of a speculative request.
    completed: logical slots that ended normally; only seated sequences may be named.
    Raises ContractViolation naming the first slot that breaks a rule.
    """
    _check_counts(batch)
    return _plan_mixed_step(core, request, batch, completed, common, core.ledger.committed[request.order])


def _plan_mixed_step(
    core: Core, request: Request, batch: BatchAdvance, completed: tuple[int, ...], common: object, old: Int32Array
) -> StepPlan:
    ledger, order = core.ledger, request.order
    count = order.size
    named = np.zeros(count, bool)
    for slot in completed:
        if not 0 <= slot < count:
            raise ContractViolation(f"completed slot {slot} is outside 0..{count - 1}", slot=slot)
        if named[slot]:
            raise ContractViolation(f"completed slot {slot} is named twice", slot=slot)
        named[slot] = True
    moves = batch.committed != _HOLD
    states = ledger.state[order]
    following = _COMPLETE[BRINGS_TOKENS * moves + NAMED * named, states]
    refused = (following == REFUSED).nonzero()[0]
    if refused.size:
        slot = int(refused[0])
        what = "be named as completed" if named[slot] else "take tokens"
        raise ContractViolation(
            f"slot {slot} is {STATE_NAMES[int(states[slot])]} and cannot {what}; give it HOLD and do not name it",
            slot=slot, state=STATE_NAMES[int(states[slot])],
        )  # fmt: skip
    counts = batch.counts
    wanted = counts == 1 if request.plain_steps else counts > 0
    listed = ledger.token_count[order]
    full = listed == old + 1 if request.lookahead else listed == old
    wrong = (moves & ~(wanted & full & (batch.committed.astype(np.int64) == old + counts))).nonzero()[0]
    if wrong.size:
        slot = int(wrong[0])
        rule = "one token and committed + 1" if request.plain_steps else "k tokens and committed + k"
        raise ContractViolation(
            f"slot {slot} brings {int(counts[slot])} token(s) and committed length {int(batch.committed[slot])} after "
            f"{int(old[slot])}; give {rule}, or HOLD",
            slot=slot,
        )
    room = ledger.positions_held(order)
    over = (moves & (batch.committed > room)).nonzero()[0]
    if over.size:
        slot = int(over[0])
        raise ContractViolation(
            f"slot {slot} claims {int(batch.committed[slot])} committed tokens, its pages hold {int(room[slot])}; "
            "prepare the step with enough headroom",
            slot=slot,
        )
    after = np.where(moves, batch.committed, old)
    kept = request.policy.step_common(core, request, common, after, moves)
    if request.paired:
        _refuse_beyond_draft(core, request, after if kept is None else kept, moves)
    residents = order[moves]
    changed = (following != states).nonzero()[0]
    committed = batch.committed[moves]
    taken = counts[moves]
    return StepPlan(
        residents,
        _positions(residents * ledger.width + listed[moves], taken),
        batch.token_ids,
        committed,
        listed[moves] + taken,
        (order[changed], following[changed]) if changed.size else None,
        int(taken.max()) if taken.size else 0,
        None if kept is None else kept[moves],
    )


def _refuse_beyond_draft(core: Core, request: Request, lengths: Int32Array, moves: npt.NDArray[np.bool_]) -> None:
    """What base and draft have in common lies within the draft's pages too. Raises ContractViolation."""
    room = core.ledger.draft_page_count[request.order].astype(np.int64) * core.page_size
    over = (moves & (lengths > room)).nonzero()[0]
    if over.size:
        slot = int(over[0])
        raise ContractViolation(
            f"slot {slot} claims {int(lengths[slot])} tokens in base and draft, its draft pages hold "
            f"{int(room[slot])}; prepare the step with enough draft headroom",
            slot=slot,
        )


def plan_full_input(core: Core, request: Request, batch: BatchAdvance, slots: Slots, lookahead: bool) -> StepPlan:
    """Check the end of a prefill for the logical ``slots``: the complete input is committed, plus the lookahead token.

    Raises ContractViolation naming the first slot that breaks the rule.
    """
    ledger = core.ledger
    residents = request.order[slots]
    if not (ledger.state[residents] == BOUND).all():
        raise ContractViolation(
            f"a sequence of request {request.id} was finalised by a call that was interrupted; finish or drop it"
        )
    listed = ledger.token_count[residents]
    tokens = 1 if lookahead else 0
    counts = np.full(listed.size, tokens, np.int32)
    # Equal bytes are equal arrays; only what differs is looked at rule by rule.
    same = batch.committed.tobytes() == listed.tobytes() and batch.counts.tobytes() == counts.tobytes()
    if not same or batch.token_ids.size != tokens * listed.size:
        _check_counts(batch)
        wrong = ((batch.counts != tokens) | (batch.committed != listed)).nonzero()[0]
        index = int(wrong[0])
        raise ContractViolation(
            f"slot {int(slots[index])} ends its prefill with {int(batch.counts[index])} token(s) and committed length "
            f"{int(batch.committed[index])}; give {tokens} token(s) and the input length {int(listed[index])}",
            slot=int(slots[index]),
        )
    return StepPlan(
        residents,
        _positions(residents * ledger.width + listed, batch.counts),
        batch.token_ids,
        batch.committed,
        listed + batch.counts,
        (residents, np.full(residents.size, SEATED, np.uint8)),
        0,
    )


def _positions(starts: Slots, counts: Int32Array) -> Slots:
    """Where each token goes: ``starts[i] .. starts[i] + counts[i] - 1``, slot after slot."""
    if starts.size == 0 or (int(counts.max()) == 1 and int(counts.min()) == 1):
        return starts
    before = np.cumsum(counts, dtype=np.int64) - counts
    positions: Slots = np.repeat(starts - before, counts) + np.arange(int(counts.sum(dtype=np.int64)))
    return positions


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim} dimension(s) of {value.dtype}"
    return type(value).__name__
