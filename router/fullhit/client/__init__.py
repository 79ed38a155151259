"""A small client of the decision API, for front ends that forward requests themselves.

>>> with Client("http://127.0.0.1:8781") as router:                             # doctest: +SKIP
...     with router.select(items=[url]) as choice:
...         forward(request, choice.url)

``http://`` and ``https://`` go to the admin listener and need nothing installed (the asynchronous client uses aiohttp,
which the router needs anyway); ``grpc://`` and ``grpcs://`` need the extra ``fullhit[grpc]``.
"""

from .asynchronous import AsyncChoice, AsyncClient
from .errors import ClientError, NoWorker, Refused, Unreachable
from .synchronous import Choice, Client
from .types import Candidate, ClientOptions, Explanation, WorkerInfo

__all__ = [
    "AsyncChoice",
    "AsyncClient",
    "Candidate",
    "Choice",
    "Client",
    "ClientError",
    "ClientOptions",
    "Explanation",
    "NoWorker",
    "Refused",
    "Unreachable",
    "WorkerInfo",
]
