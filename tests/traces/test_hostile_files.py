"""Whatever a file says: a result, or a TraceError that names the line, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys

import pytest

from context_cache.coordinator.traces.format import json_schema
from context_cache.coordinator.traces.reader import TraceError, TraceReader
from context_cache.coordinator.traces.replay import ReplayResult, replay

CALL = b'{"line":"shutdown","status":"OK"}\n'
SUBJECT = re.compile(r"^line (\d+): \S")


@pytest.fixture(scope="module")
def original(lines_of, small_trace):
    return lines_of(small_trace)


@pytest.fixture
def refused(original, tmp_path):
    """Replay with some lines changed; must be refused with the number of that line."""

    def check(changes, line=None, words=""):
        with pytest.raises(TraceError) as caught:
            replay(original.write(tmp_path / "t", changes))
        found = SUBJECT.match(str(caught.value))
        assert found, caught.value
        assert line is None or int(found[1]) == line, caught.value
        assert words in str(caught.value)
        assert len(str(caught.value)) < 600
        assert "\n" not in str(caught.value)

    return check


def changed(record, **fields):
    return {**copy.deepcopy(record), **fields}


def index_of(original, line):
    return next(index for index, record in enumerate(original.records) if record["line"] == line)


# ---- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, -1, 10**30, "1", None, 1.5, True, [1]])
def test_another_version_is_refused_by_name(original, refused, version):
    refused({0: changed(original.records[0], version=version, unheard_of={})}, 1, "version")


@pytest.mark.parametrize("change", ["gone", "renamed", "a step", "a call"])
def test_a_trace_begins_with_a_header(original, refused, change):
    line = {
        "gone": None,
        "renamed": changed(original.records[0], line="head"),
        "a step": original.raw[original.steps()[0]],
        "a call": CALL,
    }[change]
    refused({0: line}, 1)


def test_an_unknown_machine_is_refused(original, refused):
    header = original.records[0]
    refused({0: changed(header, machines={**header["machines"], "toaster": "0"})}, 1, "toaster")


@pytest.mark.parametrize(
    "capacities",
    [[2**31 - 1, 0, 0, 0], [2**31 - 1] * 4, [8, 2**31 - 1, 0, 0], [8, 0, 2**31 - 1, 0], [8, 0, 0, 2**31 - 1],
     [8, 0, 5, 5], [0, 0, 0, 0], [1, 0, 0, 0], [8, 8, 0, 0]],
)  # fmt: skip
def test_capacities_that_are_enormous_or_fit_nothing(original, tmp_path, capacities):
    header = changed(original.records[0], capacities=capacities)
    path = original.write(tmp_path / "t", {0: header})
    if capacities == [1, 0, 0, 0]:
        # A small pool is one that a coordinator may have; it admits less.
        assert replay(path).equal is False
        return
    with pytest.raises(TraceError, match=r"^line 1: "):
        replay(path)


@pytest.mark.parametrize("field", ["max_batch", "kv_capacity_tokens", "page_size"])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 0, -1, 10**40])
def test_a_geometry_that_is_enormous_or_nothing(original, refused, field, value):
    header = copy.deepcopy(original.records[0])
    header["deployment"][field] = value
    refused({0: header}, 1)


@pytest.mark.parametrize(
    "change",
    [{"layers": []}, {"layers": [{"kind": "attention", "kv_heads": 2**20, "head_dim": 2**20}] * 3000},
     {"layers": [{"kind": "hyper"}]}, {"kv_dtype": "float17"}, {"spec_config": {"mode": "telepathy"}},
     {"spec_config": {"mode": "mtp", "hidden_dim": 2**31 - 1}}, {"block_diffusion": 1},
     {"layers": [{"kind": "recurrent", "heads": 1, "head_dim": 1, "state": 1, "conv_dim": 1, "conv_kernel": 1}]},
     {"layers": [{"kind": "attention", "kv_heads": 1, "head_dim": 1, "kv_donor": 7}]}],
    ids=str,
)  # fmt: skip
def test_a_deployment_that_nobody_could_have(original, tmp_path, change):
    header = copy.deepcopy(original.records[0])
    header["deployment"].update(change)
    path = original.write(tmp_path / "t", {0: header})
    if len(change.get("layers", ())) == 3000:
        # Layers are made small, so that the trace of a large model replays anywhere.
        assert replay(path).equal
        return
    with pytest.raises(TraceError, match=r"^line 1: "):
        replay(path)


# ---- lines -----------------------------------------------------------------------------------------------------------

BROKEN = {
    "not json": b"Once upon a time\n",
    "nothing": b"\n",
    "a number": b"5\n",
    "a list": b"[]\n",
    "null": b"null\n",
    "no kind": b"{}\n",
    "unknown kind": b'{"line":"abracadabra"}\n',
    "kind of another type": b'{"line":5}\n',
    "nul bytes": b"\0" * 100 + b"\n",
    "nul in a name": b'{"line":"finish","request":"r\0001"}\n',
    "not utf-8": b'{"line":"finish","request":"\xff\xfe"}\n',
    "a lone surrogate": b'{"line":"unusable","request":null,"call":"\\ud800"}\n',
    "byte order mark": b"\xef\xbb\xbf" + CALL,
    "not a number": b'{"line":"admit_sequence","request":"r1","headroom":[NaN,0],"sequence":{}}\n',
    "infinity": b'{"line":"prepare_decode_step","request":"r1","headroom":[1,Infinity]}\n',
    "huge exponent": b'{"line":"prepare_decode_step","request":"r1","headroom":[1e400,0]}\n',
    "a fraction": b'{"line":"prepare_decode_step","request":"r1","headroom":[1.5,0]}\n',
    "beyond int64": b'{"line":"prepare_decode_step","request":"r1","headroom":[9223372036854775808,0]}\n',
    "ten thousand digits": b'{"line":"prepare_decode_step","request":"r1","headroom":[' + b"9" * 10_000 + b",0]}\n",
    "nested lists": b'{"line":"finish","request":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
    "nested objects": b'{"line":"finish","request":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}\n",
    "nested beside": b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b',"line":"finish","request":"r1"}\n',
    "unknown call": b'{"line":"unusable","request":null,"call":"__init__"}\n',
    "a long name": b'{"line":"finish","request":"' + b"r" * 1000 + b'"}\n',
    "second header": b'{"line":"header"}\n',
    "unknown policy": b'{"line":"begin_request","sequences":[],"headroom":[1,0],"lookup":"PERHAPS"}\n',
    "odd hexadecimal": b'{"line":"begin_request","sequences":[{"tokens":[0,1],"resident":[0,1],"media":[["abc",1]]}],'
    b'"headroom":[1,0]}\n',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("place", ["first", "middle"])
def test_a_line_that_is_none_is_refused_by_its_number(original, refused, name, place):
    index = 1 if place == "first" else index_of(original, "finish")
    refused({index: BROKEN[name]}, index + 1)


@pytest.mark.parametrize("change", [{"machine": "toaster"}, {"row": "1"}, {"slots": "1;2"}, {"extra": 1}, {"ran": [1]}])
def test_a_wrong_step_is_refused_by_its_number(original, refused, change):
    """Also when the steps before it would already differ from it: what is no step is no difference."""
    for index in original.steps()[::20]:
        refused({index: changed(original.records[index], **change)}, index + 1)


def test_a_step_before_the_first_call_is_refused(original, refused):
    step = original.raw[original.steps()[0]]
    refused({1: step + original.raw[1]}, 2, "before the first call")


def test_more_steps_than_a_call_can_cause_are_refused(original, refused):
    index = original.steps()[0]
    refused({index: original.raw[index] * 100_002}, None, "100000 steps")


def test_an_empty_file_and_a_folder(tmp_path):
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(TraceError, match="empty"):
        replay(tmp_path / "t")
    with pytest.raises(OSError, match="directory"):
        replay(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        replay(tmp_path / "nowhere")


# ---- wrong types, from the schema ------------------------------------------------------------------------------------

STRANGE = [None, True, -1, 2**31, 2**64, 1.5, "", "x", "\u20ac" * 300, [], [None], [[[]]], {}, {"a": 1}]


# (line kind, field) of everything that the schema knows.
FIELDS = [
    (rule["properties"]["line"]["enum"][0], field)
    for rule in json_schema()["$defs"].values()
    if "line" in rule["properties"]
    for field in rule["properties"]
]


def outcome(path):
    """What a replay says; fails if that is anything but a result or a TraceError with the line."""
    try:
        result = replay(path)
    except TraceError as error:
        found = str(error)
    else:
        assert isinstance(result, ReplayResult)
        return "result"
    assert SUBJECT.match(found), found
    return found


def try_in(original, path, kind, field, values):
    known = [index for index, record in enumerate(original.records) if record["line"] == kind]
    index = known[0] if known else index_of(original, "finish")
    record = original.records[index] if known else {"line": kind, **MINIMAL[kind]}
    for value in values:
        outcome(original.write(path, {index: changed(record, **{field: value})}))
    without = {name: item for name, item in record.items() if name != field}
    outcome(original.write(path, {index: json.dumps(without).encode() + b"\n"}))


@pytest.mark.parametrize("part", range(7))
@pytest.mark.parametrize("kind", sorted({kind for kind, _ in FIELDS}))
def test_a_field_of_another_type_is_taken_or_refused(original, tmp_path, kind, part):
    """Nothing but a result or a TraceError that names the line may come out. A part of the values for each field."""
    for number, field in enumerate(field for known, field in FIELDS if known == kind):
        if number % 7 == part:
            try_in(original, tmp_path / "t", kind, field, STRANGE[(number + part) % 7 :: 7])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_of_any_type_is_taken_or_refused(original, tmp_path, kind, field):
    try_in(original, tmp_path / "t", kind, field, STRANGE)


MINIMAL = {
    "enqueue_prefill_captures": {"request": "r1"},
    "publish_hybrid_mtp_endpoint": {
        "request": "r1", "slot": 0, "length": 1, "hidden": {"shape": [1, 8], "dtype": "float16"}, "row": 0
    },
    "restore_hybrid_mtp_boundary_hidden": {
        "request": "r1", "slot": 0, "hidden": {"shape": [1, 8], "dtype": "float16"}, "row": 0
    },
    "unusable": {"request": "r1", "call": "finish"},
}  # fmt: skip


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[0, 10**6], [10**6, 1], [2**53, 2], [-1, 1], [2**31, 2**31 - 1], [0, 2**31 - 1]])
def test_a_token_range_outside_the_file_is_refused(original, refused, tokens):
    index = index_of(original, "begin_request")
    call = copy.deepcopy(original.records[index])
    call["sequences"][0]["tokens"] = tokens
    refused({index: call}, index + 1, "token")


def test_a_missing_or_short_token_file_is_refused(original, tmp_path):
    path = original.write(tmp_path / "t", {})
    tokens = tmp_path / "t.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-3])
    with pytest.raises(TraceError, match=r"^line \d+: tokens"):
        replay(path)
    tokens.unlink()
    with pytest.raises(TraceError, match="keep the files of a trace together"):
        replay(path)
    tokens.mkdir()
    with pytest.raises(TraceError, match="keep the files of a trace together"):
        replay(path)


# ---- calls that nobody could have made -------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["r99", "", "r-1", "R1", None, "r1\u0000", "r2"])
@pytest.mark.parametrize("kind", ["finish", "close", "prepare_prefill", "compact_batch", "retract_sequence_admission"])
def test_a_call_on_a_request_that_is_not_there_is_a_difference(original, tmp_path, kind, request_id):
    index = index_of(original, "begin_request")
    call = {"line": kind, "request": request_id, "status": "OK", "active": [0, None], "left": True}
    fields = {"finish": ("status",), "compact_batch": ("status", "active"), "prepare_prefill": ("status",),
              "retract_sequence_admission": ("left",), "close": ()}[kind]  # fmt: skip
    call = {name: value for name, value in call.items() if name in ("line", "request", *fields)}
    line = json.dumps(call, separators=(",", ":")).encode() + b"\n"
    result = replay(original.write(tmp_path / "t", {index: line + original.raw[index]}))
    assert not result.equal
    assert result.difference.line == index + 1


def test_calls_in_an_impossible_order_are_a_difference(original, tmp_path):
    calls = [i for i, r in enumerate(original.records) if r["line"] not in ("header", "step")]
    for one, other in zip(calls[:-1:3], calls[1::3], strict=False):
        changes = {one: original.raw[other], other: original.raw[one]}
        result = replay(original.write(tmp_path / "t", changes))
        assert not result.equal


# ---- size ------------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.replay import replay
try:
    print("equal" if replay(sys.argv[1]).equal else "different")
except TraceError as error:
    print(f"refused: {error}")
"""


