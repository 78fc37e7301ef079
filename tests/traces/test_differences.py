"""A trace that says something else than what happens is different, and the replay names the step."""

from __future__ import annotations

import copy
import json
import random

import pytest

from context_cache.coordinator.traces.replay import replay

# Of a step: field -> a value that no step of the small trace has, made from the recorded one.
FLIPS = {
    "machine": lambda step: "view" if step["machine"] == "execution" else "execution",
    "subject": lambda step: step["subject"] + "0",
    "row": lambda step: step["row"] + 1,
    "row below": lambda step: -2,
    "event": lambda step: step["event"] + "_again",
    "source": lambda step: "elsewhere",
    "target": lambda step: "elsewhere",
    "guards": lambda step: {name: not held for name, held in step.get("guards", {"view_current": True}).items()},
    "guards one more": lambda step: {**step.get("guards", {}), "moon_full": True},
    "ran one more": lambda step: [*step.get("ran", []), "release"],
    "ran none": lambda step: [] if step.get("ran") else ["release"],
    "ran backwards": lambda step: (step.get("ran", ["a", "b"]) * 2)[::-1],
    "acts one more": lambda step: [*step.get("acts", []), {"verb": "drain"}],
    "acts failed": lambda step: [*step.get("acts", []), {"verb": "drain", "failed": "not_idle"}],
    "slots": lambda step: "7",
    "slots ranges": lambda step: step.get("slots", "") + ",9",
    "outcome": lambda step: "failed" if step["outcome"] == "done" else "done",
    "failed": lambda step: "drain",
    "ended": lambda step: "by_runtime_sync" if step.get("ended") == "drained" else "drained",
}


@pytest.fixture(scope="module")
def original(lines_of, small_trace):
    return lines_of(small_trace)


def named(path, changed_lines):
    result = replay(path)
    assert not result.equal, f"{changed_lines} was not noticed"
    assert result.unrepeatable is None
    return result.difference


def sampled(original, seed):
    """Some steps, always the same: (number, index of the line)."""
    return sorted(random.Random(seed).sample(list(enumerate(original.steps(), 1)), 14))


@pytest.mark.parametrize("flip", FLIPS)
def test_a_changed_field_of_a_step_is_named_by_the_number_of_the_step(original, tmp_path, flip):
    steps = original.steps()
    field = flip.split()[0]
    for number in random.Random(flip).sample(range(1, len(steps) + 1), 4):
        index = steps[number - 1]
        step = copy.deepcopy(original.records[index])
        step[field] = FLIPS[flip](step)
        if step[field] == original.records[index].get(field):
            continue
        found = named(original.write(tmp_path / "t", {index: step}), step)
        assert found.step == number, f"{flip} of step {number}"
        assert found.line == index + 1
        assert found.fields == (field,)
        assert getattr(found.expected, field) != getattr(found.actual, field)


@pytest.mark.parametrize(("part", "value"), [("verb", "upload_draft_rows"), ("digest", "00000000"), ("slot", 3)])
def test_a_changed_act_is_named_by_the_number_of_its_step(original, tmp_path, part, value):
    seen = 0
    for number, index in enumerate(original.steps(), 1):
        for position in range(len(original.records[index].get("acts", ()))):
            step = copy.deepcopy(original.records[index])
            step["acts"][position][part] = value
            found = named(original.write(tmp_path / "t", {index: step}), step)
            assert (found.step, found.fields) == (number, ("acts",))
            seen += 1
    assert seen > 5


@pytest.mark.parametrize("digit", range(8))
def test_each_digit_of_a_digest_counts(original, tmp_path, digit):
    index = next(i for i in original.steps() if "digest" in original.raw[i].decode())
    step = copy.deepcopy(original.records[index])
    act = next(act for act in step["acts"] if "digest" in act)
    act["digest"] = act["digest"][:digit] + format(int(act["digest"][digit], 16) ^ 1, "x") + act["digest"][digit + 1 :]
    found = named(original.write(tmp_path / "t", {index: step}), step)
    assert found.step == original.steps().index(index) + 1


def test_a_step_that_is_gone_is_named(original, tmp_path):
    for number, index in sampled(original, "gone"):
        found = named(original.write(tmp_path / "t", {index: None}), index)
        # What follows in the call moves up; two equal steps in a row look as if the last of them were gone.
        last = number
        while original.raw[index] == original.raw[index + last - number + 1]:
            last += 1
        assert found.step == last
        assert found.actual is not None


