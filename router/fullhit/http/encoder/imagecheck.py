"""Is an inline picture a picture? A look at a few hundred bytes of it, never at all of it.

Why the router looks at all: with SGLang 0.5.23 and ``zmq_to_scheduler`` one ``/encode`` that fails, for
instance over an undecodable picture, ends the whole language server. The cheap look catches what people
really send (empty data, text or HTML instead of a picture, a file cut off by a failed download, base64
damaged in transit). It is no decoder.

A false alarm costs a good request, a miss only what would have happened anyhow, so in doubt the picture
passes. *Detected*:

* a ``data:`` URI without comma; an empty payload; a length that is no base64 (after padding not a multiple
  of four); characters outside the alphabet at the start, in the middle or at the end;
* a start which is none of the formats that Pillow opens, also none of those without a signature (TGA, PCD,
  SPIDER, IM, IPTC, GBR, MPEG);
* PNG: no IHDR, a zero size, no IDAT, or a chunk that runs over the end before the picture is complete;
* JPEG: no marker after SOI, or the end of the file before the first scan;
* WebP: a RIFF length beyond the end, or a first chunk that is none; GIF and BMP: shorter than their headers.

*Not detected*: damage inside compressed data, wrong check sums, a JPEG or GIF cut off inside its pixels,
pictures over the decoder's pixel limit, formats which Pillow opens only with a plug-in that the encoder
lacks. *Not looked at*: URLs and paths, payloads that are not base64 (percent-encoded) or that hold blanks or
line breaks, videos and audio.

A base64 text is read at any place: byte 3k is in character 4k.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import pybase64

__all__ = ["inspect_image"]

_SAMPLE_CHARS: Final = 64
_MAX_CHUNKS: Final = 256
"""PNG chunks or JPEG segments walked before the picture is believed; about 0.3 ms."""
_PATH_CHARS: Final = 4_096
"""A text without ``data:`` that is no longer than a path can be may be a path."""

_ALPHABET: Final = re.compile(rb"[A-Za-z0-9+/]*={0,2}\Z")
_BLANKS: Final = (b" ", b"\n", b"\r", b"\t", b"%")

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_END: Final = b"\0\0\0\0IEND\xaeB`\x82"

# Signatures at the very start, of everything that Pillow or its usual plug-ins (HEIF, AVIF, JPEG XL) open.
_SIGNATURES: Final = (
    b"BM", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"MM*\0", b"II\0*",
    b"\0\0\1\0", b"\0\0\2\0", b"\xffO\xffQ", b"\0\0\0\x0cjP  \r\n\x87\n", b"8BPS", b"qoif", b"DDS ", b"BLP",
    b"\x89HDF\r\n\x1a\n", b"icns", b"\xd0\xcf\x11\xe0", b"%!PS", b"\xc5\xd0\xd3\xc6", b"SIMPLE", b"FTEX", b"GRIB",
    b"BUFR", b"\xb1\x68\xde\x3a", b"DanM", b"LinS", b"\x80\xe8\0\0", b"\x01\xda", b"\x59\xa6\x6a\x95",
    b"\xd7\xcd\xc6\x9a", b"\x01\0\0\0", b"#define", b"/* XPM", b"\0\0\1\xba", b"\0\0\1\xb3", b"\x1c",
    b"\xff\x0a", b"\0\0\0\x0cJXL ", b"\0\0\0\0\0\0\0\4", b"\0\0\0\4",
)  # fmt: skip


def inspect_image(text: str | memoryview) -> str | None:
    """What is wrong with the inline picture ``text`` (a ``data:`` URI or bare base64), or None.

    >>> inspect_image("data:image/png;base64,aGVsbG8gd29ybGQ=")
    'the data is no known picture format (it starts with 68656c6c6f20776f726c64)'
    """
    payload = _payload(text)
    if payload is None:
        return None
    if isinstance(payload, str):
        return payload
    return payload.problem()


def _payload(text: str | memoryview) -> _Base64 | str | None:
    """The base64 part; a problem; or None for what is not looked at."""
    head = _ascii(text, 0, 512)
    if head[:5].lower() == b"data:":
        comma = head.find(b",")
        if comma < 0:
            return None if len(text) > 512 else "the data: URI has no comma"
        if not head[:comma].lower().endswith(b";base64"):
            return None
        return _Base64(text, comma + 1, bare=False)
    if b"://" in head[:32] or not text:
        return None
    return _Base64(text, 0, bare=True)


def _ascii(text: str | memoryview, start: int, end: int) -> bytes:
    part = text[start:end]
    return part.encode("ascii", "replace") if isinstance(part, str) else bytes(part)


class _Base64:
    """Random access to the bytes behind a base64 text."""

    def __init__(self, text: str | memoryview, start: int, *, bare: bool) -> None:
        self._text = text
        self._start = start
        self._chars = len(text) - start
        self._bare = bare
        tail = _ascii(text, max(start, len(text) - 2), len(text))
        self._padding = len(tail) - len(tail.rstrip(b"="))
        self.size = (self._chars - self._padding) * 3 // 4

    def read(self, at: int, count: int) -> bytes:
        """Up to ``count`` bytes from byte ``at``; what is no base64 raises ValueError."""
        end = min(at + count, self.size)
        if at >= end:
            return b""
        first = at // 3
        chars = _ascii(
            self._text, self._start + 4 * first, min(self._start + 4 * (end // 3 + 1), len(self._text))
        ).rstrip(b"=")
        chars += b"=" * (-len(chars) % 4)
        return pybase64.b64decode(chars, validate=True)[at - 3 * first : end - 3 * first]

    def problem(self) -> str | None:
        if self._bare and self._chars <= _PATH_CHARS and not self._looks_like_picture():
            return None
        if self._chars == 0:
            return "the data: URI is empty"
        samples = self._samples()
        if any(blank in sample for sample in samples for blank in _BLANKS):
            return None
        for sample in samples:
            body = sample.replace(b"-", b"+").replace(b"_", b"/")
            if not _ALPHABET.match(body):
                return "the data is not base64"
            if body != sample:
                return None  # The URL-safe alphabet: some decoders take it.
        if self._chars % 4:
            return f"the base64 text has a wrong length ({self._chars} characters, no multiple of four)"
        try:
            return _picture_problem(self)
        except ValueError:
            return "the data is not base64"

    def _samples(self) -> list[bytes]:
        text, start, width = self._text, self._start, _SAMPLE_CHARS
        if self._chars <= 3 * width:
            return [_ascii(text, start, len(text))]
        middle = start + self._chars // 2
        # "=" belongs to the end only.
        return [
            _ascii(text, start, start + width).replace(b"=", b"!"),
            _ascii(text, middle, middle + width).replace(b"=", b"!"),
            _ascii(text, len(text) - width, len(text)),
        ]

    def _looks_like_picture(self) -> bool:
        try:
            head = self.read(0, 48)
        except ValueError:
            return False
        return head.startswith((_PNG, b"\xff\xd8\xff", b"GIF8")) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def _picture_problem(data: _Base64) -> str | None:
    head = data.read(0, 128)
    if head.startswith(_PNG):
        return _png_problem(data)
    if head.startswith(b"\xff\xd8"):
        return _jpeg_problem(data)
    if head[:4] == b"RIFF" and (head[8:12] == b"WEBP" or len(head) < 12):
        return _webp_problem(data, head)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "the GIF file is cut off" if data.size < 14 else None
    if head.startswith(b"BM"):
        return "the BMP file is cut off" if data.size < 26 else None
    if head.startswith(_SIGNATURES) or _maybe_unsigned(data, head):
        return None
    return f"the data is no known picture format (it starts with {head[:12].hex()})"


def _maybe_unsigned(data: _Base64, head: bytes) -> bool:
    """Could this be one of the formats that have no signature at the start?"""
    if head[1:4] == b"\0\0\0" and head[0] in (12, 40, 52, 56, 64, 108, 124):  # BMP without its file header
        return True
    if head[4:8] == b"ftyp":  # AVIF, HEIF and their many brands.
        return True
    if head[:1] == b"P" and head[1:2] in b"0123456fFyU7" and len(head) > 2:  # PNM family, XV thumbnails.
        return True
    if head[:1] == b"\x0a" and head[1:2] in (b"\0", b"\2", b"\3", b"\5"):  # PCX
        return True
    if head[4:6] in (b"\x11\xaf", b"\x12\xaf") or head[20:24] == b"GIMP":  # FLI, GBR
        return True
    if b"Image type:" in head or b"Image size" in head or b"*IM" in head or b"\n/* XPM" in head:  # IM
        return True
    if len(head) >= 18 and head[1] in (0, 1) and head[2] in (0, 1, 2, 3, 9, 10, 11):  # TGA
        return head[16] in (1, 8, 15, 16, 24, 32)
    if data.size > 2048 and data.read(2048, 4) == b"PCD_":
        return True
    if len(head) >= 108 and _maybe_spider(head):
        return True
    return head.lstrip()[:7] == b"#define"


def _maybe_spider(head: bytes) -> bool:
    """SPIDER: 27 floats of either byte order, of which several are whole numbers and the fifth is a type."""
    for order in "<>":
        fields = struct.unpack(f"{order}27f", head[:108])
        if fields[4] in (1.0, 3.0, -11.0, -12.0, -21.0, -22.0):
            return True
    return False


def _png_problem(data: _Base64) -> str | None:
    cut = "the PNG file is cut off"
    head = data.read(8, 17)
    if len(head) < 17:
        return cut
    if head[4:8] != b"IHDR":
        return None if head[4:8].isalpha() else "the PNG file has no header chunk"
    width, height = struct.unpack(">II", head[8:16])
    if not width or not height:
        return "the PNG picture has no size"
    if data.read(data.size - len(_PNG_END), len(_PNG_END)) == _PNG_END and data.size > 57:
        return None
    at = 8
    pixels = False
    for _ in range(_MAX_CHUNKS):
        chunk = data.read(at, 8)
        if len(chunk) < 8:
            return None if pixels else cut
        length, kind = struct.unpack(">I4s", chunk)
        if kind == b"IEND":
            return None if pixels else "the PNG file has no pixels"
        if kind == b"IDAT":
            pixels = True
        # Decoders are done before the last bytes of the stream; only a clear gap counts.
        if at + 8 + length > data.size + (16 if pixels else 0):
            return cut if kind in (b"IDAT", b"IHDR", b"PLTE") else None
        at += 12 + length
    return None


def _jpeg_problem(data: _Base64) -> str | None:
    if data.read(2, 1) != b"\xff":
        return "the JPEG file has no marker after its start"
    at = 2
    for _ in range(_MAX_CHUNKS):
        segment = data.read(at, 4)
        if len(segment) < 4:
            return "the JPEG file is cut off"
        fill, marker, length = struct.unpack(">BBH", segment)
        if fill != 0xFF:
            return None  # Stray bytes between segments: decoders look for the next marker.
        if marker == 0xFF:
            at += 1
        elif marker == 0xDA:
            return None if at + 2 + length < data.size else "the JPEG file is cut off"
        elif marker == 0xD9:
            return "the JPEG file ends before its picture"
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            at += 2
        else:
            at += 2 + length
    return None


def _webp_problem(data: _Base64, head: bytes) -> str | None:
    if len(head) < 20:
        return "the WebP file is cut off"
    (length,) = struct.unpack("<I", head[4:8])
    if length + 8 > data.size + 1:
        return "the WebP file is cut off"
    if head[12:16] not in (b"VP8 ", b"VP8L", b"VP8X"):
        return "the WebP file has no picture chunk"
    return None
