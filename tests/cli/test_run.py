"""``context-cache run``: what it counts, that it is deterministic, that pressure costs work and never a page."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from context_cache.backends import BackendUnavailable, DeviceError, HostBackend
from context_cache.coordinator import ContextCacheRequest
from context_cache.coordinator.cli import platform, scheduler
from context_cache.coordinator.cli.embedded import EmbeddedModel
from context_cache.coordinator.cli.workload import read_workload
from context_cache.coordinator.cli.workloads import shipped_workload

KEYS = {
    "requests", "prompt_tokens", "reused_tokens", "generated_tokens", "decode_steps", "evicted_records",
    "refused_admissions", "leaked_pages", "wall_seconds", "coordinator_seconds", "coordinator_us_per_step_p50",
    "coordinator_us_per_step_p99", "backend", "pages",
}  # fmt: skip
TIMES = {"wall_seconds", "coordinator_seconds", "coordinator_us_per_step_p50", "coordinator_us_per_step_p99"}

SMALL = ("--page-size", 4)


def request(first, length, output, **options):
    return {"token_ids": list(range(first, first + length)), "max_new_tokens": output, **options}


def same_work(report):
    """What does not depend on the clock."""
    return {key: value for key, value in report.items() if key not in TIMES}


# The shipped workload


def test_the_shipped_workload_reuses_and_leaks_nothing(cli):
    report = cli("run", "--json").report
    with shipped_workload() as path:
        requests = read_workload(path).requests
    assert report.keys() >= KEYS
    assert report["requests"] == len(requests)
    assert report["prompt_tokens"] == sum(request.prompt_length for request in requests)
    assert report["generated_tokens"] == sum(request.max_new_tokens for request in requests)
    assert report["decode_tokens"] == report["generated_tokens"] - report["requests"]
    assert report["reused_tokens"] > report["prompt_tokens"] // 3
    assert report["leaked_pages"] == report["preemptions"] == 0
    assert report["joiners"] > report["founders"] > 0
    assert report["compactions"] > 0
    assert report["backend"] == "host"


def test_two_runs_agree_in_everything_but_time(cli):
    arguments = ("run", "--pages", 120, "--limit", 120, "--json")
    assert same_work(cli(*arguments).report) == same_work(cli(*arguments).report)


def test_the_table_is_for_people_and_fits_their_terminal(cli, monkeypatch):
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = cli("run", "--limit", 20)
        assert outcome.status == 0
        assert outcome.err == ""
        assert "No page leaked." in outcome.out
        assert max(len(line.rstrip()) for line in outcome.out.splitlines()) <= columns
        for word in ("prompt tokens", "reused", "decode steps", "wall time", "pages"):
            assert word in outcome.out


def test_without_a_workload_the_json_object_stands_alone(cli):
    outcome = cli("run", "--limit", 3, "--json")
    assert outcome.err == ""
    assert len(outcome.out.splitlines()) == 1


# What is counted


def test_a_second_identical_prompt_reuses_all_but_the_last_page(cli, workload):
    """Eight tokens are two full pages; the last token has to be computed again, so the second page is given up."""
    path = workload(request(1, 8, 1), request(1, 8, 1))
    report = cli("run", path, "--max-batch", 1, "--json", *SMALL).report
    assert (report["reused_tokens"], report["prompt_tokens"], report["decode_steps"]) == (4, 16, 0)
    assert report["generated_tokens"] == 2
    assert report["coordinator_us_per_step_p50"] is None


def test_the_token_of_the_prefill_counts_as_output(cli, workload):
    report = cli("run", workload(request(1, 5, 4)), "--json", *SMALL).report
    assert (report["decode_steps"], report["decode_tokens"], report["generated_tokens"]) == (3, 3, 4)


def test_outputs_can_be_capped(cli, workload):
    path = workload(request(1, 5, 40), request(1, 5, 2))
    report = cli("run", path, "--max-new-tokens", 3, "--json", *SMALL).report
    assert report["generated_tokens"] == 5
    assert report["row_tokens"] == 12  # 5 + 3 + 1 rounded up to a page


def test_sequences_of_one_batch_share_their_steps(cli, workload):
    path = workload(*[request(100 * n, 5, 10) for n in range(4)])
    assert cli("run", path, "--max-batch", 4, "--json", *SMALL).report["decode_steps"] == 9
    assert cli("run", path, "--max-batch", 1, "--json", *SMALL).report["decode_steps"] == 36


def test_generated_tokens_are_reused_by_a_prompt_that_repeats_them(cli, workload):
    """The embedded model is deterministic, so its answer can be written into the next prompt."""
    answer = EmbeddedModel(seed=5).sequence(0, 4, 9).tolist()
    path = workload(request(1, 4, 9), {"token_ids": [1, 2, 3, 4, *answer, 7], "max_new_tokens": 1})
    assert cli("run", path, "--max-batch", 1, "--seed", 5, "--json", *SMALL).report["reused_tokens"] == 12
    assert cli("run", path, "--max-batch", 1, "--seed", 6, "--json", *SMALL).report["reused_tokens"] == 4


def test_prefill_state_only_publishes_no_generated_token(cli, workload):
    answer = EmbeddedModel().sequence(0, 4, 9).tolist()
    first = request(1, 4, 9, commit_policy="prefill_state_only")
    path = workload(first, {"token_ids": [1, 2, 3, 4, *answer, 7], "max_new_tokens": 1})
    assert cli("run", path, "--max-batch", 1, "--json", *SMALL).report["reused_tokens"] == 4


def test_a_bypassing_request_neither_reuses_nor_publishes(cli, workload):
    plain, bypass = request(1, 9, 1), request(1, 9, 1, lookup_policy="bypass")
    assert cli("run", workload(plain, bypass), "--max-batch", 1, "--json", *SMALL).report["reused_tokens"] == 0
    assert cli("run", workload(bypass, plain), "--max-batch", 1, "--json", *SMALL).report["reused_tokens"] == 0


def test_tenants_share_nothing_with_each_other(cli, workload):
    path = workload(
        request(1, 9, 1, tenant="a"), request(1, 9, 1, tenant="b"), request(1, 9, 1), request(1, 9, 1, tenant="a")
    )
    assert cli("run", path, "--max-batch", 1, "--json", *SMALL).report["reused_tokens"] == 8


def test_a_joiner_that_wants_one_token_leaves_at_once(cli, workload):
    path = workload(request(1, 5, 20), request(100, 5, 2), *[request(200 + 10 * n, 5, 1) for n in range(5)])
    report = cli("run", path, "--max-batch", 2, "--json", *SMALL).report
    assert (report["founders"], report["joiners"], report["decode_steps"]) == (2, 5, 19)
    assert report["leaked_pages"] == 0


def test_batches_of_both_commit_policies_take_turns(cli, workload):
    kinds = ("including_generated_tokens", "prefill_state_only")
    path = workload(*[request(50 * n, 6, 90 - n, commit_policy=kinds[n // 2 % 2]) for n in range(12)])
    report = cli("run", path, "--max-batch", 4, "--json", *SMALL).report
    assert report["requests"] == 12
    assert report["leaked_pages"] == 0
    assert report["joiners"] > 0


def test_standard_input_can_be_the_workload(cli, monkeypatch):
    line = json.dumps({"token_ids": [1, 2], "max_new_tokens": 2})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
    assert cli("run", "-", "--json").report["requests"] == 1


# Pressure


def test_a_small_pool_evicts_refuses_and_preempts_but_loses_nothing(cli):
    report = cli("run", "--pages", 60, "--max-batch", 8, "--json").report
    assert report["requests"] == 302
    assert report["generated_tokens"] - report["decode_tokens"] == report["requests"] + report["preemptions"]
    assert report["evicted_records"] > 0
    assert report["refused_admissions"] > 0
    assert report["preemptions"] > 0
    assert report["recomputed_tokens"] > 0
    assert report["leaked_pages"] == 0


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8])
def test_the_smallest_pool_still_finishes(cli, workload, max_batch):
    """One row fits and nothing more, so every second sequence is refused or preempted."""
    path = workload(*[request(10 * n, 5 + n % 7, 3 + 5 * (n % 4)) for n in range(12)])
    smallest = cli("run", path, "--max-batch", max_batch, "--json", *SMALL).report["row_tokens"] // 4
    report = cli("run", path, "--max-batch", max_batch, "--pages", smallest, "--json", *SMALL).report
    assert report["requests"] == 12
    assert report["generated_tokens"] == sum(3 + 5 * (n % 4) for n in range(12))
    assert report["leaked_pages"] == 0


def test_a_preempted_request_comes_back_with_exactly_the_tokens_that_it_had(cli, monkeypatch):
    """They are made again instead of stored; a difference would go unnoticed, since nobody reads the output."""
    had = {}
    prepare = ContextCacheRequest.prepare_decode_step

    def remember(self, headroom):
        """The adapter compacts those out who don't fit, so their tokens are read before every step."""
        before = [self.coordinator.sequence(self.handle, slot).token_ids for slot in range(self.batch_size)]
        prepared = prepare(self, headroom)
        had.update({len(had) + n: before[slot] for n, slot in enumerate(prepared.ended)})
        return prepared

    compared = []
    preempt = scheduler._Scheduler._preempt

    def compare(self, batch, prepared, steps_done):
        first = len(had) - len(prepared.ended)
        stays = preempt(self, batch, prepared, steps_done)
        for n in range(len(prepared.ended)):
            assert np.array_equal(self._queue[n].admission.token_ids, had[first + n])
            compared.append(self._queue[n].generated)
        return stays

    monkeypatch.setattr(ContextCacheRequest, "prepare_decode_step", remember)
    monkeypatch.setattr(scheduler._Scheduler, "_preempt", compare)
    report = cli("run", "--pages", 50, "--max-batch", 16, "--json").report
    assert len(compared) == report["preemptions"] > 3
    assert max(compared) > min(compared) > 0


