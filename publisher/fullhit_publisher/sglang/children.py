"""What a spawned encoder process runs first. SGLang starts those by pickled function, without loading plugins."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

__all__ = ["RANK", "launch_dp_worker"]

RANK: Final = "FULLHIT_DP_RANK"
"""Which of the encoder's processes this one is, in its environment."""

_log = logging.getLogger("fullhit_publisher")


def launch_dp_worker(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's function of this name, which it calls."""
    from sglang.srt.disaggregation.encoder import runtime

    original = runtime.launch_dp_worker  # in this process nobody has replaced it yet
    try:
        from .hooks import activate_encoder

        rank = kwargs["dp_rank"] if "dp_rank" in kwargs else args[1]
        os.environ[RANK] = str(int(rank))
        activate_encoder()
    except Exception:
        _log.exception("the embedding cache stays off in this process")
    original(*args, **kwargs)
