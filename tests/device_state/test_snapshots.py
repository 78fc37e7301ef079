"""Snapshot storage (30.4): copies are byte exact and touch nothing else, arguments are checked before anything runs."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_cache.backends import HostBackend
from context_cache.backends.base import DeviceError
from context_cache.coordinator import ContractViolation, HybridSnapshotStorage, allocate_resources

CHECKPOINTS = ["hybrid", "recurrent", "hybrid-mtp"]
WITH_PAGES = ["hybrid", "hybrid-mtp"]
# method -> the valid batch, and which of its arguments are destinations
METHODS = {
    "zero_recurrent": ([[0, 1]], [0]),
    "capture_recurrent": ([[0, 1], [0, 1]], [0]),
    "restore_recurrent": ([[0, 1], [0, 1]], [1]),
    "capture_partial": ([[0, 1], [0, 1], [1, 2]], [0]),
    "restore_partial": ([[0, 1], [0, 1], [1, 2]], [1]),
    "capture_partial_pair": ([[0, 1], [0, 1], [0, 1], [1, 2]], [0]),
    "restore_partial_pair": ([[0, 1], [0, 1], [0, 1], [1, 2]], [1, 2]),
}


def layers(copies, name):
    """The arrays ``name 0``, ``name 1``, ... in order."""
    return [copies[f"{name} {index}"] for index in range(len(copies)) if f"{name} {index}" in copies]


def pools_of(world, copies, name, slab_name):
    """(pool, slab) of every layer with storage of its own; a borrowed pool counts once."""
    live = world.cache.kv_pools if name == "pool" else world.draft.kv_pools
    seen, owned = set(), []
    for pool, copy in zip(live, layers(copies, name), strict=True):
        if id(pool) not in seen:
            seen.add(id(pool))
            owned.append((pool, copy))
    return [(copy, slab) for (_, copy), slab in zip(owned, layers(copies, slab_name), strict=True)]


def borrow(world, copies):
    """A borrowed pool is one array under two names: make the expectations agree."""
    live = world.cache.kv_pools
    for index, pool in enumerate(live):
        first = next(number for number, other in enumerate(live) if other is pool)
        copies[f"pool {index}"] = copies[f"pool {first}"]


# ---- recurrent state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", CHECKPOINTS)
def test_zeroing_touches_these_rows_only(make, flavour):
    """Scenario 104: a cold sequence zeroes its own resident row and no other."""
    world = make(flavour)
    wanted = world.copies()
    for name in ("recurrent", "conv"):
        for array in layers(wanted, name):
            array[[2, 0]] = 0
    assert world.storage.zero_recurrent([2, 0], world.stream) is True
    assert world.log == ["zero_rows"]
    world.run()
    world.expect(wanted)


@pytest.mark.parametrize("flavour", CHECKPOINTS)
def test_capturing_copies_whole_rows_byte_for_byte(make, flavour):
    world = make(flavour)
    wanted = world.copies()
    for live, slab in (("recurrent", "recurrent slab"), ("conv", "conv slab")):
        for source, dest in zip(layers(wanted, live), layers(wanted, slab), strict=True):
            dest[[3, 1]] = source[[0, 2]]
    assert world.storage.capture_recurrent([3, 1], [0, 2], world.stream) is True
    assert world.log == ["copy_rows"]
    world.run()
    world.expect(wanted)


@pytest.mark.parametrize("flavour", CHECKPOINTS)
def test_one_slot_restores_into_several_rows(make, flavour):
    """Two sequences of a batch may hit the same checkpoint."""
    world = make(flavour)
    wanted = world.copies()
    for live, slab in (("recurrent", "recurrent slab"), ("conv", "conv slab")):
        for dest, source in zip(layers(wanted, live), layers(wanted, slab), strict=True):
            dest[[1, 0]] = source[[2, 2]]
    assert world.storage.restore_recurrent([2, 2], [1, 0], world.stream) is True
    assert world.log == ["copy_rows"]
    world.run()
    world.expect(wanted)


# ---- partial pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", WITH_PAGES)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_partial_page_is_captured_up_to_its_tokens(make, flavour, count):
    """n tokens of the K page and of the V page of every owning base layer; bytes behind them, and the draft, stay."""
    world = make(flavour)
    wanted = world.copies()
    for pool, slab in pools_of(world, wanted, "pool", "partial slab"):
        slab[4, :, :count] = pool[:, 11, :count]
    assert world.storage.capture_partial([4], [11], [count], world.stream) is True
    assert world.log == ["capture_pages"]
    world.run()
    world.expect(wanted)


@pytest.mark.parametrize("flavour", WITH_PAGES)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_partial_page_is_restored_up_to_its_tokens(make, flavour, count):
    world = make(flavour)
    wanted = world.copies()
    borrow(world, wanted)
    for pool, slab in pools_of(world, wanted, "pool", "partial slab"):
        pool[:, 7, :count] = slab[2, :, :count]
    assert world.storage.restore_partial([2], [7], [count], world.stream) is True
    assert world.log == ["restore_pages"]
    world.run()
    world.expect(wanted)


def test_a_batch_mixes_token_counts_in_one_verb(make):
    world = make("hybrid")
    wanted = world.copies()
    for pool, slab in pools_of(world, wanted, "pool", "partial slab"):
        for slot, page, count in ((0, 5, 1), (3, 5, 4), (2, 0, 2)):
            slab[slot, :, :count] = pool[:, page, :count]
    world.storage.capture_partial((0, 3, 2), np.array([5, 5, 0]), (1, 4, 2), world.stream)
    assert world.log == ["capture_pages"]
    world.run()
    world.expect(wanted)


def test_a_pair_goes_into_one_slot_number_base_layers_first(mtp):
    """Scenario 105: the draft's page shares the slot number and the number of tokens."""
    wanted = mtp.copies()
    for name, slab_name, page in (("pool", "partial slab", 3), ("draft pool", "draft partial slab", 12)):
        for pool, slab in pools_of(mtp, wanted, name, slab_name):
            slab[1, :, :3] = pool[:, page, :3]
    assert mtp.storage.capture_partial_pair([1], [3], [12], [3], mtp.stream) is True
    assert mtp.log == ["capture_pages", "capture_pages"]
    mtp.run()
    mtp.expect(wanted)


