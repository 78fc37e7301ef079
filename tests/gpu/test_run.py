"""``context-cache run --backend cupy``: the model's states go through pages, rows and snapshots on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("click", "msgspec", "rich")),
        reason="the command line needs context-cache-coordinator[cli]",
    ),
]

FLAVOURS = ("vanilla", "eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp")
COMMAND = [sys.executable, "-P", "-c", "from context_cache.coordinator.cli import main; main()"]


def run(*arguments):
    return subprocess.run(
        [*COMMAND, "run", "--backend", "cupy", *arguments, "--json"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_flavour_reads_on_the_device_what_it_wrote(backend, flavour):
    done = run("--flavour", flavour, "--verify", "--limit", "40")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["leaked_pages"], report["verified_requests"]) == ("cupy", 0, 40)


def test_a_run_without_a_model_says_the_same_as_on_the_host(backend):
    done = run("--limit", "60", "--no-verify")
    assert done.returncode == 0, done.stderr
    host = subprocess.run(
        [*COMMAND, "run", "--limit", "60", "--no-verify", "--json"], capture_output=True, text=True, check=True
    )
    ours, theirs = json.loads(done.stdout), json.loads(host.stdout)
    for name in ("reused_tokens", "decode_tokens", "decode_steps", "leaked_pages"):
        assert ours[name] == theirs[name], name
