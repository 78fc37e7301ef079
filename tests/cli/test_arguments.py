"""Files and numbers for commands: no input is overwritten or waited for, and a message says which one it means."""

from __future__ import annotations

import os

import pytest

from context_cache.coordinator.traces.shrink import shrink


def refused(outcome, *words):
    """Refused as unusable, in one sentence that has these words."""
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    for word in words:
        assert word in outcome.err
    return outcome.err


@pytest.fixture
def trace(cli, workload, tmp_path):
    """A recorded trace and the workload it was recorded from; both as they must stay."""
    requests = workload({"token_ids": [1, 2, 3], "max_new_tokens": 3})
    assert cli("run", requests, "--trace", tmp_path / "t.jsonl").status == 0
    return tmp_path / "t.jsonl"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(("arguments", "option"), [
    (("run", "requests.jsonl", "--trace", "requests.jsonl"), "--trace"),
    (("run", "requests.jsonl.tokens", "--trace", "requests.jsonl"), "--trace"),
    (("replay", "t.jsonl", "--shrink", "-o", "t.jsonl"), "--output"),
    (("replay", "t.jsonl", "--shrink", "-o", "link.jsonl"), "--output"),
    (("replay", "t.jsonl", "--shrink", "-o", "t.jsonl.tokens"), "--output"),
    (("replay", "u.tokens", "--shrink", "-o", "u"), "--output"),
    (("replay", "t.jsonl", "--perfetto", "t.jsonl.timings"), "--perfetto"),
    (("replay", "t.jsonl", "--perfetto", "t.jsonl.journal"), "--perfetto"),
    (("coverage", "t.jsonl", "-o", "t.jsonl"), "--output"),
    (("coverage", "t.jsonl", "-o", "t.jsonl.tokens"), "--output"),
    (("draw", "--html", "t.jsonl", "--trace", "t.jsonl"), "--html"),
    (("draw", "view", "--coverage", "view.svg", "--format", "svg"), "-o"),
])  # fmt: skip
def test_no_output_overwrites_an_input(cli, trace, tmp_path, monkeypatch, arguments, option):
    monkeypatch.chdir(tmp_path)
    for name in ("u.tokens", "requests.jsonl.tokens", "view.svg"):
        (tmp_path / name).write_bytes(trace.read_bytes())
    for name in ("u.tokens.tokens", "view.svg.tokens"):
        (tmp_path / name).write_bytes((tmp_path / "t.jsonl.tokens").read_bytes())
    os.link("t.jsonl", "link.jsonl")
    before = content(tmp_path)
    refused(cli(*arguments), "would overwrite", f"choose another place with {option}")
    assert content(tmp_path) == before


