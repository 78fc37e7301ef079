"""The request table and the three regions, coupled as in a coordinator: two requests, any events, faults anywhere.

What a single row cannot show: that the token is held exactly in the states that hold it, that nobody's lengths are
taken for somebody else's, and that the coordinator is poisoned exactly when a proof has failed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from context_cache.backends.base import DeviceError, DrainResult
from context_cache.machines import (
    COORDINATOR,
    EXECUTION,
    REQUEST,
    VIEW,
    EventRefused,
    ListRecorder,
    Runner,
    Subject,
)

TAKERS = ("prepare_prefill", "admit_sequence", "prepare_decode_step", "begin_batch_compaction")
HOLDING = ("prefilling", "decoding", "decode_retry", "compacting")
NEVER_VIEW = ("broken", "finishing", "finishing_retry", "quarantined", "poisoned", "released")
FREEING = ("release", "retire", "release_joiner")


class World:
    """A coordinator without memory: two requests, the regions, and one recorder for all machines."""

    def __init__(self, scripted_call: type[Any]) -> None:
        self.recorder = ListRecorder()
        self.requests = Runner(REQUEST, self.recorder)
        self.regions = {spec.name: Runner(spec, self.recorder) for spec in (COORDINATOR, EXECUTION, VIEW)}
        self.subjects = {spec.name: Subject("c", spec.initial) for spec in (COORDINATOR, EXECUTION, VIEW)}
        self.holder: Subject | None = None
        self.viewed: Subject | None = None
        self.proofs_failed = 0
        self.joiners: dict[Subject, int] = {Subject("r1", "new"): 0, Subject("r2", "new"): 0}

        class Call(scripted_call):
            """A call whose couplings reach the regions, and whose facts about the regions are true."""

            owners_left = True

            def __init__(call, request: Subject, event: str, facts: dict[str, bool], fault: int | None) -> None:
                super().__init__()
                call.request, call.event, call.fault, call.count = request, event, fault, 0
                call.took_token = False
                waiting = self.joiners[request]
                call.joiner_waits = {
                    "finalize_sequence_admission": waiting > 1,
                    "retract_sequence_admission": waiting > 1,
                    "admit_sequence": True,
                    "compact_batch": waiting > 0 and facts["survivors_remain"] and facts["joiner_stays"],
                }.get(event, waiting > 0)
                call.growth_possible = facts["growth_possible"]
                call.only_sequence = facts["only_sequence"] and waiting == 0
                call.survivors_remain = facts["survivors_remain"]
                call.plain_checkpoint = False
                call.view_current = self.viewed is request

            @property
            def holds_token(call) -> bool:
                return self.holder is call.request

            @property
            def owns_view(call) -> bool:
                return self.viewed is call.request

            def couple(call, machine: str, event: str) -> bool:
                taken = self.regions[machine].offer(self.subjects[machine], event, call)
                call.log.append(f"{machine}.{event}")
                return taken

            def clearing_failed(call, error: DeviceError) -> None:
                self.proofs_failed += 1
                call.couple("coordinator", "clearing_failed")

            def do(call, verb: str, *arguments: Any) -> Any:
                if verb == "hold_token":
                    assert self.holder is None
                    self.holder, call.took_token = call.request, True
                elif verb == "free_token":
                    self.holder = None
                elif verb == "own_view":
                    self.viewed = call.request
                elif verb == "drop_view":
                    self.viewed = None
                else:
                    return call.work(verb, *arguments)
                return None

            def work(call, verb: str, *arguments: Any) -> Any:
                number, call.count = call.count, call.count + 1
                super().do(verb, *arguments)
                if number == call.fault:
                    if verb == "drain":
                        self.proofs_failed += 1
                        call.log.append("busy")
                        return DrainResult(ok=False)
                    if verb == "publish":
                        raise ValueError("full")
                    if hasattr(call.device, verb):
                        raise DeviceError(verb, "s", "fault")
                if verb == "bind_joiner":
                    self.joiners[call.request] += 1
                    call.bound = True
                elif verb == "release_joiner":
                    self.joiners[call.request] -= call.event != "admit_sequence" or getattr(call, "bound", False)
                elif verb == "apply_advances" and call.event == "finalize_sequence_admission":
                    self.joiners[call.request] -= 1
                elif verb == "retire" and not call.joiner_waits:
                    self.joiners[call.request] = 0
                return DrainResult(ok=True) if verb == "drain" else True

        self.call = Call

    def send(self, request: Subject, event: str, facts: dict[str, bool], fault: int | None) -> Any:
        """One event; what the coordinator would have refused beforehand is left out."""
        if event in TAKERS and self.holder not in (None, request):
            return None
        call = self.call(request, event, facts, fault)
        with suppress(EventRefused, DeviceError, ValueError):
            self.requests.fire(request, event, call)
        return call

    def check(self) -> None:
        states = {name: subject.state for name, subject in self.subjects.items()}
        assert states["execution"] == ("free" if self.holder is None else "held")
        assert (states["view"] == "none") == (self.viewed is None)
        assert states["coordinator"] == ("poisoned" if self.proofs_failed else "serving")
        for request, joiners in self.joiners.items():
            if request.state in HOLDING:
                assert self.holder is request, f"{request.state} without the token"
            elif request.state != "seating":
                assert self.holder is not request, f"{request.state} holds the token"
            if request.state in NEVER_VIEW:
                assert self.viewed is not request, f"{request.state} is the length view"
            if request.state == "settled":
                assert joiners == 0
            if request.state == "seating":
                assert joiners > 0


moves = st.tuples(
    st.integers(0, 1),
    st.integers(0, 99),
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("growth_possible", "only_sequence", "survivors_remain", "joiner_stays")}
    ),
    st.none() | st.none() | st.integers(0, 8),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, max_size=40))
def test_token_view_and_poison_agree_with_the_requests(scripted_call, history):
    """After each event, failed or not; ends of life are rare, so that histories get somewhere.

    Also: every trace replays (C108), no page is freed while a device may read it, and a failed drain is the last thing
    that the device hears of a request until a shutdown.
    """
    world = World(scripted_call)
    requests = list(world.joiners)
    for who, choice, facts, fault in history:
        request = requests[who]
        source = request.state
        accepted = REQUEST.accepted(source)
        if not accepted:
            continue
        ordinary = [event for event in accepted if event not in ("finish", "drop")] or list(accepted)
        event = ordinary[choice % len(ordinary)] if choice < 92 else accepted[choice % len(accepted)]
        call = world.send(request, event, facts, fault)
        world.check()
        if call is None:
            continue
        log = call.log
        for freeing in FREEING:
            if freeing in log and (REQUEST.by_state[source].outstanding or freeing == "release_joiner"):
                assert "drain" in log[: log.index(freeing)]
        if "busy" in log:
            rest = log[log.index("busy") + 1 :]
            assert not set(rest) & set(FREEING)
            assert not any(hasattr(call.device, verb) for verb in rest)
            assert request.state == ("poisoned" if event == "shutdown" else "quarantined")
        if source in ("quarantined", "poisoned"):
            assert event == "shutdown"
    ends = {("request", "r1"): "new", ("request", "r2"): "new"}
    ends |= {(spec.name, "c"): spec.initial for spec in (COORDINATOR, EXECUTION, VIEW)}
    for step in world.recorder.steps:
        assert step.source == ends[step.machine, step.subject]
        ends[step.machine, step.subject] = step.target
    assert ends == {
        **{("request", request.id): request.state for request in requests},
        **{(name, "c"): subject.state for name, subject in world.subjects.items()},
    }
