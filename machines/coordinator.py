"""The coordinator's own life, in three regions: service, execution token, length view.

They are three small tables because they are independent: a coordinator may be poisoned while a request holds the token
and another one is the view. Their events are the couplings that the rows of ``request`` name, and ``shutdown``.

service    (table ``coordinator``): who may still be admitted. Poison is never lifted.
execution  the mark of the one request that may be between a prepare call and its completion.
view       whose batch the device length vector describes. *partial*: as *of*, but written while a joiner was not
           finalised, so that its entry may be only its reuse length.
"""

from __future__ import annotations

from typing import Final, Protocol

from context_cache.machines.spec import Guard, HostStep, MachineSpec, Not, State, Transition, each

__all__ = ["COORDINATOR", "EXECUTION", "VIEW", "RegionCall"]


class RegionCall(Protocol):
    """What the guards of the regions look at: facts about the request whose row offers the event."""

    holds_token: bool
    took_token: bool
    owns_view: bool
    joiner_waits: bool
    owners_left: bool

    def hold_token(self) -> None: ...
    def free_token(self) -> None: ...
    def own_view(self) -> None: ...
    def drop_view(self) -> None: ...


def _holds_token(call: RegionCall) -> bool:
    return call.holds_token


def _took_token(call: RegionCall) -> bool:
    return call.took_token


def _owns_view(call: RegionCall) -> bool:
    return call.owns_view


def _joiner_waits(call: RegionCall) -> bool:
    return call.joiner_waits


def _owners_left(call: RegionCall) -> bool:
    return call.owners_left


def _hold_token(call: RegionCall) -> None:
    call.hold_token()


def _free_token(call: RegionCall) -> None:
    call.free_token()


def _own_view(call: RegionCall) -> None:
    call.own_view()


def _drop_view(call: RegionCall) -> None:
    call.drop_view()


holds_token: Final = Guard("holds_token", _holds_token)
took_token: Final = Guard("took_token", _took_token)
owns_view: Final = Guard("owns_view", _owns_view)
joiner_waits: Final = Guard("joiner_waits", _joiner_waits)
owners_left: Final = Guard("owners_left", _owners_left)

_HOLD: Final = HostStep("hold_token", _hold_token)
_FREE: Final = HostStep("free_token", _free_token)
_OWN: Final = HostStep("own_view", _own_view)
_DROP: Final = HostStep("drop_view", _drop_view)

COORDINATOR: Final = MachineSpec(
    name="coordinator",
    initial="serving",
    states=(
        State("serving", "admits requests"),
        State("poisoned", "the device cannot be trusted: no admissions, live requests go on"),
        State("closed", "shut down with nothing left", final=True),
    ),
    transitions=(
        *each(("serving", "poisoned"), event="drain_failed", target="poisoned"),
        *each(("serving", "poisoned"), event="clearing_failed", target="poisoned"),
        *each(("serving", "poisoned"), event="invariant_broken", target="poisoned"),
        *each(("serving", "poisoned"), event="shutdown", guards=(owners_left,)),
        *each(("serving", "poisoned"), event="shutdown", target="closed", guards=(Not(owners_left),)),
    ),
)

EXECUTION: Final = MachineSpec(
    name="execution",
    initial="free",
    states=(
        State("free", "any request may prepare"),
        State("held", "one request is between a prepare call and its completion"),
    ),
    transitions=(
        Transition(event="take", source="free", target="held", steps=(_HOLD,), hot=True),
        Transition(event="give_back", source="held", target="free", guards=(holds_token,), steps=(_FREE,), hot=True),
        Transition(event="undo_take", source="held", target="free", guards=(took_token,), steps=(_FREE,)),
    ),
)

VIEW: Final = MachineSpec(
    name="view",
    initial="none",
    states=(
        State("none", "the device lengths describe no batch"),
        State("of", "they describe one request's batch"),
        State("partial", "likewise, but a joiner's entry may be only its reuse length"),
    ),
    transitions=(
        *each(("none", "of", "partial"), event="start_lengths", target="none", steps=(_DROP,)),
        Transition(event="claim", source="none", target="partial", guards=(joiner_waits,), steps=(_OWN,)),
        Transition(event="claim", source="none", target="of", guards=(Not(joiner_waits),), steps=(_OWN,)),
        Transition(event="entry_finalized", source="partial", target="none", guards=(owns_view,), steps=(_DROP,)),
        *each(("of", "partial"), event="forget", target="none", guards=(owns_view,), steps=(_DROP,)),
    ),
)