def test_a_pair_is_restored_into_a_page_of_each_model(mtp):
    wanted = mtp.copies()
    for name, slab_name, pages in (("pool", "partial slab", (3, 0)), ("draft pool", "draft partial slab", (3, 12))):
        for pool, slab in pools_of(mtp, wanted, name, slab_name):
            for page, count in zip(pages, (4, 2), strict=True):
                pool[:, page, :count] = slab[1, :, :count]
    assert mtp.storage.restore_partial_pair([1, 1], [3, 0], [3, 12], [4, 2], mtp.stream) is True
    assert mtp.log == ["restore_pages", "restore_pages"]
    mtp.run()
    mtp.expect(wanted)


# ---- hidden rows -----------------------------------------------------------------------------------------------------


def hidden(*shape, seed=1):
    array = np.zeros(shape, np.float16)
    array.view(np.uint16)[...] = np.random.default_rng(seed).integers(0, 2**16, shape, dtype=np.uint16)
    return array


def test_a_hidden_row_of_a_token_major_tensor(mtp):
    """P8: in two dimensions the row is a physical token row and the logical slot means nothing."""
    source, rest = hidden(7, 6), hidden(5, 6, seed=2)
    wanted, dest = mtp.copies(), mtp.device(rest)
    wanted["hidden slab 0"][2] = source[6]
    assert mtp.storage.capture_hidden(2, mtp.device(source), 6, mtp.stream, logical_slot=9) is True
    mtp.run()
    mtp.expect(wanted)
    rest[4] = source[6]
    assert mtp.storage.restore_hidden(2, dest, 4, mtp.stream) is True
    mtp.run()
    mtp.expect(wanted)
    assert dest.tobytes() == rest.tobytes()
    assert mtp.log == ["copy_row", "copy_row"]


