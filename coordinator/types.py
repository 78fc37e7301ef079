"""Value types of the public API. All are frozen; arrays inside are copied and read only."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from attrs import field, frozen

from context_cache.coordinator.arguments import Int32Array, as_index, as_int32, as_tuple, expect
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.identity import BlockKeyExtras, Digest, HashMemo
from context_cache.coordinator.manager import LookupPolicy, ResourceDemand

if TYPE_CHECKING:
    from context_cache.coordinator.handle import RequestHandle

__all__ = [
    "HOLD_COMMITTED_STATE_LENGTH",
    "AdmissionResult",
    "AdmitSequenceResult",
    "BatchAdvance",
    "BeginRequestResult",
    "CommitPolicy",
    "ContextCacheBatchAdmission",
    "ContextCacheCoordinatorStatus",
    "ContextCacheSequenceAdmission",
    "ContextCacheSequenceAdvance",
    "DecodingKvHeadroom",
    "GrowthRefusal",
    "PrepareDecodeResult",
    "RequestView",
    "ResidentRef",
    "SequenceState",
    "Status",
    "TokenStateContract",
    "slot_tuple",
]

HOLD_COMMITTED_STATE_LENGTH: Final = -1
"""``committed_state_length`` of an advance in which nothing happened for the slot."""

_INT32: Final = np.iinfo(np.int32)


class ContextCacheCoordinatorStatus(enum.Enum):
    """Outcome of a call that is no error: a refusal for capacity is a result, not an exception."""

    OK = "ok"
    REQUEST_FAILED = "request_failed"
    POISONED = "poisoned"


Status = ContextCacheCoordinatorStatus


class CommitPolicy(enum.IntEnum):
    """What a sequence publishes at its end."""

    INCLUDING_GENERATED_TOKENS = 0
    PREFILL_STATE_ONLY = 1


class TokenStateContract(enum.IntEnum):
    """Whether the token list ends with one sampled token whose state is not yet written."""

    COMMITTED_PLUS_LOOKAHEAD = 0
    FULLY_COMMITTED = 1


def _index_or_itself(value: Any) -> Any:
    """NumPy integers become ints, so that no later arithmetic wraps; the validator judges everything else."""
    return int(value) if isinstance(value, np.integer) else value


def _whole(minimum: int, maximum: int | None = None) -> Any:
    def check(instance: object, attribute: Any, value: Any) -> None:
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not ok or (maximum is not None and value > maximum):
            limit = f" and at most {maximum}" if maximum is not None else ""
            raise ContractViolation(
                f"{type(instance).__name__}.{attribute.name} must be an integer of at least {minimum}{limit}, "
                f"got {value!r}"
            )

    return check


def _one_of(kind: type, *, optional: bool = False) -> Any:
    def check(instance: object, attribute: Any, value: Any) -> None:
        if not (isinstance(value, kind) or (optional and value is None)):
            expect(value, kind, f"{type(instance).__name__}.{attribute.name}")

    return check


def _enum_of(kind: type[enum.Enum], *, optional: bool = False) -> Any:
    def check(instance: object, attribute: Any, value: Any) -> None:
        if not (isinstance(value, kind) or (optional and value is None)):
            raise ContractViolation(
                f"{type(instance).__name__}.{attribute.name} must be one of {[m.name for m in kind]}, got {value!r}"
            )

    return check


@frozen
class ResidentRef:
    """A resident slot (page-table row) and the epoch of its holder. Valid refs have slot >= 0 and epoch >= 1."""

    slot: int = field(default=-1, converter=_index_or_itself, validator=_whole(-(2**31), 2**31 - 1))
    epoch: int = field(default=0, converter=_index_or_itself, validator=_whole(-(2**62), 2**63 - 1))


@frozen
class DecodingKvHeadroom:
    """How many positions past the committed length the next decode step may write."""

    base_extra_tokens: int = field(converter=_index_or_itself, validator=_whole(-(2**62), 2**62))
    draft_extra_tokens: int = field(default=0, converter=_index_or_itself, validator=_whole(-(2**62), 2**62))


def _token_ids(values: Any) -> Int32Array:
    return as_int32(values, "token_ids")


def _media_tuple(values: Iterable[Digest | None]) -> tuple[Digest | None, ...]:
    return as_tuple(values, "per_position_media_hash")


@frozen(eq=False)
class ContextCacheSequenceAdmission:
    """One sequence to admit.

    token_ids:              list or int32 array of n >= 1 token ids; copied.
    key_extras:             constant over the sequence, generated tokens included.
    per_position_media_hash: empty, or one entry per token: a media digest, or None for a text position.
    resident:               the scheduler's page-table row for this sequence.
    lookup_policy:          overrides the batch's policy.

    The hashes of the prompt are remembered here, so admitting the same object again after a refusal hashes nothing.
    """

    token_ids: Int32Array = field(converter=_token_ids)
    key_extras: BlockKeyExtras = field(factory=BlockKeyExtras, validator=_one_of(BlockKeyExtras))
    per_position_media_hash: tuple[Digest | None, ...] = field(default=(), converter=_media_tuple)
    resident: ResidentRef = field(default=ResidentRef(), validator=_one_of(ResidentRef))
    lookup_policy: LookupPolicy | None = field(default=None, validator=_enum_of(LookupPolicy, optional=True))
    memo: HashMemo = field(init=False, factory=HashMemo, repr=False)

    @property
    def has_media(self) -> bool:
        """Whether any position carries a media digest."""
        return any(digest is not None for digest in self.per_position_media_hash)

    def on(self, resident: ResidentRef) -> ContextCacheSequenceAdmission:
        """The same sequence for another resident slot; the remembered hashes are shared."""
        other = ContextCacheSequenceAdmission(
            self.token_ids, self.key_extras, self.per_position_media_hash, resident, self.lookup_policy
        )
        object.__setattr__(other, "memo", self.memo)
        return other


def _sequences(values: Iterable[ContextCacheSequenceAdmission]) -> tuple[ContextCacheSequenceAdmission, ...]:
    listed: tuple[ContextCacheSequenceAdmission, ...] = as_tuple(values, "sequences")
    for index, sequence in enumerate(listed):
        expect(sequence, ContextCacheSequenceAdmission, f"sequences[{index}]")
    return listed


@frozen(eq=False)
class ContextCacheBatchAdmission:
    """The founders of a request, and the policies of everyone who joins it.

    ``replay_tail_length`` is carried for the runtime; the coordinator does not read it.
    """

    sequences: tuple[ContextCacheSequenceAdmission, ...] = field(converter=_sequences)
    speculative_request: bool = False
    token_state_contract: TokenStateContract = field(
        default=TokenStateContract.COMMITTED_PLUS_LOOKAHEAD, validator=_enum_of(TokenStateContract)
    )
    lookup_policy: LookupPolicy = field(default=LookupPolicy.USE_CACHE, validator=_enum_of(LookupPolicy))
    commit_policy: CommitPolicy = field(
        default=CommitPolicy.INCLUDING_GENERATED_TOKENS, validator=_enum_of(CommitPolicy)
    )
    replay_tail_length: int = field(default=0, converter=_index_or_itself, validator=_whole(0, _INT32.max))


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return as_tuple(values, "accepted_token_ids")


@frozen
class ContextCacheSequenceAdvance:
    """What one completion brought for one slot: tokens and the new committed length, or HOLD and no tokens."""

    accepted_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    committed_state_length: int = HOLD_COMMITTED_STATE_LENGTH

    HOLD_COMMITTED_STATE_LENGTH: ClassVar[int] = HOLD_COMMITTED_STATE_LENGTH


@frozen(eq=False)
class BatchAdvance:
    """The same for a whole batch, as arrays.

    token_ids: int32[k], flat, slot after slot; counts: int32[n]; committed: int32[n], HOLD = -1. n is the number of
    sequences and k the sum of the counts. Shapes and dtypes are checked by the call that takes it.
    """

    token_ids: Int32Array
    counts: Int32Array
    committed: Int32Array

    @classmethod
    def one_token_each(cls, token_ids: Int32Array, committed: Int32Array) -> BatchAdvance:
        """A plain decode step: one new token for each of n sequences."""
        return cls(token_ids, np.ones(token_ids.size, np.int32), committed)


@frozen
class AdmissionResult:
    """request: the caller's right to the request. prefill_starts: reuse length per sequence, in tokens."""

    request: RequestHandle
    prefill_starts: tuple[int, ...]


