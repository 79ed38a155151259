"""The admin listener over a real socket: health, workers, errors, keys."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest
from aiohttp import ClientSession

from fullhit.core import SelectRequest
from fullhit.fleet import State
from fullhit.http.admin import check_exposure

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
KEY = bytes(range(16))


# -- alive and ready -------------------------------------------------------------------------------------------


async def test_healthz_says_alive_whatever_the_state(desk):
    assert (await desk.call("GET", "/healthz"))[0] == 200


async def test_the_index_lists_the_routes(desk):
    _, told = await desk.call("GET", "/")
    for route in ("GET /readyz", "POST /workers", "DELETE /workers/{id}", "POST /select", "GET /decisions/{id}"):
        assert route in told["routes"]


async def test_an_empty_pool_is_not_ready_and_says_so(desk):
    status, told = await desk.call("GET", "/readyz")
    assert status == 503 and told["status"] == "unready" and not told["ready"]
    assert told["reasons"] == ["pool default has no workers"]


async def test_readiness_follows_the_workers(desk):
    desk.fleet.add(A)
    status, told = await desk.call("GET", "/readyz")
    assert status == 503 and told["reasons"] == ["pool default: none of its 1 workers is ready"]
    desk.add_ready(B)
    status, told = await desk.call("GET", "/readyz")
    assert (status, told["status"], told["degraded"]) == (200, "ready", False)
    assert told["pools"] == {"default": {"workers": 2, "usable": 2, "doubtful": 0, "ready": 2}}


async def test_a_lost_event_plane_is_degraded_but_routes(desk):
    desk.add_ready(A)
    desk.plane = {"connected": False, "error": "cannot reach nats://127.0.0.1:4222"}
    status, told = await desk.call("GET", "/readyz")
    assert (status, told["status"], told["degraded"]) == (200, "degraded", True)
    assert told["reasons"] == ["event plane: cannot reach nats://127.0.0.1:4222"]
    assert told["event_plane"]["connected"] is False


async def test_doubtful_and_unhealthy_workers_are_degraded_but_route(desk):
    desk.add_ready(A, B)
    desk.pool.set_doubtful(A, True)
    for _ in range(3):
        desk.fleet.report_failure(B, "connect")
    status, told = await desk.call("GET", "/readyz")
    assert status == 200
    assert told["reasons"] == ["pool default: 1 unhealthy", "pool default: entries of 1 workers are doubtful"]


async def test_a_router_that_is_leaving_is_not_ready(desk):
    desk.add_ready(A)
    desk.leaving = True
    status, told = await desk.call("GET", "/readyz")
    assert status == 503 and told["reasons"] == ["the router is draining"]


async def test_metrics_are_prometheus_text(desk):
    desk.add_ready(A)
    async with desk.client.get("/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        text = await reply.text()
    assert f'fullhit_worker_up{{worker="{A}"}} 1.0' in text
    assert 'fullhit_build_info{version="' in text


# -- workers ---------------------------------------------------------------------------------------------------


async def test_workers_are_listed_with_all_that_is_known(desk):
    desk.add_ready(A)
    desk.pool.apply_delta(A, [KEY], [])
    desk.fleet.heartbeat(A)
    desk.pool.select(SelectRequest())
    desk.oldest = {A: 1.23456}
    _, (row,) = await desk.call("GET", "/workers")
    wanted = {
        "id": A, "url": A, "pool": "default", "device": "cuda", "device_class": "gpu", "weight": 1.0, "state": "ready",
        "source": "static", "inflight_requests": 1, "encoding_requests": 1, "keys": 1, "doubtful": False,
        "publishing": True, "stream": {"state": "in_order", "seq": 7}, "oldest_inflight_age_seconds": 1.235,
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    assert row["worker_id"].isdigit() and row["breaker"]["state"] == "closed"
    assert row["age_seconds"]["heartbeat"] >= 0 and row["stalled_seconds"] >= 0
    status, answer = await desk.call("GET", "/workers?pool=nowhere")
    assert (status, answer["error"]["code"]) == (404, "unknown_pool")


async def test_a_worker_is_found_by_url_or_number(desk):
    desk.add_ready(A)
    number = str(desk.fleet.get(A).worker_id)
    for name in (quote(A, safe=""), quote(A + "/", safe=""), number):
        status, row = await desk.call("GET", f"/workers/{name}")
        assert (status, row["id"]) == (200, A)


async def test_a_worker_can_be_added_and_added_again(desk):
    body = {"url": "HTTP://127.0.0.1:1001/", "device": "cpu", "weight": 2.5, "max_inflight": 4}
    status, row = await desk.call("POST", "/workers", body)
    assert status == 201
    assert (row["id"], row["device_class"], row["weight"], row["max_inflight"]) == (A, "cpu", 2.5, 4)
    assert (row["source"], row["state"]) == ("admin", "seen")
    assert (await desk.call("POST", "/workers", body))[0] == 200
    assert len(desk.fleet) == 1


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"{", "invalid_json", "not JSON"),
        (b"\xff\xfe", "invalid_json", "not JSON"),
        (b"", "invalid_request", "url"),
        (b"[]", "invalid_request", "object"),
        ({"url": 7}, "invalid_request", "$.url"),
        ({"url": A, "wieght": 1}, "invalid_request", "wieght"),
        ({"url": A, "weight": 0}, "invalid_worker", "weight"),
        ({"url": A, "max_inflight": 0}, "invalid_worker", "max_inflight"),
        ({"url": "tcp://x"}, "invalid_worker", "http"),
        ({"url": A, "pool": "nowhere"}, "invalid_worker", "the pools are default"),
    ],
)
async def test_a_worker_that_makes_no_sense_is_refused_with_the_reason(desk, body, code, message):
    status, said, text = await desk.refusal("POST", "/workers", body)
    assert (status, said) == (400, code) and message in text
    assert len(desk.fleet) == 0


async def test_a_worker_can_be_removed_by_url_or_number(desk):
    desk.add_ready(A, B)
    desk.pool.select(SelectRequest(exclude=frozenset({B})))
    status, told = await desk.call("DELETE", "/workers/" + quote(A, safe=""))
    assert (status, told) == (200, {"id": A, "removed": True, "draining": False, "requests_in_flight": 1})
    status, told = await desk.call("DELETE", f"/workers/{desk.fleet.get(B).worker_id}")
    assert status == 200 and len(desk.fleet) == 0


async def test_a_busy_worker_can_be_removed_gently(desk):
    desk.add_ready(A)
    ticket = desk.pool.select(SelectRequest()).ticket
    status, told = await desk.call("DELETE", f"/workers/{quote(A, safe='')}?drain=60")
    assert (status, told["removed"], told["draining"]) == (202, False, True)
    ticket.release()
    status, told = await desk.call("DELETE", f"/workers/{quote(A, safe='')}?drain=60")
    assert (status, told["removed"]) == (200, True)


@pytest.mark.parametrize("drain", ["soon", "-1", "nan", "1e9", ""])
async def test_a_senseless_drain_time_is_refused(desk, drain):
    desk.add_ready(A)
    assert (await desk.refusal("DELETE", f"/workers/{quote(A, safe='')}?drain={drain}"))[0] == 400
    assert len(desk.fleet) == 1


async def test_drain_and_resume(desk):
    desk.add_ready(A)
    status, row = await desk.call("POST", f"/workers/{quote(A, safe='')}/drain")
    assert (status, row["state"]) == (200, "draining")
    assert not desk.pool.get(A).eligible
    status, row = await desk.call("POST", f"/workers/{quote(A, safe='')}/resume")
    assert (status, row["state"]) == (200, "ready")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/drain"), ("POST", "/resume")],
)
async def test_an_unknown_worker_is_404_and_says_where_to_look(desk, method, path):
    for id in (quote(A, safe=""), "17", "%00", "..%2F.."):
        status, code, message = await desk.refusal(method, f"/workers/{id}{path}")
        assert (status, code) == (404, "unknown_worker") and "GET /workers" in message


# -- errors and locks ------------------------------------------------------------------------------------------


async def test_an_unknown_path_and_a_wrong_method_are_json_errors(desk):
    status, code, message = await desk.refusal("GET", "/nonsense")
    assert (status, code) == (404, "not_found") and "GET /" in message
    assert (await desk.refusal("PUT", "/workers"))[:2] == (405, "method_not_allowed")


async def test_a_body_over_the_limit_is_413(opening):
    async with opening(max_body_bytes=1000) as desk:
        status, code, _ = await desk.refusal("POST", "/workers", b"x" * 2000)
        assert (status, code) == (413, "body_too_large")


async def test_a_fault_of_ours_is_a_json_500_and_a_log_line(desk, monkeypatch):
    monkeypatch.setattr(desk.fleet, "find", lambda text: 1 / 0)
    status, code, message = await desk.refusal("GET", "/workers/1")
    assert (status, code) == (500, "internal") and "ZeroDivision" not in message
    assert desk.telemetry.log.flush(10)
    assert "ZeroDivisionError" in desk.log.getvalue()


async def test_with_a_key_only_the_health_routes_are_open(opening):
    async with opening(key="sésame") as desk:
        assert (await desk.call("GET", "/healthz"))[0] == 200
        assert (await desk.call("GET", "/readyz"))[0] == 503
        for method, path in (
            ("GET", "/workers"),
            ("POST", "/workers"),
            ("GET", "/metrics"),
            ("POST", "/select"),
            ("GET", "/x"),
        ):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "sésame"},
                {"Authorization": "Bearer"},
            ):
                status, code, message = await desk.refusal(method, path, **headers)
                assert (status, code) == (401, "unauthorized") and "Authorization: Bearer" in message
        assert (await desk.call("GET", "/workers", Authorization="Bearer sésame"))[0] == 200
        assert (await desk.call("GET", "/workers", Authorization="bearer  sésame"))[0] == 200


async def test_pages_of_other_origins_are_refused(desk):
    assert (await desk.refusal("POST", "/workers", {"url": A}, Origin="https://evil.invalid"))[:2] == (
        403,
        "cross_origin",
    )
    assert (await desk.refusal("GET", "/workers", Origin="null"))[0] == 403
    own = str(desk.client.make_url("")).rstrip("/")
    assert (await desk.call("GET", "/workers", Origin=own))[0] == 200


async def test_without_a_key_a_name_that_somebody_elses_dns_points_here_is_refused(desk):
    foreign = {"Host": "evil.invalid", "Origin": "http://evil.invalid"}
    assert (await desk.refusal("POST", "/workers", {"url": A}, **foreign))[:2] == (403, "foreign_host")
    assert (await desk.call("GET", "/healthz", Host="router.invalid"))[0] == 200
    assert (await desk.call("GET", "/workers", Host="localhost:8781"))[0] == 200
    assert (await desk.call("GET", "/workers", Host="[::1]:8781"))[0] == 200


@pytest.mark.parametrize(
    ("host", "key", "fine"),
    [("127.0.0.1", "", True), ("::1", "", True), ("localhost", "", True), ("0.0.0.0", "", False), ("::", "", False),
     ("10.1.2.3", "", False), ("router.invalid", "", False), ("0.0.0.0", "k", True)],
)  # fmt: skip
def test_a_listener_others_can_reach_needs_a_key(host, key, fine):
    if fine:
        check_exposure(host, key)
    else:
        with pytest.raises(ValueError, match="set an admin key"):
            check_exposure(host, key)


async def test_case_b39_health_answers_while_1500_requests_are_open(desk):
    desk.add_ready(A)
    tickets = [desk.pool.select(SelectRequest()).ticket for _ in range(1500)]
    waiting = asyncio.Event()
    tasks = [asyncio.create_task(waiting.wait()) for _ in tickets]
    async with ClientSession() as session, asyncio.timeout(10):
        for _ in range(20):
            async with session.get(desk.client.make_url("/healthz")) as reply:
                assert reply.status == 200
            async with session.get(desk.client.make_url("/readyz")) as reply:
                assert reply.status == 200
    waiting.set()
    await asyncio.gather(*tasks)
    for ticket in tickets:
        ticket.release()
    assert desk.pool.get(A).inflight == 0
    assert desk.fleet.get(A).state is State.READY
