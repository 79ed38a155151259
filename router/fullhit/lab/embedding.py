"""What a mock encoder delivers: embeddings that can be checked, in two frames.

SGLang pushes two ZMQ frames per part: its own pickled class, then the raw tensor. Pickle of a foreign class is
nothing a mock should speak, and nothing that Fullhit ever sees (embeddings bypass it), so frame 1 is a msgpack map
here with the facts that the receiving side aggregates by. Frame 2 is raw bytes, as there.

The bytes of an embedding follow from the bytes of its picture alone. So a receiver that knows the pictures it
sent can tell whether every embedding is right and in prompt order, whichever encoder made it.
"""

from __future__ import annotations

import hashlib

import msgspec

from fullhit.lab.sglang_header import read_sglang_header

__all__ = ["COLUMNS", "PART_MARK", "PartHeader", "base_request_id", "decode_header", "mock_embedding"]

# Between a request's id and its part number, as SGLang builds part ids.
PART_MARK = "_local_part_"

# Width of a mock embedding row; 512 two-byte numbers make a row of one KiB, so kilobytes and rows are the same.
COLUMNS = 512
ROW_BYTES = COLUMNS * 2

_PICKLE = b"\x80"  # as a map of this size never begins in msgpack


class PartHeader(msgspec.Struct, omit_defaults=False, frozen=True):
    """Frame 1 of a part. ``shape`` is rows, columns of the whole part; ``error_message`` set = the part failed."""

    req_id: str
    part_idx: int
    num_parts: int
    modality: str = "IMAGE"
    shape: tuple[int, int] = (0, COLUMNS)
    dtype: str = "float16"
    item_rows: tuple[int, ...] = ()
    error_message: str | None = None
    error_code: int | None = None
    mock: bool = True

    def frames(self, payload: bytes = b"") -> list[bytes]:
        """The two frames as they go over the socket."""
        return [msgspec.msgpack.encode(self), payload]


def decode_header(frame: bytes) -> PartHeader:
    """Frame 1 back into a header, a mock encoder's or a real one's; ValueError when it is anything else."""
    if frame[:1] == _PICKLE:
        return PartHeader(**read_sglang_header(frame), mock=False)
    try:
        return msgspec.msgpack.decode(frame, type=PartHeader)
    except msgspec.DecodeError as problem:
        raise ValueError(f"not a part header of a mock encoder: {problem}") from None


def mock_embedding(content: bytes, kilobytes: int) -> bytes:
    """The embedding of a media file: ``kilobytes`` KiB which depend on nothing but its bytes."""
    return hashlib.shake_128(hashlib.sha256(content).digest()).digest(kilobytes * ROW_BYTES)


def base_request_id(part_id: str) -> str:
    """``<rid>`` of ``<rid>_local_part_<i>``; an id without the mark is its own base (first wire generation)."""
    return part_id.rpartition(PART_MARK)[0] or part_id
