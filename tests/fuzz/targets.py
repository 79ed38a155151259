"""Everything in the router that reads bytes of others. A target hands damaged bytes in and checks what must not happen:
that anything but the documented error comes out, or that somebody else is harmed."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from fullhit.config import ConfigError, load_config
from fullhit.core import Pool, WorkerSpec
from fullhit.decision.dynamo_media import read_dynamo_media
from fullhit.decision.media import MediaError, read_media
from fullhit.events import Ingest
from fullhit.events.dynamo_feed import DynamoFeed
from fullhit.events.dynamo_scope import DynamoScope, parse_subject
from fullhit.fleet.discovery import RecordError, parse
from fullhit.fleet.remembered import StateUnreadable, decode
from fullhit.http.encoder.imagecheck import inspect_image
from fullhit.http.encoder.media import BadBody, parse_encode, parse_follow_up, parse_registration
from fullhit.http.openai.bodies import BadBody as BadChat
from fullhit.http.openai.bodies import read_body
from fullhit.http.openai.tokens import payload_of
from fullhit.http.openai.verdict import instances_in, judge, settled
from fullhit.http.wire.chunks import ChunkError, ChunkScanner
from fullhit.http.wire.errors import WireError as HttpError
from fullhit.http.wire.heads import parse_request_head, parse_response_head
from fullhit.http.workers.generation import BOOTSTRAP, read_generation
from fullhit.http.workers.generation import BadBody as BadGeneration
from fullhit.http.workers.logprobs import LogprobStream, merged, prompt_logprobs
from fullhit.http.workers.splice import Rendezvous, spliced
from fullhit_publisher import wire
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.identity import dynamo_name, worker_id_for
from fullhit_publisher.keys import fold
from fullhit_publisher.state import PublisherState

__all__ = ["TARGETS", "Target"]

ONE, TWO = "http://one.invalid:1", "http://two.invalid:1"
KEYS = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(40)]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAAB"
    + "JRU5ErkJggg=="
)


class Target(NamedTuple):
    name: str
    seeds: list[bytes]
    run: Callable[[bytes], object]

    def __repr__(self) -> str:
        return f"<Target {self.name}>"  # the seeds are long


class _Router:
    """Two workers whose entries are known; the bytes of the first one's messages are what is damaged."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pool = Pool("default", clock=lambda: self.now)
        self.ingest = Ingest(
            {"default": self.pool}, clock=lambda: self.now, wall_clock=lambda: self.now, rng=random.Random(1)
        )
        self.ingest.plane_up()
        self.ingest.dynamo_up("default")
        self.feed = DynamoFeed("default", DynamoScope("ns"), self.ingest, clock=lambda: self.now)

    def with_ours(self) -> _Router:
        for url in (ONE, TWO):
            self._add(url, url)
            state = publisher(url)
            state.apply(KEYS[:20], [])
            self.ingest.feed(subject(url), message(state.next_delta(), url, 1))
            self.ingest.feed(subject(url), message(state.heartbeat(), url, 2))
        self.requests = {r.worker_id: r for r in self.ingest.tick(self.now)}
        return self.check()

    def with_dynamo(self) -> _Router:
        for number in (FIRST, SECOND):
            self._add(dynamo_name(number), "")
            self.feed.worker_joined(number)
            self.feed.nats(DYNAMO_SUBJECT, dynamo_message(number, 0, KEYS[:20]))
        return self.check()

    def _add(self, name: str, url: str) -> None:
        self.pool.add_worker(WorkerSpec(id=name, url=url))
        self.pool.set_ready(name, True)
        self.ingest.worker_added("default", name)

    def check(self) -> _Router:
        """The second worker's entries are as they were."""
        for _ in range(10_000):
            if not self.ingest.run_slices():
                break
        else:
            raise AssertionError("the intake never comes to an end")
        self.now += 1.0
        self.ingest.tick(self.now)
        for name in (TWO, dynamo_name(SECOND)):
            if self.pool.get(name) is not None:
                assert self.pool.key_count(name) == 20
                assert all(self.pool.holds(name, fold(key)) for key in KEYS[:20])
        return self


