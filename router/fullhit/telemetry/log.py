"""Structured log: one line per event, JSON for machines or plain text for a terminal.

An event is a short snake_case name and fields, never a sentence with values baked in::

    log = Log(sys.stderr, "info")
    log.event("worker_ready", worker="http://127.0.0.1:30000", seconds=0.4)
    log.limited("bad-key:" + worker, "event_rejected", worker=worker, cause="key_too_long")   # once a minute
    with bridge_logging(log):   # lines of aiohttp, nats and asyncio come out in the same form
        ...

Logging must never be the fault: no call raises whatever it is given, no call waits for the stream (see `sink`), a
line is at most ``MAX_LINE_CHARS`` long, control characters are escaped so that a client cannot forge lines, and
the password of any URL in a field is masked. `Log.limited` lets a peer repeat its mistake a thousand times a second
at the price of one line a minute that carries the number suppressed since the line before.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from fullhit.telemetry.sink import LineSink, TextStream

__all__ = ["LEVELS", "Log", "LogBridge", "LogFormat", "bridge_logging", "redact"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LogFormat = Literal["json", "text"]

MAX_LINE_CHARS = 32_768
"""Longest line; a longer event keeps its short fields and says so."""
MAX_FIELD_CHARS = 4_096
"""Longest text value; the rest is cut with a remark of how much."""
MAX_LIMITED_KEYS = 1_024
"""Distinct keys of `Log.limited` remembered; the least recently used one is forgotten."""

_RESERVED = frozenset({"time", "level", "event"})
_CREDENTIALS = re.compile(r"(?<=://)[^/\s?#\"']*@")
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and equals sign: needs no quoting in text


def redact(text: str) -> str:
    """``text`` with the user and password part of every URL in it replaced: ``nats://***@broker:4222``."""
    return _CREDENTIALS.sub("***@", text) if "@" in text and "://" in text else text


