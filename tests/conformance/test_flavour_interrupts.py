"""What must not be lost when a call of a speculative or checkpointing request is interrupted, runs out of memory or is
misused: pages of both models, snapshot slots, hits, frozen endpoints.

Pools, headroom and rows are those of the flavour harness; page size 4.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from context_cache.coordinator import ContextCacheManager, HashChain
from context_cache.coordinator import stepping as stepping_module
from context_cache.coordinator.calls import captures as captures_module
from context_cache.coordinator.core import Core
from context_cache.coordinator.rows import Rows
from context_cache.coordinator.testing import check_invariants

EIGHT = [41, 42, 43, 44, 45, 46, 47, 48]
OTHER = [71, 72, 73, 74, 75, 76, 77, 78]
PLAIN_CHECKPOINTS = ["hybrid", "recurrent"]
WHEN = [pytest.param(False, id="before"), pytest.param(True, id="after")]


@contextmanager
def raising(owner, name, error, *, number=1, late=False):
    """Call number ``number`` of ``owner.name`` raises; late: after its work."""
    real, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(name)
        if len(calls) != number:
            return real(*arguments, **options)
        if late:
            real(*arguments, **options)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield
    assert len(calls) >= number, f"{name} was called {len(calls)} times"


def both(h):
    """Pins and free resources of every pool, whatever the order of the free lists."""
    return h.held(), {kind: sorted(h.free(kind)) for kind in h.KINDS}


def healthy(h):
    check_invariants(h.coordinator)
    h.check()


def prefilling(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def frozen(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    assert handle.state == "prefill_frozen"
    return handle


def settled(h, tokens, resident=0):
    handle = h.begin(tokens, resident)
    h.run_prefill(handle)
    if h.freezes(handle):
        h.decode(handle, None)
    assert handle.state == "settled"
    return handle


def warm_prefilling(h, T, length=8):
    """Beside nobody else: a hit of 5 tokens, its snapshot pinned."""
    if h.mtp:
        producer = prefilling(h, T(5))
        assert h.publish_mtp(producer, 5) is h.OK
        assert h.finalize(producer) is h.OK
    else:
        producer = settled(h, T(5))
    assert h.finish(producer) is h.OK
    handle = prefilling(h, T(length))
    assert h.starts == [5]
    assert h.hit_slots(handle)[0] is not None
    return handle


# ---- what a step may claim of the draft ------------------------------------------------------------------------------


@pytest.mark.parametrize("completed", [[], [0]], ids=["goes on", "completed"])
def test_a_common_length_beyond_the_draft_pages_is_refused(flavour, T, completed):
    e = flavour("eagle")
    handle = e.begin(T(7), headroom=(8, 1))
    assert (len(e.pages(handle)), len(e.draft_pages(handle))) == (4, 2)
    e.run_prefill(handle)
    assert e.prepare_decode(handle, (8, 1)).status is e.OK
    e.synchronize()
    for common in (15, 9):
        error = e.refuses(lambda common=common: e.complete(handle, EIGHT, completed=completed, common=[common]))
        assert "draft pages" in str(error)
    assert handle.state == "decoding_frozen"
    assert e.complete(handle, EIGHT, completed=completed, common=[8]) is e.OK
    assert (e.committed(handle), e.common(handle)) == (15, 8)
    healthy(e)
    e.end_everything()


@pytest.mark.parametrize("completed", [[], [0]], ids=["goes on", "completed"])
def test_a_settled_request_may_not_claim_beyond_its_draft_pages_either(flavour, T, completed):
    e = flavour("eagle")
    handle = e.begin(T(7), headroom=(8, 1))
    e.run_prefill(handle)
    e.decode(handle, None, headroom=(8, 1))
    assert handle.state == "settled"
    assert e.prepare_decode(handle, (8, 1)).status is e.OK
    e.synchronize()
    e.refuses(lambda: e.complete(handle, EIGHT, completed=completed, common=[15]))
    assert e.complete(handle, EIGHT, completed=completed, common=[7]) is e.OK
    healthy(e)
    e.end_everything()


@pytest.mark.parametrize("completed", [[], [0]], ids=["goes on", "completed"])
def test_a_committed_length_beyond_the_draft_pages_of_mtp_is_refused(flavour, T, completed):
    m = flavour("hybrid-mtp")
    handle = m.begin(T(7), headroom=(8, 1))
    assert (len(m.pages(handle)), len(m.draft_pages(handle))) == (4, 2)
    m.run_prefill(handle)
    assert m.prepare_decode(handle, (8, 1)).status is m.OK
    m.synchronize()
    for tokens in (EIGHT, EIGHT[:2]):
        error = m.refuses(lambda tokens=tokens: m.complete(handle, tokens, completed=completed))
        assert "draft pages" in str(error)
    assert m.complete(handle, EIGHT[:1], completed=completed) is m.OK
    assert m.committed(handle) == 8
    healthy(m)
    m.end_everything()


# ---- a half-ended request publishes only its own ---------------------------------------------------------------------


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["eagle", "draft", "shared-kv"])
def test_a_finish_that_goes_on_publishes_nothing_of_who_took_the_freed_slot(flavour, T, publishing, name, number, late):
    h = flavour(name)
    handle = h.begin_batch([T(8), [51, 52, 53, 54]])
    h.run_prefill(handle)
    publishing.fail(1, 2)
    with pytest.raises(RuntimeError, match="publish"):
        h.begin_compaction(handle, [-1, -1])
    assert handle.state == "settled_frozen"
    publishing.fail()
    interrupt = raising(ContextCacheManager, "release", KeyboardInterrupt, number=number, late=late)
    with interrupt, pytest.raises(KeyboardInterrupt):
        h.finish(handle)
    assert handle.state == "settled_frozen"
    own = h.record_ids()
    gone = 2 - len(h.coordinator.inspect(handle.id).residents)
    assert gone == number - 1, "a slot whose lease was returned, but not noted as such, still belongs to the request"

    others = [frozen(h, OTHER, slot) for slot in range(gone)]
    attempts = h.metrics()["publication_attempts"]
    assert h.finish(handle) is h.OK
    assert handle.state == "released"
    assert set(h.record_ids()) == set(own)
    assert h.metrics()["publication_attempts"] == attempts, "everything of its own was published by the first finish"
    for other in others:
        assert other.state == "prefill_frozen"
        assert h.seq(other).published_full_block_count == 0
    healthy(h)
    for other in others:
        h.decode(other, [41, 42])
        assert h.seq(other).published_full_block_count == 2, "published by its own verification"
        assert len(h.record_ids()) == len(own) + 1
    h.end_everything()


# ---- no memory between a reservation and the row that retires it -----------------------------------------------------


def capturing(h, T):
    """Two sequences prefilled, so that two reservations are at stake."""
    handle = h.begin_batch([T(5), [51, 52, 53]])
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.synchronize()
    return handle


def out_of_memory(h, call, owner, name, number=1, late=False):
    """The call raises MemoryError and, but for the order of free lists, nothing has changed; then it works."""
    before, metrics, log, drains = both(h), h.metrics(), list(h.recording.log), h.sync.calls
    states = [(handle.id, str(handle.state)) for handle in h.handles]
    with raising(owner, name, MemoryError(name), number=number, late=late), pytest.raises(MemoryError):
        call()
    assert both(h) == before
    assert [(handle.id, str(handle.state)) for handle in h.handles] == states
    assert (list(h.recording.log), h.sync.calls) == (log, drains), "nothing was enqueued or drained"
    assert h.metrics()["publication_attempts"] == metrics["publication_attempts"]
    assert all(h.captured(handle, slot) == "none" for handle in h.handles for slot in range(h.size(handle)))
    healthy(h)
    assert call() is h.OK


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize(
    ("owner", "place"),
    [(captures_module, "_copies"), (captures_module, "Captures"), (stepping_module, "EnqueueCapturesCall")],
    ids=["copies", "captures", "call"],
)
@pytest.mark.parametrize("name", PLAIN_CHECKPOINTS)
def test_captures_that_memory_did_not_suffice_for_reserve_nothing(flavour, T, name, owner, place, late):
    h = flavour(name)
    handle = capturing(h, T)
    out_of_memory(h, lambda: h.coordinator.enqueue_prefill_captures(handle), owner, place, late=late)
    assert [h.captured(handle, slot) for slot in (0, 1)] == ["captured", "captured"]
    assert h.finalize(handle) is h.OK
    assert len(h.record_ids()) == 2
    healthy(h)
    h.end_everything()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", PLAIN_CHECKPOINTS)
def test_a_reservation_that_raises_gives_back_those_before_it(flavour, T, name, number):
    h = flavour(name)
    handle = capturing(h, T)
    out_of_memory(
        h,
        lambda: h.coordinator.enqueue_prefill_captures(handle),
        ContextCacheManager,
        "reserve_snapshots",
        number,
    )
    h.end_everything()


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize(
    ("owner", "place"),
    [(captures_module, "_copies"), (stepping_module, "CompletionCall")],
    ids=["copies", "call"],
)
@pytest.mark.parametrize("name", PLAIN_CHECKPOINTS)
def test_a_completion_that_memory_did_not_suffice_for_reserves_nothing(flavour, T, name, owner, place, late):
    h = flavour(name)
    handle = h.begin_batch([T(5), [51, 52, 53]])
    h.run_prefill(handle)
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    out_of_memory(h, lambda: h.complete(handle, 902, 903, completed=[0, 1]), owner, place, late=late)
    assert [h.committed(handle, slot) for slot in (0, 1)] == [6, 4]
    assert sorted(h.record(i)["length"] for i in h.record_ids()) == [3, 4, 5, 6]
    healthy(h)
    h.end_everything()


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize(
    ("owner", "place"),
    [(captures_module, "_copies"), (captures_module, "HiddenCopy"), (stepping_module, "MtpCall")],
    ids=["copies", "hidden copy", "call"],
)
def test_an_mtp_endpoint_that_memory_did_not_suffice_for_reserves_nothing(flavour, T, owner, place, late):
    m = flavour("hybrid-mtp")
    handle = prefilling(m, T(5))
    out_of_memory(m, lambda: m.publish_mtp(handle, 5), owner, place, late=late)
    assert [m.record(i)["length"] for i in m.record_ids()] == [5]
    healthy(m)
    m.end_everything()


@pytest.mark.parametrize("place", ["_copies", "MtpCall"])
def test_an_mtp_endpoint_behind_a_hit_that_memory_did_not_suffice_for_reserves_nothing(flavour, T, place):
    """The hit may be given up by then; a reservation must not stay."""
    m = flavour("hybrid-mtp")
    handle = warm_prefilling(m, T)
    owner = captures_module if place == "_copies" else stepping_module
    with raising(owner, place, MemoryError), pytest.raises(MemoryError):
        m.publish_mtp(handle, 8)
    assert handle.state == "prefilling"
    hit = m.hit_slots(handle)
    assert m.held()[m.RECURRENT] == ({} if hit[0] is None else {hit[0]: 1})
    healthy(m)
    assert m.publish_mtp(handle, 8) is m.OK
    assert sorted(m.record(i)["length"] for i in m.record_ids()) == [5, 8]
    m.end_everything()


# ---- rows that are interrupted while they grow -----------------------------------------------------------------------


GROWING = {
    "vanilla": (lambda h, T: settled(h, T(5)), (4, 0), "decode_retry"),
    "eagle": (lambda h, T: settled(h, T(8)), (5, 5), "decode_retry"),
    "eagle, frozen": (lambda h, T: frozen(h, T(8)), (5, 5), "decode_retry_frozen"),
    "hybrid-mtp": (lambda h, T: settled(h, T(5)), (8, 8), "decode_retry"),
}
INTERRUPTED = [
    pytest.param(case, method, id=f"{case}-{method}")
    for case in GROWING
    for method in ("extend_base", "extend_draft")
    if not (case == "vanilla" and method == "extend_draft")
]


def interrupted_growth(flavour, T, case, method, late):
    setup, headroom, retry = GROWING[case]
    h = flavour(case.split(",")[0])
    handle = setup(h, T)
    before = len(h.pages(handle))
    with raising(Rows, method, KeyboardInterrupt, late=late), pytest.raises(KeyboardInterrupt):
        h.prepare_decode(handle, headroom)
    assert handle.state == retry
    assert len(h.pages(handle)) == before + 1
    assert h.coordinator.execution_holder == handle.id
    return h, handle, headroom


def rows_are_the_leases(h, handle):
    for slot in range(h.size(handle)):
        resident = h.seq(handle, slot).resident.slot
        assert [page for page in h.row(resident) if page >= 0] == h.pages(handle, slot)
        assert [page for page in h.draft_row(resident) if page >= 0] == h.draft_pages(handle, slot)
        assert h.device_row(resident) == h.row(resident)
        assert h.device_draft_row(resident) == h.draft_row(resident)


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize(("case", "method"), INTERRUPTED)
def test_rows_interrupted_while_they_grow_are_whole_after_the_next_preparation(flavour, T, case, method, late):
    h, handle, headroom = interrupted_growth(flavour, T, case, method, late)
    pages = h.pages(handle), h.draft_pages(handle)
    assert h.prepare_decode(handle, headroom).status is h.OK
    assert (h.pages(handle), h.draft_pages(handle)) == pages, "the pages that it got are used, no others are taken"
    rows_are_the_leases(h, handle)
    healthy(h)
    h.synchronize()
    assert h.complete(handle, 902) is h.OK
    healthy(h)
    h.check_device_rows()
    h.end_everything()


@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize(("case", "method"), INTERRUPTED)
def test_catching_up_may_be_interrupted_too(flavour, T, case, method, late):
    h, handle, headroom = interrupted_growth(flavour, T, case, "extend_base", False)
    state = str(handle.state)
    with raising(Rows, method, KeyboardInterrupt, late=late), pytest.raises(KeyboardInterrupt):
        h.prepare_decode(handle, headroom)
    assert handle.state == state
    assert h.prepare_decode(handle, headroom).status is h.OK
    rows_are_the_leases(h, handle)
    healthy(h)
    h.end_everything()


@pytest.mark.parametrize("end", ["finish", "drop", "too much"])
@pytest.mark.parametrize(("case", "method"), INTERRUPTED)
def test_a_request_whose_rows_were_interrupted_ends(flavour, T, case, method, end):
    h, handle, _ = interrupted_growth(flavour, T, case, method, False)
    if end == "too much":
        assert h.prepare_decode(handle, 13 if h.paired(handle) else (13, 0)).status is h.REQUEST_FAILED
        assert str(handle.state).startswith("finishing_retry")
        healthy(h)
    if end == "drop":
        h.drop(handle)
    else:
        assert h.finish(handle) is h.OK
    assert h.held() == {kind: {} for kind in h.KINDS}
    healthy(h)
    h.end_everything()


@pytest.mark.parametrize("method", ["extend_base", "extend_draft"])
def test_all_rows_of_a_batch_are_whole_after_an_interrupt(flavour, T, method):
    e = flavour("eagle")
    handle = e.begin_batch([T(8), [51, 52, 53, 54]])
    e.run_prefill(handle)
    with raising(Rows, method, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        e.prepare_decode(handle, (5, 5))
    assert e.prepare_decode(handle, (5, 5)).status is e.OK
    rows_are_the_leases(e, handle)
    healthy(e)
    e.synchronize()
    assert e.complete(handle, [41], [42]) is e.OK
    e.end_everything()


# ---- the hit of an MTP sequence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("method", ["extend_to", "exact_digest"])
def test_a_digest_that_raises_keeps_the_hit(flavour, T, method, error):
    m = flavour("hybrid-mtp")
    handle = warm_prefilling(m, T, 7)
    hit, before = m.hit_slots(handle), m.dump()
    with raising(HashChain, method, error), pytest.raises(error):
        m.publish_mtp(handle, 7)
    assert m.hit_slots(handle) == hit
    assert m.dump() == before
    healthy(m)
    assert m.restore_mtp(handle) is m.OK
    assert m.publish_mtp(handle, 7) is m.OK
    assert m.hit_slots(handle) == (None, None)
    healthy(m)
    m.end_everything()


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_boundary_before_the_start_of_the_sequence_is_refused(flavour, T, length):
    """The state of then was never in the resident row."""
    m = flavour("hybrid-mtp")
    handle = warm_prefilling(m, T)
    error = m.refuses(m.publish_mtp, handle, length)
    assert f"at {length} tokens" in str(error)
    assert "token 5" in str(error)
    assert m.hit_slots(handle)[0] is not None
    assert m.publish_mtp(handle, 8) is m.OK
    healthy(m)
    m.end_everything()


def unfit(m, form):
    """Tensors that a hidden row cannot be written to."""
    if form == "read-only":
        tensor = m.hidden()
        tensor.flags.writeable = False
        return tensor
    if form == "read-only, by slot":
        tensor = m.backend.array((1, 4, 8), "float16")
        tensor.flags.writeable = False
        return tensor
    if form == "every other row":
        return m.backend.array((8, 8), "float16")[::2]
    if form == "every other column":
        return m.backend.array((4, 16), "float16")[:, ::2]
    return m.backend.array((1, 8, 8), "float16")[:, ::2]


FORMS = ["read-only", "read-only, by slot", "every other row", "every other column", "every other row, by slot"]


@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_row_is_not_restored_into_a_tensor_that_cannot_take_it(flavour, T, form, request):
    if form.startswith("read-only"):
        request.getfixturevalue("late_stream")  # device arrays of a GPU are never read-only
    m = flavour("hybrid-mtp")
    handle = warm_prefilling(m, T)
    m.refuses(m.restore_mtp, handle, unfit(m, form))
    assert m.restore_mtp(handle) is m.OK
    m.end_everything()


@pytest.mark.parametrize("form", FORMS[2:])
def test_a_hidden_row_is_not_captured_from_a_tensor_with_gaps(flavour, T, form):
    m = flavour("hybrid-mtp")
    handle = warm_prefilling(m, T)
    m.refuses(m.publish_mtp, handle, 8, unfit(m, form))
    assert m.publish_mtp(handle, 8) is m.OK
    m.end_everything()


def test_a_hidden_row_may_be_captured_from_a_read_only_tensor(late_stream, flavour, T):
    m = flavour("hybrid-mtp")
    assert m.publish_mtp(prefilling(m, T(5)), 5, unfit(m, "read-only")) is m.OK
    m.end_everything()


# ---- a prefill that is interrupted while it is finalised -------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "no captures"])
@pytest.mark.parametrize("late", WHEN)
@pytest.mark.parametrize("end", ["finish", "drop"])
@pytest.mark.parametrize("name", [*PLAIN_CHECKPOINTS, "hybrid-mtp"])
def test_a_prefill_interrupted_while_its_hit_is_given_up_is_not_finalised_twice(flavour, T, name, end, late, captured):
    h = flavour(name)
    handle = warm_prefilling(h, T)
    if captured:
        h.capture(handle)
        h.synchronize()
    records = h.record_ids()
    interrupt = raising(ContextCacheManager, "release_restored_snapshots", KeyboardInterrupt, late=late)
    with interrupt, pytest.raises(KeyboardInterrupt):
        h.finalize(handle)
    assert handle.valid
    # As the first time, and as if the lookahead token were a part of the input.
    for advances in ([h.advance(901, 8)], [h.advance(902, 9)]):
        error = h.refuses(h.coordinator.finalize_prefill_publication, handle, advances)
        assert "interrupted" in str(error)
    healthy(h)
    if end == "finish":
        assert h.finish(handle) is h.OK
    else:
        h.drop(handle)
    assert handle.state == "released"
    assert h.held() == {kind: {} for kind in h.KINDS}
    assert h.record_ids() == records
    healthy(h)
    h.end_everything()


# ---- common lengths of the wrong form --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "common", [np.array(8), np.array(8, np.int32), np.int32(8), 8], ids=["0-d", "int32", "np", "int"]
)
@pytest.mark.parametrize("name", ["vanilla", "shared-kv", "eagle", "draft", "hybrid", "recurrent", "hybrid-mtp"])
def test_common_lengths_are_one_dimension(flavour, T, name, common):
    h = flavour(name)
    handle = prefilling(h, T(8))
    h.refuses(h.finalize, handle, 901, common)
    assert h.finalize(handle) is h.OK
    assert h.prepare_decode(handle).status is h.OK
    h.synchronize()
    h.refuses(lambda: h.complete(handle, 902, common=common))
    assert h.complete(handle, 902) is h.OK
    h.end_everything()


# ---- an interrupt behind a mapping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["compact", "finish", "drop"])
@pytest.mark.parametrize("survivors", [[-1, 0], [-1, -1]], ids=["one stays", "nobody stays"])
@pytest.mark.parametrize("name", ["vanilla", "eagle", "shared-kv", "hybrid", "recurrent"])
def test_a_compaction_interrupted_right_behind_its_beginning_goes_on_or_ends(flavour, T, name, survivors, end):
    """The mapping is on the stream and the state is taken, but the caller never heard of it."""
    h = flavour(name)
    handle = h.begin_batch([T(5), [51, 52, 53]])
    h.run_prefill(handle)
    if h.freezes(handle):
        h.decode(handle, None, None)
    with raising(Core, "fire", KeyboardInterrupt, late=True), pytest.raises(KeyboardInterrupt):
        h.begin_compaction(handle, survivors)
    assert handle.state == "compacting"
    healthy(h)
    if end == "compact":
        assert h.coordinator.compact_batch(handle) is h.OK
        assert handle.state == ("settled" if survivors[1] == 0 else "finishing")
        healthy(h)
    if end == "drop":
        h.drop(handle)
    else:
        assert h.finish(handle) is h.OK
    assert handle.state == "released"
    assert h.held() == {kind: {} for kind in h.KINDS}
    healthy(h)
    h.end_everything()


@pytest.mark.parametrize("end", ["finish", "drop"])
@pytest.mark.parametrize("name", ["vanilla", "eagle", "shared-kv", "hybrid", "recurrent", "hybrid-mtp"])
def test_a_compaction_interrupted_right_behind_the_copy_of_its_mapping_ends(flavour, T, name, end):
    h = flavour(name)
    handle = settled(h, T(5))
    device = h.coordinator._core.device
    with raising(type(device), "copy_mapping", KeyboardInterrupt, late=True), pytest.raises(KeyboardInterrupt):
        h.begin_compaction(handle, [-1])
    assert handle.state == "broken"
    assert h.coordinator.execution_holder is None
    healthy(h)
    h.refuses(h.coordinator.compact_batch, handle)
    if end == "finish":
        assert h.finish(handle) is h.OK
    else:
        h.drop(handle)
    assert handle.state == "released"
    healthy(h)
    h.end_everything()


# ---- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "draft", "shared-kv"])
def test_an_attempt_to_publish_a_pair_is_counted_also_when_it_raises(flavour, T, publishing, name):
    h = flavour(name)
    handle = frozen(h, T(8))
    publishing.fail(1)
    with pytest.raises(RuntimeError, match="publish"):
        h.begin_compaction(handle, [-1])
    assert h.metrics()["spec_pair_publications"] == 1
    assert h.record_ids() == []
    assert h.finish(handle) is h.OK
    assert h.metrics()["spec_pair_publications"] == 2
    assert len(h.record_ids()) == 1
    h.end_everything()
