"""The rules of a deployment, and what follows from one: its profile, its page pools, its snapshot slots.

Validation happens once, before anything is allocated. It never changes the mode silently: what is not supported is
refused with the rule that it breaks and, where there is one, the layer. The types are in ``deployment`` and importable
from here.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from attrs import field, frozen

from context_cache.coordinator.deployment import (
    ITEMSIZES,
    KV_DTYPES,
    STATE_DTYPES,
    BaseStateKind,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    LayerGeometry,
    LayerKind,
    SpecConfig,
    SpecMode,
    SpecReuseContract,
)
from context_cache.coordinator.errors import ContractViolation

__all__ = [
    "HIDDEN_DTYPE",
    "PAGES_MAX",
    "BaseStateKind",
    "ContextCacheConfig",
    "ContextCacheDeploymentProfile",
    "DeploymentConfig",
    "LayerGeometry",
    "LayerKind",
    "SpecConfig",
    "SpecMode",
    "SpecReuseContract",
    "snapshot_slots",
    "validate_deployment",
    "validate_pool",
]

_log = logging.getLogger(__name__)

PAGES_MAX: Final = (2**31 - 1) // 2
"""K ids and V ids share one int32 range: live V id = K id + number of pages."""
HIDDEN_DTYPE: Final = "float16"
"""Element type of the hidden row that a hybrid + MTP checkpoint saves."""
_TOKENS_MAX: Final = 2**31 - 2
_DIMENSION_MAX: Final = 2**20
_SLOTS_MAX: Final = 2**31 - 1

_CONTRACTS: Final = {
    SpecMode.EAGLE: SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1),
    SpecMode.DFLASH: SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    SpecMode.JETSPEC: SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    SpecMode.DSPARK: SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    SpecMode.SHARED_KV: SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0),
    SpecMode.MTP: SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1),
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: Any, maximum: int) -> None:
    if not _is_int(value) or not 1 <= value <= maximum:
        raise ContractViolation(f"{name} must be an integer from 1 to {maximum}, got {value!r}", value=value)


def _non_negative(instance: object, attribute: Any, value: Any) -> None:
    if value is not None and (not _is_int(value) or value < 0):
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
    recurrent_snapshot_pool_bytes, partial_kv_snapshot_pool_bytes: budgets of checkpoint deployments, in bytes; see
                           :func:`snapshot_slots`. Other deployments ignore them.
    drain_timeout_seconds: limit of every drain; None: wait for ever.
    """

    enabled: bool = False
    max_records: int | None = field(default=None, validator=_non_negative)
    recurrent_snapshot_pool_bytes: int = field(default=0, validator=_non_negative)
    partial_kv_snapshot_pool_bytes: int = field(default=0, validator=_non_negative)
    drain_timeout_seconds: float | None = field(default=None, validator=_positive_seconds)


# ---- the deployment --------------------------------------------------------------------------------------------------


def validate_deployment(deployment: DeploymentConfig) -> ContextCacheDeploymentProfile:
    """Check a deployment and say what it is.

    Raises ContractViolation naming the broken rule and the layer.
    """
    _positive("max_batch", deployment.max_batch, 2**20)
    _positive("kv_capacity_tokens", deployment.kv_capacity_tokens, _TOKENS_MAX)
    _positive("page_size", deployment.page_size, _TOKENS_MAX)
    if deployment.kv_dtype not in KV_DTYPES:
        raise ContractViolation(
            f"kv_dtype must be one of {sorted(KV_DTYPES)}, got {deployment.kv_dtype!r}", kv_dtype=deployment.kv_dtype
        )
    if not deployment.layers:
        raise ContractViolation("a deployment needs at least one layer with state; name its layers in `layers`")
    _check_layers(deployment.layers, "layer")
    if deployment.bidirectional_vision:
        raise ContractViolation(
            "bidirectional vision attention cannot be cached: the state of an image token would depend on tokens "
            "behind it; deploy with causal attention, or without the cache"
        )
    recurrent, attention = bool(deployment.recurrent_layers), bool(deployment.attention_layers)
    spec = deployment.spec_config
    if deployment.block_diffusion:
        _check_block_diffusion(deployment)
    contract = None if spec is None else _check_spec(spec, recurrent=recurrent, attention=attention)
    if not recurrent:
        return ContextCacheDeploymentProfile(BaseStateKind.ATTENTION_ONLY, contract, max_batch=deployment.max_batch)
    recurrent_bytes = sum(layer.recurrent_bytes for layer in deployment.recurrent_layers)
    partial_bytes = deployment.partial_bytes(deployment.layers)
    if spec is not None:
        # Whatever is allocated per slot is paid for by the slot: with MTP the hidden row and the draft's page too.
        recurrent_bytes += spec.hidden_dim * ITEMSIZES[HIDDEN_DTYPE]
        partial_bytes += deployment.partial_bytes(spec.draft_layers)
    return ContextCacheDeploymentProfile(
        BaseStateKind.HYBRID if attention else BaseStateKind.PURE_RECURRENT,
        contract,
        recurrent_slot_bytes=recurrent_bytes,
        partial_slot_bytes=partial_bytes,
        max_batch=deployment.max_batch,
    )


