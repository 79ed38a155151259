"""The admin listener's JSON, asked with urllib or aiohttp."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from fullhit.client.errors import ClientError, Refused, Unreachable, error_for
from fullhit.client.types import Candidate, ClientOptions, Explanation, Question, Selection, WorkerInfo

__all__ = ["AsyncHttpDoor", "HttpDoor"]


class _Calls:
    """Method, path and body of each call, and what its answer means."""

    def __init__(self, url: str, key: str, options: ClientOptions) -> None:
        self.base = url.rstrip("/")
        self.tls = _tls(options) if url.startswith("https:") else None
        self.headers = {"Accept": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    @staticmethod
    def select_body(question: Question) -> bytes:
        fields = {
            "pool": question.pool or None, "keys": list(question.keys), "items": list(question.items),
            "modality": question.modality, "session": question.session, "exclude": list(question.exclude),
            "request_id": question.request_id,
            "lease_seconds": question.lease_seconds, "dry_run": question.dry_run,
        }  # fmt: skip
        text = json.dumps(fields).encode()
        # Bodies go in as they are: megabytes that nobody has to read here.
        for name, body in (("sglang_encode", question.sglang_encode), ("openai_chat", question.openai_chat)):
            if body is not None:
                text = b'%s, "%s": %s}' % (text[:-1], name.encode(), body)
        return text

    @staticmethod
    def selection(told: Mapping[str, Any], candidates: int) -> Selection:
        worker = told["worker"]
        return Selection(
            worker=worker["id"],
            url=worker["url"],
            worker_id=int(worker["worker_id"]),
            device=worker["device"],
            pool=told["pool"],
            reason=told["reason"],
            decision_id=int(told["decision_id"]),
            request_id=told["request_id"],
            lease_id=told["lease_id"] or "",
            lease_seconds=told["lease_seconds"] or 0.0,
            repeated_call=told["repeated_call"],
            candidates=tuple(_candidate(row) for row in told["decision"]["candidates"][:candidates]),
        )

    @staticmethod
    def explain_path(decision_id: int, request_id: str, pool: str) -> str:
        query = {"pool": pool} if pool else {}
        if decision_id:
            return f"/decisions/{decision_id}" + (f"?{urlencode(query)}" if query else "")
        return "/decisions?" + urlencode({"limit": "1", "request_id": request_id, **query})

    @staticmethod
    def explanation(told: Mapping[str, Any]) -> Explanation:
        if "decisions" in told:
            rows = told["decisions"]
            if not rows:
                raise Refused("unknown_decision", "no such decision among the latest; older ones are forgotten")
            told = rows[0]
        return Explanation(
            decision_id=int(told["id"]),
            pool=told["pool"],
            request_id=told["request_id"],
            worker=told["worker"],
            reason=told["reason"],
            why=told["why"],
            candidates=tuple(_candidate(row) for row in told["candidates"]),
            record=told,
        )

    @staticmethod
    def workers_path(pool: str) -> str:
        return "/workers" + (f"?pool={quote(pool, safe='')}" if pool else "")

    @staticmethod
    def workers(told: list[Mapping[str, Any]]) -> list[WorkerInfo]:
        return [
            WorkerInfo(
                id=row["id"],
                url=row["url"],
                worker_id=int(row["worker_id"]),
                pool=row["pool"],
                device=row["device"],
                state=row["state"],
                draining=row["draining"],
                doubtful=row.get("doubtful", False),
                publishing=row.get("publishing", False),
                keys=row.get("keys", 0),
                inflight_requests=row.get("inflight_requests", 0),
                encoding_requests=row.get("encoding_requests", 0),
            )
            for row in told
        ]

    def failure(self, status: int, content: bytes) -> ClientError:
        try:
            error = json.loads(content)["error"]
            return error_for(str(error["code"]), str(error["message"]))
        except (ValueError, KeyError, TypeError):
            if status >= 500:
                return Unreachable(f"HTTP {status} from {self.base}, and no reason given")
            return Refused("http_error", f"HTTP {status} from {self.base}; is it the admin listener?")

    def unreachable(self, error: object) -> Unreachable:
        return Unreachable(f"no router answers at {self.base}: {error}")

    def read(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError:
            raise Unreachable(f"{self.base} answered something that is not JSON") from None


class HttpDoor:
    """With urllib: one connection a call, no threads, nothing to install."""

    def __init__(self, url: str, key: str, options: ClientOptions) -> None:
        self._calls = calls = _Calls(url, key, options)
        handlers = [ProxyHandler({}), *([HTTPSHandler(context=calls.tls)] if calls.tls else [])]
        self._opener = build_opener(*handlers)

    def select(self, question: Question, timeout: float) -> Selection:
        told = self._call("POST", "/select", self._calls.select_body(question), timeout)
        return self._calls.selection(told, question.candidates)

    def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool:
        body = json.dumps({"lease_id": lease_id, "request_id": request_id, "pool": pool}).encode()
        try:
            self._call("POST", "/release", body, timeout)
        except Refused as error:
            if error.code == "unknown_lease":
                return False
            raise
        return True

    def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation:
        return self._calls.explanation(
            self._call("GET", self._calls.explain_path(decision_id, request_id, pool), None, timeout)
        )

    def workers(self, pool: str, timeout: float) -> list[WorkerInfo]:
        return self._calls.workers(self._call("GET", self._calls.workers_path(pool), None, timeout))

    def close(self) -> None:
        self._opener.close()

    def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        calls = self._calls
        request = Request(calls.base + path, data=body, method=method, headers=calls.headers)
        try:
            with self._opener.open(request, timeout=timeout) as reply:
                return calls.read(reply.read())
        except HTTPError as error:
            with error:
                raise calls.failure(error.code, error.read()) from None
        except (URLError, OSError, HTTPException) as error:
            raise calls.unreachable(getattr(error, "reason", error)) from None


class AsyncHttpDoor:
    """With aiohttp, connections kept."""

    def __init__(self, url: str, key: str, options: ClientOptions) -> None:
        import aiohttp

        self._calls = calls = _Calls(url, key, options)
        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            headers=calls.headers, connector=aiohttp.TCPConnector(limit=0, ssl=calls.tls or True), trust_env=False
        )

    async def select(self, question: Question, timeout: float) -> Selection:
        told = await self._call("POST", "/select", self._calls.select_body(question), timeout)
        return self._calls.selection(told, question.candidates)

    async def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool:
        body = json.dumps({"lease_id": lease_id, "request_id": request_id, "pool": pool}).encode()
        try:
            await self._call("POST", "/release", body, timeout)
        except Refused as error:
            if error.code == "unknown_lease":
                return False
            raise
        return True

    async def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation:
        path = self._calls.explain_path(decision_id, request_id, pool)
        return self._calls.explanation(await self._call("GET", path, None, timeout))

    async def workers(self, pool: str, timeout: float) -> list[WorkerInfo]:
        return self._calls.workers(await self._call("GET", self._calls.workers_path(pool), None, timeout))

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        calls = self._calls
        try:
            async with asyncio.timeout(timeout), self._session.request(method, calls.base + path, data=body) as reply:
                content = await reply.read()
        except TimeoutError:
            raise calls.unreachable(f"no answer within {timeout:.3g} s") from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise calls.unreachable(error) from None
        if reply.status >= 400:
            raise calls.failure(reply.status, content)
        return calls.read(content)


def _candidate(row: Mapping[str, Any]) -> Candidate:
    return Candidate(
        id=row["worker"],
        device_class=row["class"],
        inflight=row["inflight"],
        keys_held=row["keys_held"],
        doubtful=row["doubtful"],
        predicted=row["predicted"],
        chosen=row["chosen"],
    )


def _tls(options: ClientOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.ca or None)
    if options.certificate:
        context.load_cert_chain(options.certificate, options.private_key or None)
    return context
