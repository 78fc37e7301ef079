"""The suites that were written for the host backend, run on this GPU: conformance, faults, device state."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]


def test_the_suites_of_the_host_backend_pass_on_the_gpu(backend):
    """One process of its own, because a suite has one backend: CONTEXT_CACHE_TEST_BACKEND."""
    # Other plugins of the environment may warn, which would end the run: none of them is needed.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    environment = {**os.environ, "CONTEXT_CACHE_TEST_BACKEND": "cupy"}
    done = subprocess.run(
        [*command, str(TESTS / "conformance"), str(TESTS / "device_state")],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
