"""A progress bar for what takes longer than a moment. On standard error, and only if that is a terminal."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["LateProgress"]

_AFTER_SECONDS: Final = 1.0


class LateProgress:
    """``with LateProgress("requests", 300) as progress: ... progress(12)``; the bar shows up after a second."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._console = Console(stderr=True)
        self._wanted = self._console.is_terminal
        self._since = monotonic()
        self._bar: Progress | None = None

    def __call__(self, done: int) -> None:
        if self._bar is None:
            if not self._wanted or monotonic() - self._since < _AFTER_SECONDS:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
