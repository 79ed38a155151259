"""A line sink that a stuck reader cannot stop: one daemon thread, one bounded queue.

Standard error may be a pipe whose reader has stopped, a terminal in Ctrl-S, or a file on a disk that takes a pause.
A router that writes there from its event loop stops with it. So `LineSink.put` only appends to a deque; a daemon
thread, started with the first line and asleep while there is nothing to write, joins what gathers in a hundredth of a
second and writes it in one call. When the queue is full the newest line is dropped and counted: the oldest lines
usually tell how the trouble began. Once the stream moves again one line says how many are missing.

A stream that fails for good (closed pipe, full disk) costs its lines, counted as well, never an exception.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["LineSink", "TextStream"]

MAX_LINES = 10_000
"""Lines kept for a stuck stream; at 300 bytes a line about 3 MB."""
GATHER_SECONDS = 0.01
"""Pause before a batch is written: waking a thread for each of 10,000 lines a second costs more than the lines do."""


class TextStream(Protocol):
    """What we need of ``sys.stderr``."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class LineSink:
    """Writes lines to ``stream`` from its own thread.

    ``on_gap(n)`` renders the line that tells about ``n`` dropped ones.
    """

    def __init__(
        self, stream: TextStream, *, max_lines: int = MAX_LINES, on_gap: Callable[[int], str] | None = None
    ) -> None:
        self._stream = stream
        self._max_lines = max_lines
        self._on_gap = on_gap
        self._lines: deque[str] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._writing = False
        self._idle = False
        self._hurry = False
        self.dropped = 0
        """Lines which never reached the stream."""
        self._announced = 0

    def put(self, line: str) -> bool:
        """Queue one line (without newline). False when it was dropped. Never blocks on the stream."""
        with self._wake:
            if self._closing or len(self._lines) >= self._max_lines:
                self.dropped += 1
                return False
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fullhit-log", daemon=True)
                self._thread.start()
            elif self._idle:
                self._idle = False
                self._wake.notify_all()
        return True

    def flush(self, timeout: float = 1.0) -> bool:
        """Wait until everything queued so far is written; False when ``timeout`` seconds were not enough."""
        deadline = time.monotonic() + timeout
        with self._wake:
            self._hurry = True
            self._wake.notify_all()
            while self._lines or self._writing:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._wake.wait(left)
        return True

    def close(self, timeout: float = 1.0) -> bool:
        """Flush, then end the thread. A thread stuck in the stream is left behind: it is a daemon."""
        done = self.flush(timeout)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        if done and thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return done

    def _run(self) -> None:
        while True:
            with self._wake:
                self._writing = False
                self._wake.notify_all()
                while not self._lines and not self._closing:
                    self._hurry = False
                    self._idle = True
                    self._wake.wait()
                self._idle = False
                if not self._lines:
                    return
                if not self._hurry and not self._closing:
                    self._wake.wait(GATHER_SECONDS)
                batch = list(self._lines)
                self._lines.clear()
                self._writing = True
                missing = self.dropped - self._announced
                self._announced = self.dropped
            if missing and self._on_gap is not None:
                batch.append(self._on_gap(missing))
            try:
                self._stream.write("\n".join(batch) + "\n")
                self._stream.flush()
            except Exception:
                # Closed or full: nobody to tell but the counter. Lines after this one may work again.
                with self._wake:
                    self.dropped += len(batch)
                    self._announced = self.dropped
