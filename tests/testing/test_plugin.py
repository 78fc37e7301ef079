"""The pytest plugin: traces as tests, last steps in reports, coverage that adds up over workers and can fail a run."""

from __future__ import annotations

import json
import shutil

import pytest

from context_cache.coordinator.testing.coverage import Coverage, CoverageError, needs

STORY = '''
from context_cache.backends import HostBackend
from context_cache.coordinator import *

def story(recorder=None, end=True):
    backend = HostBackend()
    stream = backend.new_stream()
    deployment = DeploymentConfig(
        max_batch=2, kv_capacity_tokens=64, page_size=4, layers=[LayerGeometry.attention(kv_heads=1, head_dim=4)]
    )
    resources = allocate_resources(deployment, 64, backend)
    cache = ContextCacheCoordinator(
        ContextCacheConfig(enabled=True), deployment, resources, backend=backend, stream=stream, recorder=recorder
    )
    prompt = ContextCacheSequenceAdmission([7] * 9, resident=ResidentRef(0, 1))
    handle = cache.begin_request(ContextCacheBatchAdmission([prompt]), DecodingKvHeadroom(1), stream).admission.request
    cache.prepare_prefill(handle)
    backend.synchronize(stream)
    cache.finalize_prefill_publication(handle, [ContextCacheSequenceAdvance([1], 9)])
    if end:
        cache.finish(handle)
        cache.close()
    return cache, handle
'''


@pytest.fixture
def trace(pytester, tmp_path):
    """A folder with the story and a recorded trace of it."""
    namespace = {}
    exec(STORY, namespace)
    from context_cache.coordinator.traces import TraceRecorder

    with TraceRecorder(pytester.path / "story.jsonl", timings=False) as recorder:
        namespace["story"](recorder)
    pytester.makepyfile(story=STORY)
    return pytester.path / "story.jsonl"


def run(pytester, *arguments):
    # In this process where that is possible: a process of its own takes seconds.
    start = pytester.runpytest_subprocess if "-n" in arguments else pytester.runpytest_inprocess
    return start("-p", "no:cacheprovider", *arguments)


def break_first(trace, old, new):
    text = trace.read_text()
    assert old in text
    trace.write_text(text.replace(old, new, 1))


def test_a_committed_trace_is_a_test(pytester, trace):
    pytester.makepyfile("import pytest\n@pytest.mark.trace('story.jsonl')\ndef test_it(): pass")
    run(pytester).assert_outcomes(passed=1)
    break_first(trace, '"target":"prefilling"', '"target":"settled"')
    done = run(pytester)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*step 5 (line 8) is not as recorded*", "*recorded settled*", "*now      prefilling*"])


def test_an_update_writes_the_trace_anew_and_only_then(pytester, trace):
    pytester.makepyfile("import pytest\n@pytest.mark.trace('story.jsonl')\ndef test_it(): pass")
    good = trace.read_bytes()
    run(pytester, "--trace-update").assert_outcomes(passed=1)
    assert trace.read_bytes() == good
    break_first(trace, '"target":"prefilling"', '"target":"settled"')
    run(pytester).assert_outcomes(failed=1)
    run(pytester, "--trace-update").assert_outcomes(passed=1)
    assert trace.read_bytes() == good
    assert sorted(path.name for path in trace.parent.glob("story.jsonl*")) == ["story.jsonl", "story.jsonl.tokens"]


