"""The gRPC listener, asked with grpcio. Import this module only where the extra ``fullhit[grpc]`` is installed.

Calls are made one at a time and never retried by the library: the client above decides what may be repeated.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from fullhit.client.errors import ClientError, Refused, Unreachable, error_for
from fullhit.client.types import Candidate, ClientOptions, Explanation, Question, Selection, WorkerInfo
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit.rpc.v1 import router_pb2_grpc

__all__ = ["AsyncGrpcDoor", "GrpcDoor"]

_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_CODE = "fullhit-code"


class GrpcDoor:
    """Synchronous; usable from several threads."""

    def __init__(self, url: str, key: str, options: ClientOptions) -> None:
        target, credentials = _target(url, options)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(key)

    def select(self, question: Question, timeout: float) -> Selection:
        return _selection(self._call(self._stub.Select, _request(question), timeout))

    def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool:
        request = pb.ReleaseRequest(lease_id=lease_id, request_id=request_id, pool=pool)
        return bool(self._call(self._stub.Release, request, timeout).released)

    def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation:
        request = pb.ExplainRequest(decision_id=decision_id, request_id=request_id, pool=pool)
        return _explanation(self._call(self._stub.Explain, request, timeout))

    def workers(self, pool: str, timeout: float) -> list[WorkerInfo]:
        return _workers(self._call(self._stub.ListWorkers, pb.ListWorkersRequest(pool=pool), timeout))

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _failure(error) from None


class AsyncGrpcDoor:
    """Asynchronous, for one event loop."""

    def __init__(self, url: str, key: str, options: ClientOptions) -> None:
        target, credentials = _target(url, options)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(key)
        self._in_session = options.session
        self._session: _Session | None = None

    async def select(self, question: Question, timeout: float) -> Selection:
        if self._in_session:
            return _selection((await self._ask(timeout, select=_request(question))).selected)
        return _selection(await self._call(self._stub.Select, _request(question), timeout))

    async def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool:
        request = pb.ReleaseRequest(lease_id=lease_id, request_id=request_id, pool=pool)
        if self._in_session:
            return bool((await self._ask(timeout, release=request)).released.released)
        return bool((await self._call(self._stub.Release, request, timeout)).released)

    async def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation:
        request = pb.ExplainRequest(decision_id=decision_id, request_id=request_id, pool=pool)
        return _explanation(await self._call(self._stub.Explain, request, timeout))

    async def workers(self, pool: str, timeout: float) -> list[WorkerInfo]:
        return _workers(await self._call(self._stub.ListWorkers, pb.ListWorkersRequest(pool=pool), timeout))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._channel.close()

    async def _ask(self, timeout: float, **question: Any) -> pb.SessionReply:
        session = self._session
        if session is None or session.error is not None:
            if session is not None:
                await session.close()
            session = self._session = _Session(self._stub.Session(metadata=self._metadata))
        try:
            async with asyncio.timeout(timeout):
                reply = await session.ask(pb.SessionRequest(**question))
        except TimeoutError:
            raise Unreachable(f"no answer within {timeout:.3g} s") from None
        if reply.WhichOneof("answer") == "refusal":
            raise error_for(reply.refusal.code, reply.refusal.message)
        return reply

    async def _call(self, method: Any, request: Any, timeout: float) -> Any:
        call = method(request, timeout=timeout, metadata=self._metadata)
        try:
            return await call
        except grpc.RpcError as error:
            raise _failure(error) from None
        except asyncio.CancelledError:
            if call.cancelled() and not _cancelling():
                raise Unreachable("the channel was closed") from None
            raise
        finally:
            call.cancel()  # a call that is left alone is never collected (grpc/grpc#43462)


class _Session:
    """One stream of questions. Answers come in the order of the questions; when it fails, all that wait fail."""

    def __init__(self, call: Any) -> None:
        self.error: ClientError | None = None
        self._call = call
        self._waiting: deque[asyncio.Future[pb.SessionReply]] = deque()
        self._turn = asyncio.Lock()  # one write at a time, and the answers' order is the writes'
        self._reader = asyncio.create_task(self._read(), name="fullhit-client-session")

    async def ask(self, request: pb.SessionRequest) -> pb.SessionReply:
        """Raises `ClientError` when the stream ends first."""
        answer: asyncio.Future[pb.SessionReply] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if self.error is not None:
                raise self.error
            self._waiting.append(answer)
            writing = asyncio.ensure_future(self._call.write(request))
            try:
                # A write never wakes up when its call ends meanwhile; then the reader ends the wait for the answer.
                await asyncio.wait({writing, answer}, return_when=asyncio.FIRST_COMPLETED)
                if self.error is None and not writing.done():
                    await asyncio.wait({writing})
            except asyncio.CancelledError:
                # Whether it went out is unknown, and so is whose the next answer is.
                self._fail(Unreachable("the session was given up"))
                answer.cancel()
                raise
            finally:
                writing.cancel()
                writing.add_done_callback(_looked_at)
        return await answer

    async def close(self) -> None:
        self._fail(Unreachable("the client was closed"))
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(reply)
            self._fail(Unreachable("the router has ended the session"))
        except grpc.RpcError as error:
            self._fail(_failure(error))
        except asyncio.CancelledError:
            self._fail(Unreachable("the session was cancelled"))
            raise
        except IndexError:
            self._fail(Unreachable("an answer that nobody asked for"))

    def _fail(self, error: ClientError) -> None:
        self.error = self.error or error
        self._call.cancel()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(self.error)
                answer.exception()  # an asker that has left does not fetch it
        self._waiting.clear()


def _looked_at(writing: asyncio.Future[None]) -> None:
    """Why a write failed is for the reader to tell."""
    if not writing.cancelled():
        writing.exception()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _target(url: str, options: ClientOptions) -> tuple[str, Any]:
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        return parts.netloc, None
    read = {name: Path(path).read_bytes() if path else None for name, path in (
        ("ca", options.ca), ("certificate", options.certificate), ("private_key", options.private_key))}  # fmt: skip
    return parts.netloc, grpc.ssl_channel_credentials(read["ca"], read["private_key"], read["certificate"])


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


def _failure(error: Any) -> ClientError:
    code = dict(error.trailing_metadata() or ()).get(_CODE)
    text = error.details() or str(error.code())
    if code is not None:
        return error_for(str(code), text)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Refused("unauthorized", text)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return Unreachable(f"no router answers: {text}")
    return Refused(error.code().name.lower(), text)


def _request(question: Question) -> pb.SelectRequest:
    request = pb.SelectRequest(
        pool=question.pool,
        keys=question.keys,
        modality=question.modality,
        session=question.session,
        exclude=question.exclude,
        request_id=question.request_id,
        lease_seconds=question.lease_seconds,
        dry_run=question.dry_run,
        candidates=question.candidates,
    )
    if question.items:
        request.items.extend(map(_item, question.items))
    if question.sglang_encode is not None and question.openai_chat is not None:
        raise ValueError("one body over gRPC: sglang_encode or openai_chat")
    if question.sglang_encode is not None:
        request.sglang_encode = question.sglang_encode
    if question.openai_chat is not None:
        request.openai_chat = question.openai_chat
    return request


def _item(item: Any) -> pb.MediaItem:
    if isinstance(item, str):
        return pb.MediaItem(url=item)
    options = dict(item)
    named = {
        name: options.pop(name)
        for name in ("url", "content_hash", "uuid")
        if isinstance(options.get(name), str)
    }  # fmt: skip
    return pb.MediaItem(**named, options_json=json.dumps(options) if options else "")


def _reason(number: int) -> str:
    return str(pb.Reason.Name(number)).removeprefix("REASON_").lower()


def _selection(told: pb.SelectReply) -> Selection:
    return Selection(
        worker=told.worker.id,
        url=told.worker.url,
        worker_id=told.worker.worker_id,
        device=told.worker.device,
        pool=told.pool,
        reason=_reason(told.reason),
        decision_id=told.decision_id,
        request_id=told.request_id,
        lease_id=told.lease_id,
        lease_seconds=told.lease_seconds,
        repeated_call=told.repeated_call,
        candidates=tuple(map(_candidate, told.candidates)),
    )


def _candidate(row: pb.Candidate) -> Candidate:
    return Candidate(
        id=row.id,
        device_class=row.device_class,
        inflight=row.inflight if row.HasField("inflight") else None,
        keys_held=row.keys_held,
        doubtful=row.doubtful,
        predicted=row.predicted,
        chosen=row.chosen,
    )


def _explanation(told: pb.ExplainReply) -> Explanation:
    return Explanation(
        decision_id=told.decision_id,
        pool=told.pool,
        request_id=told.request_id,
        worker=told.worker,
        reason=_reason(told.reason),
        why=told.why,
        candidates=tuple(map(_candidate, told.candidates)),
        record=json.loads(told.record_json),
    )


def _workers(told: pb.ListWorkersReply) -> list[WorkerInfo]:
    return [
        WorkerInfo(
            id=row.id,
            url=row.url,
            worker_id=row.worker_id,
            pool=row.pool,
            device=row.device,
            state=row.state,
            draining=row.draining,
            doubtful=row.doubtful,
            publishing=row.publishing,
            keys=row.keys,
            inflight_requests=row.inflight_requests,
            encoding_requests=row.encoding_requests,
        )
        for row in told.workers
    ]