@pytest.fixture
def limited(original, tmp_path):
    """Replay in a process that may have 3 GiB of addresses; what it says. Any other end fails."""

    def check(changes, *, redacted=False):
        if redacted:
            changes[0] = changed(original.records[0], tokens=False)
        path = original.write(tmp_path / "t", changes)
        return limited_replay(path)

    return check


def limited_replay(path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, path], capture_output=True, text=True, timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return done.stdout


def test_a_line_of_a_hundred_megabytes_is_refused_unread(original, tmp_path):
    path = original.write(tmp_path / "t", {})
    with open(path, "ab") as file:
        file.write(b'{"line":"finish","request":"' + b"r" * 10**8)
    assert "longer than" in limited_replay(path)


def test_steps_that_would_fill_memory_are_refused(original, tmp_path):
    """Each a line that a reader takes, all of them under one call."""
    path = original.write(tmp_path / "t", {})
    with open(path, "wb") as file:
        file.write(original.raw[0] + original.raw[1])
        for _ in range(300):
            # Sparse: the file system keeps one block of each.
            file.write(b'{"line":"step","machine":"')
            file.seek(15 * 2**20, os.SEEK_CUR)
            file.write(b'"}\n')
    assert limited_replay(path).startswith("refused: line ")


def test_tokens_that_would_fill_memory_are_refused(original, limited):
    sequence = {"tokens": [-1, 2**26], "resident": [0, 1]}
    call = {"line": "begin_request", "sequences": [sequence] * 1000, "headroom": [1, 0], "status": "OK"}
    assert limited({1: call}, redacted=True).startswith("refused: line 2: ")