def publisher(url: str) -> PublisherState:
    return PublisherState(worker_id_for(url), clock_ns=lambda: 10**18, url=url, device="cuda")


def subject(url: str) -> str:
    return wire.events_subject("default", worker_id_for(url))


def message(body: Any, url: str, sequence: int) -> bytes:
    return wire.encode(body, publisher_id=worker_id_for(url), sequence=sequence, published_at=1_000_000)


DYNAMO_SUBJECT = "namespace.ns.component.encoder.endpoint.generate.multimodal_embedding_cache"
FIRST, SECOND = 2**63 + 12345, 0x5A5A_A5A5_0F0F
"""Worker ids far apart: a flipped bit must not happen to name the other."""


def dynamo_message(worker: int, sequence: int, added: list[str], removed: tuple[str, ...] = ()) -> bytes:
    payload = {"worker_id": worker, "update": {"added_keys": added, "removed_keys": list(removed)}}
    return msgspec.msgpack.encode(
        {
            "publisher_id": worker ^ 0x7777_0000_7777,
            "sequence": sequence,
            "published_at": 1_000_000,
            "topic": "multimodal_embedding_cache",
            "payload": msgspec.msgpack.encode(payload),
        }
    )


# Events.


def _our_messages() -> Iterator[bytes]:
    state = publisher(ONE)
    state.apply(KEYS[:20], [])
    state.next_delta()
    for sequence, (added, removed) in enumerate(((KEYS[20:22], []), ([], KEYS[:3]), (KEYS[25:40], KEYS[5:6])), 3):
        state.apply(added, removed)
        yield message(state.next_delta(), ONE, sequence)
    yield message(state.heartbeat(), ONE, 9)


def _event(data: bytes) -> None:
    router = _Router().with_ours()
    for _ in range(2):
        router.ingest.feed(subject(ONE), data)
        router.check()


def _snapshot_parts(request_id: int) -> Iterator[bytes]:
    for part in range(2):
        snapshot = wire.Snapshot(
            worker_id=worker_id_for(ONE), pool="default", request_id=request_id, epoch=10**18, seq=4, part=part,
            parts=2, keys=KEYS[part * 20 : part * 20 + 20],
        )  # fmt: skip
        yield message(snapshot, ONE, 20 + part)


PLACE = 0x1234_5678_9ABC_DEF1
"""Stands in the seeds for the id of the request, which is random."""


def _snapshot(data: bytes) -> None:
    router = _Router().with_ours()
    router.ingest.messages_lost("test")
    for _ in range(8):
        router.now += 1.0
        router.requests |= {r.worker_id: r for r in router.ingest.tick(router.now)}
    request = router.requests[worker_id_for(ONE)].request_id
    assert router.ingest.stream("default", ONE).outstanding  # type: ignore[union-attr]
    data = data.replace(msgspec.msgpack.encode(PLACE), msgspec.msgpack.encode(request))
    router.ingest.feed_snapshot(data)
    router.check()
    for part in _snapshot_parts(request):
        router.ingest.feed_snapshot(part)
    router.check()


def _dynamo(data: bytes) -> None:
    router = _Router().with_dynamo()
    for _ in range(2):
        router.feed.nats(DYNAMO_SUBJECT, data)
        router.feed.zmq([b"multimodal_embedding_cache", b"\0" * 8, b"\0" * 8, data], None)
        router.check()


# Bodies, heads, files.


def _allowing(*allowed: type[Exception]) -> Callable[[Callable[[bytes], object]], Callable[[bytes], None]]:
    def wrap(read: Callable[[bytes], object]) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            with suppress(*allowed):
                read(data)

        return run

    return wrap


def _chat(data: bytes) -> None:
    for shape in ("chat", "responses", "text"):
        with suppress(BadChat):
            body = read_body(data, shape, KeyRules())  # type: ignore[arg-type]
            assert body.media.items >= len(body.media.keys) >= 0
            if body.pinned:
                assert read_body(body.body, shape, KeyRules()).pinned is False  # type: ignore[arg-type]
    with suppress(MediaError):
        read_media(chat_body=data)
    with suppress(MediaError):
        read_dynamo_media(KeyRules(), chat_body=data, encode_body=data)