def test_a_hidden_row_of_a_tensor_by_logical_slot(mtp):
    """P8: in three dimensions the logical slot selects the first axis."""
    source, rest = hidden(2, 3, 6), hidden(2, 4, 6, seed=2)
    dest = mtp.device(rest)
    mtp.storage.capture_hidden(0, mtp.device(source), 2, mtp.stream, logical_slot=1)
    mtp.storage.restore_hidden(0, dest, 3, mtp.stream)
    mtp.run()
    rest[0, 3] = source[1, 2]
    assert mtp.storage.hidden_slab[0].tobytes() == source[1, 2].tobytes()
    assert dest.tobytes() == rest.tobytes()


@pytest.mark.parametrize("verb", ["capture_hidden", "restore_hidden"])
@pytest.mark.parametrize(
    ("slot", "tensor", "row", "logical", "words"),
    [
        pytest.param(4, hidden(3, 6), 0, 0, "recurrent slot 4 is outside 0..3", id="slot"),
        pytest.param(-1, hidden(3, 6), 0, 0, "recurrent slot -1", id="negative slot"),
        pytest.param(0, hidden(3, 6), 3, 0, "row of .* 3 is outside 0..2", id="row"),
        pytest.param(0, hidden(3, 6), -1, 0, "row of .* -1", id="negative row"),
        pytest.param(0, hidden(3, 6), 1.0, 0, "row of .* one dimension of integers", id="row is no integer"),
        pytest.param(0, hidden(2, 3, 6), 3, 0, "row of .* 3 is outside 0..2", id="row in three dimensions"),
        pytest.param(0, hidden(2, 3, 6), 0, 2, "logical slot of .* 2 is outside 0..1", id="logical slot"),
        pytest.param(0, hidden(2, 3, 6), 0, -1, "logical slot of .* -1", id="negative logical slot"),
        pytest.param(0, hidden(3, 5), 0, 0, "float16 rows of 6, got float16 rows of 5", id="width"),
        pytest.param(0, hidden(3, 6).astype(np.float32), 0, 0, "float16 rows of 6, got float32", id="dtype"),
        pytest.param(0, hidden(6), 0, 0, r"shape \(6,\)", id="one dimension"),
        pytest.param(0, hidden(1, 1, 1, 6), 0, 0, r"shape \(1, 1, 1, 6\)", id="four dimensions"),
        pytest.param(0, [[0.0] * 6], 0, 0, "got list", id="no array"),
    ],
)
def test_a_bad_hidden_row_is_refused_and_enqueues_nothing(mtp, verb, slot, tensor, row, logical, words):
    before = mtp.bytes()
    with pytest.raises(ContractViolation, match=words):
        getattr(mtp.storage, verb)(slot, tensor, row, mtp.stream, logical_slot=logical)
    assert mtp.nothing_is_enqueued()
    assert mtp.bytes() == before


# ---- round trips -----------------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), flavour=st.sampled_from(CHECKPOINTS))
def test_what_was_captured_comes_back_byte_for_byte(make, data, seed, flavour):
    """Random bytes (NaNs of every kind among them), random batches; everything else keeps its bytes throughout."""
    world = make(flavour, seed=seed)
    size = data.draw(st.integers(1, 3), "size")

    def some(limit, unique=True):
        return data.draw(st.lists(st.integers(0, limit - 1), min_size=size, max_size=size, unique=unique))

    slots, rows, others = some(4), some(3, unique=False), some(3)
    wanted = world.copies()
    borrow(world, wanted)
    for live, slab in (("recurrent", "recurrent slab"), ("conv", "conv slab")):
        for source, dest in zip(layers(wanted, live), layers(wanted, slab), strict=True):
            for slot, row in zip(slots, rows, strict=True):
                dest[slot] = source[row]
            for slot, row in zip(slots, others, strict=True):
                source[row] = dest[slot]
    world.storage.capture_recurrent(slots, rows, world.stream)
    world.storage.restore_recurrent(slots, others, world.stream)
    if flavour != "recurrent":
        slots, pages, others = some(5), some(12, unique=False), some(12)
        tokens = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
        models = [("pool", "partial slab")]
        if flavour == "hybrid-mtp":
            models.append(("draft pool", "draft partial slab"))
            world.storage.capture_partial_pair(slots, pages, pages, tokens, world.stream)
            world.storage.restore_partial_pair(slots, others, others, tokens, world.stream)
        else:
            world.storage.capture_partial(slots, pages, tokens, world.stream)
            world.storage.restore_partial(slots, others, tokens, world.stream)
        for name, slab_name in models:
            for pool, slab in pools_of(world, wanted, name, slab_name):
                for slot, page, count in zip(slots, pages, tokens, strict=True):
                    slab[slot, :, :count] = pool[:, page, :count]
                for slot, page, count in zip(slots, others, tokens, strict=True):
                    pool[:, page, :count] = slab[slot, :, :count]
    world.run()
    world.expect(wanted)