@pytest.mark.parametrize(
    "name", ["finalize_sequence_admission", "finalize_prefill_publication", "complete_decode_step"]
)
def test_a_completion_has_no_more_tokens_than_all_rows(original, limited, name):
    """In a redacted trace no file says how many there are."""
    call = {"line": name, "request": "r1", "tokens": [-1, 2**26], "raised": "ContractViolation"}
    if name == "finalize_sequence_admission":
        call["slot"] = 0
    said = limited({1: call}, redacted=True)
    assert said.startswith("refused: line 2: a completion with 67108864 tokens, more than the ")


@pytest.mark.parametrize("runs", [[[None, 2**31 - 1]], [["aa" * 16, 2**31 - 1]] * 3, [[None, 2**20]] * 100_000])
def test_media_that_would_fill_memory_are_refused(original, limited, runs):
    call = copy.deepcopy(original.records[index_of(original, "begin_request")])
    call["sequences"][0]["media"] = runs
    assert limited({1: call}).startswith("refused: line 2: ")


@pytest.mark.parametrize("shape", [[2**31 - 1], [2**20, 2**20], [2**31 - 1] * 8, [2**29 - 1]])
def test_a_tensor_that_would_fill_memory_is_refused(original, limited, shape):
    index = index_of(original, "begin_batch_compaction")
    call = copy.deepcopy(original.records[index])
    call["tensor"] = {"shape": shape, "dtype": "int32"}
    assert limited({index: call}).startswith(f"refused: line {index + 1}: ")


