"""`fullhit bench`: every budget that applies, measured, in one table.

Parts are modules of this package with a function `rows(args) -> list[Row]`; they are listed in `PARTS`, run one after
the other, and may be absent or unable to run here, which is said and does not stop the others. A part raises `Skip`
with the reason when the machine lacks what it needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .table import Row, render, write_json

__all__ = ["PARTS", "Row", "Skip", "add_arguments", "run"]

PARTS: Final = {
    "core": "core_rows",
    "events": "event_rows",
    "belief": "belief_rows",
    "media": "media_rows",
    "proxy": "proxy_rows",
    "rpc": "rpc_rows",
}


class Skip(Exception):
    """This part cannot be measured here; the text says why and what would be needed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--only core,events,...`, `--rounds N`, `--quick`, `--json FILE`, `--strict`."""
    parser.add_argument(
        "--only", type=_parts, default=tuple(PARTS), metavar="PARTS", help=f"comma-separated, of {', '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="rounds per figure; the median counts (default 3)")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: to see that it works, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE too")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a budget is not kept")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code: 0, or 1 with `--strict` and a budget missed."""
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    for part in args.only:
        _progress(f"measuring {part} ...")
        began = time.monotonic()
        try:
            rows += _measure(part, args)
        except Skip as reason:
            skipped.append((part, str(reason)))
            _progress(f"{part} skipped: {reason}")
        else:
            _progress(f"{part} done in {time.monotonic() - began:.0f} s")
    print(_machine(args))
    if rows:
        print(render(rows))
    for part, why in skipped:
        print(f"{part}: skipped: {why}")
    if args.json is not None:
        write_json(args.json, rows, skipped)
    missed = any(row.ok is False for row in rows)
    return 1 if missed and args.strict else 0


def _measure(part: str, args: argparse.Namespace) -> list[Row]:
    name = f"{__name__}.{PARTS[part]}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = "this part is not there" if error.name == name else f"module {error.name} is not installed"
        raise Skip(missing) from error
    measured: Sequence[Row] = module.rows(args)
    return list(measured)


def _machine(args: argparse.Namespace) -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load average {load:.1f}, "
        f"median of {args.rounds} rounds{', QUICK: not to be quoted' if args.quick else ''}"
    )


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(PARTS)}")
    return parts


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
