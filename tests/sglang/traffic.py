"""Cases of ordinary traffic: chats, aliases, the order of calls, and the bytes that arrive."""

from __future__ import annotations

import asyncio
import json

from .case import Run, case
from .client import Receiver, data_uri, encode_body, new_part_id, picture, post_and_measure, registration
from .processes import until
from .stack import ALIASES, TO_SCHEDULER

FAST = 1.0  # seconds; a registration waits for nothing but the loop


@case("chat with one picture", aliases=False)
async def one_picture(run: Run) -> None:
    for _ in range(3):
        await run.chat_succeeds(run.new_pictures())


@case("chat with several pictures", aliases=False)
async def several_pictures(run: Run) -> None:
    for count in (2, 3, 6):
        await run.chat_succeeds(run.new_pictures(count))


@case("a picture seen before goes where it was encoded", aliases=False)
async def repeated_picture(run: Run) -> None:
    pictures = run.new_pictures()
    before = [encoder.encodes for encoder in run.stack.encoders]
    for _ in range(5):
        await run.chat_succeeds(pictures)
    used = await encodes_since(run, before, 5)
    run.expect(sorted(used) == [0, 5], f"five equal requests were spread over the encoders: {used}")


@case("eight chats at once use both encoders", aliases=False)
async def concurrent_chats(run: Run) -> None:
    before = [encoder.encodes for encoder in run.stack.encoders]
    await asyncio.gather(*(run.chat_succeeds(run.new_pictures(1 + number % 3)) for number in range(8)))
    used = await encodes_since(run, before, 8)
    run.expect(all(used), f"one encoder stayed idle: {used}")
    run.note = f"{used[0]}+{used[1]} encodes"


@case("four aliases, one to seven pictures", aliases=True)
async def aliases(run: Run) -> None:
    for count in (1, 2, 4, 7):
        await run.chat_succeeds(run.new_pictures(count))


@case("embeddings equal a direct run, byte for byte")
async def same_bytes(run: Run) -> None:
    compared = 0
    for count in (1, 3):
        pictures = run.new_pictures(count)
        direct = [await fetch(run, encoder.url, pictures) for encoder in run.stack.encoders]
        run.expect(direct[0] == direct[1], "the two encoders differ: they do not hold equal weights")
        routed = await fetch(run, run.router, pictures)
        run.expect(routed == direct[0], f"{len(routed)} bytes through the router differ from the direct ones")
        aliased = await fetch(run, run.router + ALIASES[2], pictures)
        run.expect(aliased == direct[0], "the bytes through an alias differ from the direct ones")
        compared += 2 * len(routed)
    run.note = f"{compared} bytes"


@case("a registration overtakes its /encode", backends=(TO_SCHEDULER,))
async def overtaking(run: Run) -> None:
    for target in (run.router, run.router + ALIASES[0]):
        receiver, part = run.receiver(), new_part_id()
        run.requests += 2
        early = await run.client.post(f"{target}/scheduler_receive_url", registration(part, receiver.port), 10.0)
        run.expect(early.status == 200, f"early registration: {early.status} {early.body[:200]!r}")
        run.expect(early.seconds < FAST, f"early registration took {early.seconds:.2f} s")
        reply = await run.client.post(f"{target}/encode", encode_body(part, run.new_pictures()))
        run.expect(reply.status == 200 and reply.body == b"null", f"{reply.status} {reply.body[:200]!r}")
        await receiver.embedding(part)


@case("late and repeated registrations deliver once", backends=(TO_SCHEDULER,))
async def late_and_repeated(run: Run) -> None:
    receiver, part = run.receiver(), new_part_id()
    run.requests += 6
    encode = asyncio.create_task(run.client.post(f"{run.router}/encode", encode_body(part, run.new_pictures())))
    await asyncio.sleep(0.7)  # the encoder has the embedding by now and waits for its destination
    run.expect(not encode.done(), "/encode was answered although nobody had registered")
    register = f"{run.router}/scheduler_receive_url"
    replies = await asyncio.gather(
        *(run.client.post(register, registration(part, receiver.port), 10.0) for _ in range(3))
    )
    run.expect(all(reply.status == 200 for reply in replies), f"{[reply.status for reply in replies]}")
    run.expect((await encode).status == 200, "/encode failed")
    await receiver.embedding(part)
    run.expect(await receiver.nothing_more(), "the embedding came twice")
    stray = await run.client.post(register, registration(part, receiver.port), 10.0)
    run.expect(stray.seconds < FAST, f"a registration after the end was held for {stray.seconds:.1f} s")
    run.expect(await receiver.nothing_more(), "a registration after the end brought another embedding")


