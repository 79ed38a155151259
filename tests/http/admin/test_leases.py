"""Leases by a clock turned by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.core import Pool, SelectRequest, WorkerSpec
from fullhit.decision.leases import Leases, TooManyLeases

A = "http://127.0.0.1:1001"


class Bank:
    def __init__(self, limit: int = 100) -> None:
        self.now = 0.0
        self.pool = Pool("default", clock=lambda: self.now)
        self.worker = self.pool.add_worker(WorkerSpec(A, A))
        self.pool.set_ready(A, True)
        self.leases = Leases(10.0, limit, clock=lambda: self.now)

    def open(self) -> str:
        return self.leases.open("default", self.pool.select(SelectRequest())).id


def test_a_lease_ends_after_its_time_and_not_before():
    bank = Bank()
    bank.open()
    bank.now = 9.9
    assert bank.leases.expire() == [] and bank.worker.inflight == 1
    bank.now = 10.0
    assert len(bank.leases.expire()) == 1 and bank.worker.inflight == 0
    assert bank.leases.ends_next is None


def test_a_lease_is_released_once():
    bank = Bank()
    id = bank.open()
    assert bank.leases.release(id) is not None
    assert bank.leases.release(id) is None
    assert bank.worker.inflight == 0


def test_over_the_bound_the_slot_is_given_back():
    bank = Bank(limit=1)
    bank.open()
    with pytest.raises(TooManyLeases):
        bank.open()
    assert bank.worker.inflight == 1


def test_all_leases_together_keep_a_bounded_number_of_keys():
    bank = Bank()
    bank.leases = Leases(10.0, 100, max_keys=10, clock=lambda: bank.now)

    def open_on(keys: int) -> str:
        request = SelectRequest(tuple(n.to_bytes(16, "big") for n in range(keys)), keys)
        return bank.leases.open("default", bank.pool.select(request)).id

    big = open_on(20)  # alone it may be as large as a request may
    with pytest.raises(TooManyLeases, match="1 leases are open on 20 keys"):
        open_on(1)
    bank.leases.release(big)
    first = open_on(6)
    open_on(4)
    with pytest.raises(TooManyLeases):
        open_on(1)
    bank.leases.release(first)
    open_on(6)
    bank.now = 10
    bank.leases.expire()
    open_on(10)
    assert bank.worker.inflight == 1


@given(st.lists(st.tuples(st.sampled_from(["open", "release", "expire"]), st.floats(0, 8)), max_size=60))
def test_slots_in_use_are_the_open_leases(steps):
    bank, ids = Bank(limit=8), []
    for what, pause in steps:
        bank.now += pause
        match what:
            case "open":
                try:
                    ids.append(bank.open())
                except TooManyLeases:
                    assert bank.leases.full
            case "release":
                if ids:
                    bank.leases.release(ids.pop(0))
            case "expire":
                bank.leases.expire()
        assert bank.worker.inflight == len(bank.leases) <= 8
    bank.leases.release_all()
    assert bank.worker.inflight == 0
