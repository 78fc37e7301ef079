"""Files that a command writes: whole or not at all, several of them all or none, as far as a file system allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["CannotWrite", "write_file", "write_files"]


class CannotWrite(Exception):
    """A file cannot be written. The message is one sentence."""


def write_file(path: Path, content: bytes, option: str = "-o") -> None:
    """One file, so that a reader sees the old one or the new one; see :func:`write_files`."""
    write_files({path: content}, option)


def write_files(contents: Mapping[Path, bytes], option: str = "-o") -> None:
    """Write each to a neighbouring file, and rename when the last is written.

    option: with which another place can be chosen.
    """
    for path in contents:
        if path.exists() and not path.is_file():
            raise CannotWrite(f"{path} cannot be written (it is no regular file); choose another place with {option}")
    # What a link names is replaced, not the link.
    targets = {path: Path(os.path.realpath(path)) for path in contents}
    beside = {path: target.with_name(f".{target.name}.{os.getpid()}.new") for path, target in targets.items()}
    path = Path()
    try:
        for path, content in contents.items():
            targets[path].parent.mkdir(parents=True, exist_ok=True)
            beside[path].write_bytes(content)
        for path in contents:
            beside[path].replace(targets[path])
    except OSError as error:
        raise CannotWrite(
            f"{path} cannot be written ({error.strerror or error}); choose another place with {option}"
        ) from None
    finally:
        # Only there if the renames did not happen.
        for waiting in beside.values():
            with suppress(OSError):
                waiting.unlink()
