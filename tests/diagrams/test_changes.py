"""What changed between two tables: exactly that, in words and in the picture."""

import itertools
import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.diagrams.change_pages import changes_dot, changes_text
from context_cache.diagrams.changes import compare, compare_all
from context_cache.diagrams.table import Step, as_table
from context_cache.machines import ALL_MACHINES, REQUEST, VIEW

TABLES = {spec.name: as_table(spec) for spec in ALL_MACHINES}
OLD = TABLES["request"]


def renumbered(rows):
    return tuple(attrs.evolve(row, row=number) for number, row in enumerate(rows))


def with_rows(change):
    """The request's table with ``change`` made to the list of its rows."""
    rows = list(OLD.rows)
    change(rows)
    return attrs.evolve(OLD, rows=renumbered(rows))


def with_row(number, **fields):
    return with_rows(lambda rows: rows.__setitem__(number, attrs.evolve(rows[number], **fields)))


def with_state(name, **fields):
    states = tuple(attrs.evolve(state, **fields) if state.name == name else state for state in OLD.states)
    return attrs.evolve(OLD, states=states)


def text(new, old=OLD):
    change = compare(old, new)
    return changes_text([] if change.kind == "same" else [change]).splitlines()


def marked(dot):
    """(badge, the words behind it) for every line that the overlay gave a colour."""
    pairs = re.findall(r'<TR><TD BGCOLOR="#(?:7ee787|ff9492|f2cc60)">(.*?)</TD><TD ALIGN="LEFT">(.*?)</TD></TR>', dot)
    return [(badge, re.sub("<.*?>", "", words)) for badge, words in pairs]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_does_not_differ_from_itself(name):
    assert compare(TABLES[name], TABLES[name]).kind == "same"
    assert compare_all(TABLES, TABLES) == ()


@given(st.randoms())
def test_the_order_of_states_and_rows_is_layout(random):
    rows, states = list(OLD.rows), list(OLD.states)
    random.shuffle(rows)
    random.shuffle(states)
    assert compare(OLD, attrs.evolve(OLD, rows=renumbered(rows), states=tuple(states))).kind == "same"


@pytest.mark.parametrize("place", [0, 9, 40, 87])
def test_an_inserted_row_is_one_added_row_wherever_it_stands(place):
    """How it could go wrong: matched by number, every row behind it would be a changed one."""
    row = attrs.evolve(OLD.rows[9], event="probe", guards=("ready",), steps=(Step("enqueue", "look"),))
    new = with_rows(lambda rows: rows.insert(place, row))
    assert text(new) == [
        "request: 1 row added",
        f"  + row {place}: settled --probe [ready]--> seating / look",
    ]
    shown = marked(changes_dot([compare(OLD, new)], "t"))
    assert {badge for badge, _ in shown} == {f"{place} added"}
    said = {words.partition(" / ")[0] for _, words in shown}
    assert said == {"probe [ready]", "device error: stays", "drain failed → quarantined"}


def test_a_removed_row_is_one_removed_row():
    new = with_rows(lambda rows: rows.pop(33))
    assert text(new) == [
        "request: 1 row removed",
        "  - row 33: settled --prepare_decode_step [not growth_possible, only_sequence]--> finishing",
    ]
    # In the box of the state, and on the arrow between the phases.
    assert marked(changes_dot([compare(OLD, new)], "t")) == [
        ("old 33 removed", "prepare_decode_step [not growth_possible, only_sequence] → finishing"),
        ("old 33 removed", "prepare_decode_step [not growth_possible, only_sequence]"),
    ]


def test_changed_steps_say_which_and_where():
    steps = list(OLD.rows[17].steps)
    steps.insert(2, Step("enqueue", "zero_pages"))
    del steps[3]
    new = with_row(17, steps=tuple(steps))
    assert text(new) == [
        "request: 1 row changed",
        "  ~ row 17: settled --prepare_decode_step [growth_possible, view_current]--> decoding",
        "      steps: - upload_base_rows; + zero_pages after grow",
    ]
    (shown,) = marked(changes_dot([compare(OLD, new)], "t"))
    assert shown[0] == "17 changed"
    assert shown[1].startswith("prepare_decode_step [growth_possible, view_current] / ")


def test_reordered_steps_are_a_change_of_order_only():
    steps = OLD.rows[38].steps
    assert text(with_row(38, steps=tuple(reversed(steps))))[2] == (
        "      steps reordered: publish / apply_advances, was apply_advances / publish"
    )


def test_a_first_step_is_said_to_be_first():
    assert text(with_row(52, steps=(Step("wait", "drain"), *OLD.rows[52].steps)))[2] == "      steps: + drain first"


def test_a_step_of_another_kind_is_a_change():
    steps = tuple(attrs.evolve(step, kind="host") if step.name == "publish" else step for step in OLD.rows[38].steps)
    assert text(with_row(38, steps=steps))[2] == "      steps: publish is of kind host, was publish"


