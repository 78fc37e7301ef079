"""A lease ends by an explicit release, once; losing one is reported and frees nothing."""

import gc
import logging

import pytest


def test_release_is_idempotent(desk):
    d = desk(2)
    lease = d.lease("A")
    lease.release()
    assert lease.released
    after = d.manager.dump()
    lease.release()
    d.manager.release(lease)
    assert d.manager.dump() == after
    assert (lease.page_count, lease.base_pages.tolist()) == (0, [])
    assert "released" in repr(lease)


def test_a_with_block_releases_on_the_way_out_also_after_an_error(desk):
    d = desk(2)
    lease = d.lease("A")
    assert "1 base pages, 0 shared" in repr(lease)
    with lease as entered:
        assert entered is lease
        assert not lease.released
    assert lease.released
    failing = d.lease("B")
    with pytest.raises(RuntimeError), failing:
        raise RuntimeError
    assert failing.released
    assert d.free == [0, 1]


def test_a_lost_lease_is_reported_and_keeps_its_pages(desk, caplog):
    """Only the owner knows whether the device is done with the pages, so the finaliser must not free them."""
    d = desk(2)
    lease = d.lease("A")
    with caplog.at_level(logging.WARNING):
        del lease
        gc.collect()
    assert "Lease 1" in caplog.text
    assert "collected without a release" in caplog.text
    assert d.active_counts == {0: 1}
    d.manager.check_invariants()


def test_a_released_lease_is_not_reported(desk, caplog):
    d = desk(2)
    with caplog.at_level(logging.WARNING):
        d.lease("A").release()
        gc.collect()
    assert caplog.text == ""
