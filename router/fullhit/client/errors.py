"""What can go wrong, by who is at fault.

::

    ClientError
    ├── Unreachable     no answer: the router is away, or the time was over; repeating was tried
    ├── NoWorker        nobody can take the request now (retryable) or there are no workers at all
    └── Refused         the router understood and said no: the caller's mistake, a missing key, too many leases
"""

from __future__ import annotations

__all__ = ["ClientError", "NoWorker", "Refused", "Unreachable", "error_for"]

_NO_WORKER = frozenset({"empty_pool", "all_busy", "all_down", "all_excluded"})


class ClientError(Exception):
    """Base of all. ``code`` is the router's own (``all_busy``, ``invalid_request`` ...), or ``unreachable``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(ClientError):
    """No usable answer came in time."""

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__("unreachable", message)
        self.sent = sent


class NoWorker(ClientError):
    """Nobody can take the request."""

    @property
    def retryable(self) -> bool:
        """Waiting may help: there are workers."""
        return self.code != "empty_pool"


class Refused(ClientError):
    """Asking again the same way will not help."""


def error_for(code: str, message: str) -> ClientError:
    """The error that belongs to a code of the router."""
    if code == "leaving":
        return Unreachable(message)  # this router is stopping; the next one at this address may answer
    return NoWorker(code, message) if code in _NO_WORKER else Refused(code, message)
