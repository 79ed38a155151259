"""What the gateway is told at its start: its settings, and the faces of the things it uses but does not own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from fullhit.core.decision import Decision

from .parts import PartLimits

__all__ = ["BadImage", "FleetView", "GatewaySettings", "GatewayTelemetry"]

BadImage = Literal["auto", "reject", "substitute", "pass"]


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Seconds, bytes, counts.

    >>> GatewaySettings(aliases=8, queue_timeout=60)

    Raises ValueError for values which cannot work.
    """

    aliases: int = 16
    """``/v0`` to ``/v<aliases-1>`` are served beside the bare paths; 0 = none."""
    queue_max: int = 4_096
    """``/encode`` calls that may wait for an encoder; one more is answered 503."""
    queue_max_bytes: int = 2 << 30
    """The same for the bytes of their bodies."""
    queue_timeout: float = 150.0
    """How long a call may wait for an encoder, all its waits together. Below the 180 s after which a language
    server gives its request up."""
    connect_timeout: float = 2.0
    send_timeout: float = 30.0
    """Longest time in which an encoder takes no byte of a body."""
    encode_timeout: float = 1_800.0
    """From the body sent to the answer. SGLang's caller waits as long; an encoder alone may take 180 s."""
    follow_timeout: float = 180.0
    """How long a question for sizes waits for its part, and what an encoder gets for follow-up calls."""
    unknown_send_timeout: float = 5.0
    """How long a ``/send`` waits for a part that was never seen. It follows an ``/encode`` that was answered, so
    it is a stray, or the router was restarted; waiting longer would only delay the error."""
    hold_max: int = 16_384
    """Follow-up calls that may wait at once."""
    max_attempts: int = 0
    """Encoders tried for one call in all; 0 = every one once, and after a pause again, until queue_timeout."""
    max_lost: int = 3
    """Encoders that may be lost over one call after they had all of it: a picture that crashes encoders must not
    be carried to every one of them."""
    retry_pause: float = 0.2
    """Pause before a second round over encoders which all turned a call away; doubles up to retry_pause_max."""
    retry_pause_max: float = 2.0
    delivery_tries: int = 8
    """How often a registration is offered to the encoder of its part."""
    delivery_pause: float = 0.05
    """Pause before the second offer; doubles up to 2 s."""
    delivery_timeout: float = 190.0
    """An encoder holds an early registration up to 180 s."""
    max_registration_bytes: int = 8 << 10
    """Body of one registration; real ones have 130 bytes."""
    max_follow_up_bytes: int = 1 << 20
    max_reply_bytes: int = 16 << 20
    bad_image: BadImage = "auto"
    verify_media: bool = True
    """Whether an encoder is asked if it could read the media before it is told where to push (`delivery`)."""
    verify_timeout: float = 60.0
    """How long it may take to say so; then it is told all the same."""
    registration: bool = True
    """Whether encoders may register themselves here."""
    parts: PartLimits = field(default_factory=PartLimits)

    def __post_init__(self) -> None:
        if self.encode_timeout < 180:
            raise ValueError(f"encode_timeout: {self.encode_timeout} is below 180 s, which an encode may take")
        if self.bad_image not in ("auto", "reject", "substitute", "pass"):
            raise ValueError(f"bad_image: {self.bad_image!r} is none of auto, reject, substitute, pass")
        if not 0 <= self.aliases <= 1_024:
            raise ValueError(f"aliases: {self.aliases} is not between 0 and 1024")
        for name in (
            "queue_timeout", "connect_timeout", "follow_timeout", "verify_timeout", "queue_max", "queue_max_bytes",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0")


class FleetView(Protocol):
    """What the gateway tells the fleet, and asks it for the registry routes."""

    def report_success(self, worker_id: str) -> None: ...

    def report_failure(self, worker_id: str, kind: str) -> None:
        """``kind``: connect, reset, timeout, 5xx, garbage, or busy for a 503. Never for a caller's fault."""

    def report_promise(self, worker_id: str, kept: bool) -> None:
        """It was chosen as one that holds everything; ``kept``: its cache had everything, as it says itself."""

    def register_url(self, url: str) -> None:
        """Raises ValueError with the reason."""

    def unregister_url(self, url: str) -> bool:
        """Raises ValueError with the reason."""

    def urls(self) -> list[str]: ...


class GatewayTelemetry(Protocol):
    """Where the gateway tells what happens."""

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None: ...

    def observe_select(self, pool: str, seconds: float) -> None: ...

    def count(self, name: str, /, **labels: object) -> None: ...

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None: ...

    def decision(self, decision: Decision, **outcome: object) -> None: ...
