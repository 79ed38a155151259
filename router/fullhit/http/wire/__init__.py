"""HTTP/1.x at protocol level: the listener, the upstream client, and nothing about routing.

Built for one purpose: to pass requests with bodies of any size, and streamed answers, through a Python process at a
small multiple of what the kernel charges. `docs/architecture.md` says why this is not a framework.
"""

from .budget import MemoryBudget
from .errors import (
    BadReply,
    ClientFault,
    ConnectFailed,
    LocalFault,
    LostAfterSend,
    NotAccepted,
    PeerGone,
    UpstreamError,
    UpstreamTimeout,
    WireError,
)
from .heads import HeaderBlock, Headers, end_to_end, header_block
from .limits import ListenerLimits, Origin, Timeouts, UpstreamLimits
from .listener import DrainReport, ErrorFormat, HttpListener, openai_error
from .reply import UpstreamResponse
from .request import Handler, Request, Responder
from .upstream import UpstreamClient

__all__ = [
    "BadReply",
    "ClientFault",
    "ConnectFailed",
    "DrainReport",
    "ErrorFormat",
    "Handler",
    "HeaderBlock",
    "Headers",
    "HttpListener",
    "ListenerLimits",
    "LocalFault",
    "LostAfterSend",
    "MemoryBudget",
    "NotAccepted",
    "Origin",
    "PeerGone",
    "Request",
    "Responder",
    "Timeouts",
    "UpstreamClient",
    "UpstreamError",
    "UpstreamLimits",
    "UpstreamResponse",
    "UpstreamTimeout",
    "WireError",
    "end_to_end",
    "header_block",
    "openai_error",
]
