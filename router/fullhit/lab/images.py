"""Pictures for the lab: real JPEGs, drawn on the spot, the same for the same number.

A benchmark of a picture cache needs pictures that are really different files (another key each), that a real
decoder accepts, and of a size that a chat client would send. Shipping hundreds of files for that is silly, so
they are drawn: a tinted gradient, some shapes and patches of grain. Grain is what gives a JPEG its bytes: without
it every picture would shrink to a few kilobytes.

Pillow is needed (extra ``lab``) and imported only when a picture is really drawn or decoded, so that
``fullhit --help`` works without it.
"""

from __future__ import annotations

import base64
import binascii
import io
import random
from dataclasses import dataclass

__all__ = [
    "DEFAULT_SIZE",
    "LabExtraMissing",
    "PictureSize",
    "Undecodable",
    "data_uri",
    "decode_picture",
    "draw_jpeg",
    "from_base64",
]

# Decoding a picture may not cost more than this many pixels; a lab encoder is also exposed to fuzzed input.
MAX_PIXELS = 64_000_000


class LabExtraMissing(ModuleNotFoundError):
    """An optional package of the lab is not installed; the text says how to get it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed; lab commands need it: pip install 'fullhit[lab]'", name=package)


class Undecodable(ValueError):
    """The bytes are no picture that Pillow can decode. The client's fault."""


@dataclass(frozen=True, slots=True)
class PictureSize:
    """Width and height in pixels; ``PictureSize.parse("1200x540")``."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> PictureSize:
        """Read ``WIDTHxHEIGHT``; ValueError for anything else or a side outside 16..10000."""
        width, mark, height = text.lower().partition("x")
        if not mark or not width.isdecimal() or not height.isdecimal():
            raise ValueError(f"picture size must look like 1200x540, not {text!r}")
        size = cls(int(width), int(height))
        if not (16 <= size.width <= 10_000 and 16 <= size.height <= 10_000):
            raise ValueError(f"picture sides must be 16 to 10000 pixels, not {text!r}")
        return size

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


# Half the sides of the published benchmark's 2400x1080, so that two slow cores are not busy with base64.
DEFAULT_SIZE = PictureSize(1200, 540)


def draw_jpeg(number: int, size: PictureSize = DEFAULT_SIZE, *, quality: int = 80) -> bytes:
    """One JPEG file as bytes; the same ``number``, size and Pillow give the same bytes.

    Tens of kilobytes at 1200x540. Raises LabExtraMissing without Pillow.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise LabExtraMissing("Pillow") from None

    rng = random.Random(f"fullhit-picture-{number}")
    width, height = size.width, size.height
    shade = Image.linear_gradient("L").resize((width, height), Image.Resampling.NEAREST)
    low, high = _colour(rng), _colour(rng)
    bands = [shade.point([a + (b - a) * step // 255 for step in range(256)]) for a, b in zip(low, high, strict=True)]
    picture = Image.merge("RGB", bands)
    grain_size = (width // 6, height // 4)
    for _ in range(2):
        grain = Image.frombytes("L", grain_size, rng.randbytes(grain_size[0] * grain_size[1]))
        picture.paste(grain.convert("RGB"), (rng.randrange(width), rng.randrange(height)))
    draw = ImageDraw.Draw(picture)
    for _ in range(12):
        left, top = rng.randrange(width), rng.randrange(height)
        right, bottom = left + rng.randrange(1, width // 3), top + rng.randrange(1, height // 3)
        paint = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        paint(
            (left, top, right, bottom),
            outline=_colour(rng),
            width=3,
            fill=_colour(rng) if rng.random() < 0.4 else None,
        )
    draw.text((8, 8), f"picture {number}", fill="white")
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()


def data_uri(picture: bytes, mime: str = "image/jpeg") -> str:
    """The picture as a ``data:`` URI, as chat clients put it into ``image_url``."""
    return f"data:{mime};base64,{base64.b64encode(picture).decode('ascii')}"


def from_base64(text: str) -> bytes:
    """Bytes of a ``data:...;base64,`` URI or of bare base64; Undecodable when it is neither."""
    if text[:5].lower() == "data:":
        head, mark, text = text.partition(",")
        if not mark or not head.lower().endswith(";base64"):
            raise Undecodable("a data: URI must carry ';base64,'")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise Undecodable(f"invalid base64: {problem}") from None


def decode_picture(content: bytes) -> tuple[int, int]:
    """Decode every pixel, as an encoder's preprocessing must; gives (width, height), raises Undecodable."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise LabExtraMissing("Pillow") from None

    try:
        with Image.open(io.BytesIO(content)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise Undecodable(f"picture of {picture.width}x{picture.height} is over {MAX_PIXELS} pixels")
            picture.load()
            return picture.width, picture.height
    except Undecodable:
        raise
    except UnidentifiedImageError:
        raise Undecodable("cannot decode image: no known image format") from None
    except Exception as problem:  # Pillow's decoders raise nearly anything on broken input
        raise Undecodable(f"cannot decode image: {problem}") from None


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(30, 226), rng.randrange(30, 226), rng.randrange(30, 226)
