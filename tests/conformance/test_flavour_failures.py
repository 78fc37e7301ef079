"""Scenario 121 for every flavour: each device action, each drain and each publication of every call may fail.

``CALLS`` names a situation, the call that is made in it, and the state that the row of the request table leads to when
a device action of the row raises. A run without faults says how many actions and drains the call has. Whatever fails,
afterwards the request is dropped, the coordinator shut down, and nothing may have leaked or been freed too early.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import InvariantViolation

B_TOKENS = [51, 52, 53]
FREEZING = ("eagle", "draft", "shared-kv")
PLAIN_CHECKPOINTS = ("hybrid", "recurrent")
MTP = ("hybrid-mtp",)
ALL = (*FREEZING, *PLAIN_CHECKPOINTS, *MTP)
WITH_PAGES = tuple(name for name in ALL if name != "recurrent")
WITH_BATCHES = tuple(name for name in ALL if name not in MTP)

# Headroom with which the prompt of the flavour needs one page more than it has, and one that exceeds the row.
GROWTH = {
    "eagle": (5, 5), "draft": (5, 5), "shared-kv": (5, 0), "hybrid": (4, 0), "recurrent": (4, 0), "hybrid-mtp": (8, 8)
}  # fmt: skip
PAIRED = ("eagle", "draft", "hybrid-mtp")


def prompt(h):
    return h.T(8) if h.name in FREEZING else h.T(5)


def too_much(h):
    return (13, 13 if h.name in PAIRED else 0)


def is_plain_checkpoint(h):
    return h.name in PLAIN_CHECKPOINTS


# ---- situations ------------------------------------------------------------------------------------------------------


def admitted(h):
    return h.begin(prompt(h), 0)


def prefilling(h):
    handle = admitted(h)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def captured(h):
    handle = prefilling(h)
    h.capture(handle)
    return handle


def warm(h):
    """A request that hits what an earlier one has published."""
    if h.mtp:
        producer = prefilling(h)
        assert h.publish_mtp(producer, 5) is h.OK
        assert h.finalize(producer) is h.OK
    else:
        producer = settled(h)
    assert h.finish(producer) is h.OK
    handle = h.begin([*prompt(h), 77], 0)
    assert h.starts[0] > 0
    return handle


def warm_prefilling(h):
    handle = warm(h)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def finalised(h):
    """After the prefill: frozen where the policy freezes, else settled."""
    handle = admitted(h)
    h.run_prefill(handle)
    return handle


def prefill_frozen(h):
    handle = finalised(h)
    assert handle.state == "prefill_frozen"
    return handle


def settled(h, resident=0, tokens=None):
    handle = h.begin(prompt(h) if tokens is None else tokens, resident)
    h.run_prefill(handle)
    if h.freezes(handle):
        h.decode(handle, None)
    assert handle.state == "settled"
    return handle


def batch(h):
    if h.name in MTP:
        return settled(h)
    handle = h.begin_batch([prompt(h), B_TOKENS], [0, 1])
    h.run_prefill(handle)
    if h.freezes(handle):
        h.decode(handle, None, None)
    return handle


def not_the_view(h):
    handle = settled(h)
    settled(h, 1, B_TOKENS)
    return handle


def decoding(h):
    handle = settled(h)
    assert h.prepare_decode(handle, GROWTH[h.name]).status is h.OK
    return handle


def decoding_frozen(h):
    handle = prefill_frozen(h)
    assert h.prepare_decode(handle, GROWTH[h.name]).status is h.OK
    assert handle.state == "decoding_frozen"
    return handle


def decode_retry(h):
    handle = not_the_view(h)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, GROWTH[h.name])
    h.heal()
    assert handle.state == "decode_retry"
    return handle


def decode_retry_frozen(h):
    handle = prefill_frozen(h)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.prepare_decode(handle, GROWTH[h.name])
    h.heal()
    assert handle.state == "decode_retry_frozen"
    return handle


def settled_frozen(h):
    handle = prefill_frozen(h)
    h.publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        h.begin_compaction(handle, [-1])
    assert handle.state == "settled_frozen"
    return handle


def ending(situation, state):
    """The situation after its only sequence was refused its growth."""

    def setup(h):
        handle = situation(h)
        assert h.prepare_decode(handle, too_much(h)).status is h.REQUEST_FAILED
        assert handle.state == state
        return handle

    setup.__name__ = state
    return setup


def compacting(h):
    handle = batch(h)
    size = h.size(handle)
    assert h.begin_compaction(handle, [0] if size == 1 else [-1, 0]) is h.OK
    return handle


def compacting_all(h):
    handle = batch(h)
    assert h.begin_compaction(handle, [-1] * h.size(handle)) is h.OK
    return handle


def broken(h):
    handle = admitted(h)
    h.fail(2)
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(handle)
    h.heal()
    return handle


def broken_with_a_reservation(h):
    handle = prefilling(h)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.publish_mtp(handle, 5) if h.mtp else h.coordinator.enqueue_prefill_captures(handle)
    h.heal()
    assert h.captured(handle) == "reserved"
    return handle


def quarantined(h):
    handle = broken_with_a_reservation(h) if h.flavour.checkpoints else prefilling(h)
    h.sync.fail = True
    h.drop(handle)
    h.sync.fail = False
    assert handle.state == "quarantined"
    return handle


# ---- calls -----------------------------------------------------------------------------------------------------------


def prepare_prefill(h, handle):
    return h.coordinator.prepare_prefill(handle)


def enqueue_captures(h, handle):
    return h.coordinator.enqueue_prefill_captures(handle)


def finalize_prefill(h, handle):
    h.synchronize()
    return h.finalize(handle)


def publish_mtp(h, handle):
    return h.publish_mtp(handle, h.seq(handle).token_count)


def restore_mtp(h, handle):
    return h.restore_mtp(handle)


def prepare_decode(h, handle):
    return h.prepare_decode(handle, GROWTH[h.name]).status


def complete_all(h, handle):
    """Completes slot 0 after one more token, so that there is something new to publish or to capture."""
    h.synchronize()
    return h.complete(handle, 902, completed=[0])


def complete_step(h, handle):
    """One more token, nobody is completed: only a frozen endpoint is published."""
    h.synchronize()
    return h.complete(handle, 902)


def complete_block(h, handle):
    """As much as fills the next block, for policies that publish full blocks up to the common length."""
    h.synchronize()
    return h.complete(handle, [41, 42, 43, 44], completed=[0], common=[12])


def begin_compaction(h, handle):
    size = h.size(handle)
    return h.begin_compaction(handle, [0] if size == 1 else [-1, 0])


def compact(h, handle):
    return h.coordinator.compact_batch(handle)


def finish(h, handle):
    return h.finish(handle)


def drop(h, handle):
    return h.drop(handle)


def shutdown(h, handle):
    return h.coordinator.shutdown()


class Call(NamedTuple):
    setup: Callable[[Any], Any]  # harness -> handle
    call: Callable[[Any, Any], Any]
    after_error: str  # state of the request after a DeviceError
    flavours: tuple[str, ...] = ALL
    raises: bool = True
    poisons: bool = False  # a DeviceError here was a row that could not be cleared
    actions: int = 1  # at least
    drains: int = 0  # exactly


FROZEN_ENDS = {
    "finishing_frozen": (settled_frozen, 0),
    "finishing_prefill_frozen": (prefill_frozen, 1),
    "finishing_retry_frozen": (decode_retry_frozen, 1),
}
ENDS: list[tuple[Any, tuple[str, ...], int]] = [
    (prefilling, ALL, 1),
    (warm_prefilling, ALL, 1),
    (captured, PLAIN_CHECKPOINTS, 1),
    (prefill_frozen, FREEZING, 1),
    (settled, ALL, 0),
    (settled_frozen, FREEZING, 0),
    (decoding, ALL, 1),
    (decoding_frozen, FREEZING, 1),
    (decode_retry, ALL, 1),
    (decode_retry_frozen, FREEZING, 1),
    (compacting, ALL, 1),
    (broken, ALL, 1),
    (broken_with_a_reservation, (*PLAIN_CHECKPOINTS, *MTP), 1),
    (ending(settled, "finishing"), WITH_PAGES, 0),
    (ending(decode_retry, "finishing_retry"), WITH_PAGES, 1),
    *[(ending(setup, state), FREEZING, drains) for state, (setup, drains) in FROZEN_ENDS.items()],
]
CALLS = {
    "prepare_prefill": Call(admitted, prepare_prefill, "broken", actions=2),
    "prepare_prefill, warm": Call(warm, prepare_prefill, "broken", actions=2),
    "captures": Call(prefilling, enqueue_captures, "broken", PLAIN_CHECKPOINTS),
    "publish_mtp": Call(prefilling, publish_mtp, "broken", MTP, actions=3, drains=1),
    "publish_mtp, warm": Call(warm_prefilling, publish_mtp, "broken", MTP, actions=3, drains=1),
    "restore_mtp": Call(warm_prefilling, restore_mtp, "prefilling", MTP),
    "prepare_decode, settled": Call(settled, prepare_decode, "decode_retry", WITH_PAGES),
    "prepare_decode, not the view": Call(not_the_view, prepare_decode, "decode_retry"),
    "prepare_decode, again": Call(decode_retry, prepare_decode, "decode_retry"),
    "prepare_decode, frozen": Call(prefill_frozen, prepare_decode, "decode_retry_frozen", FREEZING),
    "prepare_decode, settled_frozen": Call(settled_frozen, prepare_decode, "decode_retry_frozen", FREEZING, actions=2),
    "prepare_decode, frozen again": Call(decode_retry_frozen, prepare_decode, "decode_retry_frozen", FREEZING),
    "complete with a capture": Call(decoding, complete_all, "broken", PLAIN_CHECKPOINTS, drains=1),
    "begin_compaction": Call(batch, begin_compaction, "broken"),
    "begin_compaction, not the view": Call(not_the_view, begin_compaction, "broken", actions=2),
    "begin_compaction, frozen": Call(prefill_frozen, begin_compaction, "broken", FREEZING, drains=1),
    "begin_compaction, settled_frozen": Call(settled_frozen, begin_compaction, "broken", FREEZING, actions=2),
    "compact_batch": Call(compacting, compact, "broken", drains=1),
    "compact_batch, nobody survives": Call(compacting_all, compact, "broken", actions=2, drains=1),
    "shutdown": Call(quarantined, shutdown, "released", raises=False, actions=0, drains=1),
    **{
        f"{call.__name__}, {setup.__name__}": Call(
            setup, call, "released", names, raises=False, poisons=True, drains=drains, actions=0
        )
        for call in (finish, drop)
        for setup, names, drains in ENDS
    },
}
# A frozen endpoint that is published by finish does not change what a failing clearing upload means.
CASES = [
    pytest.param(flavour, name, id=f"{flavour}-{name}") for name, case in CALLS.items() for flavour in case.flavours
]


@pytest.fixture
def make(flavour, publishing):
    def harness(name, **options):
        publishing.fail()
        h = flavour(name, **options)
        h.publishing = publishing
        return h

    return harness


def clean_run(make, name, case):
    """A run without faults: how many verbs and drains has the call?"""
    h = make(name)
    handle = case.setup(h)
    start = len(h.recording.log)
    case.call(h, handle)
    made = list(h.recording.log[start:])
    h.check()
    h.end_everything()
    assert made.count("drain") == case.drains
    return len(made) - made.count("drain")


def holdings(h):
    """What may not be released before a drain: everything but the pins of hits, whose readers are ordered before."""
    held = h.held()
    for handle in h.handles:
        if handle.valid:
            for slot in range(h.size(handle)):
                for kind, pinned in zip((h.RECURRENT, h.PARTIAL), h.hit_slots(handle, slot), strict=True):
                    if pinned is not None:
                        held[kind][pinned] -= 1
    return held


def watch(h):
    """From now on nothing that is held may be let go before the device has been waited for."""
    held, waited = holdings(h), []

    def before():
        if not waited:
            now = h.held()
            for kind, counts in held.items():
                for index, count in counts.items():
                    assert now[kind].get(index, 0) >= count, f"{kind.name} {index} was released before the drain"
        waited.append(True)

    h.sync.before = before
    return waited


def free_sets(h):
    return {kind: set(h.free(kind)) for kind in h.KINDS}


@pytest.mark.parametrize(
    ("end", "partly"), [("good drain", False), ("failed drain first", True)], ids=["good drain", "failed drain, partly"]
)
@pytest.mark.parametrize(("name", "call"), CASES)
def test_each_device_action_may_fail(make, name, call, end, partly):
    """Scenario 121. The state is the one the table names; afterwards everything ends and nothing leaks."""
    case = CALLS[call]
    actions = clean_run(make, name, case)
    assert actions >= case.actions
    for action in range(1, actions + 1):
        h = make(name, partly=partly)
        handle = case.setup(h)
        was, poisoned_before = str(handle.state), h.coordinator.state == "poisoned"
        waited, free_before = watch(h), free_sets(h)
        h.fail(action)
        where = f"action {action} of {actions}"
        if case.raises:
            with pytest.raises(DeviceError):
                case.call(h, handle)
        elif case.call is finish:
            assert case.call(h, handle) is h.POISONED, where
        else:
            case.call(h, handle)
        h.backend.disarm()
        assert handle.state == case.after_error, where
        expected = "closed" if case.call is shutdown else "poisoned" if poisoned_before or case.poisons else "serving"
        assert h.coordinator.state == expected, where
        freed = any(now - free_before[kind] for kind, now in free_sets(h).items())
        if freed and was in h.OUTSTANDING | {"quarantined"}:
            assert waited, f"{where}: something was freed without a drain"
        if handle.valid:
            holds = case.after_error in h.TOKEN_STATES
            assert h.coordinator.execution_holder == (handle.id if holds else None), where
            if case.after_error == "broken":
                assert h.coordinator.length_view != handle.id
                h.refuses(h.coordinator.prepare_prefill, handle)
        h.check()

        if handle.valid and end == "failed drain first":
            watch(h)
            held = h.held()
            h.sync.fail = True
            h.drop(handle)
            assert handle.state == "quarantined", where
            assert h.coordinator.state == "poisoned"
            assert h.held() == held, where
            h.check()
        h.end_everything()


DRAINING = [param for param in CASES if CALLS[param.values[1]].drains]


@pytest.mark.parametrize(("name", "call"), DRAINING)
def test_each_drain_may_fail(make, name, call):
    """Scenario 121. A failed drain withholds the whole request, no device call follows; shutdown releases it."""
    case = CALLS[call]
    h = make(name)
    handle = case.setup(h)
    held, records = holdings(h), h.record_ids()
    h.mark()
    h.sync.fail = True
    answer = case.call(h, handle)
    if case.call is not drop:
        assert answer is h.POISONED
    verbs = h.log
    assert verbs[-1] == "drain", "a device call follows a failed drain"
    assert verbs.count("drain") == 1
    assert handle.state == ("poisoned" if case.call is shutdown else "quarantined")
    assert not handle.valid
    assert h.coordinator.state == "poisoned"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.length_view is None
    assert h.record_ids() == records, "nothing is published after a failed drain"
    now = h.held()
    for kind, counts in held.items():
        for index, count in counts.items():
            assert now[kind].get(index, 0) >= count, f"{kind.name} {index} was released"
    h.check()

    rows = [(h.row(slot), h.draft_row(slot)) for slot in range(h.max_batch)]
    withheld = h.held()
    others = [other for other in h.handles if other.valid]
    assert h.coordinator.shutdown() is h.POISONED
    assert handle.state == "poisoned"
    assert h.held() == withheld
    assert [(h.row(slot), h.draft_row(slot)) for slot in range(h.max_batch)] == rows
    h.sync.fail = False
    h.mark()
    assert h.coordinator.shutdown() is (h.REQUEST_FAILED if others else h.OK)
    assert h.log[0] == "drain"
    assert handle.state == "released"
    assert h.record_ids() == records, "an endpoint of a withheld request is never published"
    h.end_everything()
    for slot in range(h.max_batch):
        assert h.device_row(slot) == h.device_draft_row(slot) == h.empty_row


# ---- publications ----------------------------------------------------------------------------------------------------


class Publishes(NamedTuple):
    setup: Callable[[Any], Any]
    call: Callable[[Any, Any], Any]
    after_error: str
    flavours: tuple[str, ...]
    again: bool = False  # the same call succeeds afterwards


PUBLISHING = {
    "finalize_prefill": Publishes(captured, finalize_prefill, "settled", PLAIN_CHECKPOINTS),
    "publish_mtp": Publishes(prefilling, publish_mtp, "prefilling", MTP, again=True),
    "publish_mtp, warm": Publishes(warm_prefilling, publish_mtp, "prefilling", MTP, again=True),
    "complete with a capture": Publishes(decoding, complete_all, "settled", PLAIN_CHECKPOINTS),
    "complete, pairs": Publishes(decoding, complete_block, "settled", FREEZING),
    "complete, frozen": Publishes(decoding_frozen, complete_step, "settled", FREEZING),
    "begin_compaction, frozen": Publishes(prefill_frozen, begin_compaction, "settled_frozen", FREEZING, again=True),
    "begin_compaction, settled_frozen": Publishes(
        settled_frozen, begin_compaction, "settled_frozen", FREEZING, again=True
    ),
    "finish, prefill_frozen": Publishes(prefill_frozen, finish, "settled_frozen", FREEZING, again=True),
    "finish, decoding_frozen": Publishes(decoding_frozen, finish, "settled_frozen", FREEZING, again=True),
    "finish, decode_retry_frozen": Publishes(decode_retry_frozen, finish, "settled_frozen", FREEZING, again=True),
    "finish, settled_frozen": Publishes(settled_frozen, finish, "settled_frozen", FREEZING, again=True),
    **{
        f"finish, {state}": Publishes(ending(setup, state), finish, "finishing_frozen", FREEZING, again=True)
        for state, (setup, _) in FROZEN_ENDS.items()
    },
}
PUBLISHING_CASES = [
    pytest.param(flavour, name, id=f"{flavour}-{name}")
    for name, case in PUBLISHING.items()
    for flavour in case.flavours
]


@pytest.mark.parametrize("end", ["again", "drop"])
@pytest.mark.parametrize(("name", "call"), PUBLISHING_CASES)
def test_each_publication_may_raise(make, publishing, name, call, end):
    """Scenario 121 and 50.1: the state of the row's publish entry; nothing stays staged, reserved or half published."""
    case = PUBLISHING[call]
    h = make(name)
    handle = case.setup(h)
    records = h.record_ids()
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        case.call(h, handle)
    assert handle.state == case.after_error
    assert handle.valid
    assert h.coordinator.state == "serving"
    holds = case.after_error in h.TOKEN_STATES
    assert h.coordinator.execution_holder == (handle.id if holds else None)
    assert h.record_ids() == records
    assert h.captured(handle) == "none", "so check() allows no pin of a snapshot but those of hits"
    h.check()

    publishing.fail()
    if end == "drop":
        h.drop(handle)
        assert h.record_ids() == records
    elif case.again:
        calls = h.sync.calls
        assert case.call(h, handle) is h.OK
        if case.after_error.endswith("_frozen"):
            assert h.sync.calls == calls, "quiescence is already proven"
        # A warm or repeated prompt may find its endpoint stored already.
        metrics = h.metrics()
        assert metrics["committed_publications"] + metrics["existing_publications"] > 0
    h.check()
    h.end_everything()


