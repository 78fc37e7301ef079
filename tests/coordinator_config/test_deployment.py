"""What can be deployed (00.5): the profile of each flavour, and every refusal with the rule and the layer it names."""

from __future__ import annotations

import attrs
import pytest

from context_cache.coordinator import (
    BaseStateKind,
    ContractViolation,
    DeploymentConfig,
    LayerGeometry,
    LayerKind,
    SpecConfig,
    SpecMode,
    SpecReuseContract,
    validate_deployment,
)
from context_cache.coordinator.config import PAGES_MAX, validate_pool

ATTENTION = LayerGeometry.attention(kv_heads=2, head_dim=4)
RECURRENT = LayerGeometry.recurrent(heads=2, head_dim=3, state=5, conv_dim=6, conv_kernel=4)
MTP = SpecConfig(mode=SpecMode.MTP, draft_layers=(ATTENTION,), hidden_dim=8)
PAGED_MODES = [SpecMode.EAGLE, SpecMode.DFLASH, SpecMode.JETSPEC, SpecMode.DSPARK]


def deploy(*layers, spec=None, **fields):
    fields = {"max_batch": 3, "kv_capacity_tokens": 16, "page_size": 4, **fields}
    return DeploymentConfig(layers=layers or (ATTENTION,), spec_config=spec, **fields)


def refusal(deployment):
    """The message; it must be one sentence."""
    with pytest.raises(ContractViolation) as caught:
        validate_deployment(deployment)
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


# ---- flavours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "spec", "kind", "contract"),
    [
        pytest.param((ATTENTION,), None, BaseStateKind.ATTENTION_ONLY, None, id="vanilla"),
        pytest.param((ATTENTION, RECURRENT), None, BaseStateKind.HYBRID, None, id="hybrid"),
        pytest.param((RECURRENT,), None, BaseStateKind.PURE_RECURRENT, None, id="pure recurrent"),
        pytest.param((RECURRENT, ATTENTION), MTP, BaseStateKind.HYBRID, (True, 1), id="hybrid + MTP"),
        pytest.param(
            (ATTENTION,), SpecConfig(mode=SpecMode.SHARED_KV), BaseStateKind.ATTENTION_ONLY, (False, 0), id="shared-KV"
        ),
        *(
            pytest.param(
                (ATTENTION,),
                SpecConfig(mode=mode, draft_layers=[ATTENTION]),
                BaseStateKind.ATTENTION_ONLY,
                (True, 1 if mode is SpecMode.EAGLE else 0),
                id=mode.value,
            )
            for mode in PAGED_MODES
        ),
    ],
)
def test_each_flavour_has_its_profile(layers, spec, kind, contract):
    profile = validate_deployment(deploy(*layers, spec=spec))
    assert profile.base_state_kind is kind
    assert profile.spec_contract == (None if contract is None else SpecReuseContract(*contract))
    assert profile.speculative is (contract is not None)
    assert profile.paged_spec is (contract is not None and contract[0])
    assert profile.has_attention is (kind is not BaseStateKind.PURE_RECURRENT)
    assert profile.has_recurrent is profile.uses_checkpoints is (kind is not BaseStateKind.ATTENTION_ONLY)


def test_profiles_of_one_flavour_are_equal_whatever_the_sizes():
    """A profile says what a deployment is; the bytes ride along."""
    assert validate_deployment(deploy(RECURRENT)) == validate_deployment(deploy(RECURRENT, RECURRENT, max_batch=7))
    assert validate_deployment(deploy(RECURRENT)) != validate_deployment(deploy(RECURRENT, ATTENTION))


