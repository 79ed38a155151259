"""A real Dynamo publisher, told what to publish. Runs under the release's own interpreter; imports nothing of ours.

Reads one JSON array a line from its input and answers each with one JSON object a line:

``["publish", added, removed]``          one delta
``["walk", seed, deltas, capacity]``     a random life of a cache of that capacity: one new key a delta, what it evicts
                                         removed with it, as the encode worker does it
``["burst", deltas]``                    as many deltas as it takes without a pause, one key each; some may be refused
"""

import asyncio
import hashlib
import json
import os
import random
import sys

from dynamo.llm import MultimodalEmbeddingCachePublisher
from dynamo.runtime import DistributedRuntime


async def main(endpoint_name):
    runtime = DistributedRuntime(asyncio.get_running_loop(), os.environ["DISCOVERY"], "tcp")
    endpoint = runtime.endpoint(endpoint_name)
    publisher = MultimodalEmbeddingCachePublisher()
    await publisher.create_endpoint(endpoint)

    async def handler(request, context=None):
        yield {}

    serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
    held = {}

    async def publish(added, removed):
        for key in removed:
            held.pop(key, None)
        held.update(dict.fromkeys(added))
        while True:
            try:
                publisher.publish_delta(list(added), list(removed))
                return
            except Exception:
                await asyncio.sleep(0.01)  # its queue is full

    async def walk(seed, deltas, capacity):
        rng = random.Random(seed)
        for turn in range(deltas):
            key = None
            while key is None or key in held:
                key = hashlib.sha256(b"%d/%d" % (seed, rng.randrange(3 * capacity))).hexdigest()
            evicted = list(held)[: rng.choice((1, 1, 2))] if len(held) >= capacity else []
            await publish([key], evicted)
            await asyncio.sleep(0 if turn % 16 else 0.001)

    def burst(deltas):
        refused = 0
        for turn in range(deltas):
            key = hashlib.sha256(b"burst/%d" % turn).hexdigest()
            held[key] = None
            try:
                publisher.publish_delta([key], [])
            except Exception:
                refused += 1
        return refused

    say({"id": str(endpoint.connection_id())})
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            break
        command, *arguments = json.loads(line)
        if command == "publish":
            await publish(*arguments)
            say({"held": len(held)})
        elif command == "walk":
            await walk(*arguments)
            say({"held": list(held)})
        elif command == "burst":
            say({"refused": burst(*arguments), "held": list(held)})
    serving.cancel()
    runtime.shutdown()
    await asyncio.sleep(0.2)


def say(answer):
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
