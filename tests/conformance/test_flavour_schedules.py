"""Scenarios 119, 120 and 122 for every flavour: random schedules with a model at work.

A player makes several requests live against one small coordinator, with device errors, failing drains and failing
publications on purpose. It knows which calls a flat state accepts and where each outcome leads; a call out of turn has
to be refused and to change nothing. The model stub reads everything that a request has ever computed or reused, through
the rows and lengths of the device, and compares it with what a cold run would have computed. After every step the books
of all four pools are checked from outside.

Decisions come from one random-like object: a seed, or Hypothesis, which shrinks.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context_cache.backends import DeviceError
from context_cache.coordinator import CommitPolicy, ContextCacheSequenceAdvance, LookupPolicy

FLAVOURS = ("vanilla", "eagle", "draft", "shared-kv", "hybrid", "recurrent", "hybrid-mtp")
BEFORE_A_STEP = ("settled", "settled_frozen", "prefill_frozen", "decode_retry", "decode_retry_frozen")
BEFORE_A_COMPACTION = ("settled", "settled_frozen", "prefill_frozen")
FROZEN = (
    "settled_frozen finishing_frozen prefill_frozen decoding_frozen decode_retry_frozen finishing_prefill_frozen "
    "finishing_retry_frozen"
).split()
REFUSED_GROWTH = {
    "settled": "finishing",
    "settled_frozen": "finishing_frozen",
    "prefill_frozen": "finishing_prefill_frozen",
    "decode_retry": "finishing_retry",
    "decode_retry_frozen": "finishing_retry_frozen",
}
POOLS = {
    "vanilla": [(4, 0, 0, 0), (6, 0, 0, 0), (9, 0, 0, 0), (12, 0, 0, 0)],
    "eagle": [(6, 6, 0, 0), (8, 7, 0, 0), (9, 11, 0, 0), (12, 12, 0, 0)],
    "draft": [(6, 6, 0, 0), (8, 7, 0, 0), (9, 11, 0, 0), (12, 12, 0, 0)],
    "shared-kv": [(4, 0, 0, 0), (6, 0, 0, 0), (9, 0, 0, 0), (12, 0, 0, 0)],
    "hybrid": [(5, 0, 1, 1), (6, 0, 3, 1), (9, 0, 2, 3), (12, 0, 6, 6)],
    "recurrent": [(0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 4, 0), (0, 0, 8, 0)],
    "hybrid-mtp": [(6, 6, 1, 1), (8, 7, 2, 2), (9, 11, 3, 2), (12, 12, 6, 6)],
}


class Player:
    """Plays one schedule. Decisions never look at resident slots; ``residents`` says which rows the sequences get."""

    def __init__(self, h, rng, *, publishing=None, residents=None, faults=0.06, drains=0.03):
        self.h, self.rng, self.publishing = h, rng, publishing
        self.faults, self.drains = faults, drains
        self.residents = list(range(h.max_batch)) if residents is None else list(residents)
        self.free_seats = list(range(h.max_batch))
        self.seats = {}  # request id -> seats, not given back yet
        self.boundary = {}  # request id -> MTP boundary that may be published
        self.told = []  # what must not depend on resident slots

    # ---- equipment

    def chance(self, probability):
        return self.rng.random() < probability

    def live(self, *states):
        return [x for x in self.h.handles if x.valid and (not states or x.state in states)]

    def views(self, handle):
        return [self.h.seq(handle, slot) for slot in range(self.h.size(handle))]

    def attempt(self, call, *, drains=False, publishes=False):
        """The call with faults on purpose. Returns what came of it: "device", "publish" or "ok", and the answer."""
        h = self.h
        fault = self.rng.choice((1, 2, 3)) if self.chance(self.faults) else None
        drain_ok = not (drains and self.chance(self.drains))
        raising = self.publishing is not None and publishes and self.chance(self.faults)
        if fault is not None:
            h.fail(fault)
        h.sync.fail = not drain_ok
        if raising:
            self.publishing.fail(self.rng.choice((1, 2)))
        try:
            outcome = "ok", call()
        except DeviceError:
            assert fault is not None, "a device error that nobody ordered"
            outcome = "device", None
        except RuntimeError as error:
            if not raising or str(error) != "publish":
                raise
            outcome = "publish", None
        finally:
            h.heal()
            if self.publishing is not None:
                self.publishing.fail()
            self.give_back()
        return outcome

    def give_back(self):
        for handle in self.h.handles:
            owned = self.seats.get(handle.id)
            if owned is None or handle.state in ("quarantined", "poisoned"):
                continue
            here = [v.resident.slot for v in self.views(handle)] if handle.valid else []
            for seat in list(owned):
                if self.residents[seat] not in here:
                    owned.remove(seat)
                    self.free_seats.append(seat)

    def expect(self, handle, outcome, *, ok, device=None, publish=None):
        """The state that the row names for this outcome."""
        what, answer = outcome
        if what == "device":
            assert device is not None, "this row has no device action that may raise"
            assert handle.state == device
        elif what == "publish":
            assert handle.state == publish
        elif answer is self.h.POISONED:
            assert handle.state == "quarantined"
            assert self.h.coordinator.state == "poisoned"
        else:
            assert answer is self.h.OK
            assert handle.state == ok
        return what == "ok" and answer is self.h.OK

    # ---- admission

    def begin(self):
        h, rng = self.h, self.rng
        spec = h.flavour.speculative and not self.chance(0.25)
        count = min(rng.randint(1, h.flavour.batch if spec or not h.mtp else 2), len(self.free_seats))
        if spec and h.mtp:
            count = 1
        headroom = rng.randint(1, 4)
        room = (headroom, rng.randint(1, 4) if spec and h.flavour.paged else 0)
        prompts = [[rng.choice((1, 2)) for _ in range(rng.randint(1, 16 - max(room)))] for _ in range(count)]
        seats = self.free_seats[:count]
        commit = rng.choice(list(CommitPolicy))
        if spec and h.mtp:
            commit = CommitPolicy.PREFILL_STATE_ONLY
        records = h.record_ids()
        lookup = rng.choice([LookupPolicy.USE_CACHE] * 4 + [LookupPolicy.BYPASS])

        def ask(policy):
            sequences = [h.sequence_admission(p, self.residents[s]) for p, s in zip(prompts, seats, strict=True)]
            return h.try_begin(sequences, speculative=spec, headroom=room, commit=commit, lookup=policy)

        result = ask(lookup)
        self.told.append((result.status.name, result.insufficient_capacity))
        if h.coordinator.state == "poisoned":
            assert result.status is h.POISONED
        if result.status is not h.OK:
            assert result.admission is None
            assert set(h.record_ids()) <= set(records)
            if lookup is LookupPolicy.USE_CACHE:
                # Scenario 112: what a hit cannot have, a cold start cannot have either.
                assert ask(LookupPolicy.BYPASS).status is result.status
            assert h.metrics()["forced_cold_sequences"] == 0
            return
        handle = result.admission.request
        h.handles.append(handle)
        self.seats[handle.id] = seats
        del self.free_seats[:count]
        self.told.append(list(result.admission.prefill_starts))
        for view, start, tokens in zip(self.views(handle), result.admission.prefill_starts, prompts, strict=True):
            assert start == view.reuse_token_length == view.committed_state_length
            assert 0 <= start < len(tokens)
            if not h.flavour.checkpoints:
                assert start % 4 == 0

    # ---- prefill

    def lookahead(self, handle):
        return [3] * self.h.size(handle)

    def prepare_prefill(self, handle):
        h = self.h
        if h.coordinator.execution_holder is not None:
            h.refuses(h.coordinator.prepare_prefill, handle)
            return
        done = self.expect(
            handle, self.attempt(lambda: h.coordinator.prepare_prefill(handle)), ok="prefilling", device="broken"
        )
        if not done:
            return
        assert h.coordinator.length_view == handle.id
        if h.mtp and h.paired(handle):
            view = h.seq(handle)
            start, length = int(view.reuse_token_length), int(view.token_count)
            if start:
                assert h.restore_mtp(handle, h.model.hidden, start - 1) is h.OK
            if self.chance(0.8):
                self.boundary[handle.id] = self.rng.randint(start + 1, length)
                h.model.prefill(handle, self.lookahead(handle), self.boundary[handle.id])
                return
        h.model.prefill(handle, self.lookahead(handle))

    def prefilling(self, handle):
        h = self.h
        boundary = self.boundary.pop(handle.id, None)
        if boundary is not None:
            h.synchronize()
            outcome = self.attempt(
                lambda: h.publish_mtp(handle, boundary, h.model.hidden, boundary - 1), drains=True, publishes=True
            )
            self.expect(handle, outcome, ok="prefilling", device="broken", publish="prefilling")
            return
        if h.mtp and h.paired(handle):
            h.model.prefill(handle, self.lookahead(handle))
        elif self.chance(0.7) and all(h.captured(handle, slot) == "none" for slot in range(h.size(handle))):
            outcome = self.attempt(lambda: h.coordinator.enqueue_prefill_captures(handle))
            if not self.expect(handle, outcome, ok="prefilling", device="broken"):
                return
        h.synchronize()
        advances = [ContextCacheSequenceAdvance((3,), int(v.token_count)) for v in self.views(handle)]
        common = h.prefill_common(handle)
        if h.name == "shared-kv" and self.chance(0.5):
            common = None
        outcome = self.attempt(
            lambda: h.coordinator.finalize_prefill_publication(handle, advances, common), publishes=True
        )
        after = "prefill_frozen" if h.freezes(handle) else "settled"
        self.expect(handle, outcome, ok=after, device=None, publish="settled")

    # ---- decode

    def prepare_decode(self, handle):
        h, was = self.h, str(handle.state)
        extra = self.rng.choice((1, 2, 3, 4, 4, 5, 9))
        headroom = (extra, self.rng.choice((1, 2, 4)) if h.paired(handle) else 0)
        if h.coordinator.execution_holder not in (None, handle.id):
            h.refuses(h.prepare_decode, handle, headroom)
            return
        before = h.dump()
        what, result = self.attempt(lambda: h.prepare_decode(handle, headroom))
        if what == "device":
            assert handle.state == ("decode_retry_frozen" if was.endswith("frozen") else "decode_retry")
            return
        self.told.append((result.status.name, result.refusal and list(result.refusal.failed_slots)))
        if result.status is h.OK:
            assert result.refusal is None
            assert handle.state == ("decoding_frozen" if was.endswith("frozen") else "decoding")
            assert h.coordinator.length_view == handle.id
            assert h.cache_manager.active_batch_size == h.size(handle)
            return
        assert result.status is h.REQUEST_FAILED
        failed = list(result.refusal.failed_slots)
        assert failed
        assert failed == sorted(set(failed))
        if h.size(handle) > 1:
            assert h.dump() == before
        else:
            assert handle.state == REFUSED_GROWTH[was]
            assert h.dump()["manager"] == before["manager"]

    def complete(self, handle):
        h, rng = self.h, self.rng
        frozen = handle.state == "decoding_frozen"
        tokens, completed, common = [], [], []
        for slot, view in enumerate(self.views(handle)):
            seated = str(view.state).lower().endswith("seated")
            committed, old = int(view.committed_state_length), int(view.common_state_length)
            most = len(view.base_pages) * 4 - committed if h.flavour.has_attention else 4
            if h.paired(handle):
                most = min(most, len(view.draft_pages) * 4 - committed)
            most = min(most, 4) if h.speculative[handle.id] else 1
            if not seated or most < 1 or self.chance(0.15):
                tokens.append(None)
                common.append(old)
            else:
                tokens.append([rng.choice((1, 2)) for _ in range(rng.randint(1, most))])
                common.append(rng.randint(max(old, committed), committed + len(tokens[-1])))
            if seated and self.chance(0.25):
                completed.append(slot)
        if not h.freezes(handle):
            reported = None
            common = h.model_common(handle, tokens)
        else:
            reported = None if h.name == "shared-kv" and self.chance(0.5) else common
        h.model.decode(handle, tokens, common)
        h.synchronize()
        self.told.append(tokens)
        outcome = self.attempt(
            lambda: h.complete(handle, *tokens, completed=completed, common=reported), drains=True, publishes=True
        )
        device = "broken" if h.flavour.checkpoints and not h.speculative[handle.id] and completed else None
        self.expect(handle, outcome, ok="settled", device=device, publish="settled")
        assert not frozen or not str(handle.state).endswith("frozen")

    # ---- compaction and ends

    def begin_compaction(self, handle):
        h, was = self.h, str(handle.state)
        mapping, kept = [], 0
        for _ in range(h.size(handle)):
            mapping.append(-1 if self.chance(0.5) else kept)
            kept += mapping[-1] >= 0
        if h.coordinator.execution_holder not in (None, handle.id):
            h.refuses(h.begin_compaction, handle, mapping)
            return
        outcome = self.attempt(lambda: h.begin_compaction(handle, mapping), drains=True, publishes=True)
        publish = "settled_frozen" if was.endswith("frozen") else None
        self.expect(handle, outcome, ok="compacting", device="broken", publish=publish)

    def compact(self, handle):
        h = self.h
        outcome = self.attempt(lambda: h.coordinator.compact_batch(handle), drains=True)
        survivors = h.size(handle) if handle.valid else 0
        self.expect(handle, outcome, ok="settled" if survivors else "finishing", device="broken")

    def end(self, handle):
        h, was = self.h, str(handle.state)
        outstanding = was in h.OUTSTANDING
        finish = self.chance(0.5)
        calls = h.sync.calls
        what, answer = self.attempt(
            (lambda: h.finish(handle)) if finish else (lambda: h.drop(handle)), drains=True, publishes=finish
        )
        assert what != "device", "neither finish nor drop raises a device error"
        assert h.sync.calls - calls == int(outstanding)
        if what == "publish":
            assert was in FROZEN
            assert handle.state == ("finishing_frozen" if was.startswith("finishing") else "settled_frozen")
            return
        assert handle.state in ("released", "quarantined")
        assert handle.state == "released" or outstanding
        assert not finish or answer in (h.OK, h.POISONED)
        assert not handle.valid

    def shutdown(self):
        h = self.h
        if not self.live():
            return  # this would close the coordinator; the end of the schedule does that
        withheld = [x for x in h.handles if x.state in ("quarantined", "poisoned")]
        _, answer = self.attempt(h.coordinator.shutdown, drains=True)
        assert answer in (h.POISONED, h.REQUEST_FAILED)
        assert answer is h.POISONED or all(x.state == "released" for x in withheld)

    def ask_out_of_turn(self, handle):
        h, state = self.h, handle.state
        c = h.coordinator
        one = [ContextCacheSequenceAdvance((1,), int(v.token_count)) for v in self.views(handle)]
        hidden = None if h.model.hidden is None else h.model.hidden
        questions = [
            (("admitted",), lambda: c.prepare_prefill(handle)),
            (("prefilling",), lambda: c.enqueue_prefill_captures(handle)),
            (("prefilling",), lambda: c.finalize_prefill_publication(handle, one, h.prefill_common(handle))),
            (BEFORE_A_STEP, lambda: h.prepare_decode(handle)),
            (("decoding", "decoding_frozen"), lambda: h.complete(handle, *[None] * h.size(handle))),
            (BEFORE_A_COMPACTION, lambda: h.begin_compaction(handle, [-1] * h.size(handle))),
            (("compacting",), lambda: c.compact_batch(handle)),
        ]
        if hidden is not None:
            questions.append((("prefilling",), lambda: h.publish_mtp(handle, 1, hidden)))
            questions.append((("prefilling",), lambda: h.restore_mtp(handle, hidden)))
        accepted, call = self.rng.choice(questions)
        if state not in accepted:
            h.refuses(call)

    # ---- one schedule

    def rules(self):
        holder = self.h.coordinator.execution_holder
        free = holder is None
        rules = [
            (4, self.begin, None, bool(self.free_seats)),
            (5 if free else 0.3, self.prepare_prefill, ("admitted",), True),
            (8, self.prefilling, ("prefilling",), True),
            (6, self.prepare_decode, BEFORE_A_STEP, True),
            (9, self.complete, ("decoding", "decoding_frozen"), True),
            (1.5, self.begin_compaction, BEFORE_A_COMPACTION, True),
            (8, self.compact, ("compacting",), True),
            (0.8, self.end, (), True),
            (1, self.ask_out_of_turn, (), True),
            (0.3, self.shutdown, None, True),
            (4, self.end, ("broken", *REFUSED_GROWTH.values()), True),
        ]
        for weight, rule, states, possible in rules:
            if states is None:
                if possible:
                    yield weight, rule
            else:
                for handle in self.live(*states):
                    yield weight, lambda rule=rule, handle=handle: rule(handle)

    def step(self):
        weights, options = zip(*self.rules(), strict=True)
        self.rng.choices(options, weights)[0]()
        self.h.check()

    def play(self, steps):
        for _ in range(steps):
            self.step()
        h = self.h
        self.told.append([h.record(i) for i in h.record_ids()])
        self.told.append(h.counters())
        h.end_everything()
        return self.told


def make(flavour_class, name, rng, **options):
    return flavour_class(
        name,
        pools=rng.choice(POOLS[name]),
        max_batch=rng.choice((2, 2, 3)),
        max_records=rng.choice((None, None, 16, 5, 2, 1, 0)),
        enforce_min_pool=False,
        partly=rng.random() < 0.5,
        **options,
    )


def play_seed(flavour_class, publishing, name, seed, steps):
    rng = random.Random(f"{name} {seed}")
    h = make(flavour_class, name, rng)
    try:
        Player(h, rng, publishing=publishing).play(steps)
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}")
        raise
    finally:
        h.abandon()


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("name", FLAVOURS)
def test_no_seed_breaks_an_invariant_or_reads_another_state(flavour_class, publishing, name, block):
    """Scenarios 119 and 120 by seed, short."""
    for seed in range(block * 5, block * 5 + 5):
        play_seed(flavour_class, publishing, name, seed, steps=70)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("name", FLAVOURS)
def test_no_long_seed_breaks_an_invariant_or_reads_another_state(flavour_class, publishing, name, block):
    """Scenarios 119 and 120 by seed, long."""
    for seed in range(1000 + block * 25, 1000 + block * 25 + 25):
        play_seed(flavour_class, publishing, name, seed, steps=150)


# No clock and no memory of earlier runs: two runs of the suite play the same schedules.
COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "print_blob": True,
}


@pytest.mark.parametrize("name", FLAVOURS)
def test_short_random_schedules_keep_all_invariants(flavour_class, publishing, name):
    """Scenario 119, short: Hypothesis decides and shrinks."""

    @settings(max_examples=6, **COMMON)
    @given(rng=st.randoms(use_true_random=False))
    def schedule(rng):
        h = make(flavour_class, name, rng)
        try:
            Player(h, rng, publishing=publishing).play(25)
        finally:
            h.abandon()

    schedule()


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAVOURS)
def test_long_random_schedules_keep_all_invariants(flavour_class, publishing, name):
    """Scenario 119, long: Hypothesis decides and shrinks."""

    @settings(max_examples=150, **{**COMMON, "derandomize": False})
    @given(rng=st.randoms(use_true_random=False))
    def schedule(rng):
        h = make(flavour_class, name, rng)
        try:
            Player(h, rng, publishing=publishing).play(60)
        finally:
            h.abandon()

    schedule()


# ---- scenario 120, every start length --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("name", FLAVOURS)
def test_what_is_reused_at_any_length_is_what_a_cold_run_computes(flavour_class, name, length):
    """Scenario 120 without faults: a producer of that length, its continuation, and prompts that branch off behind it.

    The stream runs late: nothing is waited for but where the runtime has to.
    """
    pools = {"eagle": (16, 16, 0, 0), "draft": (16, 16, 0, 0), "hybrid-mtp": (16, 16, 8, 8), "recurrent": (0, 0, 8, 0)}
    h = flavour_class(name, pools=pools.get(name, (16, 0, 8, 8) if name == "hybrid" else (16, 0, 0, 0)), row_pages=6)
    prompt = [1 + (n * n) % 7 for n in range(length)]
    starts = []

    def run(tokens, steps, resident=0):
        handle = h.begin(tokens, resident, headroom=None if h.flavour.speculative else (1, 0))
        starts.append(h.starts[0])
        h.play_prefill(handle, [5], len(tokens) if h.mtp else None)
        generated = [*tokens, 5]
        for step in range(steps):
            news = [6, 7][: 2 if h.flavour.speculative else 1]
            if h.prepare_decode(handle, (2, 2 if h.paired(handle) else 0)).status is not h.OK:
                break
            assert h.play_step(handle, [news], [0] if step == steps - 1 else []) is h.OK
            generated += news
            h.check()
        h.finish(handle)
        h.check()
        return generated

    first = run(prompt, 2)
    assert starts == [0]
    run(prompt, 1)
    run(first[: length + 1], 1, 1)
    run([*prompt, 9], 0)
    run([*prompt, 8], 1, 1)
    run([*prompt[:-1], 9, 9], 1)
    run(first[:12], 0)
    h.synchronize()
    assert h.model.wrong == []
    if length >= 9:
        assert max(starts) > 0, starts
    h.end_everything()


# ---- scenario 122 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAVOURS)
@settings(max_examples=4, **COMMON)
@given(seed=st.integers(0, 2**32), residents=st.permutations([0, 1, 2]), pools=st.integers(0, 3))
def test_resident_slot_numbers_change_nothing_but_rows(flavour_class, name, seed, residents, pools):
    """Scenario 122. Same starts, records and metrics, whatever rows the sequences live on."""
    told = []
    for rows in (residents, [0, 1, 2]):
        h = flavour_class(name, pools=POOLS[name][pools], max_batch=3, enforce_min_pool=False)
        told.append(Player(h, random.Random(seed), residents=rows, faults=0, drains=0).play(50))
        h.abandon()
    assert told[0] == told[1]
