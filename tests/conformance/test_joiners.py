"""Scenarios 74 to 85b: several handles at once, live admission, resident rows, execution token and length view."""

from __future__ import annotations

import pytest

from context_cache.backends import DeviceError
from context_cache.coordinator import ContextCacheSequenceAdvance, ContractViolation, ResidentRef, ResidentSlotPool

B_TOKENS = [51, 52, 53, 54, 55]
JOINER = [1, 2, 3, 4, 5, 6, 7, 8, 701]


def advance(token, committed):
    return ContextCacheSequenceAdvance(accepted_token_ids=(token,), committed_state_length=committed)


def founder_of_eight(h, T):
    handle = h.begin(T(8))
    assert h.pages(handle) == [0, 1, 2]
    h.run_prefill(handle)
    assert h.records() == {1: [0, 1]}
    return handle


def with_joiner(h, T, resident=2):
    """Scenario 78 up to the admission: a founder T(8) on row 0, a joiner on row 2."""
    handle = founder_of_eight(h, T)
    result = h.admit(handle, JOINER, resident)
    assert result.status is h.OK
    assert result.prefill_start == 8
    return handle


# ---- overlapping leases ------------------------------------------------------------


def test_two_requests_hold_leases_at_the_same_time(h, T):
    """Scenario 74. A publishes while B is only admitted."""
    a = h.begin(T(5), 0)
    b = h.begin(B_TOKENS, 1)
    assert (h.pages(a), h.pages(b)) == ([0, 1], [2, 3])
    h.run_prefill(a)
    h.decode(a, 902, completed=[0])
    assert h.records() == {1: [0]}
    assert h.finish(a) is h.OK
    assert b.state == "admitted"
    h.run_prefill(b)
    assert h.finish(b) is h.OK
    assert h.records() == {1: [0], 2: [2]}
    h.end_everything()


def test_dropping_admitted_handles_touches_no_device(h, T):
    """Scenario 75."""
    a = h.begin(T(5), 0)
    b = h.begin(B_TOKENS, 1)
    h.mark()
    h.drop(a)
    h.drop(b)
    assert h.log == []
    assert h.sync.calls == 0
    assert sorted(h.free()) == list(range(12))
    assert h.coordinator.shutdown() is h.OK


def test_rows_follow_the_resident_slot_and_lengths_the_logical_one(h, T):
    """Scenario 76."""
    handle = h.begin(T(5), ResidentRef(2, 7))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    assert h.row(2) == [0, 1, -1, -1]
    assert h.device_row(2) == [0, 1, -1, -1]
    assert [h.device_row(slot) for slot in (0, 1)] == [[-1] * 4] * 2
    assert h.device_lengths(1) == [0]
    assert h.cache_manager.active_batch_size == 1
    assert (h.seq(handle).resident.slot, h.seq(handle).resident.epoch) == (2, 7)


@pytest.mark.parametrize(
    "resident",
    [ResidentRef(3, 1), ResidentRef(-1, 1), ResidentRef(0, 0)],
    ids=["beyond the batch", "negative", "epoch 0"],
)
def test_a_bad_resident_holds_nothing(h, T, resident):
    """Scenario 77."""
    h.refuses(h.try_begin, [h.sequence_admission(T(5), resident)])
    h.refuses(h.try_begin, [h.sequence_admission(T(5), ResidentRef(1, 1)), h.sequence_admission(T(6), resident)])


def test_one_slot_twice_in_a_batch_holds_nothing(h, T):
    """Scenario 77."""
    for epoch in (1, 2):
        twice = [h.sequence_admission(T(5), ResidentRef(1, 1)), h.sequence_admission(T(6), ResidentRef(1, epoch))]
        h.refuses(h.try_begin, twice)


