"""`fullhit.v1.Router`: each call hands its question to the decision service or to a line, and maps the answer.

How calls end. A unary call does all its work between two awaits, so a client's cancellation or deadline finds it
either before it took a slot, and then it takes none, or when its answer is on its way. Nobody on this side can tell
whether that answer still finds a reader; so a caller that gives up releases its request id (`fullhit.client` does), and
if it cannot, the lease ends. Streams end in `finally`, whatever ended them: the client, the deadline, a lost
connection, or the router's own shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from fullhit.decision import DecisionError, DecisionService, WorkerWatch
from fullhit.rpc.messages import change_message, explain_reply, line_worker, select_call, select_reply, worker_message
from fullhit.rpc.plane import Line, LineClosed, LinePlane
from fullhit.rpc.settings import RpcSettings
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit_publisher.identity import worker_id_for

__all__ = ["CODE_METADATA", "SERVICE", "RouterServicer"]

SERVICE = pb.DESCRIPTOR.services_by_name["Router"].full_name

CODE_METADATA = "fullhit-code"
"""Trailing metadata of a refusal: its code, as the JSON door has it in ``error.code``."""

_STATUS = {
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "unknown_pool": grpc.StatusCode.NOT_FOUND,
    "unknown_decision": grpc.StatusCode.NOT_FOUND,
    "too_many_leases": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "empty_pool": grpc.StatusCode.FAILED_PRECONDITION,
    "all_busy": grpc.StatusCode.UNAVAILABLE,
    "all_down": grpc.StatusCode.UNAVAILABLE,
    "all_excluded": grpc.StatusCode.UNAVAILABLE,
    "replaced": grpc.StatusCode.ABORTED,
    "removed": grpc.StatusCode.NOT_FOUND,
    "leaving": grpc.StatusCode.UNAVAILABLE,
    "too_many_watchers": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_GONE = grpc.aio.InternalError
"""What a write to a client that has just died ends in; others end in a cancellation."""

Context = Any
"""`grpc.aio.ServicerContext`; the library ships no types."""


class RouterServicer:
    """See the module text. Lives in the router's loop; `add_to` gives it to a server."""

    def __init__(self, service: DecisionService, plane: LinePlane, settings: RpcSettings) -> None:
        self._service = service
        self._plane = plane
        self._settings = settings
        self._leaving = asyncio.Event()
        self._stir = asyncio.Event()
        self.watchers = 0
        """Open WatchWorkers streams."""
        self._sessions: set[asyncio.Task[Any]] = set()
        for hooks in (service.fleet.on_added, service.fleet.on_removed):
            hooks.append(self._stirred)

    def add_to(self, server: Any) -> None:
        """Add the service to a `grpc.aio.Server`.

        Messages are read here and not by the library, which would answer garbage with UNKNOWN and write a traceback
        for each.
        """
        unary, write = grpc.unary_unary_rpc_method_handler, {"response_serializer": _serialize}
        handlers = {
            "Select": unary(_reading(pb.SelectRequest, self.Select), **write),
            "Release": unary(_reading(pb.ReleaseRequest, self.Release), **write),
            "Explain": unary(_reading(pb.ExplainRequest, self.Explain), **write),
            "ListWorkers": unary(_reading(pb.ListWorkersRequest, self.ListWorkers), **write),
            "WatchWorkers": grpc.unary_stream_rpc_method_handler(
                _reading(pb.WatchWorkersRequest, self.WatchWorkers), **write
            ),
            "Session": grpc.stream_stream_rpc_method_handler(self.Session, **write),
            "RegisterWorker": grpc.stream_stream_rpc_method_handler(self.RegisterWorker, **write),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        if hasattr(server, "add_registered_method_handlers"):
            server.add_registered_method_handlers(SERVICE, handlers)  # found without a search through all handlers

    def leave(self) -> None:
        """End all streams with UNAVAILABLE; the server is about to stop."""
        for hooks in (self._service.fleet.on_added, self._service.fleet.on_removed):
            if self._stirred in hooks:
                hooks.remove(self._stirred)
        self._leaving.set()
        self._stir.set()
        for task in self._sessions:
            task.cancel()

    @property
    def sessions(self) -> int:
        """Open Session streams."""
        return len(self._sessions)

    # -- unary calls

    async def Select(self, request: pb.SelectRequest, context: Context) -> pb.SelectReply:
        left = context.time_remaining()
        if left is not None and left <= 0:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline had passed before the choice")
        try:
            return self._select(request)
        except DecisionError as error:
            return await _refuse(context, error.code, str(error))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        try:
            return self._release(request)
        except DecisionError as error:
            return await _refuse(context, error.code, str(error))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        try:
            record = self._service.explain(request.decision_id, request_id=request.request_id, pool=request.pool)
        except DecisionError as error:
            await _refuse(context, error.code, str(error))
        return explain_reply(record)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersReply:
        try:
            rows = self._service.workers(request.pool)
        except DecisionError as error:
            await _refuse(context, error.code, str(error))
        return pb.ListWorkersReply(workers=map(worker_message, rows))

    def _select(self, request: pb.SelectRequest, holder: set[str] | None = None) -> pb.SelectReply:
        call = select_call(request, self._service.settings.max_items)
        return select_reply(self._service.select(call, holder), request.candidates)

    def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        lease = self._service.release(request.lease_id, request_id=request.request_id, pool=request.pool).lease
        if lease is None:
            return pb.ReleaseReply(released=False)
        return pb.ReleaseReply(released=True, worker=lease.decision.worker.id, decision_id=lease.decision.id)

    # -- streams

    async def Session(self, _: AsyncIterator[bytes], context: Context) -> None:
        task, held = asyncio.current_task(), set[str]()
        assert task is not None
        self._sessions.add(task)
        try:
            if self._leaving.is_set():
                raise DecisionError("leaving", "the router is leaving")
            while (data := await context.read()) is not grpc.aio.EOF:
                await context.write(self._answer(data, held))
        except DecisionError as error:
            await _refuse(context, error.code, str(error))
        except asyncio.CancelledError:
            if not self._leaving.is_set():
                raise
            await _refuse(context, "leaving", "the router is leaving")
        except _GONE:
            pass
        finally:
            self._sessions.discard(task)
            self._service.leases.release_held(held)

    def _answer(self, data: bytes, held: set[str]) -> pb.SessionReply:
        """One turn of a session. Raises `DecisionError` for bytes that are no question."""
        try:
            request = pb.SessionRequest.FromString(data)
        except DecodeError:
            raise DecisionError("invalid_request", "the message is no SessionRequest") from None
        kind = request.WhichOneof("ask")
        try:
            if kind == "select":
                return pb.SessionReply(call=request.call, selected=self._select(request.select, held))
            if kind == "release":
                return pb.SessionReply(call=request.call, released=self._release(request.release))
            raise DecisionError("invalid_request", "ask for select or release")
        except DecisionError as error:
            refusal = pb.Refusal(code=error.code, message=str(error), retryable=error.retryable)
            return pb.SessionReply(call=request.call, refusal=refusal)

    async def WatchWorkers(self, request: pb.WatchWorkersRequest, context: Context) -> None:
        if self.watchers >= self._settings.max_watchers:
            await _refuse(context, "too_many_watchers", f"{self.watchers} streams watch already")
        try:
            watch: WorkerWatch = self._service.watch(request.pool)
        except DecisionError as error:
            await _refuse(context, error.code, str(error))
        self.watchers += 1
        try:
            await context.write(change_message(watch.news(), initial=True))
            while not self._leaving.is_set():
                try:
                    async with asyncio.timeout(self._settings.watch_interval):
                        await self._stir.wait()
                except TimeoutError:
                    pass
                news = watch.news()
                if news.changed or news.gone:
                    await context.write(change_message(news))
            await _refuse(context, "leaving", "the router is leaving")
        except _GONE:
            pass
        finally:
            self.watchers -= 1

    async def RegisterWorker(self, said: AsyncIterator[bytes], context: Context) -> None:
        messages = _messages(said)
        line = await self._open(messages, context)
        listening = asyncio.create_task(_listen(line, messages), name=f"fullhit-line {line.worker}")
        asking: asyncio.Task[int] | None = None
        try:
            welcome = pb.Welcome(worker_id=worker_id_for(line.worker), pool=line.pool)
            await context.write(pb.RouterMessage(welcome=welcome))
            while True:
                asking = asking or asyncio.create_task(line.request())
                await asyncio.wait({asking, listening}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done():
                    listening.result()  # the peer has said all, or something it should not
                    return
                request_id, asking = await asking, None
                await context.write(pb.RouterMessage(snapshot_request=pb.SnapshotRequest(request_id=request_id)))
        except LineClosed as closed:
            await _refuse(context, closed.code, str(closed))
        except DecisionError as error:
            await _refuse(context, error.code, str(error))
        except _GONE:
            pass
        finally:
            line.close()
            for task in (listening, asking):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*filter(None, (listening, asking)), return_exceptions=True)

    async def _open(self, messages: AsyncIterator[pb.WorkerMessage], context: Context) -> Line:
        try:
            first = await anext(messages, None)
            if first is None or first.WhichOneof("message") != "hello":
                raise DecisionError("invalid_request", "the first message must be a hello")
            if self._leaving.is_set():
                raise DecisionError("leaving", "the router is leaving")
            return self._plane.open(line_worker(first.hello))
        except DecisionError as error:
            return await _refuse(context, error.code, str(error))
        except ValueError as error:
            return await _refuse(context, "invalid_request", f"hello: {error}")

    def _stirred(self, pool: str, worker: str) -> None:
        """Somebody came or went: watchers look at once, all in the same turn of the loop."""
        self._service.feed.touch()
        self._stir.set()
        asyncio.get_running_loop().call_soon(self._stir.clear)


_Read = TypeVar("_Read")
_Said = TypeVar("_Said")


def _reading(
    kind: Callable[[], _Read], method: Callable[[_Read, Context], Awaitable[_Said]]
) -> Callable[[bytes, Context], Awaitable[_Said]]:
    """The method, for a request still in bytes."""
    read: Callable[[bytes], _Read] = kind.FromString  # type: ignore[attr-defined]  # every message class has it

    async def call(data: bytes, context: Context) -> _Said:
        try:
            request = read(data)
        except DecodeError:
            await _refuse(context, "invalid_request", f"the request is no {kind.__name__}")
        return await method(request, context)

    return call


async def _messages(said: AsyncIterator[bytes]) -> AsyncIterator[pb.WorkerMessage]:
    async for data in said:
        try:
            message = pb.WorkerMessage.FromString(data)
        except DecodeError:
            raise DecisionError("invalid_request", "the message is no WorkerMessage") from None
        yield message


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


async def _listen(line: Line, messages: AsyncIterator[pb.WorkerMessage]) -> None:
    """Hand in what the encoder says until it has said all. Raises `DecisionError` for what it must not say."""
    async for message in messages:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            beat = message.heartbeat
            line.heartbeat(**{field.name: getattr(beat, field.name) for field in beat.DESCRIPTOR.fields})
        elif kind == "delta":
            delta = message.delta
            line.delta(list(delta.added_keys), list(delta.removed_keys), delta.epoch, delta.seq, delta.resync)
        elif kind == "snapshot":
            part = message.snapshot
            line.snapshot(
                list(part.keys), request_id=part.request_id, epoch=part.epoch, seq=part.seq, part=part.part,
                parts=part.parts,
            )  # fmt: skip
        elif kind == "hello":
            raise DecisionError("invalid_request", "a second hello; open another stream for another worker")
        await line.breathe()


async def _refuse(context: Context, code: str, message: str) -> NoReturn:
    """End the call with the status that belongs to the code."""
    await context.abort(_STATUS[code], message, ((CODE_METADATA, code),))
    raise AssertionError("abort returned")
