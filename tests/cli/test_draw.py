"""``context-cache draw``: what it writes, how it checks the committed pictures, and what it says of bad arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from context_cache.diagrams import engines, to_dot, to_mermaid
from context_cache.diagrams.pictures import FORMATS, NAMES, committed, file_name, picture
from context_cache.machines import REQUEST, VIEW

RENDERED = Path(__file__).resolve().parents[2] / "diagrams" / "rendered"


@pytest.fixture
def copied(tmp_path):
    """The committed pictures in a folder that a test may spoil."""
    folder = tmp_path / "rendered"
    shutil.copytree(RENDERED, folder)
    return folder


def refused(outcome):
    """The one sentence of a refusal."""
    assert outcome.status == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    return line


# ---- writing ------------------------------------------------------------------------------


def test_without_arguments_the_committed_files_are_written(cli, tmp_path):
    done = cli("draw", "-o", tmp_path)
    assert done.status == 0
    wanted = [file_name(*pair) for pair in committed()]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(wanted)
    assert done.out.splitlines() == [str(tmp_path / name) for name in wanted]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (RENDERED / path.name).read_bytes(), path.name


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_a_machine_is_written(cli, tmp_path, format):
    assert cli("draw", "request", "--format", format, "-o", tmp_path).status == 0
    (path,) = tmp_path.iterdir()
    assert path.name == file_name("request", format)
    assert path.read_bytes() == picture("request", format)


def test_several_machines_and_formats(cli, tmp_path):
    done = cli("draw", "view", "execution", "--format", "dot", "--format", "mermaid", "-o", tmp_path, "--json")
    assert json.loads(done.out) == {
        "written": [str(tmp_path / n) for n in ("view.dot", "view.mmd", "execution.dot", "execution.mmd")]
    }


def test_a_format_that_some_pictures_lack_leaves_those_out(cli, tmp_path):
    assert cli("draw", "--format", "markdown", "-o", tmp_path).status == 0
    assert "overview.md" not in {path.name for path in tmp_path.iterdir()}


def test_one_picture_goes_to_standard_output(cli):
    assert cli("draw", "request", "--format", "mermaid", "-o", "-").out == to_mermaid(REQUEST)


def test_around_draws_one_state_and_does_not_overwrite_the_whole(cli, tmp_path):
    assert cli("draw", "--around", "settled", "--format", "dot", "-o", tmp_path).status == 0
    (path,) = tmp_path.iterdir()
    assert path.name == "request-around-settled.dot"
    assert "s_admitted" not in path.read_text(encoding="utf-8")


def test_a_state_is_highlighted(cli, tmp_path):
    assert cli("draw", "request", "--state", "broken", "--format", "dot", "-o", tmp_path).status == 0
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert path.name == "request-at-broken.dot"
    assert text != to_dot(REQUEST)
    (bold,) = [line for line in text.splitlines() if "penwidth=3" in line]
    assert bold.startswith("s_broken [")


def test_a_written_file_is_whole_or_the_old_one(cli, tmp_path, monkeypatch):
    """How it could go wrong: written in place, an interrupted draw leaves half a picture that is then committed."""
    (tmp_path / "view.dot").write_text("old")

    def torn(self, content):
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    line = refused(cli("draw", "view", "--format", "dot", "-o", tmp_path))
    assert "view.dot cannot be written (No space left on device); choose another place with -o" in line
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("view.dot", "old")]


def test_all_files_are_written_or_none(cli, tmp_path, monkeypatch):
    """How it could go wrong: the disk is full at the last of them, and the others are new already."""
    (tmp_path / "view.dot").write_text("old")
    write = Path.write_bytes

    def full(self, content):
        if "svg" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    line = refused(cli("draw", "view", "-o", tmp_path))
    assert "view.svg cannot be written (No space left on device); choose another place with -o" in line
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("view.dot", "old")]


def test_a_folder_in_the_place_of_a_file_leaves_the_others_as_they_were(cli, tmp_path):
    (tmp_path / "view.svg").mkdir()
    (tmp_path / "view.dot").write_text("old")
    assert "it is a folder" in refused(cli("draw", "view", "-o", tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["view.dot", "view.svg"]
    assert (tmp_path / "view.dot").read_text() == "old"


def test_the_texts_are_utf8_under_a_c_locale(tmp_path):
    """C122."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "from context_cache.coordinator.cli import main; main()"
    command = [sys.executable, "-c", code, "draw", "request", "--format", "dot", "-o"]
    for place in (tmp_path, "-"):
        done = subprocess.run([*command, str(place)], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "request.dot").read_bytes() == to_dot(REQUEST).encode("utf-8")


