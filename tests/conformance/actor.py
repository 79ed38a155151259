"""A process of a small Dynamo deployment, under Dynamo's own runtime: a frontend, an encode worker, or its peer.

``actor.py frontend PORT MODE MIGRATION``   the HTTP frontend of the wheel; MODE as ``RouterMode`` names it
``actor.py worker ENDPOINT MODEL ROLE``     ROLE ``encode`` takes requests, ``peer`` is what a frontend wants beside it

A worker answers what it is asked after the test's wishes, told by ``max_tokens``: 1 at once; 2 when it is told
``["release"]``; 7 a first token at once and the rest then. It prints one JSON object a line: ``{"id": ...}`` when it is
up, ``{"got": ...}`` for each request, ``{"done": ...}`` for each command, which it reads as one JSON array a line:

``["publish", added, removed]``   a change of its cache, through Dynamo's publisher, or ours once it speaks
``["speak", keys, plane, publisher]``   from now on through our publisher, which holds these keys
``["leave"]``, ``["join"]``       its record in discovery goes and comes back
``["release"]``                   all requests that are held are finished
``["finish", n]``                 the n-th request it got is
"""

import asyncio
import json
import os
import sys


async def frontend(port, mode, migration):
    from dynamo.llm import EngineType, EntrypointArgs, RouterConfig, RouterMode, make_engine, run_input
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    settings = EntrypointArgs(
        EngineType.Dynamic,
        http_host="127.0.0.1",
        http_port=int(port),
        router_config=RouterConfig(getattr(RouterMode, mode)),
        migration_limit=int(migration),
    )
    await run_input(runtime, "http", await make_engine(runtime, settings))


class Worker:
    def __init__(self, path, model, role):
        from dynamo.runtime import DistributedRuntime

        self.path = path
        self.model = model
        self.encodes = role == "encode"
        self.runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
        self.endpoint = self.runtime.endpoint(path)
        self.publisher = None
        self.gates = []

    async def run(self):
        from dynamo.llm import ModelInput, ModelType, WorkerType, register_model

        if self.encodes:
            from dynamo.llm import MultimodalEmbeddingCachePublisher

            self.publisher = MultimodalEmbeddingCachePublisher()
            await self.publisher.create_endpoint(self.endpoint)
        serving = asyncio.ensure_future(self.endpoint.serve_endpoint(self.answer))
        what = {"kv_cache_block_size": 16}
        if self.encodes:
            what["worker_type"] = WorkerType.Encode
            what["needs"] = [[WorkerType.Prefill, WorkerType.Decode], [WorkerType.Aggregated]]
        else:
            what["worker_type"] = WorkerType.Aggregated
        kind = ModelType.Chat if self.encodes else ModelType.Empty
        await register_model(ModelInput.Tokens, kind, self.endpoint, self.model, "toy", **what)
        say({"id": str(self.endpoint.connection_id())})
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command, *arguments = json.loads(line)
            await getattr(self, command)(*arguments)
            say({"done": command})
        serving.cancel()
        os._exit(0)  # the runtime's own threads would take their time

    async def answer(self, request, context=None):
        say({"got": request.get("multi_modal_data"), "session": request.get("image_cache_scope")})
        gate, wish = asyncio.Event(), request["stop_conditions"]["max_tokens"]
        self.gates.append(gate)
        if wish == 7:
            yield {"token_ids": [8]}
        if wish != 1:
            await gate.wait()
        yield {"token_ids": [8], "finish_reason": "stop"}

    async def publish(self, added, removed):
        self.publisher.publish_delta(added, removed)

    async def release(self):
        for gate in self.gates:
            gate.set()

    async def finish(self, number):
        self.gates[number].set()

    async def leave(self):
        await self.endpoint.unregister_endpoint_instance()

    async def join(self):
        await self.endpoint.register_endpoint_instance()

    async def speak(self, keys, plane, folder):
        sys.path.append(folder)
        from fullhit_publisher import DynamoTarget, EmbeddingCachePublisher

        target = DynamoTarget.for_endpoint(self.path, self.endpoint.connection_id())
        self.publisher = EmbeddingCachePublisher(dynamo=target, pool="vision", event_plane=plane)
        self.publisher.publish_delta(keys, [])
        self.publisher.start()


def say(line):
    print(json.dumps(line), flush=True)


async def main():
    role, *arguments = sys.argv[1:]
    if role == "frontend":
        await frontend(*arguments)
    else:
        await Worker(*arguments).run()


if __name__ == "__main__":
    asyncio.run(main())
