"""The public Mooncake traces, where they are at hand: CONTEXT_CACHE_DATA names their folder.

They are not part of the repository, so these tests skip without them. The exact numbers were computed independently:
unlimited pages, one request at a time, pages of 128 tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from context_cache.coordinator.cli.flavours import FLAVOUR_NAMES

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("CONTEXT_CACHE_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture
def trace():
    def find(name):
        path = DATA / f"{name}_trace.jsonl"
        if not path.is_file():
            pytest.skip(f"{path.name} is not there; set CONTEXT_CACHE_DATA to the folder that has it")
        return path

    return find


def test_the_first_requests_of_a_trace_reuse_and_leak_nothing(cli, trace):
    report = cli("run", trace("conversation"), "--limit", 150, "--max-new-tokens", 20, "--json").report
    assert report["requests"] == 150
    assert report["reused_tokens"] > 0
    assert report["leaked_pages"] == 0


def test_few_pages_cost_refusals_and_retries_but_no_page(cli, trace):
    path = trace("conversation")
    report = cli("run", path, "--pages", 3000, "--limit", 100, "--max-new-tokens", 200, "--json").report
    assert report["requests"] == 100
    assert report["refused_admissions"] > 0
    assert report["leaked_pages"] == 0


@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_every_flavour_verifies_the_beginning_of_a_trace(cli, trace, flavour):
    arguments = ("--flavour", flavour, "--verify", "--limit", 60, "--max-new-tokens", 20, "--json")
    report = cli("run", trace("conversation"), *arguments).report
    assert report["verified_requests"] == report["requests"] == 60
    assert report["leaked_pages"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("flavour", FLAVOUR_NAMES)
def test_every_flavour_verifies_three_hundred_requests(cli, trace, flavour, small):
    """With few pages or snapshot slots too: eviction, refusals, preemption."""
    options = () if not small else ("--snapshot-slots", 3) if flavour == "recurrent" else ("--pages", 1000)
    arguments = ("--flavour", flavour, "--verify", "--limit", 300, *options, "--json")
    report = cli("run", trace("conversation"), *arguments).report
    assert report["verified_requests"] == report["requests"] == 300
    assert report["leaked_pages"] == 0
    assert report["evicted_records"] > 0 or not small


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reused"), [("conversation", 54_089_728), ("synthetic", 39_839_104)])
def test_one_at_a_time_with_room_for_all_the_reuse_is_exact(cli, trace, name, reused):
    arguments = ("--max-batch", 1, "--max-new-tokens", 1, "--pages", 800_000, "--max-records", 20_000)
    report = cli("run", trace(name), *arguments, "--json").report
    assert report["reused_tokens"] == reused
    assert report["leaked_pages"] == report["evicted_records"] == 0


@pytest.mark.slow
def test_the_whole_conversation_trace_decodes_every_token(cli, trace):
    report = cli("run", trace("conversation"), "--pages", 50_000, "--max-batch", 32, "--json").report
    assert report["decode_tokens"] == 4_110_017
    assert report["leaked_pages"] == 0


@pytest.mark.slow
def test_real_output_lengths_under_pressure(cli, trace):
    report = cli("run", trace("conversation"), "--pages", 6000, "--limit", 500, "--json").report
    assert report["requests"] == 500
    assert report["refused_admissions"] > 0
    assert report["leaked_pages"] == 0