def _check_layers(layers: tuple[LayerGeometry, ...], what: str) -> None:
    for index, layer in enumerate(layers):
        name = f"{what} {index}"
        if not isinstance(layer, LayerGeometry):
            raise ContractViolation(f"{name} must be a LayerGeometry, got {layer!r}", layer=index)
        if layer.kind is LayerKind.ATTENTION:
            _check_attention(layers, index, layer, what)
        elif layer.kind is LayerKind.RECURRENT:
            _check_recurrent(name, index, layer)
        else:
            raise ContractViolation(
                f"{name} has kind {layer.kind!r}, so attention and recurrent layers do not add up to the "
                f"{len(layers)} layers; build it with LayerGeometry.attention or LayerGeometry.recurrent",
                layer=index,
            )


def _check_attention(layers: tuple[LayerGeometry, ...], index: int, layer: LayerGeometry, what: str) -> None:
    _positive(f"{what} {index}: kv_heads", layer.kv_heads, _DIMENSION_MAX)
    _positive(f"{what} {index}: head_dim", layer.head_dim, _DIMENSION_MAX)
    extra = [name for name in ("heads", "state", "conv_dim", "conv_kernel") if getattr(layer, name)]
    if extra:
        raise ContractViolation(
            f"{what} {index} is attention but sets {', '.join(extra)} of a recurrent layer; build it with "
            "LayerGeometry.attention, or with LayerGeometry.recurrent if it has no K/V",
            layer=index,
        )
    if layer.kv_donor is not None:
        _check_donor(layers, index, layer, what)


def _check_recurrent(name: str, index: int, layer: LayerGeometry) -> None:
    for dimension in ("heads", "head_dim", "state", "conv_dim", "conv_kernel"):
        value = getattr(layer, dimension)
        if not _is_int(value) or not 1 <= value <= _DIMENSION_MAX:
            raise ContractViolation(
                f"{name}: the recurrent schema is incomplete, {dimension} must be an integer from 1 to "
                f"{_DIMENSION_MAX}, got {value!r}",
                layer=index, value=value,
            )  # fmt: skip
    for dtype in ("state_dtype", "conv_dtype"):
        value = getattr(layer, dtype)
        if value not in STATE_DTYPES:
            raise ContractViolation(
                f"{name}: {dtype} must be one of {sorted(STATE_DTYPES)}, got {value!r}", layer=index, value=value
            )
    if layer.kv_heads or layer.kv_donor is not None:
        raise ContractViolation(
            f"{name} is recurrent but has a K/V layout or a K/V donor, which only attention layers have; leave "
            "kv_heads and kv_donor out",
            layer=index,
        )


def _check_donor(layers: tuple[LayerGeometry, ...], index: int, layer: LayerGeometry, what: str) -> None:
    donor = layer.kv_donor
    if not _is_int(donor) or donor is None or not 0 <= donor < len(layers):
        raise ContractViolation(
            f"{what} {index}: K/V donor {donor!r} does not exist; there are {len(layers)} layers", layer=index
        )
    if donor == index:
        raise ContractViolation(f"{what} {index} names itself as K/V donor; leave kv_donor out", layer=index)
    other = layers[donor]
    if other.kind is not LayerKind.ATTENTION:
        raise ContractViolation(
            f"{what} {index}: donor {donor} is no attention layer and has no K/V; name an attention layer", layer=index
        )
    if other.kv_donor is not None:
        raise ContractViolation(
            f"{what} {index}: donor {donor} borrows from layer {other.kv_donor}; name that one", layer=index
        )
    if (other.kv_heads, other.head_dim) != (layer.kv_heads, layer.head_dim):
        raise ContractViolation(
            f"{what} {index} has {layer.kv_heads} heads of {layer.head_dim}, its donor {donor} has "
            f"{other.kv_heads} of {other.head_dim}; donors must have the same layout",
            layer=index,
        )


