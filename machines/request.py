"""The life of one request, from admission to the last page returned.

Rule 1: every change of a request's state is a row of ``REQUEST``. Nothing else may assign it.
Rule 2: this file knows no device. What touches memory is a device action: a verb of the call object's device.
Rule 3: pages go back only after proof that the device is done: after the drain of the row, or from a state without
        outstanding work.
Rule 4: one step of a request is one event, whatever the number of its sequences.

A state's name ends in ``frozen`` while an endpoint waits for the first verification round: the prompt of a speculative
request is complete, but only that round proves the draft's part of it. The frozen states are those of the same name
without it, plus the duty to publish first when the request ends before any verification.

Couplings: the execution token is taken by the first step of a row and given back on entering a state that does not
hold it; a failed drain poisons the coordinator; a row that writes device lengths takes the length view.

Rows that a runtime takes for every sequence or every step are marked ``hot``: they are picked by the dictionary that is
compiled from this table, all others by ``transitions``.

Not here: whether arguments are valid, whether the caller may act (token, poison), and whether a slot is an unfinalised
joiner. Those are planned before the event and end in an error or a status; no row fires. "skipped if not dirty" is the
page table's affair: an upload without dirty rows is no action.
"""

from __future__ import annotations

from typing import Final

from context_cache.machines.request_steps import (
    APPLY_ADVANCES,
    BIND_JOINER,
    BIND_ROWS,
    CAPTURE,
    CAPTURE_MTP,
    CLAIM_VIEW,
    COMPACT,
    COPY_MAPPING,
    DRAIN,
    DRAIN_FAILED,
    ENTRY_FINALIZED,
    FORGET_VIEW,
    FREEZE,
    GIVE_BACK,
    GROW,
    INSTALL_LENGTHS,
    JOINER_WAY_OUT,
    PUBLISH,
    PUBLISH_FROZEN,
    RELEASE,
    RELEASE_HIT_PINS,
    RESET_BASE_LENGTHS,
    RESET_DRAFT_LENGTHS,
    RESTORE,
    RESTORE_HIDDEN,
    RETIRE_RESERVATIONS,
    START_LENGTHS,
    TAKE_LEASES,
    TAKE_TOKEN,
    UNDO_TAKE,
    UPLOAD_BASE_ROWS,
    UPLOAD_DRAFT_ROWS,
    WAY_OUT,
    WITHHOLD,
    captures_planned,
    frozen_policy,
    growth_possible,
    joiner_waits,
    only_sequence,
    plain_checkpoint,
    survivors_remain,
    view_current,
)
from context_cache.machines.spec import MachineSpec, Not, State, Transition, each

__all__ = ["REQUEST"]

_ENDED: Final = (GIVE_BACK, FORGET_VIEW)
_WITHHELD: Final = (DRAIN_FAILED, GIVE_BACK, FORGET_VIEW, WITHHOLD)
_GROW: Final = (GROW, UPLOAD_BASE_ROWS, UPLOAD_DRAFT_ROWS)

