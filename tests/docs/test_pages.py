"""The README and the pages in docs/ say what the code does: pictures match the tables, examples run."""

import pathlib
import re
import subprocess
import sys

import pytest

from context_cache.diagrams.pages import lifecycles_page
from context_cache.diagrams.pictures import MACHINES, stale_files
from context_cache.diagrams.table import as_table
from context_cache.machines import COORDINATOR, EXECUTION, VIEW

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_the_request_lifecycle():
    for name in ("request", "request-phases"):
        assert re.search(rf"!\[[^\]]+\]\(diagrams/rendered/{name}\.svg\)", README), name


def test_the_committed_pictures_are_what_the_tables_say():
    stale = stale_files(ROOT / "diagrams" / "rendered")
    assert stale == [], "the tables changed: run `./dev draw` and commit the result"


def test_the_lifecycles_page_is_up_to_date():
    committed = (ROOT / "docs" / "lifecycles.md").read_text(encoding="utf-8")
    assert committed == lifecycles_page(), "the tables changed: run `./dev draw` and commit the result"


def test_the_lifecycles_page_shows_every_machine():
    page = lifecycles_page()
    for name in (*MACHINES, "overview", "request-phases"):
        assert f"(../diagrams/rendered/{name}.svg)" in page


def test_every_event_of_the_regions_is_offered_by_a_row_or_named_as_offered_by_a_call():
    offered = {name for spec in MACHINES.values() for name in as_table(spec).couplings}
    overview = lifecycles_page().partition("## All machines")[2].partition("\n## ")[0]
    for spec in (COORDINATOR, EXECUTION, VIEW):
        for event in spec.events:
            assert (f"{spec.name}.{event}" in offered) != (f"`{event}`" in overview), event


def test_the_readme_example_runs_and_prints_what_it_says(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    said = re.findall(r"# prints: (.*)", code)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == said


def test_the_readme_example_is_short():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    # The imports in front of the first empty line do not count.
    lines = [line for line in code.partition("\n\n")[2].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_example_of_marks_runs():
    page = (ROOT / "docs" / "drawing.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), names)
    assert "17 x412" in names["text"]


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_runs(script):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
