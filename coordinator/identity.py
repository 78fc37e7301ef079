"""Which prefixes are the same: keyed, cryptographic, and from a stream that can be read in only one way.

A sequence has one running SHA-256. It starts from the key, consumes block after block, and is copied at the end of
each full block; the copy's digest names the whole prefix up to there. So every token is hashed once in its life, and a
publication hashes only the blocks that are new since the last one.

The stream of a block is ``header, positions``. The header carries the number of tokens, the extras (every optional with
a presence mark, every list and every byte string with its length) and a mark that says how positions are written:
*text only*, then the raw little-endian int32 ids; or *mixed*, then each position with a mark of its own. Since the
header says how long the positions are, the stream of several blocks can be cut in only one way.

The tail of a prefix that ends within a block has a stream of its own kind, marked as such, behind the digest of the
block before it; so no tail equals a block, and hashing one leaves the running hash alone.

Digests are process local: with a random key (the default) nobody outside can aim at a collision, and a digest means
nothing to another process. One coordinator is one trust domain; callers that must not share state, or measure each
other's hits, need an isolation digest each.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NewType, Self

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from context_cache.coordinator.arguments import as_index, as_int32, as_tuple, expect
from context_cache.coordinator.errors import ContractViolation

__all__ = [
    "AdapterKey",
    "BlockHasher",
    "BlockKeyExtras",
    "Digest",
    "HashChain",
    "HashMemo",
    "MediaSpanKey",
]

Digest = NewType("Digest", bytes)
"""Plain bytes, at least 16."""

Media = Sequence["Digest | None"]
Int32Array = npt.NDArray[np.int32]

_DIGEST_BYTES_MIN: Final = 16
_KEY_BYTES_MIN: Final = 16
_BLOCK: Final = b"B"
_TAIL: Final = b"T"
_TEXT_ONLY: Final = b"t"
_MIXED: Final = b"m"
_TOKEN: Final = b"\x00"
_MEDIA: Final = b"\x01"


def _digest(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, bytes) or len(value) < _DIGEST_BYTES_MIN:
        raise ContractViolation(
            f"{type(instance).__name__}.{attribute.name} must be at least {_DIGEST_BYTES_MIN} bytes, got {value!r}; "
            "pass a digest of the content, not a name"
        )


def _optional_digest(instance: object, attribute: Any, value: Any) -> None:
    if value is not None:
        _digest(instance, attribute, value)


def _optional_adapter(instance: object, attribute: Any, value: Any) -> None:
    if value is not None:
        expect(value, AdapterKey, f"{type(instance).__name__}.{attribute.name}")


def _between(low: int, high: int) -> Any:
    def check(instance: object, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ContractViolation(
                f"{type(instance).__name__}.{attribute.name} must be an integer from {low} to {high}, got {value!r}"
            )

    return check


@frozen
class AdapterKey:
    """A LoRA adapter. ``generation`` must change whenever the weights behind ``id`` change."""

    id: Digest = field(validator=_digest)
    generation: int = field(default=0, validator=_between(0, 2**64 - 1))


@frozen
class MediaSpanKey:
    """A media item that touches a block; ``offset_within_block`` is negative when it began in an earlier block."""

    content_digest: Digest = field(validator=_digest)
    placement_digest: Digest = field(validator=_digest)
    offset_within_block: int = field(validator=_between(-(2**63), 2**63 - 1))
    item_order: int = field(validator=_between(-(2**63), 2**63 - 1))
    modality: int = field(validator=_between(0, 255))


def _spans(values: Iterable[MediaSpanKey]) -> tuple[MediaSpanKey, ...]:
    listed: tuple[MediaSpanKey, ...] = as_tuple(values, "BlockKeyExtras.media")
    for index, span in enumerate(listed):
        expect(span, MediaSpanKey, f"BlockKeyExtras.media[{index}]")
    return listed


@frozen
class BlockKeyExtras:
    """Everything beside the tokens that changes the state of a block. All fields are optional.

    isolation_digest: tenant or domain; sequences that differ in it share nothing.
    position_digest: non-standard positions. custom_embedding_digest: inputs given as embeddings.
    """

    media: tuple[MediaSpanKey, ...] = field(default=(), converter=_spans)
    adapter: AdapterKey | None = field(default=None, validator=_optional_adapter)
    position_digest: Digest | None = field(default=None, validator=_optional_digest)
    custom_embedding_digest: Digest | None = field(default=None, validator=_optional_digest)
    isolation_digest: Digest | None = field(default=None, validator=_optional_digest)

    def serialised(self) -> bytes:
        """The extras as bytes that can be read in only one way."""
        parts = [struct.pack("<I", len(self.media))]
        for span in self.media:
            parts += (_bytes(span.content_digest), _bytes(span.placement_digest))
            parts.append(struct.pack("<qqB", span.offset_within_block, span.item_order, span.modality))
        if self.adapter is None:
            parts.append(b"\x00")
        else:
            parts += (b"\x01", _bytes(self.adapter.id), struct.pack("<Q", self.adapter.generation))
        for tag, digest in (
            (b"P", self.position_digest),
            (b"E", self.custom_embedding_digest),
            (b"I", self.isolation_digest),
        ):
            parts.append(tag + (b"\x00" if digest is None else b"\x01" + _bytes(digest)))
        return b"".join(parts)


def _bytes(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


_NO_EXTRAS: Final = BlockKeyExtras()


class HashChain:
    """The digests of one sequence's full blocks, extended as its tokens arrive.

    digests: one per full block, in order; append only. Read it, do not change it.
    root:    what stands before block 0; the same for every chain of one hasher.
    """

    __slots__ = ("_extras", "_hasher", "_keyed", "_page_bytes", "_text_header", "digests", "page_size", "root")

    def __init__(self, keyed: hashlib._Hash, root: Digest, page_size: int, extras: bytes) -> None:
        self.digests: list[Digest] = []
        self.page_size = page_size
        self.root = root
        self._keyed = keyed  # has consumed the key and nothing else; never updated
        self._hasher = keyed.copy()
        self._page_bytes = page_size * 4
        self._extras = extras
        self._text_header = self._header(_TEXT_ONLY)

    @property
    def hashed_tokens(self) -> int:
        """How many leading tokens the digests cover, a multiple of the page size."""
        return len(self.digests) * self.page_size

    def extend_to(self, tokens: Int32Array, media: Media = ()) -> None:
        """Hash the full blocks of ``tokens`` that are not hashed yet.

        tokens: int32[n], the whole sequence, of which the hashed part must not have changed.
        media:  per-position digests of the whole sequence; positions behind its end are text.
        """
        start = self.hashed_tokens
        blocks = tokens.size // self.page_size - len(self.digests)
        if blocks <= 0:
            return
        end = start + blocks * self.page_size
        if len(media) > start and any(digest is not None for digest in media[start:end]):
            for begin in range(start, end, self.page_size):
                self._add_block(tokens, begin, media)
            return
        self._add_text(_raw(tokens[start:end]))

    def extend(self, tokens: Int32Array, media: Media = ()) -> int:
        """Hash the full blocks of ``tokens``, which continue the hashed part; how many tokens were consumed."""
        before = len(self.digests)
        blocks = tokens.size // self.page_size
        for block in range(blocks):
            self._add_block(tokens, block * self.page_size, media)
        return (len(self.digests) - before) * self.page_size

    def exact_digest(self, tokens: Int32Array, length: int, media: Media = ()) -> Digest:
        """Identity of the first ``length`` tokens, whether or not they end with a block. Changes nothing.

        tokens: int32[n], the whole sequence; only the tail behind the last full block of the prefix is read.
        media:  per-position digests of the whole sequence; positions behind its end are text.

        0 tokens: the root. Whole blocks: the digest of the last one. Otherwise a hash of the digest before the tail and
        of the tail. Raises ContractViolation when the length is negative, its full blocks are not hashed yet, or its
        tail is not among ``tokens``.
        """
        blocks, tail = divmod(length, self.page_size)
        if length < 0 or blocks > len(self.digests) or (tail and length > tokens.size):
            raise ContractViolation(
                f"exact digest: {length} tokens are not covered by {len(self.digests)} hashed blocks and {tokens.size} "
                f"tokens; extend the chain first and pass the whole sequence",
                length=length, hashed_tokens=self.hashed_tokens, tokens=int(tokens.size),
            )  # fmt: skip
        parent = self.digests[blocks - 1] if blocks else self.root
        if tail == 0:
            return parent
        start = length - tail
        marks = media[start:length]
        mixed = any(digest is not None for digest in marks)
        header = struct.pack("<II", tail, len(self._extras)) + self._extras + (_MIXED if mixed else _TEXT_ONLY)
        hasher = self._keyed.copy()
        hasher.update(_TAIL + _bytes(parent) + header)
        hasher.update(_marked(tokens[start:length], marks) if mixed else _raw(tokens[start:length]))
        return Digest(hasher.digest())

    def fork(self) -> Self:
        """An independent chain with the same past."""
        other = type(self).__new__(type(self))
        other.digests = self.digests.copy()
        other.page_size, other._page_bytes = self.page_size, self._page_bytes
        other.root, other._keyed = self.root, self._keyed
        other._extras, other._text_header = self._extras, self._text_header
        other._hasher = self._hasher.copy()
        return other

    def add_block(self, tokens: Int32Array, extras: BlockKeyExtras, media: Media = ()) -> Digest:
        """Hash one full block with extras of its own; ``media`` has no or one entry per token of the block."""
        self._extras = extras.serialised()
        self._text_header = self._header(_TEXT_ONLY)
        return self._add_block(tokens, 0, media)

    def _header(self, mark: bytes) -> bytes:
        return _BLOCK + struct.pack("<II", self.page_size, len(self._extras)) + self._extras + mark

    def _add_text(self, raw: memoryview) -> None:
        # One running hash, a copy at each page: nothing before the block is hashed again. Names are bound outside the
        # loop because this is the hottest loop of an admission.
        hasher, header, append, size = self._hasher, self._text_header, self.digests.append, self._page_bytes
        update, copy = hasher.update, hasher.copy
        for begin in range(0, len(raw), size):
            update(header)
            update(raw[begin : begin + size])
            append(copy().digest())  # type: ignore[arg-type]

    def _add_block(self, tokens: Int32Array, begin: int, media: Media) -> Digest:
        end = begin + self.page_size
        marks = media[begin:end]
        if not any(digest is not None for digest in marks):
            self._add_text(_raw(tokens[begin:end]))
            return self.digests[-1]
        self._hasher.update(self._header(_MIXED) + _marked(tokens[begin:end], marks))
        self.digests.append(Digest(self._hasher.copy().digest()))
        return self.digests[-1]


def _marked(tokens: Int32Array, marks: Media) -> bytes:
    """Positions with a mark each: the media digest where there is one, else the token id."""
    parts: list[bytes] = []
    for offset, token in enumerate(tokens.tolist()):
        digest = marks[offset] if offset < len(marks) else None
        parts.append(_TOKEN + struct.pack("<i", token) if digest is None else _MEDIA + _bytes(digest))
    return b"".join(parts)


def _raw(tokens: Int32Array) -> memoryview:
    """The little-endian bytes of token ids, without a copy where the array has them already."""
    return np.ascontiguousarray(tokens, "<i4").data.cast("B")


class BlockHasher:
    """The identity function of one coordinator: SHA-256 keyed with at least 16 bytes, random by default.

    The same key gives the same digests in another process; that is for tests and for replaying, not for sharing.
    """

    __slots__ = ("_keyed", "_root")

    def __init__(self, key: bytes | None = None) -> None:
        if key is None:
            key = secrets.token_bytes(32)
        if not isinstance(key, bytes) or len(key) < _KEY_BYTES_MIN:
            raise ContractViolation(f"identity key must be at least {_KEY_BYTES_MIN} bytes; pass None for a random one")
        # A whole compression block for the key, its length in front: the key cannot run into the stream.
        seed = _bytes(key)
        self._keyed = hashlib.sha256(seed + b"\x00" * (-len(seed) % 64))
        self._root = Digest(self._keyed.digest())

    def chain(self, page_size: int, extras: BlockKeyExtras = _NO_EXTRAS) -> HashChain:
        """An empty chain. Raises ContractViolation for a page size below 1."""
        expect(extras, BlockKeyExtras, "extras")
        if as_index(page_size, "page size") <= 0:
            raise ContractViolation(f"page size must be at least 1 token, got {page_size}", page_size=page_size)
        return HashChain(self._keyed, self._root, page_size, extras.serialised())

    def hash_full_blocks(
        self,
        tokens: Any,
        page_size: int,
        extras: BlockKeyExtras = _NO_EXTRAS,
        *,
        media: Media | None = None,
        block_extras: Sequence[BlockKeyExtras] | None = None,
    ) -> list[Digest]:
        """One digest per complete block, ``len(tokens) // page_size`` of them; the partial tail has no influence.

        tokens:       list or int32 array. media: none, empty, or one entry per token.
        extras:       applied to every block; or ``block_extras``: one value per full block.

        Raises ContractViolation for a page size below 1, missing tokens, a media list of another length, or a number
        of block extras that is not the number of full blocks.
        """
        if tokens is None:
            raise ContractViolation("tokens are missing; pass an empty list for an empty prefix")
        ids = as_int32(tokens, "tokens")
        media = () if media is None else as_tuple(media, "media")
        check_media(media, ids.size)
        chain = self.chain(page_size, extras)
        if block_extras is None:
            chain.extend_to(ids, media)
            return chain.digests
        block_extras = as_tuple(block_extras, "block_extras")
        blocks = ids.size // page_size
        if len(block_extras) != blocks:
            raise ContractViolation(
                f"{len(block_extras)} block extras were given for {blocks} full blocks; pass one per full block",
                given=len(block_extras), blocks=blocks,
            )  # fmt: skip
        for block, own in enumerate(block_extras):
            expect(own, BlockKeyExtras, f"block_extras[{block}]")
            begin = block * page_size
            chain.add_block(ids[begin : begin + page_size], own, media[begin : begin + page_size])
        return chain.digests


def check_media(media: Media, tokens: int) -> None:
    """Raise ContractViolation unless ``media`` is empty or has one digest or None per token."""
    if len(media) == 0:
        return
    if len(media) != tokens:
        raise ContractViolation(
            f"per-position media list has {len(media)} entries for {tokens} tokens; give one per token, None for text",
            entries=len(media), tokens=tokens,
        )  # fmt: skip
    for position, digest in enumerate(media):
        if digest is not None and (not isinstance(digest, bytes) or len(digest) < _DIGEST_BYTES_MIN):
            raise ContractViolation(
                f"media digest at position {position} must be at least {_DIGEST_BYTES_MIN} bytes or None",
                position=position,
            )


@define(eq=False)
class HashMemo:
    """The chain of a prompt, remembered beside it, so that a retried admission hashes nothing again."""

    _hasher: BlockHasher | None = None
    _chain: HashChain | None = None

    def chain(
        self, hasher: BlockHasher, page_size: int, tokens: Int32Array, extras: BlockKeyExtras, media: Media
    ) -> HashChain:
        """The chain over all full blocks of ``tokens``; the caller forks it before extending."""
        chain = self._chain
        if chain is None or self._hasher is not hasher or chain.page_size != page_size:
            chain = hasher.chain(page_size, extras)
            chain.extend_to(tokens, media)
            self._hasher, self._chain = hasher, chain
        return chain
