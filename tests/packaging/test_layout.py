"""The rooms at the top of the repository are the packages of the namespace ``context_cache``, and nothing else is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("backends", "coordinator", "diagrams", "machines", "pytest_plugin")


def _setuptools() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_the_root_holds_no_namespace_folder():
    """A real context_cache/ folder would shadow the installed namespace for everything that is started in the root."""
    assert not (ROOT / "context_cache").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_not_a_top_level_module(room):
    """Else every module could be imported a second time, under a second name, with a second set of classes."""
    assert importlib.util.find_spec(room) is None, f"{room} is on sys.path: {sys.path}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_plain_import_of_a_room_fails_where_the_library_is_installed(room, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", f"import {room}"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_installed_and_typed(room):
    spec = importlib.util.find_spec(f"context_cache.{room}")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert all((Path(folder) / "py.typed").exists() for folder in spec.submodule_search_locations)


def test_every_package_is_listed_in_the_packaging():
    """A package that pyproject.toml does not list works in the checkout and is missing from the wheel."""
    found = {
        ".".join(("context_cache", *folder.relative_to(ROOT).parts))
        for room in ROOMS
        for folder in (ROOT / room, *(ROOT / room).rglob("*"))
        if (folder / "__init__.py").is_file()
    }
    assert found == set(_setuptools()["packages"])


def test_every_data_file_is_covered_by_the_packaging():
    """What is neither Python nor named as package data is missing from the wheel."""
    patterns = _setuptools()["package-data"]
    missed = [
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts and not _covered(path, patterns)
    ]
    assert not missed, f"name these in [tool.setuptools.package-data]: {missed}"


def _covered(path: Path, patterns: dict[str, list[str]]) -> bool:
    for package, globs in patterns.items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        if path.is_relative_to(folder) and any(path in folder.glob(pattern) for pattern in globs):
            return True
    return False
