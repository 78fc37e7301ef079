"""The entry point of the console script: what it says when the extra is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from context_cache.coordinator import cli as cli_module


def test_the_console_script_is_the_main_function():
    (script,) = entry_points(group="console_scripts", name="context-cache")
    assert script.load() is cli_module.main


@pytest.mark.parametrize("missing", [["click"], ["rich", "msgspec"], ["click", "msgspec", "rich"]])
def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys, missing):
    monkeypatch.setattr(cli_module, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(SystemExit) as caught:
        cli_module.main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert all(name in captured.err for name in missing)
    assert "pip install 'context-cache-coordinator[cli]'" in captured.err


def test_with_the_extra_the_command_line_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["context-cache", "--help"])
    with pytest.raises(SystemExit) as caught:
        cli_module.main()
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "run" in output
    assert "bench" in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full")
@pytest.mark.parametrize("options", [["--json"], []])
def test_output_that_cannot_be_written_is_one_sentence(options):
    command = [sys.executable, "-c", "from context_cache.coordinator.cli import main; main()", "run", "--limit", "2"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run([*command, *options], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("context-cache: the output could not be written: No space left")
