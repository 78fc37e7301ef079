"""Several files that a command writes: all of them or none, as far as a file system allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from context_cache.coordinator.cli.output import CannotWrite

__all__ = ["write_files"]


def write_files(contents: Mapping[Path, bytes], option: str = "-o") -> None:
    """Write each to a neighbouring file, and rename when the last is written.

    option: with which another place can be chosen.
    """
    for path in contents:
        if path.exists() and not path.is_file():
            raise CannotWrite(f"{path} is no regular file, which is not replaced; choose another place with {option}")
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
