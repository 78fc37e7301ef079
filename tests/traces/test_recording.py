"""What is written: the same bytes for the same script, nothing incidental, valid lines; and every flavour replays."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from context_cache.coordinator.cli.app import command_line
from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES
from context_cache.coordinator.traces import TraceRecorder
from context_cache.coordinator.traces.format import Record, json_schema
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.recorder import timings_of, tokens_of

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("CONTEXT_CACHE_DATA", ROOT.parent / "shared" / "data"))


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        command_line.main(["run", *map(str, arguments)], prog_name="context-cache")
    assert not caught.value.code


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize("redact", [False, True], ids=["tokens", "redacted"])
def test_two_recordings_of_one_script_are_equal_to_the_byte(recorded, harness_class, script, tmp_path, redact):
    """C128 and C129, with another identity key each time: what a digest is must not show."""
    files = []
    for name, key in (("one", bytes(range(32))), ("two", b"k" * 32), ("three", None)):
        recorder = TraceRecorder(tmp_path / name, redact=redact)

        def make(key=key):
            return harness_class(pages=8, enforce_min_pool=False, identity_key=key)

        script(recorded(recorder, make))
        recorder.close()
        assert recorder.failure is None
        tokens = Path(tokens_of(tmp_path / name))
        assert tokens.exists() is not redact
        files.append(((tmp_path / name).read_bytes(), b"" if redact else tokens.read_bytes()))
    assert files[0] == files[1] == files[2]


def test_hash_seeds_do_not_show(tmp_path):
    """In processes of their own, with different seeds for Python's hashes."""
    found = set()
    for seed in ("0", "4242"):
        path = tmp_path / seed
        program = "from context_cache.coordinator.cli import main; main()"
        subprocess.run(
            [sys.executable, "-c", program, "run", "--flavour", "hybrid", "--limit", "2", "--trace", path],
            env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        found.add((digest(path), digest(tokens_of(path))))
    assert len(found) == 1


def test_no_clock_no_address_and_no_digest_is_written(small_trace, lines_of):
    """C129. A prefix is an ordinal, an object is nothing; the only hexadecimal digits are those of acts."""
    text = small_trace.read_text()
    assert "0x" not in text
    known = {"header", "digest", "machines"}
    for record in lines_of(small_trace).records[1:]:
        plain = json.dumps([[k, v] for k, v in record.items() if k != "acts"])
        assert not re.search(r"[0-9a-f]{16}", plain), record
        # Nothing that counts nanoseconds or bytes of memory.
        assert not re.search(r"\d{9}", plain), record
        assert not known & (record.keys() - {"line"})


def test_the_times_lie_beside_the_trace_and_can_be_left_out(recorded, harness_class, script, tmp_path):
    def make():
        return harness_class(pages=8, enforce_min_pool=False)

    for name, timings in (("with", True), ("without", False)):
        recorder = TraceRecorder(tmp_path / name, timings=timings)
        script(recorded(recorder, make))
        recorder.close()
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()
    assert not Path(timings_of(tmp_path / "without")).exists()
    assert Path(timings_of(tmp_path / "with")).stat().st_size % 32 == 0


def test_times_are_monotonic_and_belong_to_steps_that_are_there(recorded, harness_class, script, tmp_path, lines_of):
    import numpy as np

    recorder = TraceRecorder(tmp_path / "t")
    script(recorded(recorder, lambda: harness_class(pages=8, enforce_min_pool=False)))
    recorder.close()
    trace = lines_of(tmp_path / "t")
    rows = np.fromfile(timings_of(tmp_path / "t"), "<i8").reshape(-1, 4)
    assert (rows[:, 2] <= rows[:, 3]).all()
    calls = rows[rows[:, 1] == -1]
    assert (np.diff(calls[:, 0]) > 0).all()
    assert (np.diff(calls[:, 2]) >= 0).all()
    steps = trace.steps()
    for step, act, _, _ in rows[rows[:, 1] >= 0].tolist():
        assert act < len(trace.records[steps[step - 1]]["acts"])
    noted = sum(len(trace.records[index].get("acts", ())) for index in steps)
    assert len(rows) - len(calls) == noted
    assert int(calls[-1, 0]) == len(steps)


def test_the_schema_beside_the_format_is_the_one_of_the_code():
    assert json.loads((ROOT / "docs" / "trace-format.schema.json").read_text()) == json_schema()


@pytest.mark.parametrize("redact", [False, True], ids=["tokens", "redacted"])
@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_the_beginning_of_the_shipped_workload_replays_in_every_flavour(
    flavour, redact, tmp_path, replay_equal, capsys
):
    """C131 without a failure: also that a redacted trace keeps no token file."""
    shipped(flavour, redact, tmp_path / "t.jsonl", replay_equal, "--limit", 8, "--max-new-tokens", 10)


@pytest.mark.slow
@pytest.mark.parametrize("redact", [False, True], ids=["tokens", "redacted"])
@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_the_shipped_workload_replays_in_every_flavour(flavour, redact, tmp_path, replay_equal, capsys):
    shipped(flavour, redact, tmp_path / "t.jsonl", replay_equal)


def shipped(flavour, redact, path, replay_equal, *options):
    run("--flavour", flavour, "--trace", path, *options, *(["--redact"] if redact else []))
    result = replay_equal(path)
    assert result.calls > 25
    assert result.steps > result.calls
    assert result.changed_machines == ()
    assert result.torn is False
    assert Path(tokens_of(path)).exists() is not redact
    assert not list(path.parent.glob("*.journal"))
    with TraceReader(path) as reader:
        assert reader.header.tokens is not redact
        for group in reader.groups():
            assert len(group.steps()) == len(group.raw) - 1
    check_schema(path)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_beginning_of_a_public_trace_replays(name, tmp_path, replay_equal, capsys):
    source = DATA / f"{name}_trace.jsonl"
    if not source.is_file():
        pytest.skip(f"{source.name} is not there; set CONTEXT_CACHE_DATA to the folder that has it")
    path = tmp_path / "t.jsonl"
    run(source, "--limit", 30, "--max-new-tokens", 10, "--pages", 1500, "--trace", path)
    assert replay_equal(path).calls > 50


def check_schema(path):
    """Every line against the JSON Schema, by a checker of our own that knows what the schema uses."""
    schema = json_schema()
    lines = {line.split(b'"')[3] + b"%d" % len(line): line for line in Path(path).read_bytes().splitlines()}
    for line in lines.values():
        assert fits(json.loads(line), schema, schema), line
        msgspec.json.decode(line, type=Record)


def fits(value, rule, whole):
    if isinstance(rule, bool):
        return rule
    if "$ref" in rule:
        return fits(value, whole["$defs"][rule["$ref"].rsplit("/", 1)[1]], whole)
    if "anyOf" in rule:
        return any(fits(value, option, whole) for option in rule["anyOf"])
    if "enum" in rule:
        return value in rule["enum"]
    match rule["type"]:
        case "object":
            known = rule.get("properties", {})
            extra = rule.get("additionalProperties", True)
            return (
                isinstance(value, dict)
                and all(name in value for name in rule.get("required", ()))
                and all(
                    fits(item, known.get(name, extra), whole)
                    for name, item in value.items()
                )
            )
        case "array":
            before = rule.get("prefixItems", [])
            items = rule.get("items", True)
            return (
                isinstance(value, list)
                and rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value))
                and all(fits(item, one, whole) for item, one in zip(value, before, strict=False))
                and (all(fits(item, items, whole) for item in value[len(before) :]))
            )
        case "integer":
            low, high = rule.get("minimum", -(2**63)), rule.get("maximum", 2**64)
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        case "string":
            pattern = rule.get("pattern")
            right = isinstance(value, str) and len(value) <= rule.get("maxLength", len(value))
            return right and (pattern is None or re.search(pattern, value) is not None)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    raise AssertionError(f"the schema uses what this test does not know: {rule}")


def test_every_line_fits_the_schema_and_a_wrong_one_does_not(small_trace, lines_of):
    check_schema(small_trace)
    schema = json_schema()
    for record in lines_of(small_trace).records:
        assert not fits({**record, "extra": 1}, schema, schema)
        assert not fits({**record, "line": "unheard_of"}, schema, schema)
        if record["line"] == "step":
            assert not fits({**record, "row": "1"}, schema, schema)
            assert not fits({**record, "row": 2**31}, schema, schema)
            assert not fits({**record, "slots": "1;2"}, schema, schema)
