"""The texts that need no program: DOT, Mermaid, Markdown. Stable to the byte, complete, and labels stay labels."""

import html
import itertools
import os
import re
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from context_cache.diagrams import Mark, Overlay, draw, to_dot, to_markdown, to_mermaid
from context_cache.diagrams.overview import overview_dot
from context_cache.diagrams.phases import draw_phases
from context_cache.diagrams.table import Step, as_table
from context_cache.machines import ALL_MACHINES, REQUEST, MachineSpec, State, Transition

EVERY = pytest.mark.parametrize("spec", ALL_MACHINES, ids=lambda spec: spec.name)


def badges(dot):
    """Row numbers of a text, in the order in which its lines show them."""
    for badge in re.findall(r'<TR><TD BGCOLOR="#\w+">([-\d, ]+)</TD>', dot):
        for part in badge.split(", "):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


# ---- DOT ----------------------------------------------------------------------------------


@EVERY
def test_the_dot_text_shows_every_row_number(spec):
    """C125."""
    assert set(badges(to_dot(spec))) == set(range(len(spec.transitions)))


@EVERY
def test_each_row_of_a_label_is_a_line_of_its_own(spec):
    """So that a changed row is a changed line, in a review and in a merge."""
    for line in to_dot(spec).splitlines():
        if line.startswith("<TR><TD BGCOLOR="):
            assert line.endswith("</TD></TR>")
            assert line.count("<TR>") == 1 or "host only" in line


@EVERY
def test_the_dot_text_shows_every_guard_and_every_step(spec):
    """Those after a failure included."""
    table, text = as_table(spec), to_dot(spec)
    for row in table.rows:
        for name in (*row.guards, *(step.name for step in row.every_step)):
            assert re.search(rf"[\[>/ ]{re.escape(name)}[\],< ]", text), name
    for state in table.states:
        for step in state.on_enter:
            assert f">{step.name}<" in text


def test_a_state_shows_what_it_holds_and_what_entering_it_does():
    text = to_dot(REQUEST)
    box = text.partition("s_decoding [")[2].partition("</TABLE>>")[0]
    assert "pages, rows, token · work outstanding" in box
    box = text.partition("s_quarantined [")[2].partition("</TABLE>>")[0]
    assert re.sub("<.*?>", "", box).count("coordinator.drain_failed / execution.give_back") == 1
    assert 'tooltip="decode step prepared, not completed"' in text


def test_initial_and_final_states_are_marked(copier):
    text = to_dot(copier)
    assert "start -> s_idle" in text
    assert "peripheries=2" in text.partition("s_gone [")[2].partition("label=")[0]
    assert "peripheries" not in text.partition("s_stuck [")[2].partition("label=")[0]


def test_failures_are_dashed_and_red_and_nothing_else_is(copier):
    arrows = {line.partition(" [")[0]: line for line in to_dot(copier).splitlines() if " -> " in line}
    dashed = {ends for ends, line in arrows.items() if "style=dashed" in line and "#cf222e" in line}
    assert dashed == {"s_idle -> s_gone", "s_copying -> s_stuck", "s_waiting -> s_stuck"}
    assert not any("#cf222e" in line for ends, line in arrows.items() if ends not in dashed)


def test_an_event_of_a_phase_starts_at_its_border(copier):
    assert "ltail=cluster_p_busy" in to_dot(copier)


def test_a_state_named_with_a_colon_or_dot_is_one_node():
    """C125. DOT reads ``a:b`` as node ``a`` with port ``b``."""
    spec = MachineSpec(
        name="m", initial="a:b", states=(State("a:b", "m"), State("a.b", "m"), State("a", "m", final=True)),
        transitions=tuple(Transition(event="e", source=a, target=b) for a, b in (("a:b", "a.b"), ("a.b", "a"))),
    )  # fmt: skip
    text = to_dot(spec)
    assert [re.sub(r"\[.*", "", line).strip() for line in text.splitlines() if re.match(r"s_.* -> s_", line)] == [
        "s_a_3a_b -> s_a_2e_b", "s_a_2e_b -> s_a",
    ]  # fmt: skip


def test_no_label_text_sets_an_attribute_or_becomes_markup(odd, nasty):
    """C120, C121. Outside its quotes and tables the text has only words that we wrote."""
    plain, odd_one = to_dot(odd("plain")), to_dot(odd(nasty))
    rest = re.sub(r"<<TABLE.*?</TABLE>>", "", odd_one, flags=re.DOTALL)
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', '""', rest, flags=re.DOTALL)
    expected = re.sub(r"<<TABLE.*?</TABLE>>", "", plain, flags=re.DOTALL)
    expected = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expected, flags=re.DOTALL)
    names = r"(s_|p_|cluster_p_)\w*"
    assert re.sub(names, r"\1", rest) == re.sub(names, r"\1", expected)