@pytest.mark.parametrize(("name", "call"), PUBLISHING_CASES)
def test_a_broken_invariant_in_a_publication_poisons(make, publishing, name, call, monkeypatch):
    """00.1, 50.0 and scenario 121: corrupt books are raised, nobody is admitted any more, and everything still ends."""
    case = PUBLISHING[call]
    h = make(name)
    handle = case.setup(h)
    monkeypatch.setattr(publishing, "error", InvariantViolation("a page is lost"))
    publishing.fail(1)
    with pytest.raises(InvariantViolation):
        case.call(h, handle)
    assert h.coordinator.state == "poisoned"
    assert handle.state == case.after_error
    publishing.fail()
    assert h.try_begin([h.sequence_admission([1, 2], 1)]).status is h.POISONED
    h.check()
    h.end_everything()


@pytest.mark.parametrize("name", ["eagle", "shared-kv"])
def test_a_frozen_endpoint_that_raises_does_not_stop_a_completed_slot(make, publishing, name):
    """40.18 and scenario 121: already published slots stay published, the failing one is skipped, the step is done."""
    h = make(name)
    handle = h.begin_batch([h.T(4), [51, 52, 53, 54]])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        h.complete(handle, [41], [42], common=[4, 4])
    assert handle.state == "settled"
    assert [h.committed(handle, slot) for slot in (0, 1)] == [5, 5]
    assert [h.seq(handle, slot).published_full_block_count for slot in (0, 1)] == [0, 1]
    assert len(h.record_ids()) == 1
    h.check()
    h.end_everything()


