"""Reading and writing HTTP/1 heads.

A head is first cut out of the stream at its empty line and then handed to llhttp (httptools) in one piece, by a
fresh parser: no state can leak from one message into the next, and the parser never sees a body, so where
a message ends is decided in exactly one place (here and in `chunks.py`). llhttp in its strict mode refuses
bare LF, folded lines, blanks before a colon, control characters, repeated or signed Content-Length, and
Content-Length beside Transfer-Encoding. What it lets through and we do not: two blanks in the request line,
versions other than 1.0 and 1.1, any transfer coding but a single `chunked`, a missing or repeated Host.

Framing headers are never forwarded as they came: both directions drop them and write their own, so a
disagreement between two parsers about one of them cannot travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import TypeVar

import httptools

from .errors import BadReply, ClientFault, LocalFault

__all__ = ["Headers", "RequestHead", "ResponseHead", "end_to_end", "parse_request_head", "parse_response_head"]

Headers = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"content-length",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that end at this hop: RFC 9110 section 7.6.1, the older proxy headers, and the framing ones."""

_SPECIAL = HOP_BY_HOP | {b"host"}
_PERSISTENCE = frozenset((b"close", b"keep-alive"))
_WATCHED_REQUEST = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"))
_WATCHED_RESPONSE = frozenset((b"content-length", b"transfer-encoding", b"connection", b"keep-alive"))
_ONE_ONE = (1, 1)
_ONE_ZERO = (1, 0)
_LENGTH_DIGITS = 18
_SPECIAL_STATUS = (204, 304)


class _Head:
    """What llhttp finds is put straight into the head: it is its own parser protocol."""

    headers: list[tuple[bytes, bytes]]
    names: list[bytes]

    def __init__(self) -> None:
        self.headers = []
        self.names = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self.names.append(name.lower())


class HeaderBlock:
    """End-to-end headers that are composed and checked already: what a request is forwarded with.

    `lines` are complete lines with their CRLF, without any framing header; `hosted` says that Host is among them.
    """

    __slots__ = ("hosted", "lines")

    def __init__(self, lines: bytes, hosted: bool) -> None:
        self.lines = lines
        self.hosted = hosted

    def with_line(self, line: bytes) -> HeaderBlock:
        """One more header. The caller vouches that it is one whole line, its only line break the CRLF at its end."""
        return HeaderBlock(self.lines + line, self.hosted)

    def __repr__(self) -> str:
        return f"<HeaderBlock {self.lines!r}>"


class RequestHead(_Head):
    """A request head: what the client asked for and how the body is framed.

    `content_length` is -1 when the client gave none; `names` holds the lower-cased header names, one for
    each element of `headers`; `modern` means HTTP/1.1.
    """

    method = b""
    target = b""
    version: tuple[int, int] = _ONE_ONE
    modern = True
    content_length = -1
    chunked = False
    keep_alive = True
    expects = False
    like: RequestHead | None = None
    block: HeaderBlock | None = None
    hostless: HeaderBlock | None = None

    def forwarded_hostless(self) -> HeaderBlock:
        """As `forwarded`, without Host: the upstream is to hear its own name."""
        owner = self.like or self
        block = owner.hostless
        if block is None:
            kept = [item for item in end_to_end(owner.headers) if item[0].lower() != b"host"]
            block = owner.hostless = HeaderBlock(header_block(kept), False)
        return block

    def forwarded(self, extra: Headers = ()) -> HeaderBlock:
        """The end-to-end headers as they were received, plus `extra`, ready for `UpstreamClient.send`.

        Quicker than passing a list of headers, and the same on the wire. Raises LocalFault for malformed extra ones.
        """
        owner = self.like or self
        block = owner.block
        if block is None:
            kept = end_to_end(owner.headers)
            lines = b"\r\n".join(map(b": ".join, kept)) + b"\r\n" if kept else b""
            block = owner.block = HeaderBlock(lines, any(name.lower() == b"host" for name, _ in kept))
        if not extra:
            return block
        hosted = block.hosted or any(name.lower() == b"host" for name, _ in extra)
        return HeaderBlock(block.lines + header_block(end_to_end(extra)), hosted)

    def on_url(self, url: bytes) -> None:
        self.target += url


class ResponseHead(_Head):
    """A response head. `content_length` is -1 when there is none; `keep_alive_timeout` is the server's own
    statement of how long it keeps idle connections (seconds), or None."""

    status = 0
    reason = b""
    content_length = -1
    chunked = False
    keep_alive = True
    keep_alive_timeout: float | None = None
    block: bytes | None = None

    def on_status(self, reason: bytes) -> None:
        self.reason += reason


def _values(headers: list[tuple[bytes, bytes]], names: list[bytes], name: bytes) -> list[bytes]:
    return [headers[i][1].strip(b" \t") for i, found in enumerate(names) if found == name]


