"""A file that is appended to many times a second and survives the death of its process.

A system call for every public call would cost more than all the rest of recording. So what is appended goes into a
small memory-mapped journal beside the file first, which costs a copy; the kernel keeps the pages of a mapping whatever
happens to the process. When the journal is full it is written to the file in one piece. A clean close leaves only the
file; after a crash, or a close for which the disk had no room, the reader finds the rest in the journal
(:func:`open_journaled`).

The journal's space is reserved when it is made, so that a full disk is an error then, and never a fault of the mapping.
For the same reason a journal is never shortened, nor written by two: each file gets a new one, and a lock on the file
keeps other writers away. A journal says what stands before it in the file, so that it is not taken for the rest of
another one; copies of the two still belong together.

The child of a fork has no part in its parent's files: what it appends goes nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import stat
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

__all__ = [
    "JournaledBytes",
    "JournaledFile",
    "discard_journal",
    "journal_of",
    "locked_folder",
    "locked_shared",
    "open_journaled",
]

_MAGIC: Final = b"CCJOURN2"
_HEAD: Final = struct.Struct("<8sQQQ")
"""Magic, where in the file the journal's first byte belongs, how many bytes it has, what the file ends with there."""
_NUMBER: Final = struct.Struct("<Q")
_BASE_AT: Final = 8
_USED_AT: Final = 16
_BEFORE_AT: Final = 24
_SIZE: Final = 2**16
_ROOM: Final = _SIZE - _HEAD.size
_BEFORE: Final = 4096
"""So many bytes before a journal's first one are looked at."""
_NO_RESERVATION: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})
_open_files: Final[weakref.WeakSet[JournaledFile]] = weakref.WeakSet()


def journal_of(path: str | os.PathLike[str]) -> Path:
    """Where the journal of a file lies while it is written."""
    return Path(f"{os.fspath(path)}.journal")


def discard_journal(path: str | os.PathLike[str]) -> None:
    """Remove what a writer that died left beside a file."""
    journal_of(path).unlink(missing_ok=True)


class JournaledFile:
    """Append only. An existing file is replaced. Raises OSError from every method that may write.

    start: False leaves what lies at the path as it is until :meth:`start` is called.

    Raises OSError when the file or its journal cannot be made, or another recorder is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], *, start: bool = True) -> None:
        self._path = Path(path)
        self._disowned = False
        self._map: mmap.mmap | None = None
        self.size = 0
        self._base = 0
        self._used = 0
        self._file, self._created = _open(path)
        _open_files.add(self)
        try:
            # A pipe or a device has no place beside it, and no second chance either: it is written at once.
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                _lock(self._file, fcntl.LOCK_EX, path)
                if journal_of(path).is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(journal_of(path)))
                self._map = _make_journal(self._new_journal)
            if start:
                self.start()
        except BaseException:
            self.discard()
            raise

    @property
    def _new_journal(self) -> Path:
        return Path(f"{journal_of(self._path)}.new")

    def start(self) -> None:
        """Replace what lies at the path."""
        if self._map is not None:
            # Whoever has the old journal mapped keeps it: it loses its name only.
            os.replace(self._new_journal, journal_of(self._path))
            os.ftruncate(self._file, 0)

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
        """Bring everything into the file and remove the journal. If the file cannot take it, the journal stays.

        After an interrupt it may be called again.
        """
        if self._file < 0:
            return
        try:
            if self._map is not None:
                self._empty(self._map)
        except Exception:
            self.abandon()
            raise
        if self._map is not None:
            with contextlib.suppress(OSError):
                discard_journal(self._path)
        self.abandon()

    def abandon(self) -> None:
        """Close without writing; what is in the journal stays there for a reader."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        if self._map is not None:
            self._map.close()

    def discard(self) -> None:
        """Close a file that was not started, and remove what was made for it."""
        self.abandon()
        left = [self._new_journal] if self._map is not None else []
        for path in [*left, self._path] if self._created else left:
            with contextlib.suppress(OSError):
                path.unlink()

    def disown(self) -> None:
        """In the child of a fork: let go of it without touching it."""
        self._disowned = True
        file, self._file, self._map = self._file, -1, None
        if file >= 0:
            os.close(file)

    def _spill(self, more: bytes) -> None:
        journal = self._map
        assert journal is not None, "only a journal is spilled"
        kept = self._empty(journal)
        self._write(more)
        self._base = self.size + len(more)
        # With no bytes in the journal, nobody looks at the rest of its head.
        _NUMBER.pack_into(journal, _BEFORE_AT, crc32((kept + more)[-_BEFORE:]))
        _NUMBER.pack_into(journal, _BASE_AT, self._base)

    def _empty(self, journal: mmap.mmap) -> bytes:
        """Write what the journal holds, or what an interrupt left of it."""
        kept = journal[_HEAD.size : _HEAD.size + self._used]
        if kept:
            self._write(kept[max(0, os.fstat(self._file).st_size - self._base) :])
        self._used = 0
        _NUMBER.pack_into(journal, _USED_AT, 0)
        return kept

    def _write(self, data: bytes) -> None:
        if self._disowned:
            return
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def _let_go() -> None:
    for file in list(_open_files):
        file.disown()


