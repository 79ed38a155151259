"""The header of a part as a real SGLang encoder sends it: a pickle of SGLang's class, read without running any of it.

The unpickler here knows no classes and no functions: whatever the pickle names becomes an empty shell that swallows its
arguments. So the worst a header can do is to be none.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

__all__ = ["read_sglang_header"]

_MAX_BYTES = 1 << 20


class _Shell:
    """Stands for anything that a pickle names. Its state, if it is given one, is kept as plain attributes."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update((name, value) for name, value in state.items() if isinstance(name, str))

    def append(self, _: Any) -> None: ...
    def extend(self, _: Any) -> None: ...
    def __setitem__(self, _: Any, __: Any) -> None: ...
    def __call__(self, *_: Any, **__: Any) -> _Shell:
        return _Shell()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Shell

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_sglang_header(frame: bytes) -> dict[str, Any]:
    """The facts that parts are put together by: ``req_id``, ``part_idx``, ``num_parts``, ``error_message`` and
    ``error_code`` (None when all is well). Raises ValueError for anything else."""
    if len(frame) > _MAX_BYTES:
        raise ValueError(f"a header of {len(frame)} bytes")
    try:
        found = vars(_Reader(io.BytesIO(frame)).load())
        error = found.get("error_msg")
        code = found.get("error_code")
        return {
            "req_id": str(found["req_id"]),
            "part_idx": int(found["part_idx"]),
            "num_parts": int(found["num_parts"]),
            "error_message": None if error is None else str(error),
            "error_code": code if isinstance(code, int) else None,
        }
    except Exception as problem:
        raise ValueError(f"not a part header of SGLang: {type(problem).__name__}: {problem}") from None
