"""A file that is appended to many times a second and survives the death of its process.

A system call for every public call would cost more than all the rest of recording. So what is appended goes into a
small memory-mapped journal beside the file first, which costs a copy; the kernel keeps the pages of a mapping whatever
happens to the process. When the journal is full it is written to the file in one piece. A clean close leaves only the
file; after a crash the reader finds the rest in the journal (:func:`open_journaled`).

The journal's space is reserved when it is made, so that a full disk is an error then, and never a fault of the mapping.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

__all__ = ["JournaledBytes", "JournaledFile", "journal_of", "open_journaled"]

_MAGIC: Final = b"CCJOURN1"
_HEAD: Final = struct.Struct("<8sQQ")
"""Magic, where in the file the journal's first byte belongs, how many bytes it has."""
_NUMBER: Final = struct.Struct("<Q")
_BASE_AT: Final = 8
_USED_AT: Final = 16
_SIZE: Final = 2**16
_ROOM: Final = _SIZE - _HEAD.size
_NO_RESERVATION: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def journal_of(path: str | os.PathLike[str]) -> Path:
    """Where the journal of a file lies while it is written."""
    return Path(f"{os.fspath(path)}.journal")


class JournaledFile:
    """Append only. An existing file is replaced. Raises OSError from every method that may write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._map: mmap.mmap | None = None
        self.size = 0
        self._base = 0
        self._used = 0
        try:
            # A pipe or a device has no place beside it, and no second chance either: it is written at once.
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                self._map = _make_journal(journal_of(path))
        except BaseException:
            os.close(self._file)
            raise

    def append(self, data: bytes) -> int:
        """Append; the offset at which ``data`` begins."""
        offset, size = self.size, len(data)
        journal = self._map
        if journal is None:
            self._write(data)
        else:
            end = self._used + size
            if end > _ROOM:
                self._spill(data)
            else:
                start = _HEAD.size + self._used
                journal[start : start + size] = data
                # The bytes first, then the number that makes them count.
                self._used = end
                _NUMBER.pack_into(journal, _USED_AT, end)
        self.size = offset + size
        return offset

    def close(self) -> None:
        """Bring everything into the file and remove the journal."""
        if self._file < 0:
            return
        try:
            self._spill(b"")
        finally:
            os.close(self._file)
            self._file = -1
            if self._map is not None:
                self._map.close()
                with contextlib.suppress(OSError):
                    journal_of(self._path).unlink()

    def abandon(self) -> None:
        """Close without writing; what is in the journal stays there for a reader."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self._map is not None:
                self._map.close()

    def _spill(self, more: bytes) -> None:
        journal = self._map
        if journal is not None:
            self._write(journal[_HEAD.size : _HEAD.size + self._used])
            self._used = 0
            _NUMBER.pack_into(journal, _USED_AT, 0)
        self._write(more)
        self._base = self.size + len(more)
        if journal is not None:
            _NUMBER.pack_into(journal, _BASE_AT, self._base)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def _make_journal(path: Path) -> mmap.mmap:
    journal = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            os.posix_fallocate(journal, 0, _SIZE)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
            # A file system that cannot reserve is made to by writing.
            os.pwrite(journal, b"\0" * _SIZE, 0)
        mapped = mmap.mmap(journal, _SIZE)
        _HEAD.pack_into(mapped, 0, _MAGIC, 0, 0)
        return mapped
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(journal)


def open_journaled(path: str | os.PathLike[str]) -> BinaryIO:
    """A file and, if its writer died, the rest that lies in its journal, as one stream of bytes."""
    file = io.FileIO(path)
    try:
        rest = _rest(path, os.fstat(file.fileno()).st_size)
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Joined(file, rest) if rest else file)


def _rest(path: str | os.PathLike[str], size: int) -> bytes:
    """What a journal has behind the first ``size`` bytes of its file."""
    try:
        with open(journal_of(path), "rb") as journal:
            data = journal.read(_SIZE)
    except OSError:
        return b""
    if len(data) < _HEAD.size:
        return b""
    magic, base, used = _HEAD.unpack_from(data)
    if magic != _MAGIC or used > len(data) - _HEAD.size or not base <= size <= base + used:
        return b""
    return data[_HEAD.size + size - base : _HEAD.size + used]


class JournaledBytes:
    """The same bytes for reading anywhere in them. Raises OSError if the file cannot be opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = io.FileIO(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._rest = _rest(path, self._size)
        except BaseException:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._size + len(self._rest)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset`` on; fewer where there are no more."""
        if offset + count > self.size:
            return b""
        data = b"" if offset >= self._size else os.pread(self._file.fileno(), count, offset)
        if len(data) < count:
            begin = max(0, offset - self._size)
            data += self._rest[begin : begin + count - len(data)]
        return data

    def close(self) -> None:
        self._file.close()


class _Joined(io.RawIOBase):
    def __init__(self, file: io.FileIO, rest: bytes) -> None:
        self._file, self._rest = file, memoryview(rest)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        if count:
            return count
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()
