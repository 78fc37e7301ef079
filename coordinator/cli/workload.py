"""Workload files: what is to be run, read and validated as a whole before anything runs.

A workload is a JSON Lines file, one request a line, in one of two formats:

* own: ``token_ids`` or ``text`` (its UTF-8 bytes are the tokens), ``max_new_tokens``, and optionally ``lookup_policy``
  (``use_cache`` or ``bypass``), ``commit_policy`` (``including_generated_tokens`` or ``prefill_state_only``),
  ``tenant`` and ``arrival`` (seconds);
* the public Mooncake trace format: ``timestamp`` (milliseconds), ``input_length``, ``output_length``, ``hash_ids``. A
  hash id names a whole prefix up to and including its block of 512 tokens; id h stands for the tokens
  h*512 ... h*512+511.

Rule 1: nothing that a file can hold ends in a traceback. Every fault is a ``WorkloadError`` that names file, line and a
way out. Rule 2: memory is bounded by the file, not by the prompts that it describes: a trace of 12,000 requests holds
hundreds of millions of tokens, so hash ids are expanded when a request is taken, and forgotten after.

Arrival times are validated and otherwise ignored: requests are taken in file order as fast as they fit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal, TypeAlias

import msgspec
import numpy as np
from attrs import evolve, field, frozen
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

__all__ = [
    "BLOCK_TOKENS",
    "LINE_BYTES_MAX",
    "CommitPolicyName",
    "LookupPolicyName",
    "Workload",
    "WorkloadError",
    "WorkloadRequest",
    "read_workload",
]

LookupPolicyName: TypeAlias = Literal["use_cache", "bypass"]
CommitPolicyName: TypeAlias = Literal["including_generated_tokens", "prefill_state_only"]

BLOCK_TOKENS: Final = 512
"""Tokens of one block of the Mooncake format; a page may have another size."""

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A longer line is refused without being read to its end: it is most likely a file that is not JSON Lines."""

_INT32_MAX: Final = 2**31 - 1