def test_many_tensors_do_not_fill_memory(original, limited):
    """One that is as large as is allowed, again and again with another shape. Refused calls change nothing."""
    index = index_of(original, "begin_batch_compaction")
    call = {**original.records[index], "raised": "ContractViolation", "mapping": [0, 0, 0]}
    del call["status"]
    refused = b"".join(
        json.dumps({**call, "tensor": {"shape": [2**28 - n], "dtype": "int32"}}).encode() + b"\n" for n in range(12)
    )
    assert limited({index: refused + original.raw[index]}) == "equal\n"


def test_thousands_of_requests_that_never_end_are_held_by_the_pool(original, tmp_path):
    path = tmp_path / "t"
    call = {**original.records[index_of(original, "begin_request")], "status": "REQUEST_FAILED", "insufficient": True}
    call = {name: value for name, value in call.items() if name not in ("gave", "starts", "identity")}
    begin = json.dumps(call, separators=(",", ":")).encode() + b"\n"
    original.write(path, {})
    path.write_bytes(original.raw[0] + begin * 3000)
    assert replay(path).difference.call == 1


def test_a_pool_as_large_as_allowed_is_no_hang(original, tmp_path):
    """A header may ask for a gibibyte of books; it is not to take minutes."""
    header = changed(original.records[0], capacities=[2**22, 0, 0, 0])
    path = original.write(tmp_path / "t", {0: header})
    with TraceReader(path) as reader:
        assert reader.header.capacities[0] == 2**22
    with pytest.raises(TraceError, match="line 1: replaying needs about"):
        replay(path, bytes_max=2**27)
