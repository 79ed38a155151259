"""The look at inline pictures, held against Pillow: it may miss a bad picture, never refuse a good one."""

from __future__ import annotations

import base64
import io
import random
import struct
import warnings
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fullhit.http.encoder.imagecheck import inspect_image

FORMATS = [
    "PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "AVIF", "JPEG2000", "PPM", "TGA", "PCX", "SGI",
    "DDS", "EPS", "ICNS", "IM", "MSP", "SPIDER", "XBM", "QOI", "MPO", "DIB",
]  # fmt: skip
MODES = {"MSP": "1", "XBM": "1", "SPIDER": "F"}


def picture(size: tuple[int, int] = (40, 30), seed: int = 1) -> Image.Image:
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(size[0] * size[1] * 3))


def encoded(kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some formats are deprecated.
        picture().convert(MODES.get(kind, "RGB")).save(out, kind, **options)
    return out.getvalue()


def uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def pillow_reads(data: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data))
            image.convert("RGB")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_that_pillow_writes_passes(kind: str) -> None:
    try:
        data = encoded(kind)
    except (KeyError, OSError, ValueError) as error:
        pytest.skip(f"this Pillow does not write {kind}: {error}")
    assert inspect_image(uri(data)) is None
    assert inspect_image(base64.b64encode(data).decode()) is None
    assert inspect_image(memoryview(uri(data).encode())) is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO", "AVIF", "TGA"])
def test_a_cut_picture_is_refused_only_if_pillow_refuses_it(kind: str) -> None:
    data = encoded(kind)
    step = max(1, len(data) // 150)
    cuts = sorted({*range(0, len(data), step), *range(len(data) - 40, len(data)), *range(60)})
    refused = 0
    for cut in cuts:
        problem = inspect_image(uri(data[:cut]))
        if problem is not None:
            refused += 1
            assert not pillow_reads(data[:cut]), f"{kind} of {cut}/{len(data)} bytes: {problem}"
    if kind in ("PNG", "WEBP"):
        assert refused > 0.8 * len(cuts)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_a_cut_png_of_many_chunks_is_found_by_its_chunk_headers(chunk: int) -> None:
    data = rechunked(encoded("PNG"), chunk)
    assert pillow_reads(data)
    assert inspect_image(uri(data)) is None
    cut = data[: len(data) // 2]
    problem = inspect_image(uri(cut))
    if chunk >= 64:
        assert problem == "the PNG file is cut off" or pillow_reads(cut)
    if problem is not None:
        assert not pillow_reads(cut)


def rechunked(png: bytes, width: int) -> bytes:
    """The same PNG with its pixel data in many small chunks."""
    out, at = [png[:8]], 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + length]
        parts = [data[i : i + width] for i in range(0, length, width)] if kind == b"IDAT" else [data]
        out += [struct.pack(">I", len(p)) + kind + p + struct.pack(">I", zlib.crc32(kind + p)) for p in parts]
        at += 12 + length
    return b"".join(out)


@given(st.binary(min_size=0, max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_only_if_pillow_refuses_them(data: bytes) -> None:
    if inspect_image(uri(data)) is not None:
        assert not pillow_reads(data)


@given(
    st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA"]),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_picture_is_refused_only_if_pillow_refuses_it(kind: str, data: st.DataObject) -> None:
    good = bytearray(encoded(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(good), 64) - 1))
        good[at] = data.draw(st.integers(0, 255))
    if inspect_image(uri(bytes(good))) is not None:
        assert not pillow_reads(bytes(good))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64", "no comma"),
        ("data:", "no comma"),
        (uri(b"hello world, this is text"), "no known picture format"),
        (uri(b"<!DOCTYPE html><html><body>404 not found</body></html>"), "no known picture format"),
        (uri(b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "image/svg+xml"), "no known picture format"),
        (uri(b"%PDF-1.7 and so on and so on and so on"), "no known picture format"),
        (uri(b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0"), "no known picture format"),
        (uri(b"\x89PNG\r\n\x1a\n"), "cut off"),
        (uri(b"\xff\xd8 no jpeg at all, not at all"), "no marker"),
        (uri(b"\xff\xd8\xff\xe0\x00\x10JFIF"), "cut off"),
        ("data:image/png;base64,iVBORw0KGgoAAAANSU*JUNK*", "not base64"),
        ("data:image/png;base64,iVBORw0KGgoAAAANSUhEU", "wrong length"),
        ("data:image/png;base64,äöü€", "not base64"),
    ],
)
def test_what_people_send_by_mistake_is_named(text: str, words: str) -> None:
    assert words in (inspect_image(text) or "")
    assert words in (inspect_image(memoryview(text.encode())) or "")


@pytest.mark.parametrize(
    "text",
    [
        "http://host/picture.png",
        "https://host/?data:image/png;base64,",
        "file:///tmp/cat.png",
        "/srv/pictures/cat",
        "pictures/cat",
        "",
        "data:image/png,%89PNG",
        "data:image/png;base64,iVBORw0K\nGgoAAAANSU",
        "data:image/png;base64,iVBORw0K%0AGgoAAAANSU",
    ],
)
def test_what_is_not_inline_base64_is_not_judged(text: str) -> None:
    assert inspect_image(text) is None


def test_long_bare_base64_of_no_picture_is_refused_and_a_short_one_may_be_a_path() -> None:
    long = base64.b64encode(b"no picture " * 600).decode()
    assert "no known picture format" in (inspect_image(long) or "")
    assert inspect_image(base64.b64encode(b"no picture").decode()) is None
    short_png = base64.b64encode(encoded("PNG")[:90]).decode()
    assert "cut off" in (inspect_image(short_png) or "")


def test_damage_in_the_middle_of_a_long_text_is_seen_where_it_is_sampled() -> None:
    text = uri(encoded("PNG"))
    middle = len("data:image/png;base64,") + (len(text) - 22) // 2
    assert inspect_image(text[: middle + 8] + "*" + text[middle + 9 :]) == "the data is not base64"
