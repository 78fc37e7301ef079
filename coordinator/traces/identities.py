"""Prefixes by ordinal: what was asked of the block hashes, and the same answers given again.

A digest means nothing to another process, so a trace names each prefix by the ordinal of its first appearance. A
redacted trace has no tokens; replaying it, a :class:`ScriptedHasher` gives the recorded answers, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from context_cache.coordinator.identity import BlockHasher, BlockKeyExtras, Digest, HashChain, Int32Array, Media
from context_cache.coordinator.traces.format import Identity

__all__ = ["IdentityBook", "NotAsked", "ScriptedHasher", "WatchedHasher"]


_NO_EXTRAS: Final = BlockKeyExtras()


class NotAsked(Exception):
    """The code asks for an identity that the recorded code did not ask for."""


class IdentityBook:
    """Ordinals of digests, and the answers of the call in progress.

    before: told of the number of the answer that is about to be given; may raise instead.
    """

    __slots__ = ("_closed", "_ordinals", "answers", "before")

    def __init__(self) -> None:
        self._ordinals: dict[bytes, int] = {}
        self._closed = False
        self.answers: list[Identity] = []
        self.before: Callable[[int], None] | None = None

    def ask(self) -> None:
        """An answer is about to be worked out."""
        if self.before is not None:
            self.before(len(self.answers))

    def take(self) -> list[Identity]:
        """The answers since the last time."""
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        """Forget everything, and keep nothing more."""
        self._closed = True
        self._ordinals.clear()
        self.answers.clear()
        self.before = None

    def prompt(self, digests: Sequence[Digest]) -> None:
        if not self._closed:
            self.answers.append(Identity(prompt=self._names(digests)))

    def more(self, digests: Sequence[Digest]) -> None:
        if not self._closed:
            self.answers.append(Identity(more=self._names(digests)))

    def exact(self, length: int, digest: Digest) -> None:
        if not self._closed:
            self.answers.append(Identity(exact=(length, self._names((digest,))[0])))

    def _names(self, digests: Sequence[Digest]) -> list[int]:
        ordinals = self._ordinals
        return [ordinals.setdefault(digest, len(ordinals)) for digest in digests]


class _WatchedChain(HashChain):
    """Tells the book what it answers, once it belongs to a sequence; the chain of a prompt's memo is not asked yet."""

    __slots__ = ("_book", "_script", "_seated")

    _book: IdentityBook
    _script: Iterator[Identity] | None
    _seated: bool

    @classmethod
    def over(cls, chain: HashChain, book: IdentityBook, script: Iterator[Identity] | None) -> _WatchedChain:
        watched = cls.__new__(cls)
        for name in HashChain.__slots__:
            setattr(watched, name, getattr(chain, name))
        watched._book, watched._script, watched._seated = book, script, False
        return watched

    def fork(self) -> _WatchedChain:
        other = super().fork()
        other._book, other._script, other._seated = self._book, self._script, True
        if self._script is not None:
            other.digests = [_digest(name) for name in _next(self._script, "prompt").prompt or ()]
        self._book.prompt(other.digests)
        return other

    def extend_to(self, tokens: Int32Array, media: Media = ()) -> None:
        before = len(self.digests)
        if self._seated and tokens.size // self.page_size > before:
            self._book.ask()
        if self._script is None:
            super().extend_to(tokens, media)
        elif self._seated and tokens.size // self.page_size > before:
            self.digests += [_digest(name) for name in _next(self._script, "more").more or ()]
        if self._seated and len(self.digests) > before:
            self._book.more(self.digests[before:])

    def exact_digest(self, tokens: Int32Array, length: int, media: Media = ()) -> Digest:
        self._book.ask()
        if self._script is None:
            digest = super().exact_digest(tokens, length, media)
        else:
            asked, name = _next(self._script, "exact").exact or (0, 0)
            if asked != length:
                raise NotAsked(f"the identity of {length} tokens, where the recorded code asked for {asked}")
            digest = _digest(name)
        self._book.exact(length, digest)
        return digest


class WatchedHasher(BlockHasher):
    """The hasher of a coordinator that is recorded."""

    __slots__ = ("_book", "_script")

    def __init__(self, hasher: BlockHasher, book: IdentityBook, script: Iterator[Identity] | None = None) -> None:
        self._keyed, self._root = hasher._keyed, hasher._root
        self._book, self._script = book, script

    def chain(self, page_size: int, extras: BlockKeyExtras = _NO_EXTRAS) -> HashChain:
        return _WatchedChain.over(super().chain(page_size, extras), self._book, self._script)


class ScriptedHasher(WatchedHasher):
    """The identity stub of a redacted trace: ``script`` yields the recorded answers, across calls."""

    __slots__ = ()

    def __init__(self, book: IdentityBook, script: Iterator[Identity]) -> None:
        super().__init__(BlockHasher(), book, script)


def _next(script: Iterator[Identity], kind: str) -> Identity:
    answer = next(script, None)
    if answer is None or getattr(answer, kind) is None:
        raise NotAsked(f"the identity of a prefix ({kind}), which the recorded code did not ask for")
    return answer


def _digest(name: int) -> Digest:
    return Digest(b"ordinal " + name.to_bytes(24, "little"))