@pytest.mark.parametrize("name", PLAIN_CHECKPOINTS)
def test_one_checkpoint_of_a_batch_that_raises_costs_only_its_slot(make, publishing, name):
    """40.18 and scenario 121 for captures of two sequences."""
    h = make(name)
    handle = h.begin_batch([h.T(5), B_TOKENS])
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.capture(handle)
    h.synchronize()
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        h.finalize(handle)
    assert handle.state == "settled"
    assert [h.record(i)["length"] for i in h.record_ids()] == [3]
    assert [h.captured(handle, slot) for slot in (0, 1)] == ["none", "none"]
    assert h.held()[h.RECURRENT] == {}
    h.check()
    h.end_everything()


# ---- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "call"), [p for p in DRAINING if CALLS[p.values[1]].call is not shutdown])
def test_an_interrupted_drain_quarantines_first(make, name, call):
    """30.5 and scenario 89b for every draining call: the request is quarantined, then the interrupt is raised."""
    case = CALLS[call]
    h = make(name)
    handle = case.setup(h)
    h.sync.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case.call(h, handle)
    h.sync.error = None
    assert handle.state == "quarantined"
    assert h.coordinator.state == "poisoned"
    h.check()
    h.end_everything()


@pytest.mark.parametrize("name", ALL)
def test_a_lost_handle_is_reaped_whatever_the_flavour(make, name):
    """Scenario 90b for every flavour: the next call drains, releases pages, drafts and reserved slots."""
    h = make(name)
    handle = h.begin(prompt(h), 0, keep=False)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    if is_plain_checkpoint(h):
        h.capture(handle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del handle
        gc.collect()
    calls = h.sync.calls
    other = h.begin(B_TOKENS, 1)
    assert h.sync.calls - calls == 1
    h.drop(other)
    h.end_everything()
