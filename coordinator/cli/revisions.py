"""Where ``diff`` reads tables: a JSON file, the committed JSON of a git revision, or the files of the working tree.

Old code is never run: a revision is read with ``git show``. Whatever looks like an option, and a revision that git does
not take for a commit, is refused before it gets further.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

from attrs import frozen

from context_cache.diagrams.table import Table, parse_table

__all__ = ["Side", "SideError", "read_side"]

_FOLDER: Final = "diagrams/rendered"
_FILES: Final = "compare two .json files"
_SECONDS_MAX: Final = 60


class SideError(Exception):
    """A side of a diff that cannot be read. The message is one sentence."""


@frozen
class Side:
    """Tables by machine. ``title`` says where they are from; a ``file`` has one machine and says nothing of others."""

    title: str
    tables: dict[str, Table]
    file: bool = False


def read_side(argument: str | None) -> Side:
    """A path that ends in ``.json`` is a file, None the working tree, anything else a revision.

    Raises :class:`SideError`, or ``TableError`` for a document that is no table.
    """
    if argument is None:
        return _working_tree()
    if argument.endswith(".json"):
        table = parse_table(_text(Path(argument)), argument)
        return Side(argument, {table.name: table}, file=True)
    return _revision(argument)


def _working_tree() -> Side:
    try:
        root = Path(_git("rev-parse", "--show-toplevel").rstrip("\n"))
    except SideError:
        root = Path()
    paths = sorted((root / _FOLDER).glob("*.json"))
    if not paths:
        raise SideError(
            f"there is no {_FOLDER}/*.json here to compare with; stand in the checkout, or name two files or revisions"
        )
    tables = [parse_table(_text(path), str(path)) for path in paths]
    return Side("working tree", {table.name: table for table in tables})


def _revision(revision: str) -> Side:
    if revision.startswith("-") or not revision.strip():
        raise SideError(f"{revision!r} is no revision; name a commit, a branch, a tag or a .json file")
    failed = f"{revision!r} is no revision of this repository"
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", failed=failed).strip()
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise SideError(f"git answered {commit!r} for {revision!r}, which is no commit; name it by its hash")
    names = _git("ls-tree", "-z", "--full-tree", "--name-only", commit, "--", f"{_FOLDER}/").split("\0")
    paths = [name for name in names if name.endswith(".json")]
    if not paths:
        raise SideError(f"revision {revision} has no {_FOLDER}/*.json to compare; choose one that has them")
    tables = [parse_table(_git("show", f"{commit}:{path}", "--"), f"{revision}:{path}") for path in paths]
    return Side(revision, {table.name: table for table in tables})


def _git(*arguments: str, failed: str | None = None) -> str:
    """What git prints. ``failed`` says what it means that git refuses."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, check=False, timeout=_SECONDS_MAX, env=environment
        )
    except FileNotFoundError:
        raise SideError(f"revisions are read with git, which is not installed; install it, or {_FILES}") from None
    except subprocess.TimeoutExpired:
        raise SideError(f"git {arguments[0]} gave no answer in {_SECONDS_MAX} seconds; {_FILES}") from None
    if done.returncode != 0:
        # The first line says what is wrong; more of them are advice.
        words = done.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        if words.startswith("not a git repository"):
            raise SideError(f"this is no git repository, so there are no revisions; stand in one, or {_FILES}")
        what = failed or f"git {arguments[0]} failed"
        raise SideError(f"{what}{f' ({words})' if words else ''}; name a commit, a branch or a tag, or {_FILES}")
    try:
        return done.stdout.decode()
    except UnicodeDecodeError:
        raise SideError(f"git {arguments[0]} gave text that is not UTF-8; {_FILES}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SideError(f"{path} cannot be read ({error.strerror or error}); name a .json file or a revision") from None
    except UnicodeDecodeError:
        raise SideError(f"{path} is not UTF-8; write it again with `context-cache draw --format json`") from None
