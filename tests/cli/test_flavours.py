"""``context-cache run --flavour``: every flavour runs, verifies, repeats itself, leaks nothing; damage is found."""

from __future__ import annotations

import re

import numpy as np
import pytest

from context_cache.backends import HostBackend
from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES, FLAVOURS
from context_cache.coordinator.cli.stub import StubModel
from context_cache.coordinator.cli.verify import SAMPLE_MAX, Verifier
from context_cache.coordinator.manager import ContextCacheManager

TIMES = {"wall_seconds", "coordinator_seconds", "coordinator_us_per_step_p50", "coordinator_us_per_step_p99"}
SNAPSHOTS = [name for name in FLAVOUR_NAMES if FLAVOURS[name].has_recurrent]
SMALL = ("--page-size", 4, "--json")


def request(first, length, output, **options):
    return {"token_ids": list(range(first, first + length)), "max_new_tokens": output, **options}


@pytest.fixture
def chats(workload):
    """Two turns of a few chats with a common beginning: something to reuse at every flavour's endpoints."""
    lines = [
        {
            "token_ids": [*range(1, 10), *range(50 * chat, 50 * chat + 9 + 7 * turn)],
            "max_new_tokens": 1 + 3 * (chat % 3),
        }
        for turn in (0, 1)
        for chat in range(6)
    ]
    return workload(*lines)


def same_work(report):
    return {key: value for key, value in report.items() if key not in TIMES}


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_the_shipped_workload_is_verified_by_default(cli, flavour):
    report = cli("run", "--flavour", flavour, "--json").report
    assert report["flavour"] == flavour
    assert report["verified_requests"] == report["requests"] == 302
    assert report["reused_tokens"] > 0
    assert report["leaked_pages"] == 0
    assert report["max_batch"] == (1 if flavour == "hybrid-mtp" else 32)
    if flavour != "vanilla":
        assert report["joiners"] == 0
    assert (report["pages"] == 0) == (flavour == "recurrent")
    numbers = {report[key] for key in ("checkpoints", "hybrid_restores", "hybrid_snapshot_pressure_skips")}
    assert (None in numbers) == (flavour not in SNAPSHOTS)


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_two_runs_agree_in_everything_but_time(cli, chats, flavour):
    arguments = ("run", chats, "--flavour", flavour, "--max-batch", 1, "--verify", *SMALL)
    report = cli(*arguments).report
    assert same_work(report) == same_work(cli(*arguments).report)
    assert report["verified_requests"] == 12
    assert report["reused_tokens"] > 0


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_verification_is_off_by_default_for_other_workloads(cli, chats, flavour):
    report = cli("run", chats, "--flavour", flavour, *SMALL).report
    assert report["verified_requests"] is None
    verified = cli("run", chats, "--flavour", flavour, "--verify", *SMALL).report
    assert (report["decode_steps"], report["leaked_pages"]) == (verified["decode_steps"], 0)


@pytest.mark.parametrize("flavour", [name for name in FLAVOUR_NAMES if FLAVOURS[name].has_attention])
def test_the_smallest_pool_still_finishes_and_verifies(cli, workload, flavour):
    path = workload(*[request(10 * (n % 5), 5 + n % 7, 3 + 5 * (n % 4)) for n in range(16)])
    common = ("run", path, "--flavour", flavour, "--verify", *SMALL)
    smallest = cli(*common).report["row_tokens"] // 4
    report = cli(*common, "--pages", smallest).report
    assert report["verified_requests"] == 16
    assert report["generated_tokens"] == sum(3 + 5 * (n % 4) for n in range(16))
    assert report["evicted_records"] > 0
    assert report["refused_admissions"] > 0 or flavour == "hybrid-mtp"
    assert report["leaked_pages"] == 0