_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
# The largest id whose last token, id * 512 + 511, is still an int32.
_HashId: TypeAlias = Annotated[int, Meta(ge=0, le=(_INT32_MAX - (BLOCK_TOKENS - 1)) // BLOCK_TOKENS)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
_Time: TypeAlias = Annotated[float, Meta(ge=0)]


class _OwnLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    max_new_tokens: _Length
    token_ids: Annotated[list[_TokenId], Meta(min_length=1)] | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    lookup_policy: LookupPolicyName | None = None
    commit_policy: CommitPolicyName | None = None
    tenant: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    arrival: _Time | None = None


class _MooncakeLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: Annotated[list[_HashId], Meta(min_length=1)]


class WorkloadError(Exception):
    """A workload that cannot be used. Nothing of it ran.

    Attributes: ``source`` (the file as the caller named it), ``line`` (from 1; None if the file as a whole is meant),
    ``problem`` (what is wrong and what to do, without a full stop).
    """

    def __init__(self, source: str, line: int | None, problem: str) -> None:
        super().__init__(source, line, problem)
        self.source, self.line, self.problem = source, line, problem

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{where}: {self.problem}"


@frozen(eq=False)
class WorkloadRequest:
    """One validated request.

    ``line`` is its line in the file (from 1); ``prompt_length`` and ``max_new_tokens`` are in tokens, at least 1.
    """

    line: int
    prompt_length: int
    max_new_tokens: int
    _encoded: NDArray[np.uint8] | NDArray[np.int32] = field(repr=False)
    _is_blocks: bool = field(default=False, repr=False)
    lookup_policy: LookupPolicyName | None = None
    commit_policy: CommitPolicyName | None = None
    tenant: str | None = None

    def prompt(self) -> NDArray[np.int32]:
        """The prompt's token ids, int32[prompt_length]. Made anew by each call: the caller owns the array."""
        if not self._is_blocks:
            return self._encoded.astype(np.int32)
        tokens = np.empty((len(self._encoded), BLOCK_TOKENS), dtype=np.int32)
        tokens[:] = np.arange(BLOCK_TOKENS)
        tokens += self._encoded[:, np.newaxis] * np.int32(BLOCK_TOKENS)
        return tokens.reshape(-1)[: self.prompt_length]


@frozen(eq=False)
class Workload:
    """The requests of one file, in file order; at least one."""

    source: str
    format: Literal["own", "mooncake"]
    requests: tuple[WorkloadRequest, ...] = field(repr=False)

    def cut(self, *, limit: int | None = None, max_new_tokens: int | None = None) -> Workload:
        """The first ``limit`` requests, with outputs of at most ``max_new_tokens`` tokens (None: no such cut)."""
        requests = self.requests[:limit]
        if max_new_tokens is not None:
            requests = tuple(evolve(r, max_new_tokens=min(r.max_new_tokens, max_new_tokens)) for r in requests)
        return evolve(self, requests=requests)

    def error(self, request: WorkloadRequest, problem: str) -> WorkloadError:
        return WorkloadError(self.source, request.line, problem)


def read_workload(source: str | os.PathLike[str], *, name: str | None = None) -> Workload:
    """Read and validate a whole workload; ``-`` is standard input. ``name`` is what messages and reports call it.

    Raises: WorkloadError for whatever is wrong with the file or one of its lines.
    """
    path = os.fspath(source)
    if path == "-":
        return _parse(name or "standard input", sys.stdin.buffer)
    name = name or path
    try:
        with Path(path).open("rb") as stream:
            return _parse(name, stream)
    except FileNotFoundError:
        raise WorkloadError(name, None, "there is no such file; check the path") from None
    except IsADirectoryError:
        raise WorkloadError(name, None, "this is a directory; name a JSON Lines file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WorkloadError(name, None, f"cannot be read ({reason}); name a readable JSON Lines file") from None


def _parse(source: str, stream: BinaryIO) -> Workload:
    convert: Callable[[str, int, bytes], WorkloadRequest] | None = None
    requests = []
    for number, line in _lines(source, stream):
        if convert is None:
            convert = _convert_mooncake if _keys(line) & _MOONCAKE_KEYS else _convert_own
        requests.append(convert(source, number, line))
    if not requests:
        raise WorkloadError(source, None, "holds no request; write one JSON object a line")
    return Workload(source, "mooncake" if convert is _convert_mooncake else "own", tuple(requests))


def _lines(source: str, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers (from 1), as valid UTF-8."""
    number = 0
    while raw := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(raw) > LINE_BYTES_MAX and not raw.endswith(b"\n"):
            raise WorkloadError(
                source, number, f"longer than {LINE_BYTES_MAX >> 20} MiB; write one request a line (JSON Lines)"
            )
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # some editors start a UTF-8 file with this mark
        line = raw.strip()
        if not line:
            continue
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} is not valid UTF-8; save the file as UTF-8"
            raise WorkloadError(source, number, problem) from None
        yield number, line


_OWN_KEYS: Final = frozenset(_OwnLine.__struct_fields__)
_MOONCAKE_KEYS: Final = frozenset(_MooncakeLine.__struct_fields__)

_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_own = msgspec.json.Decoder(_OwnLine).decode
_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def _keys(line: bytes) -> frozenset[str]:
    """The keys of a line, without decoding the values; none if it is no JSON object."""
    try:
        return frozenset(_decode_keys(line))
    except (msgspec.DecodeError, RecursionError):
        return frozenset()  # whatever is wrong here, the converter says it


def _convert_own(source: str, number: int, line: bytes) -> WorkloadRequest:
    try:
        request = _decode_own(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(source, number, line, error, own=True) from None
    encoded: NDArray[np.uint8] | NDArray[np.int32]
    if not isinstance(request.token_ids, UnsetType):
        if not isinstance(request.text, UnsetType):
            raise WorkloadError(source, number, "has both token_ids and text; leave one of them out")
        encoded = np.array(request.token_ids, dtype=np.int32)
    elif not isinstance(request.text, UnsetType):
        encoded = np.frombuffer(request.text.encode(), dtype=np.uint8)
    else:
        raise WorkloadError(source, number, "has no prompt; add token_ids or text")
    return WorkloadRequest(
        line=number,
        prompt_length=len(encoded),
        max_new_tokens=request.max_new_tokens,
        encoded=encoded,
        lookup_policy=request.lookup_policy,
        commit_policy=request.commit_policy,
        tenant=request.tenant,
    )


def _convert_mooncake(source: str, number: int, line: bytes) -> WorkloadRequest:
    try:
        request = _decode_mooncake(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(source, number, line, error, own=False) from None
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if blocks != len(request.hash_ids):
        raise WorkloadError(
            source,
            number,
            f"input_length {request.input_length} takes {blocks} hash_ids of {BLOCK_TOKENS} tokens and there are "
            f"{len(request.hash_ids)}; make them agree",
        )
    return WorkloadRequest(
        line=number,
        prompt_length=request.input_length,
        max_new_tokens=request.output_length,
        encoded=np.array(request.hash_ids, dtype=np.int32),
        is_blocks=True,
    )


def _refusal(source: str, number: int, line: bytes, error: Exception, *, own: bool) -> WorkloadError:
    """Why ``line`` is no request of the file's format, which ``own`` names."""
    if isinstance(error, RecursionError):
        return WorkloadError(source, number, "is nested too deeply; write one flat JSON object a line")
    if not isinstance(error, msgspec.ValidationError):
        return WorkloadError(source, number, f"is not JSON ({error}); write one JSON object a line")
    expected, other = (_OWN_KEYS, _MOONCAKE_KEYS) if own else (_MOONCAKE_KEYS, _OWN_KEYS)
    keys = _keys(line)
    if keys & other and not keys & expected:
        first, second = ("own", "Mooncake") if own else ("Mooncake", "own")
        return WorkloadError(
            source, number, f"is in the {second} format and the lines before it are in the {first} one; split the file"
        )
    fields = ", ".join((_OwnLine if own else _MooncakeLine).__struct_fields__)
    return WorkloadError(source, number, f"{error}; correct the line (its keys are {fields})")
