"""The embedding-cache plugin inside real encoders, behind the router: a stack of its own, and its cases.

Two encoders: ``with`` has the plugin and publishes, ``plain`` is as it came, for comparing bytes. The package reaches
SGLang's environment as an installed one would: a folder on its path with the package, its dependencies, and the entry
point by which SGLang finds plugins.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickletools
import random
import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

from fullhit.lab.processes import free_port

from .case import Run, case
from .client import data_uri, encode_body, new_part_id, picture, tokens_of
from .environment import Environment, run_step
from .faults import broken_pictures
from .processes import until
from .stack import ENCODER_START, LANGUAGE_START, PLUGIN, TO_SCHEDULER, Server, Stack
from .traffic import fetch

__all__ = ["PluginStack"]

FINGERPRINT = Path(__file__).with_name("fingerprint.py")
PUBLISHER = Path(__file__).parents[2] / "publisher"
ENTRY_POINT = "[sglang.srt.plugins]\nfullhit = fullhit_publisher.sglang:activate\n"
DEPENDENCIES = ("nats-py>=2.9",)  # the others are there: SGLang needs them as well
ROOM = 40
"""Pictures that the cache has room for: the tiny model makes a kilobyte of each."""
FLAGS = ("--multimodal-embedding-cache-capacity-gb", "--multimodal-embedding-cache-publisher", "--event-plane",
         "--embedding-cache-pool", "--embedding-cache-url", "--embedding-cache-skip-preprocessing")  # fmt: skip


_ADDRESS = re.compile(rb"X.\0\0\0\d{9,20}", re.S)
"""What torch calls a tensor's memory when it writes it down: its address, another one in each process."""


def told(header: bytes, part: str) -> list[tuple[str, object]]:
    """What the header of a message says, without what differs from process to process and from request to request."""
    said: list[tuple[str, object]] = []
    for code, argument, _ in pickletools.genops(header):
        if isinstance(argument, bytes):
            argument = _ADDRESS.sub(b"", argument)
        if code.name != "FRAME" and argument != part:
            said.append((code.name, argument))
    return said


def installed(environment: Environment, folder: Path) -> str:
    """The path on which SGLang finds the package, its dependencies and its entry point."""
    dependencies = environment.home / "plugin-dependencies"
    if not (dependencies / "nats").exists():
        command = [str(environment.python), "-m", "pip", "install", "--quiet", "--no-deps"]
        with (folder / "pip.log").open("wb") as sink:
            run_step("the plugin's dependencies", [*command, "--target", str(dependencies), *DEPENDENCIES], sink)
    record = folder / "fullhit-0.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: fullhit\nVersion: 0\n")
    (record / "entry_points.txt").write_text(ENTRY_POINT)
    return ":".join((str(folder), str(PUBLISHER), str(dependencies)))


class PluginStack(Stack):
    """No language server: what matters is what leaves the encoders."""

    async def start(self) -> None:
        label = PLUGIN
        self.path = installed(self.environment, self.processes.folder)
        self.plane_port = free_port()
        self.router, self.admin = self.plan_router(label)
        command = self.router.process.command
        command[command.index("--event-plane") + 1] = f"embedded:{self.plane_port}"
        capacity = (ROOM + 0.5) * (tokens_of(1) * 64 * 4 + 64) / 1024**3
        self.options = ["--multimodal-embedding-cache-capacity-gb", f"{capacity:.12f}"]
        self.options += ["--multimodal-embedding-cache-publisher", "--event-plane", self.plane]
        self.options += ["--encoder-register-urls", self.router.url, "--enable-metrics"]
        self.options += ["--embedding-cache-skip-preprocessing"]
        self.encoders = [self.encoder("plugin-with", self.options), self.encoder("plugin-plain", [])]
        await self.start_router()
        for encoder in self.encoders:
            await self.start_encoder(encoder)

    @property
    def plane(self) -> str:
        return f"nats://127.0.0.1:{self.plane_port}"

    def encoder(self, name: str, options: list[str]) -> Server:
        url = f"http://127.0.0.1:{free_port()}"
        server = Server(url, self.sglang(name, url, ["--encoder-only", *options]))
        if options:
            variables = server.process.variables
            variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{self.path}"
        return server

    async def all_encoders_ready(self, limit: float = 60.0) -> None:
        async def condition() -> bool:
            row = await self.row()
            return row is not None and row["state"] == "ready" and row["publishing"] and not row["doubtful"]

        await until(condition, "the router follows the encoder with the plugin", limit, needs=(self.router.process,))

    async def row(self) -> dict[str, object] | None:
        """What the router lists of the encoder with the plugin."""
        return next((row for row in await self.workers() if row["url"].rstrip("/") == self.encoders[0].url), None)

    async def keys(self) -> object:
        row = await self.row()
        return None if row is None else row["keys"]

    async def repair(self) -> bool:
        dead = [server for server in self.encoders if not server.process.alive]
        for server in dead:
            server.process.kill()
            await self.start_encoder(server)
        return bool(dead)

    async def stop(self) -> None:
        for server in (self.router, *self.encoders):
            if server.process.popen is not None:
                server.process.kill()


