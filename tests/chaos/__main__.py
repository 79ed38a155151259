"""``python -m tests.chaos``: real processes, one fault after the other under steady traffic; prints one table.

``requests`` were under way or made during the fault; ``errors`` need not have been, ``excused`` nobody can avoid
(``--list`` says which); ``converged`` is the time from the end of the fault until the router's index was, key for key,
what the encoders hold; ``files`` and ``memory`` are what the router uses more than before.

Exit code 0: all passed; 1: a case failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from .case import Case
from .planes import PLANES
from .play import Row, play, print_table, selected


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", action="append", default=[], help="cases whose name contains TEXT")
    parser.add_argument("--plane", choices=tuple(PLANES), action="append", help="kinds of broker (default: all)")
    parser.add_argument("--list", action="store_true", help="name the cases and the errors that each excuses")
    arguments = parser.parse_args()
    cases = selected(arguments.only)
    if arguments.list:
        for chosen in cases:
            print(f"{chosen.name}\n    unavoidable: {chosen.unavoidable}; index right within {chosen.limit:g} s")
        return 0
    if not cases:
        print("no case has such a name", file=sys.stderr)
        return 1
    began = time.monotonic()
    rows: list[Row] = []
    try:
        asyncio.run(_all(arguments.plane or tuple(PLANES), cases, rows))
    except KeyboardInterrupt:
        return 130
    print_table(rows)
    print(f"all in {time.monotonic() - began:.0f} s")
    return 0 if rows and all(row.ok for row in rows) else 1


async def _all(planes: Sequence[str], cases: Sequence[Case], rows: list[Row]) -> None:
    for chosen in cases:
        for plane in planes:
            if chosen.planes and plane not in chosen.planes:
                continue
            rows.append(await play(chosen, plane))
            print(f"  {rows[-1].brief}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
