"""How many requests may be sent a second time. Pure.

A retry hides one worker's failure. Where most workers fail, retries only add load to the rest, so they are a share of
the requests, with a little in hand for quiet times.
"""

from __future__ import annotations

__all__ = ["RetryBudget"]


class RetryBudget:
    """Each request earns ``share`` of a retry, up to ``most``; there is one to begin with for each of ``most``.

    >>> budget = RetryBudget(0.0, 1)
    >>> budget.spend(), budget.spend()
    (True, False)
    """

    __slots__ = ("_left", "_most", "_share", "refused")

    def __init__(self, share: float, most: float = 100.0) -> None:
        self._share = share
        self._most = most
        self._left = most
        self.refused = 0

    def earn(self) -> None:
        """A request came in."""
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Whether one more retry is allowed; it is then taken as done."""
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        return True
