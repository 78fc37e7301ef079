"""Snapshots: device memory for copies of recurrent state and of one partly filled page, and the copies themselves.

Slot *numbers* belong to the manager's pools; this file only moves bytes. Rules:

1. Every slab is allocated once, at construction, and no copy allocates on the device.
2. Every argument is checked before anything is enqueued, so a ContractViolation leaves the stream as it was.
3. A copy is device to device, on the given stream, without a wait; one verb moves all layers and all slots of a batch.
4. Index arrays are read when the copy *runs*, so each use has its own staging buffer, guarded by an event.

Correct only on one stream: a restore that was enqueued before its slot is captured again is ordered before the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from context_cache.backends.base import Backend, DeviceArray, Int32Array, Stream
from context_cache.backends.staging import StagingRing
from context_cache.coordinator.arguments import as_int32
from context_cache.coordinator.config import HIDDEN_DTYPE, validate_deployment
from context_cache.coordinator.deployment import DeploymentConfig, LayerGeometry, LayerKind, storage_dtype
from context_cache.coordinator.device_state import ContextCachePhysicalResources, HybridCacheManager
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.live_tensors import check_live_tensors

__all__ = ["HybridSnapshotStorage"]

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
"""One number per copy of a batch: a list, a tuple or an integer array."""

_SLOTS_MAX: Final = 2**31 - 1


class _Staged:
    """One staging buffer: a few index arrays of equal length. Grows to the largest batch it has ever carried."""

    __slots__ = ("_arrays", "_backend")

    # Slots, base pages, draft pages, tokens of a paired copy; every other copy needs fewer.
    COLUMNS: Final = 4

    def __init__(self, backend: Backend, width: int) -> None:
        self._backend = backend
        self._arrays: Int32Array = backend.pinned((self.COLUMNS, width), "int32")

    def fill(self, columns: Sequence[Int32Array]) -> list[Int32Array]:
        """Copies of the columns in staging memory, int32[n] each."""
        count = columns[0].size
        if count > self._arrays.shape[1]:
            # The buffer is free, so nothing reads the old memory any more.
            self._arrays = self._backend.pinned((self.COLUMNS, 1 << (count - 1).bit_length()), "int32")
        staged = [self._arrays[index, :count] for index in range(len(columns))]
        for target, column in zip(staged, columns, strict=True):
            target[:] = column
        return staged


class HybridSnapshotStorage:
    """Slabs for snapshot slots of a checkpoint deployment, and the copies between them and the live state.

    recurrent_slabs, conv_slabs: per recurrent layer ``[recurrent_slots, ...]`` in the layer's own dtypes.
    partial_slabs:               per attention layer with K/V of its own ``[partial_slots, 2, P, kv_heads, head_dim]``
                                 (half 0 from the K page, half 1 from the V page).
    draft_partial_slabs:         with MTP the same for the draft, under the same slot number.
    hidden_slab:                 with MTP float16 ``[recurrent_slots, hidden_dim]``, else None.

    deployment:       validated here; it must have recurrent layers.
    resources:        borrowed: the live tensors. They must have the shape, dtype, strides and size that the deployment
                      says, because a copy goes by them.
    recurrent_slots:  at least 1.
    partial_slots:    at least 1 with attention layers, 0 in a pure recurrent deployment.

    Raises ContractViolation, with what was expected and what was found, when one of these does not hold.

    Every copy takes a whole batch, arguments of equal length, no destination twice, and answers whether anything was
    enqueued: an empty batch is nothing. Rows are resident slots, pages are page ids of the respective pool. They raise
    ContractViolation before anything is enqueued, and pass a ``DeviceError`` of the verb on.
    """

    def __init__(
        self,
        deployment: DeploymentConfig,
        resources: ContextCachePhysicalResources,
        recurrent_slots: int,
        partial_slots: int,
        backend: Backend,
    ) -> None:
        profile = validate_deployment(deployment)
        if not profile.has_recurrent:
            raise ContractViolation("snapshots need at least one recurrent layer, and this deployment has none")
        _check_slots(recurrent_slots, partial_slots, has_attention=profile.has_attention)
        self.recurrent_slots, self.partial_slots = recurrent_slots, partial_slots
        self._backend = backend
        self._page_size, self._max_batch = deployment.page_size, deployment.max_batch

        base = resources.base_cache
        self._base_pages = base.num_pages
        check_live_tensors(deployment, base, "base")
        recurrent = deployment.recurrent_layers
        self.recurrent_slabs: list[DeviceArray] = [
            backend.array((recurrent_slots, *layer.state_shape), storage_dtype(layer.state_dtype))
            for layer in recurrent
        ]
        self.conv_slabs: list[DeviceArray] = [
            backend.array((recurrent_slots, *layer.conv_shape), storage_dtype(layer.conv_dtype)) for layer in recurrent
        ]
        self.partial_slabs = self._new_partial_slabs(deployment, deployment.layers)
        # Per layer: recurrent, then convolution.
        self._live = _interleaved(base.recurrent_states, base.conv_states)
        self._slabs = _interleaved(self.recurrent_slabs, self.conv_slabs)
        self._base_pools = _owned_pools(base, deployment.layers)
        self._base_partial = tuple(self.partial_slabs)

        self._draft_pages = 0
        self._draft_pools: tuple[DeviceArray, ...] = ()
        self.draft_partial_slabs: list[DeviceArray] = []
        self.hidden_slab: DeviceArray | None = None
        spec = deployment.spec_config
        if spec is not None:
            draft = resources.draft_cache
            if draft is None:
                raise ContractViolation("an mtp deployment needs draft_cache in its resources, and there is none")
            check_live_tensors(deployment, draft, "draft")
            self._draft_pages = draft.num_pages
            self._draft_pools = _owned_pools(draft, spec.draft_layers)
            self.draft_partial_slabs = self._new_partial_slabs(deployment, spec.draft_layers)
            self.hidden_slab = backend.array((recurrent_slots, spec.hidden_dim), HIDDEN_DTYPE)
        self._draft_partial = tuple(self.draft_partial_slabs)
        self._hidden_dim = 0 if spec is None else spec.hidden_dim
        self._staging: StagingRing[_Staged] = StagingRing(backend, lambda: _Staged(backend, self._max_batch))

    def _new_partial_slabs(self, deployment: DeploymentConfig, layers: tuple[LayerGeometry, ...]) -> list[DeviceArray]:
        dtype = storage_dtype(deployment.kv_dtype)
        return [
            self._backend.array((self.partial_slots, 2, *layer.page_shape(self._page_size)), dtype)
            for layer in layers
            if layer.owns_kv
        ]

    # ---- recurrent state ----

    def zero_recurrent(self, rows: Indices, stream: Stream) -> bool:
        """Zero the recurrent and convolution state of resident rows."""
        what = "zero_recurrent"
        (checked,) = _batch(what, self._rows(what, rows))
        _once(what, "row", checked)
        return self._enqueue(stream, (checked,), lambda staged: self._backend.zero_rows(self._live, staged[0], stream))

    def capture_recurrent(self, slots: Indices, rows: Indices, stream: Stream) -> bool:
        """Copy resident row ``rows[i]`` into recurrent slot ``slots[i]``, whole rows, byte for byte."""
        what = "capture_recurrent"
        into, source = _batch(what, self._recurrent(what, slots), self._rows(what, rows))
        _once(what, "slot", into)
        return self._enqueue(
            stream,
            (into, source),
            lambda staged: self._backend.copy_rows(self._slabs, staged[0], self._live, staged[1], stream),
        )

    def restore_recurrent(self, slots: Indices, rows: Indices, stream: Stream) -> bool:
        """Copy recurrent slot ``slots[i]`` into resident row ``rows[i]``; one slot may go into several rows."""
        what = "restore_recurrent"
        source, into = _batch(what, self._recurrent(what, slots), self._rows(what, rows))
        _once(what, "row", into)
        return self._enqueue(
            stream,
            (into, source),
            lambda staged: self._backend.copy_rows(self._live, staged[0], self._slabs, staged[1], stream),
        )

    # ---- partial pages ----

    def capture_partial(self, slots: Indices, pages: Indices, tokens: Indices, stream: Stream) -> bool:
        """Copy the first ``tokens[i]`` tokens of base page ``pages[i]``, K and V, into partial slot ``slots[i]``.

        1 <= tokens <= page size; the slot's bytes behind them stay.
        """
        what = "capture_partial"
        columns = self._partial(what, slots, tokens, self._base(what, pages))
        _once(what, "slot", columns[0])
        return self._enqueue(stream, columns, lambda staged: self._capture_base(staged, stream))

    def restore_partial(self, slots: Indices, pages: Indices, tokens: Indices, stream: Stream) -> bool:
        """Copy the first ``tokens[i]`` tokens of partial slot ``slots[i]`` into base page ``pages[i]``, K and V.

        1 <= tokens <= page size; the page's bytes behind them stay. One slot may go into several pages.
        """
        what = "restore_partial"
        columns = self._partial(what, slots, tokens, self._base(what, pages))
        _once(what, "page", columns[2])
        return self._enqueue(stream, columns, lambda staged: self._restore_base(staged, stream))

    def capture_partial_pair(
        self, slots: Indices, base_pages: Indices, draft_pages: Indices, tokens: Indices, stream: Stream
    ) -> bool:
        """:meth:`capture_partial` for both models of an MTP deployment: base layers, then draft layers, same slots."""
        what = "capture_partial_pair"
        columns = self._partial(what, slots, tokens, self._base(what, base_pages), self._draft(what, draft_pages))
        _once(what, "slot", columns[0])

        def verbs(staged: list[Int32Array]) -> None:
            self._capture_base(staged, stream)
            self._backend.capture_pages(self._draft_partial, staged[0], self._draft_pools, staged[3], staged[1], stream)

        return self._enqueue(stream, columns, verbs)

    def restore_partial_pair(
        self, slots: Indices, base_pages: Indices, draft_pages: Indices, tokens: Indices, stream: Stream
    ) -> bool:
        """:meth:`restore_partial` for both models of an MTP deployment: base layers, then draft layers, same slots."""
        what = "restore_partial_pair"
        columns = self._partial(what, slots, tokens, self._base(what, base_pages), self._draft(what, draft_pages))
        _once(what, "base page", columns[2])
        _once(what, "draft page", columns[3])

        def verbs(staged: list[Int32Array]) -> None:
            self._restore_base(staged, stream)
            self._backend.restore_pages(self._draft_pools, staged[3], self._draft_partial, staged[0], staged[1], stream)

        return self._enqueue(stream, columns, verbs)

    # ---- hidden rows ----

    def capture_hidden(self, slot: int, source: DeviceArray, row: int, stream: Stream, logical_slot: int = 0) -> bool:
        """Copy one hidden row into recurrent slot ``slot``; MTP only.

        source: float16 ``[rows, hidden_dim]``: ``row`` is a physical token row and ``logical_slot`` is ignored; or
                ``[batch, rows, hidden_dim]``: ``logical_slot`` selects the first axis, ``row`` the second.
        """
        what = "capture_hidden"
        slab = self._hidden(what, slot)
        rows = self._hidden_rows(what, "source", source, row, logical_slot)
        self._backend.copy_row(slab, int(slot), rows, int(row), stream)
        return True

    def restore_hidden(self, slot: int, dest: DeviceArray, row: int, stream: Stream, logical_slot: int = 0) -> bool:
        """Copy the hidden row of recurrent slot ``slot`` into row ``row`` of ``dest``; see :meth:`capture_hidden`."""
        what = "restore_hidden"
        slab = self._hidden(what, slot)
        rows = self._hidden_rows(what, "dest", dest, row, logical_slot)
        self._backend.copy_row(rows, int(row), slab, int(slot), stream)
        return True

    def check_hidden(self, tensor: DeviceArray, row: int, logical_slot: int = 0, *, written: bool = False) -> None:
        """Raise ContractViolation unless a hidden row could be copied from (``written``: to) this place."""
        self._hidden_rows("hidden row", "tensor", tensor, row, logical_slot)
        flags = getattr(tensor, "flags", None)
        if not getattr(flags, "c_contiguous", True) or (written and not getattr(flags, "writeable", True)):
            raise ContractViolation("hidden row: the tensor must be contiguous, and writable where it is written to")

    def drained(self) -> None:
        """Everything enqueued has ended: every staging buffer is free."""
        self._staging.drained()

    # ---- enqueueing ----

    def _enqueue(
        self, stream: Stream, columns: Sequence[Int32Array], verbs: Callable[[list[Int32Array]], None]
    ) -> bool:
        if columns[0].size == 0:
            return False
        use = self._staging.take()
        try:
            verbs(use.buffer.fill(columns))
        finally:
            # Also after a failure: part of the work may be enqueued and read the buffer later.
            self._staging.commit(use, stream)
        return True

    def _capture_base(self, staged: list[Int32Array], stream: Stream) -> None:
        self._backend.capture_pages(self._base_partial, staged[0], self._base_pools, staged[2], staged[1], stream)

    def _restore_base(self, staged: list[Int32Array], stream: Stream) -> None:
        self._backend.restore_pages(self._base_pools, staged[2], self._base_partial, staged[0], staged[1], stream)

    # ---- checks: arguments ----

    def _rows(self, what: str, rows: Indices) -> Int32Array:
        return _indices(what, "row", rows, 0, self._max_batch - 1)

    def _recurrent(self, what: str, slots: Indices) -> Int32Array:
        return _indices(what, "recurrent slot", slots, 0, self.recurrent_slots - 1)

    def _base(self, what: str, pages: Indices) -> Int32Array:
        self._require_pages(what)
        return _indices(what, "base page", pages, 0, self._base_pages - 1)

    def _draft(self, what: str, pages: Indices) -> Int32Array:
        if not self._draft_pools:
            raise ContractViolation(f"{what}: only an mtp deployment has draft pages; use the form without pair")
        return _indices(what, "draft page", pages, 0, self._draft_pages - 1)

    def _partial(self, what: str, slots: Indices, tokens: Indices, *pages: Int32Array) -> list[Int32Array]:
        """Columns slots, tokens, pages of each model."""
        self._require_pages(what)
        return _batch(
            what,
            _indices(what, "partial slot", slots, 0, self.partial_slots - 1),
            _indices(what, "number of tokens", tokens, 1, self._page_size),
            *pages,
        )

    def _require_pages(self, what: str) -> None:
        if not self._base_pools:
            raise ContractViolation(f"{what}: a pure recurrent deployment has no pages to copy; leave this call out")

    def _hidden(self, what: str, slot: int) -> DeviceArray:
        if self.hidden_slab is None:
            raise ContractViolation(f"{what}: only an mtp deployment saves hidden rows; leave this call out")
        _indices(what, "recurrent slot", (slot,), 0, self.recurrent_slots - 1)
        return self.hidden_slab

    def _hidden_rows(self, what: str, name: str, tensor: DeviceArray, row: int, logical_slot: int) -> DeviceArray:
        """The two-dimensional part of a caller's tensor that ``row`` counts in."""
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        if shape is None or dtype is None or len(shape) not in (2, 3):
            raise ContractViolation(
                f"{what}: {name} must be an array [rows, {self._hidden_dim}] or [batch, rows, {self._hidden_dim}], "
                f"got {type(tensor).__name__ if shape is None else f'shape {tuple(shape)}'}"
            )
        if shape[-1] != self._hidden_dim or str(dtype) != HIDDEN_DTYPE:
            raise ContractViolation(
                f"{what}: {name} must hold {HIDDEN_DTYPE} rows of {self._hidden_dim}, got {dtype} rows of {shape[-1]}",
                expected=self._hidden_dim, found=int(shape[-1]),
            )  # fmt: skip
        if len(shape) == 3:
            _indices(what, f"logical slot of {name}", (logical_slot,), 0, shape[0] - 1)
            tensor = tensor[int(logical_slot)]
        _indices(what, f"row of {name}", (row,), 0, shape[-2] - 1)
        return tensor


