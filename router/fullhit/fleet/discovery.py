"""Dynamo's discovery records: which instances live, and through which channels they publish.

Dynamo keeps two kinds of records in a store of keys and values, and deletes a record when its owner's lease ends:

* ``v1/instances/<namespace>/<component>/<endpoint>/<id hex>``: an endpoint of a worker, with its device type. A worker
  process has one instance id for all its endpoints, and it lives as long as any of its records;
* ``v1/event_channels/<scope>/<topic>/<publisher id hex>``: where a publisher publishes. Since release 1.4 the scope is
  an endpoint, before that a namespace. The number here is the *publisher's*; nothing ties it to a worker.

This module is pure: a backend hands in the whole store as it is now (``Directory.update``), and gets back what has
changed. A record is judged by its value, and the key only says which kind it is; so an escaped, an unescaped and a
differently nested key all do. A record that cannot be read keeps its last readable value, as a torn file must while it
is being written, until its key is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

__all__ = ["CHANNELS", "INSTANCES", "Backend", "Changes", "Channel", "Directory", "Instance", "RecordError", "parse"]

INSTANCES: Final = "v1/instances/"
CHANNELS: Final = "v1/event_channels/"
MAX_RECORD_BYTES: Final = 64 * 1024
"""Real ones have some 400 bytes."""
MAX_RECORDS: Final = 100_000
_MAX_U64: Final = 2**64 - 1
_MAX_NAME_CHARS: Final = 256
_MAX_ADDRESS_CHARS: Final = 1024


class RecordError(ValueError):
    """A value that is no record, or one with fields out of range."""


class Instance(NamedTuple):
    """An endpoint of a worker. ``device`` as the record says it: ``cpu`` or ``cuda``; an absent one is ``cuda``."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    device: str


class Channel(NamedTuple):
    """Where a publisher publishes a topic. ``component`` and ``endpoint`` are empty in wider scopes; ``kind`` is
    ``Zmq`` or ``Nats`` (or unknown to us), ``address`` the ZMQ endpoint."""

    namespace: str
    component: str
    endpoint: str
    topic: str
    publisher_id: int
    kind: str
    address: str


class Backend(Protocol):
    """Follows a store and calls ``on_store`` with all its records, by key, whenever they may have changed."""

    async def start(self, on_store: Callable[[Mapping[str, bytes]], None]) -> None: ...
    async def close(self) -> None: ...
    @property
    def error(self) -> str:
        """What is wrong now; empty when nothing is."""
        ...


@dataclass(slots=True)
class Changes:
    """What an update changed. An instance with a changed or a further record counts as joined again."""

    joined: list[Instance] = field(default_factory=list)
    left: list[Instance] = field(default_factory=list)
    opened: list[Channel] = field(default_factory=list)
    closed: list[Channel] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.opened or self.closed)


class _Endpoint(msgspec.Struct):
    namespace: str
    component: str
    name: str


class _Scope(msgspec.Struct):
    kind: str = ""
    endpoint: _Endpoint | None = None
    namespace: str | None = None
    component: str | None = None
    name: str | None = None


class _Config(msgspec.Struct):
    endpoint: str = ""


class _Transport(msgspec.Struct):
    kind: str = ""
    config: _Config = msgspec.field(default_factory=_Config)


class _Channel(msgspec.Struct):
    topic: str
    instance_id: int
    transport: _Transport
    scope: _Scope | None = None
    namespace: str | None = None
    component: str | None = None


