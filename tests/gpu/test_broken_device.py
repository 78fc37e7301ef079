"""An illegal address, in a process of its own: the error is sticky, and the process still ends as it means to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ended(backend, tmp_path_factory):
    trace = tmp_path_factory.mktemp("broken") / "trace"
    command = [sys.executable, str(Path(__file__).with_name("broken_child.py")), str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done, trace


def test_the_process_ends_with_its_own_code_and_says_nothing_else(ended):
    done, _ = ended
    assert done.returncode == 7, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_the_request_is_quarantined_and_the_coordinator_poisoned(ended):
    report = json.loads(ended[0].stdout)
    assert "POISONED" in report["finish"] or "FAILED" in report["finish"]
    assert (report["request"], report["coordinator"]) == ("quarantined", "poisoned")
    assert report["lost"].startswith("cudaErrorIllegalAddress")
    assert "POISONED" in report["shutdown"]
    assert report["after"] == "poisoned"
    assert report["withheld"] > 0, "pages that the device may still write stay withheld"


def test_every_later_verb_is_a_device_error_in_the_words_of_cuda(ended):
    later = json.loads(ended[0].stdout)["later"]
    assert later
    for name, cause in later.items():
        assert cause.startswith("cudaErrorIllegalAddress"), f"{name}: {cause}"


def test_the_trace_was_flushed(ended):
    report = json.loads(ended[0].stdout)
    assert len(ended[1].read_text(encoding="utf-8").splitlines()) >= report["steps"] > 0