@pytest.mark.parametrize("flavour", SNAPSHOTS)
def test_few_snapshot_slots_cost_checkpoints_and_nothing_else(cli, flavour):
    few = cli("run", "--flavour", flavour, "--snapshot-slots", 1, "--limit", 60, "--json").report
    many = cli("run", "--flavour", flavour, "--snapshot-slots", 500, "--limit", 60, "--json").report
    assert few["snapshot_slots"] == 1
    assert few["records"] <= 1
    assert few["checkpoints"] <= many["checkpoints"]
    assert many["hybrid_restores"] > 0
    assert few["verified_requests"] == many["verified_requests"] == 60
    assert few["leaked_pages"] == 0


def test_the_default_of_the_snapshot_slots_follows_the_batch(cli):
    arguments = ("run", "--flavour", "hybrid", "--limit", 5, "--json")
    assert cli(*arguments).report["snapshot_slots"] == 2 * 32 + 64
    assert cli(*arguments, "--max-batch", 4).report["snapshot_slots"] == 2 * 4 + 64


def test_a_large_workload_is_verified_by_a_sample(cli, workload):
    path = workload(*[request(n % 7, 5 + n % 5, 1) for n in range(SAMPLE_MAX + 50)])
    report = cli("run", path, "--flavour", "hybrid", "--verify", *SMALL).report
    assert report["requests"] == SAMPLE_MAX + 50
    assert report["verified_requests"] == SAMPLE_MAX


def test_the_table_names_flavour_checkpoints_and_verification(cli, monkeypatch):
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = cli("run", "--flavour", "hybrid", "--limit", 20)
        assert outcome.status == 0
        for word in ("hybrid", "verified requests", "checkpoints", "snapshot slots", "No page leaked."):
            assert word in outcome.out
        assert max(len(line.rstrip()) for line in outcome.out.splitlines()) <= columns


# Damage is found

POOLS = {
    "K entry": lambda model: model.base._words[: model._cache.num_pages],
    "V entry": lambda model: model.base._words[model._cache.num_pages :],
    "draft K entry": lambda model: model.draft._words[: model._cache.num_pages],
    "draft V entry": lambda model: model.draft._words[model._cache.num_pages :],
}


def differs(outcome, what, *, page=True):
    """Exit 1 and one sentence that names request, line, position and page; the numbers."""
    assert outcome.status == 1, outcome
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1
    pattern = r"request (\d+) \(line (\d+)\), position (\d+)(?:, page (\d+))?: the (.*?) (that|at) "
    found = re.search(pattern, outcome.err)
    assert found, outcome.err
    assert found[5] == what
    assert (found[4] is not None) == page
    return tuple(int(found[index]) for index in (1, 2, 3))


@pytest.mark.parametrize(
    ("flavour", "what"),
    [(name, what) for name in FLAVOUR_NAMES for what in POOLS
     if FLAVOURS[name].has_attention and ("draft" not in what or FLAVOURS[name].has_draft_pages)],
)  # fmt: skip
def test_a_flipped_byte_in_a_pool_is_found_before_it_is_reused(cli, workload, monkeypatch, flavour, what):
    """A page that the first request published is damaged before the second one starts from it."""
    original = StubModel.load
    prefills = []

    def damage(self, slot, prompt):
        prefills.append(slot)
        original(self, slot, prompt)
        if len(prefills) == 2:
            paged = self.draft if "draft" in what else self.base

            def work():
                page = int(paged.pages(np.array([slot]), np.array([2]))[0])
                POOLS[what](self)[page : page + 1].view(np.uint8)[0, 8 * 2] ^= 0x10

            self._platform.enqueue(work, "damage")

    monkeypatch.setattr(StubModel, "load", damage)
    path = workload(request(1, 13, 9), request(1, 16, 9))
    outcome = cli("run", path, "--flavour", flavour, "--max-batch", 1, "--verify", *SMALL)
    assert differs(outcome, what) == (2, 2, 2)
    assert "that is reused" in outcome.err


