"""Heads that have been read before.

A client or a server sends the same head again and again but for the number in its Content-Length (and, once a second, a
date). What was parsed and found good once is good again when only those digits differ, so the parsed form is kept under
the head's bytes without them. A head that is not known goes the whole way through the parser; nothing is accepted here
that was not accepted there with other digits.

Bounded: heads of up to 2 KiB, some hundred of them; when they are too many all are forgotten.
"""

from __future__ import annotations

from typing import Final, TypeVar

from .heads import RequestHead, ResponseHead, parse_response_head, read_request_head

__all__ = ["RequestMemo", "ResponseMemo"]

MAX_HEAD: Final = 2048
MAX_ENTRIES: Final = 512
LENGTH: Final = b"\r\nContent-Length: "
DIGITS: Final = 18

R = TypeVar("R", bound=RequestHead)


class RequestMemo:
    """`read` is `read_request_head`, quicker for what is known."""

    __slots__ = ("_known", "_max_headers")

    def __init__(self, max_headers: int) -> None:
        self._known: dict[bytes, tuple[RequestHead, int]] = {}
        self._max_headers = max_headers

    def read(self, head: bytes, result: R) -> R:
        """Parse a head into `result`. Raises as `read_request_head`."""
        start = head.find(LENGTH) + 18
        if start < 18 or len(head) > MAX_HEAD:
            return read_request_head(head, self._max_headers, result)
        stop = head.find(b"\r", start)
        digits = head[start:stop]
        key = head[:start] + head[stop:]
        known = self._known.get(key)
        if known is not None and digits.isdigit() and len(digits) <= DIGITS:
            like, index = known
            result.method = like.method
            result.target = like.target
            headers = result.headers = like.headers.copy()
            headers[index] = (b"Content-Length", digits)
            result.names = like.names
            result.content_length = int(digits)
            result.like = like
            return result
        read_request_head(head, self._max_headers, result)
        if result.keep_alive and result.modern and not result.expects:  # what is said by the class defaults
            if len(self._known) >= MAX_ENTRIES:
                self._known.clear()
            like = RequestHead()
            like.method, like.target = result.method, result.target
            like.headers, like.names = result.headers.copy(), result.names
            result.like = like
            self._known[key] = like, result.names.index(b"content-length")
        return result


class ResponseMemo:
    """`read` is `parse_response_head` for answers to anything but HEAD, quicker for what is known.

    The heads it returns share their lists: they are for reading.
    """

    __slots__ = ("_known", "_max_headers")

    def __init__(self, max_headers: int) -> None:
        self._known: dict[bytes, ResponseHead] = {}
        self._max_headers = max_headers

    def read(self, head: bytes) -> ResponseHead:
        """Parse a head. Raises BadReply."""
        known = self._known.get(head)
        if known is not None:
            return known
        result = parse_response_head(head, self._max_headers, False)
        if len(head) <= MAX_HEAD:
            if len(self._known) >= MAX_ENTRIES:
                self._known.clear()
            self._known[head] = result
        return result
