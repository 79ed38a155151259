"""Rows of the bench and the one table they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "as_json", "render", "write_json"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its budget.

    `budget` None: for information, no promise is made. `ratio` is figure / budget. `ok`: whether the budget is kept
    (None without one). `command`: what to run to see this row alone.

    >>> Row.at_most("select, p50", 3.2, "us", 5.0, "fullhit bench --only core").ok
    True
    >>> Row.at_least("2 KB, c=32, against HAProxy", 0.4, "x", 0.5, "fullhit bench --only proxy").ok
    False
    """

    name: str
    figure: float
    unit: str
    budget: float | None
    ratio: float | None
    ok: bool | None
    command: str
    limit: str = ""  # how the budget reads: "<= 5", ">= 0.5"

    @classmethod
    def at_most(cls, name: str, figure: float, unit: str, budget: float, command: str) -> Row:
        """Lower is better."""
        return cls(name, figure, unit, budget, figure / budget, figure <= budget, command, f"<= {number(budget)}")

    @classmethod
    def at_least(cls, name: str, figure: float, unit: str, budget: float, command: str) -> Row:
        """Higher is better."""
        return cls(name, figure, unit, budget, figure / budget, figure >= budget, command, f">= {number(budget)}")

    @classmethod
    def info(cls, name: str, figure: float, unit: str, command: str) -> Row:
        """A figure without a budget."""
        return cls(name, figure, unit, None, None, None, command)


def number(value: float) -> str:
    """Three significant digits, thousands with a comma, no exponent."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def render(rows: Sequence[Row]) -> str:
    """The table as text."""
    verdict = {True: "ok", False: "OVER", None: ""}
    head = ("what", "figure", "", "budget", "ratio", "", "command")
    lines = [head] + [
        (
            row.name,
            number(row.figure),
            row.unit,
            row.limit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "missed" if row.ok is False and row.limit.startswith(">=") else verdict[row.ok],
            row.command,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = {1, 3, 4}
    text = []
    for n, line in enumerate(lines):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        text.append("  ".join(cells).rstrip())
        if n == 0:
            text.append("  ".join("-" * w for w in widths))
    return "\n".join(text)


def as_json(rows: Sequence[Row], skipped: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in rows],
        "skipped": [{"part": part, "reason": reason} for part, reason in skipped],
    }


def write_json(path: Path, rows: Sequence[Row], skipped: Sequence[tuple[str, str]]) -> None:
    path.write_text(json.dumps(as_json(rows, skipped), indent=2) + "\n")
