"""docs/weaknesses.md is complete: no id is missing, and every test that it names exists."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "weaknesses.md").read_text(encoding="utf-8")
COUNTS = {"I": 12, "M": 14, "C": 10, "D": 22, "E": 8, "O": 5, "P": 9, "S": 5}
IDS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
# Kept on purpose; everything else needs a test.
MAY_BE_ACCEPTED = {"M12", "C7", "D20", "E7"}


def rows():
    """Id -> (what is done here, the tests)."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and re.fullmatch(r"[A-Z]\d+", cells[0].strip()):
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = (cells[2], re.findall(r"`([^`]+::[^`]+)`", cells[3]))
    return found


@functools.cache
def functions_of(path):
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_weakness_has_its_row_in_order():
    assert list(rows()) == IDS


@pytest.mark.parametrize("id", IDS)
def test_every_test_that_is_named_exists(id):
    done, tests = rows()[id]
    assert tests or (id in MAY_BE_ACCEPTED and done.startswith("accepted")), f"{id} is shown by no test"
    for name in tests:
        path, _, function = name.partition("::")
        assert function.startswith("test_")
        assert (ROOT / "tests" / path).is_file(), f"{id} names {path}, which does not exist"
        assert function in functions_of(path), f"{id} names {name}, which does not exist"


def test_only_what_may_be_accepted_is_accepted():
    assert {id for id, (done, _) in rows().items() if done.startswith("accepted")} == MAY_BE_ACCEPTED
