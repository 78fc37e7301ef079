"""Published endpoints and their recency.

One OrderedDict, LRU first, is both the map by id and the recency order: a touch is one ``move_to_end``, and a walk
from the LRU end needs no copy. The store owns no reference; the manager counts what a record lists.

Keys carry a flavour, so that checkpoints of a different shape over the same prefix do not shadow each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import attrs
import numpy as np
from attrs import field, frozen

from ..errors import ContractViolation, InvariantViolation
from .checkpoints import CheckpointIndex, HybridCheckpointKey
from .pool import Int32Array
from .resources import ResourceId, ResourceType

__all__ = ["CacheRecord", "CacheRecordKey", "CacheRecordStore", "RecordFlavour"]


class RecordFlavour(IntEnum):
    """Shape of a record: the plain rule of kept blocks, or the one that keeps the boundary token private."""

    PLAIN = 0
    MTP = 1


class CacheRecordKey(NamedTuple):
    """Identity of an endpoint. A tuple and not an attrs class, because eviction hashes one key per record and a
    tuple is hashed without running Python code."""

    terminal_hash: bytes
    full_block_count: int
    flavour: RecordFlavour = RecordFlavour.PLAIN


def pack_indices(indices: Iterable[int] | Int32Array | bytes) -> bytes:
    """Indices as the bytes of an int32 array; ContractViolation when they are not a flat list of 32-bit numbers."""
    if isinstance(indices, bytes):
        return indices
    try:
        return np.array(indices, dtype=np.int32).reshape(-1).tobytes()
    except (OverflowError, TypeError, ValueError):
        raise ContractViolation(
            "a record's page path must be a flat list of 32-bit page ids; pass the ids that the pool handed out"
        ) from None


def unpack_indices(packed: bytes) -> Int32Array:
    """The int32 array [n] over the same memory, read-only."""
    return np.frombuffer(packed, dtype=np.int32)


def _hashes(hashes: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(hashes)


def _show(packed: bytes | None) -> str:
    return "None" if packed is None else str(unpack_indices(packed).tolist())


@frozen
class CacheRecord:
    """One published endpoint: everything that a later sequence can start from. ``id`` is assigned by the store.

    Paths name one page per full block; any sequence of ints is accepted. They are kept as the bytes of int32 arrays:
    4 bytes a page without the header of an array, and an eviction joins those of many records in one call.
    ``exact_checkpoint_length`` is in tokens.
    """

    id: int
    key: CacheRecordKey
    logical_block_hashes: tuple[bytes, ...] = field(converter=_hashes)
    packed_base: bytes = field(converter=pack_indices, alias="base_page_path", repr=_show)
    packed_spec: bytes | None = field(
        default=None, converter=attrs.converters.optional(pack_indices), alias="spec_page_path", repr=_show
    )
    recurrent_slot: int | None = None
    partial_slot: int | None = None
    exact_checkpoint_length: int | None = None

    @property
    def base_page_path(self) -> Int32Array:
        """Read-only int32 [full_block_count], or [0] without attention layers."""
        return unpack_indices(self.packed_base)

    @property
    def spec_page_path(self) -> Int32Array | None:
        """Read-only int32, as long as the base path; None without draft state."""
        return None if self.packed_spec is None else unpack_indices(self.packed_spec)

    def packed(self, type: ResourceType) -> bytes:
        """What the record lists of one type, in order, as the bytes of an int32 array."""
        if type == ResourceType.BASE_KV_PAGE:
            return self.packed_base
        if type == ResourceType.DRAFT_KV_PAGE:
            return self.packed_spec or b""
        slot = self.recurrent_slot if type == ResourceType.RECURRENT_SNAPSHOT else self.partial_slot
        return b"" if slot is None else pack_indices((slot,))

    def resources(self) -> tuple[ResourceId, ...]:
        """Base pages, then draft pages, then the recurrent and the partial slot."""
        return tuple(
            ResourceId(type, int(index)) for type in ResourceType for index in unpack_indices(self.packed(type))
        )

    def refuse_invalid(self) -> None:
        """ContractViolation when the parts of the record do not fit together."""
        problem = _problem(self)
        if problem is not None:
            raise ContractViolation(
                f"record {self.key.full_block_count} blocks long is invalid: {problem}; build it from one lease",
                problem=problem, key=tuple(self.key),
            )  # fmt: skip


def _problem(record: CacheRecord) -> str | None:
    key, hashes, base, draft = record.key, record.logical_block_hashes, record.base_page_path, record.spec_page_path
    blocks, length = key.full_block_count, record.exact_checkpoint_length
    if blocks < 0 or blocks != len(hashes):
        return f"the key counts {blocks} blocks and there are {len(hashes)} hashes"
    if length is None:
        if blocks == 0:
            return "only a checkpoint may have no full block"
        if key.terminal_hash is not hashes[-1] and key.terminal_hash != hashes[-1]:
            return "the key does not end in the last hash"
    elif length <= 0:
        return f"a checkpoint length of {length} tokens is not positive"
    elif record.recurrent_slot is None:
        return "a checkpoint needs a recurrent slot"
    # Without attention layers a checkpoint has blocks but no pages.
    if base.size != blocks and (length is None or base.size != 0):
        return f"{base.size} base pages do not cover {blocks} blocks"
    if draft is not None and draft.size != base.size:
        return f"{draft.size} draft pages do not pair with {base.size} base pages"
    if (base.size and base.min() < 0) or (draft is not None and draft.size and draft.min() < 0):
        return "a page id is negative"
    if (record.recurrent_slot or 0) < 0 or (record.partial_slot or 0) < 0:
        return "a snapshot slot is negative"
    return None


class CacheRecordStore:
    """Records by id, by exact key, by checkpoint and by recency. Ids start at 1 and are never used again.

    ``page_size`` (tokens) and ``chain_root`` (what stands before block 0) say which block a checkpoint lies behind.
    """

    __slots__ = ("_by_recency", "_id_of", "_next_id", "checkpoints")

    def __init__(self, page_size: int = 128, chain_root: bytes = b"") -> None:
        self.checkpoints = CheckpointIndex(page_size, chain_root)
        self._by_recency: OrderedDict[int, CacheRecord] = OrderedDict()
        self._id_of: dict[CacheRecordKey, int] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_recency)

    @property
    def next_id(self) -> int:
        """The id that the next inserted record will get. Python integers do not run out."""
        return self._next_id

    def insert(self, record: CacheRecord) -> tuple[int, bool]:
        """(id, inserted). A record with this checkpoint key or this key exists: it moves to the MRU end, nothing is
        replaced. Else the record is added there under a new id; its own ``id`` is ignored. ContractViolation when it is
        invalid."""
        record.refuse_invalid()
        known = self.stored_like(record.key, record.exact_checkpoint_length)
        if known is not None:
            self._by_recency.move_to_end(known.id)
            return known.id, False
        if record.id != self._next_id:
            record = attrs.evolve(record, id=self._next_id)
        self.add(record)
        return record.id, True

    def add(self, record: CacheRecord) -> None:
        """``insert`` of a record that is valid, has ``next_id`` and keys that are not stored: the caller knows."""
        try:
            if record.exact_checkpoint_length is not None:
                self.checkpoints.add(record)
            self._by_recency[record.id] = record
            self._id_of[record.key] = record.id
        except BaseException:
            self.withdraw(record)
            raise
        self._next_id = record.id + 1

    def withdraw(self, record: CacheRecord) -> None:
        """Undo ``add`` of the newest record, also one that did not happen or stopped half way. Cannot fail."""
        self.checkpoints.withdraw(record)
        self._by_recency.pop(record.id, None)
        if self._id_of.get(record.key) == record.id:
            del self._id_of[record.key]
        self._next_id = record.id

    def find(self, key: CacheRecordKey) -> CacheRecord | None:
        """The record of a key. No effect on recency."""
        id = self._id_of.get(key)
        return None if id is None else self._by_recency[id]

    def find_hybrid(
        self, exact_digest: bytes, length: int, flavour: RecordFlavour = RecordFlavour.PLAIN
    ) -> CacheRecord | None:
        """The checkpoint of an exact prefix of ``length`` tokens. No effect on recency."""
        id = self.checkpoints.find(HybridCheckpointKey(exact_digest, length, flavour))
        return None if id is None else self._by_recency[id]

    def checkpoint_lengths(self, block_digest: bytes, flavour: RecordFlavour) -> tuple[int, ...]:
        """The distinct checkpoint lengths in tokens behind a full block (or behind the chain root), longest first."""
        return self.checkpoints.lengths(block_digest, flavour)

    def stored_like(self, key: CacheRecordKey, length: int | None = None) -> CacheRecord | None:
        """The record that an insertion under these keys would refresh: the checkpoint of this length, else the one
        under the exact key. No effect on recency."""
        if length is not None:
            known = self.find_hybrid(key.terminal_hash, length, key.flavour)
            if known is not None:
                return known
        return self.find(key)

    def get(self, id: int) -> CacheRecord:
        """The record of an id. No effect on recency. ContractViolation when it is not stored."""
        try:
            return self._by_recency[id]
        except KeyError:
            raise self._unknown(id) from None

    def contains(self, id: int) -> bool:
        return id in self._by_recency

    def touch(self, id: int) -> None:
        """Move to the MRU end. ContractViolation when the id is not stored."""
        try:
            self._by_recency.move_to_end(id)
        except KeyError:
            raise self._unknown(id) from None

    def set_spec_state(self, id: int, path: Iterable[int] | Int32Array | bytes) -> CacheRecord:
        """Attach draft pages, one per base page, to a record that has none; it moves to the MRU end and keeps its
        identity. ContractViolation: an unknown id, a path that does not fit, or draft state that differs."""
        record = self.get(id)
        packed = pack_indices(path)
        if record.packed_spec is not None and record.packed_spec != packed:
            raise ContractViolation(
                f"record {id} has other draft pages already; draft state is attached once", record_id=id
            )
        paired = attrs.evolve(record, spec_page_path=packed)
        paired.refuse_invalid()
        self._by_recency[id] = paired
        self._by_recency.move_to_end(id)
        return paired

    def erase(self, id: int) -> CacheRecord:
        """Remove all traces. ContractViolation when the id is not stored."""
        record = self.get(id)
        self.erase_many((record,))
        return record

    def erase_many(self, records: Iterable[CacheRecord]) -> None:
        """Remove stored records; the caller has checked that they are. Cannot fail."""
        by_recency, id_of = self._by_recency, self._id_of
        for record in records:
            if record.exact_checkpoint_length is not None:
                self.checkpoints.withdraw(record)
            del by_recency[record.id]
            del id_of[record.key]

    def oldest(self) -> CacheRecord:
        """The record at the LRU end. The store must not be empty."""
        return next(iter(self._by_recency.values()))

    def iterate_lru(self) -> Iterator[CacheRecord]:
        """Records from LRU to MRU, lazily and without a copy; not across a change of the store."""
        return iter(self._by_recency.values())

    def lru_to_mru(self) -> list[int]:
        return list(self._by_recency)

    def check(self) -> None:
        """InvariantViolation when the maps disagree."""
        by_key = {record.key: id for id, record in self._by_recency.items()}
        wrong_ids = [id for id, record in self._by_recency.items() if record.id != id or id >= self._next_id]
        if by_key != self._id_of or len(by_key) != len(self._by_recency) or wrong_ids:
            raise InvariantViolation(
                "the maps of the record store disagree; the metadata is corrupt, stop using this manager",
                by_key=by_key, id_of=dict(self._id_of), wrong_ids=wrong_ids,
            )  # fmt: skip
        self.checkpoints.check(self._by_recency.values())

    def dump(self) -> list[dict[str, Any]]:
        """Every record as plain values, LRU first."""
        return [
            {
                "id": record.id,
                "key": tuple(record.key),
                "hashes": record.logical_block_hashes,
                "base": record.base_page_path.tolist(),
                "draft": None if record.spec_page_path is None else record.spec_page_path.tolist(),
                "recurrent": record.recurrent_slot,
                "partial": record.partial_slot,
                "length": record.exact_checkpoint_length,
            }
            for record in self._by_recency.values()
        ]

    @staticmethod
    def _unknown(id: int) -> ContractViolation:
        return ContractViolation(
            f"record {id} is not stored, it may have been evicted; look it up by its key first", record_id=id
        )
