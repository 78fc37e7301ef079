"""The shipped workload is the generator's output, and holds every kind of request that it promises."""

from __future__ import annotations

from collections import Counter

from context_cache.coordinator.cli.workload import read_workload
from context_cache.coordinator.cli.workloads import shipped_workload
from context_cache.coordinator.cli.workloads.generate import generate


def test_the_committed_file_is_what_the_generator_writes():
    with shipped_workload() as path:
        committed = path.read_text(encoding="utf-8")
    assert committed == generate(), (
        "the generator changed: run `python -m context_cache.coordinator.cli.workloads.generate "
        "coordinator/cli/workloads/shipped.jsonl` and commit the result"
    )
    assert len(committed) < 1_500_000


def test_it_holds_every_kind_of_request():
    with shipped_workload() as path:
        requests = read_workload(path).requests
    assert len(requests) >= 300
    assert Counter(r.lookup_policy for r in requests)["bypass"] >= 10
    assert Counter(r.commit_policy for r in requests)["prefill_state_only"] >= 10
    assert len({r.tenant for r in requests if r.tenant}) >= 3
    prompts = [r.prompt().tobytes() for r in requests]
    extended = sum(any(later.startswith(prompt) for later in prompts[n + 1 :]) for n, prompt in enumerate(prompts))
    assert extended >= 80, "multi-turn chats: a later prompt begins with the whole of an earlier one"