@pytest.mark.parametrize("name", ["C", "POSIX"])
def test_the_locale_does_not_matter(name, tmp_path):
    """C122."""
    code = (
        "import pathlib, sys; from context_cache.machines import *; from context_cache.diagrams import to_dot\n"
        "spec = MachineSpec('m', 'gelöst → frei', (State('gelöst → frei', 'm'), State('z', 'm', final=True)),\n"
        "    (Transition(event='e', source='gelöst → frei', target='z'),))\n"
        "sys.stdout.buffer.write(to_dot(spec).encode())"
    )
    script = tmp_path / "draw.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "LC_ALL": name, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, check=True)
    assert "gelöst → frei" in done.stdout.decode("utf-8")


def test_output_does_not_depend_on_hash_seeds():
    """C126."""
    code = (
        "import context_cache.diagrams as d, context_cache.machines as m\n"
        "from context_cache.diagrams.overview import overview_dot\n"
        "from context_cache.diagrams.phases import draw_phases\n"
        "for spec in m.ALL_MACHINES: print(ascii((d.to_dot(spec), d.to_mermaid(spec), d.to_markdown(spec))))\n"
        "print(ascii((overview_dot(m.ALL_MACHINES), d.to_dot(draw_phases(m.REQUEST)))))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "77")
    }
    assert len(outputs) == 1


# ---- overlays -----------------------------------------------------------------------------


def test_an_overlay_marks_rows_failures_and_states(copier):
    overlay = Overlay(
        rows={0: Mark(count=7, colour="#123456")},
        failures={(5, "drain failed"): Mark(count=1, text="seen")},
        states={"copying": Mark(text="here", colour="#abcdef", last=True)},
        title="one run",
    )
    text = to_dot(copier, overlay)
    assert '<TD BGCOLOR="#123456">0 x7</TD>' in text
    assert "5 x1 seen" in text
    head, _, label = text.partition("s_copying [")[2].partition("label=")
    assert 'fillcolor="#abcdef"' in head
    assert "penwidth=3" in head
    assert "<B>copying</B> here" in label
    assert "one run" in text


def test_an_overlay_that_fades_leaves_what_it_marks(copier):
    text = to_dot(copier, Overlay(rows={3: Mark(count=2)}, fade=True))
    pale = {line.partition(" [")[0] for line in text.splitlines() if " -> " in line and 'color="#afb8c1"' in line}
    assert "s_copying -> s_waiting" not in pale
    assert {"s_idle -> s_copying", "s_idle -> s_gone", "s_stuck -> s_gone"} <= pale


def test_marks_of_different_colours_are_lines_of_their_own():
    """How it could go wrong: one colour for a line of several rows says something of a row that has no mark."""
    rows = {17: Mark(text="new", colour="#00ff00")}
    failures = {(17, "device error"): Mark(colour="#0000ff")}
    text = to_dot(REQUEST, Overlay(rows=rows, failures=failures))
    assert '<TD BGCOLOR="#00ff00">17 new</TD><TD ALIGN="LEFT"><B>prepare_decode_step</B>' in text
    assert '<TD BGCOLOR="#0000ff">17</TD>' in text
    assert '<TD BGCOLOR="#ffdcd9">18</TD>' in text


def test_a_mark_can_stand_in_the_place_of_the_number(copier):
    assert ">old 9 gone<" in to_dot(copier, Overlay(rows={3: Mark(text="gone", number="old 9")}))


def test_a_last_row_is_drawn_bold(copier):
    text = to_dot(copier, Overlay(rows={3: Mark(last=True)}))
    (bold,) = [line for line in text.splitlines() if " -> " in line and "penwidth=3" in line]
    assert bold.startswith("s_copying -> s_waiting")


def test_marks_of_folded_rows_stand_beside_their_own_numbers():
    text = to_dot(REQUEST, Overlay(rows={54: Mark(count=1), 55: Mark(count=1), 57: Mark(count=2)}))
    assert "54 x1, 55 x1, 56, 57 x2, 58-59<" in text


def test_rows_of_which_the_same_is_said_share_a_range():
    """How it could go wrong: a picture of what is covered writes every number of a range that a plain one writes."""
    for mark, badge in ((Mark(colour="#ff8a80"), "54-56"), (Mark(text="added", colour="#ff8a80"), "54-56 added")):
        text = to_dot(REQUEST, Overlay(rows=dict.fromkeys((54, 55, 56), mark)))
        assert f'<TD BGCOLOR="#ff8a80">{badge}</TD>' in text
        assert '<TD BGCOLOR="#ffd8a8">57-59</TD>' in text


