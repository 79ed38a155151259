"""Telling NVIDIA Dynamo's own front end as well, in its own words.

An encoder that runs as a worker of a Dynamo deployment may publish with this package instead of Dynamo's publisher:
routers of ours get everything they can use, and Dynamo's front ends get on their subject what they would have got
from their own kind. `DynamoTarget` says which worker speaks; `DynamoBook` keeps, without I/O, what those front ends
may hold.

Dynamo's index takes additions and removals and nothing else: no heartbeat, no snapshot, no look at the count in the
envelope. What is lost there stays lost. So the book remembers every key that may be in such an index; after a loss
the removals among them are said again, with everything that is held. Saying a key twice changes nothing there.

Source of the format: lib/runtime and lib/llm of ai-dynamo/dynamo, checked against messages of the published wheels
1.3.1, 1.4.2 and 1.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .identity import dynamo_name
from .keys import Key, fold
from .wire import TOPIC_DELTA, Delta, Update, encoded_key_bytes

__all__ = ["DynamoBook", "DynamoTarget", "escape_name"]

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_MAX_NAME_CHARS = 256
_OVERHEAD_BYTES = 512


def escape_name(name: str) -> str:
    """A name as it stands in a subject: bytes other than ASCII letters, digits, ``-`` and ``_`` as ``%XX``.

    >>> escape_name("Back End")
    'Back%20End'
    """
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in name.encode())


@dataclass(frozen=True, slots=True)
class DynamoTarget:
    """The worker of a Dynamo deployment that this encoder is.

    ``instance_id`` is what Dynamo's runtime calls ``endpoint.connection_id()``. ``refresh``: seconds after which all
    keys are said again, for front ends that were started later and would know nothing of them; 0 is never. It costs
    about 70 bytes a key and turn.

    Raises ValueError for an empty or overlong name, an instance id that is no unsigned 64-bit integer, a ``refresh``
    between 0 and 1 second.
    """

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    refresh: float = 0.0

    def __post_init__(self) -> None:
        for what, name in (("namespace", self.namespace), ("component", self.component), ("endpoint", self.endpoint)):
            if not name or len(name) > _MAX_NAME_CHARS:
                raise ValueError(f"the Dynamo {what} must have a name of at most {_MAX_NAME_CHARS} characters")
        dynamo_name(self.instance_id)
        if self.refresh != 0 and not 1 <= self.refresh <= 86_400:
            raise ValueError("refresh must be 0 (never) or between 1 and 86400 seconds")

    @classmethod
    def for_endpoint(cls, path: str, instance_id: int, *, refresh: float = 0.0) -> DynamoTarget:
        """From the path that the runtime was given: ``namespace.component.endpoint``, also after ``dyn://``.

        >>> DynamoTarget.for_endpoint("prod.encoder.generate", 7).subject
        'namespace.prod.component.encoder.endpoint.generate.multimodal_embedding_cache'
        """
        names = path.removeprefix("dyn://").split(".")
        if len(names) != 3:
            raise ValueError(f"{path[:80]!r} is no Dynamo endpoint; one reads namespace.component.endpoint")
        return cls(names[0], names[1], names[2], instance_id, refresh)

    @property
    def name(self) -> str:
        """The worker's name in a router: it has no URL."""
        return dynamo_name(self.instance_id)

    @property
    def subject(self) -> str:
        """Where front ends of 1.4 and later listen."""
        names = escape_name(self.namespace), escape_name(self.component), escape_name(self.endpoint)
        return "namespace.{}.component.{}.endpoint.{}.{}".format(*names, TOPIC_DELTA)


class DynamoBook:
    """What Dynamo's front ends may hold of this worker. Not thread-safe; one sender uses it.

    Every message goes through `record` just before it leaves, `confirmed` when the broker has all of them, `lost` when
    that will never be known.
    """

    def __init__(self, instance_id: int) -> None:
        self.stale = False
        """A front end may hold what it should not, or lack something; `to_repair` tells what to go through."""
        self._instance_id = instance_id
        self._told: dict[Key, str] = {}
        self._unsure: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self._told)

    def record(self, update: Update) -> Delta:
        """The message for an update that is about to leave."""
        for text in update.removed_keys:
            key = fold(text)
            self._unsure[key] = self._told.pop(key, text)
        for text in update.added_keys:
            key = fold(text)
            self._told[key] = text
            self._unsure.pop(key, None)
        return Delta(self._instance_id, update)

    def confirmed(self) -> None:
        """The broker has everything recorded so far."""
        self._unsure.clear()

    def lost(self) -> None:
        """Messages recorded since the last confirmation, or changes that never became one, may not have arrived."""
        self._told.update(self._unsure)
        self._unsure.clear()
        self.stale = True

    def to_repair(self, announced: Iterable[str]) -> list[str]:
        """All keys that have to be said again, one way or the other; ``announced``: those readers ought to hold."""
        keys = dict(self._told)
        keys.update((fold(text), text) for text in announced)
        return list(keys.values())

    def update_for(self, keys: Iterable[str], announced: Callable[[Key], bool]) -> Update:
        """What is to be said of these keys at this moment: each is held or it is not."""
        added: list[str] = []
        removed: list[str] = []
        for text in keys:
            key = fold(text)
            if announced(key):
                added.append(text)
            elif key in self._told:
                removed.append(text)
        return Update(added, removed)


def portions(keys: list[str], max_message_bytes: int) -> Iterator[list[str]]:
    """``keys`` in runs that fit into a message each."""
    room = budget = max(max_message_bytes - _OVERHEAD_BYTES, 1)
    start = 0
    for at, key in enumerate(keys):
        size = encoded_key_bytes(key)
        if size > room and at > start:
            yield keys[start:at]
            start, room = at, budget
        room -= size
    if start < len(keys):
        yield keys[start:]
