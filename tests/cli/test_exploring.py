"""What ``draw --html`` writes: from a recorded run to a page, and one sentence for whatever cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from context_cache.coordinator.cli.app import Unusable
from context_cache.coordinator.cli.exploring import CannotExplore, write_html
from context_cache.machines import ALL_MACHINES


@pytest.fixture
def recorded(cli, workload, tmp_path):
    """A trace of a small run."""
    path = tmp_path / "t.jsonl"
    requests = [{"token_ids": list(range(20)), "max_new_tokens": 4}, {"token_ids": list(range(9)), "max_new_tokens": 2}]
    cli("run", workload(*requests), "--page-size", 4, "--trace", path, "--json")
    return path


@pytest.fixture
def page(tmp_path):
    """Write a page and read back what is embedded in it."""

    def write(*machines, trace=None, **options):
        out = tmp_path / "page.html"
        write_html(out, machines, trace, **options)
        embedded = re.search(r'id="explorer-data">(.*?)</script>', out.read_text(encoding="utf-8"), re.S)
        return json.loads(embedded[1])

    return write


def steps_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if '"line":"step"' in line]


def test_a_recorded_run_becomes_a_page(page, recorded):
    data = page(trace=recorded)
    steps = steps_of(recorded)
    kinds, shown = data["trace"]["kinds"], data["trace"]["steps"]
    assert [tuple(kinds[kind][:5]) for kind in shown["kind"]] == [
        (step["machine"], step["row"], step["event"], step["source"], step["target"]) for step in steps
    ]
    assert data["trace"]["name"] == "t.jsonl"
    assert data["trace"]["notes"] == []
    assert any(took > 0 for took in data["trace"]["calls"]["took"])


def test_without_names_every_machine_is_shown(page):
    assert [machine["name"] for machine in page()["machines"]] == [spec.name for spec in ALL_MACHINES]


def test_only_the_named_machines_are_shown_each_once(page):
    assert [machine["name"] for machine in page("view", "request", "view")["machines"]] == ["view", "request"]


def test_a_trace_that_is_too_long_is_cut_at_a_call_and_the_page_says_so(page, recorded):
    count = len(steps_of(recorded))
    trace = page(trace=recorded, steps_max=10)["trace"]
    assert 0 < len(trace["steps"]["kind"]) <= 10
    assert len(trace["steps"]["kind"]) == sum(trace["calls"]["steps"])
    assert trace["notes"] == [f"Only the first {len(trace['steps']['kind'])} of {count} steps are shown."]


def test_a_torn_trace_is_shown_up_to_the_tear(page, recorded):
    recorded.write_bytes(recorded.read_bytes()[:-20])
    assert page(trace=recorded)["trace"]["notes"] == ["The trace ends in the middle of a call, which is left out."]


def test_a_trace_of_other_tables_is_shown_with_a_warning(page, recorded):
    header, rest = recorded.read_text().split("\n", 1)
    changed = json.loads(header)
    changed["machines"]["request"] = "0" * 32
    recorded.write_text(f"{json.dumps(changed)}\n{rest}")
    (note,) = page(trace=recorded)["trace"]["notes"]
    assert "another table of request" in note


def told(write):
    with pytest.raises((CannotExplore, Unusable)) as caught:
        write()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_machine_is_named_with_those_there_are(page):
    assert "'lamp' is none; choose from request, " in told(lambda: page("request", "lamp"))


def test_a_trace_that_is_not_there(page, tmp_path):
    assert "cannot be read (No such file" in told(lambda: page(trace=tmp_path / "gone.jsonl"))


def test_a_folder_is_no_trace(page, tmp_path):
    assert "cannot be read" in told(lambda: page(trace=tmp_path))


def test_a_file_that_is_no_trace(page, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert "line 1: no header of a trace" in told(lambda: page(trace=path))


def test_a_damaged_line_is_named_by_its_number_and_nothing_is_written(page, recorded, tmp_path):
    lines = recorded.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"outcome"', '"outcomes"', 1)
    recorded.write_text("".join(lines))
    assert "line 5" in told(lambda: page(trace=recorded))
    assert not (tmp_path / "page.html").exists()


def test_a_place_that_cannot_be_written_to(tmp_path):
    file = tmp_path / "file"
    file.touch()
    message = told(lambda: write_html(file / "page.html", (), None))
    assert "cannot be written" in message
    assert "--html" in message


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "needs the name of a file"),
        (Path(), "needs the name of a file"),
        ("-", "not to the standard output"),
        (Path("-"), "not to the standard output"),
        ("new/", "--html new/: a folder cannot be written"),
        ("there", "--html there: a folder cannot be written"),
        (Path("there"), "--html there: a folder cannot be written"),
    ],
)
def test_what_is_no_name_of_a_file_is_refused_before_the_trace_is_read(tmp_path, monkeypatch, place, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert words in told(lambda: write_html(place, (), tmp_path / "nothing.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("place", ["", "-"])
def test_the_command_refuses_what_is_no_file_in_one_sentence(cli, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    done = cli("draw", "--html", place)
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "--html" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["", ".tokens", ".timings"])
@pytest.mark.parametrize("way", ["name", "link", "hard link", "round about"])
def test_a_page_never_takes_the_place_of_its_trace(cli, recorded, tmp_path, part, way):
    file = tmp_path / f"{recorded.name}{part}"
    before = file.read_bytes()
    out = {"name": file, "round about": tmp_path / "new" / ".." / file.name}.get(way, tmp_path / "page.html")
    (tmp_path / "new").mkdir()
    if way == "link":
        out.symlink_to(file)
    elif way == "hard link":
        out.hardlink_to(file)
    done = cli("draw", "--html", out, "--trace", recorded)
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "would overwrite" in done.err
    assert file.read_bytes() == before


def test_a_page_is_not_called_what_a_part_of_its_trace_would_be(page, recorded, tmp_path):
    """A page under the name of times that were not recorded would be read as such the next time."""
    times = tmp_path / f"{recorded.name}.timings"
    times.unlink()
    with pytest.raises(Unusable, match="would overwrite"):
        write_html(times, (), recorded)
    assert not times.exists()


def test_a_folder_that_is_missing_is_made(tmp_path):
    write_html(tmp_path / "new" / "page.html", ["view"], None)
    assert (tmp_path / "new" / "page.html").is_file()


def test_the_command_writes_the_page_and_names_it(cli, recorded, tmp_path):
    out = tmp_path / "explorer.html"
    done = cli("draw", "--html", out, "--trace", recorded)
    assert (done.status, done.out) == (0, f"{out}\n")
    assert cli("draw", "request", "--html", out, "--json").report == {"written": [str(out)]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--format", "svg"), "leave all options but --trace"),
        (("-o", "."), "leave all options but --trace"),
        (("--around", "settled"), "leave all options but --trace"),
        (("--step", "3"), "leave all options but --trace"),
        (("--check",), "leave MACHINE and all options but -o away"),
        (("overview",), "--html shows machines, and 'overview' is none"),
        (("--trace", "nothing.jsonl"), "name another file"),
    ],
)
def test_what_goes_with_no_page_is_one_sentence(cli, tmp_path, arguments, words):
    done = cli("draw", "--html", tmp_path / "page.html", *arguments)
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert words in done.err
    assert not (tmp_path / "page.html").exists()
