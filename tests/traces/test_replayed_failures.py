"""C131: a failure that was recorded happens again, at the same action, and leads to the same end.

The situations and calls are those of the failure suites; every action, drain and publication of every call fails once.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import InvariantViolation, ResourceDemand
from context_cache.coordinator.identity import HashChain
from context_cache.coordinator.traces.reader import TraceReader

PLAIN = "conformance/test_failure_injection.py"
FLAVOURED = "conformance/test_flavour_failures.py"


def names(path):
    """The calls of a failure suite, read when the tests are collected."""
    spec = spec_from_file_location("names_of_calls", Path(__file__).parents[1] / path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CALLS = sorted(names(PLAIN).CALLS)
FLAVOURED_CALLS = [
    (flavour, name) for name, call in sorted(names(FLAVOURED).CALLS.items()) for flavour in call.flavours
]


class OneFailure:
    """Records a situation and a call that fails in some way, and replays it."""

    def __init__(self, recorded, ends_alike, tmp_path, make):
        self.recorded, self.ends_alike, self.path, self.make = recorded, ends_alike, tmp_path, make
        self.count = 0

    def count_actions(self, case):
        h = self.make()
        try:
            handle = case.setup(h)
            start = len(h.recording.log)
            case.call(h, handle)
            made = list(h.recording.log[start:])
            return len(made) - made.count("drain"), made.count("drain")
        finally:
            h.abandon()

    def play(self, case, fail, *, expected=1, then="drop"):
        """``fail(h)`` prepares the failure. Returns the failures of the whole trace."""
        self.count += 1
        path = self.path / f"t{self.count}"
        h = self.recorded(path, self.make)
        handle = case.setup(h)
        fail(h)
        with contextlib.suppress(DeviceError, RuntimeError, InvariantViolation, KeyboardInterrupt, MemoryError):
            case.call(h, handle)
        h.heal()
        # The end of what has failed is repeated too: what it clears and waits for depends on what was unknown.
        if then == "drop":
            with contextlib.suppress(KeyboardInterrupt):
                for one in h.handles:
                    one.close()
        h.recorder.close()
        assert h.recorder.failure is None
        if hasattr(h, "publishing"):
            h.publishing.fail()
        failures = self.ends_alike(path, h.coordinator)
        assert len(failures) >= expected, failures
        return failures


@pytest.fixture
def one_failure(recorded, ends_alike, tmp_path, harness_class):
    def make(**options):
        return OneFailure(recorded, ends_alike, tmp_path, lambda: harness_class(**options))

    return make


@pytest.fixture
def one_flavoured_failure(recorded, ends_alike, tmp_path, flavour_class, publishing):
    def make(name):
        def harness():
            publishing.fail()
            h = flavour_class(name)
            h.publishing = publishing
            return h

        return OneFailure(recorded, ends_alike, tmp_path, harness)

    return make


@pytest.mark.parametrize("partly", [False, True], ids=["not enqueued", "enqueued all the same"])
@pytest.mark.parametrize("name", CALLS)
def test_each_device_action_fails_again(suite, one_failure, name, partly):
    case, player = suite(PLAIN).CALLS[name], one_failure(partly=partly)
    actions, _ = player.count_actions(case)
    for action in range(1, actions + 1):
        player.play(case, lambda h, action=action: h.fail(action))
        if not partly:
            # Two in a row: the clearing of what the first one left behind fails too.
            player.play(case, lambda h, action=action: h.fail(action, action + 1))


DRAINS = {
    "not idle": lambda h: setattr(h.sync, "fail", True),
    "raises": lambda h: setattr(h.sync, "error", RuntimeError("lost device")),
    "device error": lambda h: setattr(h.sync, "error", DeviceError("drain", "s", "sticky")),
    "interrupted": lambda h: setattr(h.sync, "error", KeyboardInterrupt()),
    "exits": lambda h: setattr(h.sync, "error", SystemExit(3)),
    "no memory": lambda h: setattr(h.sync, "error", MemoryError()),
}


@pytest.mark.parametrize("how", DRAINS)
def test_each_drain_fails_again(suite, one_failure, how):
    player, seen = one_failure(), 0
    some = 2 if how == "not idle" else 5
    for case in list(suite(PLAIN).CALLS.values())[::some]:
        _, drains = player.count_actions(case)
        if drains:
            with contextlib.suppress(SystemExit):
                failures = player.play(case, DRAINS[how])
                assert any(text.startswith("drain 1 ") for text in failures)
                seen += 1
    assert seen > 2 or how == "exits"


def test_a_drain_that_takes_too_long_fails_again(suite, recorded, ends_alike, harness_class, tmp_path):
    """A timeout shows as a drain that failed, whatever the limit was."""
    h = recorded(tmp_path / "t", lambda: harness_class(drain_timeout_seconds=0.01, own_synchronizer=False))
    handle = suite(PLAIN).prefilling(h)
    h.stream.hold()
    handle.close()
    assert handle.state == "quarantined"
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == ["drain 1 not_idle"]
    h.stream.let_go()


@pytest.mark.parametrize("name", ["admit, settled", "admit, not the view", "admit, seating"])
def test_a_joiner_that_fails_in_two_ways_fails_again(suite, one_failure, name):
    case, player = suite(PLAIN).CALLS[name], one_failure()
    actions, _ = player.count_actions(case)
    for action in range(1, actions + 1):

        def fail(h, action=action):
            h.fail(action)
            h.sync.fail = True

        failures = player.play(case, fail, expected=2)
        assert failures[0].endswith("DeviceError")
        assert failures[1] == "drain 1 not_idle"


def test_a_lost_handle_that_meets_a_failing_upload_fails_again(recorded, ends_alike, harness_class, tmp_path):
    """The close of the orphan stands before the call that reaped it."""
    h = recorded(tmp_path / "t", harness_class)
    handle = h.begin(h.T(5), 0, keep=False)
    h.run_prefill(handle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del handle
        gc.collect()
    h.fail(1)
    assert h.try_begin([h.sequence_admission([1, 2], 1)]).status is h.POISONED
    h.heal()
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == ["upload_base_rows 1 DeviceError"]
    with TraceReader(tmp_path / "t") as reader:
        kinds = [type(group.record).__name__ for group in reader.groups()]
    assert kinds[-2:] == ["Close", "BeginRequest"]


def test_uses_of_a_verb_are_counted_in_each_call(recorded, ends_alike, harness_class, tmp_path):
    """The number of a failure is the one in its call; a replay that counted otherwise would agree with itself."""
    h = recorded(tmp_path / "t", harness_class)
    handle = h.begin(h.T(5))
    h.run_prefill(handle)
    for _ in range(3):
        h.fail(1)
        with pytest.raises(DeviceError):
            h.prepare_decode(handle, 5)
        h.heal()
    for resident in (1, 2):
        other = h.begin([7, 8], resident)
        h.sync.fail = True
        handle.close()
        h.sync.fail = False
        if h.coordinator.state == "poisoned":
            other.close()
            break
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == ["upload_base_rows 1 DeviceError"] * 3 + ["drain 1 not_idle"]


# ---- publications ----------------------------------------------------------------------------------------------------

ERRORS = [RuntimeError("?"), InvariantViolation("a page is lost"), MemoryError(), ValueError("?"), OSError(5, "?")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("countdown", [1, 2])
def test_a_publication_fails_again(suite, recorded, ends_alike, harness_class, tmp_path, error, countdown):
    """Its slot asked for identities before it failed, and so it does again."""
    module = suite(PLAIN)
    manager = module.PublishRaises(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    h = recorded(tmp_path / "t", lambda: harness_class(manager=manager))
    handle = h.begin_batch([h.T(7), [51, 52, 53, 54, 55, 56, 57]])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    manager.error, manager.countdown = error, countdown
    with pytest.raises(type(error)):
        h.complete(handle, 903, 904, completed=[0, 1])
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == [f"publish {countdown} {type(error).__name__}"]


def test_an_error_of_a_class_that_is_not_known_here_fails_again(suite, recorded, ends_alike, harness_class, tmp_path):
    class Peculiar(Exception):
        pass

    module = suite(PLAIN)
    manager = module.PublishRaises(ResourceDemand(base_kv_pages=12), 4, max_records=16)
    h = recorded(tmp_path / "t", lambda: harness_class(manager=manager))
    handle = module.prefilling(h)
    h.synchronize()
    manager.error, manager.countdown = Peculiar("?"), 1
    with pytest.raises(Peculiar):
        h.coordinator.finalize_prefill_publication(handle, h.prefill_advances(handle))
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == ["publish 1 Peculiar"]


def test_a_publication_that_fails_over_its_identity_fails_again(
    recorded, ends_alike, harness_class, tmp_path, monkeypatch
):
    """No answer was given, and none is when it is repeated; the manager is not asked either."""
    h = recorded(tmp_path / "t", harness_class)
    handle = h.begin(h.T(7))
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()

    def broken(self, tokens, media=()):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HashChain, "extend_to", broken)
        with pytest.raises(MemoryError):
            h.complete(handle, 903, completed=[0])
    h.recorder.close()
    assert ends_alike(tmp_path / "t", h.coordinator) == ["publish 1 MemoryError"]


# ---- every flavour ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavour", "name"), FLAVOURED_CALLS[::11])
def test_each_action_of_a_flavour_fails_again(suite, one_flavoured_failure, flavour, name):
    every_action(suite, one_flavoured_failure, flavour, name)


@pytest.mark.slow
@pytest.mark.parametrize(("flavour", "name"), FLAVOURED_CALLS)
def test_every_action_of_every_flavour_fails_again(suite, one_flavoured_failure, flavour, name):
    every_action(suite, one_flavoured_failure, flavour, name)


def every_action(suite, one_flavoured_failure, flavour, name):
    case, player = suite(FLAVOURED).CALLS[name], one_flavoured_failure(flavour)
    actions, drains = player.count_actions(case)
    for action in range(1, actions + 1):
        player.play(case, lambda h, action=action: h.fail(action))
    if drains:
        player.play(case, DRAINS["not idle"])
        player.play(case, DRAINS["interrupted"])


def test_the_publications_of_every_flavour_fail_again(suite, one_flavoured_failure, publishing):
    """One after another, until the call has no more of them."""
    seen = set()
    # Those that are in the middle of something frozen or staged have something to publish.
    for flavour, name in FLAVOURED_CALLS[1::5]:
        case, player = suite(FLAVOURED).CALLS[name], one_flavoured_failure(flavour)
        publishing.fail()
        h = player.make()
        handle = case.setup(h)
        publishing.fail()
        case.call(h, handle)
        count = publishing.calls
        h.abandon()
        for number in range(1, min(count, 2) + 1):
            failures = player.play(case, lambda h, number=number: publishing.fail(number))
            assert f"publish {number} RuntimeError" in failures
            seen.add(flavour)
    assert len(seen) >= 3
