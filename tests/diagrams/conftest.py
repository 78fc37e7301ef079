"""Nasty names, and a small machine that has one of everything; test modules cannot import each other."""

from __future__ import annotations

import pytest

from context_cache.backends import DrainResult
from context_cache.machines import Couple, DeviceAction, Drain, Guard, HostStep, MachineSpec, Not, State, Transition

NASTY = (
    "<lambda>", "<a> <b>", 'x"y', 'quote", shape=box, x="', "tail\\", 'a\\"b', "\\", "\\N", "one\ntwo", "gelöst → frei",
    "日本語", "a:b.c", "a|b", "&amp;", "`tick`", "*bold* _so_ ~~no~~", "[link](x)", "#1;", "a_b", "\x07bell", "$x$",
    "a  b",
)  # fmt: skip


@pytest.fixture(params=NASTY, ids=ascii)
def nasty(request):
    return request.param


@pytest.fixture
def odd():
    """A machine whose state, event, guard, step and words are all the same text."""

    def make(text: str) -> MachineSpec:
        guard, step = Guard(f"{text}?", lambda call: True), HostStep(f"{text}!", lambda call: None)
        return MachineSpec(
            name=text,
            initial=text,
            states=(State(text, text, holds=text, phase=text), State("end", text, phase=text, final=True)),
            transitions=(
                Transition(event=text, source=text, target="end", guards=(guard,), steps=(step,)),
                Transition(event=text, source=text, target=text, guards=(Not(guard),)),
            ),
        )

    return make


@pytest.fixture
def copier():
    """Rows of every kind: host only, enqueueing, waiting, loops, parallel rows, failures, a coupling on entry."""
    ready, big = Guard("ready", lambda call: True), Guard("big", lambda call: True)
    plan = HostStep("plan", lambda call: None)
    copy, drain = DeviceAction("copy", lambda call: True), Drain("drain", lambda call: DrainResult.OK)
    return MachineSpec(
        name="copier",
        initial="idle",
        states=(
            State("idle", "nothing to do"),
            State("copying", "the copy is enqueued", phase="busy", holds="buffer", outstanding=True),
            State("waiting", "enqueued, and others wait", phase="busy", holds="buffer", outstanding=True),
            State("stuck", "a drain failed", outstanding=True, on_enter=(Couple("alarm", "ring"),)),
            State("gone", "given back", final=True),
        ),
        transitions=(
            Transition(event="start", source="idle", target="copying", guards=(ready, Not(big)), steps=(plan, copy),
                       on_failure="idle"),
            Transition(event="start", source="idle", target="copying", guards=(ready, big), steps=(plan, copy, copy),
                       on_failure="gone"),
            Transition(event="start", source="idle", target="idle", guards=(Not(ready),)),
            Transition(event="queue", source="copying", target="waiting", steps=(plan,)),
            Transition(event="queue", source="waiting", target="waiting", steps=(plan,)),
            *(Transition(event="close", source=source, target="gone", steps=(drain,), on_drain_failure="stuck")
              for source in ("copying", "waiting")),
            Transition(event="close", source="idle", target="gone"),
            Transition(event="close", source="stuck", target="gone"),
        ),
    )  # fmt: skip
