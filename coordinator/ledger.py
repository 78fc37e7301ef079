"""The ledger: what is known of every sequence, one column per fact, indexed by resident slot.

A resident slot is unique over all live, quarantined and poisoned requests and never moves, so it is the index; a
request keeps an array from logical slot to resident slot, and compaction permutes that array and nothing else.

Token ids live in one int32 matrix ``[max_batch, capacity + 1]``. The operating system gives it memory when it is
touched, so a slot costs the longest sequence it has seen, and a step appends to all rows with one scatter.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from context_cache.coordinator.identity import BlockKeyExtras, Digest, HashChain
from context_cache.coordinator.manager import Lease, LookupPolicy, SnapshotReservation
from context_cache.coordinator.types import CommitPolicy, ResidentRef, SequenceState
from context_cache.machines import CAPTURE_CODES, STATE_CODES

__all__ = [
    "BOUND",
    "CAPTURE_CAPTURED",
    "CAPTURE_NONE",
    "CAPTURE_RESERVED",
    "FREE",
    "LEASED",
    "QUARANTINED",
    "SEATED",
    "STATE_NAMES",
    "TERMINAL",
    "Ledger",
    "StagedHybridPublication",
]

FREE: Final = STATE_CODES["free"]
LEASED: Final = STATE_CODES["leased"]
BOUND: Final = STATE_CODES["bound"]
SEATED: Final = STATE_CODES["seated"]
TERMINAL: Final = STATE_CODES["terminal"]
QUARANTINED: Final = STATE_CODES["quarantined"]
STATE_NAMES: Final = tuple(STATE_CODES)
CAPTURE_NONE: Final = CAPTURE_CODES["none"]
CAPTURE_RESERVED: Final = CAPTURE_CODES["reserved"]
CAPTURE_CAPTURED: Final = CAPTURE_CODES["captured"]
CAPTURE_NAMES: Final = tuple(CAPTURE_CODES)


@frozen(eq=False)
class StagedHybridPublication:
    """A checkpoint whose snapshot slots are reserved: what it will be published as.

    digest, length: identity of the prefix and its length in tokens. decode_end: made at the end of the sequence.
    """

    digest: Digest
    length: int
    reservation: SnapshotReservation
    decode_end: bool


class Ledger:
    """Columns of ``slots`` entries. A row holds the tokens of ``row_pages`` pages and one lookahead: ``width`` ids.

    paged: sequences hold pages; a pure recurrent model has none, and only the row's capacity limits a sequence.
    """

    __slots__ = (
        "bypass",
        "capture",
        "chains",
        "committed",
        "common",
        "draft_page_count",
        "flat_tokens",
        "frozen",
        "key_extras",
        "last_epoch",
        "leases",
        "media",
        "owners",
        "page_count",
        "page_size",
        "paged",
        "prefill_only",
        "published_blocks",
        "published_exact",
        "refs",
        "replay_tail",
        "reuse",
        "staged",
        "state",
        "token_count",
        "tokens",
        "width",
    )

    def __init__(self, slots: int, row_pages: int, page_size: int, *, paged: bool = True) -> None:
        self.page_size = page_size
        self.paged = paged
        self.width = width = row_pages * page_size + 1
        self.tokens: npt.NDArray[np.int32] = np.zeros((slots, width), np.int32)
        self.flat_tokens: npt.NDArray[np.int32] = self.tokens.reshape(-1)
        self.token_count: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.committed: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.common: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.reuse: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.page_count: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.draft_page_count: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.published_exact: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.frozen: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.capture: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.published_blocks: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.replay_tail: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.last_epoch: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.state: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.bypass: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.prefill_only: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.owners: list[str | None] = [None] * slots
        self.refs: list[ResidentRef | None] = [None] * slots
        self.leases: list[Lease | None] = [None] * slots
        self.chains: list[HashChain | None] = [None] * slots
        self.key_extras: list[BlockKeyExtras | None] = [None] * slots
        self.media: list[tuple[Digest | None, ...]] = [()] * slots
        self.staged: list[StagedHybridPublication | None] = [None] * slots

    def open(
        self,
        owner: str,
        ref: ResidentRef,
        lease: Lease,
        chain: HashChain,
        token_ids: npt.NDArray[np.int32],
        key_extras: BlockKeyExtras,
        media: tuple[Digest | None, ...],
        *,
        reuse: int,
        state: int,
        lookup_policy: LookupPolicy,
        commit_policy: CommitPolicy,
        replay_tail: int,
    ) -> None:
        """Start the row of a newly admitted sequence. Published counts start at 0, also after a hit."""
        slot = ref.slot
        self.owners[slot], self.refs[slot], self.leases[slot] = owner, ref, lease
        self.last_epoch[slot] = ref.epoch
        self.chains[slot], self.key_extras[slot], self.media[slot] = chain, key_extras, media
        self.tokens[slot, : token_ids.size] = token_ids
        self.token_count[slot] = token_ids.size
        self.committed[slot] = self.common[slot] = self.reuse[slot] = reuse
        self.page_count[slot], self.draft_page_count[slot] = lease.page_count, lease.draft_page_count
        self.published_blocks[slot] = self.published_exact[slot] = self.frozen[slot] = 0
        self.staged[slot], self.capture[slot] = None, CAPTURE_NONE
        self.replay_tail[slot] = replay_tail
        self.state[slot] = state
        self.bypass[slot] = lookup_policy is LookupPolicy.BYPASS
        self.prefill_only[slot] = commit_policy is CommitPolicy.PREFILL_STATE_ONLY

    def close(self, slot: int) -> None:
        """Forget the row; its lease has been released."""
        self.owners[slot] = self.refs[slot] = self.leases[slot] = None
        self.chains[slot] = self.key_extras[slot] = None
        self.media[slot] = ()
        self.state[slot] = FREE
        self.token_count[slot] = self.committed[slot] = self.common[slot] = self.reuse[slot] = 0
        self.page_count[slot] = self.published_blocks[slot] = self.replay_tail[slot] = 0
        self.draft_page_count[slot] = self.published_exact[slot] = self.frozen[slot] = 0
        self.staged[slot], self.capture[slot] = None, CAPTURE_NONE

    def positions_held(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """int32[n]: how many positions each sequence may write with the pages it has."""
        if self.paged:
            held: npt.NDArray[np.int32] = self.page_count[order] * np.int32(self.page_size)
            return held
        return np.full(order.size, self.width - 1, np.int32)

    def ref(self, slot: int) -> ResidentRef:
        """Holder of a row that is in use."""
        ref = self.refs[slot]
        assert ref is not None, f"resident slot {slot} is free"
        return ref

    def lease(self, slot: int) -> Lease:
        """Lease of a row that is in use."""
        lease = self.leases[slot]
        assert lease is not None, f"resident slot {slot} is free"
        return lease

    def chain(self, slot: int) -> HashChain:
        """Hash chain of a row that is in use."""
        chain = self.chains[slot]
        assert chain is not None, f"resident slot {slot} is free"
        return chain

    def view(self, slot: int) -> SequenceState:
        """A copy of one row, under the names of the public API."""
        ids = self.tokens[slot, : int(self.token_count[slot])].copy()
        ids.flags.writeable = False
        return SequenceState(
            resident=self.ref(slot),
            state=STATE_NAMES[int(self.state[slot])],
            token_ids=ids,
            committed_state_length=int(self.committed[slot]),
            common_state_length=int(self.common[slot]),
            reuse_token_length=int(self.reuse[slot]),
            published_full_block_count=int(self.published_blocks[slot]),
            lookup_policy=LookupPolicy.BYPASS if self.bypass[slot] else LookupPolicy.USE_CACHE,
            commit_policy=(
                CommitPolicy.PREFILL_STATE_ONLY if self.prefill_only[slot] else CommitPolicy.INCLUDING_GENERATED_TOKENS
            ),
            base_pages=tuple(self.lease(slot).base_pages.tolist()),
            draft_pages=tuple(self.lease(slot).draft_pages.tolist()),
            published_exact_length=int(self.published_exact[slot]),
            frozen_spec_prefill_length=int(self.frozen[slot]),
            capture_state=CAPTURE_NAMES[int(self.capture[slot])],
            recurrent_slot=self.lease(slot).recurrent_slot,
            partial_slot=self.lease(slot).partial_slot,
        )