def test_an_update_makes_a_torn_trace_whole(pytester, trace):
    pytester.makepyfile("import pytest\n@pytest.mark.trace('story.jsonl')\ndef test_it(): pass")
    trace.write_bytes(trace.read_bytes()[:-5])
    run(pytester).assert_outcomes(failed=1)
    run(pytester, "--trace-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)


def test_an_update_waits_for_another_one_of_the_same_trace(trace):
    import fcntl
    import os
    from threading import Event, Thread

    from context_cache.coordinator.testing.replaying import update_trace

    good = trace.read_bytes()
    break_first(trace, '"target":"prefilling"', '"target":"settled"')
    held = os.open(trace.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done = Event()
    found = []
    other = Thread(target=lambda: (found.append(update_trace(trace)), done.set()))
    other.start()
    assert not done.wait(0.3)
    trace.write_bytes(good)
    os.close(held)
    other.join(30)
    assert found == [False], "it was written already"


def test_many_tests_in_many_processes_update_one_trace(pytester, trace):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("number", range(8))
        @pytest.mark.trace("story.jsonl")
        def test_it(number): pass
        """
    )
    break_first(trace, '"target":"prefilling"', '"target":"settled"')
    run(pytester, "--trace-update", "-n", "2").assert_outcomes(passed=8)


def test_a_missing_trace_fails_the_test_and_says_which(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.trace('nothing.jsonl')\ndef test_it(): pass")
    done = run(pytester)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*nothing.jsonl*"])


def test_the_recorder_fixture_leaves_a_trace_that_replays(pytester, trace):
    pytester.makepyfile(
        """
        from context_cache.coordinator.testing import assert_replays
        from story import story

        def test_it(trace_recorder, tmp_path):
            story(trace_recorder)
            trace_recorder.close()
            assert_replays(tmp_path / "trace.jsonl")
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_a_failing_test_shows_the_last_steps_of_live_requests_and_of_no_others(pytester, trace):
    pytester.makepyfile(
        """
        from story import story

        def test_live():
            story(end=False)
            assert False

        def test_ended():
            story()
            assert False
        """
    )
    done = run(pytester, "--lifecycle-steps=2")
    done.assert_outcomes(failed=2)
    text = done.stdout.str()
    assert text.count("last lifecycle steps of live requests") == 1
    assert "admitted --prepare_prefill--> prefilling" in text
    assert "prefilling --finalize_prefill [not frozen_policy]--> settled" in text
    assert "new --begin_request--> admitted" not in text
    assert "last lifecycle steps" not in run(pytester, "--lifecycle-steps=0").stdout.str()


def test_a_passing_test_shows_no_steps(pytester, trace):
    pytester.makepyfile("from story import story\ndef test_it(): story(end=False)")
    done = run(pytester, "-rA")
    done.assert_outcomes(passed=1)
    assert "last lifecycle steps" not in done.stdout.str()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_coverage_adds_up_and_names_what_was_never_taken(pytester, trace, workers):
    pytester.makepyfile("from story import story\ndef test_one(): story()\ndef test_two(): story()")
    done = run(pytester, "--lifecycle-coverage-file=seen.json", *workers)
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines(["*never taken: request row 1 failed: admitted --prepare_prefill--> broken*"])
    text = done.stdout.str()
    assert "never taken: request row 1: " not in text
    seen = Coverage.from_json((pytester.path / "seen.json").read_text())
    assert ("request", "row", "1") in seen.seen
    assert ("request", "guard", "prefilling", "finalize_prefill", "frozen_policy", "False") in seen.seen
    assert ("request", "guard", "prefilling", "finalize_prefill", "frozen_policy", "True") not in seen.seen


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_below_the_limit_fails_although_every_test_passed(pytester, trace, workers):
    pytester.makepyfile("from story import story\ndef test_it(): story()")
    done = run(pytester, "--lifecycle-coverage", "--lifecycle-fail-under=100", *workers)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FAIL: less than --lifecycle-fail-under=100*"])
    assert run(pytester, "--lifecycle-coverage", "--lifecycle-fail-under=1", *workers).ret == 0


def test_a_limit_without_coverage_is_refused(pytester):
    done = run(pytester, "--lifecycle-fail-under=100")
    assert done.ret == 4
    done.stderr.fnmatch_lines(["*--lifecycle-fail-under needs --lifecycle-coverage*"])


def test_everything_needed_is_named_once():
    facts = [need.fact for need in needs()]
    assert len(facts) == len(set(facts))
    assert ("request", "failure", "1", "failed") in facts
    assert not any(fact[0] in ("sequence", "capture") for fact in facts)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":"context-cache-coverage","version":2,"seen":[]}',
                                  '{"format":"context-cache-coverage","version":1,"seen":[[1]]}', "[" * 100_000])
def test_a_file_that_is_no_coverage_is_refused_in_one_sentence(text):
    with pytest.raises(CoverageError) as refusal:
        Coverage.from_json(text)
    assert "\n" not in str(refusal.value)


def test_coverage_survives_its_file():
    coverage = Coverage({("request", "row", "0"), ("view", "row", "1")})
    assert Coverage.from_json(coverage.to_json()).seen == coverage.seen
    assert json.loads(coverage.to_json())["seen"] == [["request", "row", "0"], ["view", "row", "1"]]


