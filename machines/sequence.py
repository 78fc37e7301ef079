"""The life of one sequence inside a request. Its states are a uint8 column of the ledger.

A sequence has no events of its own: it follows the steps of its request, all slots of a step at once. So this table
is not run by a runner; :func:`ask_table` turns it into one small array per event, and a step looks up
``next = array[ask, state]`` for every slot it touches. ``REFUSED`` there is a contract violation for the whole step.

The final states (retired, retracted, released) are what a recorded step may say of a slot; the slot's column then reads
``free`` again, because the resident slot can be leased to somebody else.
"""

from __future__ import annotations

from typing import Final

from context_cache.machines.spec import Guard, MachineSpec, Not, State, Transition, each

__all__ = [
    "BRINGS_TOKENS",
    "CAPTURE",
    "CAPTURE_CODES",
    "NAMED",
    "REFUSED",
    "SEQUENCE",
    "STATE_CODES",
    "ask_table",
]

BRINGS_TOKENS: Final = 1
"""Ask bit: the advance of the slot is not HOLD."""
NAMED: Final = 2
"""Ask bit: the slot is named: as completed (complete_decode_step) or as retired (compact_batch)."""
REFUSED: Final = 255


def _brings_tokens(ask: int) -> bool:
    return bool(ask & BRINGS_TOKENS)


def _named(ask: int) -> bool:
    return bool(ask & NAMED)


brings_tokens: Final = Guard("brings_tokens", _brings_tokens)
named: Final = Guard("named", _named)

_LIVE: Final = ("leased", "bound", "seated", "terminal")

SEQUENCE: Final = MachineSpec(
    name="sequence",
    follows="request",
    initial="free",
    states=(
        State("free", "no sequence owns the resident slot"),
        State("leased", "pages held, row not bound", phase="live", holds="pages"),
        State("bound", "row bound; a founder before its prefill is finalised, later an unfinalised joiner",
              phase="live", holds="pages, row"),
        State("seated", "takes part in decode steps", phase="live", holds="pages, row"),
        State("terminal", "completed and published; holds until it is compacted out", phase="live",
              holds="pages, row"),
        State("quarantined", "a drain of its request failed", holds="pages, row (withheld)"),
        State("retired", "left by compaction, after its drain", final=True),
        State("retracted", "left before it was finalised", final=True),
        State("released", "left with its request", final=True),
    ),
    transitions=(
        Transition(event="begin_request", source="free", target="leased"),
        Transition(event="admit_sequence", source="free", target="bound", on_failure="retracted",
                   on_drain_failure="quarantined"),
        Transition(event="prepare_prefill", source="leased", target="bound", on_failure="bound"),
        Transition(event="finalize_prefill", source="bound", target="seated"),
        Transition(event="finalize_sequence_admission", source="bound", target="seated"),
        Transition(event="retract_sequence_admission", source="bound", target="retracted",
                   on_drain_failure="quarantined"),
        Transition(event="complete_decode_step", source="bound", target="bound",
                   guards=(Not(brings_tokens), Not(named))),
        Transition(event="complete_decode_step", source="seated", target="seated", guards=(Not(named),)),
        Transition(event="complete_decode_step", source="seated", target="terminal", guards=(named,)),
        Transition(event="complete_decode_step", source="terminal", target="terminal",
                   guards=(Not(brings_tokens), Not(named))),
        *each(("bound", "seated", "terminal"), event="compact_batch", guards=(Not(named),),
              on_drain_failure="quarantined"),
        *(Transition(event="compact_batch", source=source, target="retired", guards=(named,), on_failure=source,
                     on_drain_failure="quarantined") for source in ("bound", "seated", "terminal")),
        *each(_LIVE, event="finish", target="released", on_drain_failure="quarantined"),
        *each(_LIVE, event="drop", target="released", on_drain_failure="quarantined"),
        # Any other drain of the request that fails takes all its sequences along.
        *each(("bound", "seated", "terminal"), event="drain_failed", target="quarantined"),
        Transition(event="shutdown", source="quarantined", target="released", on_drain_failure="quarantined"),
    ),
)  # fmt: skip

STATE_CODES: Final = {state.name: code for code, state in enumerate(SEQUENCE.states)}
"""Name -> value in the ledger's uint8 column; ``free`` is 0."""


def ask_table(event: str) -> tuple[tuple[int, ...], ...]:
    """``table[ask][state code]`` -> next state code, or ``REFUSED``; ``ask`` is a sum of the ask bits, 0 to 3."""
    rows = []
    for ask in range(4):
        row = []
        for state in SEQUENCE.states:
            choice = SEQUENCE.choices.get((state.name, event))
            picked = None
            if choice is not None:
                mask = sum(bit for bit, holds in choice.tests if holds(ask))
                picked = choice.rows[mask]
            row.append(REFUSED if picked is None else STATE_CODES[picked.transition.target])
        rows.append(tuple(row))
    return tuple(rows)


def _granted(call: int) -> bool:
    return bool(call)


granted: Final = Guard("reservation_granted", _granted)

CAPTURE: Final = MachineSpec(
    name="capture",
    follows="request",
    initial="none",
    states=(
        State("none", "no snapshot slot reserved"),
        State("reserved", "slots reserved, a copy raised a device error", holds="snapshot slots"),
        State("captured", "slots reserved, every copy enqueued, not published", holds="snapshot slots"),
    ),
    transitions=(
        Transition(event="enqueue_prefill_captures", source="none", target="captured", guards=(granted,),
                   on_failure="reserved"),
        Transition(event="enqueue_prefill_captures", source="none", target="none", guards=(Not(granted),)),
        Transition(event="finalize_prefill", source="captured", target="none", on_publish_failure="none"),
        *(Transition(event=event, source="none", target="none", guards=(granted,), on_failure="reserved",
                     on_drain_failure="captured", on_publish_failure="none")
          for event in ("complete_decode_step", "publish_mtp_endpoint")),
        *(Transition(event=event, source=source, target="none", on_drain_failure=source)
          for event in ("finish", "drop", "shutdown") for source in ("reserved", "captured")),
    ),
)  # fmt: skip
"""Snapshot slots of one sequence of a checkpoint deployment, from their reservation to their retirement."""

CAPTURE_CODES: Final = {state.name: code for code, state in enumerate(CAPTURE.states)}
"""Name -> value in the ledger's uint8 column; ``none`` is 0."""