@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("float16", 2), ("float8", 1)])
def test_bytes_of_a_snapshot_slot(kv_dtype, itemsize):
    """30.4: recurrent + conv per recurrent layer; K and V page per owning attention layer; borrowers cost nothing."""
    borrower = LayerGeometry.attention(2, 4, kv_donor=0)
    recurrent = 2 * (2 * 3 * 5 * 4 + 6 * 4 * 2)
    partial = 2 * 4 * 2 * 4 * itemsize
    layers = (ATTENTION, RECURRENT, borrower, RECURRENT)
    profile = validate_deployment(deploy(*layers, kv_dtype=kv_dtype))
    assert (profile.recurrent_slot_bytes, profile.partial_slot_bytes) == (recurrent, partial)

    # With MTP the recurrent slot also pays a float16 hidden row, the partial slot also the draft's page.
    spec = attrs.evolve(MTP, draft_layers=(LayerGeometry.attention(1, 8), LayerGeometry.attention(1, 8, kv_donor=0)))
    paired = validate_deployment(deploy(*layers, kv_dtype=kv_dtype, spec=spec))
    assert paired.recurrent_slot_bytes == recurrent + 8 * 2
    assert paired.partial_slot_bytes == partial + 2 * 4 * 1 * 8 * itemsize

    pure = validate_deployment(deploy(RECURRENT, kv_dtype=kv_dtype))
    assert (pure.recurrent_slot_bytes, pure.partial_slot_bytes) == (recurrent // 2, 0)
    vanilla = validate_deployment(deploy(ATTENTION, kv_dtype=kv_dtype))
    assert (vanilla.recurrent_slot_bytes, vanilla.partial_slot_bytes) == (0, 0)


def test_the_dtypes_of_a_recurrent_layer_set_its_bytes():
    layer = attrs.evolve(RECURRENT, state_dtype="bfloat16", conv_dtype="float32")
    assert validate_deployment(deploy(layer)).recurrent_slot_bytes == 2 * 3 * 5 * 2 + 6 * 4 * 4


# ---- refusals: sizes and layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["max_batch", "kv_capacity_tokens", "page_size"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", None])
def test_a_size_that_is_no_positive_integer_is_refused(field, value):
    assert f"{field} must be an integer from 1 to" in refusal(deploy(**{field: value}))


@pytest.mark.parametrize("dtype", ["float32", "int8", None, ["float16"]])
def test_another_kv_dtype_is_refused(dtype):
    assert "kv_dtype must be one of ['float16', 'float8'], got" in refusal(deploy(kv_dtype=dtype))


def test_a_deployment_without_state_is_refused():
    deployment = DeploymentConfig(max_batch=1, kv_capacity_tokens=4, layers=())
    assert "at least one layer with state" in refusal(deployment)


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        pytest.param((ATTENTION, "attention"), ["layer 1", "LayerGeometry", "'attention'"], id="no geometry"),
        pytest.param(
            (ATTENTION, LayerGeometry(kind="linear")),
            ["layer 1", "'linear'", "do not add up to the 2 layers"],
            id="unknown kind",
        ),
        pytest.param((ATTENTION, LayerGeometry.attention(0, 4)), ["layer 1: kv_heads", "got 0"], id="no K/V heads"),
        pytest.param((LayerGeometry.attention(1, -4),), ["layer 0: head_dim", "got -4"], id="no head width"),
        pytest.param(
            (attrs.evolve(ATTENTION, conv_dim=3, state=1),),
            ["layer 0 is attention", "state, conv_dim", "recurrent"],
            id="attention with recurrent schema",
        ),
        pytest.param(
            (ATTENTION, attrs.evolve(RECURRENT, kv_heads=1)),
            ["layer 1 is recurrent", "K/V layout"],
            id="recurrent with K/V layout",
        ),
        pytest.param(
            (ATTENTION, attrs.evolve(RECURRENT, kv_donor=0)),
            ["layer 1 is recurrent", "K/V donor"],
            id="recurrent with donor",
        ),
        pytest.param(
            (ATTENTION, LayerGeometry(LayerKind.RECURRENT)),
            ["layer 1", "recurrent schema is incomplete", "heads"],
            id="recurrent without schema",
        ),
        *(
            pytest.param(
                (RECURRENT, attrs.evolve(RECURRENT, **{dimension: 0})),
                ["layer 1: the recurrent schema is incomplete", f"{dimension} must be", "got 0"],
                id=f"recurrent without {dimension}",
            )
            for dimension in ("heads", "head_dim", "state", "conv_dim", "conv_kernel")
        ),
        *(
            pytest.param(
                (attrs.evolve(RECURRENT, **{dtype: "int8"}),),
                [f"layer 0: {dtype} must be one of", "'int8'"],
                id=f"unknown {dtype}",
            )
            for dtype in ("state_dtype", "conv_dtype")
        ),
    ],
)
def test_a_layer_that_breaks_a_rule_is_named(layers, parts):
    message = refusal(deploy(*layers))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("donors", "parts"),
    [
        pytest.param([None, 2], ["layer 1: K/V donor 2 does not exist", "2 layers"], id="out of range"),
        pytest.param([None, -1], ["layer 1: K/V donor -1 does not exist"], id="negative"),
        pytest.param([None, True], ["layer 1: K/V donor True does not exist"], id="no number"),
        pytest.param([None, 1], ["layer 1 names itself"], id="self"),
        pytest.param([None, 0, 1], ["layer 2: donor 1 borrows from layer 0"], id="chain"),
    ],
)
@pytest.mark.parametrize("draft", [False, True], ids=["base", "draft"])
def test_a_bad_donor_is_refused(donors, parts, draft):
    layers = tuple(LayerGeometry.attention(2, 4, kv_donor=donor) for donor in donors)
    if draft:
        deployment = deploy(ATTENTION, spec=SpecConfig(mode=SpecMode.EAGLE, draft_layers=layers))
    else:
        deployment = deploy(*layers)
    message = refusal(deployment)
    for part in parts:
        assert part in message
    assert ("draft layer" in message) is draft


