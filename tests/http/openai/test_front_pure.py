"""The parts of the front that need no socket."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.http.openai.bodies import PINS, BadBody, read_body
from fullhit.http.openai.frontends import Frontends
from fullhit.http.openai.headers import ROUTING, forwarded_headers
from fullhit.http.openai.replies import openai_error
from fullhit.http.openai.settings import FrontSettings
from fullhit.http.openai.tokens import FirstToken, payload_of
from fullhit.http.openai.verdict import error_event, instances_in, judge, settled
from fullhit.http.wire import Origin, Request
from fullhit.json_limits import MAX_VALUES
from fullhit_publisher.dynamo_keys import KeyRules, from_chat, scoped_key, url_key
from fullhit_publisher.keys import fold

RULES = KeyRules()
URL = "https://pictures.invalid/cat.png"
PICTURE = {"type": "image_url", "image_url": {"url": URL}}


def chat(*parts: object, **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}).encode()


def parts_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


# --- bodies


def test_a_chat_body_gives_model_and_keys_and_goes_on_as_the_very_same_object() -> None:
    raw = bytearray(chat(PICTURE, {"type": "text", "text": "x"}))
    body = read_body(raw, "chat", RULES)
    assert (body.model, body.media.keys, body.media.items) == ("m", (fold(url_key(URL)),), 1)
    assert body.body is raw and not body.pinned


def test_a_session_gives_each_picture_a_second_key() -> None:
    body = read_body(chat(PICTURE), "chat", RULES, "s1")
    assert body.media.keys == (fold(scoped_key("s1", url_key(URL))),)
    assert body.media.alternatives == ((fold(url_key(URL)),),)


def test_pictures_of_a_responses_body_have_the_keys_they_have_in_a_chat() -> None:
    raw = {"model": "m", "input": [{"role": "user", "content": [
        {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": URL}]}]}  # fmt: skip
    assert read_body(json.dumps(raw).encode(), "responses", RULES).media.keys == (fold(url_key(URL)),)
    text = json.dumps({"model": "m", "input": "plain"}).encode()
    assert read_body(text, "responses", RULES).media.items == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b'{"a":1', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBody):
        read_body(raw, "chat", RULES)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"model": 7, "messages": 7},
        {"messages": [None, {"content": 3}, {"content": [None, 1, {"type": []}]}]},
        {"input": {"content": 1}},
        {"nvext": None, "messages": "x"},
    ],
)
@pytest.mark.parametrize("shape", ["chat", "responses", "text"])
def test_other_oddities_are_the_frontends_to_judge(raw: object, shape: str) -> None:
    data = json.dumps(raw).encode()
    body = read_body(data, shape, RULES)  # type: ignore[arg-type]
    assert body.body is data and body.model == "" and body.media.items == 0


def test_media_that_nest_too_deeply_or_are_too_many_are_items_without_key() -> None:
    deep = b'{"model": "m", "messages": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert read_body(deep, "chat", RULES).media.keys == ()
    many = read_body(chat(*[PICTURE] * 11), "chat", RULES, limit=10)
    assert (many.media.keys, many.media.items, many.media.unkeyed) == ((), 11, 11)


def test_pins_go_and_everything_else_keeps_its_bytes() -> None:
    raw = (
        b'{"model":"m", "odd" : {"a" : 1.50, "b":"\\u00e9"} ,"nvext":{"backend_instance_id":5,"annotations":[ 1,2 ],'
        b'"dp_rank":3,"prefill_worker_id":18446744073709551615}, "n": 1e2}'
    )
    body = read_body(raw, "text", RULES)
    assert body.pinned
    assert bytes(body.body) == (
        b'{"model":"m","odd":{"a" : 1.50, "b":"\\u00e9"},"nvext":{"annotations":[ 1,2 ]},"n":1e2}'
    )


def test_pins_are_found_however_their_names_are_spelt() -> None:
    raw = b'{"model":"m","nv\\u0065xt":{"backend_inst\\u0061nce_id":5},"nvext":{"dp_rank":1}}'
    body = json.loads(bytes(read_body(raw, "text", RULES).body))
    assert body == {"model": "m", "nvext": {}}


@pytest.mark.parametrize("nvext", [[], [None, None, None, 5], 3, "x", True, [[[]]]])
def test_an_nvext_that_is_no_object_is_refused_since_a_frontend_reads_lists_by_place(nvext: object) -> None:
    with pytest.raises(BadBody, match="nvext: must be an object") as caught:
        read_body(json.dumps({"model": "m", "nvext": nvext}).encode(), "text", RULES)
    assert caught.value.param == "nvext"


def test_bodies_of_too_many_values_are_not_unfolded() -> None:
    many = b"[]," * (MAX_VALUES // 2)
    body = read_body(b'{"model":"m","messages":[' + many + b"{}]}", "chat", RULES)
    assert (body.model, body.media.keys, body.media.unkeyed) == ("m", (), 1)
    few = read_body(b'{"model":"m","messages":[' + many[: len(many) // 2] + b"{}]}", "chat", RULES)
    assert few.media.unkeyed == 0
    wide = b'{"model":"m",' + b'"a":1,' * 1_000_001 + b'"nvext":{"dp_rank":1}}'
    with pytest.raises(BadBody, match="too many members"):
        read_body(wide, "text", RULES)
    assert read_body(wide.replace(b'"dp_rank":1', b'"x":1'), "text", RULES).model == "m"


@given(st.dictionaries(st.sampled_from([*sorted(PINS), "annotations", "token_data"]), st.integers(0, 2**64 - 1)))
def test_no_pin_ever_stays_and_nothing_else_ever_goes(nvext: dict[str, int]) -> None:
    raw = msgspec.json.encode({"model": "m", "nvext": nvext})
    told = json.loads(bytes(read_body(raw, "text", RULES).body))
    assert told == {"model": "m", "nvext": {name: value for name, value in nvext.items() if name not in PINS}}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["messages", "content", "type", "image_url", "url", "nvext", "input", "x"]),
                        inner, max_size=4), max_leaves=20))  # fmt: skip
def test_no_object_upsets_the_reader_and_keys_are_those_of_the_extractor(value: object) -> None:
    tree = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(tree.get("nvext"), dict | None):
        del tree["nvext"]  # refused
    for shape in ("chat", "responses", "text"):
        body = read_body(json.dumps(tree).encode(), shape, RULES)  # type: ignore[arg-type]
        if shape == "chat":
            assert len(body.media.keys) == len(from_chat(tree).distinct)


# --- headers


def request_with(*headers: tuple[bytes, bytes]) -> Request:
    request = Request()
    for name, value in headers:
        request.on_header(name, value)
    return request


@given(st.lists(st.tuples(st.sampled_from(sorted(ROUTING)), st.lists(st.booleans(), min_size=40, max_size=40))))
def test_no_spelling_of_a_routing_header_passes(found: list[tuple[bytes, list[bool]]]) -> None:
    odd = [
        (bytes(byte - 32 if up and 97 <= byte <= 122 else byte for byte, up in zip(name, flags, strict=False)), b"1")
        for name, flags in found
    ]
    request = request_with((b"Host", b"a"), *odd, (b"X-Kept", b"v"), *odd, (b"Connection", b"x-hop"), (b"X-Hop", b"1"))
    assert forwarded_headers(request).lines == b"X-Kept: v\r\n"


# --- first token


@given(
    before=st.lists(st.sampled_from([b": ping\n\n", b"event: message_start\n", b"id: 7\r\n", b"\n", b"\r", b"da\n",
                                     b"data\n", b" data: x\n", b"retry: 1\n", b"xdata: 1\n"])),
    bom=st.booleans(),
    cuts=st.lists(st.integers(0, 500)),
    chunks=st.lists(st.integers(1, 30), max_size=20),
    chunked=st.booleans(),
)  # fmt: skip
def test_the_first_event_is_seen_at_its_colon_wherever_the_stream_is_cut(
    before: list[bytes], bom: bool, cuts: list[int], chunks: list[int], chunked: bool
) -> None:
    head = (b"\xef\xbb\xbf" if bom else b"") + b"".join(before)
    stream = head + b"data:{}\n\n"
    if chunked:
        framed, at = b"", 0
        for size in [*chunks, len(stream)]:
            piece = stream[at : at + size]
            at += size
            framed += b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        wire = framed + b"0\r\n\r\n"
    else:
        wire = stream
    watch = FirstToken(sse=True, chunked=chunked)
    sent = b""
    for piece in parts_of(wire, cuts):
        sent += piece
        assert watch.feed(piece) == (len(payload_of(sent, chunked)) >= len(head) + len(b"data:"))
    assert watch.seen


@pytest.mark.parametrize("chunked", [False, True])
def test_any_other_answer_has_its_first_token_with_its_first_byte(chunked: bool) -> None:
    watch = FirstToken(sse=False, chunked=chunked)
    if chunked:
        assert not watch.feed(b"") and not watch.feed(b"5\r") and not watch.feed(b"\n")
    assert watch.feed(b"{") and watch.feed(b"anything")


def test_comments_without_end_take_no_memory() -> None:
    watch = FirstToken(sse=True, chunked=False)
    for _ in range(1000):
        assert not watch.feed(b": " + b"x" * 10_000)
    assert watch._line is None and not watch._payload


# --- verdicts

GONE = {"message": "Service temporarily unavailable", "type": "Service Unavailable", "code": 503}


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (503, "Service temporarily unavailable", ("unavailable", "5xx", "now")),
        (503, "draining", ("busy", "busy", "pause")),
        (529, "", ("busy", "busy", "pause")),
        (503, "Service temporarily overloaded", ("busy", "busy", "pause")),
        (500, "Internal server error", ("worker_error", "5xx", "suspect")),
        (500, "Failed to generate completions", ("worker_error", "5xx", "suspect")),
        (504, "Request deadline exceeded", ("worker_timeout", "timeout", "suspect")),
        (499, "Request cancelled", ("cancelled", "5xx", "suspect")),
        (400, "Invalid request", ("unknown_instance", "busy", "ask")),
        (400, "max_tokens is too large", None),
        (404, "Model not found", ("unknown_model", "", "frontend")),
        (404, "Route not found: GET /nope", None),
        (429, "Rate limit exceeded", None),
        (501, "", None),
        (422, "Invalid request", None),
    ],
)
def test_each_answer_means_the_same_by_status_and_by_event(
    status: int, message: str, expected: tuple[str, str, str] | None
) -> None:
    body = {"message": message, "type": "x", "code": status}
    by_status = judge(status, json.dumps(body).encode(), sse=False)
    event = b": c\n\nevent: error\ndata: " + json.dumps({"error": body}).encode() + b"\n\ndata: [DONE]\n\n"
    by_event = judge(200, event, sse=True)
    assert by_status == by_event
    assert (None if by_status is None else (by_status.cause, by_status.kind, by_status.blame)) == expected
    assert judge(200, event, sse=False) is None


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", False),
        (b"da", False),
        (b"data: {", False),
        (b"data: {}\n", True),
        (b"data: {}\r", True),
        (b"event: error\ndata: {", False),
        (b"event: error\r\n\r\n", False),
        (b": here\n", True),
        (b": her", False),
        (b"retry: 1", True),
        (b"{", True),
    ],
)
def test_a_stream_is_settled_by_its_first_whole_event_wherever_it_is_cut(payload: bytes, expected: bool) -> None:
    assert settled(200, payload, sse=True) is expected
    assert settled(503, payload, sse=True) is settled(503, payload, sse=False) is False, "an error body may go on"


@given(st.binary(max_size=60), st.sampled_from([200, 400, 404, 500, 503]))
def test_no_bytes_upset_the_judge(data: bytes, status: int) -> None:
    for payload in (data, b"data:" + data, b'data: {"error":' + data):
        judge(status, payload, sse=True)
        judge(status, payload, sse=False)
        error_event(payload)
        instances_in(payload)


def test_instances_keep_their_64_bits() -> None:
    assert instances_in(b'{"status":"x","instances":[{"instance_id":18446744073709551613,"x":1}]}') == {2**64 - 3}
    assert instances_in(b'{"instances":[{}]}') is None


# --- frontends


def make_frontends(count: int) -> tuple[Frontends, list[float]]:
    now = [0.0]
    return Frontends([(str(n), Origin("127.0.0.1", n + 1)) for n in range(count)], lambda: now[0]), now


def test_the_least_busy_frontend_that_does_not_fail_is_used() -> None:
    frontends, now = make_frontends(3)
    first, second, third = (frontends.enter() for _ in range(3))
    assert first is not None and second is not None and third is not None
    assert len({first.url, second.url, third.url}) == 3
    frontends.leave(second)
    assert frontends.enter() is second
    assert frontends.failed(second, "refused") and not frontends.failed(second, "refused")
    assert frontends.up == 2 and frontends.enter() is not second
    now[0] = 60.0
    frontends.leave(second)
    assert frontends.enter() is second, "its rest is over"
    assert frontends.answered(second) and not frontends.answered(second) and frontends.up == 3


def test_when_all_fail_the_one_that_rests_least_is_tried() -> None:
    frontends, _ = make_frontends(2)
    first, second = frontends.enter(), frontends.enter()
    assert first is not None and second is not None
    for _ in range(3):
        frontends.failed(first, "x")
    frontends.failed(second, "x")
    assert frontends.enter() is second
    assert frontends.enter({second}) is first
    assert frontends.enter({first, second}) is None
    assert [row["error"] for row in frontends.status()] == ["x", "x"]


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "fail", "answer", "wait"]), st.integers(0, 3))))
def test_counts_of_frontends_are_exact_whatever_happens(steps: list[tuple[str, int]]) -> None:
    frontends, now = make_frontends(3)
    out = []
    for step, number in steps:
        if step == "enter":
            entered = frontends.enter()
            assert entered is not None
            out.append(entered)
        elif step == "wait":
            now[0] += number
        elif out:
            one = out[number % len(out)]
            if step == "leave":
                out.remove(one)
                frontends.leave(one)
            elif step == "fail":
                frontends.failed(one, "x")
            else:
                frontends.answered(one)
        assert frontends.outstanding == len(out)


# --- the rest


def test_errors_have_openais_shape() -> None:
    kind, body = openai_error(413, "too_large", "too large", "id")
    assert kind == "application/json"
    assert json.loads(body) == {
        "error": {"message": "too large", "type": "invalid_request_error", "param": None, "code": "too_large"}
    }
    assert json.loads(openai_error(503, "busy", "x", "")[1])["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "wrong", [{"frontends": ()}, {"load_until": "never"}, {"queue_max": 0}, {"max_attempts": 0}, {"idle_timeout": -1}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        FrontSettings(**{"frontends": ("http://127.0.0.1:1",), **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "forwarded"),
    [
        (b'{"nvext":{"dp_rank":1},"model":"m","nvext":{"x":1}}', b'{"nvext":{"x":1},"model":"m"}'),
        (b'{"nvext":[1],"model": "m","nv\\u0065xt":{"x":1}}', b'{"nvext":{"x":1},"model":"m"}'),
        (b'{"nvext":{"dp_rank":1},"model":"m","nvext":null}', b'{"nvext":null,"model":"m"}'),
        (b'{"nvext": {"x":1}, "model": "m"}', None),
    ],
)
def test_a_second_nvext_does_not_hide_the_pins_of_the_first(body: bytes, forwarded: bytes | None) -> None:
    read = read_body(body, "text", KeyRules())
    assert read.body == (body if forwarded is None else forwarded)
