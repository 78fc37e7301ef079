"""The tables say what the written rules say. The rows below are the rules, written down a second time, in their words.

One paragraph for each row of the request's table. Actions for the draft stand where they are taken for a paired
request; ``test_runner`` shows that any other skips them. A change of a table that is not made here too fails, in both
directions.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from context_cache.machines import (
    ALL_MACHINES,
    CAPTURE,
    CAPTURE_CODES,
    COORDINATOR,
    EXECUTION,
    REQUEST,
    SEQUENCE,
    STATE_CODES,
    VIEW,
    Couple,
    DeviceAction,
    Drain,
    HostStep,
    ask_table,
)
from context_cache.machines.sequence import BRINGS_TOKENS, NAMED, REFUSED

WORDS = {
    "acquire all": "take_leases",
    "bind rows": "bind_rows",
    "bind row": "bind_joiner",
    "upload base rows": "upload_base_rows",
    "upload draft rows": "upload_draft_rows",
    "restore or zero": "zero_recurrent, restore_recurrent, restore_partial",
    "reset base lengths": "reset_base_lengths",
    "reset draft lengths": "reset_draft_lengths",
    "install base lengths": "install_base_lengths",
    "install draft lengths": "install_draft_lengths",
    "compact base lengths": "compact_base_lengths",
    "compact draft lengths": "compact_draft_lengths",
    "captures": "stage_captures, capture_recurrent, capture_partial, mark_captured",
    "captures with hidden row": "stage_captures, capture_recurrent, capture_partial, capture_hidden, mark_captured",
    "copy hidden row": "restore_hidden",
    "apply advances": "apply_advances",
    "release hit pins": "release_hit_pins",
    "freeze": "freeze",
    "publish": "publish",
    "publish frozen": "publish_frozen",
    "publish frozen and completed": "publish",
    "retire reservations": "retire_reservations",
    "grow, set rows": "grow",
    "mapping copy": "copy_mapping",
    "clear retired rows": "unbind_retired",
    "clear retired resident state": "clear_resident_state",
    "permute order, release retired": "retire",
    "drain": "drain",
    "clear row": "unbind_joiner",
    "clear bound rows": "unbind_rows",
    "upload cleared rows": "upload_cleared_rows",
    "upload cleared draft rows": "upload_cleared_draft_rows",
    "release the joiner": "release_joiner",
    "release": "release",
}

WAY_OUT = "clear bound rows; upload cleared rows; upload cleared draft rows; release"
JOINER_LEAVES = "drain; clear row; upload cleared rows; release the joiner"
INSTALL = "install base lengths; install draft lengths"
GROWS = "grow, set rows; upload base rows; upload draft rows"
COMPACTS = (
    "clear retired rows; upload base rows; upload draft rows; compact base lengths; compact draft lengths; "
    "clear retired resident state; drain; permute order, release retired"
)
OWING = "prefill_frozen decoding_frozen decode_retry_frozen finishing_prefill_frozen finishing_retry_frozen"

# states | event | guards | steps | next | on failure. "same" is the state that the row comes from, "retired" says that
# reservations are retired after a failed publication.
ROWS = f"""
new | begin_request | | acquire all | admitted |
admitted | prepare_prefill | | bind rows; upload base rows; upload draft rows; restore or zero; reset base lengths;
    reset draft lengths | prefilling | DE: broken
prefilling | enqueue_prefill_captures | plain_checkpoint | captures | prefilling | DE: broken
prefilling | enqueue_prefill_captures | not plain_checkpoint | | prefilling |
prefilling | publish_mtp_endpoint | captures_planned | captures with hidden row; drain; publish; retire reservations
    | prefilling | DE: broken, drain: quarantined, publish: prefilling, retired
prefilling | publish_mtp_endpoint | not captures_planned | | prefilling |
prefilling | restore_mtp_boundary | | copy hidden row | prefilling | DE: prefilling
prefilling | finalize_prefill | not frozen_policy | apply advances; release hit pins; publish; retire reservations
    | settled | publish: settled, retired
prefilling | finalize_prefill | frozen_policy | apply advances; freeze | prefill_frozen |

settled seating | admit_sequence | view_current | bind row; upload base rows | seating | DE: same, drain: quarantined
settled seating | admit_sequence | not view_current | {INSTALL}; bind row; upload base rows | seating
    | DE: same, drain: quarantined