@pytest.mark.parametrize("shape", [(1, 4), (2, 8)])
def test_a_donor_of_another_layout_is_refused(shape):
    message = refusal(deploy(ATTENTION, LayerGeometry.attention(*shape, kv_donor=0)))
    assert f"layer 1 has {shape[0]} heads of {shape[1]}, its donor 0 has 2 of 4" in message


def test_a_recurrent_donor_is_refused():
    message = refusal(deploy(RECURRENT, LayerGeometry.attention(2, 4, kv_donor=0)))
    assert "layer 1: donor 0 is no attention layer" in message


def test_bidirectional_vision_attention_is_refused():
    assert "bidirectional vision attention" in refusal(deploy(bidirectional_vision=True))


# ---- refusals: combinations ------------------------------------------------------------------------------------------


def test_block_diffusion_is_allowed_alone_only():
    """00.5: non-speculative and attention-only."""
    assert validate_deployment(deploy(block_diffusion=True)).base_state_kind is BaseStateKind.ATTENTION_ONLY
    eagle = SpecConfig(mode=SpecMode.EAGLE, draft_layers=(ATTENTION,))
    message = refusal(deploy(block_diffusion=True, spec=eagle))
    assert "block-diffusion" in message
    assert "speculative" in message
    message = refusal(deploy(ATTENTION, RECURRENT, block_diffusion=True))
    assert "layer 1 is recurrent" in message
    assert "block-diffusion" in message


@pytest.mark.parametrize("spec", ["eagle", SpecMode.EAGLE, 1])
def test_a_spec_config_of_another_type_is_refused(spec):
    assert "spec_config must be a SpecConfig or None" in refusal(deploy(spec=spec))


@pytest.mark.parametrize("mode", ["eagle", "medusa", None])
def test_an_unknown_mode_is_refused(mode):
    message = refusal(deploy(spec=SpecConfig(mode=mode, draft_layers=(ATTENTION,))))
    assert f"got {mode!r}" in message
    for known in SpecMode:
        assert known.name in message


EAGLE = SpecConfig(mode=SpecMode.EAGLE, draft_layers=(ATTENTION,))
SHARED = SpecConfig(mode=SpecMode.SHARED_KV)


@pytest.mark.parametrize(
    ("spec", "changes", "parts"),
    [
        pytest.param(
            EAGLE, {"draft_mode": SpecMode.DFLASH}, ["eagle", "dflash", "same speculative mode"], id="two modes"
        ),
        pytest.param(EAGLE, {"base_has_base_role": False}, ["base engine is not marked as the base"], id="no base"),
        pytest.param(EAGLE, {"draft_has_base_role": True}, ["draft engine is marked as a base"], id="two bases"),
        *(
            pytest.param(EAGLE, {name: value}, [f"spec_config.{name} must be an integer from 1"], id=f"{name} {value}")
            for name in ("verify_size", "steps", "top_k")
            for value in (0, -1, True, None)
        ),
        pytest.param(EAGLE, {"hidden_dim": -1}, ["spec_config.hidden_dim", "got -1"], id="negative hidden_dim"),
        pytest.param(EAGLE, {"draft_layers": (ATTENTION, RECURRENT)}, ["draft layer 1 is recurrent"], id="recurrent"),
        pytest.param(
            EAGLE, {"draft_layers": (LayerGeometry.attention(0, 1),)}, ["draft layer 0: kv_heads"], id="no layout"
        ),
        pytest.param(EAGLE, {"draft_read_only": True}, ["eagle", "read-only", "SHARED_KV"], id="paged, reads only"),
        pytest.param(SHARED, {"draft_layers": (ATTENTION,)}, ["shared_kv", "without K/V of its own"], id="shared, K/V"),
        pytest.param(SHARED, {"draft_read_only": False}, ["shared_kv", "read-only draft"], id="shared, writes"),
    ],
)
def test_a_speculative_pair_that_breaks_a_rule_is_refused(spec, changes, parts):
    message = refusal(deploy(spec=attrs.evolve(spec, **changes)))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("mode", PAGED_MODES)
