"""What can be deployed: the state of each layer, the speculative draft, the sizes, and the profile of it all.

Values only. Nothing here is checked when it is built: ``config.validate_deployment`` looks at the whole once, before
anything is allocated, and only a profile that it returned may be trusted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Final

from attrs import field, frozen

__all__ = [
    "ITEMSIZES",
    "KV_DTYPES",
    "STATE_DTYPES",
    "BaseStateKind",
    "ContextCacheDeploymentProfile",
    "DeploymentConfig",
    "LayerGeometry",
    "LayerKind",
    "SpecConfig",
    "SpecMode",
    "SpecReuseContract",
    "storage_dtype",
]

KV_DTYPES: Final = ("float16", "float8")
STATE_DTYPES: Final = ("float32", "float16", "bfloat16")
ITEMSIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
"""Bytes of one element."""

# NumPy has neither of the two; the cache only moves their bits, so an unsigned integer of the same size holds them.
_STORED_AS: Final = {"bfloat16": "uint16", "float8": "uint8"}


def storage_dtype(name: str) -> str:
    """The array dtype that holds elements of ``name``: itself, or an unsigned integer of its size."""
    return _STORED_AS.get(name, name)


class LayerKind(enum.Enum):
    """What state a layer keeps."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


class BaseStateKind(enum.Enum):
    """What state the base model keeps."""

    ATTENTION_ONLY = "attention_only"
    HYBRID = "hybrid"
    PURE_RECURRENT = "pure_recurrent"


class SpecMode(enum.Enum):
    """How a draft proposes tokens."""

    EAGLE = "eagle"
    DFLASH = "dflash"
    JETSPEC = "jetspec"
    DSPARK = "dspark"
    SHARED_KV = "shared_kv"
    MTP = "mtp"


@frozen
class LayerGeometry:
    """Shape of one layer's state; build it with :meth:`attention` or :meth:`recurrent`.

    kv_heads, head_dim:   attention: K/V heads and elements per head.
    kv_donor:             attention: index (in ``layers``) of the layer whose K/V this one reads, if any.
    heads, head_dim, state: recurrent: the state of one sequence is ``[heads, head_dim, state]`` of ``state_dtype``.
    conv_dim, conv_kernel: recurrent: the convolution state of one sequence is ``[conv_dim, conv_kernel]`` of
                          ``conv_dtype``.
    """

    kind: LayerKind
    kv_heads: int = 0
    head_dim: int = 0
    kv_donor: int | None = None
    heads: int = 0
    state: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0
    state_dtype: str = "float32"
    conv_dtype: str = "float16"

    @classmethod
    def attention(cls, kv_heads: int, head_dim: int, kv_donor: int | None = None) -> LayerGeometry:
        """An attention layer with paged K/V."""
        return cls(LayerKind.ATTENTION, kv_heads, head_dim, kv_donor)

    @classmethod
    def recurrent(
        cls,
        heads: int,
        head_dim: int,
        state: int,
        conv_dim: int,
        conv_kernel: int,
        state_dtype: str = "float32",
        conv_dtype: str = "float16",
    ) -> LayerGeometry:
        """A linear-attention layer with recurrent and convolution state, one row per resident slot."""
        return cls(
            LayerKind.RECURRENT, head_dim=head_dim, heads=heads, state=state, conv_dim=conv_dim,
            conv_kernel=conv_kernel, state_dtype=state_dtype, conv_dtype=conv_dtype,
        )  # fmt: skip

    @property
    def owns_kv(self) -> bool:
        """An attention layer with storage of its own; only these are copied into snapshots."""
        return self.kind is LayerKind.ATTENTION and self.kv_donor is None

    def page_shape(self, page_size: int) -> tuple[int, int, int]:
        """One K page or one V page: ``(page_size, kv_heads, head_dim)``."""
        return (page_size, self.kv_heads, self.head_dim)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Recurrent state of one sequence: ``(heads, head_dim, state)``."""
        return (self.heads, self.head_dim, self.state)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Convolution state of one sequence: ``(conv_dim, conv_kernel)``."""
        return (self.conv_dim, self.conv_kernel)

    @property
    def recurrent_bytes(self) -> int:
        """Recurrent and convolution state of one sequence, in bytes; 0 for attention."""
        if self.kind is not LayerKind.RECURRENT:
            return 0
        state = math.prod(self.state_shape) * ITEMSIZES[self.state_dtype]
        return state + math.prod(self.conv_shape) * ITEMSIZES[self.conv_dtype]


