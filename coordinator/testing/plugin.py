"""The pytest plugin: traces as tests, the last steps in a failing test's report, and coverage of the lifecycles.

``trace_recorder``           a fixture: a recorder for one coordinator, writing into the test's temporary folder.
``@pytest.mark.trace(F)``    replays the committed trace F (relative to the test file) before the test runs.
``--trace-update``           writes such traces anew instead of failing where they differ.
``--lifecycle-steps=N``      how many steps of each live request a failing test's report shows (20; 0: none).
``--lifecycle-coverage``     collects rows, guard outcomes and failure paths over the whole run, also under xdist.
``--lifecycle-fail-under=P`` fails the run below P percent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from context_cache.coordinator.testing.coverage import Coverage, needs
from context_cache.machines import ALL_MACHINES, RecorderSwitch, Step, witnessed_by

if TYPE_CHECKING:
    from context_cache.coordinator.traces import TraceRecorder

_FINAL: Final = {(spec.name, state.name) for spec in ALL_MACHINES for state in spec.states if state.final}
_KEEPER: Final = pytest.StashKey["LastSteps"]()
_OUTPUT: Final = "context_cache_lifecycle_coverage"
_SHOWN_MAX: Final = 40


class LastSteps:
    """The last steps of every subject that has not ended, coordinator by coordinator. A ``machines.Witness``."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_switch: dict[RecorderSwitch, dict[tuple[str, str], deque[Step]]] = {}

    def saw(self, switch: RecorderSwitch, step: Step) -> None:
        if step.outcome == "declined":
            return
        subjects = self._by_switch.setdefault(switch, {})
        key = (step.machine, step.subject)
        if (step.machine, step.target) in _FINAL:
            subjects.pop(key, None)
            return
        subjects.setdefault(key, deque(maxlen=self._count)).append(step)

    def report(self) -> str:
        """Steps of live requests, oldest first; empty if there are none."""
        parts: list[str] = []
        for subjects in self._by_switch.values():
            for (machine, _), steps in subjects.items():
                if machine == "request":
                    parts += [str(step) for step in steps]
        return "\n".join(parts)


class _CoveragePlugin:
    """Collects over the whole run; with xdist each worker collects and the controller adds up."""

    def __init__(self, config: pytest.Config, out: str | None, fail_under: float | None) -> None:
        self._config, self._out, self._fail_under = config, out, fail_under
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
        if self._out:
            Path(self._out).write_text(self.coverage.to_json() + "\n", encoding="utf-8")
        if self._short and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        missing = self.coverage.missing()
        total = len(needs())
        terminalreporter.section("lifecycle coverage")
        for need in missing[:_SHOWN_MAX]:
            terminalreporter.line(f"never taken: {need.words}")
        if len(missing) > _SHOWN_MAX:
            terminalreporter.line(f"and {len(missing) - _SHOWN_MAX} more; all of them: context-cache coverage FILE")
        percent = self.coverage.percent()
        terminalreporter.line(
            f"{total - len(missing)} of {total} rows, guard outcomes and failure paths were taken ({percent:.1f} %)"
        )
        if self._short:
            terminalreporter.line(f"FAIL: less than --lifecycle-fail-under={self._fail_under:g}", red=True)

    @property
    def _short(self) -> bool:
        return self._fail_under is not None and self.coverage.percent() < self._fail_under


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("context-cache", "traces and lifecycle coverage")
    group.addoption(
        "--trace-update", action="store_true", help="write traces named by @pytest.mark.trace anew where they differ"
    )
    group.addoption(
        "--lifecycle-steps", type=int, default=20, metavar="N",
        help="steps of each live request in a failing test's report (20; 0: none)",
    )  # fmt: skip
    group.addoption(
        "--lifecycle-coverage", nargs="?", const="", default=None, metavar="FILE",
        help="collect rows fired, guard outcomes and failure paths; print what is missing, and write FILE",
    )  # fmt: skip
    group.addoption(
        "--lifecycle-fail-under", type=float, default=None, metavar="PERCENT",
        help="with --lifecycle-coverage: fail the run below this",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "trace(path): replay this recorded trace (relative to the test file) before the test"
    )
    out, fail_under = config.getoption("--lifecycle-coverage"), config.getoption("--lifecycle-fail-under")
    if out is None and fail_under is not None:
        raise pytest.UsageError("--lifecycle-fail-under needs --lifecycle-coverage, which collects what it judges")
    if out is not None:
        config.pluginmanager.register(_CoveragePlugin(config, out or None, fail_under), "context-cache-coverage")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    count = item.config.getoption("--lifecycle-steps")
    if count <= 0:
        return (yield)
    keeper = item.stash[_KEEPER] = LastSteps(count)
    try:
        with witnessed_by(keeper):
            return (yield)
    finally:
        del item.stash[_KEEPER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    keeper = item.stash.get(_KEEPER, None)
    if report.failed and keeper is not None:
        steps = keeper.report()
        if steps:
            report.sections.append((f"last lifecycle steps of live requests ({call.when})", steps))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    for marker in item.iter_markers("trace"):
        if len(marker.args) != 1 or marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.trace takes one path of a trace")
        _replay_marked(item, item.path.parent / marker.args[0])


def _replay_marked(item: pytest.Item, path: Path) -> None:
    from context_cache.coordinator.testing.replaying import assert_replays, update_trace

    if item.config.getoption("--trace-update"):
        update_trace(path)
    assert_replays(path)


@pytest.fixture
def trace_recorder(tmp_path: Path) -> Iterator[TraceRecorder]:
    """A recorder for one coordinator; the trace is ``trace.jsonl`` in the test's temporary folder."""
    from context_cache.coordinator.traces import TraceRecorder

    with TraceRecorder(tmp_path / "trace.jsonl") as recorder:
        yield recorder