seating | finalize_sequence_admission | not joiner_waits | apply advances; publish | settled | publish: settled
seating | finalize_sequence_admission | joiner_waits | apply advances; publish | seating | publish: seating
seating | retract_sequence_admission | not joiner_waits | {JOINER_LEAVES} | settled | drain: quarantined
seating | retract_sequence_admission | joiner_waits | {JOINER_LEAVES} | seating | drain: quarantined

settled seating decode_retry | prepare_decode_step | growth_possible, view_current | {GROWS}
    | decoding | DE: decode_retry
settled seating decode_retry | prepare_decode_step | growth_possible, not view_current
    | {INSTALL}; {GROWS} | decoding | DE: decode_retry
prefill_frozen | prepare_decode_step | growth_possible | {GROWS} | decoding_frozen | DE: decode_retry_frozen
settled_frozen | prepare_decode_step | growth_possible | {INSTALL}; {GROWS}
    | decoding_frozen | DE: decode_retry_frozen
decode_retry_frozen | prepare_decode_step | growth_possible, view_current | {GROWS}
    | decoding_frozen | DE: decode_retry_frozen
decode_retry_frozen | prepare_decode_step | growth_possible, not view_current
    | {INSTALL}; {GROWS} | decoding_frozen | DE: decode_retry_frozen
settled seating prefill_frozen settled_frozen decode_retry decode_retry_frozen | prepare_decode_step
    | not growth_possible, not only_sequence | | same |
settled | prepare_decode_step | not growth_possible, only_sequence | | finishing |
settled_frozen | prepare_decode_step | not growth_possible, only_sequence | | finishing_frozen |
prefill_frozen | prepare_decode_step | not growth_possible, only_sequence | | finishing_prefill_frozen |
decode_retry | prepare_decode_step | not growth_possible, only_sequence | | finishing_retry |
decode_retry_frozen | prepare_decode_step | not growth_possible, only_sequence | | finishing_retry_frozen |
decoding | complete_decode_step | not captures_planned, not joiner_waits | apply advances; publish | settled
    | publish: settled
decoding | complete_decode_step | not captures_planned, joiner_waits | apply advances; publish | seating
    | publish: seating
decoding | complete_decode_step | captures_planned | apply advances; captures; drain; publish; retire reservations
    | settled | DE: broken, drain: quarantined, publish: settled, retired
decoding_frozen | complete_decode_step | | apply advances; publish frozen and completed | settled | publish: settled

settled seating | begin_batch_compaction | view_current | mapping copy | compacting | DE: broken
settled seating | begin_batch_compaction | not view_current | {INSTALL}; mapping copy | compacting | DE: broken
prefill_frozen | begin_batch_compaction | | drain; publish frozen; mapping copy | compacting
    | drain: quarantined, publish: settled_frozen, DE: broken
settled_frozen | begin_batch_compaction | | publish frozen; {INSTALL}; mapping copy | compacting
    | publish: settled_frozen, DE: broken
compacting | compact_batch | survivors_remain, not joiner_waits | {COMPACTS} | settled
    | DE: broken, drain: quarantined
compacting | compact_batch | survivors_remain, joiner_waits | {COMPACTS} | seating | DE: broken, drain: quarantined
compacting | compact_batch | not survivors_remain | {COMPACTS} | finishing | DE: broken, drain: quarantined

admitted | finish drop | | release | released |
settled finishing | finish drop | | {WAY_OUT} | released |
prefilling seating decoding decode_retry compacting broken finishing_retry | finish drop | | drain; {WAY_OUT} | released
    | drain: quarantined
settled_frozen finishing_frozen | finish | | publish frozen; {WAY_OUT} | released | publish: same
settled_frozen finishing_frozen | drop | | {WAY_OUT} | released |
prefill_frozen decoding_frozen decode_retry_frozen | finish | | drain; publish frozen; {WAY_OUT} | released
    | drain: quarantined, publish: settled_frozen