def _length(headers: list[tuple[bytes, bytes]], names: list[bytes]) -> int:
    """The one Content-Length; ValueError when it is malformed or not the only one."""
    text = headers[names.index(b"content-length")][1].strip(b" \t")
    if not text.isdigit() or len(text) > _LENGTH_DIGITS or names.count(b"content-length") != 1:
        raise ValueError
    return int(text)


def _tokens(values: Iterable[bytes]) -> set[bytes]:
    return {token.strip(b" \t").lower() for value in values for token in value.split(b",")} - {b""}


def _bad(code: str, message: str) -> ClientFault:
    return ClientFault(400, code, message)


R = TypeVar("R", bound="RequestHead")


def parse_request_head(head: bytes, max_headers: int) -> RequestHead:
    """Parse one complete request head, empty line included. Raises as `read_request_head`."""
    return read_request_head(head, max_headers, RequestHead())


def read_request_head(head: bytes, max_headers: int, result: R) -> R:
    """Parse one complete request head, empty line included, into `result`.

    Raises ClientFault: 400 for anything malformed or ambiguous, 431 for too many headers, 501 for transfer
    codings other than chunked and for CONNECT, 505 for other versions, 417 for an unknown expectation.
    """
    if head.count(b"\n") - 2 > max_headers:
        raise ClientFault(431, "too_many_headers", f"more than {max_headers} header lines (max_headers)")
    parser = httptools.HttpRequestParser(result)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # An offer to upgrade is ignored: the request is answered as plain HTTP.
    except httptools.HttpParserError as error:
        raise _bad("bad_request", f"malformed request: {error}") from None
    result.method = method = parser.get_method()
    headers = result.headers
    names = result.names
    modern = True
    line = len(method) + len(result.target) + 2
    version = head[line : line + 10]
    if version != b"HTTP/1.1\r\n":
        if version == b"HTTP/1.0\r\n":
            result.version = _ONE_ZERO
            result.keep_alive = result.modern = modern = False
        elif version.startswith(b"HTTP/"):
            raise ClientFault(505, "version", "only HTTP/1.0 and HTTP/1.1 are spoken here")
        else:  # llhttp lets several blanks pass
            raise _bad("bad_request", "malformed request line")
    if method == b"CONNECT":
        raise ClientFault(501, "connect", "CONNECT is not supported")
    watched = _WATCHED_REQUEST.intersection(names)
    if b"host" in watched:
        if names.count(b"host") != 1:
            raise _bad("host", "more than one Host header")
    elif modern:
        raise _bad("host", "HTTP/1.1 request without Host header")
    if b"content-length" in watched:
        try:
            result.content_length = _length(headers, names)
        except ValueError:
            raise _bad("content_length", "malformed or repeated Content-Length") from None
        if len(watched) == 2:
            return result
    if b"transfer-encoding" in watched:
        if result.content_length >= 0:
            raise _bad("framing", "both Content-Length and Transfer-Encoding")
        if not modern:
            raise _bad("framing", "Transfer-Encoding in an HTTP/1.0 request")
        codings = _values(headers, names, b"transfer-encoding")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise ClientFault(501, "transfer_coding", "the only transfer coding known here is chunked")
        result.chunked = True
    if b"connection" in watched:
        tokens = _tokens(_values(headers, names, b"connection"))
        if b"close" in tokens:
            result.keep_alive = False
        elif not modern and b"keep-alive" in tokens:
            result.keep_alive = True
    if b"expect" in watched and modern:
        if _values(headers, names, b"expect")[0].lower() != b"100-continue":
            raise ClientFault(417, "expectation", "the only expectation known here is 100-continue")
        result.expects = True
    return result