# ---- a stream that runs late -----------------------------------------------------------------------------------------


def test_nothing_is_copied_before_the_stream_runs(late_stream, mtp):
    before = mtp.bytes()
    mtp.storage.zero_recurrent([0], mtp.stream)
    mtp.storage.capture_recurrent([0], [1], mtp.stream)
    mtp.storage.capture_partial_pair([0], [1], [2], [3], mtp.stream)
    mtp.storage.capture_hidden(0, hidden(2, 6), 1, mtp.stream)
    assert mtp.bytes() == before
    mtp.run()
    assert mtp.bytes() != before


def test_copies_see_what_was_written_before_them_on_the_stream(make):
    """A restore enqueued before its slot is captured again gets the old snapshot: the order of the stream decides."""
    world = make("hybrid")
    old = [slab[0].copy() for slab in world.storage.recurrent_slabs]
    new = [state[2].copy() for state in world.cache.recurrent_states]
    world.storage.restore_recurrent([0], [1], world.stream)
    world.storage.capture_recurrent([0], [2], world.stream)
    world.run()
    for state, slab, before, after in zip(
        world.cache.recurrent_states, world.storage.recurrent_slabs, old, new, strict=True
    ):
        assert state[1].tobytes() == before.tobytes()
        assert slab[0].tobytes() == after.tobytes()


def test_each_use_has_its_own_index_arrays(make):
    """The hazard of D1: the stream is blocked, four batches wait in it, and each keeps its own numbers."""
    world = make("hybrid")
    rows = [state.copy() for state in world.cache.recurrent_states]
    world.stream.hold()
    slots, source = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for slot, row in ((0, 2), (1, 1), (2, 0), (3, 2)):
        # The caller's own arrays may be used again at once, too.
        slots[0], source[0] = slot, row
        world.storage.capture_recurrent(slots, source, world.stream)
        slots[0] = source[0] = 0
    world.stream.let_go()
    world.run()
    for slab, state in zip(world.storage.recurrent_slabs, rows, strict=True):
        assert slab.tobytes() == state[[2, 1, 0, 2]].tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_index_arrays_are_staged_in_pinned_memory(make, method):
    """An asynchronous copy may read nothing else; a plain temporary would be right here and wrong on a GPU."""
    pinned, given = [], []

    class Watching(HostBackend):
        def pinned(self, shape, dtype):
            pinned.append(super().pinned(shape, dtype))
            return pinned[-1]

        def keep(self, *arguments):
            given.extend(value for value in arguments if isinstance(value, np.ndarray) and value.dtype == np.int32)

        zero_rows = copy_rows = capture_pages = restore_pages = keep

    world = make("hybrid-mtp")
    storage = HybridSnapshotStorage(world.deployment, world.resources, 4, 5, Watching())
    batch = METHODS[method][0]
    getattr(storage, method)(*batch, world.stream)
    assert len(given) == (6 if "pair" in method else len(batch))
    for array in given:
        assert any(np.shares_memory(array, memory) for memory in pinned)


def test_many_pending_batches_wait_for_the_oldest_instead_of_overwriting_it(make):
    world = make("recurrent")
    rows = [state.copy() for state in world.cache.recurrent_states]
    for number in range(50):
        world.storage.capture_recurrent([number % 4], [number % 3], world.stream)
    world.run()
    for slab, state in zip(world.storage.recurrent_slabs, rows, strict=True):
        assert slab.tobytes() == state[[48 % 3, 49 % 3, 46 % 3, 47 % 3]].tobytes()


