"""fullhit.client over both doors, synchronous and asynchronous, and the two doors against each other."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullhit.client import AsyncClient, Client, ClientOptions, NoWorker, Refused, Unreachable
from fullhit.decision import DecisionError
from fullhit.rpc.settings import RpcSettings
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import item_key, key_text

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
URL = "https://pictures.invalid/cat.jpg"
QUICK = ClientOptions(timeout=2.0, attempts=3, first_pause=0.01)
DOORS = ["http", "grpc"]


def address(house: Any, door: str) -> str:
    return house.admin if door == "http" else f"grpc://{house.target}"


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Makes a client whose calls are all awaited; the synchronous one runs in another thread than the router."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        client = Threaded(Client(*args, **options)) if request.param == "sync" else AsyncClient(*args, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


class Threaded:
    """A synchronous object whose methods are awaited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        async def call(*args: Any, **options: Any) -> Any:
            result = await asyncio.to_thread(value, *args, **options)
            return Threaded(result) if type(result).__name__ == "Choice" else result

        return call

    async def __aenter__(self) -> Threaded:
        await asyncio.to_thread(self._inner.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self._inner.__exit__, *error)


async def test_the_whole_life_of_a_choice(house, connect, door):
    house.add_ready(A, B)
    house.pool.apply_delta(B, [item_key({"url": URL, "detail": "low"})], [])
    client = connect(address(house, door))
    choice = await client.select(items=[{"url": URL, "detail": "low"}], request_id="r1", candidates=16)
    told = choice.selection
    assert (choice.url, choice.reason, told.worker, told.worker_id) == (B, "full_hit", B, worker_id_for(B))
    assert (told.pool, told.device, told.lease_seconds, told.request_id) == ("default", "cuda", 60.0, "r1")
    assert [(c.id, c.keys_held, c.chosen) for c in told.candidates] == [(B, 1, True), (A, 0, False)]
    assert house.inflight() == 1
    for why in (await client.explain(told.decision_id), await client.explain(request_id="r1")):
        assert (why.decision_id, why.worker, why.reason, why.pool) == (told.decision_id, B, "full_hit", "default")
        assert why.record["outcome"] == {"api": "select"} and why.candidates == told.candidates
    assert await choice.release() and not await choice.release()
    assert house.inflight() == 0
    async with await client.select(items=[URL]):
        assert house.inflight() == 1
    assert house.inflight() == 0
    rows = {row.id: row for row in await client.workers("default")}
    assert set(rows) == {A, B} and (rows[B].keys, rows[B].publishing, rows[B].state) == (1, True, "ready")
    with pytest.raises(Refused, match="the pools are default"):
        await client.workers("nowhere")


async def test_errors_say_who_is_at_fault(house, connect, door):
    client = connect(address(house, door), options=QUICK)
    with pytest.raises(NoWorker) as none:
        await client.select()
    assert (none.value.code, none.value.retryable) == ("empty_pool", False)
    house.add_ready(A)
    for question, code in (({"pool": "x"}, "unknown_pool"), ({"exclude": ["x"]}, "invalid_request")):
        with pytest.raises(Refused) as refused:
            await client.select(**question)
        assert refused.value.code == code
    with pytest.raises(NoWorker) as busy:
        await client.select(exclude=[A])
    assert busy.value.retryable
    for ask in ({"decision_id": 99}, {"request_id": "never"}):
        with pytest.raises(Refused) as unknown:
            await client.explain(**ask)
        assert unknown.value.code == "unknown_decision"
    assert not await client.release("0123456789abcdef"), "what is not held needs no release"
    assert not await client.release(request_id="never")


async def test_a_key_is_sent(opening, connect, door):
    async with opening(rpc=RpcSettings(key="sesame")) as house:
        house.add_ready(A)
        assert (await connect(address(house, door), "sesame").select()).url == A
        for key in ("", "wrong"):
            with pytest.raises(Refused) as refused:
                await connect(address(house, door), key, options=QUICK).select()
            assert refused.value.code == "unauthorized"


