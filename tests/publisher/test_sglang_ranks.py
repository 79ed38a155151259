"""Several encoder processes behind one port: what all of them hold, and how the main process learns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.sglang.common import CommonKeys
from fullhit_publisher.sglang.ranks import RankListener, RankReporter

KEYS = st.lists(st.sampled_from("abcdef"), max_size=4)
HELLO = b'{"rank": 1, "device": "cuda"}'
STEPS = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.tuples(KEYS, KEYS))), max_size=40)


@given(STEPS)
def test_what_is_told_adds_up_to_the_intersection(steps: list[Any]) -> None:
    common = CommonKeys(3)
    ranks: list[set[str] | None] = [None, None, None]
    told: set[str] = set()
    for rank, change in steps:
        if change is None:
            added, removed = common.lose(rank)
            ranks[rank] = None
        else:
            added, removed = common.change(rank, *change)
            ranks[rank] = ((ranks[rank] or set()) | set(change[0])) - set(change[1])
        assert not told & set(added) and set(removed) <= told and not set(added) & set(removed)
        told = (told | set(added)) - set(removed)
        holds = [held for held in ranks if held is not None]
        assert told == common.keys() == (set.intersection(*holds) if len(holds) == 3 else set())


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CommonKeys(0)
    for rank in (-1, 2):
        with pytest.raises(IndexError):
            CommonKeys(2).change(rank, ["a"], [])


class Publisher:
    """What a router would believe."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.stats: dict[str, int] = {}

    def publish_delta(self, added: list[str], removed: list[str], /) -> None:
        assert not set(added) & self.keys and set(removed) <= self.keys
        self.keys = (self.keys | set(added)) - set(removed)

    def set_stats(self, **stats: int) -> None:
        self.stats = stats


class House:
    def __init__(self) -> None:
        self.publisher = Publisher()
        self.made: list[str] = []
        self.environ: dict[str, str] = {}
        self.listener = RankListener(2, self.make, self.environ)
        self.caches = [EmbeddingCache[bytes](100) for _ in range(2)]

    def make(self, device: str) -> Publisher:
        self.made.append(device)
        return self.publisher

    def report(self, rank: int) -> None:
        RankReporter(rank, self.caches[rank], "cuda", self.environ)

    def stranger(self) -> Any:
        return Client(self.environ["FULLHIT_RANKS_SOCKET"], "AF_UNIX", bytes.fromhex(self.environ["FULLHIT_RANKS_KEY"]))


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.listener.close()


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_all_processes_hold_is_published_and_what_one_evicts_is_not(house: House) -> None:
    first, second = house.caches
    first.put("a", bytes(40))  # before anybody listens
    house.report(0)
    house.report(1)
    first.put("b", bytes(40))
    second.put("b", bytes(40))
    eventually(lambda: house.publisher.keys == {"b"})
    second.put("a", bytes(40))
    eventually(lambda: house.publisher.keys == {"a", "b"})
    assert house.made == ["cuda"]
    second.put("c", bytes(40))  # evicts b
    eventually(lambda: house.publisher.keys == {"a"})
    second.get("a")
    first.put("c", bytes(1))
    eventually(lambda: house.publisher.keys == {"a", "c"} or house.publisher.keys == {"c"})
    eventually(lambda: house.publisher.stats.get("hits") == 1)
    assert house.publisher.stats["capacity_bytes"] == 200


def test_a_process_that_is_lost_takes_everything_back(house: House) -> None:
    house.caches[0].put("a", b"x")
    house.report(0)
    other = house.stranger()
    other.send_bytes(HELLO)
    change = b'{"added": ["a"], "removed": [], "hits": 0, "misses": 0, "used": 1, "capacity": 9}'
    other.send_bytes(change)
    eventually(lambda: house.publisher.keys == {"a"})
    other.close()
    eventually(lambda: house.publisher.keys == set())
    house.caches[1].put("a", b"x")
    house.report(1)  # and one in its place may come
    eventually(lambda: house.publisher.keys == {"a"})


@pytest.mark.parametrize(
    "words",
    [
        [HELLO, b'{"added": [1], "removed": [], "hits": 0, "misses": 0, "used": 0, "capacity": 0}'],
        [b"no json"],
        [b"[]"],
        [b'{"rank": 7, "device": "cuda"}'],
        [b'{"rank": -1, "device": "cuda"}'],
        [b'{"rank": 0, "device": "cuda"}'],
        [HELLO, b'{"added": "abc", "removed": []}'],
    ],
)  # fmt: skip
def test_nonsense_from_one_process_costs_that_one(house: House, words: list[bytes]) -> None:
    house.caches[0].put("a", b"x")
    house.report(0)
    eventually(lambda: house.made == ["cuda"])
    bad = house.stranger()
    for word in words:
        bad.send_bytes(word)
    with pytest.raises((EOFError, ConnectionError)):
        bad.recv_bytes()
    house.caches[1].put("a", b"x")
    house.report(1)
    eventually(lambda: house.publisher.keys == {"a"})


def test_who_does_not_know_the_key_is_not_heard(house: House) -> None:
    with pytest.raises(Exception, match=r"digest|rejected|closed|reset|^$"):
        Client(house.environ["FULLHIT_RANKS_SOCKET"], "AF_UNIX", b"guessed")
    house.report(0)
    eventually(lambda: house.made == ["cuda"])


def test_without_a_main_process_that_listens_the_cache_works_on(house: House) -> None:
    with pytest.raises(KeyError):
        RankReporter(0, house.caches[0], "cuda", {})
    house.report(0)
    eventually(lambda: house.made == ["cuda"])
    house.listener.close()
    house.listener.close()
    house.caches[0].put("a", b"x")
    assert house.caches[0].get("a") == b"x"