_STATES: Final = (
    State("new", "not admitted yet", phase="new"),
    State("admitted", "leases held, rows not bound", phase="admitted", holds="pages"),
    State("prefilling", "prefill prepared, running, or done but not finalised", phase="executing", region="prefill",
          holds="pages, rows, token", outstanding=True),
    State("prefill_frozen", "draft initialisation enqueued, endpoint frozen", phase="executing",
          region="prefill, frozen", holds="pages, rows, token", outstanding=True),
    State("settled", "nothing outstanding, every sequence seated", phase="executing", region="idle",
          holds="pages, rows", on_enter=(GIVE_BACK,)),
    State("settled_frozen", "drained, but publishing the frozen endpoint raised; retryable", phase="executing",
          region="idle, frozen", holds="pages, rows", on_enter=_ENDED),
    State("seating", "a joiner is bound and not finalised", phase="executing", region="seating",
          holds="pages, rows, perhaps token", outstanding=True),
    State("decoding", "decode step prepared, not completed", phase="executing", region="decode",
          holds="pages, rows, token", outstanding=True),
    State("decoding_frozen", "first verification prepared, not completed", phase="executing",
          region="decode, frozen", holds="pages, rows, token", outstanding=True),
    State("decode_retry", "pages grown, row or length upload incomplete", phase="executing", region="retry",
          holds="pages, rows, token", outstanding=True),
    State("decode_retry_frozen", "the same before the first verification", phase="executing",
          region="retry, frozen", holds="pages, rows, token", outstanding=True),
    State("compacting", "mapping uploaded, lengths not compacted", phase="executing", region="compaction",
          holds="pages, rows, token", outstanding=True),
    State("broken", "device state unknown after an action that must not be repeated", phase="executing",
          region="broken", holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("finishing", "the only sequence could not grow, or nobody is left", phase="finishing", region="idle",
          holds="pages, rows", on_enter=_ENDED),
    State("finishing_frozen", "the only sequence could not grow, endpoint frozen", phase="finishing",
          region="idle, frozen", holds="pages, rows", on_enter=_ENDED),
    State("finishing_prefill_frozen", "growth refused before the first verification", phase="finishing",
          region="prefill, frozen", holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("finishing_retry", "growth refused while an upload is incomplete", phase="finishing", region="retry",
          holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("finishing_retry_frozen", "the same before the first verification", phase="finishing",
          region="retry, frozen", holds="pages, rows", outstanding=True, on_enter=_ENDED),
    State("quarantined", "a drain failed: everything is withheld until a shutdown drains", phase="quarantined",
          holds="pages, rows (withheld)", outstanding=True, on_enter=_WITHHELD),
    State("poisoned", "the drain failed again at shutdown; a later shutdown may succeed", phase="poisoned",
          holds="pages, rows (withheld)", outstanding=True, on_enter=_WITHHELD),
    State("released", "every page and row returned", phase="released", final=True, on_enter=_ENDED),
)  # fmt: skip

_VIEWS: Final = ((view_current, ()), (Not(view_current), INSTALL_LENGTHS))

_ROWS: Final = (
    Transition(event="begin_request", source="new", target="admitted", hot=True, steps=(TAKE_LEASES,)),

    # Prefill.
    Transition(event="prepare_prefill", source="admitted", target="prefilling", on_failure="broken",
               steps=(TAKE_TOKEN, BIND_ROWS, UPLOAD_BASE_ROWS, UPLOAD_DRAFT_ROWS, *RESTORE,
                      START_LENGTHS, RESET_BASE_LENGTHS, RESET_DRAFT_LENGTHS, CLAIM_VIEW)),
    Transition(event="enqueue_prefill_captures", source="prefilling", target="prefilling",
               guards=(plain_checkpoint,), on_failure="broken", steps=CAPTURE),
    Transition(event="enqueue_prefill_captures", source="prefilling", target="prefilling",
               guards=(Not(plain_checkpoint),)),
    Transition(event="publish_mtp_endpoint", source="prefilling", target="prefilling", guards=(captures_planned,),
               on_failure="broken", on_drain_failure="quarantined", on_publish_failure="prefilling",
               publish_failure_steps=(RETIRE_RESERVATIONS,),
               steps=(*CAPTURE_MTP, DRAIN, PUBLISH, RETIRE_RESERVATIONS)),
    Transition(event="publish_mtp_endpoint", source="prefilling", target="prefilling",
               guards=(Not(captures_planned),)),
    Transition(event="restore_mtp_boundary", source="prefilling", target="prefilling", on_failure="prefilling",
               steps=(RESTORE_HIDDEN,)),
    Transition(event="finalize_prefill", source="prefilling", target="settled", guards=(Not(frozen_policy),),
               on_publish_failure="settled", publish_failure_steps=(RETIRE_RESERVATIONS,), hot=True,
               work_ended="by_runtime_sync",
               steps=(APPLY_ADVANCES, RELEASE_HIT_PINS, PUBLISH, RETIRE_RESERVATIONS)),
    Transition(event="finalize_prefill", source="prefilling", target="prefill_frozen", guards=(frozen_policy,),
               hot=True, work_ended="by_runtime_sync", steps=(APPLY_ADVANCES, FREEZE)),

    # A joiner: admitted at a settled point, seated by its own prefill, finalised or retracted.
    *(
        Transition(event="admit_sequence", source=source, target="seating", guards=(guard,), on_failure=source,
                   on_drain_failure="quarantined", failure_steps=(*JOINER_WAY_OUT, UNDO_TAKE), hot=True,
                   steps=(TAKE_TOKEN, *install, BIND_JOINER, UPLOAD_BASE_ROWS))
        for source in ("settled", "seating")
        for guard, install in _VIEWS
    ),
    *(
        Transition(event="finalize_sequence_admission", source="seating", target=target, guards=(guard,),
                   on_publish_failure=target, work_ended="by_runtime_sync", hot=True,
                   steps=(APPLY_ADVANCES, ENTRY_FINALIZED, PUBLISH))
        for guard, target in ((Not(joiner_waits), "settled"), (joiner_waits, "seating"))
    ),
    *(
        Transition(event="retract_sequence_admission", source="seating", target=target, guards=(guard,),
                   on_drain_failure="quarantined", steps=JOINER_WAY_OUT)
        for guard, target in ((Not(joiner_waits), "settled"), (joiner_waits, "seating"))
    ),

    # The decode step: prepared ...
    *(
        Transition(event="prepare_decode_step", source=source, target=target, guards=(growth_possible, guard),
                   on_failure=retry, hot=True, steps=(TAKE_TOKEN, *install, *_GROW))
        for source, target, retry in (
            ("settled", "decoding", "decode_retry"),
            ("seating", "decoding", "decode_retry"),
            ("decode_retry", "decoding", "decode_retry"),
            ("decode_retry_frozen", "decoding_frozen", "decode_retry_frozen"),
        )
        for guard, install in _VIEWS
    ),
    # A request whose prefill is frozen is always the view; one that is settled and frozen never is.
    Transition(event="prepare_decode_step", source="prefill_frozen", target="decoding_frozen",
               guards=(growth_possible,), on_failure="decode_retry_frozen", hot=True, steps=(TAKE_TOKEN, *_GROW)),
    Transition(event="prepare_decode_step", source="settled_frozen", target="decoding_frozen",
               guards=(growth_possible,), on_failure="decode_retry_frozen", hot=True,
               steps=(TAKE_TOKEN, *INSTALL_LENGTHS, *_GROW)),
    *each(("settled", "seating", "decode_retry", "prefill_frozen", "settled_frozen", "decode_retry_frozen"),
          event="prepare_decode_step", hot=True, guards=(Not(growth_possible), Not(only_sequence))),
    *(
        Transition(event="prepare_decode_step", source=source, target=target, hot=True,
                   guards=(Not(growth_possible), only_sequence))
        for source, target in (
            ("settled", "finishing"),
            ("settled_frozen", "finishing_frozen"),
            ("prefill_frozen", "finishing_prefill_frozen"),
            ("decode_retry", "finishing_retry"),
            ("decode_retry_frozen", "finishing_retry_frozen"),
        )
    ),
    # ... and completed.
    Transition(event="complete_decode_step", source="decoding", target="settled",
               guards=(Not(captures_planned), Not(joiner_waits)), on_publish_failure="settled",
               work_ended="by_runtime_sync", hot=True, steps=(APPLY_ADVANCES, PUBLISH)),
    Transition(event="complete_decode_step", source="decoding", target="seating",
               guards=(Not(captures_planned), joiner_waits), on_publish_failure="seating",
               work_ended="by_runtime_sync", hot=True, steps=(APPLY_ADVANCES, GIVE_BACK, PUBLISH)),
    Transition(event="complete_decode_step", source="decoding", target="settled", guards=(captures_planned,),
               on_failure="broken", on_drain_failure="quarantined", on_publish_failure="settled",
               publish_failure_steps=(RETIRE_RESERVATIONS,), hot=True,
               steps=(APPLY_ADVANCES, *CAPTURE, DRAIN, PUBLISH, RETIRE_RESERVATIONS)),
    Transition(event="complete_decode_step", source="decoding_frozen", target="settled",
               on_publish_failure="settled", work_ended="by_runtime_sync", hot=True, steps=(APPLY_ADVANCES, PUBLISH)),

    # Compaction.
    *(
        Transition(event="begin_batch_compaction", source=source, target="compacting", guards=(guard,),
                   on_failure="broken", steps=(TAKE_TOKEN, *install, COPY_MAPPING))
        for source in ("settled", "seating")
        for guard, install in _VIEWS
    ),
    Transition(event="begin_batch_compaction", source="prefill_frozen", target="compacting", on_failure="broken",
               on_drain_failure="quarantined", on_publish_failure="settled_frozen",
               steps=(TAKE_TOKEN, DRAIN, PUBLISH_FROZEN, COPY_MAPPING)),
    Transition(event="begin_batch_compaction", source="settled_frozen", target="compacting", on_failure="broken",
               on_publish_failure="settled_frozen",
               steps=(TAKE_TOKEN, PUBLISH_FROZEN, *INSTALL_LENGTHS, COPY_MAPPING)),
    Transition(event="compact_batch", source="compacting", target="settled",
               guards=(survivors_remain, Not(joiner_waits)), on_failure="broken", on_drain_failure="quarantined",
               steps=(*COMPACT, CLAIM_VIEW)),
    Transition(event="compact_batch", source="compacting", target="seating",
               guards=(survivors_remain, joiner_waits), on_failure="broken", on_drain_failure="quarantined",
               steps=(*COMPACT, CLAIM_VIEW, GIVE_BACK)),
    Transition(event="compact_batch", source="compacting", target="finishing",
               guards=(Not(survivors_remain),), on_failure="broken", on_drain_failure="quarantined", steps=COMPACT),

    # End of life: one way out. Finishing publishes a frozen endpoint first; dropping never publishes.
    *(row for event in ("finish", "drop") for row in (
        Transition(event=event, source="admitted", target="released", steps=(RELEASE,)),
        *each(("settled", "finishing"), event=event, target="released", steps=WAY_OUT),
        *each(("prefilling", "seating", "decoding", "decode_retry", "compacting", "broken", "finishing_retry"),
              event=event, target="released", on_drain_failure="quarantined", steps=(DRAIN, *WAY_OUT)),
    )),
    *(
        Transition(event="finish", source=source, target="released", on_publish_failure=source,
                   steps=(PUBLISH_FROZEN, *WAY_OUT))
        for source in ("settled_frozen", "finishing_frozen")
    ),
    *each(("settled_frozen", "finishing_frozen"), event="drop", target="released", steps=WAY_OUT),
    *(
        Transition(event="finish", source=source, target="released", on_drain_failure="quarantined",
                   on_publish_failure=rest, steps=(DRAIN, PUBLISH_FROZEN, *WAY_OUT))
        for source, rest in (
            ("prefill_frozen", "settled_frozen"),
            ("decoding_frozen", "settled_frozen"),
            ("decode_retry_frozen", "settled_frozen"),
            ("finishing_prefill_frozen", "finishing_frozen"),
            ("finishing_retry_frozen", "finishing_frozen"),
        )
    ),
    *each(("prefill_frozen", "decoding_frozen", "decode_retry_frozen", "finishing_prefill_frozen",
           "finishing_retry_frozen"),
          event="drop", target="released", on_drain_failure="quarantined", steps=(DRAIN, *WAY_OUT)),
    *each(("quarantined", "poisoned"), event="shutdown", target="released", on_drain_failure="poisoned",
          steps=(DRAIN, *WAY_OUT)),
)  # fmt: skip

REQUEST: Final = MachineSpec(name="request", initial="new", states=_STATES, transitions=_ROWS)
