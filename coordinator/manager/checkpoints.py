"""How checkpoints are found: by exact prefix, and by the full block that they lie behind.

A sequence that looks for a checkpoint knows the chain of its own full blocks. The second map names the few lengths that
are stored behind each of these blocks (at most one page further), so that only their tails are hashed and tried, and
no record is scanned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvariantViolation

if TYPE_CHECKING:
    from .records import CacheRecord, RecordFlavour

__all__ = ["CheckpointIndex", "HybridCheckpointKey"]


class HybridCheckpointKey(NamedTuple):
    """Identity of a checkpoint: its exact prefix of ``exact_length`` tokens and its shape. A tuple for the same reason
    as ``CacheRecordKey``."""

    exact_prefix_digest: bytes
    exact_length: int
    flavour: RecordFlavour


_LengthsOf = dict["RecordFlavour", dict[int, int]]  # flavour -> length -> how many checkpoints


class CheckpointIndex:
    """Both maps over the stored checkpoints. ``page_size`` is in tokens, ``chain_root`` stands before block 0."""

    __slots__ = ("_behind", "_id_of", "_page_size", "behind", "chain_root")

    def __init__(self, page_size: int, chain_root: bytes) -> None:
        self._page_size = page_size
        self.chain_root = chain_root
        self._id_of: dict[HybridCheckpointKey, int] = {}
        self._behind: dict[bytes, _LengthsOf] = {}
        # The bound method of the dict itself: a walk down a chain calls it once per block.
        self.behind: Callable[[bytes], _LengthsOf | None] = self._behind.get

    def key_of(self, record: CacheRecord) -> HybridCheckpointKey | None:
        """The key of a checkpoint, None for any other record."""
        length = record.exact_checkpoint_length
        return None if length is None else HybridCheckpointKey(record.key.terminal_hash, length, record.key.flavour)

    def find(self, key: HybridCheckpointKey) -> int | None:
        return self._id_of.get(key)

    def lengths(self, block_digest: bytes, flavour: RecordFlavour) -> tuple[int, ...]:
        """The distinct lengths in tokens that are stored behind a block, longest first."""
        known = self._behind.get(block_digest)
        return () if known is None else tuple(sorted(known.get(flavour, ()), reverse=True))

    def add(self, record: CacheRecord) -> None:
        """Index a checkpoint whose key is not known: the caller has checked."""
        key = self.key_of(record)
        assert key is not None
        block = self._block(record, key)
        flavours = self._behind.get(block, {})
        counts = flavours.get(key.flavour, {})
        more = {**flavours, key.flavour: {**counts, key.exact_length: counts.get(key.exact_length, 0) + 1}}
        self._id_of[key] = record.id
        try:
            self._behind[block] = more
        except BaseException:
            del self._id_of[key]
            raise

    def withdraw(self, record: CacheRecord) -> None:
        """Remove a checkpoint that is indexed; nothing for any other record. Cannot fail."""
        key = self.key_of(record)
        if key is None or self._id_of.get(key) != record.id:
            return
        del self._id_of[key]
        block = self._block(record, key)
        flavours = self._behind[block]
        counts = flavours[key.flavour]
        if counts[key.exact_length] > 1:
            counts[key.exact_length] -= 1
            return
        del counts[key.exact_length]
        if not counts:
            del flavours[key.flavour]
            if not flavours:
                del self._behind[block]

    def _block(self, record: CacheRecord, key: HybridCheckpointKey) -> bytes:
        """The digest of block number ``length // page size``; the root without one. An MTP record keeps one block less
        at an aligned length, and there the exact digest is the block's."""
        hashes = record.logical_block_hashes
        if key.exact_length >= self._page_size * (len(hashes) + 1):
            return key.exact_prefix_digest
        return hashes[-1] if hashes else self.chain_root

    def check(self, records: Iterable[CacheRecord]) -> None:
        """InvariantViolation when the maps are not exactly what ``records`` say."""
        expected = CheckpointIndex(self._page_size, self.chain_root)
        for record in records:
            if record.exact_checkpoint_length is not None:
                expected.add(record)
        if expected._id_of != self._id_of or expected._behind != self._behind:
            raise InvariantViolation(
                "the checkpoint index is not what the records say; the metadata is corrupt, stop using this manager",
                expected=expected.dump(), found=self.dump(),
            )  # fmt: skip

    def dump(self) -> dict[str, Any]:
        return {
            "ids": {tuple(key): id for key, id in self._id_of.items()},
            "lengths": {
                block: {flavour.name: dict(counts) for flavour, counts in flavours.items()}
                for block, flavours in self._behind.items()
            },
        }
