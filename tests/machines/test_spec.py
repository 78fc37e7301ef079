"""A table that contradicts itself is refused while it is built, with a message that says where and what to do."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.backends.base import DrainResult
from context_cache.machines import (
    ALL_MACHINES,
    Couple,
    DeviceAction,
    Drain,
    Guard,
    HostStep,
    MachineSpec,
    Not,
    SpecError,
    State,
    Transition,
    each,
)

LIT = Guard("lit", lambda call: bool(call))
WARM = Guard("warm", lambda call: bool(call))
WRITE = HostStep("write", lambda call: None)
SHOUT = HostStep("shout", lambda call: None, publishes=True)
SEND = DeviceAction("send", lambda call: True)
WIPE = DeviceAction("wipe", lambda call: True, clears=True)
WAIT = Drain("wait", lambda call: DrainResult(ok=True))
TELL = Couple("other", "heard")

OFF, ON = State("off", "dark"), State("on", "bright")
DONE = State("done", "over", final=True)
END = Transition(event="end", source="on", target="done")


def go(**fields: Any) -> Transition:
    """The row that most tests are about: off --go--> on."""
    return Transition(**{"event": "go", "source": "off", "target": "on", **fields})


def lamp(*rows: Transition, states: tuple[State, ...] = (OFF, ON, DONE), **fields: Any) -> MachineSpec:
    return MachineSpec(name="lamp", initial="off", states=states, transitions=rows or (go(), END), **fields)


def refused(*words: str, build: Any) -> None:
    with pytest.raises(SpecError) as caught:
        build()
    message = str(caught.value)
    assert message.startswith("lamp: "), message
    for word in words:
        assert word in message, f"{word!r} is missing from {message!r}"


def test_a_plain_table_is_accepted():
    spec = lamp()
    assert spec.events == ("go", "end")
    assert spec.accepted("off") == ("go",)
    assert spec.accepted("done") == ()
    assert spec.undeclared_pairs() == (("off", "end"), ("on", "go"), ("done", "go"), ("done", "end"))


def test_a_spec_is_a_value():
    """Two tables of one text are equal, and nothing in them can be changed afterwards."""
    assert lamp() == lamp()
    assert lamp() != lamp(go(guards=(LIT,)), END)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        lamp().initial = "on"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        go().target = "off"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        OFF.final = True


# ---- states ----------------------------------------------------------------


def test_an_unknown_initial_state_is_refused():
    refused(
        "initial state 'dim'", "add it",
        build=lambda: MachineSpec(name="lamp", initial="dim", states=(OFF, ON, DONE), transitions=(go(), END)),
    )  # fmt: skip


def test_two_states_of_one_name_are_refused():
    refused("'on' is declared 2 times", "keep one", build=lambda: lamp(states=(OFF, ON, DONE, State("on", "again"))))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (go(source="dim"), "dim --go--> on"),
        (go(target="dim"), "off --go--> dim"),
        (go(steps=(SEND,), on_failure="dim"), "off --go--> on"),
        (go(steps=(WAIT,), on_drain_failure="dim"), "off --go--> on"),
        (go(steps=(SHOUT,), on_publish_failure="dim"), "off --go--> on"),
    ],
    ids=["source", "target", "on_failure", "on_drain_failure", "on_publish_failure"],
)
def test_a_row_that_names_an_unknown_state_is_refused(row, text):
    refused(text, "'dim'", "not declared", "add State('dim', ...) or fix the row", build=lambda: lamp(go(), END, row))


def test_a_state_that_no_row_leads_to_is_refused():
    dim = State("dim", "reachable only from itself")
    loop = Transition(event="stay", source="dim", target="dim")
    refused(
        "no row leads to 'dim' from 'off'", "add one or drop the state",
        build=lambda: lamp(go(), END, loop, states=(OFF, ON, DONE, dim)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        go(steps=(SEND,), on_failure="burnt"),
        go(steps=(WAIT,), on_drain_failure="burnt"),
        go(steps=(SHOUT,), on_publish_failure="burnt"),
    ],
    ids=["on_failure", "on_drain_failure", "on_publish_failure"],
)
def test_a_state_that_only_a_failure_leads_to_is_reachable(row):
    spec = lamp(row, END, states=(OFF, ON, DONE, State("burnt", "by a failure", final=True)))
    assert "burnt" in spec.rows[0].transition.ends


def test_a_row_out_of_a_final_state_is_refused():
    back = Transition(event="back", source="done", target="off")
    refused("done --back--> off", "final", "drop the row or the final mark", build=lambda: lamp(go(), END, back))


def test_a_state_that_no_event_leaves_and_that_is_not_final_is_refused():
    refused("no event leaves 'on'", "add a row or mark it final", build=lambda: lamp(go(), states=(OFF, ON)))


# ---- guards ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ()),
        ((), (LIT,)),
        ((LIT,), (LIT,)),
        ((LIT,), (WARM,)),
        ((LIT,), (Not(WARM),)),
        ((LIT, WARM), (LIT,)),
    ],
    ids=["no guards", "one unguarded", "same guard", "two guards", "not of another", "narrower"],
)
def test_two_rows_that_could_both_fire_are_refused(one, other):
    """(lit) and (not warm) look different, but a call may be both; only g against Not(g) makes rows exclusive."""
    rows = (go(guards=one), END, go(target="done", guards=other))
    refused(
        "rows 0 and 2 both answer 'go' in 'off'", "give one a guard g and the other Not(g)", build=lambda: lamp(*rows)
    )


def test_every_pair_of_rows_is_compared_not_only_neighbours():
    rows = (go(guards=(LIT,)), go(target="off", guards=(Not(LIT),)), END, go(target="done", guards=(LIT, WARM)))
    refused("rows 0 and 3 both answer 'go' in 'off'", build=lambda: lamp(*rows))


def test_rows_with_g_and_not_g_are_accepted():
    spec = lamp(go(guards=(LIT, WARM)), go(target="done", guards=(Not(LIT),)), END)
    assert spec.choices["off", "go"].rows == (spec.rows[1], None, spec.rows[1], spec.rows[0])


@pytest.mark.parametrize("guards", [(LIT, LIT), (LIT, Not(LIT)), (Not(LIT), WARM, Not(LIT))])
def test_one_guard_twice_in_a_row_is_refused(guards):
    refused("off --go", "names one guard twice", "keep one", build=lambda: lamp(go(guards=guards), END))


OTHER_LIT = Guard("lit", lambda call: not call)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"guards": (LIT,)}, {"guards": (OTHER_LIT,)}),
        ({"guards": (LIT,)}, {"guards": (Not(OTHER_LIT),)}),
        ({"steps": (WRITE,)}, {"steps": (HostStep("write", lambda call: None),)}),
        ({"steps": (WRITE,)}, {"steps": (DeviceAction("write", lambda call: True),), "on_failure": "on"}),
        ({"steps": (HostStep("lit", lambda call: None),)}, {"guards": (LIT,)}),
        (
            {"steps": (SEND,), "on_failure": "off", "failure_steps": (HostStep("wipe", lambda call: None),)},
            {"steps": (WIPE,)},
        ),
        (
            {"steps": (SHOUT,), "on_publish_failure": "off", "publish_failure_steps": (WRITE,)},
            {"steps": (HostStep("write", lambda call: None),)},
        ),
        (
            {"steps": (WRITE,)},
            {
                "steps": (SHOUT,),
                "on_publish_failure": "on",
                "publish_failure_steps": (HostStep("write", lambda call: None),),
            },
        ),
    ],
    ids=[
        "guards",
        "negated guard",
        "host steps",
        "kinds of step",
        "step and guard",
        "failure step",
        "publish failure step first",
        "publish failure step second",
    ],
)
def test_a_name_with_two_meanings_is_refused(first, second):
    """A trace names guards and steps; a name with two meanings would make it lie."""
    last = Transition(**{"event": "end", "source": "on", "target": "done", **second})
    refused("'", "in on --end", "means two things", "another name", build=lambda: lamp(go(**first), last))


def test_a_guard_and_its_negation_are_one_meaning():
    lamp(go(guards=(LIT,)), go(target="done", guards=(Not(LIT),)), END)


def test_a_name_with_two_meanings_is_refused_in_on_enter_too():
    states = (OFF, State("on", "bright", on_enter=(HostStep("write", lambda call: None),)), DONE)
    refused(
        "'write'",
        "entering 'on'",
        "means two things",
        "another name",
        build=lambda: lamp(go(steps=(WRITE,)), END, states=states),
    )


# ---- failures --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": (SEND,)}, ("has a device action but no on_failure", "say where its failure leads")),
        ({"steps": (WAIT,)}, ("has a drain but no on_drain_failure", "say where")),
        ({"steps": (SHOUT,)}, ("has a publishing step but no on_publish_failure", "say where")),
        ({"on_failure": "off"}, ("on_failure='off'", "device action", "drop it")),
        ({"steps": (WRITE,), "on_failure": "off"}, ("on_failure='off'", "drop it")),
        ({"steps": (WAIT,), "on_failure": "off", "on_drain_failure": "on"}, ("on_failure='off'", "drop it")),
        ({"steps": (WIPE,), "on_failure": "off"}, ("on_failure='off'", "drop it")),
        ({"steps": (SEND,), "on_failure": "off", "on_drain_failure": "on"}, ("on_drain_failure='on'", "drop it")),
        ({"steps": (WRITE,), "on_publish_failure": "on"}, ("on_publish_failure='on'", "drop it")),
        ({"steps": (WRITE,), "failure_steps": (WRITE,)}, ("failure_steps but no on_failure", "drop the steps")),
        (
            {"steps": (WRITE,), "publish_failure_steps": (WRITE,)},
            ("publish_failure_steps but no on_publish_failure", "name the state"),
        ),
        (
            {"steps": (SEND,), "on_failure": "off", "publish_failure_steps": (WRITE,)},
            ("publish_failure_steps but no on_publish_failure", "name the state"),
        ),
        (
            {"steps": (WRITE,), "on_publish_failure": "off", "publish_failure_steps": (WRITE,)},
            ("on_publish_failure='off'", "not a publishing step", "drop it"),
        ),
        (
            {"steps": (WRITE,), "on_publish_failure": "off", "publish_failure_steps": (SHOUT,)},
            ("on_publish_failure='off'", "not a publishing step", "drop it"),
        ),
        (
            {"steps": (SEND,), "on_failure": "off", "failure_steps": (WAIT,)},
            ("has a drain but no on_drain_failure", "say where"),
        ),
    ],
    ids=[
        "device action without a state", "drain without a state", "publishing without a state", "state without steps",
        "host step cannot fail", "drain is no device action", "clearing upload is tolerated", "no drain",
        "step does not publish", "failure steps without on_failure", "publish failure steps without a state",
        "publish failure steps with another's state", "publish failure steps without publishing",
        "only a publish failure step publishes", "drain among the failure steps",
    ],
)  # fmt: skip
def test_failure_states_and_steps_that_can_fail_belong_together(fields, words):
    refused("off --go--> on", *words, build=lambda: lamp(go(**fields), END))


def test_a_clearing_upload_needs_no_failure_state():
    lamp(go(steps=(WIPE,)), END)


def test_a_drain_among_the_failure_steps_justifies_its_failure_state():
    lamp(go(steps=(SEND,), on_failure="off", failure_steps=(WAIT, WIPE, TELL), on_drain_failure="done"), END)


@pytest.mark.parametrize(
    "fields",
    [{"failure_steps": (SEND,)}, {"failure_steps": (SHOUT,), "on_publish_failure": "off"}],
    ids=["device action", "publishing step"],
)
def test_a_failure_step_that_can_fail_again_is_refused(fields):
    """on_failure is where the row goes *after* its failure steps, so it says nothing about a failure inside them."""
    name = fields["failure_steps"][0].name
    refused(
        "off --go--> on", repr(name), "clearing actions only",
        build=lambda: lamp(go(steps=(SEND,), on_failure="off", **fields), END),
    )  # fmt: skip


def test_steps_after_a_failed_publication_are_accepted():
    row = go(steps=(SHOUT,), on_publish_failure="off", publish_failure_steps=(WRITE,))
    assert [name for _, _, name in lamp(row, END).rows[0].publish_failure_plan] == ["write"]


def test_publishing_again_after_publishing_failed_is_refused():
    refused(
        "off --go--> on", "after publishing failed", "cannot",
        build=lambda: lamp(go(steps=(SHOUT,), on_publish_failure="off", publish_failure_steps=(WRITE, SHOUT)), END),
    )  # fmt: skip


@pytest.mark.parametrize("step", [SEND, WIPE, WAIT], ids=lambda step: step.name)
def test_device_work_after_a_failed_publication_is_refused(step):
    """It could fail again without a state to go to; a drain would even wait. The field is for host steps."""
    refused(
        "off --go--> on", repr(step.name),
        build=lambda: lamp(go(steps=(SHOUT,), on_publish_failure="off", publish_failure_steps=(step,)), END),
    )  # fmt: skip


# ---- machines that follow another -----------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"steps": (WRITE,)}, {"failure_steps": (WRITE,)}, {"publish_failure_steps": (WRITE,)}, {"steps": (TELL,)}],
)
def test_a_row_with_steps_is_refused_in_a_machine_that_only_follows(fields):
    refused(
        "off --go--> on", "lamp only follows switch", "drop them",
        build=lambda: lamp(go(**fields), END, follows="switch"),
    )  # fmt: skip


def test_a_machine_that_follows_may_name_failure_states_without_steps():
    spec = lamp(go(on_failure="off", on_drain_failure="done"), END, follows="switch")
    assert spec.rows[0].transition.ends == ("on", "off", "done")


# ---- derived values --------------------------------------------------------


def test_each_writes_the_same_row_from_several_sources():
    assert each(("off", "on"), event="go", target="on") == (go(), go(source="on"))
    assert each(("off", "on"), event="go") == (go(target="off"), go(source="on", target="on"))


def test_a_row_reads_aloud():
    assert str(go()) == "off --go--> on"
    assert str(go(guards=(LIT, Not(WARM)))) == "off --go [lit, not warm]--> on"
    assert TELL.name == "other.heard"


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_undeclared_pairs_and_declared_pairs_are_everything(spec):
    undeclared = spec.undeclared_pairs()
    assert len(set(undeclared)) == len(undeclared)
    assert not set(undeclared) & set(spec.choices)
    assert len(undeclared) + len(spec.choices) == len(spec.states) * len(spec.events)
    for state in spec.states:
        assert set(spec.accepted(state.name)) == {event for source, event in spec.choices if source == state.name}


# ---- random tables ---------------------------------------------------------

NAMES = ("a", "b", "c")
GUARD_SETS = [
    tuple(wanted)
    for lit in (None, LIT, Not(LIT))
    for warm in (None, WARM, Not(WARM))
    for wanted in [[guard for guard in (lit, warm) if guard is not None]]
]

tables = st.fixed_dictionaries(
    {
        "final": st.sets(st.sampled_from(NAMES)),
        "states": st.integers(1, 3).map(lambda count: NAMES[:count]),
        "rows": st.lists(
            st.builds(
                Transition,
                event=st.sampled_from("xy"),
                source=st.sampled_from(NAMES),
                target=st.sampled_from(NAMES),
                guards=st.sampled_from(GUARD_SETS),
            ),
            max_size=5,
        ),
    }
)


def takes(row: Transition, outcome: dict[str, bool]) -> bool:
    return all(outcome[guard.name] == guard.wanted for guard in row.guards)


def is_sound(states: tuple[str, ...], final: set[str], rows: list[Transition]) -> bool:
    """The rules in other words than the library's: by walking, and by trying all outcomes of the guards."""
    if any(row.source not in states or row.target not in states or row.source in final for row in rows):
        return False
    reached = [states[0]]
    for state in reached:
        reached += [row.target for row in rows if row.source == state and row.target not in reached]
    if set(reached) != set(states):
        return False
    if any(state not in final and all(row.source != state for row in rows) for state in states):
        return False
    for state in states:
        for event in "xy":
            for lit in (False, True):
                for warm in (False, True):
                    outcome = {"lit": lit, "warm": warm}
                    if sum((row.source, row.event) == (state, event) and takes(row, outcome) for row in rows) > 1:
                        return False
    return True


@given(tables)
def test_a_random_table_is_refused_exactly_when_it_is_unsound(table):
    states, rows = table["states"], table["rows"]
    final = table["final"] & set(states)

    def build() -> MachineSpec:
        return MachineSpec(
            name="random",
            initial=states[0],
            states=tuple(State(name, name, final=name in final) for name in states),
            transitions=tuple(rows),
        )

    if not is_sound(states, final, rows):
        with pytest.raises(SpecError, match=r"^random: "):
            build()
        return
    spec = build()
    for (state, event), choice in spec.choices.items():
        for mask, picked in enumerate(choice.rows):
            outcome = dict(choice.outcomes[mask])
            wanting = [r for r in rows if (r.source, r.event) == (state, event) and takes(r, outcome)]
            assert [picked.transition] if picked else wanting == []
