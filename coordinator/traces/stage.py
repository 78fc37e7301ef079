"""A coordinator like the recorded one, on which recorded calls are made again.

Transitions depend on lengths, pages and answers, never on what K/V pages hold; so the stage has the recorded number of
pages and slots, but layers of the smallest shape, and a trace of a large GPU replays on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np

from context_cache.backends.base import Backend, DeviceError, DrainResult, Stream
from context_cache.backends.delegate import DelegatingBackend
from context_cache.backends.host import HostBackend
from context_cache.coordinator.config import (
    ContextCacheConfig,
    DeploymentConfig,
    LayerGeometry,
    LayerKind,
    validate_deployment,
)
from context_cache.coordinator.coordinator import ContextCacheCoordinator
from context_cache.coordinator.device_state import allocate_resources
from context_cache.coordinator.errors import ContextCacheError, ContractViolation, InvariantViolation
from context_cache.coordinator.handle import RequestHandle
from context_cache.coordinator.manager import ContextCacheManager, ResourceDemand
from context_cache.coordinator.traces import format as lines
from context_cache.coordinator.traces.doors import NOT_IDLE, Acts
from context_cache.coordinator.traces.header import deployment_of
from context_cache.coordinator.traces.reader import TraceError
from context_cache.coordinator.traces.recorder import CallRecorder

__all__ = ["BYTES_MAX", "RecordedFailure", "Stage", "fault_of", "open_backend"]

BYTES_MAX: Final = 8 * 2**30
"""A trace that asks for more host memory than this is refused, unless the caller allows more."""
_TENSOR_BYTES_MAX: Final = 2**30
_DTYPES: Final = frozenset({"int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"})
_BUILTIN: Final[dict[str, type[BaseException]]] = {
    kind.__name__: kind
    for kind in (
        KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, ValueError, TypeError, RuntimeError, KeyError,
        IndexError, OSError, AssertionError, ArithmeticError, ZeroDivisionError, OverflowError, AttributeError,
    )
}  # fmt: skip


class RecordedFailure(Exception):
    """Stands for an error of a class that is not known here. ``stands_for``: the class."""

    def __init__(self, stands_for: str) -> None:
        super().__init__(stands_for)
        self.stands_for = stands_for


class _Refusable:
    """Stands for an argument that the coordinator refused."""

    def __init__(self, shape: tuple[int, ...] = (), dtype: str = "", *, plain: bool = False) -> None:
        self.shape, self.dtype, self.size = shape, dtype, math.prod(shape)
        self.flags = _Flags(plain, plain)

    def __getitem__(self, index: int) -> _Refusable:
        return _Refusable(self.shape[1:], self.dtype, plain=self.flags.c_contiguous)


@attrs.frozen
class _Flags:
    c_contiguous: bool
    writeable: bool


class _FailingBackend(DelegatingBackend):
    """Fails where a recorded action failed: at the first work that it would have enqueued."""

    def __init__(self, inner: Backend, acts: Acts) -> None:
        super().__init__(inner)
        self._acts = acts

    def verb(self, name: str, stream: Stream, enqueue: Callable[[], None]) -> None:
        self._acts.fail_if_armed()
        enqueue()


class _FailingManager(ContextCacheManager):
    """Fails where a recorded publication failed, unless it failed before it came here."""

    acts: Acts

    def publish(self, *arguments: Any, **options: Any) -> Any:
        self.acts.fail_if_armed()
        return super().publish(*arguments, **options)

    def publish_hybrid(self, *arguments: Any, **options: Any) -> Any:
        self.acts.fail_if_armed()
        return super().publish_hybrid(*arguments, **options)

    def publish_hybrid_mtp(self, *arguments: Any, **options: Any) -> Any:
        self.acts.fail_if_armed()
        return super().publish_hybrid_mtp(*arguments, **options)


def open_backend(name: str) -> Backend:
    """``host`` or ``cupy``. Raises BackendUnavailable."""
    if name == "cupy":
        from context_cache.backends.cupy_backend import CupyBackend

        return CupyBackend()
    return HostBackend()


def fault_of(act: lines.Act) -> BaseException | DrainResult:
    """What makes an act fail again as it failed."""
    failed = act.failed or ""
    if act.verb == "drain":
        if failed == NOT_IDLE:
            return DrainResult(ok=False, cause="a recorded failure")
        return DrainResult(ok=False, cause="a recorded failure", interrupt=_error(act.verb, failed))
    return _error(act.verb, failed)


def _error(verb: str, name: str) -> BaseException:
    if name == DeviceError.__name__:
        return DeviceError(verb, "replay", "a recorded failure")
    for kind in (ContractViolation, InvariantViolation):
        if name == kind.__name__:
            return kind("a recorded failure")
    known = _BUILTIN.get(name)
    return RecordedFailure(name) if known is None else known("a recorded failure")


class Stage:
    """One coordinator built after a header, and the handles of its requests.

    recorder: given to the coordinator. bytes_max: most host memory that the header may ask for.

    Raises TraceError for a header that describes no coordinator, or a larger one than allowed.
    """

    def __init__(
        self, header: lines.Header, recorder: CallRecorder, backend: Backend, *, bytes_max: int = BYTES_MAX
    ) -> None:
        pages, draft_pages, recurrent, partial = header.capacities
        backend = _FailingBackend(backend, recorder.acts)
        try:
            deployment = _small(deployment_of(header.deployment))
            _check_size(deployment, header.capacities, bytes_max)
            profile = validate_deployment(deployment)
            demand = ResourceDemand(pages, draft_pages, recurrent, partial)
            config = header.config
            manager = _FailingManager(
                demand, deployment.page_size, max_records=config.max_records, touch_on_hit=config.touch_on_hit
            )
            manager.acts = recorder.acts
            resources = allocate_resources(deployment, pages, backend, draft_pages if profile.paged_spec else None)
            self.backend = backend
            self.stream = backend.new_stream("replay")
            if header.clear_rows:
                for table in (resources.base_page_table, resources.draft_page_table):
                    if table is not None:
                        table.upload(self.stream)
            self.coordinator = ContextCacheCoordinator(
                ContextCacheConfig(
                    enabled=True,
                    max_records=config.max_records,
                    recurrent_snapshot_pool_bytes=recurrent * profile.recurrent_slot_bytes,
                    partial_kv_snapshot_pool_bytes=partial * profile.partial_slot_bytes,
                ),
                deployment,
                resources,
                backend=backend,
                stream=self.stream,
                recorder=recorder,
                manager=manager,
            )
        except (ContextCacheError, MemoryError) as error:
            raise TraceError(f"line 1: no coordinator can be built after this header: {error}") from None
        self.tokens_max: Final = deployment.max_batch * deployment.row_pages * deployment.page_size
        """As many as all rows together hold."""
        self._handles: dict[str, RequestHandle] = {}
        self._ended: RequestHandle | None = None
        self._tensors: dict[tuple[tuple[int, ...], str], Any] = {}
        self._tensor_bytes = 0

    def synchronize(self) -> None:
        """What a runtime does before it reports a completion."""
        self.backend.synchronize(self.stream)

    def handle(self, request: str | None) -> Any:
        """The handle of a request; of one that has ended, a handle of another one that has ended."""
        if request is None:
            return _Refusable()
        found = self._handles.get(request)
        return found if found is not None else (self._ended or _Refusable())

    def keep(self, request: str, handle: RequestHandle) -> None:
        """A request was admitted."""
        self._handles[request] = handle

    def forget_ended(self, request: str | None) -> None:
        """Its handle is not needed any more once it has ended; one stays to stand for all."""
        found = self._handles.get(request or "")
        if found is not None and found.state == "released":
            self._ended = self._handles.pop(request or "")

    def tensor(self, record: lines.Tensor, line: int) -> Any:
        """A device tensor as the runtime gave it. Raises TraceError for one that cannot be had."""
        shape = tuple(record.shape)
        if not record.plain or record.dtype not in _DTYPES:
            return _Refusable(shape, record.dtype, plain=record.plain)
        size = math.prod(shape) * np.dtype(record.dtype).itemsize
        if size > _TENSOR_BYTES_MAX:
            raise TraceError(f"line {line}: a tensor of shape {list(shape)}, larger than any that a runtime gives")
        key = (shape, record.dtype)
        if key not in self._tensors:
            # What they hold decides nothing, so a trace of many shapes costs no more than its largest.
            self._tensor_bytes += size
            if self._tensor_bytes > _TENSOR_BYTES_MAX:
                self._tensors.clear()
                self._tensor_bytes = size
            self._tensors[key] = self.backend.array(shape, record.dtype)
        return self._tensors[key]

    def end(self) -> None:
        """Close what is still open, so that nothing of the stage stays behind."""
        for handle in self._handles.values():
            handle.close()
        self.coordinator.shutdown()


def _small(deployment: DeploymentConfig) -> DeploymentConfig:
    """The same kinds of state in the smallest layers, one of each kind."""
    spec = deployment.spec_config
    if spec is not None:
        spec = attrs.evolve(spec, draft_layers=_small_layers(spec.draft_layers))
    # The rules of the real geometry are the header's to keep.
    validate_deployment(deployment)
    return attrs.evolve(deployment, layers=_small_layers(deployment.layers), spec_config=spec)


def _small_layers(layers: tuple[LayerGeometry, ...]) -> tuple[LayerGeometry, ...]:
    kinds = {layer.kind for layer in layers}
    small: list[LayerGeometry] = []
    if LayerKind.ATTENTION in kinds:
        small.append(LayerGeometry.attention(kv_heads=1, head_dim=1))
    if LayerKind.RECURRENT in kinds:
        small.append(LayerGeometry.recurrent(heads=1, head_dim=1, state=1, conv_dim=1, conv_kernel=1))
    return tuple(small)


def _check_size(deployment: DeploymentConfig, capacities: tuple[int, int, int, int], bytes_max: int) -> None:
    pages, draft_pages, recurrent, partial = capacities
    spec = deployment.spec_config
    page = 4 * deployment.page_size  # K and V, float16
    row = deployment.row_pages * deployment.page_size
    wanted = (
        (pages + draft_pages) * (page + 64)
        + recurrent * (64 + 2 * (0 if spec is None else spec.hidden_dim))
        + partial * 2 * page
        + deployment.max_batch * (4 * row + 48 * deployment.row_pages + 256)
    )
    if wanted > bytes_max:
        raise TraceError(
            f"line 1: replaying needs about {wanted / 2**30:.1f} GiB of memory for {pages} pages and "
            f"{deployment.max_batch} rows, more than the {bytes_max / 2**30:.1f} GiB allowed; allow more with "
            "--memory, if the trace is one of yours"
        )