def _generation(data: bytes) -> None:
    for shape in ("chat", "responses", "generate", "text"):
        with suppress(BadGeneration):
            found = read_generation(data, shape)  # type: ignore[arg-type]
            assert found.items >= len(found.keys) and found.items >= found.unkeyed
            body = spliced(data, Rendezvous("h", 1, (7, 8), True), clean=not found.bootstrap)
            try:
                before = msgspec.json.decode(data)
            except msgspec.DecodeError:
                continue  # in a long string, which is not looked through; the worker refuses it
            told = msgspec.json.decode(body)
            assert [told.pop(name) for name in BOOTSTRAP] == [["h"] * 2, [1] * 2, [7, 8]]
            assert told == {name: value for name, value in before.items() if name not in BOOTSTRAP}


def _logprobs(data: bytes) -> None:
    merged(data, prompt_logprobs(data))
    stream = LogprobStream(prompt_logprobs(data))
    out = b"".join(stream.feed(data[at : at + 7]) for at in range(0, len(data), 7)) + stream.end()
    again = LogprobStream(prompt_logprobs(data))
    assert again.feed(data) + again.end() == out, "the same wherever it is cut"


def _reply(data: bytes) -> None:
    payload_of(data, True)
    instances_in(data)
    for status in (200, 400, 503):
        for sse in (True, False):
            judge(status, data, sse=sse)
            settled(status, data, sse=sse)


def _chunks(data: bytes) -> None:
    """Cut or whole, the same payload or the same refusal."""
    outcomes = []
    for step in (len(data) or 1, 1):
        sink = bytearray()
        scanner = ChunkScanner(sink)
        try:
            for at in range(0, len(data), step):
                if scanner.done:
                    break
                scanner.feed(data, at, min(at + step, len(data)))
            outcomes.append((bytes(sink), scanner.done))
        except ChunkError:
            outcomes.append((b"", None))
    assert outcomes[0] == outcomes[1]