@pytest.mark.parametrize("flavour", [name for name in FLAVOUR_NAMES if FLAVOURS[name].has_attention])
def test_a_flipped_byte_in_a_live_page_is_found_at_the_end(cli, workload, monkeypatch, flavour):
    original, steps = StubModel.decode, []

    def damage(self, slots, limits=None):
        steps.append(slots)
        original(self, slots, limits)
        if len(steps) == 2:

            def work():
                page = int(self.base.pages(slots[:1], np.array([5]))[0])
                self.base._words[page : page + 1].view(np.uint8)[0, 8 * (5 % 4) + 7] ^= 0x80

            self._platform.enqueue(work, "damage")

    monkeypatch.setattr(StubModel, "decode", damage)
    path = workload(request(1, 13, 20))
    outcome = cli("run", path, "--flavour", flavour, "--verify", *SMALL)
    assert differs(outcome, "K entry") == (1, 1, 5)


@pytest.mark.parametrize("flavour", SNAPSHOTS)
def test_a_damaged_recurrent_row_is_found(cli, workload, monkeypatch, flavour):
    original, steps = StubModel.decode, []

    def damage(self, slots, limits=None):
        original(self, slots, limits)
        steps.append(slots)

        def work():
            self.recurrent._convs[slots[0], 0] ^= np.uint64(4)

        if len(steps) == 2:
            self._platform.enqueue(work, "damage")

    monkeypatch.setattr(StubModel, "decode", damage)
    outcome = cli("run", workload(request(1, 13, 20)), "--flavour", flavour, "--verify", *SMALL)
    assert outcome.status == 1
    assert re.search(r"request 1 \(line 1\), position \d+", outcome.err)


@pytest.mark.parametrize(
    ("flavour", "verb", "what"),
    [
        ("hybrid", "copy_rows", "recurrent state"), ("recurrent", "copy_rows", "recurrent state"),
        ("hybrid-mtp", "copy_rows", "recurrent state"), ("hybrid-mtp", "copy_row", "hidden row"),
        ("hybrid", "restore_pages", "K entry"), ("hybrid-mtp", "restore_pages", "K entry"),
        ("hybrid", "capture_pages", "K entry"), ("hybrid-mtp", "capture_pages", "K entry"),
    ],
)  # fmt: skip
def test_a_copy_that_does_nothing_is_found(cli, workload, monkeypatch, flavour, verb, what):
    """A snapshot that is not written, or not restored, is no prefix."""
    monkeypatch.setattr(HostBackend, verb, lambda self, *arguments: None)
    path = workload(request(1, 9, 1), request(100, 9, 1), request(1, 15, 9))
    outcome = cli("run", path, "--flavour", flavour, "--max-batch", 1, "--verify", *SMALL)
    differs(outcome, what, page=what == "K entry")


@pytest.mark.parametrize("flavour", ["vanilla", "eagle", "hybrid"])
def test_a_row_that_is_not_uploaded_is_found(cli, workload, monkeypatch, flavour):
    """The device goes on with the pages of whoever had the row before."""
    uploads = []
    original = HostBackend.upload_rows

    def lose(self, table, *arguments):
        uploads.append(table)
        if len(uploads) < 2 or len(uploads) > 12:
            original(self, table, *arguments)

    monkeypatch.setattr(HostBackend, "upload_rows", lose)
    path = workload(*[request(50 * n, 9, 9) for n in range(8)])
    outcome = cli("run", path, "--flavour", flavour, "--max-batch", 2, "--verify", *SMALL)
    assert outcome.status == 1
    assert len(outcome.err.splitlines()) == 1


def test_a_draft_page_that_is_not_replayed_is_found(cli, workload, monkeypatch):
    """EAGLE's last draft entry of a page depends on the token behind it, which another sequence need not share."""
    plan = ContextCacheManager.plan_spec

    def careless(self, *arguments, future_dependency_tokens, **options):
        return plan(self, *arguments, future_dependency_tokens=0, **options)

    monkeypatch.setattr(ContextCacheManager, "plan_spec", careless)
    path = workload(request(1, 9, 1), {"token_ids": [*range(1, 9), 77, 78], "max_new_tokens": 5})
    outcome = cli("run", path, "--flavour", "eagle", "--max-batch", 1, "--verify", *SMALL)
    assert differs(outcome, "draft K entry") == (2, 2, 7)