@pytest.mark.parametrize("arguments", [
    ("replay", "PIPE"), ("replay", "PIPE", "--perfetto", "x"), ("coverage", "PIPE"),
    ("draw", "view", "--trace", "PIPE"),
    ("draw", "view", "--coverage", "PIPE"), ("draw", "--html", "x", "--trace", "PIPE"),
    ("diff", "pipe.json", "pipe.json"),
])  # fmt: skip
def test_a_pipe_is_refused_and_not_waited_for(cli, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    for name in ("PIPE", "pipe.json"):
        os.mkfifo(name)
    refused(cli(*arguments), "cannot be read (it is a pipe")


@pytest.mark.parametrize("suffix", [".tokens", ".timings", ".journal", ".tokens.journal"])
@pytest.mark.parametrize("arguments", [("replay",), ("coverage",), ("draw", "view", "--trace")])
def test_a_pipe_beside_a_trace_is_refused_too(cli, trace, arguments, suffix):
    beside = trace.with_name(trace.name + suffix)
    beside.unlink(missing_ok=True)
    os.mkfifo(beside)
    refused(cli(*arguments, trace), f"{beside} cannot be read (it is a pipe")


@pytest.mark.parametrize("name", ["t.jsonl/x", "n" * 300, "loop", "gone"])
@pytest.mark.parametrize("arguments", [
    ("replay",), ("coverage",), ("draw", "view", "--trace"), ("draw", "view", "--coverage"),
    ("draw", "--html", "x", "--trace"),
])  # fmt: skip
def test_an_input_that_cannot_be_opened_is_said_to_be_one(cli, trace, tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    refused(cli(*arguments, name), f"{name} cannot be read (")


@pytest.mark.parametrize("arguments", [
    ("replay", "t.jsonl", "--shrink", "-o"), ("replay", "t.jsonl", "--perfetto"), ("coverage", "t.jsonl", "-o"),
    ("run", "requests.jsonl", "--trace"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["nodir/x", "t.jsonl/x", "n" * 300, "loop"])
def test_an_output_that_cannot_be_made_is_said_to_be_one(cli, trace, tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    refused(cli(*arguments, name), f"{name} cannot be written (", "choose another place with --")


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full", "/dev/stdout", "PIPE"])
@pytest.mark.parametrize("arguments", [("replay", "t.jsonl", "--shrink", "-o"), ("run", "requests.jsonl", "--trace")])
def test_a_trace_goes_into_no_device(cli, trace, tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("PIPE")
    refused(cli(*arguments, name), "choose another place with --")
    assert not os.path.exists(f"{name}.tokens")


def test_a_page_does_not_replace_a_device(cli, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "PIPE")
    refused(cli("draw", "--html", tmp_path / "PIPE"), "is a pipe, which is not replaced")


def test_a_sum_can_go_to_a_device(cli, trace):
    assert cli("coverage", trace, "-o", "/dev/null").status == 0
    assert not os.path.isfile("/dev/null")
    refused(cli("coverage", trace, "-o", "/dev/full"), "/dev/full cannot be written (No space left")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("arguments", [
    ("replay", "t.jsonl", "--memory"), ("replay", "t.jsonl", "--shrink", "--seconds"),
    ("coverage", "t.jsonl", "--fail-under"),
])  # fmt: skip
def test_a_number_is_finite(cli, trace, tmp_path, monkeypatch, arguments, value):
    monkeypatch.chdir(tmp_path)
    outcome = cli(*arguments, value)
    assert outcome.status == 2
    assert arguments[-1] in outcome.err
    assert "Traceback" not in outcome.err


def test_a_file_that_breaks_while_it_is_read_is_not_called_the_output(cli, trace, monkeypatch, capsys):
    from context_cache.coordinator.cli import main
    from context_cache.coordinator.cli.app import command_line

    def broken(**_):
        raise OSError(5, "Input/output error", "t.jsonl")

    monkeypatch.setattr(command_line, "main", broken)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "context-cache: t.jsonl: Input/output error; name a file that can be used\n"


def test_a_failing_trace_is_shrunk_on_the_command_line(cli, trace, tmp_path):
    trace.write_text(trace.read_text().replace('"target":"prefilling"', '"target":"settled"', 1))
    outcome = cli("replay", trace, "--shrink", "--json")
    assert outcome.report["calls"][1] <= outcome.report["calls"][0]
    assert cli("replay", tmp_path / "t.min.jsonl").status == 1
    assert shrink(trace, tmp_path / "again.jsonl").differs


def test_no_control_character_of_a_trace_reaches_the_terminal(cli, trace, tmp_path):
    text = trace.read_text()
    evil = "\\u001b]0;pwn\\u0007\\u001b[2J\\u009b2J\\u202e"
    for number, old in enumerate((
        '"target":"prefilling"', '"ran":["take_leases"', '"subject":"r1"', '"status":"OK"', '"version":1',
        '"event":"take"',
    )):  # fmt: skip
        assert old in text
        key = old.partition(":")[0]
        new = f'{key}:["{evil}"' if "[" in old else f'{key}:"{evil}"'
        (tmp_path / "evil.jsonl").write_text(text.replace(old, new, 1))
        (tmp_path / "evil.jsonl.tokens").write_bytes((tmp_path / "t.jsonl.tokens").read_bytes())
        for arguments in ((), ("--step",), ("--shrink", "-o", tmp_path / f"{number}.jsonl")):
            outcome = cli("replay", tmp_path / "evil.jsonl", *arguments)
            shown = outcome.out + outcome.err
            assert not set(shown) & set("\x1b\x07\x9b\u202e"), (old, arguments, shown)
        assert "pwn" in cli("replay", tmp_path / "evil.jsonl", "--step").out or "version" in old


def test_a_difference_says_the_same_on_a_terminal_and_in_a_test(cli, trace):
    from context_cache.coordinator.traces.describe import difference_text
    from context_cache.coordinator.traces.replay import replay

    trace.write_text(trace.read_text().replace('"target":"prefilling"', '"target":"settled"', 1))
    shown = cli("replay", trace).out.split()
    told = difference_text(replay(trace).difference)
    assert "before the call: request r1 was admitted" in told
    for word in told.replace("row 0,", "0").replace(",", "").split():
        assert word in {*(one.rstrip(",") for one in shown), "slot", "row", "epoch", "pages", "0:"}, word
