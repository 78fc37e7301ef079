"""Tables of addresses on the device: one launch reaches every layer through them.

A plan belongs to a tuple of tensors and is built once. It refers to them weakly, so that it neither keeps their memory
alive nor outlives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen

from context_cache.backends.base import DeviceArray
from context_cache.backends.cupy_backend.device import Device, Owned

__all__ = ["Plan", "Plans"]

Tensors = tuple[DeviceArray, ...]


@frozen(eq=False)
class Plan:
    """A table on the device for ``tensors`` tensors or pairs; ``size``: bytes of the largest row or page."""

    memory: Owned
    tensors: int
    size: int

    @property
    def address(self) -> int:
        return self.memory.value


class Plans:
    """The plans of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._watchers: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def rows(self, tensors: Tensors) -> Plan:
        """Address and row size of each."""
        return self._get("rows", (tensors,), lambda: [_addresses(tensors), [_row_bytes(one) for one in tensors]])

    def pairs(self, dest: Tensors, source: Tensors) -> Plan:
        """Destination, source and row size of each pair."""

        def build() -> list[list[int]]:
            sizes = [_row_bytes(one) for one in dest]
            if sizes != [_row_bytes(one) for one in source]:
                raise ValueError("copy_rows: the rows of a pair of tensors must have one size in bytes")
            return [_addresses(dest), _addresses(source), sizes]

        return self._get("pairs", (dest, source), build)

    def pages(self, slabs: Tensors, pools: Tensors) -> Plan:
        """Slab, pool, bytes of a token, of a page and of half a pool of each layer."""

        def build() -> list[list[int]]:
            for slab, pool in zip(slabs, pools, strict=True):
                if slab.shape[1] != 2 or pool.shape[0] != 2 or slab.shape[2:] != pool.shape[2:]:
                    raise ValueError(f"pages of a slab {slab.shape} and a pool {pool.shape} do not match")
                if slab.dtype != pool.dtype:
                    raise ValueError(f"a slab of {slab.dtype} and a pool of {pool.dtype} do not match")
            half = [int(pool.nbytes) // 2 for pool in pools]
            page = [size // pool.shape[1] for size, pool in zip(half, pools, strict=True)]
            token = [size // pool.shape[2] for size, pool in zip(page, pools, strict=True)]
            return [_addresses(slabs), _addresses(pools), token, page, half]

        return self._get("pages", (slabs, pools), build, sizes_at=3)

    def _get(
        self, kind: str, groups: tuple[Tensors, ...], build: Callable[[], list[list[int]]], sizes_at: int = -1
    ) -> Plan:
        key = (kind, *(tuple(map(id, group)) for group in groups))
        plan = self._plans.get(key)
        if plan is None:
            columns = build()
            memory = self._device.upload(np.array(columns, dtype=np.uint64))
            plan = Plan(memory, len(groups[0]), max(columns[sizes_at], default=0))
            plans, watchers = self._plans, self._watchers

            def forget(_: Any) -> None:
                # Its address may become another tensor's: the key is worthless from now on.
                plans.pop(key, None)
                watchers.pop(key, None)

            watchers[key] = [weakref.ref(tensor, forget) for group in groups for tensor in group]
            plans[key] = plan
        return plan


def _addresses(tensors: Tensors) -> list[int]:
    for tensor in tensors:
        if not tensor.flags.c_contiguous:
            raise ValueError(f"rows and pages of a tensor must lie behind each other; strides are {tensor.strides}")
    return [int(tensor.data.ptr) for tensor in tensors]


def _row_bytes(tensor: DeviceArray) -> int:
    return int(tensor.nbytes) // int(tensor.shape[0])
