"""Files that a command writes: whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["CannotWrite", "write_file"]


class CannotWrite(Exception):
    """A file cannot be written. The message is one sentence."""


def write_file(path: Path, content: bytes, option: str = "-o") -> None:
    """Write through a neighbouring file and a rename, so that a reader sees the old file or the new one.

    option: with which another place can be chosen.
    """
    if path.exists() and not path.is_file():
        raise CannotWrite(f"{path} is no regular file, which is not replaced; choose another place with {option}")
    # What a link names is replaced, not the link.
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            beside.replace(target)
        finally:
            # Only there if the rename did not happen.
            with suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise CannotWrite(
            f"{path} cannot be written ({error.strerror or error}); choose another place with {option}"
        ) from None