finishing_prefill_frozen finishing_retry_frozen | finish | | drain; publish frozen; {WAY_OUT} | released
    | drain: quarantined, publish: finishing_frozen
{OWING} | drop | | drain; {WAY_OUT} | released | drain: quarantined
quarantined poisoned | shutdown | | drain; {WAY_OUT} | released | drain: poisoned
"""


class Rule(NamedTuple):
    """One row, without its couplings."""

    source: str
    event: str
    guards: frozenset[str]
    steps: tuple[str, ...]
    target: str
    failures: frozenset[tuple[str, str]]
    after_publishing: tuple[str, ...] = ()


def named(steps: str) -> tuple[str, ...]:
    return tuple(step for words in steps.split("; ") if words for step in WORDS[words].split(", "))


def rules(text: str) -> list[Rule]:
    found = []
    for line in text.replace("\n    ", " ").strip().splitlines():
        if not line:
            continue
        states, events, guards, steps, target, failures = (cell.strip() for cell in line.split("|"))
        for state in states.split():
            ends = [end for end in failures.replace("same", state).split(", ") if end]
            retired = "retired" in ends
            found += [
                Rule(
                    state,
                    event,
                    frozenset(filter(None, guards.split(", "))),
                    named(steps),
                    state if target == "same" else target,
                    frozenset(tuple(end.split(": ")) for end in ends if end != "retired"),
                    ("retire_reservations",) if retired else (),
                )
                for event in events.split()
            ]
    return found


def failures_of(row) -> frozenset[tuple[str, str]]:
    ends = {"DE": row.on_failure, "drain": row.on_drain_failure, "publish": row.on_publish_failure}
    return frozenset((cause, end) for cause, end in ends.items() if end is not None)


def in_words(row) -> Rule:
    return Rule(
        row.source,
        row.event,
        frozenset(str(guard) for guard in row.guards),
        tuple(step.name for step in row.steps if not isinstance(step, Couple)),
        row.target,
        failures_of(row),
        tuple(step.name for step in row.publish_failure_steps),
    )


def couplings(steps) -> list[str]:
    return [step.name for step in steps if isinstance(step, Couple)]


def all_steps(row):
    return (*row.steps, *row.failure_steps, *row.publish_failure_steps)


# ---- the request -----------------------------------------------------------

RULES = rules(ROWS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.source}-{rule.event}-{'-'.join(sorted(rule.guards))}")
def test_every_written_row_is_in_the_request_table(rule):
    """Steps are compared in order: "drain, clear, upload, release" is the rule, not its members."""
    same = [in_words(row) for row in REQUEST.transitions if (row.source, row.event) == (rule.source, rule.event)]
    assert rule in same


def test_the_request_table_has_no_other_rows():
    written = set(RULES)
    assert len(written) == len(RULES)
    assert [str(row) for row in REQUEST.transitions if in_words(row) not in written] == []
    assert len(REQUEST.transitions) == len(RULES)


PHASES = {
    "new": "new",
    "admitted": "admitted",
    "executing": (
        "prefilling prefill_frozen settled settled_frozen seating decoding decoding_frozen decode_retry "
        "decode_retry_frozen compacting broken"
    ),
    "finishing": "finishing finishing_frozen finishing_prefill_frozen finishing_retry finishing_retry_frozen",
    "quarantined": "quarantined",
    "poisoned": "poisoned",
    "released": "released",
}
IDLE = set("new admitted settled settled_frozen finishing finishing_frozen released".split())
HOLDING = set("prefilling prefill_frozen decoding decoding_frozen decode_retry decode_retry_frozen compacting".split())
FROZEN = {f"{name}_frozen" for name in "prefill settled decoding decode_retry".split()} | {
    f"finishing{name}_frozen" for name in ("", "_prefill", "_retry")
}


def test_states_and_their_phases():
    assert {state.name: state.phase for state in REQUEST.states} == {
        name: phase for phase, names in PHASES.items() for name in names.split()
    }
    assert all(state.meaning for spec in ALL_MACHINES for state in spec.states)


def test_work_is_outstanding_in_every_state_but_the_idle_ones():
    """Withheld requests count as outstanding: their end drains too."""
    assert {state.name for state in REQUEST.states if not state.outstanding} == IDLE


def test_a_frozen_endpoint_waits_in_the_states_that_say_so():
    assert {state.name for state in REQUEST.states if state.name.endswith("frozen")} == FROZEN
    for row in REQUEST.transitions:
        if row.event == "finalize_prefill":
            assert (row.target in FROZEN) == ("freeze" in [step.name for step in row.steps])
        elif row.source not in FROZEN:
            assert not set(row.ends) & FROZEN, f"{row} freezes an endpoint"


def test_a_frozen_endpoint_is_published_or_dropped_when_the_duty_ends():
    """By the first verification, by what comes instead of it, or not at all: only a drop forgets it."""
    for row in REQUEST.transitions:
        published = "publish_frozen" in [step.name for step in row.steps]
        leaves = row.source in FROZEN and row.target not in FROZEN
        assert published == (leaves and row.event not in ("drop", "complete_decode_step")), str(row)
        if published:
            names = [step.name for step in row.steps if not isinstance(step, Couple)]
            before = ["drain"] if REQUEST.by_state[row.source].outstanding else []
            assert names[: len(before) + 1] == [*before, "publish_frozen"], str(row)
            assert row.on_publish_failure == (
                "finishing_frozen" if row.source.startswith("finishing") else "settled_frozen"
            )


def test_a_frozen_state_does_what_the_state_of_its_name_does():
    """Without joiners, captures and further prefill, that is; and an end drains in both or in neither."""
    for name in FROZEN:
        plain = name.removesuffix("_frozen").replace("finishing_prefill", "finishing_retry")
        plain = "prefilling" if plain == "prefill" else plain
        assert REQUEST.by_state[plain].outstanding == REQUEST.by_state[name].outstanding
        assert REQUEST.by_state[plain].phase == REQUEST.by_state[name].phase
        extra = {"prepare_decode_step", "begin_batch_compaction"} if plain == "prefilling" else set()
        assert set(REQUEST.accepted(name)) <= set(REQUEST.accepted(plain)) | extra


def test_captured_slots_are_published_after_proof_and_then_retired():
    for row in REQUEST.transitions:
        names = [step.name for step in row.steps]
        retires = "retire_reservations" in names
        assert (names[-1:] == ["retire_reservations"]) == retires, str(row)
        assert [step.name for step in row.publish_failure_steps] == ["retire_reservations"] * retires, str(row)
        if retires:
            assert names[-2] == "publish", str(row)
            assert row.work_ended == "by_runtime_sync" or "drain" in names, str(row)
        if "stage_captures" in names:
            assert row.on_failure == "broken", str(row)
            assert "drain" not in names[: names.index("mark_captured")], str(row)
            assert retires or row.event == "enqueue_prefill_captures", str(row)


def test_the_draft_follows_the_base_in_every_row():
    """A base action with a draft twin is followed by it at once, but where a joiner comes or goes: it has no draft."""
    for row in REQUEST.transitions:
        for steps in (row.steps, row.failure_steps):
            names = [step.name for step in steps]
            joins = {"bind_joiner", "unbind_joiner"} & set(names)
            for number, name in enumerate(names):
                twin = {"upload_cleared_rows": "upload_cleared_draft_rows"}.get(name, name.replace("base", "draft"))
                if twin != name and not (joins and name.startswith("upload")):
                    assert names[number + 1] == twin, str(row)


def test_a_life_begins_in_new_and_ends_in_released():
    assert REQUEST.initial == "new"
    assert [state.name for state in REQUEST.states if state.final] == ["released"]
    assert REQUEST.accepted("new") == ("begin_request",)


def test_every_live_state_can_be_finished_and_dropped_and_every_withheld_one_shut_down():
    for state in REQUEST.states:
        ends = set(REQUEST.accepted(state.name)) & {"finish", "drop", "shutdown"}
        if state.name in ("new", "released"):
            assert ends == set()
        elif state.name in ("quarantined", "poisoned"):
            assert REQUEST.accepted(state.name) == ("shutdown",)
        else:
            assert ends == {"finish", "drop"}


def test_an_end_drains_exactly_when_work_is_outstanding():
    for row in REQUEST.transitions:
        if row.event in ("finish", "drop", "shutdown"):
            assert isinstance(row.steps[0], Drain) == REQUEST.by_state[row.source].outstanding, str(row)
            assert sum(isinstance(step, Drain) for step in row.steps) <= 1, str(row)
            assert row.target == "released"
            assert row.steps[-1].name == "release"


def test_clearing_uploads_come_after_proof_and_before_the_release():
    """It is tolerated because the device is quiet by then: after a drain, or with nothing outstanding."""
    for row in REQUEST.transitions:
        for steps in (row.steps, row.failure_steps):
            names = [step.name for step in steps]
            for number, step in enumerate(steps):
                if isinstance(step, DeviceAction) and step.clears:
                    proven = "drain" in names[:number] or not REQUEST.by_state[row.source].outstanding
                    assert proven, str(row)
                    clearing = ("upload_cleared_rows", "upload_cleared_draft_rows")
                    before = [name for name in names[:number] if name not in clearing]
                    after = [name for name in names[number:] if name not in clearing]
                    assert before[-1].startswith("unbind"), str(row)
                    assert after[0] in ("release", "release_joiner"), str(row)


def test_a_failed_admission_leaves_the_uniform_way():
    for row in REQUEST.transitions:
        leaving = [step.name for step in row.failure_steps if not isinstance(step, Couple)]
        assert tuple(leaving) == (named(JOINER_LEAVES) if row.event == "admit_sequence" else ())


def test_no_device_action_follows_a_drain_but_a_clearing_upload():
    """And the mapping behind a frozen endpoint, which is new work: its row leads to a state that says so."""
    for row in REQUEST.transitions:
        names = [type(step) for step in row.steps]
        if Drain in names:
            after = row.steps[names.index(Drain) + 1 :]
            actions = [step.name for step in after if isinstance(step, DeviceAction) and not step.clears]
            if row.event == "begin_batch_compaction":
                assert actions == ["copy_mapping"], str(row)
                assert all(REQUEST.by_state[end].outstanding for end in (row.target, row.on_failure)), str(row)
            else:
                assert actions == [], str(row)
            assert Drain not in [type(step) for step in after], str(row)


def test_every_step_of_the_table_is_one_of_the_written_words():
    steps = {step.name for row in REQUEST.transitions for step in all_steps(row) if not isinstance(step, Couple)}
    assert steps == {step for words in WORDS for step in named(words)}
    entries = {step.name for state in REQUEST.states for step in state.on_enter if isinstance(step, HostStep)}
    assert entries == {"withhold"}


def test_the_callers_word_ends_device_work_at_finalisations_and_completions_only():
    """Not where our own drain ends it: a completion with captures."""
    for row in REQUEST.transitions:
        by_word = row.event in ("finalize_prefill", "finalize_sequence_admission", "complete_decode_step")
        by_word &= not any(isinstance(step, Drain) for step in row.steps)
        assert row.work_ended == ("by_runtime_sync" if by_word else None), str(row)


def test_the_rows_of_every_sequence_and_step_are_the_hot_ones():
    assert {row.event for row in REQUEST.transitions if row.hot} == {
        "begin_request", "admit_sequence", "finalize_sequence_admission", "finalize_prefill",
        "prepare_decode_step", "complete_decode_step",
    }  # fmt: skip
    for choice in REQUEST.choices.values():
        assert len({row.transition.hot for row in choice.candidates}) == 1, "hot and cold rows of one pair"


# ---- the request's couplings ----------------------------------------------

MACHINES = {spec.name: spec for spec in ALL_MACHINES}


def couples_of(spec):
    for row in spec.transitions:
        yield from ((str(row), step) for step in all_steps(row) if isinstance(step, Couple))
    for state in spec.states:
        yield from ((state.name, step) for step in state.on_enter if isinstance(step, Couple))


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_every_coupling_names_a_machine_and_one_of_its_events(spec):
    """A misspelt coupling would be skipped for ever, because an offer that no row takes is no error."""
    for where, couple in couples_of(spec):
        assert couple.machine in MACHINES, where
        assert couple.machine != spec.name, where
        assert couple.event in MACHINES[couple.machine].events, where


def test_every_event_of_token_and_view_is_offered_by_some_row():
    offered = {couple.name for _, couple in couples_of(REQUEST)}
    for spec in (EXECUTION, VIEW):
        assert {f"{spec.name}.{event}" for event in spec.events} <= offered


def test_the_token_is_taken_first_by_the_rows_of_the_four_takers():
    """prepare_decode_step takes it only if growth is possible; a refusal must not take anything."""
    takers = {"prepare_prefill", "admit_sequence", "prepare_decode_step", "begin_batch_compaction"}
    for row in REQUEST.transitions:
        takes = row.event in takers and "not growth_possible" not in map(str, row.guards)
        assert ("execution.take" in couplings(row.steps)) == takes, str(row)
        if takes:
            assert row.steps[0].name == "execution.take", str(row)
            assert REQUEST.by_state[row.target].outstanding, str(row)


def test_the_token_is_given_back_on_entering_a_state_that_does_not_hold_it():
    gives = {state.name for state in REQUEST.states if "execution.give_back" in couplings(state.on_enter)}
    assert gives == {s.name for s in REQUEST.states} - HOLDING - {"seating", "new", "admitted"}
    assert {state.name for state in REQUEST.states if "token" in state.holds} == HOLDING | {"seating"}


def test_seating_gives_the_token_back_after_a_completion_and_keeps_it_otherwise():
    for row in REQUEST.transitions:
        gives = row.target == "seating" and row.event in ("complete_decode_step", "compact_batch")
        assert ("execution.give_back" in couplings(row.steps)) == gives, str(row)
        assert ("execution.undo_take" in couplings(row.failure_steps)) == (row.event == "admit_sequence"), str(row)


def test_a_completion_gives_the_token_back_before_it_publishes():
    """Publishing may raise; seating is entered all the same, and must not keep the token then."""
    for row in REQUEST.transitions:
        names = [step.name for step in row.steps]
        if row.event == "complete_decode_step" and row.target == "seating":
            assert names.index("execution.give_back") < names.index("publish")


LENGTHS = {f"{verb}_{side}_lengths" for verb in ("reset", "install", "compact") for side in ("base", "draft")}


def test_a_row_that_writes_lengths_takes_the_view():
    """The view is nobody's from just before the first length action until the row is past its last one."""
    for row in REQUEST.transitions:
        names = [step.name for step in row.steps]
        writes = [number for number, name in enumerate(names) if name in LENGTHS]
        assert ("view.start_lengths" in names) == bool(writes), str(row)
        if writes:
            assert names.index("view.start_lengths") == writes[0] - 1, str(row)
        claims = bool(writes) and row.target != "finishing"
        assert names.count("view.claim") == claims, str(row)
        if claims:
            assert names.index("view.claim") > writes[-1], str(row)


