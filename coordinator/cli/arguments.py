"""What arguments have to be before anything is opened: regular files to read, places to write, finite numbers.

Rule: no command reads or writes a file that was not looked at here, so that a pipe cannot hang it, an output cannot
replace an input, and a message says which of both was meant. A trace is several files; all of them count.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click

from context_cache.coordinator.cli.app import Unusable

__all__ = ["FiniteRange", "check_inputs", "check_output"]

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
_DEVICE_FOLDERS: Final = ("/dev", "/dev/fd", "/proc/self/fd")


class FiniteRange(click.FloatRange):
    """A range of numbers; neither ``inf`` nor ``nan`` is one."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, context)
        return number


def check_inputs(*paths: str, option: str = "", advice: str = "name a trace that can be read") -> None:
    """Raises Unusable for a path that is no regular file, or with something else where a file beside it belongs.

    option: which option names the paths; none for arguments.
    """
    named = f"{option} " if option else ""
    for path in paths:
        for name in _family(path):
            try:
                mode = os.stat(name).st_mode
            except (OSError, ValueError) as error:
                if name != path:
                    # It is not there, or whoever opens it says why it cannot be used.
                    continue
                raise Unusable(f"{named}{path} cannot be read ({_reason(error)}); {advice}") from None
            if not stat.S_ISREG(mode):
                raise Unusable(f"{named}{name} cannot be read (it is {_kind(mode)} and no regular file); {advice}")


def check_output(
    path: str,
    option: str,
    inputs: Iterable[str] = (),
    *,
    trace: bool = False,
    direct: bool = False,
    makes_folders: bool = False,
) -> None:
    """Raises Unusable for an output that would replace an input, or what is no file, or that has no folder.

    trace: it is a trace, which is several files. direct: a pipe or a device is written to instead of replaced.
    """
    if trace and os.path.dirname(os.path.abspath(path)) in _DEVICE_FOLDERS:
        raise Unusable(f"{path} takes no trace, which is several files; choose another place with {option}")
    outputs = _family(path) if trace else [path]
    for source in inputs:
        for one in _family(source):
            for out in outputs:
                if _same(one, out):
                    beside = "" if out == path else f" with {out}"
                    read = "which is read" if one == source else f"which belongs to {source}"
                    raise Unusable(f"{path} would overwrite {one}{beside}, {read}; choose another place with {option}")
    for out in outputs:
        try:
            mode = os.stat(out).st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _cannot_write(option, path, error) from None
        if stat.S_ISDIR(mode) or not (stat.S_ISREG(mode) or direct):
            raise Unusable(f"{out} is {_kind(mode)}, which is not replaced; choose another place with {option}")
    if not makes_folders:
        try:
            # With the dot a file in the place of the folder is an error too.
            os.stat(os.path.join(os.path.dirname(path) or ".", "."))
        except OSError as error:
            raise _cannot_write(option, path, error) from None


def _family(path: str) -> Sequence[str]:
    """The file, and those that lie beside it if it is a trace."""
    from context_cache.coordinator.traces.journal import journal_of
    from context_cache.coordinator.traces.recorder import timings_of, tokens_of

    files = (path, tokens_of(path), timings_of(path))
    return [*files, *(str(journal_of(name)) for name in files)]


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)


def _cannot_write(option: str, path: str, error: Exception) -> Unusable:
    return Unusable(f"{path} cannot be written ({_reason(error)}); choose another place with {option}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