@pytest.mark.parametrize("flavour", SNAPSHOTS)
def test_a_recurrent_row_that_is_not_zeroed_is_found(cli, workload, monkeypatch, flavour):
    monkeypatch.setattr(HostBackend, "zero_rows", lambda self, *arguments: None)
    path = workload(request(1, 9, 5), request(100, 9, 5))
    outcome = cli("run", path, "--flavour", flavour, "--max-batch", 1, "--verify", *SMALL)
    assert outcome.status == 1
    assert "request 2 (line 2), position 0" in outcome.err or flavour == "recurrent"


def test_a_compaction_that_leaves_the_lengths_alone_is_found(cli, workload, monkeypatch):
    monkeypatch.setattr(HostBackend, "compact_lengths", lambda self, *arguments: None)
    path = workload(request(1, 9, 2), request(100, 5, 30))
    for flavour in ("vanilla", "eagle", "hybrid"):
        assert cli("run", path, "--flavour", flavour, "--verify", *SMALL).status == 1


def test_without_verification_damage_is_not_looked_for(cli, workload, monkeypatch):
    monkeypatch.setattr(Verifier, "__init__", None)
    assert cli("run", workload(request(1, 5, 2)), "--flavour", "hybrid", "--no-verify", *SMALL).status == 0


# What does not go together


def refused(outcome, *parts):
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("context-cache: ")
    assert len(outcome.err.splitlines()) == 1
    for part in parts:
        assert part in outcome.err


def test_an_unknown_flavour_is_refused_with_those_that_exist(cli):
    refused(cli("run", "--flavour", "eagel"), "--flavour eagel is unknown", ", ".join(FLAVOUR_NAMES))


@pytest.mark.parametrize("flavour", [name for name in FLAVOUR_NAMES if name not in SNAPSHOTS])
def test_snapshot_slots_need_recurrent_state(cli, flavour):
    outcome = cli("run", "--flavour", flavour, "--snapshot-slots", 4)
    refused(outcome, f"--snapshot-slots 4 does not go with --flavour {flavour}", "no recurrent state")


def test_mtp_runs_one_sequence_at_a_time(cli):
    outcome = cli("run", "--flavour", "hybrid-mtp", "--max-batch", 4)
    refused(outcome, "--max-batch 4 does not go with --flavour hybrid-mtp", "one sequence at a time")
    assert cli("run", "--flavour", "hybrid-mtp", "--max-batch", 1, "--limit", 2, "--json").report["requests"] == 2


def test_a_model_without_attention_has_no_pages(cli):
    refused(cli("run", "--flavour", "recurrent", "--pages", 50), "--pages 50 does not go with", "no attention layer")


def test_a_row_has_room_for_a_whole_round(cli, workload):
    """A speculative step may write four positions, so a row that is enough for plain steps can be too short."""
    path = workload(request(1, 5, 10))
    assert cli("run", path, "--row-tokens", 16, *SMALL).report["row_tokens"] == 16
    refused(cli("run", path, "--flavour", "eagle", "--row-tokens", 16, *SMALL), "needs 19 tokens", "headroom 4")


def test_state_that_does_not_fit_into_memory_is_refused(cli, workload, monkeypatch):
    def refuse(self, shape, dtype):
        raise MemoryError

    monkeypatch.setattr(HostBackend, "array", refuse)
    outcome = cli("run", workload(request(1, 5, 2)), "--flavour", "recurrent")
    refused(outcome, "32 sequences and 128 snapshot slots do not fit into memory")


def test_help_explains_the_flavours(cli):
    outcome = cli("run", "--help")
    for part in ("--flavour", "--verify / --no-verify", "--snapshot-slots", "--flavour hybrid --verify --limit 300"):
        assert part in outcome.out