def test_a_batch_larger_than_any_before_fits(make):
    """More pages than residents: one slot restored into every page of the pool."""
    world = make("hybrid")
    wanted = world.copies()
    borrow(world, wanted)
    for pool, slab in pools_of(world, wanted, "pool", "partial slab"):
        pool[:, :, :2] = slab[3, :, :2][:, None]
    world.storage.restore_partial([3] * 12, range(12), [2] * 12, world.stream)
    world.run()
    world.expect(wanted)


def test_a_drain_frees_the_staging(make):
    """After a proven drain even a buffer whose event was lost is free again; here: all eight, without any wait."""
    world = make("recurrent")

    class NoEvents(HostBackend):
        def record_event(self, stream):
            raise DeviceError("record_event", stream.name, "gone")

    storage = HybridSnapshotStorage(world.deployment, world.resources, 4, 0, NoEvents())
    for _ in range(8):
        with pytest.raises(DeviceError, match="record_event"):
            storage.zero_recurrent([0], world.stream)
    with pytest.raises(DeviceError, match="no buffer can be proven free"):
        storage.zero_recurrent([0], world.stream)
    world.run()
    storage.drained()
    with pytest.raises(DeviceError, match="record_event"):
        storage.zero_recurrent([0], world.stream)
    assert world.stream.pending == ("zero_rows",)


# ---- refusals --------------------------------------------------------------------------------------------------------

BAD_INDICES = [
    pytest.param([-1], "-1 is outside", id="negative"),
    pytest.param([1, 99], "99 is outside", id="too large"),
    pytest.param([2**70], "must be one dimension of integers", id="huge"),
    pytest.param([0.0], "must be one dimension of integers", id="float"),
    pytest.param([True], "must be one dimension of integers", id="bool"),
    pytest.param(["0"], "must be one dimension of integers", id="text"),
    pytest.param([None], "must be one dimension of integers", id="none"),
    pytest.param([[0]], "must be one dimension of integers", id="nested"),
    pytest.param([[0], [0, 1]], "must be a list or array of integers", id="ragged"),
    pytest.param(0, "must be a list or array of integers", id="one number"),
]
ARGUMENTS = [(method, position) for method, (batch, _) in METHODS.items() for position in range(len(batch))]


def refused(world, method, batch, words):
    before = world.bytes()
    with pytest.raises(ContractViolation, match=words) as caught:
        getattr(world.storage, method)(*batch, world.stream)
    assert str(caught.value).startswith(f"{method}: ")
    assert world.nothing_is_enqueued()
    assert world.bytes() == before


@pytest.mark.parametrize(("method", "position"), ARGUMENTS)
@pytest.mark.parametrize(("bad", "words"), BAD_INDICES)
def test_a_bad_argument_is_refused_and_enqueues_nothing(mtp, method, position, bad, words):
    batch = [list(values) for values in METHODS[method][0]]
    batch[position] = bad
    refused(mtp, method, batch, words)


@pytest.mark.parametrize(("method", "position"), [(m, p) for m, p in ARGUMENTS if len(METHODS[m][0]) > 1])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_unequal_lengths_are_refused(mtp, method, position, size):
    batch = [list(values) for values in METHODS[method][0]]
    batch[position] = [1, 2, 1][:size]
    refused(mtp, method, batch, "equally long")


@pytest.mark.parametrize(
    ("method", "position"), [(method, position) for method, (_, dests) in METHODS.items() for position in dests]
)
def test_a_destination_named_twice_is_refused(mtp, method, position):
    batch = [list(values) for values in METHODS[method][0]]
    batch[position] = [1, 1]
    refused(mtp, method, batch, "1 is written twice")


