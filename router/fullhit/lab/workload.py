"""The published benchmark's shape: chats which show a sliding window of pictures.

Each user has pictures of their own. Turn ``t`` shows pictures ``t .. t + window - 1`` of that row, so from turn to
turn all but one repeat: 30 users with 8 turns and a window of 5 show 1,200 pictures of which 360 are different.
Users run beside each other; the turns of one user follow one another, as a chat does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """``users`` x ``turns`` requests of ``window`` pictures; ``seed`` decides which pictures and the users' pace."""

    users: int = 30
    turns: int = 8
    window: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "turns", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def requests(self) -> int:
        return self.users * self.turns

    @property
    def images(self) -> int:
        return self.requests * self.window

    @property
    def pictures_per_user(self) -> int:
        return self.turns + self.window - 1

    @property
    def distinct_images(self) -> int:
        return self.users * self.pictures_per_user

    def pictures(self, user: int, turn: int) -> list[int]:
        """Numbers of the pictures shown, in prompt order."""
        first = self.seed * 1_000_000 + user * self.pictures_per_user + turn
        return list(range(first, first + self.window))

    def pauses(self, user: int, mean: float) -> list[float]:
        """Seconds before each turn, 0.5 to 1.5 of ``mean``: reading and decoding between the turns of a chat."""
        rng = random.Random(f"{self.seed}-pause-{user}")
        return [mean * rng.uniform(0.5, 1.5) for _ in range(self.turns)]
