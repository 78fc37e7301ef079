"""Whether the tensors that a runtime gives are those of its deployment: shapes, types, strides, sizes.

Every check is made at construction, so that no copy finds out later.
"""

from __future__ import annotations

import math

import numpy as np

from context_cache.backends.base import DeviceArray
from context_cache.coordinator.deployment import DeploymentConfig, LayerGeometry, LayerKind, storage_dtype
from context_cache.coordinator.device_state import HybridCacheManager
from context_cache.coordinator.errors import ContractViolation

__all__ = ["check_live_tensors", "check_tensor"]


def check_live_tensors(deployment: DeploymentConfig, cache: HybridCacheManager, model: str) -> None:
    """K/V pools and recurrent state of ``base`` or ``draft`` are what the deployment says; raises ContractViolation."""
    _check_cache(deployment, cache, deployment.layers if model == "base" else deployment.draft_layers, model)
    if model == "base":
        _check_recurrent(deployment, cache)


def _check_cache(
    deployment: DeploymentConfig, cache: HybridCacheManager, layers: tuple[LayerGeometry, ...], model: str
) -> None:
    attention = [layer for layer in layers if layer.kind is LayerKind.ATTENTION]
    _count(f"{model} K/V pools", len(cache.kv_pools), len(attention))
    dtype = storage_dtype(deployment.kv_dtype)
    for index, (pool, layer) in enumerate(zip(cache.kv_pools, attention, strict=True)):
        if layer.owns_kv:
            shape = (2, cache.num_pages, *layer.page_shape(deployment.page_size))
            check_tensor(f"K/V pool of {model} attention layer {index}", pool, shape, dtype)


def _check_recurrent(deployment: DeploymentConfig, cache: HybridCacheManager) -> None:
    layers = deployment.recurrent_layers
    _count("recurrent state tensors", len(cache.recurrent_states), len(layers))
    _count("convolution state tensors", len(cache.conv_states), len(layers))
    for index, layer in enumerate(layers):
        check_tensor(
            f"recurrent state of recurrent layer {index}",
            cache.recurrent_states[index],
            (deployment.max_batch, *layer.state_shape),
            storage_dtype(layer.state_dtype),
        )
        check_tensor(
            f"convolution state of recurrent layer {index}",
            cache.conv_states[index],
            (deployment.max_batch, *layer.conv_shape),
            storage_dtype(layer.conv_dtype),
        )


def _count(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ContractViolation(
            f"snapshots: expected {expected} {what}, found {found}; allocate the resources for this deployment",
            expected=expected, found=found,
        )  # fmt: skip


def check_tensor(what: str, tensor: DeviceArray, shape: tuple[int, ...], dtype: str) -> None:
    itemsize = np.dtype(dtype).itemsize
    strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    for fact, name, expected in (
        ("shape", "shape", shape),
        ("dtype", "dtype", dtype),
        ("strides in bytes", "strides", strides),
        ("size in bytes", "nbytes", itemsize * math.prod(shape)),
    ):
        value = getattr(tensor, name, None)
        found = str(value) if name == "dtype" else value
        if found != expected:
            raise ContractViolation(
                f"snapshots: the {what} must have {fact} {expected}, found {found}; give the tensors that were "
                "allocated for this deployment",
                expected=expected, found=found,
            )  # fmt: skip