def test_a_slot_of_another_live_request_is_refused(h, T):
    """Scenario 77, live holder: admitted, then prefilling, then settled."""
    a = h.begin(T(5), 1)
    h.refuses(h.try_begin, [h.sequence_admission(B_TOKENS, ResidentRef(1, 99))])
    assert h.coordinator.prepare_prefill(a) is h.OK
    h.refuses(h.try_begin, [h.sequence_admission(B_TOKENS, ResidentRef(1, 99))])
    h.synchronize()
    assert h.coordinator.finalize_prefill_publication(a, [advance(901, 5)]) is h.OK
    h.refuses(h.try_begin, [h.sequence_admission(B_TOKENS, ResidentRef(1, 99))])
    h.refuses(h.admit, a, B_TOKENS, ResidentRef(1, 99))
    assert h.finish(a) is h.OK
    b = h.begin(B_TOKENS, ResidentRef(1, 99))
    assert h.seq(b).resident.epoch == 99


def test_a_slot_of_a_quarantined_or_poisoned_request_is_refused(h, T):
    """Scenario 77, withheld holder: seen by a joiner that was asked for before the coordinator knew of the poison.

    Under poison an admission answers POISONED before residents are looked at, so what is tested is that neither answer
    hands the row out.
    """
    a = h.begin(T(5), 0)
    h.run_prefill(a)
    h.poison(1)
    before = h.dump()
    assert h.admit(a, B_TOKENS, ResidentRef(1, 99)).status is h.POISONED
    assert h.try_begin([h.sequence_admission(B_TOKENS, ResidentRef(1, 99))]).status is h.POISONED
    h.sync.fail = True
    assert h.coordinator.shutdown() is h.POISONED
    h.sync.fail = False
    assert h.admit(a, B_TOKENS, ResidentRef(1, 99)).status is h.POISONED
    assert h.dump()["manager"] == before["manager"]


# ---- a joiner ------------------------------------------------------------


def test_a_joiner_shares_the_prefix_of_its_founder(h, T):
    """Scenario 78."""
    handle = founder_of_eight(h, T)
    h.mark()
    result = h.admit(handle, JOINER, 2)
    assert (result.status, result.insufficient_capacity, result.prefill_start) == (h.OK, False, 8)
    assert h.log == ["upload_rows"]
    assert h.row(2) == [0, 1, 3, -1]
    assert h.row(0) == [0, 1, 2, -1]
    assert h.device_row(2) == [0, 1, 3, -1]
    assert h.all_active() == {0: 2, 1: 2, 2: 1, 3: 1}
    assert handle.state == "seating"
    assert h.coordinator.execution_holder == handle.id

    h.seat(2)
    before = h.metrics()
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    after = h.metrics()
    assert after["existing_publications"] - before["existing_publications"] == 1
    assert after["committed_publications"] == before["committed_publications"]
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.seq(handle, 1).token_ids.tolist() == [*JOINER, 702]

    h.decode(handle, 903, 703)
    assert [h.committed(handle, slot) for slot in (0, 1)] == [9, 10]


def test_only_the_row_of_the_joiner_is_uploaded(h, T):
    """Scenario 78: a marker behind the table's back in the founder's row survives the admission."""
    handle = founder_of_eight(h, T)
    h.synchronize()
    h.table.device_array[0, 0, 3] = 77
    assert h.admit(handle, JOINER, 2).status is h.OK
    assert h.device_row(0) == [0, 1, 2, 77]


def test_the_admission_of_a_joiner_is_counted_once_it_is_bound(h, T):
    """Scenario 78, metrics (40.4, 40.5)."""
    handle = founder_of_eight(h, T)
    before = h.metrics()
    assert h.admit(handle, JOINER, 2).status is h.OK
    after = h.metrics()
    for name, more in {"admitted_sequences": 1, "hit_sequences": 1, "matched_tokens": 8, "reused_tokens": 8}.items():
        assert after[name] - before[name] == more, name


@pytest.mark.parametrize(
    "wrong",
    [
        ContextCacheSequenceAdvance((702,), 8),
        ContextCacheSequenceAdvance((702,), 10),
        ContextCacheSequenceAdvance((), 9),
        ContextCacheSequenceAdvance((702, 703), 9),
        ContextCacheSequenceAdvance((), -1),
    ],
)
def test_a_joiner_is_finalised_with_one_token_and_its_full_length(h, T, wrong):
    """Scenario 78, the refused forms (40.6)."""
    handle = with_joiner(h, T)
    finalize = h.coordinator.finalize_sequence_admission
    h.refuses(finalize, handle, 1, wrong)
    h.refuses(finalize, handle, 0, advance(702, 9))
    h.refuses(finalize, handle, 2, advance(702, 9))
    assert finalize(handle, 1, advance(702, 9)) is h.OK
    h.refuses(finalize, handle, 1, advance(703, 10))


