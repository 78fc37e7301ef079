"""Scenarios 119 and 122: random schedules under the invariants of spec 20.9 and 50.1.

The machine plays several requests against one small coordinator, with device errors and failing drains on purpose. It
knows which calls a flat state accepts: an accepted call has to work (or fail as its row says), any other call has to be
refused and to change nothing. After every step all books are checked from outside.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from context_cache.backends import DeviceError
from context_cache.coordinator import (
    CommitPolicy,
    ContextCacheSequenceAdvance,
    ContractViolation,
    LookupPolicy,
    ResidentRef,
    ResidentSlotPool,
)

PROMPT = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=15)
TOKEN = st.sampled_from([1, 2, 3])
LOOKUP = st.sampled_from([LookupPolicy.USE_CACHE, LookupPolicy.USE_CACHE, LookupPolicy.BYPASS])
COMMIT = st.sampled_from(list(CommitPolicy))
# None: no fault. A number: the device action of the next call that raises.
FAULT = st.sampled_from([None] * 9 + [1, 2, 3])
DRAIN = st.sampled_from([True] * 9 + [False])
WHO = st.integers(0, 5)
RARELY = st.sampled_from([False, False, False, True])

LIVE = frozenset(
    "admitted prefilling settled seating decoding decode_retry compacting broken finishing finishing_retry".split()
)


def make_machine(harness_class):
    class Schedule(RuleBasedStateMachine):
        @initialize(
            pages=st.one_of(st.integers(2, 12), st.sampled_from([8, 10, 12])),
            max_batch=st.sampled_from([1, 2, 3, 3, 3]),
            max_records=st.sampled_from([None, 0, 1, 2, 5]),
            partly=st.booleans(),
        )
        def build(self, pages, max_batch, max_records, partly):
            self.h = harness_class(
                pages=pages, max_batch=max_batch, max_records=max_records, enforce_min_pool=False, partly=partly
            )
            self.slots = ResidentSlotPool(max_batch)
            self.free_refs = [self.slots.acquire() for _ in range(max_batch)]
            self.owned: dict[int, list[ResidentRef]] = {}
            self.live: list = []
            self.fault: int | None = None
            self.drain_ok = True

        # ---- equipment

        def pick(self, who, *states):
            fitting = [handle for handle in self.live if not states or handle.state in states]
            return fitting[who % len(fitting)] if fitting else None

        def any_in(self, *states):
            return any(handle.state in states for handle in self.live)

        def seqs(self, handle):
            return [self.h.seq(handle, slot) for slot in range(self.h.size(handle))]

        def token_free_for(self, handle):
            return self.h.coordinator.execution_holder in (None, handle.id)

        def attempt(self, call, *, fault=None, drain_ok=True):
            """Make the call with the faults armed. Returns (raised a device error, answer)."""
            if fault is not None:
                self.h.fail(fault)
            self.h.sync.fail = not drain_ok
            try:
                return False, call()
            except DeviceError:
                assert fault is not None, "a device error that nobody ordered"
                return True, None
            finally:
                self.h.heal()
                self.settle_owners()

        def settle_owners(self):
            """Give back resident slots of what is gone; the scheduler may do so only then."""
            for handle in self.h.handles:
                refs = self.owned.get(handle.id)
                if refs is None:
                    continue
                state = str(handle.state)
                if state == "released":
                    keep = []
                elif state in ("quarantined", "poisoned"):
                    keep = refs
                else:
                    here = {(v.resident.slot, v.resident.epoch) for v in self.seqs(handle)}
                    keep = [ref for ref in refs if (ref.slot, ref.epoch) in here]
                for ref in refs:
                    if ref not in keep:
                        assert self.slots.release(ref)
                        self.free_refs.append(self.slots.acquire())
                self.owned[handle.id] = keep
            self.live = [handle for handle in self.h.handles if handle.state in LIVE]

        def model_writes(self, handle):
            """The runtime's duty: at a completion the device lengths of the view equal the ledger."""
            if self.h.coordinator.length_view == handle.id:
                self.h.set_device_lengths([v.committed_state_length for v in self.seqs(handle)])

        def device_agrees(self, handle):
            """A prepared request: rows and lengths on the device are those of the host."""
            for slot, view in enumerate(self.seqs(handle)):
                assert self.h.device_row(view.resident.slot) == self.h.row(view.resident.slot)
                if "bound" not in str(view.state).lower():
                    lengths = self.h.device_lengths(self.h.size(handle))
                    assert lengths[slot] == view.committed_state_length, f"slot {slot} of {lengths}"
            assert self.h.cache_manager.active_batch_size == self.h.size(handle)
            self.h.check_device_rows()

        # ---- admission

        @precondition(lambda self: self.free_refs)
        @rule(
            prompts=st.lists(PROMPT, min_size=1, max_size=3), lookup=LOOKUP, commit=COMMIT, headroom=st.integers(1, 4)
        )
        def begin(self, prompts, lookup, commit, headroom):
            self.start(prompts, lookup, commit, headroom)

        def start(self, prompts, lookup, commit, headroom):
            h = self.h
            count = min(len(prompts), len(self.free_refs))
            prompts = [p[: 16 - headroom] for p in prompts[:count]]
            refs = self.free_refs[:count]
            free, counters = h.free(), h.counters()
            result = h.try_begin(
                [h.sequence_admission(p, ref) for p, ref in zip(prompts, refs, strict=True)],
                lookup=lookup,
                commit=commit,
                headroom=headroom,
            )
            if h.coordinator.state == "poisoned":
                assert result.status is h.POISONED
            if result.status is not h.OK:
                assert result.admission is None
                assert set(free) <= set(h.free())
                assert {**counters, **self.evictions()} == {**h.counters(), **self.evictions()}
                return
            handle = result.admission.request
            h.handles.append(handle)
            self.live.append(handle)
            self.owned[handle.id] = refs
            self.free_refs = self.free_refs[count:]
            for view, start, prompt in zip(self.seqs(handle), result.admission.prefill_starts, prompts, strict=True):
                assert start == view.reuse_token_length == view.committed_state_length
                assert 0 <= start < len(prompt)
                assert start % 4 == 0
                assert len(view.base_pages) == -(-(len(prompt) + headroom) // 4)

        def evictions(self):
            # Evictions of a refused admission stay done (40.3).
            moving = ("evict", "reclaim", "record", "free", "idle")
            return {name: 0 for name in self.h.counters() if any(part in name for part in moving)}

        @precondition(lambda self: self.free_refs and self.any_in("settled", "seating"))
        @rule(who=WHO, prompt=PROMPT, fault=FAULT, drain_ok=DRAIN)
        def admit(self, who, prompt, fault, drain_ok):
            h = self.h
            handle = self.pick(who, "settled", "seating")
            was, size = handle.state, h.size(handle)
            if size == h.max_batch or not self.token_free_for(handle):
                return
            ref = self.free_refs[0]
            active = h.all_active()
            raised, result = self.attempt(lambda: h.admit(handle, prompt, ref), fault=fault, drain_ok=drain_ok)
            if raised:
                assert handle.state == (was if drain_ok else "quarantined")
                if drain_ok:
                    assert h.all_active() == active
                else:
                    self.owned[handle.id].append(self.free_refs.pop(0))
                return
            if result.status is h.OK:
                assert handle.state == "seating"
                self.free_refs.pop(0)
                self.owned[handle.id].append(ref)
                h.seat(size + 1)
                h.set_device_lengths([v.committed_state_length for v in self.seqs(handle)])
            else:
                assert result.prefill_start == 0
                assert handle.state == was

        @precondition(lambda self: self.any_in("seating"))
        @rule(who=WHO, token=TOKEN)
        def finalize_admission(self, who, token):
            h = self.h
            handle = self.pick(who, "seating")
            waiting = [slot for slot, v in enumerate(self.seqs(handle)) if "bound" in str(v.state).lower()]
            slot = waiting[0]
            length = h.seq(handle, slot).token_count
            h.synchronize()
            answer = h.coordinator.finalize_sequence_admission(
                handle, slot, ContextCacheSequenceAdvance((token,), length)
            )
            if h.coordinator.state == "poisoned":
                assert answer is h.POISONED
                assert h.seq(handle, slot).token_count == length
                return
            assert answer is h.OK
            assert handle.state == ("settled" if len(waiting) == 1 else "seating")
            self.model_writes(handle)

        @rule(who=WHO, fault=FAULT, drain_ok=DRAIN)
        def retract(self, who, fault, drain_ok):
            h = self.h
            handle = self.pick(who)
            if handle is None:
                return
            tail = self.seqs(handle)[-1] if h.size(handle) else None
            legal = handle.state == "seating" and tail is not None and "bound" in str(tail.state).lower()
            if legal and h.size(handle) == 1:
                return  # the only sequence: refused or poisoned by rule, outside this schedule
            before = h.dump()
            raised, answer = self.attempt(
                lambda: h.coordinator.retract_sequence_admission(handle), fault=fault, drain_ok=drain_ok
            )
            assert not raised, "retract never raises"
            if not legal:
                assert answer is False
                assert h.dump() == before
            elif not drain_ok:
                assert answer is False
                assert handle.state == "quarantined"
            elif answer is False:
                assert h.coordinator.state == "poisoned"
                assert handle.state in ("settled", "seating")
            else:
                assert handle.state in ("settled", "seating")

        # ---- a whole stretch of an ordinary life, so that schedules get beyond the first calls

        def prefill(self, handle, token):
            h = self.h
            assert h.coordinator.prepare_prefill(handle) is h.OK
            self.device_agrees(handle)
            advances = [ContextCacheSequenceAdvance((token,), v.token_count) for v in self.seqs(handle)]
            assert h.coordinator.finalize_prefill_publication(handle, advances) is h.OK
            assert handle.state == "settled"
            self.model_writes(handle)

        @precondition(lambda self: self.any_in("admitted") and self.h.coordinator.execution_holder is None)
        @rule(who=WHO, token=TOKEN)
        def whole_prefill(self, who, token):
            self.prefill(self.pick(who, "admitted"), token)

        @precondition(lambda self: len(self.free_refs) > 0 and self.h.coordinator.state == "serving")
        @rule(prompts=st.lists(PROMPT, min_size=1, max_size=2), token=TOKEN)
        def begin_and_prefill(self, prompts, token):
            known = len(self.h.handles)
            self.start(prompts, LookupPolicy.USE_CACHE, CommitPolicy.INCLUDING_GENERATED_TOKENS, 1)
            if len(self.h.handles) > known and self.h.coordinator.execution_holder is None:
                self.prefill(self.h.handles[-1], token)

        @precondition(lambda self: self.any_in("settled", "seating"))
        @rule(who=WHO, token=TOKEN, ends=st.integers(0, 7))
        def whole_step(self, who, token, ends):
            h = self.h
            handle = self.pick(who, "settled", "seating")
            if self.token_free_for(handle) and h.prepare_decode(handle).status is h.OK:
                self.device_agrees(handle)
                self.step(handle, token, 0, ends)
            self.settle_owners()

        # ---- prefill

        @precondition(lambda self: self.any_in("admitted"))
        @rule(who=WHO, fault=FAULT)
        def prepare_prefill(self, who, fault):
            h = self.h
            handle = self.pick(who, "admitted")
            if not self.token_free_for(handle) or h.coordinator.execution_holder is not None:
                with pytest.raises(ContractViolation):
                    h.coordinator.prepare_prefill(handle)
                return
            raised, answer = self.attempt(lambda: h.coordinator.prepare_prefill(handle), fault=fault)
            if raised:
                assert handle.state == "broken"
                return
            assert answer is h.OK
            assert handle.state == "prefilling"
            if who % 2:
                self.device_agrees(handle)

        @precondition(lambda self: self.any_in("prefilling"))
        @rule(who=WHO, token=TOKEN)
        def finalize_prefill(self, who, token):
            h = self.h
            handle = self.pick(who, "prefilling")
            h.synchronize()
            advances = [ContextCacheSequenceAdvance((token,), v.token_count) for v in self.seqs(handle)]
            assert h.coordinator.finalize_prefill_publication(handle, advances) is h.OK
            assert handle.state == "settled"
            self.model_writes(handle)

        # ---- decode

        @precondition(lambda self: self.any_in("settled", "seating", "decode_retry"))
        @rule(who=WHO, headroom=st.integers(1, 5), fault=FAULT)
        def prepare_decode(self, who, headroom, fault):
            h = self.h
            handle = self.pick(who, "settled", "seating", "decode_retry")
            if not self.token_free_for(handle):
                h.refuses(h.prepare_decode, handle, headroom)
                return
            was, before = handle.state, h.dump()
            raised, result = self.attempt(lambda: h.prepare_decode(handle, headroom), fault=fault)
            if raised:
                assert handle.state == "decode_retry"
                return
            if result.status is h.OK:
                assert result.refusal is None
                assert handle.state == "decoding"
                self.device_agrees(handle)
                for view in self.seqs(handle):
                    if "seated" in str(view.state).lower():
                        assert len(view.base_pages) * 4 >= view.committed_state_length + headroom
                return
            assert result.status is h.REQUEST_FAILED
            failed = list(result.refusal.failed_slots)
            assert failed == sorted(set(failed))
            assert failed
            if h.size(handle) > 1:
                assert h.dump() == before
                assert handle.state == was
            else:
                assert handle.state == ("finishing_retry" if was == "decode_retry" else "finishing")
                assert h.dump()["manager"] == before["manager"]

        @precondition(lambda self: self.any_in("decoding"))
        @rule(who=WHO, token=TOKEN, holds=st.integers(0, 7), ends=st.integers(0, 7))
        def complete_decode(self, who, token, holds, ends):
            self.step(self.pick(who, "decoding"), token, holds, ends)

        def step(self, handle, token, holds, ends):
            h = self.h
            h.synchronize()
            tokens, completed = [], []
            for slot, view in enumerate(self.seqs(handle)):
                seated = "seated" in str(view.state).lower()
                tokens.append(token if seated and not holds >> slot & 1 else None)
                if seated and ends >> slot & 1:
                    completed.append(slot)
            assert h.complete(handle, *tokens, completed=completed) is h.OK
            waiting = any("bound" in str(v.state).lower() for v in self.seqs(handle))
            assert handle.state == ("seating" if waiting else "settled")
            assert h.coordinator.execution_holder is None
            self.model_writes(handle)

        # ---- compaction

        @precondition(lambda self: self.any_in("settled", "seating"))
        @rule(who=WHO, leave=st.integers(0, 7), fault=FAULT)
        def begin_compaction(self, who, leave, fault):
            h = self.h
            handle = self.pick(who, "settled", "seating")
            mapping, kept = [], 0
            for slot in range(h.size(handle)):
                mapping.append(-1 if leave >> slot & 1 else kept)
                kept += mapping[-1] >= 0
            if not self.token_free_for(handle):
                h.refuses(h.begin_compaction, handle, mapping)
                return
            raised, answer = self.attempt(lambda: h.begin_compaction(handle, mapping), fault=fault)
            if raised:
                assert handle.state == "broken"
                return
            assert answer is h.OK
            assert handle.state == "compacting"
            self.kept = [h.seq(handle, slot).resident for slot, new in enumerate(mapping) if new >= 0]

        @precondition(lambda self: self.any_in("compacting"))
        @rule(who=WHO, fault=FAULT, drain_ok=DRAIN)
        def compact(self, who, fault, drain_ok):
            h = self.h
            handle = self.pick(who, "compacting")
            raised, answer = self.attempt(lambda: h.coordinator.compact_batch(handle), fault=fault, drain_ok=drain_ok)
            if raised:
                assert handle.state == "broken"
                return
            if not drain_ok:
                assert answer is h.POISONED
                assert handle.state == "quarantined"
                return
            assert answer is h.OK
            views = self.seqs(handle)
            assert [view.resident for view in views] == self.kept
            waiting = any("bound" in str(v.state).lower() for v in views)
            assert handle.state == ("finishing" if not views else "seating" if waiting else "settled")

        # ---- ends

        @rule(who=WHO, really=RARELY, drop=st.booleans(), fault=FAULT, drain_ok=DRAIN)
        def end(self, who, really, drop, fault, drain_ok):
            h = self.h
            handle = self.pick(who)
            if handle is None or not really:
                return
            outstanding = handle.state in h.OUTSTANDING
            calls = h.sync.calls
            raised, answer = self.attempt(
                (lambda: h.drop(handle)) if drop else (lambda: h.finish(handle)), fault=fault, drain_ok=drain_ok
            )
            assert not raised, "neither finish nor drop raises a device error"
            assert h.sync.calls - calls == int(outstanding)
            if outstanding and not drain_ok:
                assert handle.state == "quarantined"
                assert drop or answer is h.POISONED
            else:
                assert handle.state == "released"
                assert drop or answer in (h.OK, h.POISONED)
            assert not handle.valid

        @rule(drain_ok=DRAIN)
        def shutdown(self, drain_ok):
            h = self.h
            if not self.live:
                return  # this would close the coordinator; teardown does that
            withheld = [x for x in h.handles if x.state in ("quarantined", "poisoned")]
            _, answer = self.attempt(h.coordinator.shutdown, drain_ok=drain_ok)
            if withheld and not drain_ok:
                assert answer is h.POISONED
                assert withheld[-1].state in ("quarantined", "poisoned")
            else:
                assert answer is h.REQUEST_FAILED
                assert all(x.state == "released" for x in withheld)

        # ---- what nobody may do

        @rule(who=WHO, what=st.integers(0, 6))
        def ask_out_of_turn(self, who, what):
            h = self.h
            handle = self.pick(who)
            if handle is None:
                return
            c, state = h.coordinator, handle.state
            one = [ContextCacheSequenceAdvance((1,), v.token_count) for v in self.seqs(handle)]
            accepted_in, call = [
                ({"admitted"}, lambda: c.prepare_prefill(handle)),
                ({"prefilling"}, lambda: c.finalize_prefill_publication(handle, one)),
                ({"settled", "seating", "decode_retry"}, lambda: h.prepare_decode(handle)),
                ({"decoding"}, lambda: c.complete_decode_step(handle, one, ())),
                ({"settled", "seating"}, lambda: h.begin_compaction(handle, [-1] * h.size(handle))),
                ({"compacting"}, lambda: c.compact_batch(handle)),
                ({"prefilling"}, lambda: c.enqueue_prefill_captures(handle)),
            ][what]
            if state not in accepted_in:
                h.refuses(call)

        # ---- always

        @invariant()
        def books_balance(self):
            if hasattr(self, "h"):
                self.h.check()

        def teardown(self):
            if hasattr(self, "h"):
                if self.h.coordinator.state != "closed":
                    self.h.end_everything()
                with suppress(Exception):
                    self.h.abandon()

    return Schedule


# No clock and no memory of earlier runs: two runs of the suite play the same schedules (cases C129, C130).
COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "print_blob": True,
}


