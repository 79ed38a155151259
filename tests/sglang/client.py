"""What the cases send and how they look at what comes back.

Pictures are drawn here: noise, so that no two are alike and none compresses. A `Receiver` stands in for a
language server's scheduler or tokenizer: a ZMQ PULL socket whose address goes into the request. Its messages
have two frames, a pickled description and the raw bytes of the tensor; the description is never unpickled
here, only searched for the request id.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import zmq
import zmq.asyncio
from PIL import Image

__all__ = [
    "ChatReply",
    "Client",
    "Receiver",
    "Reply",
    "data_uri",
    "encode_body",
    "new_part_id",
    "picture",
    "post_and_measure",
    "registration",
    "tokens_of",
]

SIDE = 64
CHAT_LIMIT = 170.0  # below the 180 s a language server waits for embeddings


def picture(seed: int, side: int = SIDE) -> bytes:
    """A PNG of coloured noise."""
    noise = random.Random(seed).randbytes(side * side * 3)
    sink = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise).save(sink, "PNG", compress_level=1)
    return sink.getvalue()


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def tokens_of(pictures: int) -> int:
    """How many tokens so many pictures of the default side become in the tiny model."""
    return 4 * pictures


def new_part_id(part: int = 0) -> str:
    return f"{uuid.uuid4().hex}_local_part_{part}"


def encode_body(
    part_id: str,
    items: Sequence[object],
    *,
    port: int | None = None,
    url: str = "http://router.invalid",
    part: int = 0,
    parts: int = 1,
) -> dict[str, Any]:
    """The body of ``/encode`` as a language server of 0.5.23 writes it."""
    return {
        "encoder_idx": part,
        "encoder_url": url,
        "mm_items": list(items),
        "num_parts": parts,
        "part_idx": part,
        "req_id": part_id,
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": port,
        "time_stats_json": None,
    }


def registration(part_id: str, port: int) -> dict[str, Any]:
    """The body of ``/scheduler_receive_url``."""
    return {
        "req_id": part_id,
        "receive_count": 1,
        "receive_url": f"127.0.0.1:{port}",
        "modality": "IMAGE",
    }


def post_and_measure(url: str, body: object, limit: float = 60.0) -> tuple[int, float]:
    """A POST without an event loop, for a thread: status and seconds."""
    target = urlsplit(url)
    content = json.dumps(body).encode()
    started = time.monotonic()
    connection = http.client.HTTPConnection(target.netloc, timeout=limit)
    try:
        connection.request("POST", target.path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status, time.monotonic() - started
    finally:
        connection.close()


@dataclass(frozen=True)
class Reply:
    """Any HTTP answer; ``seconds`` from the first byte sent to the last one read."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class ChatReply:
    """A chat answer; status 0 means that the connection broke."""

    status: int
    image_tokens: int
    text: str
    seconds: float

    @property
    def brief(self) -> str:
        return f"{self.status} {self.text[:160]!r}" if self.status != 200 else "200"


class Receiver:
    """A ZMQ PULL socket on a free loopback port, in the role of a language server."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    async def embedding(self, part_id: str, limit: float = 30.0) -> bytes:
        """The raw tensor of the next message, which must be for ``part_id`` and no error."""
        frames = await asyncio.wait_for(self.socket.recv_multipart(), limit)
        # The router may give a part another suffix; what counts is the id before it.
        request_id = part_id.rpartition("_local_part_")[0] or part_id
        assert request_id.encode() in frames[0], f"a message for somebody else: {frames[0][:200]!r}"
        assert len(frames) == 2, f"an error instead of an embedding: {frames[0][-300:]!r}"
        return bytes(frames[1])

    async def nothing_more(self, seconds: float = 0.5) -> bool:
        """Whether no message comes for that long."""
        return not await self.socket.poll(int(seconds * 1000))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


class Client:
    """HTTP with a new connection per request, as SGLang's own client does it."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=CHAT_LIMIT),
        )

    async def close(self) -> None:
        await self.session.close()

    async def get(self, url: str, limit: float = 10.0) -> Reply:
        return await self.request("GET", url, None, limit)

    async def post(self, url: str, body: object, limit: float = CHAT_LIMIT) -> Reply:
        return await self.request("POST", url, body, limit)

    async def request(self, method: str, url: str, body: object, limit: float) -> Reply:
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content is not None else {}
        started = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=limit)
        async with self.session.request(method, url, data=content, headers=headers, timeout=timeout) as response:
            answer = await response.read()
            return Reply(response.status, answer, time.monotonic() - started)

    async def answers(self, url: str, limit: float = 3.0) -> bool:
        """Whether a GET is answered with 200."""
        try:
            return (await self.get(url, limit)).status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def chat(self, server: str, pictures: Sequence[str], text: str = "What is it?") -> ChatReply:
        """One ``/v1/chat/completions`` with the pictures in order, then the text."""
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "max_tokens": 4,
            "temperature": 0,
        }
        started = time.monotonic()
        try:
            reply = await self.post(f"{server}/v1/chat/completions", body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return ChatReply(0, 0, f"{type(error).__name__}: {error}", time.monotonic() - started)
        if reply.status != 200:
            return ChatReply(reply.status, 0, reply.body.decode(errors="replace"), reply.seconds)
        content = reply.json()
        details = content["usage"].get("prompt_tokens_details") or {}
        text = content["choices"][0]["message"]["content"] or ""
        return ChatReply(200, details.get("image_tokens") or 0, text, reply.seconds)
