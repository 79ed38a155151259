"""Parity with Dynamo's router: the observed scenarios, and random histories against the rule written down naively."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullhit.core import DeviceClass, NoEligibleWorker, PoolSettings, Reason, SelectRequest, WorkerSpec
from fullhit.core.parity import ParityPool, make_pool
from fullhit.core.pool import Pool

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
KEYS = (A, B, C)


def fleet(ratio: int = 1, seed: int = 1, **devices: str) -> ParityPool:
    pool = ParityPool("p", PoolSettings(parity="dynamo", ratio=ratio), clock=lambda: 0.0, rng=random.Random(seed))
    for name, device in devices.items():
        pool.add_worker(WorkerSpec(id=name, url="", device=device))
        pool.set_ready(name, True)
    return pool


def held(pool: ParityPool, *keys: bytes, unkeyed: int = 0) -> str:
    """A request that stays in flight; returns who got it."""
    return pool.select(SelectRequest(keys=keys, items=len(keys) + unkeyed, unkeyed=unkeyed)).worker.id


# The scenarios seen on a real 1.6.1 front end with one GPU worker G and one CPU worker C.


def test_s01_without_a_hit_a_ratio_of_one_alternates() -> None:
    pool = fleet(G="cuda", C="cpu")
    assert "".join(held(pool, key) for key in (A, B, A, B)) == "GCGC"


def test_s02_s03_a_holder_takes_every_full_hit_and_is_not_booked_for_it() -> None:
    pool = fleet(G="cuda", C="cpu")
    pool.apply_delta("C", [A], [])
    assert "".join(held(pool, A) for _ in range(4)) == "CCCC"
    assert "".join(held(pool, B) for _ in range(4)) == "GCGC"


def test_s04_a_partial_hit_counts_for_nothing() -> None:
    pool = fleet(G="cuda", C="cpu")
    pool.apply_delta("C", [A], [])
    assert "".join(held(pool, A, B) for _ in range(3)) == "GCG"


def test_s05_several_holders_are_drawn_evenly() -> None:
    pool = fleet(G="cuda", C="cpu")
    for worker in "GC":
        pool.apply_delta(worker, [A], [])
    drawn = Counter(held(pool, A) for _ in range(2000))
    assert all(900 < drawn[worker] < 1100 for worker in "GC")


@pytest.mark.parametrize(
    ("ratio", "seen"), [(8, "GGGGGGGGCGGG"), (2, "GGCGGCGGCGGC"), (1, "GCGCGCGCGCGC"), (16, "GGGGGGGGGGGG")]
)
def test_s16_twelve_held_requests_are_shared_by_the_ratio(ratio: int, seen: str) -> None:
    pool = fleet(ratio, G="cuda", C="cpu")
    assert "".join(held(pool, B) for _ in range(12)) == seen


def test_an_item_without_key_is_passed_over() -> None:
    pool = fleet(G="cuda", C="cpu")
    pool.apply_delta("C", [A], [])
    decision = pool.select(SelectRequest(keys=(A,), items=2, unkeyed=1))
    assert (decision.worker.id, decision.reason) == ("C", Reason.FULL_HIT)
    assert decision.record()["inputs"]["unkeyed"] == 1
    assert pool.select(SelectRequest(items=1, unkeyed=1)).reason is Reason.MISS


# Our side of it.


def test_the_ticket_of_a_full_hit_holds_nothing_and_others_hold_their_load() -> None:
    pool = fleet(G="cuda")
    pool.apply_delta("G", [A], [])
    hit, miss = pool.select(SelectRequest(keys=(A,), items=1)), pool.select(SelectRequest(keys=(B,), items=1))
    worker = pool.get("G")
    assert worker is not None and hit.ticket is not None and miss.ticket is not None
    assert (worker.inflight, worker.encoding) == (1, 1)
    assert hit.ticket.release() and not hit.ticket.release() and worker.inflight == 1
    assert miss.ticket.release() and worker.inflight == 0


def test_a_worker_that_comes_back_finds_the_load_it_had() -> None:
    pool = fleet(G="cuda", H="cuda")
    tickets = [pool.select(SelectRequest(keys=(A,), items=1)).ticket for _ in range(4)]
    pool.remove_worker("G")
    pool.add_worker(WorkerSpec(id="G", url=""))
    pool.set_ready("G", True)
    assert Counter(held(pool, A) for _ in range(2)) == {"G": 1, "H": 1}
    for ticket in tickets:
        assert ticket is not None
        ticket.release()
    assert Counter(held(pool, A) for _ in range(2)) == {"G": 1, "H": 1}


def test_doubt_and_prediction_are_unknown_to_the_reference() -> None:
    pool = fleet(G="cuda", C="cpu")
    pool.record_encoded("G", [(B, 1)])
    pool.apply_delta("C", [A], [])
    pool.set_doubtful("C", True)
    decision = pool.select(SelectRequest(keys=(A,), items=1))
    assert (decision.worker.id, decision.reason) == ("C", Reason.FULL_HIT)
    assert pool.select(SelectRequest(keys=(B,), items=1)).reason is Reason.MISS


def test_the_account_of_a_decision_names_the_rule_and_its_budget() -> None:
    pool = fleet(2, G="cuda", C="cpu")
    for _ in range(3):
        decision = pool.select(SelectRequest(keys=(B,), items=1))
    record = decision.record()
    assert record["policy"] == "dynamo-parity" and record["worker"] == "C"
    assert [(g["class"], g["encoding"], g["allowed"]) for g in record["groups"]] == [("gpu", 2, None), ("cpu", 0, 1)]


def test_the_settings_choose_the_pool_and_refuse_what_parity_cannot_honour() -> None:
    assert type(make_pool("p", PoolSettings(), clock=lambda: 0.0)) is Pool
    assert type(make_pool("p", PoolSettings(parity="dynamo"), clock=lambda: 0.0)) is ParityPool
    with pytest.raises(ValueError, match="device_ratios"):
        make_pool("p", PoolSettings(parity="dynamo", classes=(DeviceClass("x", 1, ("x",)),)), clock=lambda: 0.0)
    with pytest.raises(ValueError, match="parity"):
        PoolSettings(parity="else")  # type: ignore[arg-type]


# The rule as a model.


class Reference:
    """The rule as it is described, with plain loops over plain sets."""

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio
        self.device: dict[str, str] = {}
        self.keys: dict[str, set[bytes]] = {}
        self.load: Counter[str] = Counter()

    def allowed(self, keys: set[bytes], exclude: set[str]) -> tuple[set[str], bool]:
        """Who may be chosen, and whether that is a full hit."""
        free = [name for name in self.device if name not in exclude]
        hits = {name: len(keys & self.keys[name]) for name in free}
        full = [name for name in free if keys and hits[name] >= len(keys)]
        if full:
            least = min(self.load[name] for name in full)
            return {name for name in full if self.load[name] == least}, True
        cpu = [name for name in free if self.device[name] == "cpu"]
        rest = [name for name in free if self.device[name] != "cpu"]
        group = cpu or rest
        if cpu and rest:
            budget = sum(self.load[name] for name in rest) * len(cpu) // (self.ratio * len(rest))
            group = cpu if sum(self.load[name] for name in cpu) < budget else rest
        least = min(self.load[name] for name in group)
        return {name for name in group if self.load[name] == least}, False


NAMES = ("a", "b", "c", "d", "e")
STEP = st.one_of(
    st.tuples(st.just("select"), st.sets(st.sampled_from(KEYS)), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("select"), st.sets(st.sampled_from(KEYS), max_size=1), st.just(0)),
    st.tuples(st.just("delta"), st.sampled_from(NAMES), st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS))),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("toggle"), st.sampled_from(NAMES), st.sampled_from(["cuda", "cpu"])),
    st.tuples(st.just("exclude"), st.sets(st.sampled_from(NAMES), max_size=2), st.sets(st.sampled_from(KEYS))),
)


HISTORY = (st.integers(1, 9), st.integers(0, 99), st.lists(STEP, min_size=10, max_size=60))


@given(*HISTORY)
@settings(max_examples=120, deadline=None)
def test_every_choice_of_a_random_history_is_one_the_reference_could_make(
    ratio: int, seed: int, steps: list[tuple]
) -> None:
    play_history(ratio, seed, steps)


def play_history(ratio: int, seed: int, steps: list[tuple]) -> None:
    model = Reference(ratio)
    pool = fleet(ratio, seed)
    open_tickets: list[tuple[str, bool, object]] = []

    def toggle(name: str, device: str) -> None:
        if name in model.device:
            del model.device[name], model.keys[name]
            pool.remove_worker(name)
        else:
            model.device[name] = device
            model.keys[name] = set()
            pool.add_worker(WorkerSpec(id=name, url="", device=device))
            pool.set_ready(name, True)

    for name, device in zip(NAMES, ("cuda", "cpu", "cuda", "cpu"), strict=False):
        toggle(name, device)
    for step in steps:
        match step:
            case ("toggle", name, device):
                toggle(name, device)
            case ("delta", name, added, removed) if name in model.device:
                model.keys[name] = (model.keys[name] - removed) | added
                pool.apply_delta(name, sorted(added), sorted(removed))
            case ("release", place) if open_tickets:
                name, booked, ticket = open_tickets.pop(place % len(open_tickets))
                model.load[name] -= booked
                assert ticket.release()  # type: ignore[attr-defined]
            case ("select", keys, unkeyed):
                choose(model, pool, open_tickets, keys, unkeyed, set())
            case ("exclude", exclude, keys):
                choose(model, pool, open_tickets, keys, 0, exclude)
        # The reference counts to the end of the answer, so the first token changes nothing.
        assert not any(ticket.encoded() for _, _, ticket in open_tickets)  # type: ignore[attr-defined]
        for worker in pool.workers():
            assert worker.inflight == worker.encoding


def choose(
    model: Reference, pool: ParityPool, tickets: list, keys: set[bytes], unkeyed: int, exclude: set[str]
) -> None:
    request = SelectRequest(tuple(sorted(keys)), len(keys) + unkeyed, exclude=frozenset(exclude), unkeyed=unkeyed)
    if not set(model.device) - exclude:
        with pytest.raises(NoEligibleWorker):
            pool.select(request)
        return
    allowed, full = model.allowed(keys, exclude)
    decision = pool.select(request)
    assert decision.worker.id in allowed
    assert (decision.reason is Reason.FULL_HIT) is full
    assert decision.candidates.bit_count() >= len(allowed)
    model.load[decision.worker.id] += not full
    tickets.append((decision.worker.id, not full, decision.ticket))


def test_ties_are_drawn_evenly_among_the_least_loaded() -> None:
    pool = fleet(1, a="cuda", b="cuda", c="cuda", d="cpu")
    drawn = Counter(pool.select(SelectRequest(keys=(A,), items=1, dry_run=True)).worker.id for _ in range(3000))
    assert set(drawn) == {"a", "b", "c"} and all(900 < count < 1100 for count in drawn.values())


# Either of several keys.


@pytest.mark.parametrize("parity", ["none", "dynamo"])
def test_any_of_several_keys_for_one_item_makes_its_holder_a_holder(parity: str) -> None:
    pool = make_pool("p", PoolSettings(parity=parity), clock=lambda: 0.0, rng=random.Random(1))  # type: ignore[arg-type]
    for name in "GH":
        pool.add_worker(WorkerSpec(id=name, url=""))
        pool.set_ready(name, True)
    pool.apply_delta("G", [C], [])
    pool.apply_delta("H", [B], [])
    both = SelectRequest(keys=(A, B), items=2, alternatives=((C,), ()), dry_run=True)
    assert pool.select(both).reason is Reason.PARTIAL_HIT
    pool.apply_delta("G", [B], [])
    decision = pool.select(both)
    assert (decision.worker.id, decision.reason) == ("G", Reason.FULL_HIT)
    assert decision.record()["inputs"]["alternatives"] == [[C.hex()], []]
    first = SelectRequest(keys=(A,), items=1, alternatives=((B, C),), dry_run=True)
    assert pool.select(first).reason is Reason.FULL_HIT
    assert pool.select(SelectRequest(keys=(A,), items=1, alternatives=((),), dry_run=True)).reason is Reason.MISS
    with_unkeyed = SelectRequest(keys=(A,), items=2, unkeyed=1, alternatives=((C,),), dry_run=True)
    assert pool.select(with_unkeyed).reason is (Reason.FULL_HIT if parity == "dynamo" else Reason.PARTIAL_HIT)
    excluded = SelectRequest(keys=(A,), items=1, alternatives=((C,),), exclude=frozenset("G"), dry_run=True)
    assert pool.select(excluded).worker.id == "H"