def test_short_random_schedules_keep_all_invariants(harness_class):
    """Scenario 119, short profile."""
    run_state_machine_as_test(
        make_machine(harness_class), settings=settings(max_examples=40, stateful_step_count=40, **COMMON)
    )


@pytest.mark.slow
def test_long_random_schedules_keep_all_invariants(harness_class):
    """Scenario 119, long profile."""
    run_state_machine_as_test(
        make_machine(harness_class),
        settings=settings(max_examples=600, stateful_step_count=120, **{**COMMON, "derandomize": False}),
    )


# ---- the same rules, chosen by a seed with weights that go deep ------------------------------------------------------


def play_seed(harness_class, seed, steps):
    """One seed, one schedule. A failing seed is the bug report; Hypothesis shrinks, this one digs."""
    rng = random.Random(seed)
    machine = make_machine(harness_class)()
    machine.build(
        pages=rng.choice([4, 6, 8, 10, 12, 12]),
        max_batch=rng.choice([2, 3, 3]),
        max_records=rng.choice([None, None, 0, 1, 2, 5]),
        partly=rng.random() < 0.5,
    )

    def prompt():
        return [rng.choice((1, 2)) for _ in range(rng.randint(1, 13))]

    def fault():
        return rng.choice((1, 2, 3)) if rng.random() < 0.06 else None

    def drain_ok():
        return rng.random() > 0.03

    def bits():
        return rng.randrange(8) & rng.randrange(8)

    def who():
        return rng.randrange(6)

    def token():
        return rng.choice((1, 2, 3))

    def prompts():
        return [prompt() for _ in range(rng.choice((1, 1, 2)))]

    lookups = [LookupPolicy.USE_CACHE, LookupPolicy.USE_CACHE, LookupPolicy.BYPASS]
    rules = [
        (3, lambda: machine.free_refs, lambda: machine.begin(
            prompts(), rng.choice(lookups), rng.choice(list(CommitPolicy)), rng.randint(1, 3))),
        (4, lambda: machine.any_in("admitted"), lambda: machine.prepare_prefill(who(), fault())),
        (6, lambda: machine.any_in("prefilling"), lambda: machine.finalize_prefill(who(), token())),
        (5, lambda: machine.free_refs and machine.any_in("settled", "seating"),
            lambda: machine.admit(who(), prompt(), fault(), drain_ok())),
        (3, lambda: machine.any_in("seating"), lambda: machine.finalize_admission(who(), token())),
        (1, lambda: True, lambda: machine.retract(who(), fault(), drain_ok())),
        (6, lambda: machine.any_in("settled", "seating", "decode_retry"),
            lambda: machine.prepare_decode(who(), rng.randint(1, 4), fault())),
        (8, lambda: machine.any_in("decoding"), lambda: machine.complete_decode(who(), token(), bits(), bits())),
        (2, lambda: machine.any_in("settled", "seating"), lambda: machine.begin_compaction(who(), bits(), fault())),
        (6, lambda: machine.any_in("compacting"), lambda: machine.compact(who(), fault(), drain_ok())),
        (1, lambda: True, lambda: machine.end(who(), True, rng.random() < 0.5, fault(), drain_ok())),
        (0.3, lambda: True, lambda: machine.shutdown(drain_ok())),
        (1, lambda: True, lambda: machine.ask_out_of_turn(who(), rng.randrange(7))),
    ]  # fmt: skip
    for _ in range(steps):
        open_rules = [(weight, go) for weight, possible, go in rules if possible()]
        rng.choices([go for _, go in open_rules], [weight for weight, _ in open_rules])[0]()
        machine.books_balance()
    machine.teardown()


