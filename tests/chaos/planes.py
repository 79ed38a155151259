"""The brokers over which the suite can be played: one class a kind, so that every case gets a column for it.

A further kind needs what `Plane` asks for, and a line in `PLANES`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from fullhit.lab.processes import Child, Supervisor, free_port, start_nats

__all__ = ["PLANES", "NatsServer", "Plane"]


class Plane(Protocol):
    """A broker as a process of ours, always at the same port."""

    @property
    def port(self) -> int: ...

    def url(self, port: int = 0) -> str:
        """What encoders and routers are told, through a proxy at ``port`` or directly."""

    async def start(self) -> None:
        """Start it, the first time or again; returns when it takes connections."""

    def kill(self) -> None:
        """kill -9."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class NatsServer:
    """``settings``: lines of the server's configuration, for instance ``max_payload: 2048``."""

    def __init__(self, processes: Supervisor, settings: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.settings = list(settings)
        self._processes = processes
        self._child: Child | None = None

    def url(self, port: int = 0) -> str:
        return f"nats://127.0.0.1:{port or self.port}"

    async def start(self) -> None:
        options: list[str] = []
        if self.settings:
            path = self._processes.directory / f"nats-{self.port}.conf"
            path.write_text("\n".join(self.settings) + "\n")
            options = ["-c", str(path)]
        self._child, _ = await start_nats(self._processes, port=self.port, options=options)

    def kill(self) -> None:
        self._running.kill()

    def pause(self) -> None:
        self._running.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running.signal(signal.SIGCONT)

    def says(self, text: str) -> bool:
        """Whether the server's log holds this text."""
        return text in self._running.log.read_text(errors="replace")

    @property
    def _running(self) -> Child:
        assert self._child is not None
        return self._child


PLANES: dict[str, Callable[[Supervisor], Plane]] = {"nats": NatsServer}