class Log:
    """Writes events to ``stream``.

    ``format`` None means text on a terminal and JSON elsewhere. ``clock`` (monotonic seconds) drives `limited`,
    ``wall`` (Unix seconds) the time stamps. Raises ValueError for an unknown level or format, at construction only.
    """

    def __init__(
        self,
        stream: TextStream | None = None,
        level: str = "info",
        format: LogFormat | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_lines: int = 10_000,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        if level not in LEVELS:
            raise ValueError(f"unknown log level {level!r}; use one of {', '.join(LEVELS)}")
        if format is None:
            format = "text" if _is_terminal(stream) else "json"
        if format not in ("json", "text"):
            raise ValueError(f"unknown log format {format!r}; use json or text")
        self.format: LogFormat = format
        self._threshold = LEVELS[level]
        self._clock = clock
        self._wall = wall
        self._second = -1
        self._second_text = ""
        self._millisecond = -1
        self._stamp_text = ""
        self._limited: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._sink = LineSink(stream, max_lines=max_lines, on_gap=self._gap_line)

    @property
    def dropped(self) -> int:
        """Lines that never reached the stream."""
        return self._sink.dropped

    def enabled(self, level: str) -> bool:
        """Whether events of ``level`` are written: ask before computing costly fields."""
        return LEVELS.get(level, 40) >= self._threshold

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None:
        """Write one event; fields that are None are left out. An unknown ``level`` counts as an error."""
        if LEVELS.get(level, 40) >= self._threshold:
            self._sink.put(self._line(kind, level, fields))

    def write(self, kind: str, level: str, fields: dict[str, object]) -> None:
        """As `event`, for many fields that are in a dictionary already."""
        if LEVELS.get(level, 40) >= self._threshold:
            self._sink.put(self._line(kind, level, fields))

    def limited(self, key: str, kind: str, /, every: float = 60.0, level: str = "warning", **fields: object) -> None:
        """Like `event`, at most once in ``every`` seconds for each ``key``; adds ``suppressed`` when some were."""
        now = self._clock()
        last, suppressed = self._limited.get(key, (None, 0))
        if last is not None and now - last < every:
            self._limited[key] = (last, suppressed + 1)
            self._limited.move_to_end(key)
            return
        self._limited[key] = (now, 0)
        self._limited.move_to_end(key)
        if len(self._limited) > MAX_LIMITED_KEYS:
            self._limited.popitem(last=False)
        if suppressed:
            fields["suppressed"] = suppressed
        self.event(kind, level, **fields)

    def flush(self, timeout: float = 1.0) -> bool:
        """Wait until the lines so far are written; False after ``timeout`` seconds."""
        return self._sink.flush(timeout)

    def close(self, timeout: float = 1.0) -> bool:
        """Flush and stop; later events are dropped and counted."""
        return self._sink.close(timeout)

    def _stamp(self) -> str:
        now = int(self._wall() * 1000)
        if now != self._millisecond:
            whole, part = divmod(now, 1000)
            if whole != self._second:
                self._second, self._second_text = whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._millisecond, self._stamp_text = now, f"{self._second_text}.{part:03d}Z"
        return self._stamp_text

    def _gap_line(self, missing: int) -> str:
        return self._line("log_lines_dropped", "warning", {"lines": missing})

    def _line(self, kind: str, level: str, fields: dict[str, object]) -> str:
        try:
            stamp = self._stamp()
            if self.format == "json":
                try:
                    line = _plain_line(stamp, level, kind, fields)
                except Exception:  # what JSON cannot hold: the careful way finds out which field it is
                    line = ""
                if line:
                    return line
            clean: dict[str, object] = {}
            for name, value in fields.items():
                if value is not None:
                    # Short plain ASCII and numbers, nearly all there is, need no cleaning.
                    if type(value) is str:
                        if len(value) > 256 or "@" in value or not value.isascii():
                            value = _clean(value)
                    elif type(value) is float:
                        value = round(value, 6)
                    clean[name if name not in _RESERVED else name + "_"] = value
            render = _text_line if self.format == "text" else _json_line
            line = render(stamp, level, kind, clean)
            if len(line) > MAX_LINE_CHARS:
                short = {k: v for k, v in clean.items() if len(_json_text(v)) <= 256}
                line = render(stamp, level, kind, short | {"fields_cut": len(clean) - len(short)})
            return line[:MAX_LINE_CHARS] if line.isprintable() else _printable(line)[:MAX_LINE_CHARS]
        except Exception as error:  # a field whose repr raises, a clock out of range ...
            return (
                f'{{"level":"error","event":"log_failed","kind":{_json_text(kind)},"cause":"{type(error).__name__}"}}'
            )


class LogBridge(logging.Handler):
    """Hands the records of the standard `logging` module to a `Log` as events named ``library``."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: a record that cannot be formatted is written with its bare message."""
        try:
            message = record.getMessage()
        except Exception:
            message = str(record.msg)
        trace: str | None = None
        if record.exc_info and record.exc_info[0] is not None:
            trace = logging.Formatter().formatException(record.exc_info)[-MAX_FIELD_CHARS:]
        level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "info"
        if record.levelno < logging.INFO:
            level = "debug"
        self._log.event("library", level, logger=record.name, message=message, traceback=trace)


@contextmanager
def bridge_logging(log: Log, level: int = logging.WARNING) -> Iterator[LogBridge]:
    """Within the block, records of ``level`` and above of all libraries go to ``log`` and nowhere else."""
    root = logging.getLogger()
    before, before_level = root.handlers[:], root.level
    bridge = LogBridge(log)
    root.handlers[:] = [bridge]
    root.setLevel(level)
    try:
        yield bridge
    finally:
        root.handlers[:] = before
        root.setLevel(before_level)


def _is_terminal(stream: TextStream) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:
        return False


def _printable(line: str) -> str:
    """What else moves a terminal's cursor than the controls which JSON escapes, as escapes that JSON reads back."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def _clean(value: object) -> object:
    if type(value) is str:
        text = redact(value)
        if len(text) > MAX_FIELD_CHARS:
            text = f"{text[:MAX_FIELD_CHARS]}...({len(text) - MAX_FIELD_CHARS} more)"
        return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    return value


_encoder = msgspec.json.Encoder(enc_hook=lambda value: _clean(str(value)))


def _json_text(value: object) -> str:
    try:
        return _encoder.encode(value).decode()
    except Exception:  # lone surrogates deep inside, integers beyond 64 bits, odd mapping keys
        return _encoder.encode(ascii(value)[:MAX_FIELD_CHARS]).decode()


def _plain_line(stamp: str, level: str, kind: str, fields: dict[str, object]) -> str:
    """The line if it needs no cleaning, else "".

    Nearly every line is short plain ASCII. What the careful way would do to it field by field is then known not to be
    needed from one look at the whole: no None, no URL with a password, nothing too long, nothing that JSON lets
    through and a terminal would obey.
    """
    if None in fields.values() or not _RESERVED.isdisjoint(fields):
        return ""
    record: dict[str, object] = {"time": stamp, "level": level, "event": kind, **fields}
    for name in [name for name, value in fields.items() if type(value) is float]:
        record[name] = round(record[name], 6)  # type: ignore[call-overload]
    data = _encoder.encode(record)
    if len(data) > MAX_FIELD_CHARS or not data.isascii() or b"@" in data or b"\x7f" in data:
        return ""
    return data.decode()


def _json_line(stamp: str, level: str, kind: str, fields: dict[str, object]) -> str:
    record: dict[str, Any] = {"time": stamp, "level": level, "event": kind, **fields}
    try:
        return _encoder.encode(record).decode()
    except Exception:
        return "{" + ",".join(f"{_json_text(name)}:{_json_text(value)}" for name, value in record.items()) + "}"


def _text_line(stamp: str, level: str, kind: str, fields: dict[str, object]) -> str:
    parts = [f"{stamp[11:-1]} {level.upper():<7} {kind}"]
    for name, value in fields.items():
        plain = type(value) is str and _PLAIN.fullmatch(value)
        parts.append(f"{name}={value if plain else _json_text(value)}")
    return " ".join(parts)
