"""Cases in which something breaks: the language server must live, and what can succeed must succeed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import signal

import aiohttp
from PIL import Image

from fullhit.lab.processes import free_port

from .case import Run, case
from .client import ChatReply, data_uri, encode_body, new_part_id, picture, registration, tokens_of
from .processes import until
from .stack import TO_SCHEDULER, TO_TOKENIZER, Server

CONCURRENCY = 6
SUBSTITUTE_TOKENS = 64  # what the picture that says "unreadable image" becomes in the tiny model


@case("an encoder is killed under 40 chats, then used again", aliases=False, limit=300.0)
async def kill_one(run: Run) -> None:
    victim = run.stack.encoders[0]
    await run.stack.all_encoders_ready()
    await kill_under_traffic(run, victim, chats=40, pictures=1)
    await run.stack.start_encoder(victim)
    await run.stack.all_encoders_ready()
    before = victim.encodes
    for _ in range(4):
        await asyncio.gather(*(run.chat_succeeds(run.new_pictures()) for _ in range(4)))
    await until(lambda: victim.encodes > before, "the restarted encoder gets a request", 15.0)


@case("an encoder is killed under 24 chats over aliases", aliases=True, backends=(TO_SCHEDULER,))
async def kill_one_over_aliases(run: Run) -> None:
    await run.stack.all_encoders_ready()
    await kill_under_traffic(run, run.stack.encoders[1], chats=24, pictures=3)


@case("all encoders are down for a while", backends=(TO_SCHEDULER,), aliases=False, intact=False, limit=400.0)
async def all_down(run: Run) -> None:
    for encoder in run.stack.encoders:
        encoder.process.kill()
    waiting = [asyncio.create_task(run.chat_succeeds(run.new_pictures())) for _ in range(4)]
    try:
        await asyncio.sleep(4.0)  # long enough for the router to have found out
        ended = [task for task in waiting if task.done()]
        for task in ended:
            await task  # raises with the reason
        run.expect(not ended, "a chat was answered without any encoder")
        run.stack.language.process.check()
        await run.stack.start_encoder(run.stack.encoders[0])
        replies = await asyncio.gather(*waiting)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    run.note = f"waited up to {max(reply.seconds for reply in replies):.0f} s"
    await run.language_server_lives()
    await run.stack.start_encoder(run.stack.encoders[1])
    await run.stack.all_encoders_ready()


@case("undecodable inline pictures do not reach the language server", backends=(TO_SCHEDULER,))
async def undecodable_to_scheduler(run: Run) -> None:
    good = run.new_pictures()
    for name, bad in broken_pictures(run).items():
        for pictures in ([bad], [*good, bad, *good]):
            reply = await run.chat(pictures)
            run.expect(reply.status == 200, f"{name}: {reply.brief}")
            run.expect(reply.image_tokens > 0, f"{name}: no image tokens")
            run.stack.language.process.check()
    await run.language_server_lives()


@case("undecodable pictures are an error for their client only", backends=(TO_TOKENIZER,))
async def undecodable_to_tokenizer(run: Run) -> None:
    broken = broken_pictures(run)
    broken["unreachable"] = f"http://127.0.0.1:{free_port()}/none.png"
    seen = set()
    for name, bad in broken.items():
        reply = await run.chat([bad])
        run.expect(400 <= reply.status < 600, f"{name}: {reply.brief}")
        seen.add(reply.status)
    run.note = f"clients got {', '.join(map(str, sorted(seen)))}"
    await run.language_server_lives()


@case("clients that go away in the middle")
async def clients_leave(run: Run) -> None:
    for patience in (0.005, 0.02, 0.04, 0.08, 0.15):
        chat = asyncio.create_task(run.chat(run.new_pictures(2)))
        await asyncio.wait({chat}, timeout=patience)
        chat.cancel()
        await asyncio.gather(chat, return_exceptions=True)
    await run.language_server_lives()
    # The same one hop further: an /encode whose caller goes away gives its slot back. The destination is known
    # before, so that the encoder can deliver and does not wait for it.
    for patience in (0.005, 0.05):
        receiver, part = run.receiver(), new_part_id()
        body = encode_body(part, run.new_pictures())
        run.requests += 1
        if run.stack.backend == TO_SCHEDULER:
            register = f"{run.router}/scheduler_receive_url"
            await run.client.post(register, registration(part, receiver.port), 10.0)
        else:
            body["embedding_port"] = receiver.port
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await run.client.post(f"{run.router}/encode", body, patience)
    await until(run.stack.router_idle, "the router has no request in flight", 20.0)
    await run.language_server_lives()


@case("an encoder that stops takes itself off the list", backends=(TO_SCHEDULER,))
async def unregisters(run: Run) -> None:
    leaving = run.stack.encoders[1]
    # On SIGTERM this release ends without its exit handlers, so without a word to the router.
    by_itself = await leaving.process.end(signal.SIGINT)
    run.expect(by_itself, "the encoder did not end on SIGINT")

    async def gone() -> bool:
        reply = await run.client.get(f"{run.router}/list_encoder_urls")
        return leaving.url not in [url.rstrip("/") for url in reply.json()["encoder_urls"]]

    await until(gone, "the router no longer lists the encoder", 15.0)
    for _ in range(3):
        await run.language_server_lives()


@case("a picture URL that cannot be fetched does not stop the language server", backends=(TO_SCHEDULER,), aliases=False)
async def unreachable_to_scheduler(run: Run) -> None:
    await survives(run, {"unreachable": f"http://127.0.0.1:{free_port()}/none.png"})


@case("pictures damaged behind a good header do not stop the language server", backends=(TO_SCHEDULER,), aliases=False)
async def damaged_to_scheduler(run: Run) -> None:
    await survives(run, damaged_pictures(run))


@case("the same over aliases", backends=(TO_SCHEDULER,), aliases=True)
async def damaged_over_aliases(run: Run) -> None:
    await survives(run, {"unreachable": f"http://127.0.0.1:{free_port()}/none.png", **damaged_pictures(run)})


async def survives(run: Run, unreadable: dict[str, str]) -> None:
    """Chats with pictures that only the encoder can find out about; good ones beside them stay as they are."""
    slowest = 0.0
    for name, bad in unreadable.items():
        first, second = run.new_pictures(2)
        for pictures in ([bad], [first, bad, second]):
            reply = await run.chat(pictures)
            run.expect(reply.status == 200, f"{name}: {reply.brief}")
            wanted = tokens_of(len(pictures) - 1) + SUBSTITUTE_TOKENS
            run.expect(reply.image_tokens == wanted, f"{name}: {reply.image_tokens} image tokens, {wanted} expected")
            run.stack.language.process.check()
            slowest = max(slowest, reply.seconds)
    await asyncio.gather(*(run.chat([bad, *run.new_pictures()]) for bad in unreadable.values()))
    run.note = f"slowest {slowest:.1f} s"
    await run.language_server_lives()


async def kill_under_traffic(run: Run, victim: Server, *, chats: int, pictures: int) -> None:
    """Send chats, kill ``victim`` after a third of them, and require that every single one succeeds.

    It is stopped for a moment before, so that requests which it has accepted are sure to die with it.
    """
    gate = asyncio.Semaphore(CONCURRENCY)
    done = 0

    async def one() -> ChatReply:
        nonlocal done
        async with gate:
            reply = await run.chat(run.new_pictures(pictures))
        done += 1
        return reply

    tasks = [asyncio.create_task(one()) for _ in range(chats)]
    try:
        await until(lambda: done >= chats // 3, "a third of the traffic is through", 60.0)
        victim.process.pause()
        await asyncio.sleep(0.5)
        victim.process.kill()
        replies = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    run.stack.language.process.check()
    failed = [reply for reply in replies if reply.status != 200]
    slowest = max(reply.seconds for reply in replies)
    run.note = f"{len(replies) - len(failed)} ok, {len(failed)} failed, slowest {slowest:.1f} s"
    run.expect(not failed, f"{len(failed)} of {chats} chats failed, the first: {failed[0].brief if failed else ''}")


def broken_pictures(run: Run) -> dict[str, str]:
    """Inline pictures that no decoder accepts."""
    whole = picture(next(run.seeds), 96)
    return {
        "not a picture": data_uri(b"this is text, whatever the label says"),
        "empty": "data:image/png;base64,",
        "not base64": "data:image/png;base64,@@@@!!!!",
        "header only": data_uri(whole[:40]),
        "cut off": data_uri(whole[: len(whole) // 2]),
    }


def damaged_pictures(run: Run) -> dict[str, str]:
    """Inline pictures whose header is fine while no decoder gets to their last pixel."""
    noise = Image.frombytes("RGB", (96, 96), random.Random(next(run.seeds)).randbytes(96 * 96 * 3))
    sink = io.BytesIO()
    noise.save(sink, "JPEG", quality=90)
    whole_jpeg, whole_png = sink.getvalue(), bytearray(picture(next(run.seeds), 96))
    middle = len(whole_png) // 2
    whole_png[middle : middle + 64] = bytes(64)
    return {
        "JPEG cut off": data_uri(whole_jpeg[: len(whole_jpeg) * 2 // 3], "jpeg"),
        "PNG overwritten": data_uri(bytes(whole_png)),
    }
