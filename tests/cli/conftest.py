"""The command line as a test sees it: arguments in; exit status, standard output and standard error out."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from context_cache.coordinator.cli.app import command_line


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON object on standard output; fails if there is anything else."""
        assert self.status == 0, self
        return json.loads(self.out)


@pytest.fixture
def cli(capsys):
    def invoke(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            command_line.main([str(argument) for argument in arguments], prog_name="context-cache")
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    return invoke


@pytest.fixture
def workload(tmp_path):
    """Write requests, one JSON object or one ready line each; returns the path."""

    def write(*lines: object) -> str:
        path = tmp_path / "requests.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return str(path)

    return write
