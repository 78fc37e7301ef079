"""The wheel works where nothing else of the project is: no checkout, no development tools, no extras at first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
ROOMS = ("backends", "coordinator", "diagrams", "machines", "pytest_plugin")


def _run(*command: str | Path, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == expected, f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    return result


def test_the_wheel_works_in_an_empty_environment(tmp_path):
    """Builds from a copy: a stale build folder of the checkout could add modules that are gone, or hide a lost one."""
    source, dist, elsewhere = tmp_path / "source", tmp_path / "dist", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in SHIPPED:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))

    # Without further options this builds the wheel from the source distribution, so that one is complete as well.
    _run(sys.executable, "-m", "build", "--outdir", dist, source, cwd=elsewhere)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith("context_cache_coordinator-")

    environment = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", environment, cwd=elsewhere)
    python, script = environment / "bin" / "python", environment / "bin" / "context-cache"
    _run(python, "-m", "pip", "install", "--quiet", wheel, cwd=elsewhere)
    # The plugin is imported by pytest alone, which a bare installation does not bring.
    imports = "; ".join(f"import context_cache.{room}" for room in ROOMS if room != "pytest_plugin")
    _run(python, "-I", "-W", "error", "-c", imports, cwd=elsewhere)

    bare = _run(script, "run", cwd=elsewhere, expected=2)
    assert bare.stdout == ""
    assert len(bare.stderr.splitlines()) == 1
    assert "pip install 'context-cache-coordinator[cli]'" in bare.stderr

    _run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cli,draw]", cwd=elsewhere)
    report = json.loads(_run(script, "run", "--limit", "20", "--json", cwd=elsewhere).stdout)
    assert report["requests"] == 20
    assert report["leaked_pages"] == 0

    # Pictures come out of the installed files alone, and the ones that were shipped are what the tables say.
    drawn = _run(script, "draw", "view", "--format", "svg", "--format", "pdf", "-o", "pictures", cwd=elsewhere)
    assert drawn.stdout.splitlines() == ["pictures/view.svg", "pictures/view.pdf"]
    _run(script, "draw", "--check", cwd=elsewhere)
    assert _run(script, "draw", "view", "--html", "page.html", cwd=elsewhere).stdout == "page.html\n"
