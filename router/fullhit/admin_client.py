"""Talk to a running router's admin listener from the command line, and lay its answers out for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["AdminClient", "AdminError", "explain_text", "workers_table"]

TIMEOUT_SECONDS = 10.0
LATEST = 1000
"""How many decisions are asked for where the router cannot search by itself."""


class AdminError(Exception):
    """The router could not be reached or refused; the text says what to do."""


class AdminClient:
    """Synchronous client of the admin listener. ``base`` is its URL or HOST:PORT, ``key`` the bearer token or empty."""

    def __init__(self, base: str, key: str = "") -> None:
        base = base if "://" in base else f"http://{base}"
        try:
            parts = urlsplit(base)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise AdminError(f"--admin: expected a URL such as http://127.0.0.1:8781, got {base!r}")
        self._base = base.rstrip("/")
        self._key = key
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def change_worker(self, action: str, worker: str, facts: Mapping[str, object]) -> Any:
        """Add, remove, drain or resume one worker, by URL or numeric id. ``facts``: what ``add`` says of it."""
        if action == "add":
            return self._call("POST", "/workers", {"url": worker, **facts})
        path = "/workers/" + quote(worker, safe="")
        if action == "remove":
            return self._call("DELETE", path)
        return self._call("POST", f"{path}/{action}")

    def decision(self, wanted: str | None = None) -> Mapping[str, Any]:
        """The record of a decision id, of an ``x-request-id`` or of SGLang's ``req_id``; without one, the latest.

        A request that was sent to several workers has one decision for each; the last one is returned.
        """
        if wanted is None:
            rows = self._decisions("limit=1")
            if not rows:
                raise AdminError("no decision was made yet")
            return self._record(rows[0])
        if wanted.isascii() and wanted.isdigit():
            try:
                return self._record(self.get(f"/decisions/{wanted}"))
            except AdminError as error:
                if getattr(error, "status", 0) != 404:
                    raise
        rows = self._decisions("limit=1&request_id=" + quote(wanted, safe=""))
        rows = rows or [row for row in self._decisions(f"limit={LATEST}") if _req_id(row) == wanted]
        if not rows:
            raise AdminError(f"no decision {wanted!r} among the latest; older ones are forgotten")
        return self._record(rows[0])

    def _decisions(self, query: str) -> list[Any]:
        found = self.get(f"/decisions?{query}")
        return list(found["decisions"] if isinstance(found, dict) else found)

    @staticmethod
    def pretty(value: Any) -> str:
        return json.dumps(value, indent=2)

    def _refusal(self, error: HTTPError) -> str:
        if error.code == 401:
            where = "FULLHIT_ADMIN_KEY or FULLHIT_ADMIN_KEY_FILE"
            return f"the router refused the key in {where}" if self._key else f"the router wants its key: set {where}"
        try:
            return str(json.loads(error.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{self._base} answered HTTP {error.code}; is it the admin listener?"

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
            with error:
                failure = AdminError(self._refusal(error))
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


def _req_id(row: Any) -> object:
    outcome = row.get("outcome") if isinstance(row, dict) else None
    return outcome.get("req_id") if isinstance(outcome, dict) else None


def workers_table(listing: Any) -> str:
    """The list of workers as aligned columns, with a line for each one that something is wrong with."""
    rows = listing["workers"] if isinstance(listing, dict) else listing
    if not rows:
        return (
            "no workers yet: start encoders with --encoder-register-urls http://ROUTER, or "
            "`fullhit workers add http://HOST:PORT`"
        )
    columns: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
        "worker": lambda row: row.get("id"),
        "pool": lambda row: row.get("pool"),
        "device": lambda row: row.get("device"),
        "state": _state,
        "source": lambda row: row.get("source"),
        "in flight": lambda row: row.get("inflight_requests"),
        "encoding": lambda row: row.get("encoding_requests"),
        "oldest": lambda row: _seconds(row.get("oldest_inflight_age_seconds")),
        "keys": lambda row: row.get("keys"),
        "index": _index,
        "heartbeat": lambda row: _seconds((row.get("age_seconds") or {}).get("heartbeat")),
    }
    table = _align([list(columns), *[[_text(cell(row)) for cell in columns.values()] for row in rows]])
    troubles = [f"{row.get('id')}: {trouble}" for row in rows if (trouble := _trouble(row))]
    return "\n".join([table, *([""] if troubles else []), *troubles])


def _state(row: Mapping[str, Any]) -> str:
    state = str(row.get("state", ""))
    return f"{state}, draining" if row.get("draining") and state != "draining" else state


def _index(row: Mapping[str, Any]) -> str:
    if row.get("doubtful"):
        return "doubtful"
    return "confirmed" if row.get("publishing") else "predicted"


def _trouble(row: Mapping[str, Any]) -> str:
    """Why a worker gets no requests, or an empty text."""
    if row.get("down"):
        return str(row["down"])
    held = (row.get("breaker") or {}).get("held_seconds") or 0
    if held:
        return f"gets no requests for {_seconds(held)} after a failure ({row.get('last_failure')})"
    if row.get("state") in ("seen", "probing") and row.get("last_probe_error"):
        return f"has not answered a health probe yet, last {row['last_probe_error']}"
    return ""


def _seconds(value: Any) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def explain_text(record: Mapping[str, Any]) -> str:
    """A decision record as a short report: what was chosen, why, who else was considered. Empty parts are left out."""
    flat: list[tuple[str, str]] = []
    tables: list[str] = []
    for name, value in record.items():
        title = name.replace("_", " ")
        if value in (None, "", [], {}):
            continue
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            names = list(value[0])
            rows = [[_text(row.get(column)) for column in names] for row in value]
            table = _align([[column.replace("_", " ") for column in names], *rows])
            tables += ["", f"{title}:", *("  " + line for line in table.splitlines())]
        else:
            flat.append((f"{title}:", _text(value)))
    return "\n".join([_align(flat), *tables])


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{str(k).replace('_', ' ')} {_text(v)}" for k, v in value.items() if v not in (None, "", [], {})
        )
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(_text(v) for v in value)
    return str(value)