def test_a_failure_that_ends_where_success_does_is_marked():
    for row, event in ((7, "finalize_prefill"), (13, "finalize_sequence_admission"), (38, "complete_decode_step")):
        overlay = Overlay(failures={(row, "publish failed"): Mark(count=3, colour="#123456", last=True)})
        text = to_dot(REQUEST, overlay)
        assert f'<TD BGCOLOR="#123456">{row} x3</TD>' in text
        (arrow,) = [line for line in text.splitlines() if " -> " in line and "penwidth=3" in line]
        assert f"<B>{event}</B>" in text.partition(arrow)[2].partition("</TABLE>")[0]
        assert '">3 x3' not in text


def test_a_shared_failure_takes_the_colour_of_its_marks():
    failures = {(row, "publish failed"): Mark(colour="#123456") for row in (46, 47)}
    box = to_dot(REQUEST, Overlay(failures=failures)).partition("f_executing__settled_5f_frozen__")[2]
    assert '<TD BGCOLOR="#123456"><FONT POINT-SIZE="9">46' in box.partition("</TABLE>")[0]


def test_a_state_with_a_mark_keeps_its_colours_where_others_fade(copier):
    text = to_dot(copier, Overlay(states={"copying": Mark()}, fade=True))
    heads = {name: text.partition(f"s_{name} [")[2].partition("label=")[0] for name in ("copying", "waiting")}
    assert 'fillcolor="#fff8dc", color="#57606a"' in heads["copying"]
    assert 'fillcolor="#ffffff", color="#afb8c1"' in heads["waiting"]


def test_an_arrow_to_another_machine_fades_with_its_state(copier):
    def arc(states):
        text = to_dot(copier, Overlay(states=states, fade=True))
        (line,) = [line for line in text.splitlines() if line.startswith("s_stuck -> m_alarm")]
        (box,) = [line for line in text.splitlines() if line.startswith("m_alarm [")]
        return 'color="#8250df"' in line, 'color="#8250df"' in box

    assert arc({}) == (False, False)
    assert arc({"stuck": Mark()}) == (True, True)


def test_what_did_not_happen_is_pale_beside_what_did():
    """How it could go wrong: an arrow has the colour of a row, or a line the words of a failure, that was not taken."""
    text = to_dot(REQUEST, Overlay(rows={38: Mark(count=1)}, fade=True))
    (arrow,) = re.findall(r"^s_decoding -> s_settled \[.*", text, flags=re.MULTILINE)
    assert 'color="#57606a"' in arrow
    (line,) = [line for line in text.splitlines() if ">38 x1<" in line]
    assert '<FONT COLOR="#afb8c1"> (also if publish failed)' in line
    taken = {(38, "publish failed"): Mark(count=1)}
    text = to_dot(REQUEST, Overlay(rows={38: Mark(count=1)}, failures=taken, fade=True))
    (line,) = [line for line in text.splitlines() if ">38 x1<" in line and "complete_decode_step" in line]
    assert '<FONT COLOR="#cf222e"> (also if publish failed)' in line


def test_the_legend_explains_every_colour_of_the_numbers():
    for drawing in (draw(REQUEST), draw_phases(REQUEST)):
        text = to_dot(drawing)
        legend, _, rest = text.partition("start [")
        used = set(re.findall(r'<TD BGCOLOR="(#\w+)">[\d, -]+</TD>', rest))
        assert used
        assert used <= set(re.findall(r'<TD BGCOLOR="(#\w+)"><FONT POINT-SIZE="9">', legend))
    follower = next(spec for spec in ALL_MACHINES if spec.follows)
    assert "host only" not in to_dot(follower)


def test_how_device_work_ended_is_said():
    text = to_dot(REQUEST)
    label = text.partition('BGCOLOR="#eaeef2">41<')[2].partition("</TR>")[0]
    assert "(runtime has synchronised)" in label
    assert "| by_runtime_sync |" in next(x for x in to_markdown(REQUEST).splitlines() if x.startswith("| 41 |"))


def test_marks_for_what_the_picture_does_not_have_are_ignored(copier):
    overlay = Overlay(rows={999: Mark(count=1)}, states={"nowhere": Mark(last=True)}, failures={(0, "no"): Mark()})
    assert to_dot(copier, overlay) == to_dot(copier)


def test_an_overlay_changes_no_arrow():
    def ends(text):
        return [line.partition(" [")[0] for line in text.splitlines() if " -> " in line]

    overlay = Overlay(rows={n: Mark(count=n) for n in range(0, 87, 2)}, fade=True)
    assert ends(to_dot(REQUEST, overlay)) == ends(to_dot(REQUEST))


# ---- the overview -------------------------------------------------------------------------