def test_help_names_the_command_without_loading_drawing_libraries():
    code = (
        "import sys; from context_cache.coordinator.cli.app import command_line\n"
        "command_line.main(['--help'], standalone_mode=False)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('graphviz', 'svglib', 'reportlab')])\n"
        "print('context_cache.diagrams' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "draw " in done.stdout
    assert done.stdout.splitlines()[-2:] == ["[]", "False"]


# ---- checking -----------------------------------------------------------------------------


def test_the_committed_pictures_pass(cli):
    done = cli("draw", "--check", "-o", RENDERED)
    assert done.status == 0
    assert "every picture is what its table says" in done.out


def test_the_check_looks_at_the_checkout_that_one_stands_in(cli, copied, monkeypatch):
    folder = copied.parent / "diagrams"
    folder.mkdir()
    copied.rename(folder / "rendered")
    (folder / "rendered" / "view.dot").write_text("spoiled")
    monkeypatch.chdir(copied.parent)
    done = cli("draw", "--check")
    assert done.status == 1
    assert "diagrams/rendered differs from the tables: view.dot (changed)" in done.err
    assert "run: context-cache draw -o diagrams/rendered" in done.err
    # The command of a checkout makes the page beside the pictures too.
    Path("dev").write_text("")
    assert "; run: ./dev draw" in cli("draw", "--check").err
    assert "; run: ./dev draw" in cli("draw", "--check", "-o", "diagrams/rendered").err


@pytest.mark.parametrize("name", ["request.dot", "request.json", "request.svg"])
def test_a_changed_file_fails_the_check_and_the_command_that_fixes_it_is_named(cli, copied, name):
    path = copied / name
    path.write_text(path.read_text(encoding="utf-8").replace("settled", "unsettled", 1), encoding="utf-8")
    done = cli("draw", "--check", "-o", copied)
    assert done.status == 1
    assert done.out == ""
    assert f"{name} (changed)" in done.err
    assert f"; run: context-cache draw -o {copied}" in done.err
    assert cli("draw", "-o", copied).status == 0
    assert cli("draw", "--check", "-o", copied).status == 0


def test_missing_and_left_over_files_fail_the_check(cli, copied):
    (copied / "view.svg").unlink()
    (copied / "gone.dot").write_text("digraph {}")
    done = cli("draw", "--check", "-o", copied, "--json")
    assert done.status == 1
    assert "; delete what is left over and run: context-cache draw -o" in done.err
    assert json.loads(done.out)["stale"] == [
        {"file": "view.svg", "is": "missing"}, {"file": "gone.dot", "is": "left over"},
    ]  # fmt: skip


def of_another_version(path):
    """As another version of the layout program might have drawn it."""
    path.write_text(path.read_text().replace(f"graphviz-pure {engines.pure_version()}", "graphviz-pure 0.0.1") + "\n")


def test_a_picture_of_another_engine_version_is_not_compared_to_the_byte(cli, copied):
    """Another version may lay the same text out otherwise; what it was drawn from is compared all the same."""
    path = copied / "view.svg"
    of_another_version(path)
    done = cli("draw", "--check", "-o", copied)
    assert done.status == 0
    assert "; 1 SVG names its text and was not compared to the byte" in done.out
    path.write_text(path.read_text().replace("<!-- Drawn by graphviz-pure 0.0.1 ", "<!-- "))
    assert cli("draw", "--check", "-o", copied).status == 1


@pytest.mark.parametrize("installed", [True, False])
def test_a_picture_of_another_text_fails_the_check_whoever_drew_it(cli, copied, monkeypatch, installed):
    """How it could go wrong: where nothing can lay the text out, a picture of an old table passes for the new one."""
    path = copied / "view.svg"
    of_another_version(path)
    path.write_text(path.read_text().replace(engines.digest(to_dot(VIEW)), "0" * 64))
    if not installed:
        monkeypatch.setattr(engines, "_pure_program", lambda: None)
    done = cli("draw", "--check", "-o", copied)
    assert done.status == 1
    assert "view.svg (changed)" in done.err


def test_the_check_needs_no_layout_program(cli, copied, monkeypatch):
    monkeypatch.setattr(engines, "_pure_program", lambda: None)
    done = cli("draw", "--check", "-o", copied)
    assert done.status == 0
    assert "8 SVGs name their text and were not compared to the byte" in done.out
    assert json.loads(cli("draw", "--check", "-o", copied, "--json").out)["not_compared_to_the_byte"] == 8
    (copied / "view.dot").write_text("spoiled")
    assert cli("draw", "--check", "-o", copied).status == 1


def test_what_a_system_notes_in_a_folder_is_not_left_over(cli, copied):
    (copied / ".DS_Store").write_bytes(b"")
    assert cli("draw", "--check", "-o", copied).status == 0


def test_the_check_with_other_options_is_refused(cli):
    assert "leave MACHINE and all options but -o away" in refused(cli("draw", "--check", "view"))


def test_the_check_of_no_folder_is_refused(cli, tmp_path):
    assert "is no folder" in refused(cli("draw", "--check", "-o", tmp_path / "nowhere"))


# ---- bad arguments ------------------------------------------------------------------------


def test_an_unknown_machine_is_refused_with_the_names(cli):
    line = refused(cli("draw", "requests"))
    assert "there is no machine or picture 'requests'" in line
    assert ", ".join(NAMES) in line


def test_an_unknown_format_is_refused_with_the_names(cli):
    line = refused(cli("draw", "--format", "gif"))
    assert "there is no format 'gif'" in line
    assert ", ".join(FORMATS) in line


@pytest.mark.parametrize("option", ["--around", "--state"])
def test_an_unknown_state_is_refused_with_the_names(cli, option):
    line = refused(cli("draw", "view", option, "lost"))
    assert f"{option}: view has no state 'lost'" in line
    assert ", ".join(VIEW.by_state) in line


@pytest.mark.parametrize("name", ["overview", "request-phases"])
def test_a_state_of_a_picture_that_has_none_is_refused(cli, name):
    assert f"--around needs a machine, and {name} is none" in refused(cli("draw", name, "--around", "settled"))


@pytest.mark.parametrize(("option", "format"), [("--around", "json"), ("--around", "markdown"), ("--state", "mermaid")])
def test_an_option_that_a_format_cannot_show_is_refused(cli, option, format):
    assert f"{option} changes no {format}" in refused(cli("draw", "view", option, "of", "--format", format))


def test_a_format_that_a_picture_lacks_is_refused(cli):
    assert "overview is not drawn as json; choose from dot, svg, png, pdf" in refused(
        cli("draw", "overview", "--format", "json")
    )


def test_several_pictures_do_not_go_to_standard_output(cli):
    assert "standard output takes one picture and this makes 3" in refused(cli("draw", "view", "-o", "-"))


@pytest.mark.parametrize("engine", [(), ("--engine", "pure"), ("--engine", "dot")])
def test_without_a_layout_program_a_picture_says_what_to_install_and_texts_work(cli, tmp_path, monkeypatch, engine):
    """C123."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(engines, "_pure_program", lambda: None)
    line = refused(cli("draw", "view", "--format", "svg", "-o", tmp_path, *engine))
    assert "install" in line
    assert list(tmp_path.iterdir()) == []
    texts = ("dot", "mermaid", "markdown", "json")
    assert cli("draw", "view", *(f"--format={format}" for format in texts), "-o", tmp_path, *engine).status == 0
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_one_sentence(cli, tmp_path, place):
    (tmp_path / "file").write_text("a file")
    line = refused(cli("draw", "view", "--format", "dot", "-o", tmp_path / place))
    assert "cannot be written" in line
    assert "choose another place with -o" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_one_sentence(cli, tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written (Permission denied)" in refused(cli("draw", "view", "--format", "dot", "-o", tmp_path))
