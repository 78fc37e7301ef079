"""Every conformance scenario is named by the docstring of a test that plays it: "Scenario 93." or "Scenarios 7, 8."."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
LETTERED = "21b 32b 51b 60b 67b 73b 82b 82c 83b 83c 85b 88b 89b 90b 91b 92b 96b 97b 109b".split()
SCENARIOS = [*map(str, range(1, 123)), *LETTERED]

# 40.13 after "Scenario 92 and" is a section, no scenario; "86 to 92b" is a room, no list.
NUMBER = r"\d+[a-c]?(?!\.?\d)"
NAMED = re.compile(rf"\bscenarios? ({NUMBER}(?:(?:, | and ){NUMBER})*)(?! to \d)", re.IGNORECASE)


def named_in(docstring: str) -> set[str]:
    text = " ".join(docstring.split())
    return {number for group in NAMED.findall(text) for number in re.findall(NUMBER, group)}


@pytest.fixture(scope="module")
def named_by_tests() -> dict[str, list[str]]:
    """Scenario -> the tests that name it. Docstrings of modules and helpers do not count."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in named_in(ast.get_docstring(node) or ""):
                    found.setdefault(number, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize(
    ("docstring", "numbers"),
    [
        ("Scenario 93.", {"93"}),
        ("Scenarios 7, 8.", {"7", "8"}),
        ("Scenarios 119 and 120 by seed.", {"119", "120"}),
        ("Scenario 92 and 40.13: the rest", {"92"}),
        ("Scenario 98, 40.18 [D]. HOLD", {"98"}),
        ("40.12 (scenario 105, the refused half)", {"105"}),
        ("Scenarios 86 to 92b: a room", set()),
        ("Scenario 82b, retracted instead.", {"82b"}),
        ("30.5 and\n    scenario 89b", {"89b"}),
    ],
)
def test_a_docstring_names_scenarios_in_these_ways(docstring, numbers):
    assert named_in(docstring) == numbers


def test_every_scenario_is_named(named_by_tests):
    missing = [number for number in SCENARIOS if number not in named_by_tests]
    assert missing == [], f"no test names these scenarios: {', '.join(missing)}"


def test_no_test_names_a_scenario_that_does_not_exist(named_by_tests):
    unknown = {number: tests for number, tests in named_by_tests.items() if number not in SCENARIOS}
    assert unknown == {}