def test_the_founder_may_leave_first(h, T):
    """Scenario 79."""
    handle = with_joiner(h, T)
    h.seat(2)
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    h.compact(handle, [-1, 0])
    assert handle.state == "settled"
    assert h.row(0) == [-1] * 4
    assert h.device_row(0) == [-1] * 4
    assert h.active(2) == 0
    assert 2 in h.free()
    assert [(h.active(page), h.cached(page)) for page in (0, 1)] == [(1, 1), (1, 1)]
    assert h.row(2) == [0, 1, 3, -1]
    assert h.seq(handle, 0).resident.slot == 2
    h.decode(handle, 703)
    assert h.committed(handle, 0) == 10
    assert h.pages(handle, 0) == [0, 1, 3]


def test_a_joiner_may_be_retracted(h, T):
    """Scenario 80. Drain, then the row, then the page; a second retract is refused without poison."""
    slots = ResidentSlotPool(3)
    founder_ref, _, joiner_ref = slots.acquire(), slots.acquire(), slots.acquire()
    handle = h.begin(T(8), founder_ref)
    h.run_prefill(handle)
    assert h.admit(handle, JOINER, joiner_ref).status is h.OK
    row = joiner_ref.slot
    assert row == 2
    seen = []
    h.sync.before = lambda: seen.append((h.row(row), h.active(3)))
    h.mark()
    assert h.coordinator.retract_sequence_admission(handle) is True
    assert h.log == ["drain", "upload_rows"]
    assert seen == [([0, 1, 3, -1], 1)], "the row and the page are untouched until the device is done"
    assert h.row(row) == h.device_row(row) == [-1] * 4
    assert h.active(3) == 0
    assert h.all_active() == {0: 1, 1: 1, 2: 1}
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.cache_manager.active_batch_size == 1
    assert h.metrics()["retracted_sequences"] == 1

    before, calls = h.dump(), h.sync.calls
    assert h.coordinator.retract_sequence_admission(handle) is False
    assert h.dump() == before
    assert h.sync.calls == calls
    assert h.coordinator.state == "serving"

    h.decode(handle, 903)
    assert slots.release(joiner_ref)
    again = slots.acquire()
    assert again.slot == row
    assert again.epoch > joiner_ref.epoch
    assert h.admit(handle, JOINER, again).status is h.OK
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK


@pytest.mark.parametrize("state", ["admitted", "prefilling", "settled", "decoding", "compacting", "finalised joiner"])
def test_there_is_nothing_to_retract(h, T, state):
    """Scenario 80, the refused half: False, no poison, nothing changed."""
    if state == "finalised joiner":
        handle = with_joiner(h, T)
        assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    else:
        handle = h.begin(T(5))
        if state == "prefilling":
            assert h.coordinator.prepare_prefill(handle) is h.OK
        elif state != "admitted":
            h.run_prefill(handle)
            if state == "decoding":
                assert h.prepare_decode(handle).status is h.OK
            elif state == "compacting":
                assert h.begin_compaction(handle, [0]) is h.OK
    before, verbs = h.dump(), list(h.recording.log)
    assert h.coordinator.retract_sequence_admission(handle) is False
    assert h.dump() == before
    assert list(h.recording.log) == verbs


def test_the_only_sequence_cannot_be_retracted(h, T):
    """Scenario 80, 40.7: a joiner that is the only sequence stays; a refusal is harmless, it never poisons (D4)."""
    handle = with_joiner(h, T)
    h.seat(2)
    h.compact(handle, [-1, 0])
    assert handle.state == "seating"
    before = h.dump()
    assert h.coordinator.retract_sequence_admission(handle) is False
    assert h.coordinator.state == "serving"
    assert h.dump() == before
    h.end_everything()