@pytest.mark.parametrize(
    ("method", "position", "limit"),
    [
        ("zero_recurrent", 0, 3),
        ("capture_recurrent", 0, 4),
        ("capture_recurrent", 1, 3),
        ("restore_recurrent", 0, 4),
        ("restore_recurrent", 1, 3),
        ("capture_partial", 0, 5),
        ("capture_partial", 1, 12),
        ("capture_partial", 2, 5),
        ("restore_partial", 1, 12),
        ("capture_partial_pair", 1, 12),
        ("capture_partial_pair", 2, 13),
        ("restore_partial_pair", 2, 13),
        ("restore_partial_pair", 3, 5),
    ],
)
def test_the_ends_of_a_range(mtp, method, position, limit):
    """The last number passes, the next does not: 3 residents, 4 and 5 slots, 12 and 13 pages, 4 tokens a page."""
    batch = [[values[0]] for values in METHODS[method][0]]
    batch[position] = [limit]
    refused(mtp, method, batch, f"{limit} is outside")
    batch[position] = [limit - 1]
    assert getattr(mtp.storage, method)(*batch, mtp.stream) is True


@pytest.mark.parametrize("method", [method for method in METHODS if "partial" in method])
def test_zero_tokens_are_no_partial_page(mtp, method):
    batch = [*METHODS[method][0][:-1], [1, 0]]
    refused(mtp, method, batch, r"number of tokens 0 is outside 1\.\.4")


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_asks_nothing_of_the_device(mtp, method):
    batch = [[] for _ in METHODS[method][0]]
    assert getattr(mtp.storage, method)(*batch, mtp.stream) is False
    assert mtp.nothing_is_enqueued()


@pytest.mark.parametrize(
    ("flavour", "method", "words"),
    [
        *(("recurrent", method, "has no pages") for method in METHODS if "partial" in method),
        *(("hybrid", method, "only an mtp deployment") for method in METHODS if "pair" in method),
    ],
)
def test_a_copy_that_the_deployment_has_no_memory_for_is_refused(make, flavour, method, words):
    refused(make(flavour), method, METHODS[method][0], words)


@pytest.mark.parametrize("flavour", ["hybrid", "recurrent"])
@pytest.mark.parametrize("method", ["capture_hidden", "restore_hidden"])
def test_hidden_rows_are_for_mtp_only(make, flavour, method):
    refused(make(flavour), method, [0, hidden(2, 6), 0], "only an mtp deployment saves hidden rows")


# ---- device errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(("method", "verbs"), [(method, 2 if "pair" in method else 1) for method in METHODS])
def test_a_device_error_passes_and_the_call_can_be_repeated(make, method, verbs, partly):
    """The index arrays of the part that was enqueued stay fenced: later uses must not overwrite them."""
    batch = METHODS[method][0]
    for number in range(1, verbs + 1):
        world, good = make("hybrid-mtp", partly=partly), make("hybrid-mtp")
        world.backend.arm(number)
        with pytest.raises(DeviceError):
            getattr(world.storage, method)(*batch, world.stream)
        enqueued = number - 1 + partly
        assert len(world.stream.pending) == enqueued
        getattr(world.storage, method)(*batch, world.stream)
        # The rest of the ring is taken and filled with other numbers while all of it is pending.
        for world_ in (world, good):
            if world_ is good:
                getattr(good.storage, method)(*batch, good.stream)
            for row in (2, 1, 0):
                world_.storage.capture_recurrent([3], [row], world_.stream)
            world_.run()
        world.expect(good.arrays())


# ---- construction ----------------------------------------------------------------------------------------------------


def construct(world, resources=None, recurrent=4, partial=5, deployment=None):
    return HybridSnapshotStorage(
        deployment or world.deployment, resources or world.resources, recurrent, partial, world.host
    )


def test_snapshots_need_a_recurrent_layer(deployment_of):
    host = HostBackend()
    deployment = deployment_of("vanilla")
    with pytest.raises(ContractViolation, match="at least one recurrent layer"):
        HybridSnapshotStorage(deployment, allocate_resources(deployment, 12, host), 1, 1, host)


