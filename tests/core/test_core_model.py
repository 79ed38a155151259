"""The pool against a model that is too simple to be wrong: sets of keys, plain loops, no masks, no buckets."""

import math
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from xxhash import xxh3_64_intdigest

from fullhit.core import (
    DeviceClass,
    NoEligibleWorker,
    Pool,
    PoolFull,
    PoolSettings,
    Reason,
    SelectRequest,
    WorkerSpec,
)
from fullhit.core.policies import POLICIES

KEYS = [bytes([i]) * 15 + bytes([i % 3]) for i in range(6)]
IDS = ("a", "b", "c", "d", "e")
DEVICES = ["cuda", "cpu", "xpu"]
MAX_WORKERS = 4
PREDICTED_ENTRIES, PREDICTED_BYTES = 3, 100

THREE_CLASSES = (DeviceClass("cpu", 8, ("cpu",)), DeviceClass("gpu", 1, ("cuda",)), DeviceClass("xpu", 3, ("xpu",)))


def place(data):
    return (xxh3_64_intdigest(data) >> 11) * 2.0**-53


class ModelWorker:
    def __init__(self, spec):
        self.spec = spec
        self.keys = set()
        self.recent = {}  # predicted: key -> size, the oldest first
        self.inflight = self.encoding = 0
        self.ready = self.draining = self.doubtful = self.publishing = False
        self.present = True

    @property
    def load(self):
        return self.inflight / self.spec.weight

    @property
    def eligible(self):
        limit = self.spec.max_inflight
        return self.ready and not self.draining and (limit is None or self.inflight < limit)

    def distance(self, key, points):
        count = max(1, round(points * self.spec.weight))
        return min((place(b"%b#%d" % (self.spec.id.encode(), i)) - place(key)) % 1.0 for i in range(count))