def test_no_capacity_for_a_joiner_changes_nothing(harness, T):
    """Scenario 81. The batch decodes on, and the same admission succeeds once pages are free."""
    h = harness(pages=12, max_batch=4, enforce_min_pool=False)
    bystander = h.begin(T(13), 0)
    assert h.pages(bystander) == [0, 1, 2, 3]
    batch = h.begin_batch([T(15), T(14)], [1, 2])
    assert [h.pages(batch, slot) for slot in (0, 1)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    h.run_prefill(batch)
    foreign = list(range(601, 616))
    before = h.dump()
    h.mark()
    result = h.admit(batch, foreign, 3)
    assert (result.status, result.insufficient_capacity, result.prefill_start) == (h.REQUEST_FAILED, True, 0)
    assert h.dump() == before
    assert h.log == []
    h.decode(batch, 903, 904)

    h.drop(bystander)
    result = h.admit(batch, foreign, 3)
    assert (result.status, result.insufficient_capacity, result.prefill_start) == (h.OK, False, 0)
    assert h.pages(batch, 2) == [0, 1, 2, 3]


def test_a_joiner_that_is_never_finalised_holds_and_leaves_by_compaction(h, T):
    """Scenario 82."""
    handle = with_joiner(h, T)
    h.seat(2)
    attempts = h.metrics()["publication_attempts"]
    for step, token in enumerate((903, 904), start=9):
        assert h.prepare_decode(handle).status is h.OK
        complete = h.coordinator.complete_decode_step
        h.refuses(complete, handle, [advance(token, step), advance(702, 9)], ())
        h.refuses(complete, handle, [advance(token, step), h.HOLD], [1])
        h.refuses(complete, handle, [advance(token, step), h.HOLD], [0, 1])
        assert complete(handle, [advance(token, step), h.HOLD], ()) is h.OK
        assert handle.state == "seating"
        assert h.coordinator.execution_holder is None
        assert (h.committed(handle, 1), h.seq(handle, 1).token_count) == (8, 9)
        assert "bound" in str(h.seq(handle, 1).state).lower()
    h.compact(handle, [0, -1])
    assert handle.state == "settled"
    assert h.row(2) == [-1] * 4
    assert h.active(3) == 0
    assert h.metrics()["publication_attempts"] == attempts
    assert h.seq(handle, 0).token_ids.tolist() == [*T(8), 901, 903, 904]
    h.decode(handle, 905)


def test_an_unfinalised_joiner_asks_for_no_page(h, T):
    """Scenario 82 and 40.13: the joiner's row does not grow."""
    handle = with_joiner(h, T)
    assert h.prepare_decode(handle, 8).status is h.OK
    assert len(h.pages(handle, 0)) == 4
    assert h.pages(handle, 1) == [0, 1, 3]


def after_a_step_with_a_waiting_joiner(h, T):
    handle = with_joiner(h, T)
    h.seat(2)
    h.decode(handle, 903, None)
    assert handle.state == "seating"
    return handle


def test_a_joiner_can_be_finalised_after_a_decode_step(h, T):
    """Scenario 82b."""
    handle = after_a_step_with_a_waiting_joiner(h, T)
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    assert handle.state == "settled"
    h.decode(handle, 904, 703)


def test_a_joiner_can_be_retracted_after_a_decode_step(h, T):
    """Scenario 82b, retracted instead."""
    handle = after_a_step_with_a_waiting_joiner(h, T)
    h.mark()
    assert h.coordinator.retract_sequence_admission(handle) is True
    assert h.log == ["drain", "upload_rows"]
    assert handle.state == "settled"
    assert h.active(3) == 0
    h.decode(handle, 904)


def test_an_unfinalised_joiner_survives_a_compaction(h, T):
    """Scenario 82b, [-1, 0]: seating again, and the joiner is finalised as logical slot 0."""
    handle = after_a_step_with_a_waiting_joiner(h, T)
    h.compact(handle, [-1, 0])
    assert handle.state == "seating"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.finalize_sequence_admission(handle, 0, advance(702, 9)) is h.OK
    assert handle.state == "settled"
    h.decode(handle, 703)
    assert h.seq(handle, 0).resident.slot == 2


def test_a_waiting_joiner_is_installed_with_its_reuse_length(h, T):
    """Scenario 82c. Once more after its finalisation, and then no more."""
    a = after_a_step_with_a_waiting_joiner(h, T)
    b = h.begin(B_TOKENS, 1)
    h.run_prefill(b)
    h.decode(b, 902)
    h.mark()
    assert h.prepare_decode(a).status is h.OK
    assert h.log == ["reset_lengths"]
    assert h.device_lengths(2) == [9, 8]
    assert h.cache_manager.active_batch_size == 2
    assert h.complete(a, 904, None) is h.OK
    assert h.coordinator.finalize_sequence_admission(a, 1, advance(702, 9)) is h.OK
    h.mark()
    assert h.prepare_decode(a).status is h.OK
    assert h.log == ["reset_lengths"]
    assert h.device_lengths(2) == [10, 9]
    assert h.complete(a, 905, 703) is h.OK
    h.mark()
    assert h.prepare_decode(a).status is h.OK
    assert h.log == []


def test_two_joiners_are_finalised_in_any_order(h, T):
    """50.1, joiner_waits: the request is settled with the last one."""
    handle = with_joiner(h, T)
    assert h.admit(handle, [71, 72, 73], 1).status is h.OK
    assert h.coordinator.finalize_sequence_admission(handle, 2, advance(74, 3)) is h.OK
    assert handle.state == "seating"
    assert h.coordinator.retract_sequence_admission(handle) is False, "the tail is finalised"
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    assert handle.state == "settled"


# ---- when a joiner is refused ------------------------------------------------------------


def test_a_joiner_is_admitted_only_at_a_settled_point(h, T):
    """Scenario 83. (Speculative and checkpoint profiles are not offered by this flavour.)"""
    assert h.coordinator.supports_live_sequence_admission() is True
    handle = h.begin(T(8))
    h.refuses(h.admit, handle, JOINER, ResidentRef(2, 9))
    assert h.coordinator.prepare_prefill(handle) is h.OK
    h.refuses(h.admit, handle, JOINER, ResidentRef(2, 9))
    h.synchronize()
    assert h.coordinator.finalize_prefill_publication(handle, [advance(901, 8)]) is h.OK
    assert h.prepare_decode(handle).status is h.OK
    h.refuses(h.admit, handle, JOINER, ResidentRef(2, 9))
    assert h.complete(handle, 902) is h.OK
    assert h.begin_compaction(handle, [0]) is h.OK
    h.refuses(h.admit, handle, JOINER, ResidentRef(2, 9))
    assert h.coordinator.compact_batch(handle) is h.OK
    assert h.admit(handle, JOINER, ResidentRef(2, 9)).status is h.OK


def test_a_full_batch_takes_no_joiner(harness, T):
    """Scenario 83. The batch is full although a resident slot of the pool may be free."""
    h = harness()
    handle = h.begin_batch([T(2), T(3), T(2)])
    h.run_prefill(handle)
    for slot in range(4):
        h.refuses(h.admit, handle, B_TOKENS, ResidentRef(slot, 99))


def test_a_finishing_request_takes_no_joiner(h, T):
    """Scenario 83 and 40.5: at least one live sequence."""
    handle = h.begin(T(5))
    h.run_prefill(handle)
    h.compact(handle, [-1])
    h.refuses(h.admit, handle, B_TOKENS, ResidentRef(2, 9))


# ---- execution token and length view ------------------------------------------------------------


def test_only_the_holder_of_the_execution_token_may_prepare(h, T):
    """Scenario 83b."""
    c = h.coordinator
    a, b = h.begin(T(5), 0), h.begin(B_TOKENS, 1)
    assert c.execution_holder is None
    assert c.prepare_prefill(a) is h.OK
    error = h.refuses(c.prepare_prefill, b)
    assert str(a.id) in str(error)
    h.synchronize()
    assert c.finalize_prefill_publication(a, [advance(901, 5)]) is h.OK
    assert c.execution_holder is None
    h.run_prefill(b)

    assert h.prepare_decode(a).status is h.OK
    assert c.execution_holder == a.id
    for call in (
        lambda: h.prepare_decode(b),
        lambda: h.admit(b, JOINER, ResidentRef(2, 9)),
        lambda: h.begin_compaction(b, [0]),
    ):
        assert str(a.id) in str(h.refuses(call))

    third = h.begin([61, 62], 2)
    assert h.finish(third) is h.OK
    third = h.begin([61, 62], 2)
    h.drop(third)
    assert h.finish(b) is h.OK
    assert c.execution_holder == a.id
    assert h.complete(a, 902) is h.OK


def test_a_refused_call_does_not_take_the_token(harness, T):
    """Scenario 83b and 00.6: REQUEST_FAILED leaves the token where it was."""
    h = harness(pages=5, enforce_min_pool=False)
    handle = h.begin_batch([T(7), T(5)])
    h.run_prefill(handle)
    assert h.prepare_decode(handle, 6).status is h.REQUEST_FAILED
    assert h.coordinator.execution_holder is None
    assert h.admit(handle, list(range(61, 70)), 2).status is h.REQUEST_FAILED
    assert h.coordinator.execution_holder is None


def test_settled_requests_take_turns(h, T):
    """Scenario 83c."""
    a, b = h.begin(T(5), 0), h.begin([51, 52, 53, 54, 55, 56], 1)
    h.run_prefill(a)
    assert h.coordinator.length_view == a.id
    h.run_prefill(b)
    assert h.coordinator.length_view == b.id

    h.mark()
    assert h.prepare_decode(a).status is h.OK
    assert h.log == ["reset_lengths"]
    assert h.device_lengths(1) == [5]
    assert h.coordinator.length_view == a.id
    assert h.complete(a, 902) is h.OK
    h.mark()
    assert h.prepare_decode(a).status is h.OK
    assert h.log == []
    assert h.complete(a, 903) is h.OK
    h.mark()
    assert h.prepare_decode(b).status is h.OK
    assert h.log == ["reset_lengths"]
    assert h.device_lengths(1) == [6]


def test_lengths_are_installed_before_an_admission_and_a_compaction_too(h, T):
    """Scenario 83c for the other two calls (00.6): the active batch is that of the request again."""
    a, b = h.begin_batch([T(5), T(6)], [0, 1]), h.begin(B_TOKENS, 2)
    h.run_prefill(a)
    h.run_prefill(b)
    assert h.cache_manager.active_batch_size == 1
    h.mark()
    assert h.begin_compaction(a, [-1, 0]) is h.OK
    assert h.log == ["reset_lengths", "upload_mapping"]
    assert h.device_lengths(2) == [5, 6]
    assert h.cache_manager.active_batch_size == 2
    assert h.coordinator.compact_batch(a) is h.OK
    assert h.device_lengths(1) == [6]

    h.decode(b, 902)
    h.mark()
    assert h.admit(a, JOINER, 0).status is h.OK
    assert h.log == ["reset_lengths", "upload_rows"]
    assert h.coordinator.length_view == a.id
    assert h.device_lengths(1) == [6]


# ---- poison and failures around a joiner ------------------------------------------------------------


def test_poison_between_admission_and_finalisation(h, T):
    """Scenario 84."""
    c = h.coordinator
    a, b = h.begin(T(8), 0), h.begin(B_TOKENS, 1)
    h.fail(2)
    with pytest.raises(DeviceError):
        c.prepare_prefill(b)
    h.heal()
    assert b.state == "broken"
    assert c.execution_holder is None
    h.run_prefill(a)
    assert h.admit(a, JOINER, 2).status is h.OK

    h.sync.fail = True
    h.drop(b)
    h.sync.fail = False
    assert b.state == "quarantined"
    assert c.state == "poisoned"

    h.seat(2)
    before = h.dump()
    assert c.finalize_sequence_admission(a, 1, advance(702, 9)) is h.POISONED
    assert h.dump() == before
    assert h.admit(a, [91, 92], ResidentRef(1, 99)).status is h.POISONED
    h.decode(a, 903, None)
    h.compact(a, [0, -1])
    assert a.state == "settled"
    assert h.finish(a) is h.OK
    h.end_everything()


def test_a_drop_with_an_unfinalised_joiner_drains_once(h, T):
    """Scenario 85."""
    handle = with_joiner(h, T)
    seen = []
    h.sync.before = lambda: seen.append(h.all_active())
    h.mark()
    h.drop(handle)
    assert h.log == ["drain", "upload_rows"]
    assert seen == [{0: 2, 1: 2, 2: 1, 3: 1}]
    assert [h.device_row(slot) for slot in range(3)] == [[-1] * 4] * 3
    assert h.all_active() == {}
    assert handle.state == "released"


def test_a_joiner_that_cannot_be_bound_leaves_in_order(h, T):
    """Scenario 85b."""
    handle = founder_of_eight(h, T)
    before = h.counters()
    h.mark()
    h.fail(1)
    with pytest.raises(DeviceError):
        h.admit(handle, JOINER, 2)
    h.heal()
    assert h.log == ["drain", "upload_rows"]
    assert h.row(2) == h.device_row(2) == [-1] * 4
    assert h.active(3) == 0
    assert 3 in h.free()
    assert handle.state == "settled"
    assert h.coordinator.execution_holder is None
    assert h.coordinator.state == "serving"
    assert h.size(handle) == 1
    assert h.counters()["admitted_sequences"] == before["admitted_sequences"], "counted only after binding"
    h.decode(handle, 903)
    assert h.admit(handle, JOINER, 2).status is h.OK


def test_a_joiner_that_cannot_be_bound_and_not_be_drained_is_withheld(h, T):
    """Scenario 85b with a failing drain."""
    handle = founder_of_eight(h, T)
    h.mark()
    h.fail(1)
    h.sync.fail = True
    with pytest.raises(DeviceError):
        h.admit(handle, JOINER, 2)
    assert h.log == ["drain"], "no device call follows a failed drain"
    assert handle.state == "quarantined"
    assert not handle.valid
    assert h.coordinator.state == "poisoned"
    assert h.all_active() == {0: 2, 1: 2, 2: 1, 3: 1}
    h.end_everything()


def test_a_joiner_whose_row_cannot_be_cleared_poisons_but_is_released(h, T):
    """Scenario 85b with a failing clearing upload."""
    handle = founder_of_eight(h, T)
    h.fail(1, 2)
    with pytest.raises(DeviceError):
        h.admit(handle, JOINER, 2)
    h.heal()
    assert h.active(3) == 0
    assert handle.state == "settled"
    assert h.coordinator.state == "poisoned"
    # What the device holds in row 2 is unknown: the next upload, whoever asks for it, has to carry the row.
    h.synchronize()
    h.table.device_array[2] = 99
    h.mark()
    h.decode(handle, 903)
    assert h.log == ["upload_rows"]
    assert h.device_row(2) == [-1] * 4


def test_a_joiner_that_fails_beside_a_waiting_one_leaves_the_request_seating(h, T):
    """Scenario 85b from seating: the request is in the state it came from, and the first joiner is untouched."""
    handle = with_joiner(h, T)
    h.fail(1)
    with pytest.raises(DeviceError):
        h.admit(handle, [61, 62], 1)
    h.heal()
    assert handle.state == "seating"
    assert h.size(handle) == 2
    assert h.row(1) == [-1] * 4
    assert h.coordinator.finalize_sequence_admission(handle, 1, advance(702, 9)) is h.OK
    assert handle.state == "settled"


def test_a_stale_handle_is_refused(h, T):
    """Common guard (40.2): an ended request can be named, but nothing can be asked of it."""
    handle = with_joiner(h, T)
    assert h.finish(handle) is h.OK
    c = h.coordinator
    for call in (
        lambda: c.prepare_prefill(handle),
        lambda: h.prepare_decode(handle),
        lambda: c.complete_decode_step(handle, [h.HOLD], ()),
        lambda: h.admit(handle, JOINER, ResidentRef(1, 99)),
        lambda: c.finalize_sequence_admission(handle, 0, advance(1, 1)),
        lambda: c.compact_batch(handle),
    ):
        with pytest.raises(ContractViolation):
            call()
    assert h.finish(handle) is h.OK


def test_a_handle_of_another_coordinator_is_refused(harness, T):
    """Common guard (40.2): the handle belongs to this coordinator."""
    one, other = harness(), harness()
    handle = one.begin(T(5))
    with pytest.raises(ContractViolation):
        other.coordinator.prepare_prefill(handle)
    assert one.coordinator.prepare_prefill(handle) is one.OK
