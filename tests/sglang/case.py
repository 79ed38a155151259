"""What a case is: a named coroutine over a running stack, which counts its requests and says what it found."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .client import ChatReply, Client, Receiver, data_uri, picture, tokens_of
from .stack import TO_SCHEDULER, TO_TOKENIZER, Stack

__all__ = ["CASES", "Case", "CaseFailed", "Run", "case"]


class CaseFailed(Exception):
    """Something was not as it must be."""


@dataclass
class Run:
    """One case at work. ``requests`` counts what it sent; ``note`` goes into the table."""

    stack: Stack
    seeds: itertools.count[int]
    requests: int = 0
    note: str = ""
    receivers: list[Receiver] = field(default_factory=list)

    @property
    def client(self) -> Client:
        return self.stack.client

    @property
    def router(self) -> str:
        return self.stack.router.url

    def new_pictures(self, count: int = 1) -> list[str]:
        """Data URIs of pictures nobody has seen before."""
        return [data_uri(picture(next(self.seeds))) for _ in range(count)]

    def receiver(self) -> Receiver:
        receiver = Receiver()
        self.receivers.append(receiver)
        return receiver

    def expect(self, condition: object, what: str) -> None:
        if not condition:
            raise CaseFailed(what)

    async def chat(self, pictures: Sequence[str]) -> ChatReply:
        self.requests += 1
        return await self.client.chat(self.stack.language.url, pictures)

    async def chat_succeeds(self, pictures: Sequence[str]) -> ChatReply:
        """A chat that must come back 200 with the tokens of all its pictures."""
        reply = await self.chat(pictures)
        self.expect(reply.status == 200, f"chat with {len(pictures)} pictures: {reply.brief}")
        wanted = tokens_of(len(pictures))
        self.expect(
            reply.image_tokens == wanted,
            f"{reply.image_tokens} image tokens for {len(pictures)} pictures, {wanted} expected",
        )
        return reply

    async def language_server_lives(self) -> None:
        """It still runs and still answers a chat with a picture."""
        self.stack.language.process.check()
        await self.chat_succeeds(self.new_pictures())

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


Body = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """``aliases``: which list of encoder URLs the language server must have; None: either. ``intact``: needs
    every server running when it begins. ``known_limit``: why it cannot pass for now; its failure is shown, not
    counted."""

    name: str
    body: Body
    backends: tuple[str, ...]
    aliases: bool | None
    intact: bool
    limit: float
    known_limit: str


CASES: list[Case] = []


def case(
    name: str,
    *,
    backends: tuple[str, ...] = (TO_SCHEDULER, TO_TOKENIZER),
    aliases: bool | None = None,
    intact: bool = True,
    limit: float = 120.0,
    known_limit: str = "",
) -> Callable[[Body], Body]:
    """Enter a coroutine into `CASES`; they run in the order in which they are entered."""

    def enter(body: Body) -> Body:
        CASES.append(Case(name, body, backends, aliases, intact, limit, known_limit))
        return body

    return enter
