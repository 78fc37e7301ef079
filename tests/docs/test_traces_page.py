"""The examples of docs/traces.md run one after another, in an empty folder, as they stand there."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def outputs(folder):
    """Each example and what it printed."""
    scripts = sysconfig.get_path("scripts")
    printed = {}
    for kind, text in BLOCKS:
        if kind not in ("sh", "python"):  # sql, and sketches of what a reader adds to a program of theirs
            continue
        command = ["sh", "-ec", f'PATH="{scripts}:$PATH"\n{text}'] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        printed[text] = done.stdout
    return printed


def of(outputs, word):
    """What the one example with this word in it printed."""
    (found,) = [text for text in outputs if word in text]
    return outputs[found]


def spans(text):
    """The console exporter prints one object after another."""
    decoder, place = json.JSONDecoder(), 0
    while text[place:].strip():
        span, place = decoder.raw_decode(text, place)
        yield span
        place += len(text[place:]) - len(text[place:].lstrip())


def test_the_drawing_of_the_page_is_a_picture(outputs, folder):
    assert re.fullmatch(r"\d+ steps of \d+ calls\n", of(outputs, "write_perfetto"))
    assert json.loads((folder / "t.json").read_bytes())["traceEvents"]


def test_the_medians_of_the_page_are_printed(outputs):
    assert re.fullmatch(r"((request|coordinator) \d+ \d+\n)+", of(outputs, "median_durations"))


def test_the_export_of_the_page_prints_every_request(outputs):
    found = list(spans(of(outputs, "export_spans")))
    assert {span["name"] for span in found} == {"context_cache.request"}
    assert all(span["attributes"]["context_cache.request.state"] == "released" for span in found)


def test_the_live_example_of_the_page_makes_a_child_of_the_current_span(outputs):
    parent, request = spans(of(outputs, "SpanRecorder"))
    assert (parent["name"], request["name"]) == ("generate", "context_cache.request")
    assert request["parent_id"] == parent["context"]["span_id"]


def test_every_attribute_that_the_page_names_is_one():
    source = (pathlib.Path(__file__).resolve().parents[2] / "coordinator" / "traces" / "spans.py").read_text()
    for name in "machine row event source target outcome guards failed ended".split():
        assert f'"context_cache.{name}"' in source
        assert f"`{name}`" in PAGE or f"`context_cache.{name}`" in PAGE
    for name in re.findall(r'"context_cache\.request\.(\w+)"', source):
        assert f"`{name}`" in PAGE or f"`context_cache.request.{name}`" in PAGE, f"{name} is not on the page"
