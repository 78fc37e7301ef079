"""Weaknesses that no numbered scenario covers: policies of a joiner, counters, reserved fields, small costs.

docs/weaknesses.md refers to these by their names.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from context_cache.backends import HazardError, HazardMonitor, HostBackend
from context_cache.coordinator import (
    CommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinator,
    KVPageTable,
    LookupPolicy,
    ResidentRef,
)

B_TOKENS = [51, 52, 53, 54, 55]


def settled(h, tokens, resident=0, **options):
    handle = h.begin(tokens, resident, **options)
    h.run_prefill(handle)
    return handle


# ---- a joiner's policies ---------------------------------------------------------------------------------------------


def test_a_joiner_takes_its_policies_from_the_batch_and_then_its_own_override(h, T):
    """40.5. It goes wrong when they are taken from the sequence that is first in the batch, here one with an override.

    The founder bypasses by its own override; the batch uses the cache, so the joiner does.
    """
    h.finish(settled(h, T(5)))
    founder = settled(h, B_TOKENS, 0, override=LookupPolicy.BYPASS, commit=CommitPolicy.PREFILL_STATE_ONLY)
    assert h.admit(founder, T(6), 1).prefill_start == 4
    assert h.coordinator.retract_sequence_admission(founder) is True
    assert h.admit(founder, T(6), 1, lookup=LookupPolicy.BYPASS).prefill_start == 0
    view = h.seq(founder, 1)
    assert view.lookup_policy is LookupPolicy.BYPASS
    assert view.commit_policy is CommitPolicy.PREFILL_STATE_ONLY


def test_an_override_cannot_lift_the_bypass_of_a_batch(h, T):
    """40.3: a bypass batch stays one for its joiners."""
    h.finish(settled(h, T(5)))
    founder = settled(h, B_TOKENS, 0, lookup=LookupPolicy.BYPASS)
    assert h.admit(founder, T(6), 1, lookup=LookupPolicy.USE_CACHE).prefill_start == 0


# ---- fields and logs -------------------------------------------------------------------------------------------------


def test_a_reserved_field_changes_nothing(harness, T):
    """40.1: ``replay_tail_length`` is carried and not used."""
    told = []
    for tail in (0, 3):
        h = harness()
        h.finish(settled(h, T(9)))
        handle = settled(h, [*T(9), 77], replay_tail_length=tail)
        told.append((h.starts, h.pages(handle), h.records(), h.counters()))
    assert told[0] == told[1]


def test_admissions_are_not_logged(h, T, caplog):
    """A line for each admission would be on the hot path."""
    with caplog.at_level(logging.INFO):
        handle = settled(h, T(5))
        assert h.admit(handle, B_TOKENS, 1).status is h.OK
        assert h.coordinator.retract_sequence_admission(handle) is True
        h.finish(handle)
    assert caplog.records == []


# ---- counters --------------------------------------------------------------------------------------------------------


def test_a_hit_that_is_rewound_to_nothing_reuses_nothing(h, T):
    """90.6: it stays a hit, and is no reuse."""
    h.finish(settled(h, T(5)))
    before = h.metrics()
    h.drop(h.begin(T(4)))
    middle = h.metrics()
    assert middle["hit_sequences"] - before["hit_sequences"] == 1
    assert middle["reusing_sequences"] == before["reusing_sequences"]
    h.drop(h.begin(T(6)))
    assert h.metrics()["reusing_sequences"] - middle["reusing_sequences"] == 1


def test_every_drain_is_counted_by_its_cause(h, T):
    """90.6: as many as the synchroniser was called, in more than one place."""
    handle = h.begin_batch([T(5), B_TOKENS])
    h.run_prefill(handle)
    h.compact(handle, [-1, 0])
    assert h.admit(handle, T(6), 0).status is h.OK
    assert h.coordinator.retract_sequence_admission(handle) is True
    assert h.prepare_decode(handle).status is h.OK
    h.drop(handle)
    drains = h.metrics()["drains"]
    assert sum(drains.values()) == h.sync.calls == 3
    assert len(drains) == 3


def test_what_did_not_go_well_is_counted(harness, T):
    """90.6: refused admissions, refused growth, retractions, quarantines."""
    h = harness(pages=4, enforce_min_pool=False)
    handle = h.begin_batch([T(7), B_TOKENS[:3]])
    h.run_prefill(handle)
    before = h.metrics()
    assert h.try_begin([h.sequence_admission(T(13), 2)]).status is h.REQUEST_FAILED
    assert h.metrics()["refused_admissions"] - before["refused_admissions"] == 1
    assert h.prepare_decode(handle, 9).status is h.REQUEST_FAILED
    assert h.metrics()["refused_growth"] - before["refused_growth"] == 1
    assert h.admit(handle, [9], 2).status is h.OK
    assert h.coordinator.retract_sequence_admission(handle) is True
    assert h.metrics()["retracted_sequences"] - before["retracted_sequences"] == 1
    assert h.prepare_decode(handle).status is h.OK
    h.sync.fail = True
    h.drop(handle)
    assert h.metrics()["quarantined_requests"] - before["quarantined_requests"] == 1


def test_planning_and_acquiring_have_a_timer_each(h, T):
    """90.6. A refused plan costs planning; both grow, neither is the other."""
    settled(h, T(5))
    metrics = h.metrics()
    assert metrics["planning_nanoseconds"] > 0
    assert metrics["acquiring_nanoseconds"] > 0
    assert metrics["planning_nanoseconds"] != metrics["acquiring_nanoseconds"]


# ---- after poison ----------------------------------------------------------------------------------------------------


def test_another_coordinator_may_follow_a_poisoned_one(h, T):
    """90.5: poison is never lifted, but what the first one borrowed can be lent again after a good shutdown."""
    h.poison(0)
    assert h.coordinator.shutdown() is h.OK
    with ContextCacheCoordinator(
        ContextCacheConfig(enabled=True),
        h.deployment,
        h.resources,
        backend=h.backend,
        stream=h.stream,
        synchronizer=h.sync,
    ) as second:
        assert second.state == "serving"
        admission = h.sequence_admission(T(5), ResidentRef(0, 77))
        h.coordinator = second
        result = h.try_begin([admission])
        assert result.status is h.OK
        assert second.prepare_prefill(result.admission.request) is h.OK
        result.admission.request.close()


# ---- device state ----------------------------------------------------------------------------------------------------


def test_an_upload_looks_at_the_rows_that_changed_only(monkeypatch):
    """90.7: checking the whole table at each step would cost max_batch * width on the decode path."""
    backend = HostBackend()
    stream = backend.new_stream()
    table = KVPageTable(max_batch=64, max_pages_per_seq=4, num_pages=300, backend=backend)
    table.upload(stream)
    looked = []
    inner = KVPageTable._check

    def check(self, rows):
        looked.append(len(rows))
        return inner(self, rows)

    monkeypatch.setattr(KVPageTable, "_check", check)
    table.set_row(3, [1, 2])
    table.set_row(40, [5])
    assert table.upload(stream) is True
    assert looked == [2]


def test_a_reset_touches_the_lengths_of_its_batch_only(h, T):
    """90.7: n entries, not the whole capacity."""
    h.set_device_lengths([71, 72, 73])
    handle = h.begin(T(5), 2)
    assert h.coordinator.prepare_prefill(handle) is h.OK
    assert h.device_lengths(3) == [0, 72, 73]


def test_a_shared_page_that_is_written_is_noticed():
    """90.7: the monitor for tests of runtimes knows which pages others can read."""
    backend = HostBackend()
    stream = backend.new_stream()
    shared = {0}
    monitor = HazardMonitor(4, is_shared=shared.__contains__)
    monitor.leased(0, np.array([0, 1]))
    monitor.enqueue(stream, lambda: None, "read", reads=[0, 1])
    monitor.enqueue(stream, lambda: None, "write", writes=[1])
    with pytest.raises(HazardError, match="page 0"):
        monitor.enqueue(stream, lambda: None, "write", writes=[0])
    backend.synchronize(stream)
