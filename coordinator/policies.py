"""How a request publishes: five small policies over the ledger and the manager.

The policy is chosen once, when the request begins, from the deployment and from whether the request is speculative. It
says what is looked up, what a completion may claim, and which endpoints are offered when. It keeps no state.

base-endpoint    full blocks of the committed prefix; attention-only models.
hybrid-snapshot  checkpoints of exact length; a copy of the recurrent state, and of the partly filled page.
hybrid-mtp       checkpoints at a boundary that the runtime names, with draft page and hidden row.
eagle-spec       full blocks of the prefix that base and draft have in common, after a verification has proven it.
shared-kv-spec   the same without draft pages; common lengths follow from committed ones.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from context_cache.coordinator.arguments import Int32Array, as_int32
from context_cache.coordinator.core import Core, Request
from context_cache.coordinator.deployment import ContextCacheDeploymentProfile
from context_cache.coordinator.errors import ContractViolation, InvariantViolation
from context_cache.coordinator.identity import HashChain
from context_cache.coordinator.manager import LookupPolicy, ReuseMode, ReusePlan
from context_cache.coordinator.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    TokenStateContract,
)

__all__ = [
    "BASE_ENDPOINT",
    "EAGLE_SPEC",
    "HYBRID_MTP",
    "HYBRID_SNAPSHOT",
    "SHARED_KV_SPEC",
    "PublicationPolicy",
    "select_policy",
]


class PublicationPolicy:
    """What the five have in common.

    one_token: a completion brings exactly one token per sequence; else one or more.
    frozen:    the prompt's endpoint waits for the first verification (and common lengths are kept).
    captures:  checkpoints are captured by ``enqueue_prefill_captures`` and at the end of decoding.
    mtp:       endpoints are published by ``publish_hybrid_mtp_endpoint``.
    """

    name: ClassVar[str]
    one_token: ClassVar[bool] = True
    frozen: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    mtp: ClassVar[bool] = False

    def plan(
        self, core: Core, sequence: ContextCacheSequenceAdmission, chain: HashChain, lookup: LookupPolicy
    ) -> ReusePlan:
        """Look the sequence up. Changes nothing."""
        raise AssertionError(f"{self.name} does not say what it looks up")

    def prefill_common(self, common: object, committed: Int32Array) -> Int32Array | None:
        """Check the common lengths given with a finished prefill; None: the policy keeps none."""
        _refuse_common(common)
        return None

    def step_common(
        self, core: Core, request: Request, common: object, committed: Int32Array, moves: np.ndarray
    ) -> Int32Array | None:
        """Check those given with a step, int32[n]. committed: the new lengths, old ones where a slot holds."""
        _refuse_common(common)
        return None

    def publish_prefill(self, core: Core, request: Request, resident: int) -> None:
        """Offer the endpoint of a finished prefill."""

    def publish_decode(self, core: Core, request: Request, resident: int) -> None:
        """Offer the endpoint of a sequence that ended normally."""


class BaseEndpointPolicy(PublicationPolicy):
    name = "base-endpoint"

    def plan(
        self, core: Core, sequence: ContextCacheSequenceAdmission, chain: HashChain, lookup: LookupPolicy
    ) -> ReusePlan:
        return core.manager.plan(chain.digests, sequence.token_ids.size, lookup)

    def publish_prefill(self, core: Core, request: Request, resident: int) -> None:
        _publish_blocks(core, resident, int(core.ledger.committed[resident]), decode_end=False)

    def publish_decode(self, core: Core, request: Request, resident: int) -> None:
        _publish_blocks(core, resident, int(core.ledger.committed[resident]), decode_end=True)


class HybridSnapshotPolicy(PublicationPolicy):
    name = "hybrid-snapshot"
    captures = True

    def plan(
        self, core: Core, sequence: ContextCacheSequenceAdmission, chain: HashChain, lookup: LookupPolicy
    ) -> ReusePlan:
        return core.manager.plan_checkpoint(
            chain.digests,
            sequence.token_ids.size,
            lookup,
            exact_digest=lambda length: chain.exact_digest(
                sequence.token_ids, length, sequence.per_position_media_hash
            ),
            has_attention=core.profile.has_attention,
        )

    def publish_prefill(self, core: Core, request: Request, resident: int) -> None:
        publish_staged(core, resident)

    def publish_decode(self, core: Core, request: Request, resident: int) -> None:
        publish_staged(core, resident)


class HybridMtpPolicy(PublicationPolicy):
    name = "hybrid-mtp"
    one_token = False
    mtp = True

    def plan(
        self, core: Core, sequence: ContextCacheSequenceAdmission, chain: HashChain, lookup: LookupPolicy
    ) -> ReusePlan:
        return core.manager.plan_mtp(
            chain.digests,
            sequence.token_ids.size,
            lookup,
            exact_digest=lambda length: chain.exact_digest(
                sequence.token_ids, length, sequence.per_position_media_hash
            ),
        )


class EagleSpecPolicy(PublicationPolicy):
    name = "eagle-spec"
    one_token = False
    frozen = True

    def plan(
        self, core: Core, sequence: ContextCacheSequenceAdmission, chain: HashChain, lookup: LookupPolicy
    ) -> ReusePlan:
        contract = core.profile.spec_contract
        assert contract is not None, "speculative policies belong to speculative deployments"
        return core.manager.plan_spec(
            chain.digests,
            sequence.token_ids.size,
            lookup,
            owns_paged=contract.owns_paged_spec_state,
            future_dependency_tokens=contract.future_dependency_tokens,
        )

    def prefill_common(self, common: object, committed: Int32Array) -> Int32Array | None:
        given = self._given(common, committed)
        wrong = (given != committed).nonzero()[0]
        if wrong.size:
            slot = int(wrong[0])
            raise ContractViolation(
                f"slot {slot} ends its prefill with common length {int(given[slot])} and committed length "
                f"{int(committed[slot])}; they must be equal",
                slot=slot,
            )
        return given

    def step_common(
        self, core: Core, request: Request, common: object, committed: Int32Array, moves: np.ndarray
    ) -> Int32Array | None:
        old = core.ledger.common[request.order]
        given = self._given(common, committed)
        # A slot that holds keeps its common length, whether that or the hold mark was given.
        held = ~moves
        odd = held & (given != old) & (given != HOLD_COMMITTED_STATE_LENGTH)
        wrong = (odd | (moves & ((given < old) | (given > committed)))).nonzero()[0]
        if wrong.size:
            slot = int(wrong[0])
            raise ContractViolation(
                f"slot {slot} has common length {int(given[slot])} after {int(old[slot])}, with {int(committed[slot])} "
                "committed; it never goes back and never passes the committed length",
                slot=slot,
            )
        return np.where(held, old, given).astype(np.int32)

    def publish_prefill(self, core: Core, request: Request, resident: int) -> None:
        """The frozen endpoint, once a verification has ended (or at the end of the request)."""
        ledger = core.ledger
        length = min(int(ledger.frozen[resident]), int(ledger.common[resident]))
        self._publish(core, resident, length, decode_end=False)

    def publish_decode(self, core: Core, request: Request, resident: int) -> None:
        self._publish(core, resident, int(core.ledger.common[resident]), decode_end=True)

    def _publish(self, core: Core, resident: int, length: int, *, decode_end: bool) -> None:
        ledger = core.ledger
        if length > int(ledger.committed[resident]):
            raise InvariantViolation(f"resident slot {resident}: common length {length} passes the committed length")
        if _has_news(core, resident, length, decode_end=decode_end):
            core.counters.spec_pair_publications += 1
            _publish_blocks(core, resident, length, decode_end=decode_end)

    def _given(self, common: object, committed: Int32Array) -> Int32Array:
        if common is None:
            raise ContractViolation(f"a {self.name} request needs one common state length per sequence; give them")
        lengths = as_int32(common, "common_state_lengths")
        if lengths.size != committed.size:
            raise ContractViolation(
                f"{lengths.size} common state lengths were given for {committed.size} sequences; give one per slot"
            )
        return lengths


class SharedKvSpecPolicy(EagleSpecPolicy):
    name = "shared-kv-spec"

    def prefill_common(self, common: object, committed: Int32Array) -> Int32Array | None:
        # The draft reads the base's state, so what is committed is common.
        return committed if _is_absent(common) else super().prefill_common(common, committed)

    def step_common(
        self, core: Core, request: Request, common: object, committed: Int32Array, moves: np.ndarray
    ) -> Int32Array | None:
        if not _is_absent(common):
            return super().step_common(core, request, common, committed, moves)
        return np.where(moves, committed, core.ledger.common[request.order]).astype(np.int32)


def _is_absent(common: object) -> bool:
    return common is None or (isinstance(common, list | tuple | np.ndarray) and np.size(common) == 0)


BASE_ENDPOINT: Final = BaseEndpointPolicy()
HYBRID_SNAPSHOT: Final = HybridSnapshotPolicy()
HYBRID_MTP: Final = HybridMtpPolicy()
EAGLE_SPEC: Final = EagleSpecPolicy()
SHARED_KV_SPEC: Final = SharedKvSpecPolicy()


def select_policy(
    profile: ContextCacheDeploymentProfile, admission: ContextCacheBatchAdmission
) -> tuple[PublicationPolicy, bool]:
    """The policy of a request and whether it is paired. Raises ContractViolation for what the deployment cannot do."""
    if admission.speculative_request and not profile.speculative:
        raise ContractViolation("a speculative request needs a speculative deployment; this one is not")
    paired = admission.speculative_request and profile.paged_spec
    policy: PublicationPolicy
    if not admission.speculative_request:
        policy = HYBRID_SNAPSHOT if profile.uses_checkpoints else BASE_ENDPOINT
    elif profile.has_recurrent:
        policy = HYBRID_MTP
    else:
        policy = EAGLE_SPEC if profile.paged_spec else SHARED_KV_SPEC
    fully = admission.token_state_contract is TokenStateContract.FULLY_COMMITTED
    if fully and policy is not BASE_ENDPOINT:
        raise ContractViolation(
            f"a {policy.name} request keeps one lookahead token; fully committed token lists need a plain request on "
            "an attention-only deployment"
        )
    return policy, paired


def _has_news(core: Core, resident: int, length: int, *, decode_end: bool) -> bool:
    """Whether the first ``length`` tokens have a full block that may be offered and was not yet."""
    ledger = core.ledger
    if ledger.bypass[resident] or (decode_end and ledger.prefill_only[resident]):
        return False
    return length // core.page_size > int(ledger.published_blocks[resident])


def _publish_blocks(core: Core, resident: int, length: int, *, decode_end: bool) -> None:
    """Publish the full blocks of the first ``length`` tokens, if there is something new to offer."""
    if not _has_news(core, resident, length, decode_end=decode_end):
        return
    ledger, blocks = core.ledger, length // core.page_size
    chain = ledger.chain(resident)
    # The lookahead is listed but not committed, so it is not part of any hash.
    chain.extend_to(ledger.tokens[resident, :length], ledger.media[resident])
    hashes = chain.digests if len(chain.digests) == blocks else chain.digests[:blocks]
    result = core.manager.publish(ledger.lease(resident), hashes, length)
    core.counters.published(result.status)
    ledger.published_blocks[resident] = result.block_count


def publish_staged(core: Core, resident: int) -> None:
    """Publish the checkpoint whose state was captured; nothing if none is staged."""
    ledger = core.ledger
    staged = ledger.staged[resident]
    if staged is None:
        return
    lease, chain = ledger.lease(resident), ledger.chain(resident)
    mtp = lease.mode is ReuseMode.HYBRID_MTP
    blocks = (staged.length - 1 if mtp else staged.length) // core.page_size
    publish = core.manager.publish_hybrid_mtp if mtp else core.manager.publish_hybrid
    result = publish(lease, chain.digests[:blocks], staged.digest, staged.length, staged.reservation)
    core.counters.published(result.status)
    ledger.published_exact[resident] = staged.length
    ledger.published_blocks[resident] = blocks


def _refuse_common(lengths: object) -> None:
    """Common lengths belong to speculative requests; raise ContractViolation if any were given."""
    if lengths is None:
        return
    if not isinstance(lengths, list | tuple | np.ndarray) or np.ndim(lengths) != 1:
        raise ContractViolation(f"common_state_lengths must be a list or array, got {type(lengths).__name__}")
    if len(lengths):
        raise ContractViolation(
            f"{len(lengths)} common state lengths were given for a request that keeps none; leave them out"
        )
