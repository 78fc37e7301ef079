"""Snapshot slots of a lease: those of its hit, until they are restored, and those reserved for its own checkpoints."""

from __future__ import annotations

from ..errors import ContractViolation
from .acquisition import drop_pins, refuse_dead
from .books import Books
from .lease import Lease, SnapshotReservation
from .planning import ReuseMode
from .pool import Indices, Pool

__all__ = ["refuse_other_modes", "release_restored", "reserve", "retire"]

CHECKPOINT_MODES = (ReuseMode.HYBRID, ReuseMode.HYBRID_MTP)


def refuse_other_modes(books: Books, lease: Lease, verb: str, modes: tuple[ReuseMode, ...]) -> None:
    """ContractViolation for a dead or foreign lease and for one of another mode."""
    refuse_dead(books, lease, verb)
    if lease.mode not in modes:
        names = " or ".join([mode.value for mode in modes])
        raise ContractViolation(
            f"{verb}: lease {lease.id} is {lease.mode.value}, which has no such operation; use a {names} lease",
            lease_id=lease.id, mode=lease.mode.value, verb=verb,
        )  # fmt: skip


def reserve(books: Books, lease: Lease, needs_partial: bool) -> SnapshotReservation | None:
    """Slots for one checkpoint, evicting unpinned records if needed. None, and nothing changed, otherwise."""
    refuse_other_modes(books, lease, "reserve_snapshots", CHECKPOINT_MODES)
    if needs_partial and not lease.has_attention:
        raise ContractViolation(
            f"reserve_snapshots: lease {lease.id} has no attention layers and so no partial page; ask without it",
            lease_id=lease.id,
        )
    wanted = 0, 0, 1, int(needs_partial)
    room = books.room(*wanted)
    if not room.feasible:
        return None
    _, _, recurrent, partial = books.draw(room, *wanted)
    try:
        reservation = SnapshotReservation(int(recurrent[0]), int(partial[0]) if needs_partial else None)
        lease.holds.reservations = (*lease.holds.reservations, reservation)
    except BaseException:
        books.recurrent.unpin(books.recurrent.indices(recurrent))
        books.partial.unpin(books.partial.indices(partial))
        raise
    return reservation


def release_restored(books: Books, lease: Lease) -> None:
    """Drop the pins on the hit's snapshots and forget the bindings. Does nothing the second time."""
    refuse_other_modes(books, lease, "release_restored_snapshots", CHECKPOINT_MODES)
    holds = lease.holds
    drop_pins(_pins(books, holds.recurrent_slot, holds.partial_slot))
    holds.recurrent_slot = holds.partial_slot = None


def retire(books: Books, lease: Lease, reservation: SnapshotReservation) -> None:
    """Drop the producer's pins on a reservation. What a record references stays, the rest is free."""
    refuse_other_modes(books, lease, "retire_reservation", CHECKPOINT_MODES)
    refuse_unowned(lease, reservation, "retire_reservation")
    left = tuple([each for each in lease.holds.reservations if each != reservation])
    drop_pins(_pins(books, reservation.recurrent_slot, reservation.partial_slot))
    lease.holds.reservations = left


def refuse_unowned(lease: Lease, reservation: SnapshotReservation, verb: str) -> None:
    if reservation not in lease.holds.reservations:
        raise ContractViolation(
            f"{verb}: lease {lease.id} does not hold {reservation}; pass a reservation that it got and has not retired",
            lease_id=lease.id, reservation=str(reservation),
        )  # fmt: skip


def _pins(books: Books, recurrent: int | None, partial: int | None) -> list[tuple[Pool, Indices]]:
    pins = []
    if recurrent is not None:
        pins.append((books.recurrent, books.recurrent.indices((recurrent,))))
    if partial is not None:
        pins.append((books.partial, books.partial.indices((partial,))))
    return pins
