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
    ReusePlan,
)

PAGE = 4
BASE = ResourceType.BASE_KV_PAGE


class Desk:
    """A manager and the shorthand of the scenarios. ``"AB"`` means the hashes of two blocks called A and B."""

    def __init__(self, *capacities: int, max_records: int | None = 16, **options: object) -> None:
        self.manager = ContextCacheManager(
            ResourceDemand(*capacities),
            PAGE,
            max_records=max_records,
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

    def lookup(self, letters: str) -> list[int]:
        return self.manager.index.lookup_prefix(self.hashes(letters))

    def path(self, record_id: int) -> list[int]:
        return self.manager.records.get(record_id).base_page_path.tolist()

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
