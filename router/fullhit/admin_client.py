"""Talk to a running router's admin listener from the command line, and lay its answers out for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["AdminClient", "AdminError", "explain_text", "workers_table"]

TIMEOUT_SECONDS = 10.0


class AdminError(Exception):
    """The router could not be reached or refused; the text says what to do."""


class AdminClient:
    """Synchronous client of the admin listener. ``base`` is its URL, ``key`` the bearer token or empty."""

    def __init__(self, base: str, key: str = "") -> None:
        if urlsplit(base).scheme not in ("http", "https"):
            raise AdminError(f"{base!r} is not an http:// URL")
        self._base = base.rstrip("/")
        self._key = key
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def change_worker(
        self, action: str, worker: str, *, device: str | None, weight: float | None, pool: str | None
    ) -> Any:
        """Add, remove, drain or resume one worker. ``worker`` is its URL or numeric id."""
        if action == "add":
            body = {"url": worker, "device": device, "weight": weight, "pool": pool}
            return self._call("POST", "/workers", {k: v for k, v in body.items() if v is not None})
        path = "/workers/" + quote(worker, safe="")
        if action == "remove":
            return self._call("DELETE", path)
        return self._call("POST", f"{path}/{action}")

    def decision(self, id_or_request: str) -> Mapping[str, Any]:
        """The explain record of a decision id or a request id."""
        if id_or_request.isascii() and id_or_request.isdigit():
            try:
                return self._record(self.get(f"/decisions/{id_or_request}"))
            except AdminError as error:
                if getattr(error, "status", 0) != 404:
                    raise
        found = self.get("/decisions?limit=1&request_id=" + quote(id_or_request, safe=""))
        rows = found["decisions"] if isinstance(found, dict) else found
        if not rows:
            raise AdminError(f"no decision {id_or_request!r} among the latest; older ones are forgotten")
        return self._record(rows[0])

    @staticmethod
    def pretty(value: Any) -> str:
        return json.dumps(value, indent=2)

    @staticmethod
    def _record(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise AdminError("the router answered something that is not a decision record")
        return value

    def _call(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = Request(self._base + path, data=data, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as reply:
                text = reply.read()
        except HTTPError as error:
            failure = AdminError(_message(error))
            failure.status = error.code  # type: ignore[attr-defined]
            raise failure from None
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(
                f"no router answers at {self._base} ({reason}); is `fullhit serve` running, and is --admin right?"
            ) from None
        try:
            return json.loads(text) if text else {}
        except ValueError:
            raise AdminError(f"{self._base} answered something that is not JSON; is it the admin listener?") from None


def _message(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} from the router"


def workers_table(listing: Any) -> str:
    """The list of workers as aligned columns."""
    rows = listing["workers"] if isinstance(listing, dict) else listing
    if not rows:
        return (
            "no workers yet: start encoders with --encoder-register-urls http://ROUTER, or "
            "`fullhit workers add http://HOST:PORT`"
        )
    columns = (
        ("worker", "id"), ("pool", "pool"), ("device", "device"), ("state", "state"), ("source", "source"),
        ("in flight", "inflight_requests"), ("encoding", "encoding_requests"), ("keys", "keys"),
        ("index", "index"),
    )  # fmt: skip
    body = [[_cell(row, field) for _, field in columns] for row in rows]
    return _align([[title for title, _ in columns], *body])


def _cell(row: Mapping[str, Any], field: str) -> str:
    if field == "index":
        if row.get("doubtful"):
            return "doubtful"
        return "confirmed" if row.get("publishing") else "predicted"
    return str(row.get(field, ""))


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def explain_text(record: Mapping[str, Any]) -> str:
    """A decision record as a short report: what was chosen, why, and who else was considered."""
    lines = [f"{name}: {_value(value)}" for name, value in record.items() if name != "candidates"]
    candidates = record.get("candidates")
    if isinstance(candidates, list) and candidates and all(isinstance(c, dict) for c in candidates):
        names = list(candidates[0])
        lines.append("candidates:")
        table = _align([names, *[[_value(c.get(name)) for name in names] for c in candidates]])
        lines.extend("  " + line for line in table.splitlines())
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_value(v)}" for k, v in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return str(value)