def test_the_view_is_forgotten_on_entering_a_state_that_is_never_the_view():
    forgets = {state.name for state in REQUEST.states if "view.forget" in couplings(state.on_enter)}
    finishing = set(PHASES["finishing"].split())
    assert forgets == {"settled_frozen", "broken", "quarantined", "poisoned", "released"} | finishing


def test_a_finalised_joiner_makes_a_partial_view_stale():
    for row in REQUEST.transitions:
        finalises = row.event == "finalize_sequence_admission"
        assert ("view.entry_finalized" in couplings(row.steps)) == finalises, str(row)


def test_a_failed_drain_poisons_the_coordinator_and_withholds_the_pages():
    for state in REQUEST.states:
        withheld = state.name in ("quarantined", "poisoned")
        names = [step.name for step in state.on_enter]
        assert ("coordinator.drain_failed" in names) == withheld
        assert ("withhold" in names) == withheld
    entered = {
        "quarantined": {row.on_drain_failure for row in REQUEST.transitions if row.event != "shutdown"} - {None},
        "poisoned": {row.on_drain_failure for row in REQUEST.transitions if row.event == "shutdown"},
    }
    assert entered == {"quarantined": {"quarantined"}, "poisoned": {"poisoned"}}
    others = {end for row in REQUEST.transitions for end in (row.target, row.on_failure, row.on_publish_failure)}
    assert not others & {"quarantined", "poisoned"}, "only a failed drain leads there"


