"""The first line of a trace: what the recorded coordinator was built of, and how one like it is built again."""

from __future__ import annotations

import enum
from typing import Final, TypeVar

import attrs
import msgspec

from context_cache.coordinator.config import (
    BaseStateKind,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    LayerGeometry,
    LayerKind,
    SpecConfig,
    SpecMode,
)
from context_cache.coordinator.core import Core
from context_cache.coordinator.errors import ContractViolation
from context_cache.coordinator.manager import ResourceType
from context_cache.coordinator.traces import format as lines
from context_cache.machines import ALL_MACHINES, fingerprint

__all__ = ["FINGERPRINTS", "changed_machines", "deployment_of", "header_of"]

FINGERPRINTS: Final = {spec.name: fingerprint(spec) for spec in ALL_MACHINES}
"""Of the tables of this version, by machine."""
_COUNT_MAX: Final = 2**31 - 1
_E = TypeVar("_E", bound=enum.Enum)


def header_of(core: Core, *, tokens: bool, seed: int | None) -> lines.Header:
    """The header of a trace of ``core``. Raises ContractViolation when its page tables hold something."""
    books, deployment = core.manager.books, core.deployment
    pages, draft_pages, recurrent, partial = (core.manager.pools.capacity(kind) for kind in ResourceType)
    return lines.Header(
        format=lines.FORMAT,
        version=lines.VERSION,
        flavour=_flavour(core.profile, deployment),
        deployment=lines.Deployment(
            max_batch=deployment.max_batch,
            kv_capacity_tokens=deployment.kv_capacity_tokens,
            page_size=deployment.page_size,
            layers=[_layer(layer) for layer in deployment.layers],
            kv_dtype=deployment.kv_dtype,
            spec_config=None if deployment.spec_config is None else _speculative(deployment.spec_config),
            enforce_min_pool=deployment.enforce_min_pool,
            block_diffusion=deployment.block_diffusion,
        ),
        config=lines.Config(
            max_records=min(core.manager.max_records, _COUNT_MAX), touch_on_hit=books.latest_record is not None
        ),
        capacities=(pages, draft_pages, recurrent, partial),
        machines=FINGERPRINTS,
        tokens=tokens,
        seed=seed,
        clear_rows=_rows_are_clear(core),
    )


def changed_machines(header: lines.Header) -> tuple[str, ...]:
    """Machines whose tables are not those that were recorded; the numbers of their rows may mean other rows now."""
    return tuple(name for name, found in header.machines.items() if FINGERPRINTS.get(name) != found)


def deployment_of(record: lines.Deployment) -> DeploymentConfig:
    """The deployment that a header describes. Raises ContractViolation for words that name nothing."""
    spec = record.spec_config
    return DeploymentConfig(
        max_batch=record.max_batch,
        kv_capacity_tokens=record.kv_capacity_tokens,
        page_size=record.page_size,
        layers=tuple(_geometry(layer) for layer in record.layers),
        kv_dtype=record.kv_dtype,
        spec_config=None
        if spec is None
        else SpecConfig(
            mode=_named(SpecMode, spec.mode),
            draft_layers=tuple(_geometry(layer) for layer in spec.draft_layers),
            verify_size=spec.verify_size,
            steps=spec.steps,
            top_k=spec.top_k,
            hidden_dim=spec.hidden_dim,
        ),
        enforce_min_pool=record.enforce_min_pool,
        block_diffusion=record.block_diffusion,
    )


def _rows_are_clear(core: Core) -> bool:
    """Whether the page tables were used before. Raises ContractViolation for a state that no replay could begin in."""
    tables = [table for table in (core.rows.base, core.rows.draft) if table is not None]
    if all(table.is_new for table in tables):
        return False
    if all(table.is_clear for table in tables):
        return True
    raise ContractViolation(
        "a trace begins with page tables that are new, or clear on the device; clear and upload their rows first"
    )


def _flavour(profile: ContextCacheDeploymentProfile, deployment: DeploymentConfig) -> str:
    base = "vanilla" if profile.base_state_kind is BaseStateKind.ATTENTION_ONLY else profile.base_state_kind.value
    return base if deployment.spec_config is None else f"{base} + {deployment.spec_config.mode.value}"


def _layer(layer: LayerGeometry) -> lines.Layer:
    return lines.Layer(**{**attrs.asdict(layer), "kind": layer.kind.value})


def _geometry(layer: lines.Layer) -> LayerGeometry:
    return LayerGeometry(**{**msgspec.structs.asdict(layer), "kind": _named(LayerKind, layer.kind)})


def _speculative(spec: SpecConfig) -> lines.Speculative:
    return lines.Speculative(
        mode=spec.mode.value,
        draft_layers=[_layer(layer) for layer in spec.draft_layers],
        verify_size=spec.verify_size,
        steps=spec.steps,
        top_k=spec.top_k,
        hidden_dim=spec.hidden_dim,
    )


def _named(kind: type[_E], value: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ContractViolation(f"{value!r} is no {kind.__name__}; known are {known}") from None
