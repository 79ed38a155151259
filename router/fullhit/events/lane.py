"""One worker's lane: its messages in order, its stream, and the effects carried out on the pool.

Order is kept per worker even when work is put off: a message that asks for much work is done in slices, and what
arrives meanwhile waits behind it, as the bytes it came in. So a heartbeat's digest is compared when everything before
it has been applied, never in between.

A lane belongs to one ``Worker`` object. When that worker has left the pool, or another one has come under the same
id, nothing this lane still has to do touches the index (case A2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from fullhit.core import Fill, Pool, Worker
from fullhit_publisher.keys import Key

from . import effects as fx
from .effects import Effect
from .keybatch import KeyBatch
from .messages import Received
from .stream import WorkerStream

__all__ = ["Backlog", "Lane", "PoolEntries", "Promised", "Waiting"]

Promised = Callable[[str, str, Sequence[Key]], bool]
"""Whether a request was sent to this worker of this pool lately, as a full hit on one of these keys."""

Waiting = tuple[bytes, Received | None]
"""A message put off: its bytes, and what they say if that was read already."""


class PoolEntries:
    """What the pool holds of one worker, as the stream asks for it."""

    __slots__ = ("_id", "_pool", "_promised", "_worker")

    def __init__(self, pool: Pool, worker: Worker, promised: Promised) -> None:
        self._promised = promised
        self._pool = pool
        self._worker = worker
        self._id = worker.id

    def digest(self) -> int:
        return self._pool.digest(self._id)

    def key_count(self) -> int:
        return self._worker.key_count

    def truncated(self) -> bool:
        return self._worker.truncated

    def contradicts(self, added: Sequence[Key]) -> bool:
        held = [key for key in added if self._pool.holds(self._id, key)]
        return bool(held) and self._promised(self._pool.name, self._id, held)


class Backlog:
    """Bytes that wait in all lanes together."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Lane:
    """See the module text. ``report`` takes the effects that are no business of the pool."""

    def __init__(
        self,
        pool: Pool,
        worker: Worker,
        number: int,
        stream: WorkerStream,
        report: Callable[[Lane, fx.Count | fx.Note | fx.TimedOut], None],
        backlog: Backlog,
        slice_keys: int,
    ) -> None:
        self.pool = pool
        self.worker = worker
        self.number = number
        self.stream = stream
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = 0
        self.dynamo = False
        """Its events come over Dynamo's event plane, not over ours."""
        self.active = False
        """In the queue of lanes with something to do."""
        self.messages = 0
        self.url_checked = ""
        self.added_at = 0.0
        self.mention_at = 0.0
        self._report = report
        self._backlog = backlog
        self._slice_keys = slice_keys
        self._fill: Fill | None = None
        self._work: Iterator[int] | None = None

    @property
    def present(self) -> bool:
        """Whether the worker of this lane is still the pool's worker of that id."""
        return self.pool.get(self.worker.id) is self.worker

    @property
    def busy(self) -> bool:
        """Something is half done; messages must wait."""
        return self._work is not None

    def put(self, data: bytes, received: Received | None) -> None:
        """Let a message wait."""
        self.waiting.append((data, received))
        self.waiting_bytes += len(data)
        self._backlog.bytes += len(data)

    def take(self) -> Waiting:
        """The message that has waited longest."""
        message = self.waiting.popleft()
        size = len(message[0])
        self.waiting_bytes -= size
        self._backlog.bytes -= size
        return message

    def carry_out(self, effects: Sequence[Effect], at_once: bool = True) -> int:
        """Do what the stream asks for: as far as a slice goes, or not yet. Unless it is done then, the lane is
        ``busy``. Returns the number of keys worked off.

        Raises whatever a key that cannot be decoded raises; the rest of the message is lost then.
        """
        if len(effects) == 1 and self._work is None:
            # The usual case by far, without the machinery.
            effect = effects[0]
            if type(effect) is fx.Apply and effect.changes.size <= self._slice_keys:
                changes = effect.changes
                if self.present:
                    self.pool.apply_delta(self.worker.id, changes.added.all(), changes.removed.all())
                return changes.size
        if self.stream.doubtful and not self.worker.doubtful and self.present:
            self.pool.set_doubtful(self.worker.id, True)  # never waits its turn
        # Effects of a clock tick or a loss may come while a delta is half applied; they go behind it.
        work = self._perform(effects) if self._work is None else _after(self._work, self._perform(effects))
        self._work = work
        return self.run(self._slice_keys) if at_once else 0

    def run(self, budget: int) -> int:
        """Work off about ``budget`` keys of what is half done; returns what was used."""
        work = self._work
        used = 0
        if work is None:
            return used
        try:
            while used < budget:
                done = next(work, -1)
                if done < 0:
                    self._work = None
                    break
                used += done
        except BaseException:
            self._work = None
            raise
        return used

    def close(self) -> None:
        """The worker is gone: nothing that waits will be done."""
        self._work = None
        self.waiting.clear()
        self._backlog.bytes -= self.waiting_bytes
        self.waiting_bytes = 0
        if self._fill is not None:
            self._fill.abort()
            self._fill = None

    def _perform(self, effects: Iterable[Effect]) -> Iterator[int]:
        pool, id = self.pool, self.worker.id
        for effect in effects:
            kind = type(effect)
            if kind is fx.Count or kind is fx.Note or kind is fx.TimedOut:
                self._report(self, effect)  # type: ignore[arg-type]
                continue
            if not self.present:
                self.close()
                return
            if isinstance(effect, fx.Apply):
                yield from self._apply(effect.changes)
            elif isinstance(effect, fx.Doubt):
                # What this effect trusts may have become doubtful while it waited.
                pool.set_doubtful(id, effect.doubtful or self.stream.doubtful)
            elif isinstance(effect, fx.Clear):
                pool.clear(id)
            elif isinstance(effect, fx.Publishing):
                pool.set_publishing(id, effect.publishing)
            elif isinstance(effect, fx.FillBegin):
                if self._fill is not None:
                    self._fill.abort()
                self._fill = pool.begin_fill(id)
            elif isinstance(effect, fx.Fill):
                yield from self._add_to_fill(effect.keys)
            elif isinstance(effect, fx.FillCommit):
                if self._fill is not None:
                    self._fill.commit()
                    self._fill = None
            elif self._fill is not None:
                self._fill.abort()
                self._fill = None

    def _apply(self, changes: fx.Changes) -> Iterator[int]:
        apply, id = self.pool.apply_delta, self.worker.id
        for removed in changes.removed.slices(self._slice_keys):
            apply(id, (), removed)
            yield len(removed)
            if not self.present:
                return
        for added in changes.added.slices(self._slice_keys):
            apply(id, added, ())
            yield len(added)
            if not self.present:
                return

    def _add_to_fill(self, keys: KeyBatch) -> Iterator[int]:
        for run in keys.slices(self._slice_keys):
            if self._fill is None:
                return
            self._fill.add(run)
            yield len(run)


def _after(first: Iterator[int], then: Iterator[int]) -> Iterator[int]:
    yield from first
    yield from then