def test_a_record_limit_evicts(cli):
    report = cli("run", "--max-records", 5, "--json").report
    assert report["evicted_records"] > 0
    assert report["records"] <= 5
    assert report["leaked_pages"] == 0


# What cannot be used


def refused(outcome, *parts):
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("context-cache: ")
    assert len(outcome.err.splitlines()) == 1
    for part in parts:
        assert part in outcome.err


def test_a_missing_file_is_named(cli):
    refused(cli("run", "nowhere.jsonl", "--json"), "nowhere.jsonl: there is no such file; check the path")


def test_a_bad_line_stops_everything_before_anything_runs(cli, workload):
    path = workload(request(1, 5, 2), request(1, 5, 0))
    refused(cli("run", path, "--limit", 1), f"{path}, line 2: ", ">= 1", "max_new_tokens")


def test_a_request_that_is_too_long_for_the_row_is_named(cli, workload):
    path = workload(request(1, 5, 2), request(1, 50, 2))
    refused(cli("run", path, "--row-tokens", 16, *SMALL), f"{path}, line 2: needs 53 tokens", "--row-tokens")


def test_a_pool_that_is_too_small_is_refused(cli, workload):
    refused(cli("run", workload(request(1, 50, 2)), "--pages", 3, *SMALL), "--pages 3 is too small", "use --pages 14")


