"""Drawings come from the specs, are stable to the byte, and lose no row and no label."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.diagrams import draw, to_markdown, to_mermaid
from context_cache.machines import ALL_MACHINES, REQUEST, MachineSpec, State, Transition


def _labels(spec, source, target, failure):
    drawing = draw(spec)
    phase = spec.by_state[source].phase
    return {
        label
        for edge in drawing.edges
        if edge.target == target and edge.failure == failure
        and ((edge.from_phase and edge.source == phase) or (not edge.from_phase and edge.source == source))
        for label in edge.labels
    }  # fmt: skip


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_every_row_that_changes_the_state_is_on_an_arrow(spec):
    """C125. Shown from the rows' side: folding parallel rows or a whole phase must not lose one."""
    for row in spec.transitions:
        if row.target != row.source:
            assert row.event in _labels(spec, row.source, row.target, failure=False), str(row)


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_no_arrow_is_invented(spec):
    known = {(row.source, end) for row in spec.transitions for end in row.ends}
    for edge in draw(spec).edges:
        sources = (
            [state.name for state in spec.states if state.phase == edge.source] if edge.from_phase else [edge.source]
        )
        for source in sources:
            assert (source, edge.target) in known, edge


def test_failures_of_a_request_are_dashed_and_red():
    text = to_mermaid(REQUEST)
    assert 's_admitted -.->|"device error"| s_broken' in text
    assert "stroke:#c0392b" in text


def test_a_machine_without_failures_has_no_link_style():
    spec = MachineSpec(
        name="lamp", initial="off", states=(State("off", "dark", final=False), State("on", "light", final=True)),
        transitions=(Transition(event="switch", source="off", target="on"),),
    )  # fmt: skip
    assert "linkStyle" not in to_mermaid(spec)


@pytest.mark.parametrize("name", ["a b", "gelöst → frei", 'x"y', "<lambda>", "tail\\", "one\ntwo", "a_b", "#1;"])
def test_odd_names_survive_in_mermaid(name):
    """C120, C121, C122. A label is text: it never closes its quotes, never becomes markup."""
    spec = MachineSpec(
        name="odd", initial=name, states=(State(name, "odd"), State("end", "done", final=True)),
        transitions=(Transition(event=name, source=name, target="end"),),
    )  # fmt: skip
    for line in to_mermaid(spec).splitlines():
        assert line.count('"') % 2 == 0
        assert "<" not in line.replace("<br>", "")
        assert "\\" not in line


@given(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=5, unique=True))
def test_two_states_never_share_an_id(names):
    states = tuple(State(name, "m") for name in names[:-1])
    rows = tuple(Transition(event="e", source=a, target=b) for a, b in itertools.pairwise(names))
    spec = MachineSpec(
        name="m", initial=names[0], states=(*states, State(names[-1], "m", final=True)), transitions=rows
    )
    boxes = [line.strip().split("(")[0] for line in to_mermaid(spec).splitlines() if line.strip().startswith("s_")]
    declared = [box for box in boxes if " " not in box]
    assert len(set(declared)) == len(names)


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_the_markdown_table_has_one_line_per_row_and_state(spec):
    lines = to_markdown(spec).splitlines()
    assert sum(line.startswith("| `") for line in lines) == len(spec.states)
    assert [line.split(" | ")[0] for line in lines if line[:3].strip("| ").isdigit() or line[2:3].isdigit()] == [
        f"| {number}" for number in range(len(spec.transitions))
    ]


def test_output_does_not_depend_on_hash_seeds():
    """C126."""
    code = "import context_cache.diagrams as d, context_cache.machines as m; print(d.to_mermaid(m.REQUEST))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
