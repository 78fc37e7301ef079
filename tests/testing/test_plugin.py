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
    done = run(pytester, "--lifecycle-coverage=seen.json", *workers)
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
