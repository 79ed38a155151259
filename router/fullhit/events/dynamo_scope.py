"""Names of Dynamo's event plane: which part of a deployment a pool follows, and what the subjects for it are.

Releases differ in how widely they publish: to a namespace (1.3), to a component (never released), to an endpoint (1.4
and later). A reader for all of them listens to all three. Names are percent-encoded per segment, letters, digits, ``-``
and ``_`` excepted; releases before that encoding published other names as they were, so both spellings are listened to
where they differ and the raw one is a legal subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from fullhit_publisher.wire import TOPIC_DELTA

__all__ = ["DynamoScope", "Subject", "escape", "parse_subject"]

_PLAIN: Final = re.compile(rb"[A-Za-z0-9_-]")
_UNSUBSCRIBABLE: Final = re.compile(r"[\s.*>]")
_MAX_SUBJECT_CHARS: Final = 2048


class Subject(NamedTuple):
    """What a subject says; empty = the scope is wider than that."""

    namespace: str
    component: str
    endpoint: str


def escape(name: str) -> str:
    """One segment of a subject.

    >>> escape("Back End")
    'Back%20End'
    """
    return "".join(
        chr(byte) if _PLAIN.match(bytes((byte,))) else f"%{byte:02X}" for byte in name.encode("utf-8", "surrogatepass")
    )


def parse_subject(text: str) -> Subject | None:
    """The names in the subject of an embedding-cache event, None for any other text. A bare topic names nothing."""
    if text == TOPIC_DELTA:
        return Subject("", "", "")
    if len(text) > _MAX_SUBJECT_CHARS:
        return None
    tokens = text.split(".")
    if tokens[0] != "namespace" or tokens[-1] != TOPIC_DELTA or len(tokens) not in (3, 5, 7):
        return None
    if len(tokens) >= 5 and tokens[2] != "component":
        return None
    if len(tokens) == 7 and tokens[4] != "endpoint":
        return None
    names = [_unescape(token) for token in tokens[1:-1:2]]
    if any(name is None for name in names):
        return None
    return Subject(*[name or "" for name in names], *[""] * (3 - len(names)))


def _unescape(token: str) -> str | None:
    try:
        return unquote_to_bytes(token).decode() or None
    except UnicodeError:
        return None


@dataclass(frozen=True, slots=True)
class DynamoScope:
    """What a pool follows. An empty component or endpoint means every one."""

    namespace: str
    component: str = ""
    endpoint: str = ""

    def covers(self, namespace: str, component: str, endpoint: str) -> bool:
        """Whether what has these names concerns the pool; an empty name is a wider scope, which may."""
        return (
            namespace in ("", self.namespace)
            and (not component or self.component in ("", component))
            and (not endpoint or self.endpoint in ("", endpoint))
        )

    def subjects(self) -> list[str]:
        """NATS subjects to subscribe to."""
        found: dict[str, None] = {}
        for namespace in self._spellings(self.namespace):
            found[f"namespace.{namespace}.{TOPIC_DELTA}"] = None
            for component in self._spellings(self.component) if self.component else ["*"]:
                found[f"namespace.{namespace}.component.{component}.{TOPIC_DELTA}"] = None
                for endpoint in self._spellings(self.endpoint) if self.endpoint else ["*"]:
                    found[f"namespace.{namespace}.component.{component}.endpoint.{endpoint}.{TOPIC_DELTA}"] = None
        return list(found)

    def prefixes(self) -> list[bytes]:
        """ZMQ subscriptions: full subjects at brokers since 1.4, otherwise the bare topic, which may be anybody's."""
        return [TOPIC_DELTA.encode(), *(f"namespace.{name}.".encode() for name in self._spellings(self.namespace))]

    @staticmethod
    def _spellings(name: str) -> list[str]:
        escaped = escape(name)
        return [escaped] if escaped == name or _UNSUBSCRIBABLE.search(name) else [escaped, name]
