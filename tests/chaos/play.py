"""Plays one case over one broker, and makes a line of the table of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fullhit.lab.processes import ChildFailed

from . import claims, losses, network, processes, storm
from .case import CASES, PICTURES, Case, CaseFailed, Run
from .planes import PLANES
from .stand import NotInTime, Stand
from .traffic import draw

__all__ = ["MODULES", "Row", "play", "print_table", "selected"]

MODULES = (processes, network, losses, claims, storm)  # in the order in which their cases run


class Row(NamedTuple):
    case: str
    plane: str
    requests: int
    avoidable: int
    excused: int
    converged: float | None
    files: int
    rss: float
    seconds: float
    problem: str
    note: str

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def brief(self) -> str:
        return f"{self.case}, {self.plane}: {'ok' if self.ok else 'FAILED: ' + self.problem} ({self.seconds:.0f} s)"


def selected(only: Sequence[str]) -> list[Case]:
    order = [module.__name__ for module in MODULES]
    cases = sorted(CASES, key=lambda entry: order.index(entry.body.__module__))
    return [entry for entry in cases if not only or any(text in entry.name for text in only)]


async def play(chosen: Case, plane: str) -> Row:
    """The case from its first process to its last. What fails becomes the row's ``problem``."""
    began = time.monotonic()
    problem = ""
    async with Stand(PLANES[plane]) as stand:
        run = Run(stand, _pictures(), chosen.limit)
        try:
            await chosen.body(run)
            await run.finish()
        except (CaseFailed, NotInTime, ChildFailed, TimeoutError) as failure:
            problem = str(failure) or type(failure).__name__
            _show(stand)
        finally:
            await run.close()
    growth = run.growth
    return Row(
        chosen.name, plane, run.during, run.avoidable, run.excused, run.converged,
        growth.files if growth else 0, growth.rss if growth else 0.0, time.monotonic() - began, problem, run.note,
    )  # fmt: skip


def print_table(rows: Sequence[Row]) -> None:
    """Errors: those that need not have been, and those that nobody can avoid."""
    width = max([len(row.case) for row in rows], default=4)
    head = f"{'fault':<{width}}  {'plane':<6}{'requests':>9}{'errors':>7}{'excused':>8}{'converged':>10}"
    print(f"\n{head}{'files':>6}{'memory':>8}  result")
    for row in rows:
        converged = "never" if row.converged is None else f"{row.converged:.1f} s"
        result = f"FAILED: {row.problem}" if row.problem else "ok" + (f": {row.note}" if row.note else "")
        print(
            f"{row.case:<{width}}  {row.plane:<6}{row.requests:>9}{row.avoidable:>7}{row.excused:>8}{converged:>10}"
            f"{row.files:>+6}{row.rss:>+5.0f} MB  {result}"
        )


@cache
def _pictures() -> list[bytes]:
    return draw(PICTURES)


def _show(stand: Stand) -> None:
    for child in stand.processes.children:
        print(f"--- {child.name}\n{child.tail(8)}", file=sys.stderr)
