"""The measurements as two tables for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from context_cache.coordinator.cli.bench.measure import Bench

__all__ = ["print_bench"]


def print_bench(bench: Bench) -> None:
    """Figures first, then the budgets; readable from 60 columns on."""
    console = Console()
    width = min(console.width, 92)
    figures = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    figures.add_column("measured", no_wrap=True)
    figures.add_column("median us", justify="right", no_wrap=True)
    figures.add_column("quartiles", justify="right", no_wrap=True, style="dim")
    figures.add_column("", style="dim", ratio=1)
    for figure in bench.figures:
        spread = f"{figure.low:,.1f} - {figure.high:,.1f}"
        figures.add_row(figure.name, f"{figure.us:,.2f}", spread, figure.note)
    console.print(figures)
    console.print()
    ratios = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    ratios.add_column("budget", ratio=1)
    ratios.add_column("ratio", justify="right", no_wrap=True)
    ratios.add_column("at most", justify="right", no_wrap=True)
    ratios.add_column("", no_wrap=True)
    for ratio in bench.ratios:
        verdict = Text("holds", style="green") if ratio.holds else Text("missed", style="bold red")
        ratios.add_row(ratio.name, f"{ratio.value:.2f}", f"{ratio.budget:g}", verdict)
    console.print(ratios)