class PoolMachine(RuleBasedStateMachine):
    policy = "device-aware-weighted"
    ids = IDS
    max_workers = MAX_WORKERS
    tickets = Bundle("tickets")
    fills = Bundle("fills")

    # -- the start

    @initialize(
        ratio=st.integers(1, 4),
        prefer=st.sampled_from(["gpu", "any"]),
        classes=st.sampled_from([(), THREE_CLASSES]),
        seed=st.integers(0, 9),
        crew=st.lists(
            st.tuples(st.sampled_from(DEVICES), st.booleans(), st.sets(st.sampled_from(KEYS))),
            min_size=2,
            max_size=MAX_WORKERS,
        ),
    )
    def start(self, ratio, prefer, classes, seed, crew):
        self.settings = PoolSettings(
            policy=self.policy,
            ratio=ratio,
            full_hit_prefer=prefer,
            classes=classes,
            max_workers=self.max_workers,
            predicted_entries=PREDICTED_ENTRIES,
            predicted_bytes=PREDICTED_BYTES,
            ring_points=8,
        )
        self.now = 0.0
        self.pool = Pool("p", self.settings, clock=lambda: self.now, rng=random.Random(seed))
        self.capacity_calls = 0
        self.pool.on_capacity.append(self.note_capacity)
        self.model = {}
        self.kept = []  # tickets never released
        self.held = []  # model workers with a slot each, removed ones too
        self.queue = []  # round robin
        for id, (device, publishes, keys) in zip(self.ids, crew, strict=False):
            self.add_worker(id, device, 1.0, None, True)
            if publishes:
                self.apply_delta(id, sorted(keys), [])
            else:
                self.record_encoded(id, [(key, 1) for key in sorted(keys)])

    def note_capacity(self):
        self.capacity_calls += 1

    def follow(self):
        """Who joined or left the eligible ones, as the round-robin queue should see it."""
        able = {w for w in self.model.values() if w.eligible}
        self.queue = [w for w in self.queue if w in able]
        self.queue += [w for w in self.model.values() if w.eligible and w not in self.queue]

    # -- workers

    @rule(
        id=st.sampled_from(IDS),
        device=st.sampled_from(DEVICES),
        weight=st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.5]),
        limit=st.sampled_from([None, None, 1, 2]),
        ready=st.booleans(),
    )
    def add_worker(self, id, device, weight, limit, ready):
        spec = WorkerSpec(id, id, device, weight, limit)
        known = self.model.get(id)
        if known is None and len(self.model) == self.max_workers:
            with pytest.raises(PoolFull):
                self.pool.add_worker(spec)
            return
        changed = known is not None and (device, weight, limit) != (
            known.spec.device,
            known.spec.weight,
            known.spec.max_inflight,
        )
        self.pool.add_worker(spec)
        if known is None:
            self.model[id] = ModelWorker(spec)
        else:
            known.spec = spec
            if changed and known in self.queue:
                self.queue.remove(known)
        self.follow()
        if ready:
            self.pool.set_ready(id, True)
            self.model[id].ready = True
            self.follow()

    @rule(id=st.sampled_from(IDS), sure=st.sampled_from([False, False, True]))
    def remove_worker(self, id, sure):
        if not sure:
            return
        worker = self.model.pop(id, None)
        assert self.pool.remove_worker(id) == (worker is not None)
        if worker is not None:
            worker.present = False
        self.follow()

    @rule(
        id=st.sampled_from(IDS),
        change=st.sampled_from(
            [("ready", True), ("ready", True), ("ready", False), ("draining", False), ("draining", True)]
            + [(flag, value) for flag in ("doubtful", "publishing") for value in (False, True)]
        ),
    )
    def set_flag(self, id, change):
        flag, value = change
        calls = self.capacity_calls
        getattr(self.pool, f"set_{flag}")(id, value)
        worker = self.model.get(id)
        if worker is None:
            return
        before = worker.eligible
        if flag == "publishing" and worker.publishing != value:
            worker.keys.clear()
            worker.recent.clear()
        setattr(worker, flag, value)
        assert (self.capacity_calls > calls) == (worker.eligible and not before)
        self.follow()

    # -- keys

    @rule(
        id=st.sampled_from(IDS),
        added=st.lists(st.sampled_from(KEYS), max_size=6),
        removed=st.lists(st.sampled_from(KEYS), max_size=3),
    )
    def apply_delta(self, id, added, removed):
        self.pool.apply_delta(id, added, removed)
        worker = self.model.get(id)
        if worker is not None:
            if not worker.publishing:
                worker.publishing = True
                worker.keys.clear()
                worker.recent.clear()
            worker.keys -= set(removed)
            worker.keys |= set(added)

    @rule(id=st.sampled_from(IDS))
    def clear(self, id):
        self.pool.clear(id)
        if id in self.model:
            self.model[id].keys.clear()
            self.model[id].recent.clear()

    @rule(id=st.sampled_from(IDS), items=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 60)), max_size=4))
    def record_encoded(self, id, items):
        self.pool.record_encoded(id, items)
        worker = self.model.get(id)
        if worker is None or worker.publishing:
            return
        recent = worker.recent
        for key, size in items:
            recent.pop(key, None)
            recent[key] = size
            while len(recent) > PREDICTED_ENTRIES or sum(recent.values()) > PREDICTED_BYTES:
                del recent[next(iter(recent))]
        worker.keys = set(recent)

    @rule(target=fills, id=st.sampled_from(IDS))
    def begin_fill(self, id):
        return self.pool.begin_fill(id), self.model.get(id), set()

    @rule(fill=fills, keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def fill_add(self, fill, keys):
        real, _, mine = fill
        real.add(keys)
        mine |= set(keys)
        if real.open:
            assert real.key_count == len(mine)

    @rule(fill=consumes(fills), commit=st.booleans())
    def fill_end(self, fill, commit):
        real, worker, mine = fill
        was_open = real.open
        if worker is None or not worker.present:
            assert not was_open
        if not commit:
            real.abort()
            assert not real.open
            return
        assert real.commit() == was_open
        assert not real.commit()
        if was_open:
            worker.keys = set(mine)
            worker.publishing = True
            worker.recent.clear()

    @rule(budget=st.integers(1, 300))
    def sweep(self, budget):
        self.pool.sweep(budget)

    # -- selection

    @rule(times=st.integers(1, 6), keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def select_and_forget(self, times, keys):
        for _ in range(times):
            taken = self.select(keys, 0, set(), False)
            if isinstance(taken, tuple):
                self.kept.append(taken[0])

    @rule(
        target=tickets,
        keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True),
        unkeyed=st.sampled_from([0, 0, 0, 1]),
        exclude=st.sets(st.sampled_from(IDS), max_size=2) | st.just(set()),
        dry=st.sampled_from([False, False, False, True]),
    )
    def select(self, keys, unkeyed, exclude, dry):
        request = SelectRequest(tuple(keys), len(keys) + unkeyed, "r", frozenset(exclude), dry, unkeyed)
        able = [w for w in self.model.values() if w.eligible and w.spec.id not in exclude]
        if not able:
            with pytest.raises(NoEligibleWorker) as caught:
                self.pool.select(request)
            assert caught.value.kind == self.expected_kind(exclude)
            return multiple()
        allowed, groups = self.expected(request, able)
        decision = self.pool.select(request)
        chosen = self.model[decision.worker.id]
        assert chosen in allowed, (decision.record(), [w.spec.id for w in allowed])
        assert decision.reason == self.expected_reason(request, able, chosen)
        if decision.reason == Reason.FULL_HIT:
            assert not chosen.doubtful and chosen.publishing and set(keys) <= chosen.keys
        record = decision.record()
        assert record["candidates"][0]["worker"] == chosen.spec.id
        assert record["candidates"][0]["inflight"] == chosen.inflight
        assert decision.keys_held == record["candidates"][0]["keys_held"] == len(set(keys) & chosen.keys)
        for candidate in record["candidates"]:
            other = self.model[candidate["worker"]]
            assert other in able
            if candidate["inflight"] is None:  # the record keeps the loads near the least one, not all of them
                assert len(able) > 16 or other.inflight - min(w.inflight for w in able) >= 64
            else:
                assert candidate["inflight"] == other.inflight
            assert candidate["doubtful"] == other.doubtful
            assert candidate["keys_held"] == len(set(keys) & other.keys)
        assert [(g["class"], g["workers"], g["encoding"], g["allowed"]) for g in record["groups"]] == groups
        if dry:
            assert decision.ticket is None
            return multiple()
        encoding = decision.reason not in (Reason.FULL_HIT, Reason.PREDICTED)
        chosen.inflight += 1
        chosen.encoding += encoding
        if chosen in self.queue:
            self.queue.remove(chosen)
            self.queue.append(chosen)
        self.follow()
        self.held.append(chosen)
        return decision.ticket, chosen, encoding

    @rule(ticket=tickets)
    def release(self, ticket):
        real, worker, _ = ticket
        first = not real.released
        before = worker.eligible
        calls = self.capacity_calls
        still = real.encoding
        assert real.release() == first
        if first:
            self.held.remove(worker)
            worker.inflight -= 1
            worker.encoding -= still
            if worker.present:
                assert (self.capacity_calls > calls) == (worker.eligible and not before)
        assert not real.release()
        self.follow()

    @rule(ticket=tickets)
    def encoded(self, ticket):
        real, worker, encoding = ticket
        counts = not real.released and real.encoding
        assert not counts or encoding
        calls = self.capacity_calls
        assert real.encoded() == counts
        worker.encoding -= counts
        assert not real.encoded() and self.capacity_calls == calls

    # -- what should come out

    def expected_kind(self, exclude):
        fit = [w for w in self.model.values() if w.ready and not w.draining]
        if not self.model:
            return "empty_pool"
        if any(w.spec.id not in exclude for w in fit):
            return "all_busy"
        return "all_excluded" if fit else "all_down"

    def expected_reason(self, request, able, chosen):
        keys = set(request.keys)
        if not keys:
            return Reason.MISS if request.items else Reason.NO_MEDIA
        if keys <= chosen.keys and not request.unkeyed and not chosen.doubtful:
            return Reason.FULL_HIT if chosen.publishing else Reason.PREDICTED
        return Reason.PARTIAL_HIT if any(keys & w.keys for w in able) else Reason.MISS

    def oldest(self, workers):
        """The least loaded; among equals the one that has been at its load longest."""
        least = min(w.load for w in workers)
        return [min((w for w in workers if w.load == least), key=lambda w: self.pool.get(w.spec.id).stamp)]

    def nearest(self, key, workers):
        return [min(workers, key=lambda w: w.distance(key, self.settings.ring_points))]

    def class_of(self, worker):
        return self.settings.class_of(worker.spec.device)

    def expected(self, request, able):
        """Workers any of which is right, and the numbers of the group rule."""
        policy = self.settings.policy
        if policy == "device-aware-weighted":
            return self.expected_device_aware(request, able)
        if policy == "least-loaded":
            return self.oldest(able), []
        if policy == "round-robin":
            return [next(w for w in self.queue if w in able)], []
        if policy == "random":
            return able, []
        if policy == "power-of-two":
            return [w for w in able if len(able) == 1 or any(o.load >= w.load for o in able if o is not w)], []
        if not request.keys:
            return self.oldest(able), []
        bound = 1.25 * (sum(w.inflight for w in able) + 1) / sum(w.spec.weight for w in able)
        return self.nearest(request.keys[0], [w for w in able if w.load < bound]), []

    def expected_device_aware(self, request, able):
        keys = set(request.keys)
        order = [c.name for c in self.settings.device_classes()]
        if keys and not request.unkeyed:
            holders = [w for w in able if keys <= w.keys and not w.doubtful]
            holders = [w for w in holders if w.publishing] or holders
            if holders and self.settings.full_hit_prefer == "gpu":
                first = min(order.index(self.class_of(w)) for w in holders)
                holders = [w for w in holders if self.class_of(w) == order[first]]
            if holders:
                return self.oldest(holders), []
        groups, chosen, base = [], None, None
        for c in self.settings.device_classes():
            mine = [w for w in able if self.class_of(w) == c.name]
            if not mine:
                continue
            encoding, weight = sum(w.encoding for w in mine), sum(w.spec.weight for w in mine)
            if base is None:
                base, chosen = (c.ratio, encoding, weight), mine
                groups.append((c.name, len(mine), encoding, None))
                continue
            allowed = math.floor(base[1] * weight * base[0] / (c.ratio * base[2]))
            groups.append((c.name, len(mine), encoding, allowed))
            if encoding < allowed:
                chosen = mine
                break
        if not keys:
            return self.oldest(chosen), groups
        least = min(w.load for w in chosen)
        tied = [w for w in chosen if w.load == least]
        most = max(len(keys & w.keys) for w in tied)
        tied = [w for w in tied if len(keys & w.keys) == most]
        if len(tied) == 1:
            return tied, groups
        missing = [k for k in request.keys if not any(k in w.keys for w in tied)]
        missing += [k for k in request.keys if not all(k in w.keys for w in tied)]
        return self.nearest((missing or list(request.keys))[0], tied), groups

    # -- what must always hold

    @invariant()
    def the_index_agrees(self):
        for id, worker in getattr(self, "model", {}).items():
            assert self.pool.key_count(id) == len(worker.keys) == self.pool.get(id).key_count
            expected = 0
            for key in worker.keys:
                expected ^= xxh3_64_intdigest(key)
            assert self.pool.digest(id) == expected
            assert {k for k in KEYS if self.pool.holds(id, k)} == worker.keys

    @invariant()
    def the_loads_agree(self):
        for id, worker in getattr(self, "model", {}).items():
            real = self.pool.get(id)
            assert (real.inflight, real.encoding) == (worker.inflight, worker.encoding)
            assert real.eligible == worker.eligible == (real.group is not None)
            assert worker.inflight == self.held.count(worker)
        for group in self.pool._groups if hasattr(self, "pool") else ():
            members = [self.model[w.id] for w in group.order]
            assert group.n == len(members) == group.mask.bit_count()
            assert group.encoding == sum(w.encoding for w in members)
            assert group.inflight == sum(w.inflight for w in members)
            assert group.weight == sum(w.spec.weight for w in members)
            assert [w.load for w in members] == sorted(w.load for w in members)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.pool.sweep(50):
            pass
        for fill in list(self.pool._fills.values()):
            fill.abort()
        while self.pool.sweep(50):
            pass
        union = set().union(*(w.keys for w in self.model.values())) if self.model else set()
        assert self.pool.index_keys == len(union)
        assert self.pool.index_entries == sum(len(w.keys) for w in self.model.values())
        assert self.pool._index.retired == 0


def machine(policy, examples):
    case = type(f"Pool_{policy}", (PoolMachine,), {"policy": policy}).TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


MACHINES = {
    "device-aware-weighted": machine("device-aware-weighted", 90),
    "least-loaded": machine("least-loaded", 30),
    "round-robin": machine("round-robin", 30),
    "random": machine("random", 20),
    "power-of-two": machine("power-of-two", 20),
    "consistent-hash": machine("consistent-hash", 30),
}


@pytest.mark.parametrize("policy", MACHINES)
def test_the_pool_behaves_like_the_model_whatever_happens_in_whatever_order(policy):
    MACHINES[policy]("runTest").runTest()


def test_every_policy_has_been_put_through_the_machine():
    assert set(POLICIES) == MACHINES.keys()


class Crowd(PoolMachine):
    """Enough workers for the paths that small pools never take."""

    ids = tuple(f"http://10.0.0.{i}:30000" for i in range(70))
    max_workers = 70


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 0.5]], ids=["equal", "mixed"])
@pytest.mark.parametrize("policy", MACHINES)
def test_a_crowd_of_workers_is_chosen_from_by_the_same_rules(policy, weights):
    rng = random.Random(f"{policy}{weights}")
    crowd = Crowd()
    crowd.policy = policy
    crowd.start(ratio=2, prefer=rng.choice(["gpu", "any"]), classes=(), seed=1, crew=[])
    for id in crowd.ids:
        crowd.add_worker(id, rng.choice(DEVICES), rng.choice(weights), rng.choice([None, None, 6]), True)
        crowd.apply_delta(id, rng.sample(KEYS, rng.randrange(len(KEYS))), [])
    tickets = []
    for step in range(600):
        keys = rng.sample(KEYS, rng.randrange(4))
        exclude = set(rng.sample(crowd.ids, 2)) if rng.random() < 0.2 else set()
        taken = crowd.select(keys, 0, exclude, rng.random() < 0.1)
        if isinstance(taken, tuple):
            tickets.append(taken)
        if len(tickets) > 150 or (step > 400 and tickets):
            crowd.release(tickets.pop(rng.randrange(len(tickets))))
        if tickets and rng.random() < 0.3:
            crowd.encoded(rng.choice(tickets))
        if rng.random() < 0.1:
            id = rng.choice(crowd.ids)
            rng.choice(
                [
                    lambda id=id: crowd.remove_worker(id, True),
                    lambda id=id: crowd.set_flag(id, ("ready", rng.random() < 0.7)),
                    lambda id=id: crowd.set_flag(id, ("doubtful", rng.random() < 0.5)),
                    lambda id=id: crowd.clear(id),
                    lambda id=id: crowd.apply_delta(id, rng.sample(KEYS, 2), rng.sample(KEYS, 2)),
                    lambda id=id: crowd.add_worker(id, rng.choice(DEVICES), rng.choice(weights), None, True),
                    lambda: crowd.sweep(3),
                ]
            )()
        if step % 20 == 0:
            crowd.the_index_agrees()
            crowd.the_loads_agree()
    for ticket in tickets:
        crowd.release(ticket)
    assert all(worker.inflight == 0 and worker.encoding == 0 for worker in crowd.pool.workers())
    crowd.teardown()