@pytest.mark.parametrize("seed", range(60))
def test_no_seed_breaks_an_invariant(harness_class, seed):
    """Scenario 119 by seed."""
    play_seed(harness_class, seed, steps=80)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_no_long_seed_breaks_an_invariant(harness_class, first):
    """Scenario 119 by seed, long."""
    for seed in range(first, first + 50):
        try:
            play_seed(harness_class, seed, steps=200)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# ---- scenario 122 ------------------------------------------------------------


def play(h, seed, residents):
    """A random schedule whose decisions never look at resident slots. Returns all that must not depend on them."""
    rng = random.Random(seed)
    told: list[object] = []
    live: dict[int, tuple[object, list[int]]] = {}
    free = [0, 1, 2]
    for step in range(40):
        kind = rng.choice(["begin", "begin", "admit", "decode", "decode", "compact", "end"])
        prompt = [rng.choice((1, 2)) for _ in range(rng.randint(1, 12))]
        key = rng.choice(sorted(live)) if live else None
        if kind == "begin" and free:
            slot = free.pop(0)
            result = h.try_begin([h.sequence_admission(prompt, residents[slot])])
            told.append((step, result.status.name, result.insufficient_capacity))
            if result.status is not h.OK:
                free.append(slot)
                continue
            handle = result.admission.request
            h.handles.append(handle)
            told.append(list(result.admission.prefill_starts))
            h.run_prefill(handle, 3)
            live[step] = (handle, [slot])
            continue
        if key is None:
            continue
        handle, slots = live[key]
        if kind == "admit" and free:
            slot = free.pop(0)
            result = h.admit(handle, prompt, residents[slot])
            told.append((step, result.status.name, result.insufficient_capacity, result.prefill_start))
            if result.status is h.OK:
                slots.append(slot)
                h.seat(len(slots))
                length = h.seq(handle, len(slots) - 1).token_count
                h.synchronize()
                h.coordinator.finalize_sequence_admission(
                    handle, len(slots) - 1, ContextCacheSequenceAdvance((3,), length)
                )
            else:
                free.append(slot)
        elif kind == "decode":
            result = h.prepare_decode(handle, rng.randint(1, 4))
            told.append((step, result.status.name, result.refusal and list(result.refusal.failed_slots)))
            if result.status is h.OK:
                h.synchronize()
                told.append(h.device_lengths(len(slots)))
                seated = ["seated" in str(h.seq(handle, s).state).lower() for s in range(len(slots))]
                completed = [s for s in range(len(slots)) if seated[s] and rng.random() < 0.3]
                h.complete(handle, *[4 if alive else None for alive in seated], completed=completed)
                h.set_device_lengths([h.committed(handle, s) for s in range(len(slots))])
            elif handle.state == "finishing":
                kind = "end"
        elif kind == "compact":
            leave = rng.randrange(len(slots))
            mapping = [-1 if s == leave else s - (s > leave) for s in range(len(slots))]
            h.compact(handle, mapping)
            free.append(slots.pop(leave))
            told.append((step, str(handle.state)))
            if not slots:
                kind = "end"
        if kind == "end":
            told.append((step, h.finish(handle).name))
            free.extend(slots)
            del live[key]
        told.append((h.records(), h.free(), [h.pages(x, 0) for x, _ in live.values() if h.size(x)]))
    told.append(h.records())
    told.append(h.counters())
    h.end_everything()
    return told


@settings(max_examples=25, **COMMON)
@given(seed=st.integers(0, 2**32), residents=st.permutations([0, 1, 2]), pages=st.integers(4, 12))
def test_resident_slot_numbers_change_nothing_but_rows(harness_class, seed, residents, pages):
    """Scenario 122. Same starts, records and metrics, whatever rows the sequences live on."""
    options = {"pages": pages, "enforce_min_pool": False}
    assert play(harness_class(**options), seed, residents) == play(harness_class(**options), seed, [0, 1, 2])
