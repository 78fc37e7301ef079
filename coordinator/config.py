"""What is deployed: the model's layers, the sizes, and the validation that turns them into a profile.

Validation happens once, before anything is allocated. It never changes the mode silently: what is not supported is
refused with the rule that it breaks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any, Final

from attrs import field, frozen

from context_cache.coordinator.errors import ContractViolation

__all__ = [
    "BaseStateKind",
    "ContextCacheConfig",
    "ContextCacheDeploymentProfile",
    "DeploymentConfig",
    "LayerGeometry",
    "LayerKind",
    "validate_deployment",
    "validate_pool",
]

PAGES_MAX: Final = (2**31 - 1) // 2
"""K ids and V ids share one int32 range: live V id = K id + number of pages."""
_TOKENS_MAX: Final = 2**31 - 2
_KV_BYTES: Final = {"float16": 2, "float8": 1}


def _positive(name: str, value: Any, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ContractViolation(f"{name} must be an integer from 1 to {maximum}, got {value!r}", value=value)


class LayerKind(enum.Enum):
    """What state a layer keeps."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


class BaseStateKind(enum.Enum):
    """What state the base model keeps."""

    ATTENTION_ONLY = "attention_only"


@frozen
class LayerGeometry:
    """Shape of one layer's state. ``kv_donor`` is the index of the layer whose K/V this one reads, if any."""

    kind: LayerKind
    kv_heads: int = 0
    head_dim: int = 0
    kv_donor: int | None = None

    @classmethod
    def attention(cls, kv_heads: int, head_dim: int, kv_donor: int | None = None) -> LayerGeometry:
        """An attention layer with paged K/V."""
        return cls(LayerKind.ATTENTION, kv_heads, head_dim, kv_donor)


def _layers(values: Iterable[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    return tuple(values)


@frozen(kw_only=True)
class DeploymentConfig:
    """One engine.

    max_batch:           resident slots, that is rows of the page table.
    kv_capacity_tokens:  longest sequence, in tokens; a row has ceil(kv_capacity_tokens / page_size) entries.
    page_size:           tokens per page.
    layers:              state of each layer, in order.
    kv_dtype:            ``float16`` or ``float8`` (one byte; the bits are the runtime's affair).
    enforce_min_pool:    refuse a pool below max_batch full rows. At or above that minimum a live admission can never
                         be refused for capacity.
    """

    max_batch: int
    kv_capacity_tokens: int
    page_size: int = 128
    layers: tuple[LayerGeometry, ...] = field(converter=_layers)
    kv_dtype: str = "float16"
    spec_config: None = None
    enforce_min_pool: bool = True

    @property
    def row_pages(self) -> int:
        """Width of a page-table row, in pages."""
        return math.ceil(self.kv_capacity_tokens / self.page_size)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one K or V element."""
        return _KV_BYTES[self.kv_dtype]


@frozen
class ContextCacheDeploymentProfile:
    """Result of :func:`validate_deployment`."""

    base_state_kind: BaseStateKind

    @property
    def has_attention(self) -> bool:
        return True

    @property
    def speculative(self) -> bool:
        return False

    @property
    def uses_checkpoints(self) -> bool:
        return False


def _non_negative(instance: object, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ContractViolation(f"{type(instance).__name__}.{attribute.name} must be 0 or more, got {value!r}")


def _positive_seconds(instance: object, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ContractViolation(
            f"{type(instance).__name__}.{attribute.name} must be a positive number of seconds or None, got {value!r}"
        )


@frozen(kw_only=True)
class ContextCacheConfig:
    """How the cache is run.

    enabled:               must be True to construct a coordinator.
    max_records:           most published endpoints kept; None: base pages plus snapshot slots, so that it never binds
                           before those do; 0: nothing is retained.
    recurrent_snapshot_pool_bytes, partial_kv_snapshot_pool_bytes: budgets of checkpoint deployments.
    drain_timeout_seconds: limit of every drain; None: wait for ever.
    """

    enabled: bool = False
    max_records: int | None = field(default=None, validator=_non_negative)
    recurrent_snapshot_pool_bytes: int = field(default=0, validator=_non_negative)
    partial_kv_snapshot_pool_bytes: int = field(default=0, validator=_non_negative)
    drain_timeout_seconds: float | None = field(default=None, validator=_positive_seconds)


def validate_deployment(deployment: DeploymentConfig) -> ContextCacheDeploymentProfile:
    """Check a deployment and say what it is.

    Raises ContractViolation naming the broken rule and the layer.
    """
    _positive("max_batch", deployment.max_batch, 2**20)
    _positive("kv_capacity_tokens", deployment.kv_capacity_tokens, _TOKENS_MAX)
    _positive("page_size", deployment.page_size, _TOKENS_MAX)
    if deployment.kv_dtype not in _KV_BYTES:
        raise ContractViolation(
            f"kv_dtype must be one of {sorted(_KV_BYTES)}, got {deployment.kv_dtype!r}", kv_dtype=deployment.kv_dtype
        )
    if not deployment.layers:
        raise ContractViolation("a deployment needs at least one layer with state; name its layers in `layers`")
    if deployment.spec_config is not None:
        raise ContractViolation("speculative deployments are not part of this version; leave spec_config out")
    for index, layer in enumerate(deployment.layers):
        if layer.kind is not LayerKind.ATTENTION:
            raise ContractViolation(
                f"layer {index} is {layer.kind.value}: recurrent state is not part of this version; "
                "deploy attention-only models",
                layer=index,
            )
        _positive(f"layer {index}: kv_heads", layer.kv_heads, 2**20)
        _positive(f"layer {index}: head_dim", layer.head_dim, 2**20)
        if layer.kv_donor is not None:
            _check_donor(deployment.layers, index, layer)
    return ContextCacheDeploymentProfile(BaseStateKind.ATTENTION_ONLY)


def _check_donor(layers: tuple[LayerGeometry, ...], index: int, layer: LayerGeometry) -> None:
    donor = layer.kv_donor
    assert donor is not None
    if not 0 <= donor < len(layers):
        raise ContractViolation(f"layer {index}: K/V donor {donor} does not exist; there are {len(layers)} layers")
    if donor == index:
        raise ContractViolation(f"layer {index} names itself as K/V donor; leave kv_donor out")
    other = layers[donor]
    if other.kv_donor is not None:
        raise ContractViolation(f"layer {index}: donor {donor} borrows from layer {other.kv_donor}; name that one")
    if (other.kv_heads, other.head_dim) != (layer.kv_heads, layer.head_dim):
        raise ContractViolation(
            f"layer {index} has {layer.kv_heads} heads of {layer.head_dim}, its donor {donor} has "
            f"{other.kv_heads} of {other.head_dim}; donors must have the same layout"
        )


def validate_pool(deployment: DeploymentConfig, num_pages: int) -> None:
    """Check the size of the page pool against the deployment. Raises ContractViolation."""
    _positive("num_pages", num_pages, PAGES_MAX)
    minimum = deployment.max_batch * deployment.row_pages
    if deployment.enforce_min_pool and num_pages < minimum:
        raise ContractViolation(
            f"{num_pages} pages are fewer than max_batch x pages of a row = {deployment.max_batch} x "
            f"{deployment.row_pages} = {minimum}; add pages, or set enforce_min_pool=False and expect refusals",
            num_pages=num_pages, minimum=minimum,
        )  # fmt: skip
