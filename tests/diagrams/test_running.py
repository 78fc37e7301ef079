"""Drawing looks at tables only: a coordinator that is drawn between its calls does what it does without."""

from context_cache.diagrams import Mark, Overlay, draw, to_dot, to_markdown, to_mermaid
from context_cache.diagrams.engines import render
from context_cache.machines import ALL_MACHINES, REQUEST


def script(h, T, look):
    """Ten calls and more: a founder, a joiner, decode steps, a compaction, an end, a drop and a shutdown."""
    handle = h.begin(T(6), 0)
    look(h)
    h.run_prefill(handle)
    look(h)
    h.decode(handle, 61)
    look(h)
    assert h.admit(handle, T(3), 1).status is h.OK
    look(h)
    h.seat(2)
    h.synchronize()
    assert h.coordinator.finalize_sequence_admission(handle, 1, h.advance(71, 3)) is h.OK
    look(h)
    h.decode(handle, 62, 72)
    look(h)
    h.compact(handle, [0, -1])
    look(h)
    other = h.begin(T(5), 2)
    look(h)
    h.finish(handle)
    look(h)
    h.drop(other)
    look(h)
    assert h.coordinator.shutdown() is h.OK
    return h.recorder.steps


def draws_everything(h):
    counts = {}
    for step in h.recorder.steps:
        counts[step.row] = counts.get(step.row, 0) + 1
    overlay = Overlay(rows={row: Mark(count=count) for row, count in counts.items()}, fade=True)
    for spec in ALL_MACHINES:
        draw(spec)
        to_mermaid(spec)
        to_markdown(spec)
        render(to_dot(spec, overlay), "svg")


def test_a_script_runs_the_same_with_drawing_off_and_on(harness, T):
    """C124. How it could go wrong: a drawing that keeps its own copy of the state, or hangs something on a request."""
    plain = script(harness(), T, lambda h: None)
    drawn = script(harness(), T, draws_everything)
    assert len(plain) > 10
    assert drawn == plain


def test_drawing_leaves_nothing_on_a_request(h, T):
    """C124."""
    handle = h.begin(T(6), 0)
    request = handle._request
    before = {name: getattr(request, name) for name in _slots(request)}
    draws_everything(h)
    assert {name: getattr(request, name) for name in _slots(request)} == before
    assert not hasattr(request, "__dict__")


def test_drawing_changes_no_spec():
    before = repr(REQUEST)
    draw(REQUEST, around="settled")
    to_dot(REQUEST)
    assert repr(REQUEST) == before


def _slots(value):
    return [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
