"""A coordinator is built only over device memory that is what the deployment says: every tensor, every page table."""

from __future__ import annotations

import attrs
import pytest

from context_cache.coordinator import (
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContractViolation,
    DeploymentConfig,
    KVPageTable,
    LayerGeometry,
    SpecConfig,
    SpecMode,
    allocate_resources,
)

ATTENTION = LayerGeometry.attention(kv_heads=2, head_dim=4)
BORROWER = LayerGeometry.attention(kv_heads=2, head_dim=4, kv_donor=0)
WIDE = LayerGeometry.attention(kv_heads=1, head_dim=8)
RECURRENT = LayerGeometry.recurrent(heads=1, head_dim=2, state=2, conv_dim=2, conv_kernel=2)
PAGE, BATCH, ROW, PAGES, DRAFT_PAGES = 4, 2, 4, 8, 9

FLAVOURS = {
    "vanilla": ((ATTENTION, BORROWER, WIDE), None),
    "eagle": ((ATTENTION,), SpecConfig(mode=SpecMode.EAGLE, draft_layers=(ATTENTION,))),
    "draft": ((ATTENTION,), SpecConfig(mode=SpecMode.DFLASH, draft_layers=(ATTENTION,))),
    "shared-kv": ((ATTENTION,), SpecConfig(mode=SpecMode.SHARED_KV)),
    "hybrid": ((ATTENTION, RECURRENT), None),
    "recurrent": ((RECURRENT,), None),
    "hybrid-mtp": ((ATTENTION, RECURRENT), SpecConfig(mode=SpecMode.MTP, draft_layers=(ATTENTION,), hidden_dim=8)),
}
ALL = tuple(FLAVOURS)
PAIRED = ("eagle", "draft", "hybrid-mtp")
STATEFUL = ("hybrid", "recurrent", "hybrid-mtp")
WITH_PAGES = tuple(name for name in ALL if name != "recurrent")


class Engine:
    """Resources of one flavour, before a coordinator takes them."""

    def __init__(self, name, backend, draft_pages=DRAFT_PAGES):
        layers, spec = FLAVOURS[name]
        self.backend = backend
        self.deployment = DeploymentConfig(
            max_batch=BATCH, kv_capacity_tokens=ROW * PAGE, page_size=PAGE, layers=layers, spec_config=spec
        )
        pages = 0 if name == "recurrent" else PAGES
        self.resources = allocate_resources(
            self.deployment, pages, backend, draft_pages=draft_pages if name in PAIRED else None
        )

    def cache(self, model):
        return self.resources.base_cache if model == "base" else self.resources.draft_cache

    def table(self, model):
        return self.resources.base_page_table if model == "base" else self.resources.draft_page_table

    def array(self, *shape, dtype="float16"):
        return self.backend.array(shape, dtype)

    def build(self, **changes):
        return ContextCacheCoordinator(
            ContextCacheConfig(enabled=True, recurrent_snapshot_pool_bytes=10**5, partial_kv_snapshot_pool_bytes=10**5),
            self.deployment,
            attrs.evolve(self.resources, **changes),
            backend=self.backend,
            stream=self.backend.new_stream(),
            identity_key=bytes(32),
        )

    def refuses(self, *words, **changes):
        with pytest.raises(ContractViolation) as caught:
            self.build(**changes)
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert str(word) in message, message
        return message


@pytest.fixture
def engine(new_backend):
    return lambda name, **options: Engine(name, new_backend(), **options)


@pytest.mark.parametrize("name", ALL)
def test_what_was_allocated_for_the_deployment_is_taken(engine, name):
    assert engine(name).build().state == "serving"


MODELS = [pytest.param(name, "base", id=f"{name}-base") for name in WITH_PAGES] + [
    pytest.param(name, "draft", id=f"{name}-draft") for name in PAIRED
]


def pages_of(model):
    return PAGES if model == "base" else DRAFT_PAGES


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(lambda pages: (2, pages - 1, PAGE, 2, 4), id="too few pages"),
        pytest.param(lambda pages: (2, pages + 1, PAGE, 2, 4), id="too many pages"),
        pytest.param(lambda pages: (1, pages, PAGE, 2, 4), id="K alone"),
        pytest.param(lambda pages: (2, pages, PAGE + 1, 2, 4), id="another page size"),
        pytest.param(lambda pages: (2, pages, PAGE, 1, 4), id="fewer heads"),
        pytest.param(lambda pages: (2, pages, PAGE, 4, 2), id="heads and width swapped"),
        pytest.param(lambda pages: (2, pages, PAGE, 8), id="flat heads"),
    ],
)
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_a_pool_of_another_shape_is_refused(engine, name, model, shape):
    e, pages = engine(name), pages_of(model)
    e.cache(model).kv_pools[0] = e.array(*shape(pages))
    e.refuses(f"{model} attention layer 0", "shape", (2, pages, PAGE, 2, 4), shape(pages))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "uint16"])
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_a_pool_of_another_dtype_is_refused(engine, name, model, dtype):
    e = engine(name)
    e.cache(model).kv_pools[0] = e.array(2, pages_of(model), PAGE, 2, 4, dtype=dtype)
    e.refuses(f"{model} attention layer 0", "float16", dtype)