async def test_a_router_that_is_away_is_told_in_time(connect, door):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        client = connect(f"{door}://127.0.0.1:{taken.getsockname()[1]}", options=QUICK)
        for call in (client.select, client.workers):
            with pytest.raises(Unreachable):
                await call()
        with pytest.raises(Unreachable):
            await client.release("x")


async def test_waiting_for_a_worker(house, connect, door):
    house.fleet.add(A)
    client = connect(address(house, door), options=ClientOptions(timeout=20, wait_for_worker=True, first_pause=0.01))
    asking = asyncio.ensure_future(client.select())
    await asyncio.sleep(0.05)
    assert not asking.done()
    house.add_ready(A)
    assert (await asking).url == A


@pytest.mark.parametrize("door", [*DOORS, "session"])
async def test_a_cancelled_choice_holds_nothing(house, until, door):
    house.add_ready(A)
    client = AsyncClient(address(house, door), options=ClientOptions(session=door == "session"))
    for steps in range(0, 120, 3):
        task = asyncio.ensure_future(client.select(lease_seconds=3000))
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * (steps % 10))
        task.cancel()
        try:
            await (await task).release()
        except asyncio.CancelledError:
            pass
    await client.close()
    await until(lambda: house.inflight() == 0, "all slots are back")


async def test_a_session_asks_for_many_at_once(house):
    house.add_ready(A, B)
    async with AsyncClient(address(house, "grpc"), options=ClientOptions(session=True)) as client:
        choices = await asyncio.gather(*(client.select(items=[URL], request_id=f"r{n}") for n in range(100)))
        assert [choice.selection.request_id for choice in choices] == [f"r{n}" for n in range(100)]
        assert house.inflight() == 100 and house.server.servicer.sessions == 1
        with pytest.raises(NoWorker):
            await client.select(exclude=[A, B])
        with pytest.raises(Refused):
            await client.select(pool="nowhere")
        assert all(await asyncio.gather(*(choice.release() for choice in choices[:50])))
        assert house.inflight() == 50


async def test_the_slots_of_a_session_end_with_its_client(house, until):
    house.add_ready(A)
    client = AsyncClient(address(house, "grpc"), options=ClientOptions(session=True))
    await client.select()
    await client.close()
    await until(lambda: house.inflight() == 0 and house.server.servicer.sessions == 0)


async def test_a_session_that_breaks_is_opened_anew(house, monkeypatch):
    house.add_ready(A)
    servicer = house.server.servicer
    whole = servicer._answer

    def broken(data: bytes, held: set[str]) -> Any:
        monkeypatch.setattr(servicer, "_answer", whole)
        raise DecisionError("leaving", "the router is leaving")

    async with AsyncClient(address(house, "grpc"), options=ClientOptions(session=True)) as client:
        await client.select()
        monkeypatch.setattr(servicer, "_answer", broken)
        assert (await client.select()).url == A
        assert servicer.sessions == 1 and house.inflight() == 1, "what the first one held ended with it"


async def test_a_session_needs_the_key_too(opening):
    async with opening(rpc=RpcSettings(key="sesame")) as house:
        house.add_ready(A)
        for key, allowed in (("sesame", True), ("wrong", False)):
            client = AsyncClient(address(house, "grpc"), key, ClientOptions(session=True, timeout=5))
            if allowed:
                assert (await client.select()).url == A
            else:
                with pytest.raises(Refused) as refused:
                    await client.select()
                assert refused.value.code == "unauthorized"
            await client.close()


class Faulty:
    """A door that loses answers: the router does what it is asked, and nobody hears of it."""

    def __init__(self, door: Any, losses: int) -> None:
        self.door, self.losses, self.asked = door, losses, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.door, name)
        if name == "close":
            return method

        async def call(*args: Any) -> Any:
            self.asked += 1
            answer = await method(*args)
            if self.asked <= self.losses:
                raise Unreachable("lost")
            return answer

        return call