def _layers(values: Iterable[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    return tuple(values)


@frozen(kw_only=True)
class SpecConfig:
    """The speculative draft that goes with a base model.

    mode:         what the base engine was built for.
    draft_layers: the draft's attention layers with K/V of its own, in order (``kv_donor`` counts within them); empty
                  for ``SHARED_KV``, whose draft only reads the base model's K/V.
    verify_size, steps, top_k: tokens verified at once, draft steps, candidates per step.
    hidden_dim:   ``MTP``: width of the float16 hidden row that is saved beside each checkpoint, in elements.

    What the two engines say of themselves; the defaults are what is right:

    draft_mode:           what the draft engine was built for; None: the same.
    base_has_base_role, draft_has_base_role: whether each is marked as the base of a speculative pair.
    draft_read_only:      the draft writes no K/V; None: as the mode demands.
    """

    mode: SpecMode
    draft_layers: tuple[LayerGeometry, ...] = field(default=(), converter=_layers)
    verify_size: int = 1
    steps: int = 1
    top_k: int = 1
    hidden_dim: int = 0
    draft_mode: SpecMode | None = None
    base_has_base_role: bool = True
    draft_has_base_role: bool = False
    draft_read_only: bool | None = None


@frozen
class SpecReuseContract:
    """What reuse has to know of a draft.

    owns_paged_spec_state:    the draft has pages of its own, cached beside the base's.
    future_dependency_tokens: 1: the draft state of a token also depends on the token behind it; 0: it does not.
    """

    owns_paged_spec_state: bool
    future_dependency_tokens: int


@frozen(kw_only=True)
class DeploymentConfig:
    """One engine.

    max_batch:           resident slots, that is rows of the page table and of the recurrent tensors.
    kv_capacity_tokens:  longest sequence, in tokens; a row has ceil(kv_capacity_tokens / page_size) entries.
    page_size:           tokens per page.
    layers:              state of each layer, in order; layers without state are left out.
    kv_dtype:            ``float16`` or ``float8`` (one byte; the bits are the runtime's affair).
    spec_config:         the draft; None: not speculative.
    enforce_min_pool:    refuse a pool below max_batch full rows. At or above that minimum a live admission can never
                         be refused for capacity.
    bidirectional_vision: image tokens attend to later ones, so a prefix does not determine its state; never cached.
    block_diffusion:     tokens are denoised block by block; only non-speculative and attention-only.
    """

    max_batch: int
    kv_capacity_tokens: int
    page_size: int = 128
    layers: tuple[LayerGeometry, ...] = field(converter=_layers)
    kv_dtype: str = "float16"
    spec_config: SpecConfig | None = None
    enforce_min_pool: bool = True
    bidirectional_vision: bool = False
    block_diffusion: bool = False

    @property
    def row_pages(self) -> int:
        """Width of a page-table row, in pages."""
        return math.ceil(self.kv_capacity_tokens / self.page_size)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one K or V element."""
        return ITEMSIZES[self.kv_dtype]

    @property
    def attention_layers(self) -> tuple[LayerGeometry, ...]:
        """The base model's attention layers, in order."""
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.ATTENTION)

    @property
    def recurrent_layers(self) -> tuple[LayerGeometry, ...]:
        """The base model's recurrent layers, in order. A draft never has any."""
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.RECURRENT)

    @property
    def draft_layers(self) -> tuple[LayerGeometry, ...]:
        """The draft's attention layers; empty without a draft that has K/V of its own."""
        return () if self.spec_config is None else self.spec_config.draft_layers

    def partial_bytes(self, layers: Iterable[LayerGeometry]) -> int:
        """One K page and its V page in every layer with storage of its own, in bytes."""
        elements = sum(math.prod(layer.page_shape(self.page_size)) for layer in layers if layer.owns_kv)
        return 2 * elements * self.kv_itemsize


@frozen
class ContextCacheDeploymentProfile:
    """What a deployment is; result of ``validate_deployment``.

    Profiles of the same flavour are equal; the numbers below ride along and do not take part in the comparison.

    recurrent_slot_bytes: one recurrent snapshot (with MTP also its hidden row), in bytes; 0 without recurrent layers.
    partial_slot_bytes:   one partial-KV snapshot (with MTP also the draft's page), in bytes; 0 unless HYBRID.
    max_batch:            resident slots.
    """

    base_state_kind: BaseStateKind
    spec_contract: SpecReuseContract | None = None
    recurrent_slot_bytes: int = field(default=0, eq=False, kw_only=True)
    partial_slot_bytes: int = field(default=0, eq=False, kw_only=True)
    max_batch: int = field(default=0, eq=False, kw_only=True)

    @property
    def has_attention(self) -> bool:
        """Sequences hold K/V pages."""
        return self.base_state_kind is not BaseStateKind.PURE_RECURRENT

    @property
    def has_recurrent(self) -> bool:
        """Sequences hold recurrent state in their resident row."""
        return self.base_state_kind is not BaseStateKind.ATTENTION_ONLY

    @property
    def speculative(self) -> bool:
        """Speculative requests are served."""
        return self.spec_contract is not None

    @property
    def uses_checkpoints(self) -> bool:
        """Endpoints are checkpoints: snapshots of recurrent state at an exact token length."""
        return self.has_recurrent

    @property
    def paged_spec(self) -> bool:
        """The draft has a page pool and a page table of its own."""
        return self.spec_contract is not None and self.spec_contract.owns_paged_spec_state