@pytest.mark.parametrize(("name", "model"), MODELS)
def test_a_pool_with_gaps_is_refused(engine, name, model):
    e = engine(name)
    e.cache(model).kv_pools[0] = e.array(2, pages_of(model), 2 * PAGE, 2, 4)[:, :, ::2]
    e.refuses(f"{model} attention layer 0", "strides")


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_another_number_of_pools_is_refused(engine, name, model, change):
    e = engine(name)
    pools = e.cache(model).kv_pools
    wanted = len(pools)
    e.cache(model).kv_pools = pools[:-1] if change < 0 else [*pools, pools[0]]
    e.refuses(f"expected {wanted} {model} K/V pools", f"found {wanted + change}")


def test_the_pool_of_a_later_layer_is_looked_at_too(engine):
    e = engine("vanilla")
    e.resources.base_cache.kv_pools[2] = e.array(2, PAGES, PAGE, 2, 4)
    e.refuses("base attention layer 2", (2, PAGES, PAGE, 1, 8), (2, PAGES, PAGE, 2, 4))


LENGTHS = [pytest.param(name, "base", id=f"{name}-base") for name in ALL] + [
    pytest.param(name, "draft", id=f"{name}-draft") for name in PAIRED
]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((BATCH - 1,), "int32", (BATCH,)),
        ((BATCH + 1,), "int32", (BATCH,)),
        ((1, BATCH), "int32", (BATCH,)),
        ((BATCH,), "int64", "int32"),
        ((BATCH,), "float32", "int32"),
    ],
)
@pytest.mark.parametrize(("name", "model"), LENGTHS)
def test_another_length_vector_is_refused(engine, name, model, shape, dtype, expected):
    e = engine(name)
    e.cache(model).lengths = e.array(*shape, dtype=dtype)
    e.refuses(f"{model} length vector", f"{expected}, found {shape if isinstance(expected, tuple) else dtype}")


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((BATCH + 1, 2, ROW), "int32", (BATCH, 2, ROW)),
        ((BATCH, 1, ROW), "int32", (BATCH, 2, ROW)),
        ((BATCH, 2, ROW + 1), "int32", (BATCH, 2, ROW)),
        ((BATCH, 2 * ROW), "int32", (BATCH, 2, ROW)),
        ((BATCH, 2, ROW), "int64", "int32"),
    ],
)
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_another_array_of_a_page_table_is_refused(engine, name, model, shape, dtype, expected):
    e = engine(name)
    e.table(model).device_array = e.array(*shape, dtype=dtype)
    e.refuses(f"{model} page table", f"{expected}, found {shape if isinstance(expected, tuple) else dtype}")


@pytest.mark.parametrize("part", ["recurrent_states", "conv_states"])
@pytest.mark.parametrize("name", STATEFUL)
def test_another_recurrent_state_is_refused(engine, name, part):
    e = engine(name)
    states = getattr(e.resources.base_cache, part)
    right = states[0]
    shape, dtype = tuple(right.shape), str(right.dtype)
    states[0] = e.array(BATCH + 1, *shape[1:], dtype=dtype)
    e.refuses("recurrent layer 0", f"{shape}, found {(BATCH + 1, *shape[1:])}")
    other = "float16" if dtype == "float32" else "float32"
    states[0] = e.array(*shape, dtype=other)
    e.refuses("recurrent layer 0", f"{dtype}, found {other}")
    states[0] = right
    e.build()


@pytest.mark.parametrize("name", PAIRED)
def test_base_and_draft_share_nothing(engine, name):
    """Also where both are equally large, so that nothing else is wrong with either."""
    e = engine(name, draft_pages=PAGES)
    e.refuses("share", draft_cache=e.resources.base_cache)
    e.refuses("share", draft_page_table=e.resources.base_page_table)
    e.refuses("share", base_page_table=e.resources.draft_page_table)
    e.build()


@pytest.mark.parametrize("part", ["draft_cache", "draft_page_table"])
@pytest.mark.parametrize("name", PAIRED)
def test_a_draft_with_pages_has_both_parts(engine, name, part):
    engine(name).refuses("give draft_cache and draft_page_table", **{part: None})


@pytest.mark.parametrize("name", WITH_PAGES)
def test_attention_layers_need_a_page_table(engine, name):
    engine(name).refuses("give its page table", base_page_table=None)


def test_a_pure_recurrent_deployment_has_no_page_table(engine):
    e = engine("recurrent")
    table = KVPageTable(max_batch=BATCH, max_pages_per_seq=ROW, num_pages=PAGES, backend=e.backend)
    e.refuses("no attention layers", base_page_table=table)
