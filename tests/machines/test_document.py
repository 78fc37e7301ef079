"""A table as plain data: complete, in order, and named by a fingerprint that ignores words."""

from __future__ import annotations

import json

import attrs
import pytest

from context_cache.machines import ALL_MACHINES, REQUEST, MachineSpec, document, fingerprint


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_a_document_is_json_and_has_every_state_and_row_in_table_order(spec):
    plain = json.loads(json.dumps(document(spec)))
    assert [state["name"] for state in plain["states"]] == [state.name for state in spec.states]
    assert [(row["source"], row["event"], row["target"]) for row in plain["rows"]] == [
        (row.source, row.event, row.target) for row in spec.transitions
    ]
    assert [row["row"] for row in plain["rows"]] == list(range(len(spec.transitions)))
    for found, row in zip(plain["rows"], spec.transitions, strict=True):
        assert found["guards"] == [str(guard) for guard in row.guards]
        assert [step["name"] for step in found["steps"]] == [step.name for step in row.steps]


def test_the_kind_of_a_step_tells_what_it_asks_of_the_device():
    kinds = {step["name"]: step["kind"] for row in document(REQUEST)["rows"] for step in row["steps"]}
    assert kinds["grow"] == "host"
    assert kinds["publish"] == "publish"
    assert kinds["upload_base_rows"] == "enqueue"
    assert kinds["upload_cleared_rows"] == "clear"
    assert kinds["drain"] == "wait"
    assert kinds["execution.take"] == "couple"


def _changed(**changes) -> MachineSpec:
    first, *rest = REQUEST.transitions
    return attrs.evolve(REQUEST, transitions=(attrs.evolve(first, **changes), *rest))


def test_a_fingerprint_changes_with_behaviour_and_not_with_words():
    other_words = attrs.evolve(
        REQUEST, states=tuple(attrs.evolve(state, meaning=state.meaning + "!") for state in REQUEST.states)
    )
    assert fingerprint(other_words) == fingerprint(REQUEST)
    assert fingerprint(_changed(steps=())) != fingerprint(REQUEST)
    assert fingerprint(_changed(event="begin")) != fingerprint(REQUEST)
    assert len({fingerprint(spec) for spec in ALL_MACHINES}) == len(ALL_MACHINES)
