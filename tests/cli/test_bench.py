"""The bench measures what it says, names every budget, and keeps standard output for its result."""

import json

import pytest
from click.testing import CliRunner

from context_cache.coordinator.cli.app import command_line
from context_cache.coordinator.cli.bench.cases import CASES

BUDGETS = {
    "hash": {"hash / floor"},
    "admit": {"admit, hash excluded / 60 us scaled", "admit, hash included / 260 us scaled"},
    "decode": {
        "decode batch 1 / 30 us scaled",
        "decode batch 32 / 35 us scaled",
        "decode batch 256 / 55 us scaled",
        "decode batch 256 / batch 1",
    },
    "publish": {"publish 16k / 80 us scaled", "publish 256 more / 25 us scaled"},
    "evict": {"admit evicting, 100,000 records / 100 us scaled", "admit evicting, 100,000 / 1,000 records"},
    "record": {"recorded / bare run, token ids apart"},
    "events": {"hot event / bare trigger", "ordinary event / bare trigger"},
}


def bench(*arguments):
    return CliRunner().invoke(command_line, ["bench", *arguments])


@pytest.mark.parametrize("case", CASES)
def test_each_case_reports_its_budgets_as_json(case):
    done = bench(case, "--repeats", "3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["ratios"]) == BUDGETS[case]
    for name, ratio in found["ratios"].items():
        assert ratio["value"] > 0, name
        assert ratio["holds"] == (ratio["value"] <= ratio["budget"]), name
    for name, figure in found["figures_us"].items():
        assert 0 < figure["low"] <= figure["median"] <= figure["high"], name


def test_every_case_is_known_here():
    assert set(BUDGETS) == set(CASES)


def test_the_table_names_budgets_and_verdicts():
    done = bench("hash", "--repeats", "3")
    assert done.exit_code == 0
    assert "hash / floor" in done.stdout
    assert "holds" in done.stdout or "missed" in done.stdout


def test_an_unknown_case_is_refused_with_the_choices():
    done = bench("nonsense")
    assert done.exit_code == 2
    assert "nonsense" in done.output
    assert "decode" in done.output