def _config(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file, suppress(ConfigError):
        file.write(data)
        file.flush()
        load_config(file.name, environ={})


def _image(data: bytes) -> None:
    for text in (data.decode("utf-8", "replace"), memoryview(data)):
        problem = inspect_image(text)
        assert problem is None or (problem and len(problem) < 500)


def _discovery(data: bytes) -> None:
    for key in ("v1/instances/x", "v1/event_channels/x"):
        with suppress(RecordError):
            parse(key, data)
    parse_subject(data.decode("utf-8", "replace"))


_ENCODE = json.dumps({
    "req_id": "r1",
    "mm_items": [PIXEL, {"url": "http://h.invalid/a.png", "uuid": "u"}, "data:image/png;base64," + "A" * 3000],
    "num_parts": 2, "part_idx": 1, "modality": "IMAGE", "prefill_host": "127.0.0.1", "embedding_port": [1, None],
    "odd": {"x": [1.5, None, True]},
}).encode()  # fmt: skip
_CHAT = json.dumps({
    "model": "m", "stream": True, "nvext": {"dp_rank": 1, "annotations": []},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a\u00e9"},
                  {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}, "uuid": "u"}]}],
    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}],
    "multi_modal_data": {"image_url": [{"Url": PIXEL}, {"Decoded": {"content_hash": "0123456789abcdef"}}]},
}).encode()  # fmt: skip
_GENERATE = json.dumps({
    "model": "m", "text": ["a" * 3000, "b"], "image_data": [[PIXEL], ["data:image/png;base64," + "B" * 9000]], "n": 2,
    "return_logprob": True, "bootstrap_room": 5,
}).encode()  # fmt: skip
_LOGPROBS = b"".join(
    b"data: "
    + json.dumps({"text": "x", "index": n, "meta_info": {"input_token_logprobs": [[-1, n, None]]}}).encode()
    + b"\n\n"
    for n in range(2)
)
_CONFIG = b"""
[server]
listen = "127.0.0.1:8780"
max_body_bytes = 1000000
[events]
plane = "none"
plane_grace = 2.5
[pool.default]
ratio = 4
device_ratios = { xpu = 2 }
workers = ["http://127.0.0.1:1", { url = "http://127.0.0.1:2", device = "cpu", weight = 2.0 }]
[pool.d.dynamo]
namespace = "ns"
discovery = "file:/nowhere"
[openai_front]
pool = "d"
[log]
level = "info"
"""
_STATE = json.dumps({"version": 1, "workers": [
    {"url": "http://127.0.0.1:1", "pool": "default", "source": "registered", "weight": 1.0, "labels": {"a": "b"}},
]}).encode()  # fmt: skip
_RECORD = json.dumps({
    "component": "encoder", "endpoint": "generate", "namespace": "ns", "instance_id": 2**64 - 1, "device_type": "cuda",
    "topic": "multimodal_embedding_cache", "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://127.0.0.1:1"}},
    "scope": {"kind": "endpoint", "endpoint": {"namespace": "ns", "component": "encoder", "name": "generate"}},
}).encode()  # fmt: skip
_REQUEST_HEAD = (
    b"POST /v1/chat/completions?x=%2F HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 12\r\nConnection: close, TE\r\n"
    b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\nX-Odd:\t a b \r\n\r\n"
)
_RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n"
    b"Set-Cookie: a=b\r\nContent-Length: 3\r\n\r\n"
)
_EVENTS = [
    b': c\n\nevent: error\ndata: {"error":{"message":"Service temporarily unavailable","code":503}}\n\n'
    b"data: [DONE]\n\n",
    b'{"message":"Invalid request","code":400,"instances":[{"instance_id":18446744073709551613}]}',
    b"5\r\nhello\r\n1a;x=y\r\n" + b"z" * 26 + b"\r\n0\r\nTrailer: x\r\n\r\n",
]

TARGETS = [
    Target("event", list(_our_messages()), _event),
    Target("snapshot", list(_snapshot_parts(PLACE)), _snapshot),
    Target(
        "dynamo_event",
        [dynamo_message(FIRST, n, KEYS[n * 5 : n * 5 + 5], tuple(KEYS[:n])) for n in range(1, 4)],
        _dynamo,
    ),
    Target("encode_body", [_ENCODE], _allowing(BadBody)(parse_encode)),
    Target(
        "registration",
        [b'{"req_id":"r","receive_url":"127.0.0.1:5","receive_count":2}'],
        _allowing(BadBody)(parse_registration),
    ),
    Target(
        "follow_up",
        [b'{"req_id":"r","prefill_host":"h","embedding_port":5,"receive_count":1}'],
        _allowing(BadBody)(parse_follow_up),
    ),
    Target("chat_body", [_CHAT, _ENCODE], _chat),
    Target("generation", [_CHAT, _ENCODE, _GENERATE], _generation),
    Target("logprobs", [_LOGPROBS, *_EVENTS], _logprobs),
    Target("reply", _EVENTS, _reply),
    Target("chunks", _EVENTS[2:], _chunks),
    Target("request_head", [_REQUEST_HEAD], _allowing(HttpError)(lambda data: parse_request_head(data, 64))),
    Target("response_head", [_RESPONSE_HEAD], _allowing(HttpError)(lambda data: parse_response_head(data, 64, False))),
    Target("config", [_CONFIG], _config),
    Target("state_file", [_STATE], _allowing(StateUnreadable)(decode)),
    Target("discovery", [_RECORD, DYNAMO_SUBJECT.encode()], _discovery),
    Target(
        "image",
        [
            PIXEL.encode(),
            b"data:image/jpeg;base64,/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMC",
            b"data:image/webp;base64,UklGRiQAAABXRUJQVlA4IBgAAAAwAQCdASoBAAEAAQAcJaQAA3AA/v3AgAA=",
        ],
        _image,
    ),
]