def test_another_target_is_drawn_beside_the_old_one():
    new = with_row(41, target="seating", on_publish_failure="seating")
    assert text(new)[1:] == [
        "  ~ row 41: decoding_frozen --complete_decode_step--> seating",
        "      leads to seating, was settled",
        "      a failed publication leads to seating, was settled",
    ]
    shown = marked(changes_dot([compare(OLD, new)], "t"))
    assert [badge for badge, _ in shown] == ["41 changed", "41 changed", "old 41 until now", "old 41 until now"]


def test_another_target_does_not_mark_the_failures_that_stay():
    """How it could go wrong: the old row is drawn whole, and what it shares with the new one looks like it is gone."""
    shown = marked(changes_dot([compare(OLD, with_row(40, target="seating"))], "t"))
    assert sorted(badge for badge, _ in shown) == ["40 changed", "old 40 until now"]
    assert all(words.startswith("complete_decode_step [captures_planned]") for _, words in shown)
    assert not any("also if" in words for _, words in shown)


def test_another_failure_state_is_marked_on_the_failure_and_on_the_row():
    new = with_row(1, on_failure="quarantined")
    assert text(new)[2] == "      a device error leads to quarantined, was broken"
    assert marked(changes_dot([compare(OLD, new)], "t")) == [
        ("1 changed", "prepare_prefill / A"), ("1 changed", "device error"), ("old 1 until now", "device error"),
    ]  # fmt: skip


def test_other_steps_after_a_failure_are_marked_on_the_failure():
    shown = marked(changes_dot([compare(OLD, with_row(1, failure_steps=(Step("wait", "drain"),)))], "t"))
    assert shown == [("1 changed", "prepare_prefill / A"), ("1 changed", "device error / drain")]


def test_a_failure_that_a_row_no_longer_has_is_drawn_as_the_old_arrow():
    new = with_row(54, steps=OLD.rows[52].steps, on_drain_failure=None)
    dot = changes_dot([compare(OLD, new)], "t")
    assert ("old 54 until now", "drain failed") in marked(dot)
    (arrow,) = re.findall(r"^s_prefilling -> s_quarantined \[.*", dot, flags=re.MULTILINE)
    assert "style=dashed" in arrow


@pytest.mark.parametrize(
    ("guards", "said"),
    [
        (("growth_possible",), "guards: - view_current"),
        (("growth_possible", "view_current", "quiet"), "guards: + quiet after view_current"),
    ],
)
def test_changed_guards_are_a_changed_row_and_not_another_row(guards, said):
    lines = text(with_row(17, guards=guards))
    assert lines[0] == "request: 1 row changed"
    assert lines[2] == f"      {said}"


def test_guards_in_another_order_are_the_same_guards():
    """All of them have to hold; even when the row does something else now and leads somewhere else."""
    assert compare(OLD, with_row(17, guards=("view_current", "growth_possible"))).kind == "same"
    new = with_row(17, guards=("view_current", "growth_possible"), target="seating", steps=(), on_failure=None)
    assert text(new)[0] == "request: 1 row changed"


def test_a_row_that_is_split_by_a_guard_is_one_changed_and_one_added():
    def split(rows):
        rows[0] = attrs.evolve(rows[0], guards=("ready",))
        rows.insert(1, attrs.evolve(rows[0], guards=("not ready",), target="released", steps=()))

    assert text(with_rows(split)) == [
        "request: 1 row added, 1 row changed",
        "  + row 1: new --begin_request [not ready]--> released",
        "  ~ row 0: new --begin_request [ready]--> admitted",
        "      guards: + ready",
    ]


def test_rows_for_one_event_that_share_nothing_else_are_two_rows():
    new = with_row(0, guards=("ready",), target="released", steps=())
    assert text(new)[0] == "request: 1 row added, 1 row removed"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hot": False}, "is no longer hot"),
        ({"work_ended": None}, "device work ended none, was 'by_runtime_sync'"),
        ({"publish_failure_steps": ()}, "after a failed publication: - retire_reservations"),
        ({"failure_steps": (Step("wait", "drain"),)}, "after a device error: + drain"),
    ],
)
def test_whatever_a_row_does_is_compared(fields, said):
    assert text(with_row(7, **fields))[2] == f"      {said}"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outstanding": True}, "device work is outstanding"),
        ({"final": True}, "is final"),
        ({"phase": "resting"}, "phase 'resting', was 'executing'"),
        ({"on_enter": ()}, "on entry: - execution.give_back"),
    ],
)
def test_whatever_a_state_does_is_compared(fields, said):
    new = with_state("settled", **fields)
    assert text(new) == ["request: 1 state changed", f"  ~ state settled: {said}"]
    assert "<B>settled</B> changed" in changes_dot([compare(OLD, new)], "t")


@pytest.mark.parametrize("word", ["meaning", "holds", "region"])
def test_how_a_state_is_described_is_wording_only(word):
    new = with_state("settled", **{word: "other words"})
    assert compare(OLD, new).kind == "wording"
    first, second = text(new)
    assert first == "request: wording only"
    assert second.startswith(f"  wording only: state settled: {word} 'other words', was ")
    dot = changes_dot([compare(OLD, new)], "t")
    assert marked(dot) == []
    assert "<B>settled</B> wording" in dot


