"""Whole runs of one flavour in memory: who started where, and which tokens each request was given."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest

from context_cache.coordinator.cli import running, scheduler
from context_cache.coordinator.cli.flavours import check_options
from context_cache.coordinator.cli.report import RunReport
from context_cache.coordinator.cli.sizing import size_run
from context_cache.coordinator.cli.workload import read_workload

PAGE = 4
MASK = 2**64 - 1


class Played(NamedTuple):
    report: RunReport
    starts: list[tuple[int, int]]  # (ordinal, start) of every prefill, in order
    outputs: dict[int, list[int]]  # ordinal -> generated tokens


@pytest.fixture
def play(tmp_path, monkeypatch):
    def run(flavour, requests, *, pages=None, max_batch=None, snapshot_slots=None, verify=True, max_records=None):
        """Requests are (tokens, max_new_tokens) or (tokens, max_new_tokens, options)."""
        path = tmp_path / "played.jsonl"
        lines = [{"token_ids": r[0], "max_new_tokens": r[1], **(r[2] if len(r) > 2 else {})} for r in requests]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kind, batch, slots = check_options(flavour, max_batch=max_batch, pages=pages, snapshot_slots=snapshot_slots)
        workload = read_workload(path)
        size = size_run(
            workload, page_size=PAGE, max_batch=batch, pages=pages, headroom=kind.width, paged=kind.has_attention
        )
        starts, outputs = [], {}
        seated, ending = running.Running._seated, running.Running._verify_ended

        def note_start(self, ticket, resident, start):
            starts.append((ticket.ordinal, start))
            seated(self, ticket, resident, start)

        def note_output(self, batch, stays):
            """The step has been synchronised, so the token buffer can be read."""
            for logical in (~stays).nonzero()[0].tolist():
                ticket = batch.tickets[logical]
                first, count = ticket.request.prompt_length, ticket.request.max_new_tokens
                row = np.asarray(self.runtime.model.tokens)[ticket.slot]
                outputs[ticket.ordinal] = row[first : first + count].tolist()
            ending(self, batch, stays)

        with monkeypatch.context() as patch:
            patch.setattr(running.Running, "_seated", note_start)
            patch.setattr(running.Running, "_verify_ended", note_output)
            report = scheduler.run_workload(
                workload, size, flavour=kind, snapshot_slots=slots, verify=verify, max_records=max_records
            )
        assert report.leaked_pages == 0
        assert report.requests == len(requests)
        assert report.verified_requests == (len(requests) if verify else None)
        return Played(report, starts, outputs)

    return run


def mixed(word, salt):
    word = word * salt & MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


@pytest.fixture
def cold():
    """The tokens that a prompt is answered with, computed one by one in plain integers."""

    def answer(prompt, count):
        state, tokens = 0, list(prompt)
        for position in range(len(prompt) + count - 1):
            state = (state * 0x5851F42D4C957F2D + tokens[position] * 0x2545F4914F6CDD1D + 0x14057B7EF767814F) & MASK
            if position >= len(prompt) - 1:
                tokens.append(mixed(state, 0x9E3779B97F4A7C15) >> 33)
        return tokens[len(prompt) :]

    return answer
