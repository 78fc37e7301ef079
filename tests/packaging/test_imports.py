"""Imports point one way. The rooms are the architecture, so a wrong arrow fails here and not in a review.

    diagrams -> machines -> backends.base
    coordinator -> machines, manager, backends; diagrams only from coordinator.cli
    coordinator.manager -> neither machines nor backends
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("backends", "coordinator", "diagrams", "machines", "pytest_plugin")

# The longest prefix of a module's name decides. "context_cache.x" allows x and everything below it.
ALLOWED = {
    "context_cache.backends": ("attrs", "numpy", "context_cache.backends"),
    "context_cache.backends.cupy_backend": ("attrs", "numpy", "cupy", "context_cache.backends"),
    "context_cache.machines": ("attrs", "transitions", "context_cache.machines", "context_cache.backends.base"),
    "context_cache.diagrams": ("attrs", "context_cache.diagrams", "context_cache.machines"),
    "context_cache.diagrams.engines": ("graphviz", "context_cache.diagrams"),
    "context_cache.diagrams.pdf": ("reportlab", "svglib", "context_cache.diagrams"),
    "context_cache.coordinator": (
        "attrs", "numpy", "context_cache.coordinator", "context_cache.machines", "context_cache.backends",
    ),
    "context_cache.coordinator.manager": (
        "attrs", "numpy", "context_cache.coordinator.manager", "context_cache.coordinator.errors",
    ),
    "context_cache.coordinator.testing": (
        "attrs", "numpy", "pytest", "hypothesis",
        "context_cache.coordinator", "context_cache.machines", "context_cache.backends",
    ),
    "context_cache.pytest_plugin": (
        "pytest", "context_cache.coordinator", "context_cache.machines", "context_cache.pytest_plugin",
    ),
    "context_cache.coordinator.traces": (
        "attrs", "numpy", "msgspec", "opentelemetry",
        "context_cache.coordinator", "context_cache.machines", "context_cache.backends",
    ),
    "context_cache.coordinator.cli": (
        "attrs", "numpy", "click", "msgspec", "rich", "transitions",
        "context_cache.coordinator", "context_cache.machines", "context_cache.backends", "context_cache.diagrams",
    ),
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = ("context_cache", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, is_package: bool, source: str) -> Iterator[str]:
    """Every module that ``source`` imports, anywhere in it, by its absolute name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                package = parts[: len(parts) - node.level + is_package]
                base = ".".join((*package, base) if base else package)
            # `from package import name` may import a module of that name, so both are looked at.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden(module: str, is_package: bool, source: str) -> list[str]:
    room = max((known for known in ALLOWED if within(module, known)), key=len)
    return [
        name
        for name in imported(module, is_package, source)
        if name.split(".")[0] not in sys.stdlib_module_names and not any(within(name, good) for good in ALLOWED[room])
    ]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) for path in MODULES])
def test_a_module_imports_only_what_its_room_may(path):
    wrong = forbidden(module_name(path), path.name == "__init__.py", path.read_text(encoding="utf-8"))
    assert not wrong, f"{module_name(path)} imports {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("context_cache.machines.spec", "import numpy"),
        ("context_cache.machines.spec", "from context_cache.backends.host import HostBackend"),
        ("context_cache.machines.spec", "from ..coordinator import ledger"),
        ("context_cache.backends.base", "from context_cache.machines import spec"),
        ("context_cache.backends.host", "import cupy"),
        ("context_cache.coordinator.coordinator", "def late():\n    import cupy.cuda"),
        ("context_cache.coordinator.coordinator", "from context_cache import diagrams"),
        ("context_cache.coordinator.coordinator", "from opentelemetry import trace"),
        ("context_cache.coordinator.manager.pools", "from context_cache.machines.spec import State"),
        ("context_cache.coordinator.manager.pools", "from ...backends import base"),
        ("context_cache.coordinator.manager.pools", "from ..coordinator import ContextCacheCoordinator"),
        ("context_cache.diagrams.mermaid", "import context_cache.coordinator"),
        ("context_cache.diagrams.dot", "import graphviz"),
        ("context_cache.diagrams.engines", "def late():\n    from svglib import svglib"),
        ("context_cache.diagrams.pdf", "from context_cache.coordinator.cli import app"),
    ],
)
def test_a_wrong_arrow_is_noticed(module, source):
    assert forbidden(module, False, source)