def test_traces_and_coverage_files_are_added_up_on_the_command_line(pytester, trace, tmp_path):
    from click.testing import CliRunner

    from context_cache.coordinator.cli.app import command_line

    out = tmp_path / "sum.json"
    done = CliRunner().invoke(command_line, ["coverage", str(trace), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert 0 < report["taken"] < report["needed"]
    again = CliRunner().invoke(command_line, ["coverage", str(out), "--json"])
    assert json.loads(again.stdout)["taken"] == report["taken"]
    assert CliRunner().invoke(command_line, ["coverage", str(out), "--fail-under", "100"]).exit_code == 1
    shutil.copy(__file__, tmp_path / "no.json")
    bad = CliRunner().invoke(command_line, ["coverage", str(tmp_path / "no.json")])
    assert bad.exit_code == 2
    assert bad.stderr.count("\n") == 1


def test_a_coordinator_of_many_tests_shows_steps_from_before_the_test(pytester, trace):
    pytester.makepyfile(
        """
        import pytest
        from story import *

        @pytest.fixture(scope="module")
        def cache():
            return story(end=False)

        def test_one(cache): pass

        def test_two(cache):
            prompt = ContextCacheSequenceAdmission([8] * 9, resident=ResidentRef(1, 1))
            stream = cache[0]._core.stream
            begun = cache[0].begin_request(ContextCacheBatchAdmission([prompt]), DecodingKvHeadroom(1), stream)
            assert begun is None

        def test_three(): assert False
        """
    )
    done = run(pytester)
    done.assert_outcomes(passed=1, failed=2)
    text = done.stdout.str()
    assert text.count("last lifecycle steps of live requests") == 1, "test_three used no coordinator"
    assert "request r1: prefilling --finalize_prefill" in text
    assert "request r2: new --begin_request--> admitted" in text


def test_steps_are_kept_although_the_test_itself_is_the_first_to_import_the_library(pytester, trace):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert "context_cache.machines" not in sys.modules
            from story import story
            kept = story(end=False)
            assert kept is None
        """
    )
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.stdout.fnmatch_lines(["*last lifecycle steps of live requests*", "request r1: prefilling --finalize_prefill*"])


def test_the_import_of_the_library_asks_every_other_finder(pytester, trace):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            asked = []

            class Finder:
                def __init__(self, number): self.number = number

                def find_spec(self, name, path, target=None):
                    if name == "context_cache.coordinator":
                        asked.append(self.number)

            sys.meta_path[1:1] = [Finder(1), Finder(2)]
            import context_cache.coordinator
            assert asked == [1, 2]
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_a_project_that_does_not_use_the_library_does_not_import_it(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            names = ("numpy", "msgspec", *(f"context_cache.{room}" for room in ("backends", "coordinator", "machines")))
            assert not [name for name in names if name in sys.modules]
            assert "context_cache.pytest_plugin" in sys.modules
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_a_test_file_behind_the_option_is_run_and_not_overwritten(pytester):
    path = pytester.makepyfile("def test_it(): pass")
    before = path.read_text()
    run(pytester, "--lifecycle-coverage", path.name).assert_outcomes(passed=1)
    assert path.read_text() == before


def test_a_file_that_is_no_coverage_is_not_overwritten(pytester):
    path = pytester.makepyfile("def test_it(): pass")
    before = path.read_text()
    done = run(pytester, f"--lifecycle-coverage-file={path.name}")
    assert done.ret == 4
    done.stderr.fnmatch_lines(["*--lifecycle-coverage-file=*holds something else*"])
    assert path.read_text() == before


@pytest.mark.parametrize("name", ["nodir/seen.json", ".", "n" * 300])
def test_a_place_that_cannot_be_written_is_refused_before_the_tests_run(pytester, name):
    pytester.makepyfile("def test_it(): pass")
    done = run(pytester, f"--lifecycle-coverage-file={name}")
    assert done.ret == 4
    assert "passed" not in done.stdout.str()
    assert "Traceback" not in done.stderr.str()


def test_the_file_lies_where_the_run_began_and_can_be_written_again(pytester, tmp_path):
    pytester.makepyfile(f"import os\ndef test_it(): os.chdir({str(tmp_path)!r})")
    for _ in range(2):
        done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--lifecycle-coverage-file=seen.json")
        done.assert_outcomes(passed=1)
        assert Coverage.from_json((pytester.path / "seen.json").read_text()).seen == set()


@pytest.mark.parametrize("option", ["--lifecycle-fail-under=nan", "--lifecycle-fail-under=inf",
                                    "--lifecycle-fail-under=101", "--lifecycle-steps=-1"])
def test_a_number_that_means_nothing_is_refused(pytester, option):
    done = run(pytester, "--lifecycle-coverage", option)
    assert done.ret == 4
    done.stderr.fnmatch_lines([f"*{option.split('=')[0]}*choose*"])


def test_a_witness_that_ends_leaves_its_equals():
    from context_cache.machines import step, witnessed_by

    class Alike:
        def __eq__(self, other):
            return True

        __hash__ = None

        def saw(self, switch, step):
            pass

    outer, inner = Alike(), Alike()
    with witnessed_by(outer):
        with witnessed_by(inner):
            pass
        assert any(one is outer for one in step._witnesses)
        assert not any(one is inner for one in step._witnesses)
    assert Coverage() != Coverage()


def test_coverage_does_not_grow_with_events_that_are_refused_again():
    from context_cache.machines import Firing, RecorderSwitch, Step

    coverage, switch = Coverage(), RecorderSwitch(None)
    for _ in range(1000):
        firing = Firing("request", -1, "finish", "new", "new", (("idle", False),), "refused", None)
        coverage.saw(switch, Step("r1", firing))
    assert len(coverage._known) + len(coverage._unusual) == 1
    assert coverage.seen == {("request", "guard", "new", "finish", "idle", "False")}
