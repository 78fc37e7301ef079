"""Where the draft pages of a prefix are: block boundary -> records whose draft path covers it, oldest first.

Draft pages are never made canonical one by one: what a draft model computed for a block depends on more than the block,
so a match names one record, and that record's whole path is used up to the boundary.

An entry is keyed by hash *and* block count, so that a hash that occurs twice in a path stays two boundaries. The ids
behind a key are a dictionary and not a list: its last key is the newest record, and the oldest of very many is removed
without moving the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import ContractViolation, InvariantViolation
from .records import CacheRecord

__all__ = ["SpecStateIndex"]

_Boundary = tuple[bytes, int]


class SpecStateIndex:
    """One entry per boundary of each record with draft pages. It owns no page and no reference."""

    __slots__ = ("_records_at",)

    def __init__(self) -> None:
        self._records_at: dict[_Boundary, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of boundaries that can be found, records counted apart."""
        return len(self._records_at)

    def insert(self, record: CacheRecord) -> None:
        """Index every boundary of the record, or none. An empty draft path has no boundary.

        ContractViolation: no id, no draft path or one of another length than the key counts, or a record that is
        indexed already.
        """
        boundaries = _boundaries(record)
        path = record.packed_spec
        if record.id < 1 or path is None or len(path) != 4 * len(boundaries) or len(boundaries) != _blocks(record):
            raise ContractViolation(
                f"the draft index cannot take record {record.id}: it needs an id and one draft page for each of its "
                f"{_blocks(record)} blocks; index records after they were stored",
                record_id=record.id, blocks=_blocks(record),
            )  # fmt: skip
        records_at = self._records_at
        if any(record.id in records_at.get(boundary, ()) for boundary in boundaries):
            raise ContractViolation(
                f"the draft index knows record {record.id} already; index a record once", record_id=record.id
            )
        try:
            for boundary in boundaries:
                known = records_at.get(boundary)
                if known is None:
                    records_at[boundary] = {record.id: None}
                else:
                    known[record.id] = None
        except BaseException:
            self.withdraw(record)
            raise

    def lookup_longest(self, hashes: Sequence[bytes], max_blocks: int) -> tuple[int, int] | None:
        """(record id, block count) of the longest boundary of at most ``max_blocks`` blocks, from the newest record
        that has it. None without one. ContractViolation when ``max_blocks`` is negative or beyond the hashes."""
        if not 0 <= max_blocks <= len(hashes):
            raise ContractViolation(
                f"draft lookup of {max_blocks} blocks in {len(hashes)} hashes; ask for at most one block per hash",
                max_blocks=max_blocks, hashes=len(hashes),
            )  # fmt: skip
        find = self._records_at.get
        if self._records_at:
            for count in range(max_blocks, 0, -1):
                records = find((hashes[count - 1], count))
                if records is not None:
                    return next(reversed(records)), count
        return None

    def erase(self, record: CacheRecord) -> None:
        """Remove exactly the record's entries. Nothing without draft state. InvariantViolation, and nothing changed,
        when one of them is missing."""
        self.check_listed((record,))
        self.withdraw(record)

    def check_listed(self, records: Iterable[CacheRecord]) -> None:
        """InvariantViolation unless every boundary of these records is indexed."""
        find = self._records_at.get
        for record in records:
            if record.packed_spec and not all(record.id in find(key, ()) for key in _boundaries(record)):
                raise InvariantViolation(
                    f"record {record.id} has draft pages and is missing in the draft index; the metadata is corrupt, "
                    f"stop using this manager",
                    record_id=record.id,
                )

    def withdraw(self, record: CacheRecord) -> None:
        """Remove whatever entries the record has. Cannot fail."""
        if not record.packed_spec:
            return
        records_at = self._records_at
        for boundary in _boundaries(record):
            records = records_at.get(boundary)
            if records is not None:
                records.pop(record.id, None)
                if not records:
                    del records_at[boundary]

    def check(self, records: Iterable[CacheRecord]) -> None:
        """InvariantViolation when the entries are not exactly the boundaries of ``records`` with draft state."""
        expected = {
            (boundary, record.id) for record in records if record.packed_spec for boundary in _boundaries(record)
        }
        found = {(boundary, id) for boundary, ids in self._records_at.items() for id in ids}
        if found != expected or not all(self._records_at.values()):
            raise InvariantViolation(
                "the draft index is not what the records say; the metadata is corrupt, stop using this manager",
                missing=sorted(expected - found), unexpected=sorted(found - expected),
            )  # fmt: skip

    def dump(self) -> dict[_Boundary, list[int]]:
        """(hash, block count) -> record ids, oldest first."""
        return {boundary: list(ids) for boundary, ids in self._records_at.items()}


def _blocks(record: CacheRecord) -> int:
    return record.key.full_block_count


def _boundaries(record: CacheRecord) -> list[_Boundary]:
    hashes = record.logical_block_hashes
    return list(zip(hashes, range(1, len(hashes) + 1), strict=True))