def test_the_overview_has_every_machine_and_every_coupling():
    text = overview_dot(ALL_MACHINES)
    for spec in ALL_MACHINES:
        assert f"m_{spec.name} [" in text
    for event in "drain_failed take give_back undo_take start_lengths claim entry_finalized forget".split():
        assert len(re.findall(rf"<B>\w+\.{event}</B>", text)) == 1
    assert "serving → poisoned" in text
    assert "m_request -> m_sequence [style=dotted, dir=back" in text
    assert "m_view -> " not in text


def test_the_overview_has_what_a_failed_publication_offers():
    table = as_table(ALL_MACHINES[0])
    row = attrs.evolve(table.rows[7], publish_failure_steps=(Step("couple", "view.shout"),))
    table = attrs.evolve(table, rows=(*table.rows[:7], row, *table.rows[8:]))
    assert "view.shout" in table.couplings
    assert "<B>view.shout</B>" in overview_dot([table, *ALL_MACHINES[1:]])
    assert re.search(r"<B>view.shout</B>.*rows 7<", overview_dot([table, *ALL_MACHINES[1:]]))


# ---- Mermaid ------------------------------------------------------------------------------


@EVERY
def test_mermaid_has_every_arrow_of_the_drawing(spec):
    drawing = draw(spec)
    arrows = [line for line in to_mermaid(spec).splitlines() if "->" in line]
    assert len(arrows) == len(drawing.edges) + len(drawing.shared)
    assert sum("-.->" in line for line in arrows) == sum(e.failure for e in drawing.edges) + len(drawing.shared)


def test_failures_of_a_request_are_dashed_and_red_in_mermaid():
    text = to_mermaid(REQUEST)
    assert 's_admitted -.->|"device error"| s_broken' in text
    assert "stroke:#c0392b" in text


def test_a_machine_without_failures_has_no_link_style():
    spec = MachineSpec(
        name="lamp", initial="off", states=(State("off", "dark", final=False), State("on", "light", final=True)),
        transitions=(Transition(event="switch", source="off", target="on"),),
    )  # fmt: skip
    assert "linkStyle" not in to_mermaid(spec)


def test_odd_names_survive_in_mermaid(odd, nasty):
    """C120, C121, C122. A label is text: it never closes its quotes, never becomes markup."""
    text = to_mermaid(odd(nasty))
    for line in text.splitlines():
        assert line.count('"') % 2 == 0
        assert "<" not in line.replace("<br>", "")
        assert "\\" not in line
    shown = re.sub(r"#(\d+);", lambda code: chr(int(code[1])), text.replace("<br>", "\n"))
    assert nasty.replace("\x07", "␇") in shown


@given(st.lists(st.text(min_size=1, max_size=6).filter(str.strip), min_size=2, max_size=5, unique=True))
def test_two_states_never_share_an_id(names):
    states = tuple(State(name, "m") for name in names[:-1])
    rows = tuple(Transition(event="e", source=a, target=b) for a, b in itertools.pairwise(names))
    spec = MachineSpec(
        name="m", initial=names[0], states=(*states, State(names[-1], "m", final=True)), transitions=rows
    )
    boxes = re.findall(r"^    (s_\w*)\(", to_mermaid(spec), flags=re.MULTILINE)
    assert len(set(boxes)) == len(boxes) == len(names)
    boxes = re.findall(r"^(s_\w*) \[fillcolor", to_dot(spec), flags=re.MULTILINE)
    assert len(set(boxes)) == len(boxes) == len(names)


# ---- Markdown -----------------------------------------------------------------------------


@EVERY
def test_the_markdown_table_has_one_line_per_row_and_state(spec):
    lines = to_markdown(spec).splitlines()
    assert sum(line.startswith("| `") for line in lines) == len(spec.states)
    assert [line.split(" | ")[0] for line in lines if re.match(r"\| \d", line)] == [
        f"| {number}" for number in range(len(spec.transitions))
    ]


def test_odd_names_survive_in_markdown(odd, nasty):
    """C120, C121. Read back by a Markdown parser, the cells say what the machine says."""
    spec = odd(nasty)
    page = MarkdownIt("gfm-like", {"linkify": False}).render(to_markdown(spec))
    cells = re.findall(r"<td>(.*?)</td>", page, flags=re.DOTALL)
    cells = [html.unescape(re.sub("</?(code|a)[^>]*>", "", cell)) for cell in cells]
    shown = nasty.replace("\x07", "␇")
    first_state = cells[:7]
    assert [first_state[0], first_state[1], first_state[3], first_state[4]] == [shown] * 4
    rows = cells[14:]
    assert rows[:6] == ["0", shown, shown, f"{shown}?", f"{shown}!", "end"]
    assert rows[7:13] == ["1", shown, shown, f"not {shown}?", "", shown]