def _check_block_diffusion(deployment: DeploymentConfig) -> None:
    if deployment.spec_config is not None:
        raise ContractViolation(
            "a block-diffusion backbone cannot be speculative; leave spec_config out of this deployment"
        )
    for index, layer in enumerate(deployment.layers):
        if layer.kind is LayerKind.RECURRENT:
            raise ContractViolation(
                f"layer {index} is recurrent, and a block-diffusion backbone must be attention-only; deploy it "
                "without the cache",
                layer=index,
            )


def _check_spec(spec: SpecConfig, *, recurrent: bool, attention: bool) -> SpecReuseContract:
    """The rules of a speculative deployment; its contract."""
    if not isinstance(spec, SpecConfig):
        raise ContractViolation(f"spec_config must be a SpecConfig or None, got {spec!r}")
    mode = spec.mode
    if not isinstance(mode, SpecMode):
        raise ContractViolation(f"spec_config.mode must be a SpecMode ({_names(SpecMode)}), got {mode!r}")
    if spec.draft_mode is not None and spec.draft_mode is not mode:
        raise ContractViolation(
            f"the base engine was built for {mode.value} and the draft for "
            f"{getattr(spec.draft_mode, 'value', spec.draft_mode)!s}; both need the same speculative mode"
        )
    if not spec.base_has_base_role:
        raise ContractViolation(
            "the base engine is not marked as the base of a speculative pair; build it for that role, or leave "
            "spec_config out"
        )
    if spec.draft_has_base_role:
        raise ContractViolation("the draft engine is marked as a base; give the draft engine, not a second base")
    for name in ("verify_size", "steps", "top_k"):
        _positive(f"spec_config.{name}", getattr(spec, name), _TOKENS_MAX)
    if not _is_int(spec.hidden_dim) or not 0 <= spec.hidden_dim <= _DIMENSION_MAX:
        raise ContractViolation(
            f"spec_config.hidden_dim must be an integer from 0 to {_DIMENSION_MAX}, got {spec.hidden_dim!r}"
        )
    _check_spec_state(spec, recurrent=recurrent, attention=attention)
    contract = _CONTRACTS[mode]
    _check_draft(spec, contract)
    return contract


def _check_spec_state(spec: SpecConfig, *, recurrent: bool, attention: bool) -> None:
    """Which drafts go with which base state."""
    if spec.mode is not SpecMode.MTP:
        if recurrent:
            raise ContractViolation(
                f"a base model with recurrent layers can be speculative only with mtp, not with {spec.mode.value}; "
                "use SpecMode.MTP, or leave spec_config out"
            )
        return
    if not recurrent:
        raise ContractViolation(
            "mtp needs a base model with recurrent layers, and this one is attention-only; use another SpecMode"
        )
    if not attention:
        raise ContractViolation(
            "mtp needs attention layers beside the recurrent ones, and this base model has none; leave spec_config out"
        )
    if spec.hidden_dim == 0:
        raise ContractViolation(
            "mtp saves a hidden row beside each checkpoint, so spec_config.hidden_dim must be at least 1, got 0"
        )


def _check_draft(spec: SpecConfig, contract: SpecReuseContract) -> None:
    for index, layer in enumerate(spec.draft_layers):
        if getattr(layer, "kind", None) is LayerKind.RECURRENT:
            raise ContractViolation(
                f"draft layer {index} is recurrent; a draft must have no recurrent layers", layer=index
            )
    _check_layers(spec.draft_layers, "draft layer")
    mode = spec.mode.value
    if contract.owns_paged_spec_state:
        if not spec.draft_layers:
            raise ContractViolation(f"{mode} needs a draft with K/V of its own; name its layers in draft_layers")
        if spec.draft_read_only:
            raise ContractViolation(
                f"{mode} needs a draft that writes K/V of its own, and this one is read-only; use "
                "SpecMode.SHARED_KV for a draft that only reads"
            )
        return
    if spec.draft_layers:
        raise ContractViolation(
            f"{mode} needs a draft without K/V of its own, and draft_layers names {len(spec.draft_layers)}; leave "
            "them out, or use a mode whose draft has pages"
        )
    if spec.draft_read_only is False:
        raise ContractViolation(
            f"{mode} needs a read-only draft, and this one writes the base model's K/V; build the draft read-only"
        )


