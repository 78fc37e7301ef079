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
HOLDING = (
    "prefilling", "prefill_frozen", "decoding", "decoding_frozen", "decode_retry", "decode_retry_frozen", "compacting",
)  # fmt: skip
NEVER_VIEW = ("settled_frozen", "broken", "quarantined", "poisoned", "released")  # and the finishing ones
ALWAYS_VIEW = ("prefilling", "prefill_frozen", "decoding", "decoding_frozen")
MAY_RESERVE = ("prefilling", "broken", "quarantined", "poisoned")
FREEING = ("release", "retire", "release_joiner")
POLICIES = ("attention", "frozen", "checkpoint", "mtp")


class World:
    """A coordinator without memory: two requests, the regions, and one recorder for all machines."""

    def __init__(self, scripted_call: type[Any], policies: tuple[str, str]) -> None:
        self.recorder = ListRecorder()
        self.requests = Runner(REQUEST, self.recorder)
        self.regions = {spec.name: Runner(spec, self.recorder) for spec in (COORDINATOR, EXECUTION, VIEW)}
        self.subjects = {spec.name: Subject("c", spec.initial) for spec in (COORDINATOR, EXECUTION, VIEW)}
        self.holder: Subject | None = None
        self.viewed: Subject | None = None
        self.proofs_failed = 0
        self.joiners: dict[Subject, int] = {Subject("r1", "new"): 0, Subject("r2", "new"): 0}
        self.policies = dict(zip(self.joiners, policies, strict=True))
        self.reserved: dict[Subject, set[str]] = {request: set() for request in self.joiners}
        self.frozen: set[Subject] = set()

        class Call(scripted_call):
            """A call whose couplings reach the regions, and whose facts about the regions are true."""

            owners_left = True

            def __init__(call, request: Subject, event: str, facts: dict[str, bool], fault: int | None) -> None:
                policy = self.policies[request]
                super().__init__(paired=policy in ("frozen", "mtp"))
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
                call.frozen_policy = policy == "frozen"
                call.plain_checkpoint = policy == "checkpoint"
                captures = {"checkpoint": "complete_decode_step", "mtp": "publish_mtp_endpoint"}.get(policy) == event
                call.captures_planned = captures and facts["captures_planned"]
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
                    if verb in ("publish", "publish_frozen"):
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
                elif verb in ("publish_frozen", "release") or (verb, call.event) == (
                    "apply_advances", "complete_decode_step",
                ):  # fmt: skip
                    self.frozen.discard(call.request)
                elif verb == "freeze":
                    self.frozen.add(call.request)
                elif verb == "stage_captures":
                    self.reserved[call.request].add(call.event)
                elif verb == "retire_reservations":
                    event = "enqueue_prefill_captures" if call.event == "finalize_prefill" else call.event
                    self.reserved[call.request].discard(event)
                if verb == "release":
                    self.reserved[call.request].clear()
                elif verb == "retire" and not call.joiner_waits:
                    self.joiners[call.request] = 0
                return DrainResult(ok=True) if verb == "drain" else True

        self.call = Call

    def send(self, request: Subject, event: str, facts: dict[str, bool], fault: int | None) -> Any:
        """One event; what the coordinator would have refused beforehand is left out."""
        if event in TAKERS and self.holder not in (None, request):
            return None
        if event == "admit_sequence" and self.policies[request] != "attention":
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
            if request.state in NEVER_VIEW or request.state.startswith("finishing"):
                assert self.viewed is not request, f"{request.state} is the length view"
            if request.state in ALWAYS_VIEW:
                assert self.viewed is request, f"{request.state} is not the length view"
            if request.state not in ("quarantined", "poisoned"):
                owed = request in self.frozen
                assert owed == request.state.endswith("frozen"), f"{request.state}, and a frozen endpoint: {owed}"
            if request.state not in MAY_RESERVE:
                assert not self.reserved[request], f"{request.state} with reserved snapshot slots"
            if request.state == "settled":
                assert joiners == 0
            if request.state == "seating":
                assert joiners > 0


CHOSEN = ("growth_possible", "only_sequence", "survivors_remain", "joiner_stays", "captures_planned")
moves = st.tuples(
    st.integers(0, 1),
    st.integers(0, 99),
    st.fixed_dictionaries({name: st.booleans() for name in CHOSEN}),
    st.none() | st.none() | st.integers(0, 12),
)


@settings(max_examples=150, deadline=None)
@given(st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)), st.lists(moves, max_size=40))
def test_token_view_and_poison_agree_with_the_requests(scripted_call, policies, history):
    """After each event, failed or not; ends of life are rare, so that histories get somewhere.

    Also: every trace replays (C108), no page is freed while a device may read it, a failed drain is the last thing that
    the device hears of a request until a shutdown, a frozen endpoint is owed in the frozen states and in no other, and
    snapshot slots are reserved only where a later drain will find them.
    """
    world = World(scripted_call, policies)
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
        if "retire_reservations" in log and event != "finalize_prefill":
            assert "drain" in log[: log.index("retire_reservations")]
        if not call.paired:
            assert not [verb for verb in log if "draft" in verb]
        if "busy" in log:
            rest = log[log.index("busy") + 1 :]
            assert not set(rest) & {*FREEING, "retire_reservations", "publish", "publish_frozen"}
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
