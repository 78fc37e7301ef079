"""Timing: medians over several runs, and what a figure is compared with.

Absolute times say little across machines, so a budget is a ratio: to another figure of the same run, or to a floor
measured in the same run. A *floor* is the least that any implementation in Python must do (the NumPy operations of a
decode step, the SHA-256 of a prompt). Budgets that were set in microseconds on the reference machine are scaled by
``floor here / floor there``.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import perf_counter_ns

from attrs import define, field, frozen

__all__ = ["Bench", "Figure", "Ratio", "once_us", "times_us"]


@frozen
class Figure:
    """One measured time in microseconds: the median, and the quartiles around it."""

    name: str
    us: float
    low: float
    high: float
    note: str = ""


@frozen
class Ratio:
    """A quotient and its budget; ``holds`` when it is at most the budget."""

    name: str
    value: float
    budget: float

    @property
    def holds(self) -> bool:
        return self.value <= self.budget


@define
class Bench:
    """What was measured so far, in order, and where: the backend's name, one of host, cupy, auto."""

    backend: str = "host"
    figures: list[Figure] = field(factory=list)
    ratios: list[Ratio] = field(factory=list)

    def figure(self, name: str, samples: list[float], note: str = "") -> float:
        """Add a figure from samples in microseconds; its median."""
        ordered = sorted(samples)
        quarter = len(ordered) // 4
        median = statistics.median(ordered)
        self.figures.append(Figure(name, median, ordered[quarter], ordered[-1 - quarter], note))
        return median

    def ratio(self, name: str, value: float, budget: float) -> None:
        """Add a quotient and its budget."""
        self.ratios.append(Ratio(name, value, budget))

    def to_json(self) -> dict[str, object]:
        """Figures and ratios by name."""
        return {
            "figures_us": {
                figure.name: {"median": round(figure.us, 3), "low": round(figure.low, 3), "high": round(figure.high, 3)}
                for figure in self.figures
            },
            "ratios": {
                ratio.name: {"value": round(ratio.value, 4), "budget": ratio.budget, "holds": ratio.holds}
                for ratio in self.ratios
            },
        }


def times_us(action: Callable[[], object], repeats: int, *, inner: int = 1, before: Callable[[], object] | None = None,
             after: Callable[[], object] | None = None) -> list[float]:  # fmt: skip
    """Microseconds of ``action``, ``repeats`` times, each averaged over ``inner`` calls.

    before, after: run around each repeat and not timed. Garbage collection is off meanwhile.
    """
    samples = []
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            if before is not None:
                before()
            start = perf_counter_ns()
            for _ in range(inner):
                action()
            samples.append((perf_counter_ns() - start) / 1e3 / inner)
            if after is not None:
                after()
    finally:
        if enabled:
            gc.enable()
    return samples


def once_us(action: Callable[..., object], *arguments: object) -> float:
    """Microseconds of one call, for work that changes what the next call would find."""
    start = perf_counter_ns()
    action(*arguments)
    return (perf_counter_ns() - start) / 1e3
