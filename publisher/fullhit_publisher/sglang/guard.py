"""A failed encode is the failure of one request, not the end of a language server.

In SGLang 0.5.23 with ``zmq_to_scheduler`` a request whose encode failed is aborted by a request object made for the
purpose. Where the prompt is text, that object has no input ids, and what writes the answer counts them: the scheduler
ends, and the whole server with it. Here the object gets an empty list of ids, and the client the error it was meant to
get. Nothing else is touched; where the object has ids, neither is it.
"""

from __future__ import annotations

import logging
from array import array
from typing import Any

__all__ = ["RECEIVER", "activate_guard", "with_ids"]

_log = logging.getLogger("fullhit_publisher")

RECEIVER = "sglang.srt.disaggregation.encoder.receiver.MMReceiverBase"


def activate_guard() -> bool:
    """Hang it into this process. False, said in the log, when the place is not there."""
    try:
        from sglang.srt.disaggregation.encoder.receiver import MMReceiverBase
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.warning("failed encodes are not guarded against: SGLang has no %s", error.name or error)
        return False
    if not hasattr(MMReceiverBase, "create_req"):
        _log.warning("failed encodes are not guarded against: SGLang's receiver has no create_req")
        return False
    HookRegistry.register(f"{RECEIVER}.create_req", with_ids, HookType.AFTER)
    return True


def with_ids(request: Any, *_: Any) -> Any:
    """The aborted request, with an empty list where it has no input ids."""
    if getattr(request, "origin_input_ids", ()) is None:
        request.origin_input_ids = array("q")
        if getattr(request, "origin_input_ids_unpadded", ()) is None:
            request.origin_input_ids_unpadded = array("q")
    return request
