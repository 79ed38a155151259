"""One account for the memory of all request bodies.

Memory is charged as bytes really arrive, not by what a Content-Length promises: a client that announces
512 MiB and sends 1 KB costs 1 KB. When the account is full, connections stop reading; that alone could dead-lock
(all the memory held by half-read bodies that wait for each other), so one holder may always overdraw: the
first that needs to. It goes on, its request is served, its memory comes back, and the next one may overdraw.
The true ceiling is therefore `limit` plus one body.

Pure bookkeeping: who must pause or resume is returned, doing it is the caller's business.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BudgetHolder", "MemoryBudget"]

WAKE_STEP = 1024 * 1024
"""Room assumed for each holder that is woken, so that one freed byte does not wake hundreds."""


class BudgetHolder:
    """Someone with memory on the account. Subclass it; `charged` is in bytes."""

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = 0


class MemoryBudget:
    """`charge` as bytes arrive, `release` when they are dropped."""

    __slots__ = ("_overdraft", "_waiting", "limit", "used")

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError("max_buffered_bytes must be positive")
        self.limit = limit
        self.used = 0
        self._overdraft: BudgetHolder | None = None
        self._waiting: OrderedDict[BudgetHolder, None] = OrderedDict()

    def __repr__(self) -> str:
        overdraft = "yes" if self._overdraft is not None else "no"
        return f"<MemoryBudget {self.used}/{self.limit} waiting={len(self._waiting)} overdraft={overdraft}>"

    @property
    def waiting(self) -> int:
        """How many holders are paused."""
        return len(self._waiting)

    def charge(self, holder: BudgetHolder, size: int) -> bool:
        """Book `size` bytes that are already in memory. False: read no more until woken."""
        self.used += size
        holder.charged += size
        if self.used <= self.limit or not size:  # only those who hold memory may wait: they are sure to release
            return True
        if self._overdraft is None:
            self._overdraft = holder
        if self._overdraft is holder:
            return True
        self._waiting[holder] = None
        return False

    def forgive_wait(self, holder: BudgetHolder) -> None:
        """The holder has all it wanted (or gave up): do not wake it."""
        self._waiting.pop(holder, None)

    def release(self, holder: BudgetHolder) -> list[BudgetHolder]:
        """Give back all of the holder's memory. Returns those who may read on, in order of their waiting."""
        self.used -= holder.charged
        holder.charged = 0
        self._waiting.pop(holder, None)
        if self._overdraft is holder:
            self._overdraft = None
        if not self._waiting:
            return []
        woken: list[BudgetHolder] = []
        room = self.limit - self.used
        while self._waiting:
            if room > 0:
                room -= WAKE_STEP
                woken.append(self._waiting.popitem(last=False)[0])
            elif self._overdraft is None and not woken:
                self._overdraft = self._waiting.popitem(last=False)[0]
                woken.append(self._overdraft)
            else:
                break
        return woken