def _names(values: type[SpecMode]) -> str:
    return ", ".join(value.name for value in values)


# ---- pools and slots -------------------------------------------------------------------------------------------------


def validate_pool(deployment: DeploymentConfig, num_pages: int, *, draft: bool = False) -> None:
    """Check the size of the base (or the draft's) page pool, in pages. Raises ContractViolation.

    A pure recurrent deployment has no pages: 0 is the only size it accepts.
    """
    name, pages = ("draft_pages", "draft pages") if draft else ("num_pages", "pages")
    if not draft and not deployment.attention_layers:
        if not _is_int(num_pages) or num_pages != 0:
            raise ContractViolation(
                f"a pure recurrent deployment has no K/V pages, so {name} must be 0, got {num_pages!r}",
                num_pages=num_pages,
            )
        return
    _positive(name, num_pages, PAGES_MAX)
    minimum = deployment.max_batch * deployment.row_pages
    if deployment.enforce_min_pool and num_pages < minimum:
        raise ContractViolation(
            f"{num_pages} {pages} are fewer than max_batch x pages of a row = {deployment.max_batch} x "
            f"{deployment.row_pages} = {minimum}; add pages, or set enforce_min_pool=False and expect refusals",
            num_pages=num_pages, minimum=minimum,
        )  # fmt: skip


def snapshot_slots(profile: ContextCacheDeploymentProfile, config: ContextCacheConfig) -> tuple[int, int]:
    """(recurrent, partial-KV) snapshot slots that the byte budgets buy: budget // bytes of a slot.

    Deployments without checkpoints have none, a pure recurrent one has no partial slots. Raises ContractViolation when
    a checkpoint deployment would get no slot of a kind that it needs, naming the bytes that one takes. Logs a warning
    when there are fewer slots than ``max_batch + 1``: captures would then be skipped while every sequence runs.
    """
    if not profile.uses_checkpoints:
        return (0, 0)
    recurrent = _slots(
        profile, "recurrent", "recurrent_snapshot_pool_bytes",
        config.recurrent_snapshot_pool_bytes, profile.recurrent_slot_bytes,
    )  # fmt: skip
    if not profile.has_attention:
        return (recurrent, 0)
    partial = _slots(
        profile, "partial-KV", "partial_kv_snapshot_pool_bytes",
        config.partial_kv_snapshot_pool_bytes, profile.partial_slot_bytes,
    )  # fmt: skip
    return (recurrent, partial)


def _slots(profile: ContextCacheDeploymentProfile, kind: str, option: str, budget: int, slot_bytes: int) -> int:
    flavour = profile.base_state_kind.value
    if slot_bytes < 1:
        raise ContractViolation(
            f"a {flavour} deployment has {kind} snapshots, but the profile says {slot_bytes} bytes a slot; use the "
            "profile that validate_deployment returns"
        )
    count = budget // slot_bytes
    if count < 1:
        raise ContractViolation(
            f"a {flavour} deployment needs at least one {kind} snapshot slot of {slot_bytes} bytes, but {option} is "
            f"{budget}; set it to at least {slot_bytes} ({slot_bytes * (profile.max_batch + 1)} for max_batch + 1)",
            needed_bytes=slot_bytes, budget_bytes=budget,
        )  # fmt: skip
    if count > _SLOTS_MAX:
        raise ContractViolation(
            f"{option} of {budget} bytes is {count} slots, more than the {_SLOTS_MAX} that can be numbered; lower it"
        )
    if count < profile.max_batch + 1:
        _log.warning(
            "%s = %d buys %d %s snapshot slots, fewer than max_batch + 1 = %d: captures will be skipped while all "
            "sequences run; %d bytes would be enough",
            option, budget, count, kind, profile.max_batch + 1, slot_bytes * (profile.max_batch + 1),
        )  # fmt: skip
    return count