os.register_at_fork(after_in_child=_let_go)


def _open(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """A file to append to, and whether it is new."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags, 0o666), False


def _lock(file: int, kind: int, path: str | os.PathLike[str]) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another recorder is writing this file", os.fspath(path)) from None
    except OSError:
        # A file system without locks: nobody can be kept away, and nothing can be said of it.
        return


@contextlib.contextmanager
def locked_shared(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep recorders away from a file that is about to be replaced; others may replace it too.

    Raises OSError if it is being recorded, or is no file that could be replaced.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield
        return
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file, and only such a file is replaced", os.fspath(path))
        _lock(file, fcntl.LOCK_SH, path)
        yield
    finally:
        os.close(file)


_HELD: Final = threading.local()


@contextlib.contextmanager
def locked_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Wait for whoever else replaces several files of a folder as one. Who holds it may ask again."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        key = (found.st_dev, found.st_ino)
        held: set[tuple[int, int]] = _HELD.__dict__.setdefault("folders", set())
        if key in held:
            # The lock belongs to the open file, so the same thread would wait for itself for ever.
            yield
            return
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        held.add(key)
        try:
            yield
        finally:
            held.discard(key)
    finally:
        os.close(folder)


def _make_journal(path: Path) -> mmap.mmap:
    # A new inode: what another process has mapped must not change under it. The lock keeps others from this name.
    path.unlink(missing_ok=True)
    journal = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        try:
            os.posix_fallocate(journal, 0, _SIZE)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
            # A file system that cannot reserve is made to by writing.
            os.pwrite(journal, b"\0" * _SIZE, 0)
        mapped = mmap.mmap(journal, _SIZE)
        _HEAD.pack_into(mapped, 0, _MAGIC, 0, 0, crc32(b""))
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
        rest = _rest(path, file.fileno(), os.fstat(file.fileno()).st_size)
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Joined(file, rest) if rest else file)


def _rest(path: str | os.PathLike[str], file: int, size: int) -> bytes:
    """What a journal has behind the first ``size`` bytes of its file; nothing if it is not the journal of this file."""
    try:
        with open(journal_of(path), "rb") as journal:
            data = journal.read(_SIZE)
    except OSError:
        return b""
    if len(data) < _HEAD.size:
        return b""
    magic, base, used, before = _HEAD.unpack_from(data)
    if magic != _MAGIC or used > len(data) - _HEAD.size or not base <= size <= base + used:
        return b""
    held = data[_HEAD.size : _HEAD.size + used]
    begin = max(0, base - _BEFORE)
    if crc32(os.pread(file, base - begin, begin)) != before:
        return b""
    # What is in both, because the process died while it wrote, is the same.
    if os.pread(file, size - base, base) != held[: size - base]:
        return b""
    return held[size - base :]


class JournaledBytes:
    """The same bytes for reading anywhere in them. Raises OSError if the file cannot be opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = io.FileIO(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._rest = _rest(path, self._file.fileno(), self._size)
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
