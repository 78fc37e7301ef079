"""Equipment of the manager tests: page size 4, letters for block hashes, 16 records where nothing else is said."""

from __future__ import annotations

import pytest

from context_cache.coordinator.manager import (
    AcquireResult,
    AcquireStatus,
    ContextCacheManager,
    Lease,
    LookupPolicy,
    PublicationResult,
    ResourceDemand,
    ResourceId,
    ResourceType,
    ReuseMode,
    ReusePlan,
    SnapshotReservation,
)

PAGE = 4
BASE = ResourceType.BASE_KV_PAGE
DRAFT = ResourceType.DRAFT_KV_PAGE
ROOT = b"chain root".ljust(32)


class Desk:
    """A manager and the shorthand of the scenarios. ``"AB"`` means the hashes of two blocks called A and B."""

    def __init__(self, *capacities: int, max_records: int | None = 16, **options: object) -> None:
        self.manager = ContextCacheManager(
            ResourceDemand(*capacities),
            PAGE,
            max_records=max_records,
            chain_root=ROOT,
            **options,  # type: ignore[arg-type]
        )

    @staticmethod
    def hashes(letters: str) -> list[bytes]:
        # New objects on every call, so that nothing passes by identity alone.
        return [letter.encode() * 32 for letter in letters]

    def plan(self, letters: str, tokens: int | None = None, *, bypass: bool = False) -> ReusePlan:
        policy = LookupPolicy.BYPASS if bypass else LookupPolicy.USE_CACHE
        return self.manager.plan(self.hashes(letters), len(letters) * PAGE if tokens is None else tokens, policy)

    def acquire(self, letters: str, tokens: int | None = None, *, bypass: bool = False) -> AcquireResult:
        return self.manager.acquire(self.plan(letters, tokens, bypass=bypass))

    def lease(self, letters: str, tokens: int | None = None, *, bypass: bool = False) -> Lease:
        result = self.acquire(letters, tokens, bypass=bypass)
        assert result.status is AcquireStatus.ACQUIRED
        assert result.lease is not None
        return result.lease

    def publish(self, lease: Lease, letters: str, resident: int | None = None) -> PublicationResult:
        return self.manager.publish(lease, self.hashes(letters), len(letters) * PAGE if resident is None else resident)

    def cache(self, letters: str) -> PublicationResult:
        """Publish by a sequence of its own that has ended."""
        with self.lease(letters) as lease:
            return self.publish(lease, letters)

    # Speculative sequences ---------------------------------------------------------------------------------------

    def plan_spec(
        self, letters: str, tokens: int, *, future: int = 1, paged: bool = True, bypass: bool = False
    ) -> ReusePlan:
        """EAGLE where nothing else is said."""
        policy = LookupPolicy.BYPASS if bypass else LookupPolicy.USE_CACHE
        return self.manager.plan_spec(
            self.hashes(letters), tokens, policy, owns_paged=paged, future_dependency_tokens=future
        )

    def spec(self, letters: str, tokens: int | None = None, **more: object) -> Lease:
        tokens = len(letters) * PAGE if tokens is None else tokens
        lease = self.manager.acquire(self.plan_spec(letters, tokens, **more)).lease  # type: ignore[arg-type]
        assert lease is not None
        return lease

    def cache_paired(self, letters: str) -> PublicationResult:
        with self.spec(letters) as lease:
            return self.publish(lease, letters)

    # Checkpoints: a prefix of n tokens is the first letters and, within a block, n itself -----------------------------

    def exact(self, letters: str, length: int) -> bytes:
        blocks, tail = divmod(length, PAGE)
        if tail:
            return f"{letters[:blocks]}+{tail}".encode().ljust(32)
        return self.hashes(letters)[blocks - 1] if blocks else ROOT

    def plan_hybrid(
        self, letters: str, tokens: int, *, mtp: bool = False, attention: bool = True, bypass: bool = False
    ) -> ReusePlan:
        policy = LookupPolicy.BYPASS if bypass else LookupPolicy.USE_CACHE
        hashes = self.hashes(letters[: tokens // PAGE])
        if mtp:
            return self.manager.plan_mtp(hashes, tokens, policy, exact_digest=lambda n: self.exact(letters, n))
        return self.manager.plan_checkpoint(
            hashes, tokens, policy, exact_digest=lambda n: self.exact(letters, n), has_attention=attention
        )

    def hybrid(self, letters: str, tokens: int, **more: bool) -> Lease:
        lease = self.manager.acquire(self.plan_hybrid(letters, tokens, **more)).lease
        assert lease is not None
        return lease

    def reserve(self, lease: Lease, needs_partial: bool) -> SnapshotReservation:
        reservation = self.manager.reserve_snapshots(lease, needs_partial)
        assert reservation is not None
        return reservation

    def publish_at(
        self, lease: Lease, letters: str, length: int, reservation: SnapshotReservation | None = None
    ) -> PublicationResult:
        """Publish a checkpoint and, unless the caller reserved, retire the reservation."""
        mtp = lease.mode is ReuseMode.HYBRID_MTP
        publish = self.manager.publish_hybrid_mtp if mtp else self.manager.publish_hybrid
        slots = reservation or self.reserve(lease, mtp or (lease.has_attention and length % PAGE != 0))
        hashes = self.hashes(letters[: (length - mtp) // PAGE])
        result = publish(lease, hashes, self.exact(letters, length), length, slots)
        if reservation is None:
            self.manager.retire_reservation(lease, slots)
        return result

    def cache_at(self, letters: str, length: int, **more: bool) -> PublicationResult:
        """A checkpoint at the end of a cold sequence that has ended."""
        with self.hybrid(letters, length, bypass=True, **more) as lease:
            return self.publish_at(lease, letters, length)

    def lookup(self, letters: str) -> list[int]:
        return self.manager.index.lookup_prefix(self.hashes(letters))

    def path(self, record_id: int) -> list[int]:
        return self.manager.records.get(record_id).base_page_path.tolist()

    def draft_path(self, record_id: int) -> list[int] | None:
        path = self.manager.records.get(record_id).spec_page_path
        return None if path is None else path.tolist()

    def counts(self, type: ResourceType, kind: str) -> dict[int, int]:
        """``kind`` is active or cache; of the resources that have any."""
        listed = self.manager.pools.dump()[type.name][kind]
        return {index: count for index, count in enumerate(listed) if count}

    def free_of(self, type: ResourceType) -> list[int]:
        return self.manager.pools.free_list(type)

    @property
    def lru(self) -> list[int]:
        return self.manager.records.lru_to_mru()

    @property
    def free(self) -> list[int]:
        return self.manager.pools.free_list(BASE)

    @property
    def cache_counts(self) -> dict[int, int]:
        """Of the base pages that are cached at all."""
        counts = {page: self.manager.pools.cache_count(ResourceId(BASE, page)) for page in range(self.capacity)}
        return {page: count for page, count in counts.items() if count}

    @property
    def active_counts(self) -> dict[int, int]:
        counts = {page: self.manager.pools.active_count(ResourceId(BASE, page)) for page in range(self.capacity)}
        return {page: count for page, count in counts.items() if count}

    @property
    def capacity(self) -> int:
        return self.manager.pools.capacity(BASE)


@pytest.fixture
def desk() -> type[Desk]:
    """The class: ``desk(2, max_records=2)`` makes a manager with two base pages."""
    return Desk