@frozen
class BeginRequestResult:
    """``insufficient_capacity`` says that the pools were the reason of REQUEST_FAILED."""

    status: Status = Status.REQUEST_FAILED
    admission: AdmissionResult | None = None
    insufficient_capacity: bool = False


@frozen
class AdmitSequenceResult:
    """Outcome of a live admission; ``prefill_start`` is the reuse length in tokens."""

    status: Status = Status.REQUEST_FAILED
    insufficient_capacity: bool = False
    prefill_start: int = 0


@frozen
class GrowthRefusal:
    """Why a decode step could not get its pages.

    failed_slots:   logical slots that do not fit; all others fit together.
    too_long_slots: those of them that would exceed the width of a page-table row.
    missing:        what would have to become free for all slots that are not too long.
    """

    failed_slots: tuple[int, ...]
    too_long_slots: tuple[int, ...]
    missing: ResourceDemand


@frozen
class PrepareDecodeResult:
    """``refusal`` is set exactly when the status is REQUEST_FAILED."""

    status: Status
    refusal: GrowthRefusal | None = None


@frozen(eq=False)
class SequenceState:
    """What the ledger knows of one sequence, copied. Lengths are tokens.

    recurrent_slot, partial_slot: snapshot slots of the hit, while the lease pins them.
    """

    resident: ResidentRef
    state: str
    token_ids: Int32Array
    committed_state_length: int
    common_state_length: int
    reuse_token_length: int
    published_full_block_count: int
    lookup_policy: LookupPolicy
    commit_policy: CommitPolicy
    base_pages: tuple[int, ...]
    draft_pages: tuple[int, ...] = ()
    published_exact_length: int = 0
    frozen_spec_prefill_length: int = 0
    capture_state: str = "none"
    recurrent_slot: int | None = None
    partial_slot: int | None = None

    @property
    def token_count(self) -> int:
        """Number of tokens, the lookahead included."""
        return int(self.token_ids.size)


@frozen
class RequestView:
    """One request, copied; a released one has no sequences left."""

    id: str
    state: str
    phase: str
    residents: tuple[ResidentRef, ...]
    base_pages: tuple[tuple[int, ...], ...]
    unfinalised_slots: tuple[int, ...]


def slot_tuple(values: Any, what: str) -> tuple[int, ...]:
    """Logical slots as plain integers. Raises ContractViolation for anything but a list or array of integers."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ContractViolation(f"{what} must be one dimension of integers, got {values.ndim} of {values.dtype}")
        listed: list[int] = values.tolist()
        return tuple(listed)
    expect(values, list | tuple | range, what)
    return tuple(as_index(value, f"{what}[{index}]") for index, value in enumerate(values))
