"""The drawing of a machine: comes from its table, folds rows, loses none of them and invents none."""

import collections

import pytest

from context_cache.diagrams import draw
from context_cache.diagrams.drawing import FAILURE
from context_cache.diagrams.phases import draw_phases
from context_cache.diagrams.table import as_table
from context_cache.machines import ALL_MACHINES, REQUEST

EVERY = pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)


def successes(drawing):
    """Row -> how often it is drawn: on an arrow, or in a box when it stays there."""
    lines = [line for edge in drawing.edges for line in edge.lines]
    # A line in a box that says where to repeats a row of an arrow between phases.
    lines += [line for node in drawing.nodes for line in node.lines if not line.to]
    return collections.Counter(row for line in lines if line.kind != FAILURE for row in line.rows)


def failures(drawing):
    """(row, cause) -> how often it is drawn: on an arrow, in a box, or beside the success that it shares the end of."""
    found = collections.Counter()
    for edge in drawing.edges:
        for line in edge.lines:
            found.update((row, line.text) for row in line.rows if line.kind == FAILURE)
    for line in drawing.lines:
        found.update((also.row, also.cause) for also in line.also)
    for node in drawing.nodes:
        for line in node.lines:
            found.update((row, line.text) for row in line.rows if line.kind == FAILURE)
    return found


@EVERY
def test_every_row_is_drawn_exactly_once(spec):
    """C125. Loops, rows without steps and parallel rows included; folding a whole phase must not lose one either."""
    assert successes(draw(spec)) == collections.Counter(range(len(spec.transitions)))


@EVERY
def test_every_failure_of_a_row_is_drawn_exactly_once(spec):
    table = as_table(spec)
    wanted = collections.Counter((row.row, cause) for row in table.rows for cause, _ in row.failures)
    assert failures(draw(spec)) == wanted


@EVERY
def test_no_arrow_is_invented(spec):
    table = as_table(spec)
    phase_of = {state.name: state.phase for state in table.states}
    for edge in draw(spec).edges:
        for line in edge.lines:
            for number in line.rows:
                row = table.rows[number]
                assert edge.source == (phase_of[row.source] if edge.from_phase else row.source)
                ends = [end for cause, end in row.failures if cause == line.text] if edge.failure else [row.target]
                assert edge.target in ([phase_of[end] for end in ends] if edge.to_phase else ends)


@EVERY
def test_a_shared_failure_is_said_in_the_box_of_each_state_that_has_it(spec):
    drawing = draw(spec)
    for shared in drawing.shared:
        sources = {
            node.name for node in drawing.nodes
            if node.phase == shared.phase and node.name != shared.target
            for line in node.lines if (line.text, line.to) == (shared.cause, shared.target)
        }  # fmt: skip
        assert sources == set(shared.sources)
        assert not any(
            edge.source in shared.sources and edge.target == shared.target
            for edge in drawing.edges for line in edge.lines if line.text == shared.cause
        )  # fmt: skip


def test_parallel_rows_are_one_arrow_with_a_line_each(copier):
    (edge,) = [edge for edge in draw(copier).edges if (edge.source, edge.target) == ("idle", "copying")]
    assert [(line.rows, line.text, line.guards) for line in edge.lines] == [
        ((0,), "start", ("ready", "not big")),
        ((1,), "start", ("ready", "big")),
    ]
    assert [[step.name for step in line.steps] for line in edge.lines] == [["plan", "copy"], ["plan", "copy", "copy"]]


def test_an_event_of_every_state_of_a_phase_is_one_arrow_from_the_phase(copier):
    (edge,) = [edge for edge in draw(copier).edges if edge.from_phase]
    assert (edge.source, edge.target) == ("busy", "gone")
    assert [(line.rows, line.text, line.kind) for line in edge.lines] == [((5, 6), "close", "wait")]


def test_a_row_that_stays_is_a_line_in_its_box(copier):
    drawing = draw(copier)
    (idle,) = [node for node in drawing.nodes if node.name == "idle"]
    assert [(line.rows, line.text) for line in idle.lines if line.kind != FAILURE] == [((2,), "start")]
    assert not any(edge.source == edge.target for edge in drawing.edges)


