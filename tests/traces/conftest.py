"""Equipment for traces: coordinators of the other suites recorded into files, and files taken apart and put together.

``recorded(path, make)`` builds a harness whose coordinator writes a trace, ``replay_equal`` replays one and says what
differs. ``suite("conformance/test_failure_injection.py")`` is another suite's module, loaded by path: test modules
cannot import each other.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from context_cache.coordinator import ContextCacheCoordinator
from context_cache.coordinator.manager import ResourceType
from context_cache.coordinator.traces.reader import TraceReader
from context_cache.coordinator.traces.recorder import TraceRecorder
from context_cache.coordinator.traces.replay import Replay, replay
from context_cache.coordinator.traces.stage import open_backend

TESTS = Path(__file__).parents[1]


@functools.cache
def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"for_traces_{Path(name).stem}", TESTS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def suite() -> Callable[[str], Any]:
    """A module of another suite by its path below ``tests``."""
    return load


@pytest.fixture(scope="session")
def flavour_class(harness_class: Any) -> Any:
    """The harness of the flavours; see ``conformance/conftest.py``."""
    return load("conformance/conftest.py").make_harness(harness_class)


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets publications raise; see ``conformance/conftest.py``."""
    return load("conformance/conftest.py").publishing.__wrapped__(monkeypatch)


class Recorded:
    """Builds harnesses whose coordinators are recorded, and ends what is left of them."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any]] = []

    def __call__(self, recorder: Any, make: Callable[[], Any]) -> Any:
        """The harness that ``make`` builds, with ``recorder`` (or a new one that writes to that path)."""
        if not hasattr(recorder, "attach"):
            recorder = TraceRecorder(recorder, timings=False)
        build = ContextCacheCoordinator.__init__

        def watched(self: Any, *arguments: Any, **options: Any) -> None:
            build(self, *arguments, **{**options, "recorder": recorder})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContextCacheCoordinator, "__init__", watched)
            h = make()
        h.recorder = recorder
        self.made.append((h, recorder))
        return h

    def end(self) -> None:
        for h, recorder in self.made:
            recorder.close()
            h.abandon()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """``h = recorded(path, harness_class)``; close ``h.recorder`` before the file is read."""
    equipment = Recorded()
    yield equipment
    equipment.end()


@pytest.fixture(scope="session")
def replay_equal() -> Callable[[Any], Any]:
    """Replay a trace that must be equal; the result."""

    def check(path: Any) -> Any:
        result = replay(path)
        found = result.difference
        assert found is None, (
            f"call {found.call}, line {found.line}, step {found.step}: {', '.join(found.fields)}\n"
            f"{found.expected}\n{found.actual}"
        )
        assert result.unrepeatable is None
        assert result.equal
        return result

    return check


def facts(coordinator: Any) -> dict[str, Any]:
    """What of a coordinator must be as it was recorded: states, books, rows, counters; no digests and no clocks."""
    core = coordinator._core
    pools = core.manager.pools
    counters = attrs.asdict(coordinator.metrics())
    rows = [table for table in (core.rows.base, core.rows.draft) if table is not None]
    return {
        "state": coordinator.state,
        "holder": coordinator.execution_holder,
        "view": coordinator.length_view,
        "requests": {name: (request.state, request.order.tolist()) for name, request in core.requests.items()},
        "metrics": {name: value for name, value in counters.items() if "nanoseconds" not in name},
        "free": [[int(index) for index in pools.free_list(kind)] for kind in ResourceType],
        "records": [int(index) for index in core.manager.records.lru_to_mru()],
        "rows": [[table.host_row(slot).tolist() for slot in range(table.max_batch)] for table in rows],
        "dirty": [tuple(table.dirty_rows) for table in rows],
    }


@pytest.fixture(scope="session")
def ends_alike() -> Callable[[Any, Any], list[str]]:
    """Replay call by call and compare the end with the coordinator that was recorded; the failures on the way."""

    def check(path: Any, coordinator: Any) -> list[str]:
        failures = []
        with TraceReader(path) as reader:
            play = Replay(reader.header, open_backend("host"))
            try:
                for group in reader.groups():
                    assert play.make(group, reader) == group.raw, group.record
                    acts = [act for one in group.steps() for act in one.step.acts]
                    failures += [f"{act.verb} {act.nth} {act.failed}" for act in acts if act.failed]
                assert facts(play.stage.coordinator) == facts(coordinator)
            finally:
                play.end()
        return failures

    return check


class Lines:
    """A trace as a list of objects, to change and write again."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self.raw = self.path.read_bytes().splitlines(keepends=True)
        self.records: list[dict[str, Any]] = [json.loads(line) for line in self.raw]

    def steps(self) -> list[int]:
        """Indices of the step lines, in order; the step with number n is ``steps()[n - 1]``."""
        return [index for index, record in enumerate(self.records) if record["line"] == "step"]

    def write(self, path: Any, changes: dict[int, Any]) -> Path:
        """A copy in which some lines say something else: an object, bytes, or None for a line that is gone."""
        out = []
        for index, line in enumerate(self.raw):
            change = changes.get(index, line)
            if isinstance(change, dict):
                change = encoded(change)
            out.append(b"" if change is None else change)
        return write_trace(path, b"".join(out), self.path)