@pytest.mark.parametrize("door", [*DOORS, "session"])
async def test_answers_that_are_lost_cost_no_slot(house, door):
    house.add_ready(A, B)
    client = AsyncClient(address(house, door), options=replace(QUICK, session=door == "session"))
    client._door = Faulty(client._door, losses=2)
    choice = await client.select(items=[URL])
    assert choice.selection.repeated_call and client._door.asked == 3
    assert house.inflight() == 1
    client._door.asked = 0
    assert await choice.release() is False and house.inflight() == 0, "the first, unheard one did it"
    client._door.asked, client._door.losses = 0, 3
    with pytest.raises(Unreachable):
        await client.select(items=[URL])
    assert house.inflight() == 0 and client._door.asked == 4, "given up, and given back by its request id"
    await client.close()


def test_what_is_no_router_is_refused():
    for url in ("127.0.0.1:8781", "ftp://x", "grpc://", ""):
        with pytest.raises(ValueError, match="is no router"):
            Client(url)
    with pytest.raises(ValueError, match="timeout"):
        ClientOptions(timeout=0)


texts = st.sampled_from([URL, "https://a.invalid/1.png", "data:image/png;base64,AAAA", "https://b.invalid/ü.jpg"])
options = st.dictionaries(
    st.sampled_from(["detail", "fps", "n"]),
    st.one_of(st.none(), st.sampled_from(["low", "high"]), st.integers(-3, 3), st.floats(0, 1), st.booleans()),
    max_size=2,
)
items = st.one_of(
    texts,
    st.builds(lambda url, more: {"url": url, **more}, texts, options),
    st.builds(lambda url, uuid: {"url": url, "uuid": uuid}, texts, st.sampled_from(["", "u1", None])),
    st.just({}),
    st.builds(lambda more: {"content_hash": "sha256:00", **more}, options),
)


@st.composite
def questions(draw: Any) -> dict[str, Any]:
    question: dict[str, Any] = {
        "items": draw(st.lists(items, max_size=3)),
        "keys": draw(st.lists(st.sampled_from(["k1", "k2", key_text(item_key(URL))]), max_size=2)),
        "modality": draw(st.sampled_from(["IMAGE", "VIDEO"])),
        "exclude": draw(st.lists(st.sampled_from([A, str(worker_id_for(B)), "12345"]), max_size=1)),
    }
    body = draw(st.sampled_from(["", "sglang_encode", "openai_chat"]))
    listed = draw(st.lists(items, max_size=2))
    if body == "sglang_encode":
        question[body] = json.dumps({"req_id": "x", "mm_items": listed}).encode()
    elif body == "openai_chat":
        parts = [{"type": "image_url", "image_url": item} for item in listed]
        question[body] = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    return question


async def test_property_both_doors_give_the_same_decision(house):
    """The same question, the same state: the same worker, reason, keys and candidates, whichever door was asked."""
    house.add_ready(A, B, "http://127.0.0.1:1003")
    house.fleet.add("http://127.0.0.1:1003", device="cpu")
    numbers = itertools.count()
    clients = [AsyncClient(address(house, door)) for door in DOORS]
    loop = asyncio.get_running_loop()

    async def compare(asked: list[dict[str, Any]], held: list[tuple[str, Any]]) -> None:
        for url, item in held:
            house.pool.apply_delta(url, [key for key in [item_key(item)] if key], [])
        for question in asked:
            told = [await c.select(**question, dry_run=True, candidates=16, request_id="same") for c in clients]
            first, second = (
                (t.selection.worker, t.selection.reason, t.selection.candidates, t.selection.pool) for t in told
            )
            assert first == second
            # One of them really takes the slot, so that load differs between questions.
            choice = await clients[next(numbers) % 2].select(**question, request_id=f"r{next(numbers)}")
            assert (choice.selection.worker, choice.selection.reason) == first[:2]
            records = [await c.explain(choice.selection.decision_id) for c in clients]
            assert records[0] == records[1]
            if next(numbers) % 3:
                await choice.release()
        for url in (A, B):
            house.pool.clear(url)
        house.service.leases.release_all()

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(questions(), min_size=1, max_size=3), st.lists(st.tuples(st.sampled_from([A, B]), items), max_size=4)
    )
    def check(asked: list[dict[str, Any]], held: list[tuple[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(compare(asked, held), loop).result(60)

    try:
        await asyncio.to_thread(check)
    finally:
        for client in clients:
            await client.close()
