"""Random damage: a replay ends in a result or a TraceError, whatever was done to the file. Also scenario C130."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.replay import ReplayResult, replay

COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "print_blob": True,
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([-1, 0, 1, 2, 3, 4, 7, 8, 15, 16, 100, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63]),
    st.text(max_size=5),
    st.sampled_from(["r1", "r2", "r3", "OK", "POISONED", "DeviceError", "drain", "not_idle", "KeyboardInterrupt"]),
    st.lists(st.integers(-3, 20), max_size=4),
    st.floats(allow_nan=False, allow_infinity=False),
)


def survive(path):
    try:
        result = replay(path)
    except TraceError:
        return None
    assert isinstance(result, ReplayResult)
    return result


def places(value, path=()):
    """Every place in a record: keys and indices to it."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def put(record, place, value, how):
    """Change one place: replace, delete or double what is there."""
    target = record
    for part in place[:-1]:
        target = target[part]
    if how == "delete":
        del target[place[-1]]
    elif how == "double" and isinstance(target, list):
        target.insert(place[-1], copy.deepcopy(target[place[-1]]))
    else:
        target[place[-1]] = value


def mutated(original, data):
    """One to three lines that are almost right, and lines that have moved."""
    records = original.records
    changes = {}
    for _ in range(data.draw(st.integers(1, 3))):
        # What is near the beginning matters to all that follows.
        index = data.draw(st.integers(0, len(records) - 1) | st.integers(0, 12))
        how = data.draw(st.sampled_from(["replace"] * 6 + ["delete", "double", "move", "gone", "again"]))
        if how == "gone":
            changes[index] = None
        elif how == "again":
            changes[index] = original.raw[index] * 2
        elif how == "move":
            other = data.draw(st.integers(0, len(records) - 1))
            changes[index], changes[other] = original.raw[other], original.raw[index]
        else:
            record = copy.deepcopy(records[index])
            place = data.draw(st.sampled_from([place for place in places(record) if place]))
            put(record, place, data.draw(ODD), how)
            changes[index] = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    return changes


def fuzz_records(original, tmp_path, examples, derandomize):
    results = []

    @settings(max_examples=examples, **{**COMMON, "derandomize": derandomize})
    @given(data=st.data())
    def play(data):
        results.append(survive(original.write(tmp_path / "t", mutated(original, data))))

    play()
    # A fuzz that is always stopped at the door, or never, would test nothing.
    assert any(result is None for result in results)
    assert any(result is not None for result in results)


def damaged(data, rng):
    """Bytes changed, taken out, put in or copied."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b'0123456789{}[]",:-tfnu\\\n\0\xff')
            case 2:
                del data[at : at + rng.choice((1, 2, 10, 300))]
            case 3:
                data[at:at] = rng.choice((b"9", b"-", b"0", b'"', b"[", b"\n", b"e9", b",", b"\xff\xff", b"null"))
            case 4:
                length = rng.choice((1, 3, 30, 400))
                target = rng.randrange(len(data))
                data[target:target] = data[at : at + length]
    return bytes(data)


def fuzz_bytes(original, make_trace, tmp_path, seeds):
    data = original.path.read_bytes()
    results = []
    for seed in seeds:
        path = make_trace(tmp_path / "t", damaged(data, random.Random(seed)), original.path)
        try:
            results.append(survive(path))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert any(result is None for result in results)
    assert any(result is not None for result in results)


@pytest.fixture(scope="module")
def original(lines_of, small_trace):
    return lines_of(small_trace)


def test_records_that_are_almost_right_end_well(original, tmp_path):
    fuzz_records(original, tmp_path, 60, True)


@pytest.mark.parametrize("part", range(2))
def test_bytes_that_were_damaged_end_well(original, make_trace, tmp_path, part):
    fuzz_bytes(original, make_trace, tmp_path, range(part * 40, part * 40 + 40))


@pytest.mark.slow
def test_many_records_that_are_almost_right_end_well(original, tmp_path):
    fuzz_records(original, tmp_path, 4000, False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_bytes_that_were_damaged_end_well(original, make_trace, tmp_path, part):
    fuzz_bytes(original, make_trace, tmp_path, range(1000 + part * 400, 1000 + part * 400 + 400))


def test_a_fuzz_that_is_run_twice_says_the_same(original, make_trace, tmp_path):
    """C130: nothing is left behind by a replay that ended early."""
    data = original.path.read_bytes()

    def run():
        told = []
        for seed in range(12):
            path = make_trace(tmp_path / "t", damaged(data, random.Random(seed)), original.path)
            try:
                told.append(str(replay(path).difference))
            except TraceError as error:
                told.append(str(error))
        return told

    assert run() == run()
