"""A bound on what a JSON text may unfold to, judged before it is parsed.

A parser makes an object of each value, and ``[[],[],...]`` has one in three bytes: a body of 60 MB becomes 1.6 GB and
holds the interpreter for six seconds. What requests are really made of, pictures as long strings, has a few hundred.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_VALUES", "too_many_values"]

MAX_VALUES: Final = 200_000
"""A tenth of a second's parsing at worst."""


def too_many_values(text: bytes | bytearray, most: int = MAX_VALUES) -> bool:
    """Whether the text may hold more than ``most`` values.

    Each value but the first stands behind a comma, or is the first one within brackets. What stands inside of strings
    is counted too: only prose of some ten megabytes has so many commas.
    """
    if len(text) <= most:
        return False
    return text.count(b",") + text.count(b"[") + text.count(b"{") > most
