"""A machine's table, from a spec and from a document: the same, and whatever is no table is one sentence."""

import copy
import json

import attrs
import pytest

from context_cache.diagrams.table import TableError, as_table, parse_table
from context_cache.machines import ALL_MACHINES, REQUEST, VIEW, document


@pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)
def test_a_document_gives_the_table_of_its_spec(spec):
    assert parse_table(json.dumps(document(spec)), "somewhere") == as_table(spec)


def test_a_table_holds_plain_values_and_nothing_that_runs():
    def plain(value):
        if attrs.has(type(value)):
            return all(plain(getattr(value, field.name)) for field in attrs.fields(type(value)))
        return all(map(plain, value)) if isinstance(value, tuple) else isinstance(value, str | int | bool | None)

    assert plain(as_table(REQUEST))


def test_the_couplings_of_a_request():
    assert as_table(REQUEST).couplings == (
        "execution.take", "view.start_lengths", "view.claim", "execution.undo_take", "view.entry_finalized",
        "execution.give_back", "view.forget", "coordinator.drain_failed",
    )  # fmt: skip


def broken(change):
    plain = copy.deepcopy(document(VIEW))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is no JSON object"),
        ("{}", "has table format None"),
        (broken(lambda d: d.update(format=2)), "has table format 2 and this version reads 1"),
        (broken(lambda d: d.update(format=True)), "has table format True"),
        (broken(lambda d: d.pop("states")), "states is no list"),
        (broken(lambda d: d.update(rows={})), "rows is no list"),
        (broken(lambda d: d.update(name=7)), "name is no text"),
        (broken(lambda d: d.update(initial="x")), "initial names state 'x'"),
        (broken(lambda d: d["states"].append(d["states"][0])), "state 'none' is there twice"),
        (broken(lambda d: d["states"][1].update(name=" ")), "states[1].name is blank"),
        (broken(lambda d: d["rows"][2].update(event="")), "rows[2].event is blank"),
        (broken(lambda d: d["states"][1].pop("holds")), "states[1] has no 'holds'"),
        (broken(lambda d: d["states"][1].update(final="no")), "states[1].final is neither true nor false"),
        (broken(lambda d: d["rows"][2].update(target="lost")), "rows[2] names state 'lost'"),
        (broken(lambda d: d["rows"][2].update(on_failure="lost")), "rows[2] names state 'lost'"),
        (broken(lambda d: d["rows"][2].update(on_failure=3)), "rows[2].on_failure is no text"),
        (broken(lambda d: d["rows"][2].update(row="2")), "rows[2].row is no whole number"),
        (broken(lambda d: d["rows"].pop(0)), "not numbered 0, 1, 2"),
        (broken(lambda d: d["rows"][2].update(guards="g")), "rows[2].guards is no list"),
        (broken(lambda d: d["rows"][2].update(guards=[1])), "rows[2].guards[0] is no text"),
        (broken(lambda d: d["rows"][2]["steps"].append(3)), "rows[2].steps[1] is no JSON object"),
        (broken(lambda d: d["rows"][2]["steps"][0].update(kind="magic")), "rows[2].steps[0] has kind 'magic'"),
    ],
)
def test_what_is_no_table_is_one_sentence_that_says_where(text, said):
    with pytest.raises(TableError) as caught:
        parse_table(text, "old.json")
    message = str(caught.value)
    assert message.startswith("old.json")
    assert said in message
    assert "\n" not in message
