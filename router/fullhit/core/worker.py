"""A worker as the core sees it, and the ticket that holds one of its in-flight slots.

Ownership is by object, never by id: a ticket points at the `Worker` it was taken from. When that worker is
removed and another one is added under the same id, old tickets count down the old object, which nobody reads
any more, and the new worker's counters stay its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from .types import WorkerSpec

if TYPE_CHECKING:
    from .load import Group

__all__ = ["Ticket", "Worker"]


_NOWHERE = array("d")


class Worker:
    """One member of a pool. Read freely; change it only through `Pool`.

    `inflight`   requests sent to it and not finished, full hits included
    `encoding`   those of them that really encode (all but full and predicted hits)
    `ready`      fit for traffic, as far as the fleet knows; False until somebody says so
    `doubtful`   its entries may be stale: good for tie-breaks, not for a full hit
    `truncated`  a cap kept some of its keys out: what is indexed is true but not all, and its digest says nothing
    `publishing` its entries come from its own events (otherwise they are our prediction)
    """

    __slots__ = (
        "__weakref__",
        "bit",
        "device",
        "device_class",
        "doubtful",
        "draining",
        "encoding",
        "group",
        "id",
        "inflight",
        "key_count",
        "labels",
        "level",
        "load_key",
        "max_inflight",
        "places",
        "present",
        "publishing",
        "ready",
        "slot",
        "stamp",
        "truncated",
        "url",
        "weight",
    )

    def __init__(self, spec: WorkerSpec, device_class: str, slot: int) -> None:
        self.id = spec.id
        self.url = spec.url
        self.device = spec.device
        self.device_class = device_class
        self.weight = spec.weight
        self.max_inflight = spec.max_inflight
        self.labels: Mapping[str, str] = dict(spec.labels)
        self.slot = slot  # place in the index; changes when a snapshot is swapped in
        self.bit = 1 << slot  # 0 once removed
        self.inflight = 0
        self.encoding = 0
        self.key_count = 0
        self.ready = False
        self.draining = False
        self.doubtful = False
        self.truncated = False
        self.publishing = False
        self.present = True
        self.group: Group | None = None  # the load group it sits in; None = not eligible
        self.level = 0  # where the group has filed it
        self.stamp = 0  # when it came to its present load level, in moves of the group
        self.places = _NOWHERE  # its points on the ring
        self.load_key: tuple[float, int] = (0.0, 0)

    @property
    def fit(self) -> bool:
        """Ready and not draining; it may still be at its in-flight limit."""
        return self.present and self.ready and not self.draining

    @property
    def busy(self) -> bool:
        """At its in-flight limit."""
        return self.max_inflight is not None and self.inflight >= self.max_inflight

    @property
    def eligible(self) -> bool:
        """May be chosen now."""
        return self.fit and not self.busy

    def __repr__(self) -> str:
        flags = [name for name in ("ready", "draining", "doubtful", "truncated", "publishing") if getattr(self, name)]
        if not self.present:
            flags.append("removed")
        return (
            f"<Worker {self.id} {self.device} inflight={self.inflight} encoding={self.encoding} "
            f"keys={self.key_count} [{' '.join(flags)}]>"
        )


class TicketOwner(Protocol):
    def give_back(self, ticket: Ticket) -> None: ...
    def encoding_over(self, ticket: Ticket) -> bool: ...


class Ticket:
    """One in-flight slot of one worker. `release()` it on every path; a second release does nothing.

    >>> with decision.ticket:            # doctest: +SKIP
    ...     forward(request)

    Only a pool makes tickets; `encoding` says whether the request counts as one that really encodes.
    """

    __slots__ = ("_owner", "encoding", "worker")

    # No __init__: tickets are made on the hot path, and a Python constructor would double their price.
    worker: Worker
    encoding: bool
    _owner: TicketOwner | None

    @property
    def released(self) -> bool:
        return self._owner is None

    def release(self) -> bool:
        """Give the slot back; True the first time, False ever after."""
        owner = self._owner
        if owner is None:
            return False
        self._owner = None
        owner.give_back(self)
        return True

    def encoded(self) -> bool:
        """The encoder's own work is done, though the request goes on: it keeps its slot, but counts no longer as one
        that encodes. True when that changed anything: not after the first time, a release, or a hit."""
        owner = self._owner
        return owner is not None and self.encoding and owner.encoding_over(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Ticket {self.worker.id}{' encoding' if self.encoding else ''}{' released' if self.released else ''}>"