def test_a_pool_that_does_not_fit_into_memory_is_refused(cli, workload, monkeypatch):
    """The system's answer depends on its settings, so it is given here."""

    def refuse(self, shape, dtype):
        raise MemoryError

    monkeypatch.setattr(HostBackend, "array", refuse)
    outcome = cli("run", workload(request(1, 5, 2)), "--pages", 12345)
    refused(outcome, "12345 pages do not fit into memory; choose fewer with --pages")


def no_gpu(monkeypatch):
    def refuse():
        raise BackendUnavailable("there is no GPU; plug one in")

    monkeypatch.setattr(platform, "_open_cupy", refuse)


def test_without_a_gpu_one_sentence_says_what_is_missing(cli, monkeypatch):
    no_gpu(monkeypatch)
    refused(cli("run", "--backend", "cupy"), "--backend cupy: there is no GPU; plug one in")


def test_auto_is_the_host_where_there_is_no_gpu(cli, monkeypatch):
    no_gpu(monkeypatch)
    assert cli("run", "--backend", "auto", "--limit", 1, "--json").report["backend"] == "host"


def test_a_failing_device_is_one_sentence_and_exit_status_1(cli, monkeypatch):
    def broken(self, stream, timeout=None):
        raise DeviceError("synchronize", "embedded", "cudaErrorIllegalAddress: gone")

    monkeypatch.setattr(HostBackend, "synchronize", broken)
    outcome = cli("run", "--limit", 1)
    assert outcome.status == 1
    assert "cudaErrorIllegalAddress" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--pages", 0), ("--pages", -1), ("--pages", "many"), ("--page-size", 0), ("--page-size", 10**9),
        ("--max-batch", 0), ("--max-records", 0), ("--max-new-tokens", 0), ("--row-tokens", 0), ("--limit", 0),
        ("--seed", -1), ("--seed", 2**64), ("--backend", "tpu"), ("--pages", 10**12), ("--frob", 1),
    ],
)  # fmt: skip
def test_an_unusable_option_is_refused(cli, option, value):
    outcome = cli("run", option, value)
    assert outcome.status == 2
    assert outcome.out == ""
    assert option in outcome.err
    assert "Traceback" not in outcome.err


def test_help_shows_an_example(cli):
    outcome = cli("run", "--help")
    assert outcome.status == 0
    assert "context-cache run trace.jsonl --limit 1000 --json" in outcome.out


# What does not hold


def test_a_leak_is_said_loudly(cli, workload, monkeypatch):
    """The books are checked by an account of their own: here it finds two pages that nobody has."""
    monkeypatch.setattr(scheduler, "leaked_pages", lambda manager, pages: 2)
    outcome = cli("run", workload(request(1, 5, 2)), "--json")
    assert outcome.status == 1
    assert json.loads(outcome.out)["leaked_pages"] == 2
    assert "2 pages leaked" in outcome.err