@pytest.mark.parametrize(
    ("flavour", "recurrent", "partial", "words"),
    [
        ("hybrid", 0, 1, "recurrent_slots must be an integer of at least 1, got 0"),
        ("hybrid", -1, 1, "recurrent_slots .* got -1"),
        ("hybrid", True, 1, "recurrent_slots .* got True"),
        ("hybrid", 2**31, 1, "recurrent_slots"),
        ("hybrid", 1, 0, "partial_slots must be an integer of at least 1, got 0"),
        ("hybrid", 1, 1.0, "partial_slots .* got 1.0"),
        ("recurrent", 1, -1, "partial_slots .* got -1"),
        ("recurrent", 1, 1, "partial_slots must be 0, got 1"),
    ],
)
def test_slot_counts_that_make_no_sense_are_refused(make, flavour, recurrent, partial, words):
    with pytest.raises(ContractViolation, match=words):
        construct(make(flavour), recurrent=recurrent, partial=partial)


def wrong_tensors(tensor):
    """The same tensor with one fact wrong, and the words that name it."""
    bigger = np.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), tensor.dtype)
    spread = np.zeros((tensor.shape[0] * 2, *tensor.shape[1:]), tensor.dtype)[::2]
    return {
        "shape": (bigger, rf"shape \({tensor.shape[0]}, .* found \({tensor.shape[0] + 1}, "),
        "dtype": (np.zeros(tensor.shape, np.int64), f"dtype {tensor.dtype}, found int64"),
        "strides": (spread, rf"strides in bytes \({tensor.strides[0]}, .* found \({2 * tensor.strides[0]}, "),
        "none": (None, "found None"),
    }


@pytest.mark.parametrize("fact", ["shape", "dtype", "strides", "none"])
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("recurrent_states", "recurrent state of recurrent layer 0"),
        ("conv_states", "convolution state of recurrent layer 0"),
        ("kv_pools", "K/V pool of base attention layer 1"),
        ("draft", "K/V pool of draft attention layer 1"),
    ],
)
def test_a_live_tensor_that_is_not_what_the_deployment_says_is_refused(mtp, where, what, fact):
    """Copies go by shape, dtype and stride; a wrong one would scatter bytes over somebody else's state."""
    tensors = mtp.draft.kv_pools if where == "draft" else getattr(mtp.cache, where)
    index = int(what[-1])
    tensors[index], words = wrong_tensors(tensors[index])[fact]
    with pytest.raises(ContractViolation, match=words) as caught:
        construct(mtp)
    assert what in str(caught.value)
    assert "expected" in caught.value.facts


def test_a_tensor_of_another_size_is_refused(mtp):
    """Size in bytes is checked by itself: an array library may hand out less memory than the shape says."""

    class Short:
        def __init__(self, array):
            self.shape, self.dtype, self.strides, self.nbytes = array.shape, array.dtype, array.strides, 8

    mtp.cache.conv_states[0] = Short(mtp.cache.conv_states[0])
    with pytest.raises(ContractViolation, match="size in bytes 120, found 8"):
        construct(mtp)


@pytest.mark.parametrize("where", ["recurrent_states", "conv_states", "kv_pools"])
def test_a_missing_tensor_is_refused(mtp, where):
    getattr(mtp.cache, where).pop()
    with pytest.raises(ContractViolation, match=r"expected \d .*, found \d"):
        construct(mtp)


def test_resources_of_another_batch_size_are_refused(make, deployment_of):
    with pytest.raises(ContractViolation, match=r"shape \(2, 2, 3, 2\), found \(3, 2, 3, 2\)"):
        construct(make("hybrid-mtp"), deployment=deployment_of("hybrid-mtp", max_batch=2))


def test_mtp_needs_the_drafts_cache(mtp):
    with pytest.raises(ContractViolation, match="needs draft_cache"):
        construct(mtp, resources=attrs.evolve(mtp.resources, draft_cache=None, draft_page_table=None))


def test_no_copy_allocates_on_the_device(mtp):
    """Slabs are allocated once: their addresses never change, and nothing is allocated later."""
    before = {name: array.ctypes.data for name, array in mtp.arrays().items()}
    mtp.host.array = None
    for method, (batch, _) in METHODS.items():
        getattr(mtp.storage, method)(*batch, mtp.stream)
    mtp.run()
    assert {name: array.ctypes.data for name, array in mtp.arrays().items()} == before