def test_a_step_too_many_is_named(original, tmp_path):
    """Forbidden: that a replay which does less than was recorded passes for equal."""
    for number, index in sampled(original, "too many"):
        line = original.raw[index]
        found = named(original.write(tmp_path / "t", {index: line + line}), index)
        assert found.step == number + 1


def test_two_steps_in_the_wrong_order_are_named(original, tmp_path):
    seen = 0
    for number, index in sampled(original, "order"):
        following = index + 1
        if following in original.steps() and original.raw[index] != original.raw[following]:
            changes = {index: original.raw[following], following: original.raw[index]}
            assert named(original.write(tmp_path / "t", changes), index).step == number
            seen += 1
    assert seen > 3


RESULTS = {
    "status": {"OK": "POISONED", "REQUEST_FAILED": "OK", None: "OK"},
    "starts": None,
    "insufficient": None,
    "raised": None,
    "gave": None,
    "left": None,
    "identity": None,
}


@pytest.mark.parametrize("field", RESULTS)
def test_another_result_of_a_call_is_noticed(original, tmp_path, field):
    seen = 0
    for index, record in enumerate(original.records):
        if record["line"] in ("header", "step"):
            continue
        call = copy.deepcopy(record)
        match field:
            case "status" if call["line"] not in ("close", "retract_sequence_admission"):
                call["status"] = RESULTS["status"][record.get("status")]
            case "starts" if call.get("starts"):
                call["starts"][-1] += 4
            case "insufficient" if call["line"] in ("begin_request", "admit_sequence"):
                call["insufficient"] = not call.get("insufficient", False)
            case "raised" if index % 3 == 0:
                call["raised"] = "OSError" if "raised" not in call else "DeviceError"
            case "gave" if "gave" in call:
                del call["gave"]
            case "left" if call["line"] == "retract_sequence_admission":
                call["left"] = not call["left"]
            case "identity" if call.get("identity"):
                kind, answer = next(iter(call["identity"][0].items()))
                call["identity"][0][kind] = [*answer, 1000]
            case _:
                continue
        result = replay(original.write(tmp_path / "t", {index: call}))
        assert not result.equal, call
        if result.difference is not None:
            assert result.difference.line == index + 1
            assert result.difference.step is None
            assert result.difference.fields == (field,)
        seen += 1
    assert seen


def test_white_space_and_the_order_of_keys_are_no_difference(original, tmp_path, replay_equal):
    changes = {}
    for index, record in enumerate(original.records):
        head = record["line"]
        rest = {key: record[key] for key in reversed(record) if key != "line"}
        text = json.dumps(rest, separators=(" ,\t", " : "))
        # A step begins as the recorder writes it; behind that everything may be written otherwise.
        changes[index] = b'{"line":"%b",%b \r\n' % (head.encode(), text[1:].encode())
        if len(rest) == 0:
            changes[index] = b'{"line":"%b" } \n' % head.encode()
    replay_equal(original.write(tmp_path / "t", changes))


def test_a_field_written_out_with_its_default_is_no_difference(original, tmp_path, replay_equal):
    changes = {}
    for index in original.steps():
        step = original.records[index]
        changes[index] = {"guards": {}, "ran": [], "acts": [], "slots": "", "failed": None, "ended": None, **step}
    replay_equal(original.write(tmp_path / "t", changes))


def test_the_difference_says_how_the_request_was_before(original, tmp_path):
    steps = original.steps()
    number = next(n for n, i in enumerate(steps, 1) if original.records[i]["event"] == "complete_decode_step")
    step = {**original.records[steps[number - 1]], "target": "elsewhere"}
    found = named(original.write(tmp_path / "t", {steps[number - 1]: step}), step)
    assert found.before.id == "r1"
    assert found.before.state == "decoding"


def test_tables_that_have_changed_are_named_and_are_no_difference(original, tmp_path):
    """C128: an incidental value."""
    header = copy.deepcopy(original.records[0])
    header["machines"]["view"] = "0" * len(header["machines"]["view"])
    result = replay(original.write(tmp_path / "t", {0: header}))
    assert result.equal
    assert result.changed_machines == ("view",)
    assert replay(original.path).changed_machines == ()