@case("a body of 17 MB", limit=180.0)
async def large_body(run: Run) -> None:
    pictures = [data_uri(picture(next(run.seeds), 1200)) for _ in range(3)]
    size = sum(map(len, pictures))
    run.expect(size > 17e6, f"the pictures are too small: {size}")
    reply = await run.chat(pictures)
    run.expect(reply.status == 200, reply.brief)
    run.expect(reply.image_tokens >= 3 * 64, f"only {reply.image_tokens} image tokens")
    run.note = f"{size / 1e6:.1f} MB in {reply.seconds:.1f} s"


@case("registrations stay fast beside large bodies", backends=(TO_SCHEDULER,), limit=180.0)
async def fast_registrations(run: Run) -> None:
    receiver = run.receiver()
    pictures = [data_uri(picture(next(run.seeds), 1000)) for _ in range(3)]
    parts = [new_part_id() for _ in range(6)]
    written = [json.dumps(encode_body(part, pictures)).encode() for part in parts]
    bodies = [asyncio.create_task(run.client.post(f"{run.router}/encode", body)) for body in written]
    run.requests += 2 * len(parts)
    slowest = 0.0
    for part in parts:
        # From a thread: this loop is itself busy with the bodies, which must not count.
        status, seconds = await asyncio.to_thread(
            post_and_measure, f"{run.router}/scheduler_receive_url", registration(part, receiver.port)
        )
        run.expect(status == 200, f"registration: {status}")
        slowest = max(slowest, seconds)
    for reply in await asyncio.gather(*bodies):
        run.expect(reply.status == 200, f"/encode: {reply.status} {reply.body[:200]!r}")
    run.expect(slowest < FAST, f"slowest registration took {slowest:.2f} s")
    run.note = f"slowest {slowest * 1000:.0f} ms"


@case("/health of every alias comes from memory")
async def health_from_memory(run: Run) -> None:
    for encoder in run.stack.encoders:
        encoder.process.pause()
    try:
        for path in ("", *ALIASES):
            run.requests += 1
            reply = await run.client.get(f"{run.router}{path}/health", 5.0)
            run.expect(reply.status == 200, f"{path}/health: {reply.status}")
            run.expect(reply.seconds < FAST, f"{path}/health took {reply.seconds:.2f} s")
    finally:
        for encoder in run.stack.encoders:
            encoder.process.resume()
    await run.language_server_lives()


@case("the router lists both encoders, one of which announced itself", backends=(TO_SCHEDULER,))
async def listed(run: Run) -> None:
    run.requests += 1
    reply = await run.client.get(f"{run.router}/list_encoder_urls")
    urls = {url.rstrip("/") for url in reply.json()["encoder_urls"]}
    run.expect(urls == {encoder.url for encoder in run.stack.encoders}, f"listed: {urls}")


async def encodes_since(run: Run, before: list[int], total: int) -> list[int]:
    """Encodes of each encoder since ``before``, once there are ``total``: their log comes after the embedding."""

    def used() -> list[int]:
        return [encoder.encodes - then for encoder, then in zip(run.stack.encoders, before, strict=True)]

    await until(lambda: sum(used()) >= total, f"the encoders have logged {total} encodes", 15.0)
    return used()


async def fetch(run: Run, target: str, pictures: list[str]) -> bytes:
    """Have ``target`` encode the pictures as one part and return the tensor's bytes."""
    receiver: Receiver = run.receiver()
    part = new_part_id()
    run.requests += 1
    if run.stack.backend == TO_SCHEDULER:
        encode = asyncio.create_task(run.client.post(f"{target}/encode", encode_body(part, pictures)))
        reply = await run.client.post(f"{target}/scheduler_receive_url", registration(part, receiver.port), 30.0)
        run.expect(reply.status == 200, f"registration at {target}: {reply.status} {reply.body[:200]!r}")
        reply = await encode
    else:
        body = encode_body(part, pictures, port=receiver.port)
        reply = await run.client.post(f"{target}/encode", body)
    run.expect(reply.status == 200, f"/encode at {target}: {reply.status} {reply.body[:200]!r}")
    return await receiver.embedding(part)
