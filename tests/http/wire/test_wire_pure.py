"""Heads, chunks, the memory account and the idle stack: no sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.http.wire import BadReply, ClientFault, LocalFault, MemoryBudget, UpstreamLimits, end_to_end
from fullhit.http.wire.budget import BudgetHolder
from fullhit.http.wire.buffers import BufferPool
from fullhit.http.wire.chunks import ChunkError, ChunkScanner, ChunkTooLarge
from fullhit.http.wire.heads import (
    RequestHead,
    header_block,
    parse_request_head,
    parse_response_head,
    request_head,
)
from fullhit.http.wire.memo import RequestMemo
from fullhit.http.wire.pool import IdleStack


def request(*lines: bytes) -> bytes:
    return b"\r\n".join((*lines, b"", b""))


# --- request heads


def test_a_request_head_keeps_order_and_spelling_of_its_headers():
    head = parse_request_head(request(b"POST /a?b=%2F HTTP/1.1", b"hOST: a", b"X-B:  1 ", b"X-A: 2", b"X-B: 3"), 200)
    assert (head.method, head.target, head.version) == (b"POST", b"/a?b=%2F", (1, 1))
    assert [name for name, _ in head.headers] == [b"hOST", b"X-B", b"X-A", b"X-B"]
    assert head.keep_alive and not head.chunked and head.content_length == -1


FRAMING_FAULTS = {
    "CL and TE": (b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "TE and CL": (b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "two CL that differ": (b"Content-Length: 3", b"Content-Length: 4"),
    "two CL that agree": (b"Content-Length: 3", b"Content-Length: 3"),
    "CL list": (b"Content-Length: 3, 3",),
    "CL with sign": (b"Content-Length: +3",),
    "CL negative": (b"Content-Length: -3",),
    "CL hexadecimal": (b"Content-Length: 0x3",),
    "CL with inner blank": (b"Content-Length: 3 4",),
    "CL empty": (b"Content-Length:",),
    "CL overflow": (b"Content-Length: 99999999999999999999999",),
    "TE twice": (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "TE not last": (b"Transfer-Encoding: chunked, identity",),
    "TE unknown": (b"Transfer-Encoding: xchunked",),
    "TE hidden by vertical tab": (b"Transfer-Encoding:\x0bchunked",),
    "TE with space before colon": (b"Transfer-Encoding : chunked",),
    "TE gzip first": (b"Transfer-Encoding: gzip, chunked",),
    "folded": (b"X-A: 1", b" Transfer-Encoding: chunked"),
    "folded with tab": (b"X-A: 1", b"\tfolded"),
    "NUL in value": (b"X-A: a\0b",),
    "control in value": (b"X-A: a\x01b",),
    "bare CR in value": (b"X-A: a\rb",),
    "bare LF in value": (b"X-A: a\nX-B: b",),
    "name with blank": (b"X A: 1",),
    "empty name": (b": 1",),
    "no colon": (b"nonsense",),
    "two Hosts": (b"Host: b",),
}


@pytest.mark.parametrize("fault", FRAMING_FAULTS)
def test_case_f61_ambiguous_heads_are_refused(fault: str):
    with pytest.raises(ClientFault) as caught:
        parse_request_head(request(b"POST / HTTP/1.1", b"Host: a", *FRAMING_FAULTS[fault]), 200)
    assert caught.value.status in (400, 501)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET  / HTTP/1.1", 400),
        (b"GET /  HTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET / HTTP/1.10", 400),
        (b"GET / http/1.1", 400),
        (b"GET /", 400),
        (b"GET /\x01 HTTP/1.1", 400),
        (b"GET / HTTP/2.0", 505),
        (b"G(T / HTTP/1.1", 400),
        (b"get / HTTP/1.1", 400),
        (b"CONNECT a:1 HTTP/1.1", 501),
        (b"PRI * HTTP/2.0", 400),
    ],
)
def test_case_f61_malformed_request_lines_are_refused(line: bytes, status: int):
    with pytest.raises(ClientFault) as caught:
        parse_request_head(request(line, b"Host: a"), 200)
    assert caught.value.status in (status, 505)


def test_host_is_needed_on_http_1_1_only():
    with pytest.raises(ClientFault, match="without Host"):
        parse_request_head(request(b"GET / HTTP/1.1"), 200)
    assert not parse_request_head(request(b"GET / HTTP/1.0"), 200).keep_alive
    assert parse_request_head(request(b"GET / HTTP/1.0", b"Connection: Keep-Alive"), 200).keep_alive


def test_chunked_is_refused_on_http_1_0_and_unknown_expectations_are_named():
    with pytest.raises(ClientFault, match=r"1\.0"):
        parse_request_head(request(b"POST / HTTP/1.0", b"Transfer-Encoding: chunked"), 200)
    with pytest.raises(ClientFault) as caught:
        parse_request_head(request(b"POST / HTTP/1.1", b"Host: a", b"Expect: magic"), 200)
    assert caught.value.status == 417


def test_an_offer_to_upgrade_is_ignored():
    head = parse_request_head(
        request(b"GET / HTTP/1.1", b"Host: a", b"Connection: upgrade", b"Upgrade: websocket"), 200
    )
    assert head.target == b"/" and head.keep_alive


def test_too_many_headers_are_refused_before_they_are_parsed():
    lines = [b"X: 1"] * 200
    assert len(parse_request_head(request(b"GET / HTTP/1.0", *lines), 200).headers) == 200
    with pytest.raises(ClientFault) as caught:
        parse_request_head(request(b"GET / HTTP/1.0", *lines, b"X: 1"), 200)
    assert caught.value.status == 431


@given(st.binary(max_size=120))
def test_no_head_makes_the_parser_raise_anything_but_its_own_errors(noise: bytes):
    for head in (noise + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n" + noise + b"\r\n\r\n"):
        try:
            result = parse_request_head(head, 200)
        except ClientFault:
            continue
        assert b"\n" not in result.target and b" " not in result.target
        for name, value in result.headers:
            assert name and not {10, 13, 0} & set(name + value)


# --- response heads


def test_a_reply_head_settles_its_framing():
    def parse(*lines: bytes, head_only: bool = False) -> tuple[int, bool, bool]:
        head = parse_response_head(request(*lines), 200, head_only)
        return head.content_length, head.chunked, head.keep_alive

    assert parse(b"HTTP/1.1 200 OK", b"Content-Length: 5") == (5, False, True)
    assert parse(b"HTTP/1.1 200 OK", b"Transfer-Encoding: Chunked") == (-1, True, True)
    assert parse(b"HTTP/1.1 200 OK", b"Connection: close") == (-1, False, False)
    assert parse(b"HTTP/1.0 200 OK", b"Content-Length: 5") == (5, False, False)
    assert parse(b"HTTP/1.1 204 No Content") == (0, False, True)
    assert parse(b"HTTP/1.1 304 Not Modified", b"Content-Length: 9")[1:] == (False, True)
    assert parse(b"HTTP/1.1 200 OK", b"Content-Length: 9", head_only=True) == (9, False, True)
    assert parse_response_head(request(b"HTTP/1.1 299"), 9, False).status == 299
    head = parse_response_head(request(b"HTTP/1.1 200 OK", b"Keep-Alive: max=9, timeout=4"), 9, False)
    assert head.keep_alive_timeout == 4


@pytest.mark.parametrize(
    "lines",
    [
        (b"HTTP/1.1 200 OK", b"Content-Length: 1", b"Transfer-Encoding: chunked"),
        (b"HTTP/1.1 200 OK", b"Content-Length: 1", b"Content-Length: 2"),
        (b"HTTP/1.1 200 OK", b"Content-Length: x"),
        (b"HTTP/1.0 200 OK", b"Transfer-Encoding: chunked"),
        (b"HTTP/1.1 200 OK", b"Transfer-Encoding: gzip"),
        (b"HTTP/1.1 2x0 OK",),
        (b"HTTP/1.1 99 Low",),
        (b"HTTP/3.0 200 OK",),
        (b"SSH-2.0-OpenSSH",),
        (b"HTTP/1.1 200 OK", b"A : b"),
        (b"HTTP/1.1 200 OK", b"A: b\0"),
    ],
)
def test_garbage_and_conflicting_replies_are_bad_replies(lines: tuple[bytes, ...]):
    with pytest.raises(BadReply):
        parse_response_head(request(*lines), 200, False)


# --- writing heads


def test_end_to_end_drops_hop_by_hop_headers_and_those_that_connection_names():
    headers = [
        (b"Connection", b"close, X-Secret"),
        (b"X-Secret", b"1"),
        (b"TE", b"trailers"),
        (b"Content-Length", b"9"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Kept", b"2"),
        (b"Proxy-Authorization", b"x"),
        (b"Expect", b"100-continue"),
    ]
    assert end_to_end(headers) == [(b"X-Kept", b"2")]
    assert end_to_end(end_to_end(headers)) == end_to_end(headers)


def test_a_request_head_is_framed_by_us_whatever_the_caller_passes():
    headers = [(b"Content-Length", b"7"), (b"Connection", b"X-A"), (b"X-A", b"1"), (b"Accept", b"*/*")]
    head = request_head(b"POST", b"/x", headers, b"h:1", 3)
    assert head == b"POST /x HTTP/1.1\r\nAccept: */*\r\nHost: h:1\r\nContent-Length: 3\r\n\r\n"
    assert b"Content-Length" not in request_head(b"GET", b"/x", [], b"h:1", 0)
    assert b"Content-Length: 0" in request_head(b"POST", b"/x", [(b"host", b"other")], b"h:1", 0)
    assert b"h:1" not in request_head(b"POST", b"/x", [(b"host", b"other")], b"h:1", 0)
    assert b"host: a" in request_head(b"GET", b"/", [(b"Connection", b"host"), (b"host", b"a")], b"h", 0)


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        (b"GET", b"/a b", []),
        (b"GET", b"/\r\nX: 1", []),
        (b"GE T", b"/", []),
        (b"GET", b"/", [(b"X", b"1\r\nY: 2")]),
        (b"GET", b"/", [(b"X\n", b"1")]),
        (b"GET", b"/", [(b"X", b"\0")]),
    ],
)
def test_a_head_that_would_break_the_framing_is_our_own_fault(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
):
    with pytest.raises(LocalFault):
        request_head(method, target, headers, b"h", 0)
    with pytest.raises(LocalFault):
        header_block([(b"X", b"1\r\nY: 2")])


header_names = st.text("abcXYZ-_09", min_size=1, max_size=12).map(lambda s: b"x" + s.encode())
header_values = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0xFF, blacklist_characters="\x7f"), max_size=20
).map(lambda s: s.encode("latin-1").strip(b" \t\x80"))


@given(st.lists(st.tuples(header_names, header_values), max_size=8), st.integers(0, 10**12))
def test_what_we_write_llhttp_reads_back(headers: list[tuple[bytes, bytes]], length: int):
    head = request_head(b"POST", b"/x?y", headers, b"h:1", length)
    parsed = parse_request_head(head, 200)
    assert parsed.content_length == length
    assert [(n, v.strip(b" \t")) for n, v in parsed.headers][: len(headers)] == headers


# --- chunks


def scan(data: bytes, cuts: list[int], limit: int | None = None) -> tuple[bytes, int, bool]:
    sink = bytearray()
    scanner = ChunkScanner(sink, limit)
    used = 0
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        if scanner.done:
            break
        used = scanner.feed(memoryview(data), start, end)
    return bytes(sink), used, scanner.done


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.binary(max_size=20),
    st.booleans(),
)
def test_chunks_come_out_the_same_however_they_are_cut(
    pieces: list[bytes], cuts: list[int], surplus: bytes, trailers: bool
):
    data = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n"
    data += b"X-Trailer: 1\r\n\r\n" if trailers else b"\r\n"
    payload, used, done = scan(data + surplus, cuts)
    assert done and payload == b"".join(pieces) and used == len(data)


BAD_CHUNKS = [
    b"x\r\n",
    b"\r\n",
    b"+5\r\nhello\r\n",
    b"-1\r\n",
    b"0x5\r\nhello\r\n",
    b" 5\r\nhello\r\n",
    b"5\nhello\r\n",
    b"5\r\nhelloX",
    b"5\r\nhello\n\n",
    b"5\r\nhello\r\r",
    b"11111111111111111\r\n",
    b"5 5\r\n",
    b"5;a\x00b\r\n",
    b"5;a\rb\r\n",
    b"5;" + b"a" * 5000,
    b"0\r\nX : 1\r\n\r\n",
    b"0\r\n folded\r\n\r\n",
    b"0\r\nX: 1\n\r\n",
    b"0\r\n" + b"X-A: " + b"y" * 5000 + b"\r\n\r\n",
    b"0\r\n" + b"X-A: y\r\n" * 5000 + b"\r\n",
]


@pytest.mark.parametrize("data", BAD_CHUNKS)
def test_case_f61_bad_chunks_are_refused(data: bytes):
    with pytest.raises(ChunkError):
        scan(data, [])
    with pytest.raises(ChunkError):
        scan(data, list(range(0, len(data), 1)))


def test_chunk_payload_is_limited_before_it_is_kept():
    with pytest.raises(ChunkTooLarge):
        scan(b"ffffffff\r\n", [], limit=1000)
    assert scan(b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n", [], limit=1000)[2]


@given(st.binary(max_size=60).map(lambda noise: noise.replace(b"\0", b"1")))
def test_whatever_the_chunk_scanner_accepts_llhttp_accepts_alike(data: bytes):
    try:
        payload, used, done = scan(data, [])
    except ChunkError:
        return
    if not done:
        return
    got = bytearray()

    class Sink:
        def on_body(self, piece: bytes) -> None:
            got.extend(piece)

    parser = httptools.HttpRequestParser(Sink())
    parser.feed_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    parser.feed_data(data[:used])
    assert bytes(got) == payload


# --- memory


def test_memory_pauses_at_the_limit_and_always_lets_one_go_on():
    budget = MemoryBudget(100)
    a, b, c = (BudgetHolder() for _ in range(3))
    assert budget.charge(a, 60)
    assert budget.charge(b, 60), "the first above the limit may overdraw"
    assert not budget.charge(a, 1)
    assert not budget.charge(c, 1)
    assert budget.charge(b, 60)
    assert budget.release(b) == [a], "one freed place wakes one"
    assert budget.release(a) == [c]
    assert budget.release(c) == []
    assert budget.used == 0 and budget.waiting == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.booleans()), max_size=60))
def test_memory_is_never_stuck_and_never_above_limit_plus_what_one_may_hold(
    steps: list[tuple[int, int, bool]],
):
    budget = MemoryBudget(100)
    holders = [BudgetHolder() for _ in range(6)]
    paused: set[BudgetHolder] = set()
    for who, size, finish in steps:
        holder = holders[who]
        if finish:
            paused.discard(holder)
            paused.difference_update(budget.release(holder))
        elif holder not in paused and not budget.charge(holder, size):
            paused.add(holder)
        assert budget.used == sum(h.charged for h in holders)
        assert budget.waiting == len(paused)
        if paused:
            running = [h for h in holders if h not in paused and h.charged]
            assert running, "somebody who holds memory must be able to go on"
    for holder in holders:
        paused.discard(holder)
        paused.difference_update(budget.release(holder))
    assert not paused and budget.used == 0


# --- idle connections


class Fake:
    def __init__(self, alive: bool = True) -> None:
        self.idle_since = 0.0
        self.ok = alive

    def alive(self, now: float) -> bool:
        return self.ok


def test_the_idle_stack_reuses_the_newest_and_drops_the_old_and_the_dead():
    stack: IdleStack[Fake] = IdleStack(UpstreamLimits(idle_timeout=3))
    old, middle, dead, new = Fake(), Fake(), Fake(alive=False), Fake()
    for at, fake in ((0, old), (2, middle), (2.5, dead), (3, new)):
        assert stack.push(fake, at)
    assert stack.pop(4) == (new, [])
    assert stack.pop(4) == (middle, [dead])
    assert stack.pop(4) == (None, [old])
    assert stack.pop(4) == (None, [])


def test_the_idle_time_is_learnt_downward_bounded_and_forgotten():
    stack: IdleStack[Fake] = IdleStack(UpstreamLimits(idle_timeout=3, min_idle_timeout=0.2, learn_for=600))
    stack.learn(60, 0)
    assert stack.idle_timeout(0) == 3
    stack.learn(1.0, 0)
    assert stack.idle_timeout(0) == pytest.approx(0.8)
    stack.learn(2.0, 0)
    assert stack.idle_timeout(0) == pytest.approx(0.8)
    stack.learn(0.001, 0)
    assert stack.idle_timeout(599) == pytest.approx(0.2)
    assert stack.idle_timeout(600) == 3
    fake = Fake()
    stack.push(fake, 600)
    assert stack.expire(602) == [] and stack.expire(603.5) == [fake]


# --- heads read before

bodies = st.integers(0, 10**19).map(str) | st.sampled_from(["", "+1", "1 ", "0x1", "1, 1", "٣", "1\x00", "-0"])


@given(st.lists(st.tuples(st.sampled_from(["/a", "/b", "/a b"]), bodies, st.booleans()), min_size=2, max_size=8))
def test_a_head_that_was_read_before_is_read_as_the_parser_would(heads: list[tuple[str, str, bool]]):
    memo = RequestMemo(200)
    for target, length, close in heads:
        lines = [f"POST {target} HTTP/1.1", "Host: a", f"Content-Length: {length}", "X: 1"]
        head = request(*(line.encode() for line in lines + ["Connection: close"] * close))

        def outcome(read: Callable[[bytes], RequestHead], head: bytes = head) -> object:
            try:
                got = read(head)
            except ClientFault as fault:
                return fault.status, fault.code
            headers = [(name, value.strip(b" \t")) for name, value in got.headers]
            return got.target, headers, got.names, got.content_length, got.keep_alive, got.version, got.expects

        expected = outcome(lambda head: parse_request_head(head, 200))
        assert outcome(lambda head: memo.read(head, RequestHead())) == expected
        assert outcome(lambda head: memo.read(head, RequestHead())) == expected


@given(st.lists(st.tuples(header_names, header_values), max_size=5), st.booleans(), st.booleans())
def test_forwarded_headers_are_on_the_wire_what_the_list_of_them_is(
    headers: list[tuple[bytes, bytes]], hop: bool, known: bool
):
    lines = [b"POST /x HTTP/1.1", b"Host: a", b"Content-Length: 5", *(n + b": " + v for n, v in headers)]
    lines += [b"Connection: x-gone", b"X-Gone: 1"] if hop else []
    memo = RequestMemo(200)
    head = memo.read(request(*lines), RequestHead())
    if known:
        head = memo.read(request(*lines), RequestHead())
    extra = [(b"X-Extra", b"1"), (b"Connection", b"close")]
    for more in ([], extra):
        composed = request_head(b"POST", b"/y", head.forwarded(more), b"h", 7)
        assert composed == request_head(b"POST", b"/y", [*head.headers, *more], b"h", 7)
    with pytest.raises(LocalFault):
        head.forwarded([(b"X", b"1\r\nY: 2")])
    with pytest.raises(LocalFault):
        request_head(b"POST", b"/y z", head.forwarded(), b"h", 0)


def test_what_is_remembered_is_bounded_and_not_shared_with_requests():
    memo = RequestMemo(200)
    for n in range(2000):
        memo.read(request(b"POST /%d HTTP/1.1" % n, b"Host: a", b"Content-Length: 1"), RequestHead())
    assert len(memo._known) <= 512
    head = request(b"POST /1999 HTTP/1.1", b"Host: a", b"Content-Length: 2")
    first = memo.read(head, RequestHead())
    first.headers.clear()
    assert len(memo.read(head, RequestHead()).headers) == 2


# --- buffers


def test_a_buffer_is_reused_only_when_nobody_else_has_it():
    pool = BufferPool(1 << 20)
    kept = pool.take(100_000)
    pool.give([kept])
    assert pool.kept == 0, "the caller still has it"
    viewed = pool.take(100_000)
    view = memoryview(viewed)
    holder = [viewed]
    del viewed
    pool.give(holder)
    assert pool.kept == 0 and len(view) == 100_000
    pool.give([pool.take(100_000)])
    assert pool.kept == 1 << 17 and pool.warm(70_000) and not pool.warm(60_000)
    again = pool.take(70_000)
    assert len(again) == 70_000 and pool.kept == 0
    for _ in range(20):
        pool.give([pool.take(1 << 20)])
        holder = [pool.take(1 << 19) for _ in range(4)]
        while holder:
            pool.give([holder.pop()])
    assert pool.kept <= 1 << 20
    for _ in range(20):
        pool.age()
    assert pool.kept == 0
    assert len(pool.take(50)) == 50 and len(pool.take(100 << 20)) == 100 << 20
