"""The flavours that a run can have: layers, draft, headroom, and what may be chosen with each of them.

The geometry is that of the smallest model that has every kind of state: one attention layer whose K and V entries are
8 bytes each, one recurrent layer with a state of 16 bytes and a convolution state of 8.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from context_cache.coordinator import (
    DecodingKvHeadroom,
    DeploymentConfig,
    LayerGeometry,
    SpecConfig,
    SpecMode,
)

__all__ = ["FLAVOURS", "FLAVOUR_NAMES", "Flavour", "FlavourError", "check_options"]

_STEPS: Final = 3
_ATTENTION: Final = LayerGeometry.attention(kv_heads=1, head_dim=4)
_RECURRENT: Final = LayerGeometry.recurrent(heads=1, head_dim=2, state=2, conv_dim=2, conv_kernel=2)
_MAX_BATCH: Final = 32


class FlavourError(Exception):
    """An unknown flavour, or an option that the flavour does not allow. One sentence naming the rule."""


@frozen
class Flavour:
    """``layers``: of the base model. ``mode``: of the draft, None if not speculative. ``future``: later tokens that a
    draft position depends on.
    """

    name: str
    layers: tuple[LayerGeometry, ...]
    mode: SpecMode | None = None
    future: int = 0

    @property
    def has_attention(self) -> bool:
        return _ATTENTION in self.layers

    @property
    def has_recurrent(self) -> bool:
        """Also: it has snapshots."""
        return _RECURRENT in self.layers

    @property
    def speculative(self) -> bool:
        return self.mode is not None

    @property
    def has_draft_pages(self) -> bool:
        return self.mode is not None and self.mode is not SpecMode.SHARED_KV

    @property
    def mtp(self) -> bool:
        return self.mode is SpecMode.MTP

    @property
    def live(self) -> bool:
        """Sequences may join a running batch."""
        return not self.speculative and not self.has_recurrent

    @property
    def width(self) -> int:
        """Positions that one step may write, and so the most tokens that it yields."""
        return _STEPS + 1 if self.speculative else 1

    @property
    def headroom(self) -> DecodingKvHeadroom:
        return DecodingKvHeadroom(self.width, self.width if self.has_draft_pages else 0)

    def deployment(self, *, max_batch: int, row_tokens: int, page_size: int) -> DeploymentConfig:
        spec = None
        if self.mode is not None:
            spec = SpecConfig(
                mode=self.mode, draft_layers=(_ATTENTION,) if self.has_draft_pages else (),
                verify_size=self.width, steps=_STEPS, top_k=1, hidden_dim=4 if self.mtp else 0,
            )  # fmt: skip
        return DeploymentConfig(
            max_batch=max_batch,
            kv_capacity_tokens=row_tokens,
            page_size=page_size,
            layers=self.layers,
            spec_config=spec,
            # One row has to fit, not one row per sequence: a small pool is how refusals and evictions are seen.
            enforce_min_pool=False,
        )


FLAVOURS: Final = {
    flavour.name: flavour
    for flavour in (
        Flavour("vanilla", (_ATTENTION,)),
        Flavour("eagle", (_ATTENTION,), SpecMode.EAGLE, future=1),
        Flavour("draft", (_ATTENTION,), SpecMode.DFLASH),
        Flavour("shared-kv", (_ATTENTION,), SpecMode.SHARED_KV),
        Flavour("hybrid", (_ATTENTION, _RECURRENT)),
        Flavour("recurrent", (_RECURRENT,)),
        Flavour("hybrid-mtp", (_ATTENTION, _RECURRENT), SpecMode.MTP, future=1),
    )
}
FLAVOUR_NAMES: Final = tuple(FLAVOURS)


def check_options(
    name: str, *, max_batch: int | None, pages: int | None, snapshot_slots: int | None
) -> tuple[Flavour, int, int]:
    """The flavour, the batch size and the snapshot slots of a run; None stands for an option that was not given.

    Raises FlavourError.
    """
    flavour = FLAVOURS.get(name)
    if flavour is None:
        raise FlavourError(f"--flavour {name} is unknown; use one of {', '.join(FLAVOUR_NAMES)}")
    if flavour.mtp and max_batch not in (None, 1):
        raise FlavourError(
            f"--max-batch {max_batch} does not go with --flavour {name}, which runs one sequence at a time; use "
            "--max-batch 1 or leave it out"
        )
    if pages is not None and not flavour.has_attention:
        raise FlavourError(
            f"--pages {pages} does not go with --flavour {name}, which has no attention layer and so no page; leave it "
            "out, or limit what is kept with --snapshot-slots"
        )
    if snapshot_slots is not None and not flavour.has_recurrent:
        raise FlavourError(
            f"--snapshot-slots {snapshot_slots} does not go with --flavour {name}, which has no recurrent state to "
            "snapshot; leave it out, or use hybrid, recurrent or hybrid-mtp"
        )
    batch = (1 if flavour.mtp else _MAX_BATCH) if max_batch is None else max_batch
    if not flavour.has_recurrent:
        return flavour, batch, 0
    return flavour, batch, 2 * batch + 64 if snapshot_slots is None else snapshot_slots
