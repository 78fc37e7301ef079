"""What a run found out, as one JSON object and as a table for a person.

The JSON keys are an interface: scripts read them, so a key is added but never renamed or dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["RunReport", "print_report"]

_WIDTH_MAX: Final = 76  # wider lines are harder to read, however wide the terminal


@frozen(kw_only=True)
class RunReport:
    """Counts of one finished run; lengths in tokens, times as the name says.

    ``prompt_tokens`` and ``reused_tokens`` count the first admission of each request; what a preempted request had to
    prefill again is ``recomputed_tokens``. ``generated_tokens`` counts what requests were given, ``decode_tokens`` what
    decode steps produced (the rest was sampled by prefills). The two percentiles are None if there was no decode step.

    ``verified_requests``: how many were compared with a cold computation at their end, None without verification. The
    last four are None for a flavour without snapshots; ``checkpoints`` counts those published. ``leaked_pages`` counts
    snapshot slots too.
    """

    workload: str
    flavour: str
    backend: str
    seed: int
    pages: int
    page_size: int
    row_tokens: int
    max_batch: int
    max_records: int | None
    requests: int
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    decode_tokens: int
    decode_steps: int
    founders: int
    joiners: int
    compactions: int
    preemptions: int
    refused_admissions: int
    drains: int
    evicted_records: int
    records: int
    leaked_pages: int
    wall_seconds: float
    coordinator_seconds: float
    coordinator_us_per_step_p50: float | None
    coordinator_us_per_step_p99: float | None
    verified_requests: int | None = None
    snapshot_slots: int | None = None
    checkpoints: int | None = None
    hybrid_restores: int | None = None
    hybrid_snapshot_pressure_skips: int | None = None

    def to_json(self) -> dict[str, object]:
        """One flat object; times are rounded to what a clock can tell."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


def print_report(report: RunReport, console: Console) -> None:
    """Print the table; readable from 60 columns on."""
    name = Path(report.workload).name
    console.print(Text(f"{name}, {_count(report.requests)} requests, {report.flavour}", style="bold"))
    table = Table(
        box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, width=min(console.width, _WIDTH_MAX)
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", ratio=1)
    for title, rows in _sections(report):
        table.add_row(Text(title, style="bold"))
        for label, value, note in rows:
            table.add_row(f"  {label}", value, note)
    console.print(table)
    verdict = (
        Text("No page leaked.", style="green")
        if not report.leaked_pages
        else Text(f"{_count(report.leaked_pages)} pages leaked.", style="bold red")
    )
    console.print(verdict)


_Row = tuple[str, str, str]


def _sections(report: RunReport) -> tuple[tuple[str, tuple[_Row, ...]], ...]:
    pool = f"of {report.page_size} tokens; a row has {report.row_tokens // report.page_size}"
    reused: tuple[_Row, ...] = (
        ("prompt tokens", _count(report.prompt_tokens), f"{_count(report.recomputed_tokens)} prefilled twice"),
        ("reused", _share(report.reused_tokens, report.prompt_tokens), f"{_count(report.reused_tokens)} tokens"),
        ("records at the end", _count(report.records), f"{_count(report.evicted_records)} evicted"),
    )
    work: tuple[_Row, ...] = (
        ("generated tokens", _count(report.generated_tokens), f"{_count(report.decode_tokens)} of them decoded"),
        ("decode steps", _count(report.decode_steps), f"at most {report.max_batch} sequences a step"),
        ("founders / joiners", f"{_count(report.founders)} / {_count(report.joiners)}", "how they were admitted"),
        ("compactions", _count(report.compactions), f"{_count(report.drains)} drains in all"),
        ("refused admissions", _count(report.refused_admissions), "no room; tried again later"),
        ("preemptions", _count(report.preemptions), "no page to grow; requeued"),
    )
    share = _share(report.coordinator_seconds, report.wall_seconds)
    cost: tuple[_Row, ...] = (
        ("wall time", f"{report.wall_seconds:.2f} s", f"{report.backend} backend"),
        ("in the coordinator", f"{report.coordinator_seconds:.2f} s", f"{share} of the wall time"),
    )
    if report.coordinator_us_per_step_p50 is not None and report.coordinator_us_per_step_p99 is not None:
        step = f"{report.coordinator_us_per_step_p50:.1f} us"
        cost += (("per decode step", step, f"p99 {report.coordinator_us_per_step_p99:.1f} us"),)
    pages: tuple[_Row, ...] = (("pages", _count(report.pages), pool),)
    if report.snapshot_slots is not None:
        reused += (
            ("checkpoints", _count(report.checkpoints or 0), f"{_count(report.hybrid_restores or 0)} restored"),
            ("skipped checkpoints", _count(report.hybrid_snapshot_pressure_skips or 0), "no snapshot slot was free"),
        )
        pages += (("snapshot slots", _count(report.snapshot_slots), "of each kind"),)
    if report.verified_requests is not None:
        reused += (("verified requests", _count(report.verified_requests), "all they hold equals a cold run"),)
    return (("Reuse", reused), ("Work", work), ("Cost", cost), ("Pages", pages))


def _count(number: int) -> str:
    return f"{number:,}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