async def forwards(run: Run, encoder: Server) -> int:
    """How many times the ViT ran, as SGLang's own metrics say."""
    text = (await run.client.get(encoder.url + "/metrics")).body.decode()
    counts = re.findall(r"^sglang:encoder_model_forward\w*_count\{[^}]*\} ([0-9.]+)$", text, re.M)
    run.expect(counts, "SGLang tells no count of forwards")
    return int(sum(map(float, counts)))


def stack_of(run: Run) -> PluginStack:
    assert isinstance(run.stack, PluginStack)
    return run.stack


@case("SGLang's own parser knows the flags", backends=(PLUGIN,))
async def parser_knows(run: Run) -> None:
    stack = stack_of(run)
    command = [str(stack.environment.python), "-m", "sglang.launch_server", "--help"]
    variables = stack.encoders[0].process.variables
    done = await asyncio.to_thread(subprocess.run, command, env=variables, capture_output=True, text=True, timeout=100)
    missing = [flag for flag in FLAGS if flag not in done.stdout]
    run.expect(not missing, f"--help does not show {missing}: {done.stderr[-300:]}")


@case("not installed, excluded or not asked for: SGLang is as it came", backends=(PLUGIN,), limit=400.0)
async def untouched(run: Run) -> None:
    """Where code was written, which flags there are, which layers the application has: with plugin and without."""
    stack = stack_of(run)
    asked = {"DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB": "1", "FULLHIT_SURVIVE_FAILED_ENCODES": "1"}
    bare = await fingerprint(stack, installed=False)
    gone = await fingerprint(stack, installed=False, **asked)
    excluded = await fingerprint(stack, SGLANG_PLUGINS="another", **asked)
    idle = await fingerprint(stack)
    works = await fingerprint(stack, **asked)
    run.expect(len(bare["code"]) > 300, f"only {len(bare['code'])} functions were found: what is compared here?")
    run.expect(gone == bare, "variables alone, without the package, change SGLang")
    run.expect(excluded == bare, f"excluded by SGLANG_PLUGINS, it is there: {excluded['ours']}")
    changed = [name for name, place in idle["code"].items() if bare["code"].get(name) != place]
    allowed = {"ServerArgs.add_cli_args", "ServerArgs.from_cli_args"}
    run.expect(set(changed) == allowed, f"not asked for, it changes {changed}")
    run.expect(idle["layers"] == bare["layers"], "not asked for, it is in the application")
    added = set(idle["flags"]) - set(bare["flags"])
    run.expect(set(FLAGS) <= added and not set(bare["flags"]) - set(idle["flags"]), f"flags added: {sorted(added)}")
    altered = [name for name, place in works["code"].items() if bare["code"].get(name) != place]
    run.expect(len(altered) > 6 and works["layers"] != bare["layers"], f"asked for, it changes only {altered}")
    run.note = f"{len(bare['code'])} functions compared; asked for, the plugin is in {len(altered)} of them"