def _interleaved(states: Sequence[DeviceArray], convs: Sequence[DeviceArray]) -> tuple[DeviceArray, ...]:
    return tuple(tensor for pair in zip(states, convs, strict=True) for tensor in pair)


def _owned_pools(cache: HybridCacheManager, layers: tuple[LayerGeometry, ...]) -> tuple[DeviceArray, ...]:
    attention = (layer for layer in layers if layer.kind is LayerKind.ATTENTION)
    return tuple(pool for pool, layer in zip(cache.kv_pools, attention, strict=True) if layer.owns_kv)


# ---- checks: index arrays --------------------------------------------------------------------------------------------


def _indices(what: str, name: str, values: Indices, lowest: int, highest: int) -> Int32Array:
    """int32[n], each from ``lowest`` to ``highest``."""
    array = as_int32(values, f"{what}: {name}")
    if array.size and not (lowest <= int(array.min()) and int(array.max()) <= highest):
        bad = next(value for value in array.tolist() if not lowest <= value <= highest)
        raise ContractViolation(f"{what}: {name} {bad} is outside {lowest}..{highest}", value=bad)
    return array


def _batch(what: str, *columns: Int32Array) -> list[Int32Array]:
    """The columns, of one length."""
    if len({column.size for column in columns}) > 1:
        sizes = ", ".join(str(column.size) for column in columns)
        raise ContractViolation(f"{what}: the arguments of a batch must be equally long, got {sizes}")
    return list(columns)


def _once(what: str, name: str, column: Int32Array) -> None:
    if np.unique(column).size == column.size:
        return
    seen: set[int] = set()
    for value in column.tolist():
        if value in seen:
            raise ContractViolation(
                f"{what}: {name} {value} is written twice in one batch; name each destination once", value=value
            )
        seen.add(value)


# ---- checks: construction --------------------------------------------------------------------------------------------


def _check_slots(recurrent_slots: int, partial_slots: int, *, has_attention: bool) -> None:
    for name, value, lowest in (
        ("recurrent_slots", recurrent_slots, 1),
        ("partial_slots", partial_slots, 1 if has_attention else 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= _SLOTS_MAX:
            raise ContractViolation(f"snapshots: {name} must be an integer of at least {lowest}, got {value!r}")
    if not has_attention and partial_slots != 0:
        raise ContractViolation(
            f"snapshots: a pure recurrent deployment has no pages, so partial_slots must be 0, got {partial_slots}"
        )