def test_a_paged_mode_needs_a_draft_with_its_own_kv(mode):
    message = refusal(deploy(spec=SpecConfig(mode=mode)))
    assert mode.value in message
    assert "needs a draft with K/V of its own" in message


def test_mtp_needs_a_draft_with_its_own_kv():
    message = refusal(deploy(ATTENTION, RECURRENT, spec=attrs.evolve(MTP, draft_layers=())))
    assert "mtp needs a draft with K/V of its own" in message


@pytest.mark.parametrize("mode", [*PAGED_MODES, SpecMode.SHARED_KV])
@pytest.mark.parametrize("layers", [(ATTENTION, RECURRENT), (RECURRENT,)], ids=["hybrid", "pure recurrent"])
def test_recurrent_layers_speculate_only_with_mtp(mode, layers):
    draft = () if mode is SpecMode.SHARED_KV else (ATTENTION,)
    message = refusal(deploy(*layers, spec=SpecConfig(mode=mode, draft_layers=draft)))
    assert "speculative only with mtp" in message
    assert mode.value in message


def test_mtp_needs_both_kinds_of_layers():
    assert "mtp needs a base model with recurrent layers" in refusal(deploy(ATTENTION, spec=MTP))
    assert "mtp needs attention layers" in refusal(deploy(RECURRENT, spec=MTP))


def test_mtp_needs_the_width_of_its_hidden_row():
    message = refusal(deploy(ATTENTION, RECURRENT, spec=attrs.evolve(MTP, hidden_dim=0)))
    assert "hidden_dim must be at least 1" in message


# ---- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("pages", [0, -1, True, PAGES_MAX + 1])
def test_a_pool_has_at_least_one_page_and_ids_that_fit(pages, draft):
    with pytest.raises(ContractViolation, match=f"{'draft_pages' if draft else 'num_pages'} must be an integer from 1"):
        validate_pool(deploy(enforce_min_pool=False, spec=EAGLE), pages, draft=draft)


@pytest.mark.parametrize(("draft", "what"), [(False, "11 pages"), (True, "11 draft pages")])
def test_a_pool_holds_a_full_row_of_every_resident(draft, what):
    """00.5: max_batch x ceil(capacity / P) pages, unless the check is switched off."""
    deployment = deploy(spec=EAGLE)
    validate_pool(deployment, 12, draft=draft)
    with pytest.raises(ContractViolation, match=f"{what} are fewer than max_batch x pages of a row = 3 x 4 = 12"):
        validate_pool(deployment, 11, draft=draft)
    validate_pool(attrs.evolve(deployment, enforce_min_pool=False), 1, draft=draft)


@pytest.mark.parametrize("pages", [1, -1, False, None])
def test_a_pure_recurrent_deployment_has_no_pages(pages):
    validate_pool(deploy(RECURRENT), 0)
    with pytest.raises(ContractViolation, match="pure recurrent deployment has no K/V pages, so num_pages must be 0"):
        validate_pool(deploy(RECURRENT), pages)


@pytest.mark.parametrize("mode", [*PAGED_MODES, SpecMode.SHARED_KV, SpecMode.MTP])
@pytest.mark.parametrize("layer", [1, None, "attention", {}])
def test_a_draft_layer_is_a_layer(mode, layer):
    layers = (ATTENTION, RECURRENT) if mode is SpecMode.MTP else (ATTENTION,)
    spec = SpecConfig(mode=mode, draft_layers=(layer,), hidden_dim=8 if mode is SpecMode.MTP else 0)
    assert "draft layer 0 must be a LayerGeometry" in refusal(deploy(*layers, spec=spec))
