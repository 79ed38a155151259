"""Headers of real encoders, read without running them."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.lab.embedding import PartHeader, decode_header
from fullhit.lab.sglang_header import read_sglang_header


class EmbeddingData:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("echo caught > /dev/null; exit 3",)


def test_what_a_part_is_put_together_by_is_read() -> None:
    frame = pickle.dumps(EmbeddingData(req_id="r_local_part_1", part_idx=1, num_parts=2, grid_dim=[[1, 2, 3]],
                                       error_msg=None, error_code=None, modality=Trap))  # fmt: skip
    header = decode_header(frame)
    assert (header.req_id, header.part_idx, header.num_parts, header.mock) == ("r_local_part_1", 1, 2, False)
    assert header.error_message is None
    failed = pickle.dumps(EmbeddingData(req_id="r", part_idx=0, num_parts=1, error_msg="no", error_code=400))
    assert (decode_header(failed).error_message, decode_header(failed).error_code) == ("no", 400)
    mock = PartHeader("r", 0, 1)
    assert decode_header(mock.frames()[0]) == mock


def test_nothing_in_a_header_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    frame = pickle.dumps(EmbeddingData(req_id="r", part_idx=0, num_parts=1, trap=Trap()))
    monkeypatch.setattr(os, "system", ran.append)
    assert read_sglang_header(frame)["req_id"] == "r"
    assert not ran


@given(st.binary(max_size=200))
def test_anything_else_is_none(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a part header"):
        read_sglang_header(data)