async def fingerprint(stack: PluginStack, *, installed: bool = True, **variables: str) -> dict[str, Any]:
    environment = stack.environment.variables()
    if installed:
        environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}:{stack.path}"
    command = [str(stack.environment.python), str(FINGERPRINT), "--model-path", str(stack.environment.model)]
    command += ["--encoder-only", "--device", "cpu", "--load-format", "dummy"]
    done = await asyncio.to_thread(
        subprocess.run, command, env={**environment, **variables}, capture_output=True, text=True, timeout=180
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FINGERPRINT ")]
    if done.returncode or not lines:
        raise AssertionError(f"no fingerprint, exit {done.returncode}: {done.stderr[-600:]}")
    told: dict[str, Any] = json.loads(lines[-1].removeprefix("FINGERPRINT "))
    return told


@case(
    "a language server behind Fullhit: what is held is not encoded again, and says so", backends=(PLUGIN,), limit=400.0
)
async def chats(run: Run) -> None:
    stack = stack_of(run)
    cached = stack.encoders[0]
    url, bootstrap = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    options = ["--language-only", "--encoder-urls", stack.router.url, *language_options(bootstrap)]
    stack.language = Server(url, stack.sglang("plugin-language", url, options))
    try:
        await stack.bring_up(stack.language, "/health", LANGUAGE_START)
        a, b, c = run.new_pictures(3)
        first = await run.chat_succeeds([a, b])
        before, known = await forwards(run, cached), await reports(run)

        async def follows() -> bool:
            row = await stack.row()
            keys = row["keys"] if row is not None else 0
            return isinstance(keys, int) and keys >= 2

        await until(follows, "the router knows both pictures", 20.0)
        again = await run.chat_succeeds([a, b])
        await run.chat_succeeds([b, a])
        run.expect(await forwards(run, cached) == before, "the ViT ran for pictures that are held")
        run.expect(again.text == first.text, f"{first.text!r} without the cache, {again.text!r} with it")
        await run.chat_succeeds([b, c])
        run.expect(await forwards(run, cached) == before + 1, "not one forward for the picture that was new")
        new = {name: number - known.get(name, 0) for name, number in (await reports(run)).items()}
        new = {name: number for name, number in new.items() if number}
        run.expect(new.get(("full_hit", "hit"), 0) >= 2, f"the router did not hear of hits: {new}")
        run.expect(not new.get(("full_hit", "miss")), f"a full hit was a miss: {new}")
        run.note = ", ".join(f"{said} {delivered} x{number:g}" for (said, delivered), number in sorted(new.items()))
    finally:
        stack.language.process.kill()


async def reports(run: Run) -> dict[tuple[str, str], float]:
    """What requests were sent for and what encoders said of them, as the router counts it."""
    text = (await run.client.get(stack_of(run).admin + "/metrics")).body.decode()
    lines = re.findall(r"^fullhit_cache_reports_total\{([^}]*)\} ([0-9.e+]+)$", text, re.M)
    labels = [(dict(re.findall(r'(\w+)="([^"]*)"', inside)), float(number)) for inside, number in lines]
    return {(one["predicted"], one["delivered"]): number for one, number in labels}


def language_options(bootstrap: str) -> list[str]:
    options = ["--encoder-bootstrap-port", bootstrap.rpartition(":")[2], "--context-length", "4096"]
    options += ["--max-total-tokens", "16384", "--max-running-requests", "8"]
    return [*options, "--disable-overlap-schedule", "--skip-server-warmup"]


@case("embeddings with the cache equal those without, byte for byte", backends=(PLUGIN,), limit=240.0)
async def same_bytes_cached(run: Run) -> None:
    """Random mixes of pictures that are held and pictures that are not.

    Of the same pictures a forward gives the same bytes; with others beside it a picture's last bits may differ, on some
    processors, in SGLang itself. So the plain encoder is asked for what is missing alone, as the cache asks SGLang for
    it, and must give the very bytes; for the whole request it must give the same numbers.
    """
    cached, plain = run.stack.encoders
    pictures = run.new_pictures(14)
    rng = random.Random(run.seeds.__next__())
    known: dict[str, bytes] = {}
    compared = mixed = 0
    for _ in range(40):
        wanted = rng.choices(pictures[: 4 + compared // 4096], k=rng.randint(1, 5))
        missing = [one for one in dict.fromkeys(wanted) if one not in known]
        if missing:
            rows = await fetch(run, plain.url, missing)
            size = len(rows) // len(missing)
            known.update({one: rows[size * place :][:size] for place, one in enumerate(missing)})
        mixed += 0 < len(missing) < len(set(wanted))
        got = await fetch(run, cached.url, wanted)
        run.expect(got == b"".join(known[one] for one in wanted), f"the bytes of {len(wanted)} pictures differ")
        run.expect(close(got, await fetch(run, plain.url, wanted)), "the numbers differ from a plain encoder's")
        compared += len(got)
    run.expect(mixed > 3, f"only {mixed} requests had pictures of both kinds")
    run.note = f"{compared} bytes, {mixed} of 40 requests were partly held"


def close(ours: bytes, theirs: bytes) -> bool:
    """Whether two tensors of float32 are the same but for what a forward of another batch size may do to them."""
    one, other = array("f", ours), array("f", theirs)
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in zip(one, other, strict=True)
    )


@case("what goes with an embedding is the same without fetching the picture", backends=(PLUGIN,))
async def same_message(run: Run) -> None:
    cached, plain = run.stack.encoders
    pictures = run.new_pictures(2)
    large = data_uri(picture(next(run.seeds), 1200))
    seconds: dict[str, list[float]] = {"plain": [], "held": []}
    for _ in range(3):
        for wanted in (pictures, pictures[::-1], [large]):
            messages = []
            for name, encoder in (("plain", plain), ("held", cached)):
                receiver, part = run.receiver(), new_part_id()
                run.requests += 1
                reply = await run.client.post(f"{encoder.url}/encode", encode_body(part, wanted, port=receiver.port))
                run.expect(reply.status == 200, f"{name}: {reply.status} {reply.body[:200]!r}")
                frames = await asyncio.wait_for(receiver.socket.recv_multipart(), 30.0)
                messages.append((told(frames[0], part), frames[1]))
                if wanted == [large]:
                    seconds[name].append(reply.seconds)
            same = messages[0][0] == messages[1][0] and close(messages[0][1], messages[1][1])
            run.expect(same, "the messages to the language server differ")
    fast, slow = min(seconds["held"]), min(seconds["plain"])
    run.note = f"a picture of 1200 x 1200: {1e3 * slow:.0f} ms as ever, {1e3 * fast:.0f} ms when held"


@case("pictures held are not encoded again, missing ones alone are", backends=(PLUGIN,))
async def saves_forwards(run: Run) -> None:
    cached = run.stack.encoders[0]
    a, b = run.new_pictures(2)
    await fetch(run, cached.url, [a])
    before = await forwards(run, cached)
    for _ in range(4):
        await fetch(run, cached.url, [a])
    run.expect(await forwards(run, cached) == before, "the ViT ran for a picture that is held")
    await fetch(run, cached.url, [a, b])
    run.expect(await forwards(run, cached) == before + 1, "the ViT did not run once for the missing picture")
    text = (await run.client.get(cached.url + "/metrics")).body.decode()
    told = dict(re.findall(r'^fullhit_encoder_items_total\{result="(\w+)"\} ([0-9.]+)$', text, re.M))
    run.expect(float(told.get("hit", 0)) >= 5 and float(told.get("miss", 0)) >= 2, f"metrics tell {told}")
    entries = re.findall(r"^fullhit_encoder_cache_entries ([0-9.]+)$", text, re.M)
    run.expect(entries and float(entries[0]) > 0, "metrics tell no entries")


@case("the router knows by events what is held, and what was evicted", backends=(PLUGIN,))
async def router_knows(run: Run) -> None:
    stack = stack_of(run)
    pictures = run.new_pictures(ROOM + 5)
    for one in pictures:
        await fetch(run, stack.encoders[0].url, [one])  # past the router: it can only know by events

    async def settled() -> bool:
        return await stack.keys() == ROOM

    await until(settled, f"the router counts {ROOM} keys", 20.0)
    for one, wanted in ((pictures[-1], "full_hit"), (pictures[0], "miss")):
        run.requests += 1
        body = encode_body(new_part_id(), [one], port=run.receiver().port)
        async with run.client.session.post(f"{run.router}/encode", json=body) as reply:
            reason, said = (reply.headers.get(name) for name in ("x-fullhit-reason", "x-fullhit-cache"))
            run.expect(reply.status == 200 and reason == wanted, f"{reply.status} {reason}, {wanted} expected")
            run.expect(said == ("hit" if wanted == "full_hit" else "miss"), f"{wanted}, and the encoder says {said}")


@case("an encoder that is killed comes back empty, and is learnt anew", backends=(PLUGIN,))
async def restarted(run: Run) -> None:
    stack = stack_of(run)
    shown = run.new_pictures()
    await fetch(run, stack.encoders[0].url, shown)
    stack.encoders[0].process.kill()
    await stack.repair()
    await stack.all_encoders_ready()

    async def counts(keys: int) -> bool:
        return await stack.keys() == keys

    await until(lambda: counts(0), "the router has forgotten the former life", 30.0)
    await fetch(run, stack.encoders[0].url, shown)
    await until(lambda: counts(1), "the router has learnt the first picture", 20.0)


@case(
    "--dp-size 2: the router knows what both processes hold, and may promise no more", backends=(PLUGIN,), limit=240.0
)
async def two_processes(run: Run) -> None:
    """SGLang sends requests in turns while nothing waits; the router hears of a picture when both have it."""
    stack = stack_of(run)
    double = stack.encoder("plugin-dp", [*stack.options, "--dp-size", "2"])
    await stack.bring_up(double, "/health", 2 * ENCODER_START)

    async def row() -> dict[str, Any]:
        return next((row for row in await stack.workers() if row["url"].rstrip("/") == double.url), {})

    async def counts(keys: int) -> bool:
        told = await row()
        return bool(told.get("publishing")) and not told["doubtful"] and told["keys"] == keys

    try:
        await until(lambda: counts(0), "the router follows the encoder with two processes", 60.0)
        a, b = run.new_pictures(2)
        for one in (a, b):
            expected = await fetch(run, stack.encoders[1].url, [one])
            run.expect(await fetch(run, double.url, [one]) == expected, "the bytes differ")
        run.expect((await row())["keys"] == 0, "what one process alone holds was published")
        for one in (b, a):  # the other way round: each process gets the picture that it has not
            await fetch(run, double.url, [one])
        await until(lambda: counts(2), "the router knows what both hold", 20.0)
        for one in run.new_pictures(2 * ROOM):
            await fetch(run, double.url, [one])
        await until(lambda: counts(0), "what a process has evicted is taken back", 20.0)
        log = double.process.log.read_text(errors="replace")
        run.expect(log.count("embedding cache of") == 2, "not every process has a cache")
    finally:
        double.process.kill()


@case("a language server with the guard outlives failed encodes", backends=(PLUGIN,), limit=400.0)
async def guarded(run: Run) -> None:
    """No router in between: the encoder's refusals, and its absence, reach the language server."""
    stack = stack_of(run)
    stack.backend = TO_SCHEDULER  # the one under which release 0.5.23 ends
    try:
        encoder = stack.encoder("guard-encoder", [])
        url, bootstrap = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        options = ["--language-only", "--encoder-urls", encoder.url, "--survive-failed-encodes"]
        options += language_options(bootstrap)
        stack.language = Server(url, stack.sglang("guard-language", url, options))
    finally:
        stack.backend = PLUGIN
    variables = stack.language.process.variables
    variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{stack.path}"
    try:
        await stack.bring_up(encoder, "/health", ENCODER_START)
        await stack.bring_up(stack.language, "/health", LANGUAGE_START)
        await run.chat_succeeds(run.new_pictures())
        statuses = []
        for name, bad in broken_pictures(run).items():
            reply = await run.chat([bad])
            statuses.append(reply.status)
            run.expect(400 <= reply.status < 600, f"{name}: {reply.brief}")
            stack.language.process.check()
        await run.chat_succeeds(run.new_pictures())
        encoder.process.kill()
        reply = await run.chat(run.new_pictures())
        statuses.append(reply.status)
        run.expect(400 <= reply.status < 600, f"no encoder: {reply.brief}")
        stack.language.process.check()
        await stack.bring_up(encoder, "/health", ENCODER_START)
        await run.language_server_lives()
        run.note = f"clients got {', '.join(map(str, sorted(set(statuses))))}"
    finally:
        stack.language.process.kill()
        encoder.process.kill()


@case("fullhit demo --encoder sglang", backends=(PLUGIN,), limit=400.0)
async def demo(run: Run) -> None:
    stack = stack_of(run)
    environment = stack.environment
    variables = environment.variables()
    variables["PYTHONPATH"] += f":{stack.path}"
    command = [sys.executable, "-m", "fullhit", "demo", "--encoder", "sglang", "--users", "3", "--turns", "3"]
    command += ["--size", "96x64", "--model-path", str(environment.model), "--sglang-python", str(environment.python)]
    command += ["--sglang-device", "cpu"]
    command += [f"--sglang-arg={argument}" for argument in ("--load-format", "dummy", "--dtype", "float32")]
    for name in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        command += ["--sglang-env", f"{name}={variables[name]}"]
    own = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    done = await asyncio.to_thread(subprocess.run, command, env=own, capture_output=True, text=True, timeout=390)
    run.expect(done.returncode == 0, f"exit {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    run.expect("with real SGLang encoders" in done.stdout, "the table does not say what the encoders were")
    found = re.search(r"ViT runs +(\d+) +(\d+)", done.stdout)
    assert found is not None
    run.requests += 18
    run.note = f"ViT runs: random split {found[1]}, Fullhit {found[2]}, for 21 pictures"
