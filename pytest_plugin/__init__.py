"""The pytest plugin: traces as tests, the last steps in a failing test's report, and coverage of the lifecycles.

``trace_recorder``               a fixture: a recorder for one coordinator, into the test's temporary folder.
``@pytest.mark.trace(F)``        replays the committed trace F (relative to the test file) before the test runs.
``--trace-update``               writes such traces anew instead of failing where they differ.
``--lifecycle-steps=N``          how many steps of each live request a failing test's report shows (20; 0: none).
``--lifecycle-coverage``         collects rows, guard outcomes and failure paths over the whole run, also under xdist.
``--lifecycle-coverage-file=F``  the same, and writes them to F.
``--lifecycle-fail-under=P``     fails the run below P percent.

Rule: pytest imports this in every project of an environment that has the library, so it imports nothing of it before
it is used. That is why it is no part of the coordinator, whose package would be imported with it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from context_cache.coordinator.traces import TraceRecorder
    from context_cache.pytest_plugin.steps import LastSteps

_COORDINATOR: Final = "context_cache.coordinator"
_STEPS_OF: Final = pytest.StashKey["_Steps"]()


class _Steps(MetaPathFinder):
    """Keeps the last steps from the moment that somebody imports the coordinator.

    A coordinator has the witnesses that were there before it, so the moment counts. Being asked where the coordinator
    lies tells of it; the answer is left to the others.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends = ExitStack()
        self.keeper: LastSteps | None = None

    def wait(self) -> None:
        """Begin now, or with the import."""
        if self._count == 0:
            return
        sys.meta_path.insert(0, self)
        if _COORDINATOR in sys.modules:
            self._begin()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        # It stays where it is: the list of finders is gone through at this moment, and there may be another import.
        if fullname == _COORDINATOR:
            self._begin()

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._ends.close()

    def _begin(self) -> None:
        from context_cache.machines import witnessed_by
        from context_cache.pytest_plugin.steps import LastSteps

        self._ends.close()
        self.keeper = LastSteps(self._count)
        self._ends.enter_context(witnessed_by(self.keeper))


def _percent(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is no percentage; choose one from 0 to 100")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of steps; choose 0 or more")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("context-cache", "traces and lifecycle coverage")
    group.addoption(
        "--trace-update", action="store_true", help="write traces named by @pytest.mark.trace anew where they differ"
    )
    group.addoption(
        "--lifecycle-steps", type=_count, default=20, metavar="N",
        help="steps of each live request in a failing test's report (20; 0: none)",
    )  # fmt: skip
    group.addoption(
        "--lifecycle-coverage", action="store_true",
        help="collect rows fired, guard outcomes and failure paths, and print what is missing",
    )  # fmt: skip
    group.addoption(
        "--lifecycle-coverage-file", default=None, metavar="FILE",
        help="collect as with --lifecycle-coverage, and write FILE for context-cache coverage",
    )  # fmt: skip
    group.addoption(
        "--lifecycle-fail-under", type=_percent, default=None, metavar="PERCENT",
        help="with --lifecycle-coverage: fail the run below this",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "trace(path): replay this recorded trace (relative to the test file) before the test"
    )
    config.stash[_STEPS_OF] = _Steps(config.getoption("--lifecycle-steps"))
    config.stash[_STEPS_OF].wait()
    file, fail_under = config.getoption("--lifecycle-coverage-file"), config.getoption("--lifecycle-fail-under")
    if file is None and not config.getoption("--lifecycle-coverage"):
        if fail_under is not None:
            raise pytest.UsageError("--lifecycle-fail-under needs --lifecycle-coverage, which collects what it judges")
        return
    from context_cache.coordinator.testing.collecting import CoveragePlugin, unusable_file

    # A test may change the working folder, and a worker writes nothing.
    out = None if file is None or hasattr(config, "workerinput") else config.invocation_params.dir / file
    problem = None if out is None else unusable_file(out)
    if problem is not None:
        raise pytest.UsageError(f"--lifecycle-coverage-file={file}: {problem}")
    config.pluginmanager.register(CoveragePlugin(config, out, fail_under), "context-cache-coverage")


def pytest_unconfigure(config: pytest.Config) -> None:
    steps = config.stash.get(_STEPS_OF, None)
    if steps is not None:
        steps.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    keeper = item.config.stash[_STEPS_OF].keeper
    if keeper is not None:
        keeper.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    keeper = item.config.stash[_STEPS_OF].keeper
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
