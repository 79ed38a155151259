"""The Dynamo frontends: which one gets the next request. Pure, clock injected.

Health is passive. A frontend that could not be reached, or that broke an answer off, is left alone for a moment, which
doubles from failure to failure; the first good answer clears it. When all are in that state the one that may come back
soonest is tried all the same: a refused connection costs nothing, and a client gets an answer or a clear error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fullhit.http.wire import Origin

__all__ = ["Frontend", "Frontends"]

_FIRST_HOLD: Final = 0.5
_MAX_HOLD: Final = 10.0


@dataclass(slots=True, eq=False)
class Frontend:
    """One of them. ``outstanding``: requests whose answers have not ended. ``held_until``: the clock's seconds."""

    url: str
    origin: Origin
    outstanding: int = 0
    failures: int = 0
    held_until: float = 0.0
    last_error: str = ""
    turn: int = 0


class Frontends:
    """`enter` one for a request, `leave` it once; in between tell `failed` or `answered`."""

    def __init__(self, origins: Sequence[tuple[str, Origin]], clock: Callable[[], float]) -> None:
        self._all = [Frontend(url, origin) for url, origin in origins]
        self._clock = clock
        self._turn = 0

    def enter(self, tried: Collection[Frontend] = ()) -> Frontend | None:
        """The least busy of those not failing, the longest unused among equals; None when all were tried."""
        left = [frontend for frontend in self._all if frontend not in tried]
        if not left:
            return None
        now = self._clock()
        chosen = min(left, key=lambda f: (max(f.held_until - now, 0.0), f.outstanding, f.turn))
        self._turn += 1
        chosen.turn = self._turn
        chosen.outstanding += 1
        return chosen

    def leave(self, frontend: Frontend) -> None:
        """Its answer has ended, in whatever way."""
        frontend.outstanding -= 1

    def failed(self, frontend: Frontend, error: str) -> bool:
        """It cannot be reached or does not speak HTTP. True when it was well before."""
        frontend.failures += 1
        frontend.last_error = error
        frontend.held_until = self._clock() + min(_FIRST_HOLD * 2 ** min(frontend.failures - 1, 10), _MAX_HOLD)
        return frontend.failures == 1

    def answered(self, frontend: Frontend) -> bool:
        """It has answered, whatever it said. True when it was failing before."""
        if not frontend.failures:
            return False
        frontend.failures = 0
        frontend.held_until = 0.0
        frontend.last_error = ""
        return True

    def status(self) -> list[dict[str, Any]]:
        """JSON-ready, one row each."""
        return [
            {
                "url": frontend.url,
                "up": not frontend.failures,
                "outstanding": frontend.outstanding,
                "error": frontend.last_error or None,
            }
            for frontend in self._all
        ]

    @property
    def up(self) -> int:
        """How many of them are not failing."""
        return sum(not frontend.failures for frontend in self._all)

    @property
    def outstanding(self) -> int:
        """Requests under way at all of them."""
        return sum(frontend.outstanding for frontend in self._all)

    def __len__(self) -> int:
        return len(self._all)
