"""``context-cache diff``: two files, two revisions, a revision against the tree; and what it says of the unusable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

RENDERED = Path(__file__).resolve().parents[2] / "diagrams" / "rendered"

ADDED = {
    "event": "probe", "source": "settled", "target": "settled", "guards": ["ready"],
    "steps": [{"kind": "enqueue", "name": "look"}], "failure_steps": [], "publish_failure_steps": [],
    "on_failure": "broken", "on_drain_failure": None, "on_publish_failure": None, "work_ended": None, "hot": False,
}  # fmt: skip
SAID = ["request: 1 row added", "  + row 5: settled --probe [ready]--> settled / look"]


def edit(path, change):
    """Change a committed document by hand, the numbers of its rows kept in order."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    change(plain)
    for number, row in enumerate(plain["rows"]):
        row["row"] = number
    path.write_text(json.dumps(plain), encoding="utf-8")


def insert_row(plain):
    plain["rows"].insert(5, dict(ADDED))


@pytest.fixture
def files(tmp_path):
    """The request's document twice."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        shutil.copy(RENDERED / "request.json", path)
    return old, new


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of its own with the committed documents, as the working directory; returns how to call git in it."""
    root = tmp_path / "checkout"
    (root / "diagrams").mkdir(parents=True)
    shutil.copytree(RENDERED, root / "diagrams" / "rendered")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.chdir(root)

    def git(*arguments):
        identity = ("-c", "user.name=A Tester", "-c", "user.email=tester@example.invalid", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return git


def refused(outcome):
    assert outcome.status == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    return line


# ---- files --------------------------------------------------------------------------------


def test_equal_files_are_no_difference(cli, files):
    done = cli("diff", *files)
    assert done.status == 0
    assert done.out == f"no difference from {files[0]} to {files[1]}\n"


def test_a_change_made_by_hand_is_said_exactly(cli, files):
    edit(files[1], insert_row)
    done = cli("diff", *files)
    assert done.status == 1
    assert done.out.splitlines() == SAID
    assert done.err == ""
    back = cli("diff", *reversed(files))
    assert back.out.splitlines() == ["request: 1 row removed", SAID[1].replace("+", "-")]


def test_another_layout_of_the_file_is_no_difference(cli, files):
    plain = json.loads(files[1].read_text(encoding="utf-8"))
    files[1].write_text(json.dumps(plain, indent=7, sort_keys=True), encoding="utf-8")
    assert cli("diff", *files).status == 0


def test_wording_is_said_to_be_wording(cli, files):
    edit(files[1], lambda plain: plain["states"][4].update(meaning="at rest"))
    done = cli("diff", *files)
    assert done.status == 1
    assert done.out.splitlines()[0] == "request: wording only"
    report = json.loads(cli("diff", *files, "--json").out)
    assert (report["different"], report["behaviour"]) == (True, False)


def test_json_is_one_object_with_the_same_facts(cli, files):
    edit(files[1], insert_row)
    done = cli("diff", *files, "--json")
    assert done.status == 1
    report = json.loads(done.out)
    assert (report["old"], report["new"]) == tuple(map(str, files))
    assert (report["different"], report["behaviour"]) == (True, True)
    (machine,) = report["machines"]
    assert (machine["name"], machine["is"]) == ("request", "changed")
    assert [row["event"] for row in machine["rows_added"]] == ["probe"]
    assert machine["rows_removed"] == machine["rows_changed"] == machine["states_changed"] == machine["wording"] == []
    same = json.loads(cli("diff", files[0], files[0], "--json").out)
    assert (same["different"], same["behaviour"], same["machines"]) == (False, False, [])


@pytest.mark.parametrize("suffix", ["dot", "svg", "png", "pdf"])
def test_the_picture_has_the_format_of_its_suffix(cli, files, tmp_path, suffix):
    edit(files[1], insert_row)
    picture = tmp_path / f"changes.{suffix}"
    assert cli("diff", *files, "-o", picture).status == 1
    starts = {"dot": b"digraph", "svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert picture.read_bytes().startswith(starts[suffix])


def test_the_picture_shows_the_change(cli, files, tmp_path):
    edit(files[1], insert_row)
    picture = tmp_path / "changes.dot"
    assert cli("diff", *files, "-o", picture).out.splitlines() == SAID
    text = picture.read_text(encoding="utf-8")
    assert text.count(">5 added<") == 3, "the row, its way into broken, and the box of those who share that way"
    assert "removed" not in text
    assert "changed" not in text


def test_without_a_difference_no_picture_is_written(cli, files, tmp_path):
    done = cli("diff", *files, "-o", tmp_path / "changes.svg")
    assert done.status == 0
    assert "nothing differs" in done.err
    assert not (tmp_path / "changes.svg").exists()


# ---- revisions ----------------------------------------------------------------------------


def test_a_revision_against_the_working_tree(cli, repository):
    assert cli("diff", "main").status == 0
    edit(Path("diagrams/rendered/request.json"), insert_row)
    done = cli("diff", "main")
    assert done.status == 1
    assert done.out.splitlines() == SAID
    assert cli("diff").out == done.out, "without OLD it is the commit that is checked out"


def test_two_revisions(cli, repository):
    edit(Path("diagrams/rendered/request.json"), insert_row)
    repository("commit", "--quiet", "--all", "--message", "second")
    repository("tag", "v2")
    assert cli("diff", "main~1", "main").out.splitlines() == SAID
    assert cli("diff", "v2~1", "v2").out.splitlines() == SAID
    assert cli("diff", "main", "v2").status == 0
    assert cli("diff", "main").status == 0, "the tree is what was committed"


def test_a_machine_that_came_or_went(cli, repository):
    Path("diagrams/rendered/view.json").unlink()
    assert cli("diff", "main").out == "view: machine removed (3 states, 8 rows)\n"
    repository("commit", "--quiet", "--all", "--message", "second")
    assert cli("diff", "main", "main~1").out == "view: machine added (3 states, 8 rows)\n"


def test_revisions_are_read_from_any_folder_of_the_checkout(cli, repository, monkeypatch):
    edit(Path("diagrams/rendered/request.json"), insert_row)
    monkeypatch.chdir("diagrams")
    assert cli("diff", "main").out.splitlines() == SAID


def test_a_file_against_a_revision_is_about_its_machine_only(cli, repository, tmp_path):
    edit(Path("diagrams/rendered/view.json"), lambda plain: plain["rows"].pop())
    shutil.copy("diagrams/rendered/request.json", tmp_path / "kept.json")
    repository("commit", "--quiet", "--all", "--message", "second")
    assert cli("diff", "main~1", tmp_path / "kept.json").status == 0
    assert cli("diff", tmp_path / "kept.json").status == 0


def test_odd_names_are_drawn_and_said_and_obeyed_by_no_terminal(cli, files, tmp_path):
    """How it could go wrong: a lone surrogate cannot be encoded, and a terminal does what a control character says."""
    old, new = files
    edit(new, lambda plain: plain["rows"][3].update(event="\ud800\x1b[2J", guards=["\x9b2J"]))
    drawn = tmp_path / "changes.svg"
    done = cli("diff", old, new, "-o", drawn)
    assert done.status == 1
    assert "--\ufffd\u241b[2J [\ufffd2J]-->" in done.out
    for text in (done.out, drawn.read_text(encoding="utf-8")):
        assert not {c for c in text if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0} - {"\n"}


@pytest.mark.parametrize("field", ["event", "name"])
def test_a_blank_name_is_one_sentence(cli, files, field):
    old, new = files
    edit(new, lambda plain: plain["rows" if field == "event" else "states"][2].update({field: "  "}))
    done = cli("diff", old, new)
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert f"[2].{field} is blank" in line


def test_old_code_is_never_run(cli, repository):
    """How it could go wrong: a revision that is checked out and imported runs whatever is in it."""
    for name in ("machines", "context_cache"):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text("raise SystemExit('ran')")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "a trap")
    edit(Path("diagrams/rendered/request.json"), insert_row)
    assert cli("diff", "main").out.splitlines() == SAID


def test_the_repository_is_left_as_it_was(cli, repository):
    def everything():
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    before = everything()
    cli("diff", "main")
    assert everything() == before


# ---- what is unusable ---------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["nowhere", "main~99", "HEAD:diagrams", "main..main", "", " ", "ma in", "@{-9}"])
def test_a_bad_revision_is_one_sentence(cli, repository, revision):
    assert "is no revision" in refused(cli("diff", "--", revision))


@pytest.mark.parametrize("option", ["--output=stolen", "--upload-pack=touch stolen", "-O", "--help"])
def test_an_option_in_the_place_of_a_revision_is_refused(cli, repository, option):
    """It must not reach git, which would take it for an option of its own."""
    for arguments in ((option,), ("main", option)):
        assert f"{option!r} is no revision; name a commit" in refused(cli("diff", "--", *arguments))
    assert not Path("stolen").exists()


def test_a_revision_outside_of_a_repository_is_one_sentence(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "this is no git repository" in refused(cli("diff", "main"))


def test_without_git_one_sentence_says_so(cli, files, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "git, which is not installed" in refused(cli("diff", "main"))
    assert cli("diff", *files).status == 0, "files need no git"


def test_a_revision_without_tables_is_one_sentence(cli, repository):
    repository("rm", "-r", "--quiet", "diagrams")
    repository("commit", "--quiet", "--allow-empty", "--message", "none left")
    assert "revision main has no diagrams/rendered/*.json" in refused(cli("diff", "main", "main~1"))
    assert "there is no diagrams/rendered/*.json here" in refused(cli("diff", "main~1"))


def test_a_broken_document_in_a_revision_is_named_with_its_place(cli, repository):
    Path("diagrams/rendered/view.json").write_text("{", encoding="utf-8")
    repository("commit", "--quiet", "--all", "--message", "broken")
    line = refused(cli("diff", "main", "main~1"))
    assert "main:diagrams/rendered/view.json is not JSON" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is no JSON object"),
        (b'{"format": 99}', "has table format 99 and this version reads 1"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_broken_file_is_one_sentence(cli, files, content, said):
    files[1].write_bytes(content)
    line = refused(cli("diff", *files))
    assert str(files[1]) in line
    assert said in line


@pytest.mark.parametrize("name", ["nowhere.json", "folder.json"])
def test_a_file_that_cannot_be_read_is_one_sentence(cli, files, tmp_path, name):
    (tmp_path / "folder.json").mkdir()
    assert f"{tmp_path / name} cannot be read" in refused(cli("diff", files[0], tmp_path / name))


@pytest.mark.parametrize("name", ["changes", "changes.gif", "changes.json"])
def test_a_picture_without_a_known_suffix_is_refused(cli, files, tmp_path, name):
    line = refused(cli("diff", *files, "-o", tmp_path / name))
    assert "choose one of .dot, .svg, .png, .pdf" in line


def test_a_picture_that_cannot_be_written_is_one_sentence(cli, files, tmp_path):
    edit(files[1], insert_row)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(cli("diff", *files, "-o", tmp_path / "file" / "changes.dot"))
