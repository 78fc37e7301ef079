"""The workload that ships with the library, and the script that makes it."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["shipped_workload"]


def shipped_workload() -> AbstractContextManager[Path]:
    """The path of the shipped workload, valid inside the ``with`` (a zipped installation unpacks it for that long)."""
    return as_file(files(__name__) / "shipped.jsonl")
