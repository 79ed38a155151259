"""Idle connections of one origin, and what has been learnt about how long the server keeps them.

Last in, first out: the connection used most recently is the least likely to have been closed by the server, and
the surplus at the bottom ages out. An idle connection is dropped before the server drops it. The limit starts at
`idle_timeout`, follows a `Keep-Alive: timeout=N` downward, and is cut when a server closes a connection that
had been idle for less. It forgets: one restart of a server, which closes connections of every age, must not
disable reuse for good.

Pure bookkeeping over opaque connections with a `idle_since` and an `alive()`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from .limits import UpstreamLimits

__all__ = ["IdleStack"]


class Poolable(Protocol):
    idle_since: float

    def alive(self, now: float) -> bool: ...


C = TypeVar("C", bound=Poolable)

FRESH = 0.1
"""Seconds; below any idle time that can be learnt."""
SAFETY = 0.8
"""Share of an observed or announced idle time that is still used."""


class IdleStack(Generic[C]):
    """The idle connections of one origin, newest on top."""

    __slots__ = ("_learnt", "_learnt_at", "_limits", "_stack")

    def __init__(self, limits: UpstreamLimits) -> None:
        self._limits = limits
        self._stack: list[C] = []
        self._learnt: float | None = None
        self._learnt_at = 0.0

    def __len__(self) -> int:
        return len(self._stack)

    def __repr__(self) -> str:
        learnt = "" if self._learnt is None else f" learnt={self._learnt:.2f}s"
        return f"<IdleStack {len(self._stack)}{learnt}>"

    def idle_timeout(self, now: float) -> float:
        """Seconds for which a connection may lie idle here."""
        if self._learnt is not None:
            if now - self._learnt_at < self._limits.learn_for:
                return self._learnt
            self._learnt = None
        return self._limits.idle_timeout

    def learn(self, seconds: float, now: float) -> None:
        """The server keeps idle connections for about `seconds` (announced, or seen by its closing one)."""
        usable = max(self._limits.min_idle_timeout, seconds * SAFETY)
        if usable < self.idle_timeout(now):
            self._learnt = usable
            self._learnt_at = now

    def push(self, connection: C, now: float) -> bool:
        """Keep the connection; False when there are enough of them."""
        if len(self._stack) >= self._limits.max_idle:
            return False
        connection.idle_since = now
        self._stack.append(connection)
        return True

    def take_fresh(self, now: float) -> C | None:
        """The newest, if it was used a moment ago: the case of a busy pool, without the questions of `pop`."""
        stack = self._stack
        if stack and now - stack[-1].idle_since < FRESH:
            return stack.pop()
        return None

    def pop(self, now: float) -> tuple[C | None, list[C]]:
        """The best connection to use, or None, and the ones found to be of no use (close them)."""
        stack = self._stack
        if not stack:
            return None, []
        oldest = now - self.idle_timeout(now)
        useless: list[C] = []
        while stack:
            connection = stack.pop()
            if connection.idle_since < oldest:
                useless.append(connection)
                useless.extend(stack)
                stack.clear()
                break
            if connection.alive(now):
                return connection, useless
            useless.append(connection)
        return None, useless

    def discard(self, connection: C) -> bool:
        """Take out one that has died. True if it was here."""
        try:
            self._stack.remove(connection)
        except ValueError:
            return False
        return True

    def expire(self, now: float) -> list[C]:
        """Take out all that have been idle for too long (close them)."""
        oldest = now - self.idle_timeout(now)
        stack = self._stack
        count = 0
        while count < len(stack) and stack[count].idle_since < oldest:
            count += 1
        expired = stack[:count]
        del stack[:count]
        return expired

    def forgettable(self, now: float) -> bool:
        """Nothing here that is worth keeping."""
        return not self._stack and (self._learnt is None or now - self._learnt_at >= self._limits.learn_for)
