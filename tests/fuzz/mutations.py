"""Inputs for parsers: good ones, made bad in the ways in which networks, disks and attackers do."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["damaged"]

_ODD = (
    b"", b"\x00", b"\xff", b"\xc0", b"\xc1", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6,
    b'"', b"\\", b"\\u0000", b"\\ud800", b"[" * 600, b"{" * 600, b'{"a":' * 600, b"]", b"}", b",", b":", b"null",
    b"-1", b"1e999", b"18446744073709551616", b"true", b"\r\n", b"\n", b"\r", b" ", b"\t", b"0x10", b"%00",
    b"\xed\xa0\x80", b"\xef\xbb\xbf", b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n",
    b"data:image/png;base64,", b"=", b"'", b"#", b"[[x]]\n",
)  # fmt: skip
"""What msgpack, JSON, HTTP and TOML trip over."""


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of ``seeds`` after a few edits: bytes flipped, cut out, doubled, put in, or joined with those of another."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(("flip", "cut", "end", "double", "odd", "noise", "join"))):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[to:]
            case "end":
                data = data[:at]
            case "double":
                data = data[:to] + data[at:to] * draw(st.integers(1, 8)) + data[to:]
            case "odd":
                data = data[:at] + draw(st.sampled_from(_ODD)) + data[to:]
            case "noise":
                data = data[:at] + draw(st.binary(max_size=12)) + data[to:]
            case "join":
                other = draw(st.sampled_from(seeds))
                data = data[:at] + other[draw(st.integers(0, len(other))) :]
    return data