def test_every_field_of_a_row_and_a_state_is_compared():
    """A field that the table gets later must not be left out of a diff."""
    row = {field.name for field in attrs.fields(type(OLD.rows[0]))}
    assert row == {
        "row", "event", "source", "target", "guards", "steps", "failure_steps", "publish_failure_steps", "on_failure",
        "on_drain_failure", "on_publish_failure", "work_ended", "hot",
    }  # fmt: skip
    state = {field.name for field in attrs.fields(type(OLD.states[0]))}
    assert state == {"name", "phase", "region", "meaning", "holds", "outstanding", "final", "on_enter"}


def test_added_and_removed_states_are_drawn():
    gone = attrs.evolve(OLD, states=tuple(s for s in OLD.states if s.name != "poisoned"), rows=renumbered(
        attrs.evolve(row, on_drain_failure="quarantined") if row.source == "quarantined" else row
        for row in OLD.rows if row.source != "poisoned"
    ))  # fmt: skip
    lines = text(gone)
    assert lines[0] == "request: 1 state removed, 1 row removed, 1 row changed"
    assert lines[1] == "  - state poisoned: the drain failed again at shutdown; a later shutdown may succeed"
    assert "<B>poisoned</B> removed" in changes_dot([compare(OLD, gone)], "t")
    lines = text(OLD, gone)
    assert lines[0] == "request: 1 state added, 1 row added, 1 row changed"
    assert "<B>poisoned</B> added" in changes_dot([compare(gone, OLD)], "t")


def test_added_and_removed_machines():
    without = {name: table for name, table in TABLES.items() if name != "view"}
    (gone,) = compare_all(TABLES, without)
    assert changes_text([gone]) == "view: machine removed (3 states, 8 rows)"
    (come,) = compare_all(without, TABLES)
    assert changes_text([come]) == "view: machine added (3 states, 8 rows)"
    assert len(marked(changes_dot([come], "t"))) >= len(VIEW.transitions)


def test_a_new_initial_state_or_name_is_a_change():
    new = attrs.evolve(OLD, initial="admitted", name="job")
    assert text(new) == ["job: changed", "  ~ name 'job', was 'request'", "  ~ initial state 'admitted', was 'new'"]


def test_a_new_initial_state_is_marked_on_both_states_and_in_the_legend():
    dot = changes_dot([compare(OLD, attrs.evolve(OLD, initial="admitted", name="job"))], "t")
    assert "<B>admitted</B> initial now" in dot
    assert "<B>new</B> initial until now" in dot
    legend = dot.partition("start [")[0]
    assert "name 'job', was 'request'" in legend
    assert "initial state 'admitted', was 'new'" in legend


def test_names_from_a_file_reach_no_terminal_as_they_are():
    """A lone surrogate cannot be printed, and a control character would be obeyed."""
    row = attrs.evolve(OLD.rows[0], event="\ud800 \x1b[31m \x9b31m\n", guards=("a\tb",))
    lines = text(with_rows(lambda rows: rows.append(row)))
    assert lines == [
        "request: 1 row added",
        "  + row 87: new --\ufffd \u241b[31m \ufffd31m\u240a [a\u2409b]--> admitted / take_leases",
    ]


def test_several_machines_are_one_picture():
    view = attrs.evolve(TABLES["view"], rows=renumbered(TABLES["view"].rows[1:]))
    changes = compare_all(TABLES, {**TABLES, "view": view, "request": with_row(7, hot=False)})
    assert [change.name for change in changes] == ["request", "view"]
    dot = changes_dot(changes, "old to new")
    assert dot.count("digraph") == 1
    assert "old to new" in dot
    assert [badge for badge, _ in marked(dot)] == ["7 changed", "old 0 removed"]
    identifiers = re.findall(r"^(d\d_\w+) \[", dot, flags=re.MULTILINE)
    assert len(identifiers) == len(set(identifiers))
    assert {name.partition("_")[0] for name in identifiers} == {"d0", "d1"}


@given(st.sets(st.integers(0, 86), max_size=12), st.sets(st.integers(0, 86), max_size=12))
def test_rows_taken_away_on_either_side_are_exactly_those(mine, theirs):
    old = attrs.evolve(OLD, rows=renumbered(row for row in OLD.rows if row.row not in mine))
    new = attrs.evolve(OLD, rows=renumbered(row for row in OLD.rows if row.row not in theirs))
    change = compare(old, new)
    counted = len(change.rows_added) + len(change.rows_changed), len(change.rows_removed) + len(change.rows_changed)
    assert counted == (len(mine - theirs), len(theirs - mine))


def test_the_request_is_matched_completely_with_itself_under_any_numbering():
    for shift in (1, 30):
        rows = [*itertools.islice(OLD.rows, shift, None), *OLD.rows[:shift]]
        assert compare(OLD, attrs.evolve(OLD, rows=renumbered(rows))).kind == "same"
    assert len(REQUEST.transitions) == 87