def encoded(record: dict[str, Any]) -> bytes:
    """A line as the recorder writes it: ``line`` first, nothing between."""
    ordered = {"line": record["line"], **record}
    return json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def write_trace(path: Any, data: bytes, like: Any = None) -> Path:
    """A trace of these bytes, with the tokens of another one."""
    path = Path(path)
    path.write_bytes(data)
    tokens = Path(f"{like}.tokens")
    if like is not None and tokens.exists():
        Path(f"{path}.tokens").write_bytes(tokens.read_bytes())
    return path


@pytest.fixture(scope="session")
def lines_of() -> type[Lines]:
    return Lines


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Path]:
    return write_trace


@pytest.fixture(scope="session")
def line_of() -> Callable[[dict[str, Any]], bytes]:
    return encoded


def script(h: Any) -> None:
    """A script with every kind of call of an attention-only deployment: joiner, steps, compaction, refusals, a reuse.

    Written for eight pages.
    """
    admission = h.sequence_admission
    first = h.begin_batch([h.T(6), [1, 2, 3, 4, 9]], [0, 1])
    h.run_prefill(first)
    h.decode(first, 11, 12)
    h.decode(first, 13, 14)
    assert h.admit(first, h.T(9), 2).status is h.OK
    h.seat(3)
    h.synchronize()
    assert h.coordinator.finalize_sequence_admission(first, 2, h.advance(15, 9)) is h.OK
    h.decode(first, 16, 17, 18, completed=[1])
    h.compact(first, [0, -1, 1])
    assert h.try_begin([admission([9] * 15, 1)]).status is not h.OK
    assert h.admit(first, [7, 7], 1).status is h.OK
    h.seat(3)
    assert h.coordinator.retract_sequence_admission(first) is True
    for _ in range(3):
        h.decode(first, 20, 21)
    assert h.finish(first) is h.OK
    second = h.begin(h.T(10), 1)
    assert h.starts == [8]
    h.run_prefill(second)
    h.refuses(h.prepare_decode, second, -1)
    assert h.prepare_decode(second, 30).status is h.REQUEST_FAILED
    second.close()
    h.begin([5, 5, 5], 0)
    h.end_everything()


@pytest.fixture(scope="session", name="script")
def script_fixture() -> Callable[[Any], None]:
    return script


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory: pytest.TempPathFactory, harness_class: Any) -> Path:
    """The trace of ``script``, closed. Tests read it and write copies."""
    path = tmp_path_factory.mktemp("small") / "t.jsonl"
    equipment = Recorded()
    h = equipment(path, lambda: harness_class(pages=8, enforce_min_pool=False))
    script(h)
    equipment.end()
    return path
