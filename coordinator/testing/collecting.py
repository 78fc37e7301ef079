"""Coverage of the lifecycles over a whole pytest run; with xdist each worker collects and the controller adds up."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from context_cache.coordinator.testing.coverage import FORMAT, Coverage, needs
from context_cache.machines import witnessed_by

__all__ = ["CoveragePlugin", "unusable_file"]

_HEAD_BYTES: Final = 4096
_OUTPUT: Final = "context_cache_lifecycle_coverage"
_SHOWN_MAX: Final = 40


def unusable_file(out: Path) -> str | None:
    """Why a coverage cannot be written to ``out``, in words; None if it can."""
    try:
        if not out.parent.is_dir():
            return f"there is no folder {out.parent}; make it first"
        if not out.exists():
            return None
        if not out.is_file():
            return "it is no regular file; name another one"
        with out.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        return f"it cannot be used ({error.strerror or error}); name another one"
    if head and FORMAT.encode() not in head:
        return "it is there and holds something else, which would be lost; name another one"
    return None


class CoveragePlugin:
    """Registered when coverage is asked for."""

    def __init__(self, config: pytest.Config, out: Path | None, fail_under: float | None) -> None:
        self._config, self._out, self._fail_under = config, out, fail_under
        self._problem: str | None = None
        self.coverage = Coverage()
        self._ends = ExitStack()
        self._ends.enter_context(witnessed_by(self.coverage))

    @property
    def _worker(self) -> bool:
        return hasattr(self._config, "workeroutput")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        text = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if text is not None:
            self.coverage.merge(Coverage.from_json(text))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._ends.close()
        if self._worker:
            # Only there on a worker, so no type knows of it.
            worker: Any = self._config
            worker.workeroutput[_OUTPUT] = self.coverage.to_json()
            return
        if self._out is not None:
            try:
                self._out.write_text(self.coverage.to_json() + "\n", encoding="utf-8")
            except OSError as error:
                self._problem = f"{self._out} cannot be written ({error.strerror or error})"
        if (self._short or self._problem) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        missing = self.coverage.missing()
        total = len(needs())
        terminalreporter.section("lifecycle coverage")
        for need in missing[:_SHOWN_MAX]:
            terminalreporter.line(f"never taken: {need.words}")
        if len(missing) > _SHOWN_MAX:
            terminalreporter.line(
                f"and {len(missing) - _SHOWN_MAX} more; all of them: pytest --lifecycle-coverage-file=FILE, then "
                "context-cache coverage FILE"
            )
        percent = self.coverage.percent()
        terminalreporter.line(
            f"{total - len(missing)} of {total} rows, guard outcomes and failure paths were taken ({percent:.1f} %)"
        )
        if self._problem is not None:
            terminalreporter.line(f"FAIL: {self._problem}; name another file with --lifecycle-coverage-file", red=True)
        if self._short:
            terminalreporter.line(f"FAIL: less than --lifecycle-fail-under={self._fail_under:g}", red=True)

    @property
    def _short(self) -> bool:
        return self._fail_under is not None and self.coverage.percent() < self._fail_under
