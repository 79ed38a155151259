"""Log-probabilities of the prompt: only the prefill worker of a pair knows them, and the client gets the decode's word.

SGLang's own balancer puts ``meta_info.input_token_logprobs`` of the prefill before that of the decode, in each chunk of
a stream too (``sglang_router/mini_lb.py``). The answer is parsed for that and written anew; it is the only one that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["LogprobStream", "merged", "prompt_logprobs"]

_FIELD: Final = "input_token_logprobs"
_MAX_LINE: Final = 64 << 20
_FAULTS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def prompt_logprobs(prefill: bytes) -> list[list[Any]]:
    """What a prefill's answer says: a list for each sequence; empty where it says nothing. A stream's first event."""
    for line in prefill.splitlines() if prefill.lstrip().startswith(b"data:") else [prefill]:
        text = line.strip().removeprefix(b"data:").strip()
        if not text or text == b"[DONE]":
            continue
        try:
            answer = msgspec.json.decode(text)
        except _FAULTS:
            return []
        return [_found(one) for one in (answer if isinstance(answer, list) else [answer])]
    return []


def _found(answer: object) -> list[Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    found = meta.get(_FIELD) if isinstance(meta, dict) else None
    return found if isinstance(found, list) else []


def merged(decode: bytes, prompt: list[list[Any]]) -> bytes:
    """The decode's answer with the prompt's log-probabilities before its own; as it was where it cannot be read."""
    try:
        answer = msgspec.json.decode(decode)
    except _FAULTS:
        return decode
    rows = answer if isinstance(answer, list) else [answer]
    for row, (place, found) in zip(rows, enumerate(prompt), strict=False):
        if isinstance(row, dict) and isinstance(row.get("meta_info"), dict):
            index = row.get("index", place)
            mine = prompt[index] if isinstance(rows, list) and isinstance(index, int) and index < len(prompt) else found
            row["meta_info"][_FIELD] = mine + _found(row)
    return msgspec.json.encode(answer)


class LogprobStream:
    """The same for a stream of events, cut anywhere: feed it the payload, get what may be passed on."""

    def __init__(self, prompt: list[list[Any]]) -> None:
        self._prompt = prompt
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Whole lines, those with an answer in them written anew. Raises ValueError for an endless line."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError(f"a line of over {_MAX_LINE} bytes")
        return b"".join(self._line(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """What is left."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        text = line.strip()
        if not text.startswith(b"data:") or text == b"data: [DONE]":
            return line
        answer = self._event(text[5:])
        return line if answer is None else b"data: " + answer

    def _event(self, text: bytes) -> bytes | None:
        try:
            answer = msgspec.json.decode(text)
        except _FAULTS:
            return None
        if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), dict):
            return None
        index = answer.get("index", 0)
        prompt = self._prompt[index] if isinstance(index, int) and 0 <= index < len(self._prompt) else []
        answer["meta_info"][_FIELD] = prompt + _found(answer)
        return msgspec.json.encode(answer)