# ---- the regions of the coordinator ---------------------------------------


def lines(spec):
    return {(row.source, row.event, tuple(map(str, row.guards)), row.target) for row in spec.transitions}


def read(text):
    found = set()
    for line in text.strip().splitlines():
        states, event, guards, target = (cell.strip() for cell in line.split("|"))
        for state in states.split():
            wanted = tuple(filter(None, guards.split(", ")))
            found.add((state, event, wanted, state if target == "unchanged" else target))
    return found


@pytest.mark.parametrize(
    ("spec", "initial", "final", "text"),
    [
        (
            COORDINATOR,
            "serving",
            {"closed"},
            """
            serving poisoned | drain_failed     |                 | poisoned
            serving poisoned | clearing_failed  |                 | poisoned
            serving poisoned | invariant_broken |                 | poisoned
            serving poisoned | shutdown         | owners_left     | unchanged
            serving poisoned | shutdown         | not owners_left | closed
            """,
        ),
        (
            EXECUTION,
            "free",
            set(),
            """
            free | take      |             | held
            held | give_back | holds_token | free
            held | undo_take | took_token  | free
            """,
        ),
        (
            VIEW,
            "none",
            set(),
            """
            none of partial | start_lengths   |                  | none
            none            | claim           | joiner_waits     | partial
            none            | claim           | not joiner_waits | of
            partial         | entry_finalized | owns_view        | none
            of partial      | forget          | owns_view        | none
            """,
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_region_has_the_written_rows_and_no_other(spec, initial, final, text):
    assert lines(spec) == read(text)
    assert len(spec.transitions) == len(lines(spec))
    assert spec.initial == initial
    assert {state.name for state in spec.states if state.final} == final


def test_poison_is_never_lifted():
    assert {row.target for row in COORDINATOR.transitions if row.source == "poisoned"} == {"poisoned", "closed"}


def test_regions_neither_call_the_device_nor_fail():
    for spec in (COORDINATOR, EXECUTION, VIEW):
        for row in spec.transitions:
            assert row.ends == (row.target,)
            assert all(isinstance(step, HostStep) and not step.publishes for step in row.steps)


def test_token_and_view_remember_their_request_in_step_with_their_state():
    steps = {
        spec.name: {(row.target, *(step.name for step in row.steps)) for row in spec.transitions}
        for spec in (EXECUTION, VIEW)
    }
    assert steps == {
        "execution": {("held", "hold_token"), ("free", "free_token")},
        "view": {("none", "drop_view"), ("of", "own_view"), ("partial", "own_view")},
    }


# ---- the sequence ----------------------------------------------------------

LIVE = "leased bound seated terminal"
SEQUENCE_ROWS = f"""
free | begin_request | | leased
free | admit_sequence | | bound
leased | prepare_prefill | | bound
bound | finalize_prefill | | seated
bound | finalize_sequence_admission | | seated
bound | retract_sequence_admission | | retracted
bound | complete_decode_step | not brings_tokens, not named | bound
seated | complete_decode_step | not named | seated
seated | complete_decode_step | named | terminal
terminal | complete_decode_step | not brings_tokens, not named | terminal
bound seated terminal | compact_batch | not named | unchanged
bound seated terminal | compact_batch | named | retired
{LIVE} | finish | | released
{LIVE} | drop | | released
bound seated terminal | drain_failed | | quarantined
quarantined | shutdown | | released
"""
# A leased sequence has used no device, so no drain of its request exists that could fail; the table may say it anyway.
IDLE_ROWS = {("leased", "drain_failed", (), "quarantined")}


def test_the_sequence_table_has_the_written_rows_and_no_other():
    written = read(SEQUENCE_ROWS)
    assert written - lines(SEQUENCE) == set()
    assert lines(SEQUENCE) - written <= IDLE_ROWS
    assert len(SEQUENCE.transitions) == len(lines(SEQUENCE))
    assert SEQUENCE.initial == "free"
    assert {state.name for state in SEQUENCE.states if state.final} == {"retired", "retracted", "released"}


def test_a_failed_drain_takes_a_sequence_along():
    for row in SEQUENCE.transitions:
        if row.event in ("admit_sequence", "retract_sequence_admission", "compact_batch", "finish", "drop", "shutdown"):
            assert row.on_drain_failure == "quarantined", str(row)
        else:
            assert row.on_drain_failure is None, str(row)
        unchanged = row.source if row.target == "retired" else None
        expected = {"admit_sequence": "retracted", "prepare_prefill": "bound", "compact_batch": unchanged}
        assert row.on_failure == expected.get(row.event), str(row)


def test_a_sequence_only_follows_its_request():
    """Its events are the request's, but for the one that says that any other drain of the request failed."""
    assert SEQUENCE.follows == "request"
    assert set(SEQUENCE.events) - set(REQUEST.events) == {"drain_failed"}
    assert all(state.on_enter == () for state in SEQUENCE.states)


def test_a_sequence_is_quarantined_or_gone_where_its_request_is():
    """For each event with a drain in the request's table, the sequence's row names the same failure state.

    Or the event is one of those whose drain belongs to the request as a whole: ``drain_failed`` answers for them, from
    every state that a sequence can be in then.
    """
    draining = {row.event for row in REQUEST.transitions if row.on_drain_failure is not None}
    others = {"publish_mtp_endpoint", "complete_decode_step", "begin_batch_compaction"}
    assert {row.event for row in SEQUENCE.transitions if row.on_drain_failure is not None} == draining - others
    assert others < draining
    failed = {row.source for row in SEQUENCE.transitions if row.event == "drain_failed"}
    assert failed >= {row.source for row in SEQUENCE.transitions if row.event in others} | {"bound"}


def test_free_is_code_zero_and_codes_fit_a_byte():
    assert STATE_CODES["free"] == 0
    assert sorted(STATE_CODES.values()) == list(range(len(SEQUENCE.states)))
    assert max(STATE_CODES.values()) < REFUSED <= 255


ASKS = {0: "holds", BRINGS_TOKENS: "tokens", NAMED: "holds, completed", BRINGS_TOKENS | NAMED: "tokens, completed"}
COMPLETES = {
    ("bound", 0): "bound",
    ("seated", 0): "seated",
    ("seated", BRINGS_TOKENS): "seated",
    ("seated", NAMED): "terminal",
    ("seated", BRINGS_TOKENS | NAMED): "terminal",
    ("terminal", 0): "terminal",
}


@pytest.mark.parametrize("ask", ASKS, ids=ASKS.values())
@pytest.mark.parametrize("state", [state.name for state in SEQUENCE.states])
def test_what_a_completion_may_ask_of_a_slot(state, ask):
    """Tokens for a joiner or a terminal slot, or naming one of them as completed, is refused for the whole step."""
    answer = ask_table("complete_decode_step")[ask][STATE_CODES[state]]
    wanted = COMPLETES.get((state, ask))
    assert answer == (REFUSED if wanted is None else STATE_CODES[wanted])


@pytest.mark.parametrize("ask", ASKS, ids=ASKS.values())
@pytest.mark.parametrize("state", [state.name for state in SEQUENCE.states])
def test_what_a_compaction_may_ask_of_a_slot(state, ask):
    answer = ask_table("compact_batch")[ask][STATE_CODES[state]]
    if state not in ("bound", "seated", "terminal"):
        assert answer == REFUSED
    else:
        assert answer == STATE_CODES["retired" if ask & NAMED else state]


@pytest.mark.parametrize("event", SEQUENCE.events)
def test_an_ask_table_answers_every_state_and_every_ask(event):
    table = ask_table(event)
    assert len(table) == 4
    assert {len(row) for row in table} == {len(SEQUENCE.states)}
    for state in SEQUENCE.states:
        answers = {row[STATE_CODES[state.name]] for row in table}
        declared = (state.name, event) in SEQUENCE.choices
        assert (answers != {REFUSED}) == declared


def test_an_ask_table_of_an_unknown_event_refuses_everything():
    assert {answer for row in ask_table("launch") for answer in row} == {REFUSED}


# ---- captures --------------------------------------------------------------

CAPTURE_ROWS = """
none | enqueue_prefill_captures | reservation_granted | captured
none | enqueue_prefill_captures | not reservation_granted | none
captured | finalize_prefill | | none
none | complete_decode_step | reservation_granted | none
none | publish_mtp_endpoint | reservation_granted | none
reserved captured | finish | | none
reserved captured | drop | | none
reserved captured | shutdown | | none
"""


def test_the_capture_table_has_the_written_rows_and_no_other():
    assert lines(CAPTURE) == read(CAPTURE_ROWS)
    assert len(CAPTURE.transitions) == len(lines(CAPTURE))
    assert {state.name for state in CAPTURE.states} == {"none", "reserved", "captured"}
    assert (CAPTURE.initial, CAPTURE.follows) == ("none", "request")
    assert not any(state.final or state.on_enter for state in CAPTURE.states)


def test_slots_stay_reserved_until_a_proof_or_the_callers_word():
    """An error in a copy reserves them; a drain that failed leaves what was; a publication that failed retires."""
    for row in CAPTURE.transitions:
        granted = "reservation_granted" in map(str, row.guards)
        whole = granted and row.event != "enqueue_prefill_captures"
        ending = row.event in ("finish", "drop", "shutdown")
        assert row.on_failure == ("reserved" if granted else None), str(row)
        assert row.on_drain_failure == ("captured" if whole else row.source if ending else None), str(row)
        assert row.on_publish_failure == ("none" if whole or row.event == "finalize_prefill" else None), str(row)


def test_captures_only_follow_their_request():
    """Each event is the request's, and fails only in ways that some row of the request with captures can."""
    assert set(CAPTURE.events) < set(REQUEST.events)
    for row in CAPTURE.transitions:
        followed = [one for one in REQUEST.transitions if one.event == row.event]
        for end in ("on_failure", "on_drain_failure", "on_publish_failure"):
            if getattr(row, end) is not None:
                assert any(getattr(one, end) is not None for one in followed), f"{row}: {end}"
    captures = {one.event for one in REQUEST.transitions if "stage_captures" in [step.name for step in one.steps]}
    assert captures == {row.event for row in CAPTURE.transitions if "reservation_granted" in map(str, row.guards)}


def test_nothing_captured_is_code_zero_and_codes_fit_a_byte():
    assert CAPTURE_CODES == {"none": 0, "reserved": 1, "captured": 2}
