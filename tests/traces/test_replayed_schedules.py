"""C131 with everything at once: random schedules, with failures on purpose, are recorded and replay to the same end.

The schedules are those of the conformance suites: joiners, compactions, refusals, calls out of turn, failing devices,
drains and publications, orphans, shutdowns in between.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from context_cache.coordinator.traces import TraceRecorder

PLAIN = "conformance/test_random_schedules.py"
FLAVOURED = "conformance/test_flavour_schedules.py"
FLAVOURS = ("vanilla", "eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp")
COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "print_blob": True,
}


class Factory:
    """Looks like a harness class; what it makes is recorded into a new file each time."""

    def __init__(self, recorded, harness_class, folder, redact):
        self.recorded, self.harness_class, self.folder, self.redact = recorded, harness_class, folder, redact
        self.path = None

    def __call__(self, *arguments, **options):
        self.path = self.folder / f"t{len(self.recorded.made)}"
        recorder = TraceRecorder(self.path, redact=self.redact, timings=False)
        return self.recorded(recorder, lambda: self.harness_class(*arguments, **options))

    def check(self, replay_equal):
        h, recorder = self.recorded.made[-1]
        h.abandon()
        recorder.close()
        assert recorder.failure is None
        return replay_equal(self.path)


@pytest.fixture(params=[False, True], ids=["tokens", "redacted"])
def factory(request, recorded, harness_class, tmp_path):
    return Factory(recorded, harness_class, tmp_path, request.param)


@pytest.fixture(params=[False, True], ids=["tokens", "redacted"])
def flavour_factory(request, recorded, flavour_class, tmp_path):
    return Factory(recorded, flavour_class, tmp_path, request.param)


def by_seed(suite, factory, replay_equal, seeds, steps):
    steps_made = 0
    for seed in seeds:
        suite(PLAIN).play_seed(factory, seed, steps)
        try:
            steps_made += factory.check(replay_equal).steps
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return steps_made


@pytest.mark.parametrize("first", range(0, 6, 3))
def test_a_random_schedule_replays(suite, factory, replay_equal, first):
    assert by_seed(suite, factory, replay_equal, range(first, first + 3), 60) > 100


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3000, 3200, 50))
def test_many_random_schedules_replay(suite, factory, replay_equal, first):
    by_seed(suite, factory, replay_equal, range(first, first + 50), 150)


def searched(suite, factory, replay_equal, examples, steps, **options):
    class Machine(suite(PLAIN).make_machine(factory)):
        def teardown(self):
            super().teardown()
            if hasattr(self, "h"):
                factory.check(replay_equal)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=steps, **{**COMMON, **options})
    )


def test_a_schedule_that_hypothesis_makes_replays(suite, factory, replay_equal):
    """A failing one is shrunk to the shortest that does not replay."""
    searched(suite, factory, replay_equal, 5, 25)


@pytest.mark.slow
def test_many_schedules_that_hypothesis_makes_replay(suite, factory, replay_equal):
    searched(suite, factory, replay_equal, 300, 60, derandomize=False)


def flavoured_seed(suite, factory, publishing, replay_equal, name, seed, steps):
    module = suite(FLAVOURED)
    module.play_seed(factory, publishing, name, seed, steps)
    publishing.fail()
    try:
        return factory.check(replay_equal).steps
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}")
        raise


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_random_schedule_of_a_flavour_replays(suite, flavour_factory, publishing, replay_equal, name):
    for seed in range(2):
        assert flavoured_seed(suite, flavour_factory, publishing, replay_equal, name, seed, 50) > 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5000, 5080, 20))
@pytest.mark.parametrize("name", FLAVOURS)
def test_many_random_schedules_of_a_flavour_replay(suite, flavour_factory, publishing, replay_equal, name, first):
    for seed in range(first, first + 20):
        flavoured_seed(suite, flavour_factory, publishing, replay_equal, name, seed, 120)


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_schedule_of_a_flavour_that_hypothesis_makes_replays(
    suite, recorded, flavour_class, tmp_path, publishing, replay_equal, name
):
    module, factory = suite(FLAVOURED), Factory(recorded, flavour_class, tmp_path, False)

    @settings(max_examples=2, **COMMON)
    @given(rng=st.randoms(use_true_random=False))
    def schedule(rng):
        h = module.make(factory, name, rng)
        try:
            module.Player(h, rng, publishing=publishing).play(20)
        finally:
            publishing.fail()
        factory.check(replay_equal)

    schedule()


def test_two_runs_of_a_seed_record_the_same(suite, recorded, harness_class, tmp_path):
    """C129 and C130: nothing of the first run is left for the second, and nothing random comes from elsewhere."""
    recordings = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        random.seed(run)
        factory = Factory(recorded, harness_class, folder, False)
        data = []
        for seed in range(20, 22):
            suite(PLAIN).play_seed(factory, seed, 60)
            recorded.made[-1][1].close()
            data.append((factory.path.read_bytes(), (factory.path.parent / f"{factory.path.name}.tokens").read_bytes()))
        recordings.append(data)
    assert recordings[0] == recordings[1]