def parse_response_head(head: bytes, max_headers: int, head_only: bool) -> ResponseHead:
    """Parse one complete response head; `head_only` when the request was a HEAD.

    The framing is already settled in the result: `content_length` is 0 for answers that have no body by their
    nature, and -1 with `chunked` false means "until the connection closes". Raises BadReply.
    """
    if head.count(b"\n") - 2 > max_headers:
        raise BadReply(f"more than {max_headers} header lines in the reply")
    result = ResponseHead()
    parser = httptools.HttpResponseParser(result)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadReply(f"malformed reply: {error}") from None
    result.status = status = parser.get_status_code()
    headers = result.headers
    names = result.names
    modern = True
    version = head[:9]
    if version != b"HTTP/1.1 ":
        if version != b"HTTP/1.0 ":
            raise BadReply("malformed reply: status line")
        result.keep_alive = modern = False
    if not 100 <= status <= 999:
        raise BadReply("malformed reply: status line")
    watched = _WATCHED_RESPONSE.intersection(names)
    if b"content-length" in watched:
        try:
            result.content_length = _length(headers, names)
        except ValueError:
            raise BadReply("malformed or repeated Content-Length in the reply") from None
        if len(watched) == 1 and not head_only and status not in _SPECIAL_STATUS and status >= 200:
            return result
    if b"transfer-encoding" in watched:
        codings = _values(headers, names, b"transfer-encoding")
        if result.content_length >= 0 or not modern:
            raise BadReply("conflicting framing in the reply")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise BadReply("unknown transfer coding in the reply")
        result.chunked = True
    if b"connection" in watched:
        tokens = _tokens(_values(headers, names, b"connection"))
        if b"close" in tokens:
            result.keep_alive = False
        elif not modern and b"keep-alive" in tokens:
            result.keep_alive = True
    if b"keep-alive" in watched:
        for token in _tokens(_values(headers, names, b"keep-alive")):
            key, _, number = token.partition(b"=")
            if key.strip() == b"timeout" and number.strip().isdigit() and len(number) < 10:
                result.keep_alive_timeout = float(number)
    if head_only or status in (204, 304) or status < 200:
        result.chunked = False
        if not head_only and status != 304:
            result.content_length = 0
    return result


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that may travel on: without hop-by-hop and framing ones and without those that a
    `Connection` header names. Order and spelling are kept. Idempotent."""
    kept = []
    named: set[bytes] | None = None
    for item in headers:
        name = item[0].lower()
        if name not in HOP_BY_HOP:
            kept.append(item)
        elif name == b"connection":
            tokens = _tokens((item[1],)) - _PERSISTENCE
            if tokens:
                named = tokens if named is None else named | tokens
    if named:
        return [item for item in kept if item[0].lower() not in named]
    return kept


def forwarded_block(head: ResponseHead) -> bytes:
    """The end-to-end headers of a reply as lines. They were found clean when they were parsed."""
    block = head.block
    if block is None:
        kept = end_to_end(head.headers)
        block = head.block = b"\r\n".join(map(b": ".join, kept)) + b"\r\n" if kept else b""
    return block


def header_block(headers: Headers) -> bytes:
    """`Name: value` lines, each ended by CRLF. Raises LocalFault when one of them would break the framing."""
    if not headers:
        return b""
    block = b"\r\n".join(map(b": ".join, headers)) + b"\r\n"
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers) or b"\0" in block:
        raise LocalFault("a header to be sent contains a line break or NUL")
    return block


def request_head(method: bytes, target: bytes, headers: Headers | HeaderBlock, host: bytes, length: int) -> bytes:
    """The head of a request to an upstream. Hop-by-hop headers in `headers` are dropped, Host is added when
    missing, and the framing is our own."""
    if isinstance(headers, HeaderBlock):
        if b" " in target or b"\r" in target or b"\n" in target or b"\0" in target or not method.isalpha():
            raise LocalFault("method or target to be sent is malformed")
        named = b"" if headers.hosted else b"Host: %b\r\n" % host
        framing = b"Content-Length: %d\r\n\r\n" % length if length or method not in _BODYLESS else b"\r\n"
        return b"".join((method, b" ", target, b" HTTP/1.1\r\n", headers.lines, named, framing))
    return _request_head(method, target, headers, host, length)


def _request_head(method: bytes, target: bytes, headers: Headers, host: bytes, length: int) -> bytes:
    kept = []
    named: set[bytes] | None = None
    hosted = False
    for item in headers:
        name = item[0].lower()
        if name not in _SPECIAL:
            kept.append(item)
        elif name == b"host":
            hosted = True
            kept.append(item)
        elif name == b"connection":
            tokens = _tokens((item[1],)) - _PERSISTENCE
            if tokens:
                named = tokens if named is None else named | tokens
    if named:
        kept = [item for item in kept if item[0].lower() not in named or item[0].lower() == b"host"]
    if not hosted:
        kept.append((b"Host", host))
    if length or method not in _BODYLESS:
        kept.append((b"Content-Length", b"%d" % length))
    count = len(kept) + 2
    block = b"\r\n".join(map(b": ".join, kept))
    head = b"".join((method, b" ", target, b" HTTP/1.1\r\n", block, b"\r\n\r\n"))
    if head.count(b"\n") != count or head.count(b"\r") != count or b"\0" in head or b" " in target or b" " in method:
        raise LocalFault("method, target or a header to be sent is malformed")
    return head


_BODYLESS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE"))

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


def status_line(status: int, reason: bytes | None = None) -> bytes:
    """`HTTP/1.1 <status> <reason>` and CRLF; our own phrase when no reason is given."""
    if reason is None:
        line = _STATUS_LINES.get(status)
        if line is not None:
            return line
        reason = b"Status"
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)
