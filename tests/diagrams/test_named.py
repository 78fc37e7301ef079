"""Pictures in which a page can find things: every state, every arrow and every label of rows has an id of its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import attrs
import pytest

from context_cache.diagrams import to_dot
from context_cache.diagrams.engines import pure_version, render
from context_cache.diagrams.table import Step, as_table
from context_cache.machines import ALL_MACHINES, REQUEST, MachineSpec, State, Transition

MACHINES = pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
ODD = ("a b", "gel\u00f6st", 'x"y', "<lambda>", "a&b", "tail-1--2")


def groups(spec):
    """Id -> classes of every group of the picture that a page may look for."""
    if pure_version() is None:
        pytest.skip("needs graphviz-pure, which comes with the extra draw")
    tree = ElementTree.fromstring(render(to_dot(spec, named=True), "svg", "pure"))
    found = [(one.get("id"), (one.get("class") or "").split()) for one in tree.iter() if one.get("id")]
    names = [name for name, _ in found]
    assert len(names) == len(set(names))
    return dict(found)


def rows_of(name):
    return {int(number) for number in re.match(r"(?:a_)?(?:rows|label)-([\d-]+)--", name)[1].split("-")}


@MACHINES
def test_every_state_can_be_found(spec):
    found = groups(spec)
    for state in spec.states:
        assert "node" in found[f"state-{state.name}"]


@MACHINES
def test_every_row_is_on_an_arrow_or_a_label(spec):
    named = [name for name in groups(spec) if re.match("(rows|a_label)-", name)]
    assert {row for name in named for row in rows_of(name)} == set(range(len(spec.transitions)))


@MACHINES
def test_the_way_of_an_error_is_marked(spec):
    for name, classes in groups(spec).items():
        if name.startswith("rows-"):
            assert "edge" in classes
            failing = [row for row in rows_of(name) if len(spec.transitions[row].ends) > 1]
            assert failing or "failure" not in classes


def test_an_arrow_names_every_row_of_a_failure_whatever_is_done_after_it():
    """How it could go wrong: rows with other steps after the failure are another line of the arrow, and one is lost."""
    table = as_table(REQUEST)
    row = attrs.evolve(table.rows[18], failure_steps=(Step("wait", "drain"),))
    text = to_dot(attrs.evolve(table, rows=(*table.rows[:18], row, *table.rows[19:])), named=True)
    (arrow,) = re.findall(r"^s_settled -> s_decode_5f_retry \[.*", text, flags=re.MULTILINE)
    assert 'class="failure device-error-17-18"' in arrow


@MACHINES
def test_every_failure_of_a_row_is_found_by_its_cause(spec):
    """On one arrow, or where it leads nowhere new on a label; a failure that ends where success does is on neither."""
    found = groups(spec)
    for number, row in enumerate(as_table(spec).rows):
        for cause, end in row.failures:
            word = cause.replace(" ", "-")
            arrows = [
                one for name, classes in found.items() if name.startswith("rows-") for one in classes
                if one.startswith(f"{word}-") and number in map(int, one.removeprefix(f"{word}-").split("-"))
            ]  # fmt: skip
            labels = [name for name in found if name.startswith("a_label-") and f"--failure-{word}-" in name
                      and number in rows_of(name)]  # fmt: skip
            assert len(arrows) == (end not in (row.source, row.target)), (number, cause)
            assert len(labels) == (end != row.target), (number, cause)


@MACHINES
def test_without_being_asked_for_there_are_no_names(spec):
    assert not re.search(r'\b(id|ID)="', to_dot(spec))


def test_a_state_with_an_odd_name_is_found_by_it():
    states = (State("start", ""), *(State(name, "", final=True) for name in ODD))
    rows = tuple(Transition(event=f"to{at}", source="start", target=name) for at, name in enumerate(ODD))
    found = groups(MachineSpec(name="odd", initial="start", states=states, transitions=rows))
    assert {name for name in found if name.startswith("state-")} == {f"state-{state.name}" for state in states}