class _Instance(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    device_type: str | None = None


_instances: Final = msgspec.json.Decoder(_Instance)
_channels: Final = msgspec.json.Decoder(_Channel)


def parse(key: str, value: bytes) -> Instance | Channel | None:
    """Read one record; None for a kind nobody here needs. Raises RecordError."""
    instance = key.startswith(INSTANCES)
    if not instance and not key.startswith(CHANNELS):
        return None
    if len(value) > MAX_RECORD_BYTES:
        raise RecordError(f"record of {len(value)} bytes, limit {MAX_RECORD_BYTES}")
    try:
        return _instance(_instances.decode(value)) if instance else _channel(_channels.decode(value))
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{type(error).__name__}: {error}"[:200]) from None


def _instance(record: _Instance) -> Instance:
    _check(record.instance_id, record.namespace, record.component, record.endpoint, record.device_type or "")
    device = record.device_type or "cuda"
    return Instance(record.namespace, record.component, record.endpoint, record.instance_id, device)


def _channel(record: _Channel) -> Channel:
    namespace, component, endpoint = record.namespace or "", record.component or "", ""
    scope = record.scope
    if scope is not None:
        inner = scope.endpoint
        if inner is not None:
            namespace, component, endpoint = inner.namespace, inner.component, inner.name
        else:
            namespace, component = scope.namespace or namespace, scope.component or scope.name or component
    address = record.transport.config.endpoint
    if len(address) > _MAX_ADDRESS_CHARS:
        raise RecordError("an address is too long")
    _check(record.instance_id, namespace, component, endpoint, record.topic, record.transport.kind)
    return Channel(namespace, component, endpoint, record.topic, record.instance_id, record.transport.kind, address)


def _check(number: int, *names: str) -> None:
    if not 0 <= number <= _MAX_U64:
        raise RecordError(f"{number} is no unsigned 64-bit integer")
    if max(map(len, names)) > _MAX_NAME_CHARS:
        raise RecordError("a name is too long")


class Directory:
    """The records that count, and what changes among them.

    ``wanted(instance or channel)`` says which ones; the others are read and forgotten. ``malformed`` counts values that
    could not be read, each once per different value.
    """

    def __init__(self, wanted: Callable[[Instance | Channel], bool]) -> None:
        self.malformed = 0
        self.last_error = ""
        self._wanted = wanted
        self._values: dict[str, bytes] = {}
        self._records: dict[str, Instance | Channel] = {}
        self._instances: dict[int, dict[str, Instance]] = {}

    @property
    def instances(self) -> dict[int, Instance]:
        """One record of each instance."""
        return {number: next(iter(records.values())) for number, records in self._instances.items()}

    @property
    def channels(self) -> list[Channel]:
        return [record for record in self._records.values() if isinstance(record, Channel)]

    def update(self, store: Mapping[str, bytes]) -> Changes:
        """Take the store as it is now. Never raises for what is in it."""
        changes = Changes()
        for key in [key for key in self._values if key not in store]:
            del self._values[key]
            self._forget(key, changes)
        for key, value in store.items():
            if self._values.get(key) == value:
                continue
            if key not in self._values and len(self._values) >= MAX_RECORDS:
                continue
            self._values[key] = value
            try:
                record = parse(key, value)
            except RecordError as error:
                self.malformed += 1
                self.last_error = f"{key[:200]}: {error}"
                continue
            if record is not None and self._wanted(record):
                if self._records.get(key) != record:
                    self._forget(key, changes)
                    self._keep(key, record, changes)
            else:
                self._forget(key, changes)
        return _net(changes)

    def _keep(self, key: str, record: Instance | Channel, changes: Changes) -> None:
        self._records[key] = record
        if isinstance(record, Channel):
            changes.opened.append(record)
            return
        records = self._instances.setdefault(record.instance_id, {})
        records[key] = record
        changes.joined.append(record)

    def _forget(self, key: str, changes: Changes) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        if isinstance(record, Channel):
            changes.closed.append(record)
            return
        records = self._instances[record.instance_id]
        del records[key]
        if not records:
            del self._instances[record.instance_id]
            changes.left.append(record)


def _net(changes: Changes) -> Changes:
    """An instance whose record was replaced has not left; a channel that reopened in the same place did neither."""
    if changes.left and changes.joined:
        back = {instance.instance_id for instance in changes.joined}
        changes.left = [instance for instance in changes.left if instance.instance_id not in back]
    if changes.closed and changes.opened:
        same = set(changes.closed) & set(changes.opened)
        changes.closed = [channel for channel in changes.closed if channel not in same]
        changes.opened = [channel for channel in changes.opened if channel not in same]
    return changes