def test_the_kind_of_a_line_is_the_most_that_its_rows_ask_of_the_device(copier):
    kinds = {line.rows: line.kind for line in draw(copier).lines if line.kind != FAILURE}
    assert (kinds[0,], kinds[3,], kinds[5, 6]) == ("enqueue", "host", "wait")


def test_entering_a_state_that_offers_an_event_is_an_arc_to_the_other_machine(copier):
    assert [(arc.source, arc.machine, arc.event) for arc in draw(copier).arcs] == [("stuck", "alarm", "ring")]


def test_what_most_states_offer_on_entry_is_said_in_their_boxes_and_not_an_arc_each():
    drawing = draw(REQUEST)
    assert {(arc.source, arc.machine, arc.event) for arc in drawing.arcs} == {
        ("quarantined", "coordinator", "drain_failed"),
        ("poisoned", "coordinator", "drain_failed"),
    }
    (broken,) = [node for node in drawing.nodes if node.name == "broken"]
    assert [step.name for step in broken.entry] == ["execution.give_back", "view.forget"]


def test_a_small_machine_has_its_steps_in_full_and_a_large_one_a_key(copier):
    assert draw(copier).keys == {}
    drawing = draw(REQUEST)
    shown = [line.steps for line in drawing.lines] + [also.steps for line in drawing.lines for also in line.also]
    long = {run for run in shown if len(run) > 1}
    assert long == set(drawing.keys)
    assert list(drawing.keys.values())[:3] == ["A", "B", "C"]


@EVERY
def test_every_line_says_the_guards_and_the_steps_of_each_of_its_rows(spec):
    """How it could go wrong: rows with opposite guards share a line, and only one of them does what it says."""
    table = as_table(spec)
    for line in draw(spec).lines:
        rows = [table.rows[number] for number in line.rows]
        if line.kind == FAILURE:
            assert {row.failure_steps_of(line.text) for row in rows} == {line.steps}
        else:
            assert {(row.guards, row.steps, row.work_ended or "") for row in rows} == {
                (line.guards, line.steps, line.ended)
            }


def test_steps_after_a_failure_that_ends_where_success_does_are_shown():
    (line,) = [line for line in draw(REQUEST).lines if line.rows == (7,) and line.also]
    assert [(also.row, also.cause, [step.name for step in also.steps]) for also in line.also] == [
        (7, "publish failed", ["retire_reservations"])
    ]


def test_an_arrow_of_a_phase_says_which_states_do_what():
    """Whether `finish` waits for the device depends on the state that it comes from."""
    (edge,) = [edge for edge in draw(REQUEST).edges if (edge.source, edge.target) == ("executing", "released")]
    (mine,) = [line for line in edge.lines if line.text == "finish" and "broken" in line.sources]
    assert mine.steps[0].name == "drain"
    table = as_table(REQUEST)
    for line in edge.lines:
        assert set(line.sources) == {table.rows[number].source for number in line.rows}
    (moves,) = [edge for edge in draw(REQUEST).edges if edge.to_phase]
    assert [line.sources for line in moves.lines] == [()]


def test_around_a_state_shows_its_rows_and_no_others():
    drawing = draw(REQUEST, around="compacting")
    rows = [row for row in REQUEST.rows if "compacting" in (row.transition.source, row.transition.target)]
    assert successes(drawing) == collections.Counter(row.number for row in rows)
    assert all("compacting" in (edge.source, edge.target) for edge in drawing.edges)
    assert drawing.phases == ()
    assert drawing.keys == {}


def test_the_phases_of_a_request_are_what_a_reader_meets_first():
    drawing = draw_phases(REQUEST)
    assert [node.name for node in drawing.nodes] == [
        "new", "admitted", "executing", "finishing", "quarantined", "poisoned", "released",
    ]  # fmt: skip
    assert successes(drawing) == collections.Counter(range(len(REQUEST.transitions)))
    work = {node.name: node.partly for node in drawing.nodes if node.partly}
    assert work == {"executing": "work outstanding in 9 of 11", "finishing": "work outstanding in 3 of 5"}
    assert ("executing", "quarantined") in {(edge.source, edge.target) for edge in drawing.edges if edge.failure}
