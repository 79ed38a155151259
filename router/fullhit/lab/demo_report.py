"""What a demo found, as a table, as JSON and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunReport", "table", "verdict"]

# What the demo promises about Fullhit with per-image parts: ViT runs per distinct picture.
MAX_RUNS_PER_PICTURE = 1.15
# "Clearly more": the random split's ViT runs over Fullhit's.
CLEARLY_MORE = 1.3


@dataclass(slots=True)
class RunReport:
    """What one run showed. ``ttft`` in seconds per answered request, ``vit_runs`` per device class."""

    router: str
    requests: int
    images: int
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    vit_runs: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def total_vit_runs(self) -> int:
        return self.vit_runs.total()

    def percentile_ms(self, share: float) -> float:
        """Nearest-rank percentile of TTFT in milliseconds; 0 when nothing was answered."""
        if not self.ttft:
            return 0.0
        ordered = sorted(self.ttft)
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 1)

    @property
    def rps(self) -> float:
        return round(len(self.ttft) / self.seconds, 2) if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "router": self.router,
            "requests": self.requests,
            "failed": len(self.failures),
            "images": self.images,
            "vit_runs": self.total_vit_runs,
            "ttft_p50_ms": self.percentile_ms(0.50),
            "ttft_p99_ms": self.percentile_ms(0.99),
            "rps": self.rps,
            "reasons": dict(sorted(self.reasons.items())),
        }


def table(reports: Sequence[RunReport], distinct: int) -> str:
    """The table: a row per figure, a column per run."""
    rows: list[tuple[str, list[str]]] = [
        ("", [report.router for report in reports]),
        ("requests", [str(report.requests) for report in reports]),
        ("failed", [str(len(report.failures)) for report in reports]),
        ("images", [str(report.images) for report in reports]),
        ("distinct images", [str(distinct)] * len(reports)),
        ("ViT runs", [str(report.total_vit_runs) for report in reports]),
        ("  on GPU-like / CPU-like", [f"{report.vit_runs['gpu']} / {report.vit_runs['cpu']}" for report in reports]),
        ("ViT runs avoided", [_avoided(report) for report in reports]),
        ("TTFT p50 ms", [f"{report.percentile_ms(0.50):g}" for report in reports]),
        ("TTFT p99 ms", [f"{report.percentile_ms(0.99):g}" for report in reports]),
        ("requests/s", [f"{report.rps:g}" for report in reports]),
    ]
    reasons = sorted({reason for report in reports for reason in report.reasons})
    rows += [(f"parts: {reason}", [str(report.reasons[reason] or "-") for report in reports]) for reason in reasons]
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[index]) for _, cells in rows) for index in range(len(reports))]
    return "\n".join(
        f"  {label:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    )


def _avoided(report: RunReport) -> str:
    avoided = report.images - report.total_vit_runs
    return f"{avoided} ({100 * avoided / report.images:.0f} %)"


def verdict(
    split: RunReport, routed: RunReport, distinct: int, *, together: bool, real: bool = False
) -> tuple[bool, list[str]]:
    """Whether the demo shows what it promises, and the sentences that say so. ``real``: the encoders were."""
    failed = len(split.failures) + len(routed.failures)
    lines = ["no request failed" if not failed else f"FAILED: {failed} requests failed"]
    lines += [f"  {text}" for text in [*split.failures, *routed.failures][:3]]
    ratio, random_ratio = routed.total_vit_runs / distinct, split.total_vit_runs / distinct
    if together:
        lines.append(
            f"Fullhit, all pictures of a turn in one part: {routed.total_vit_runs} ViT runs for {distinct} distinct "
            f"images ({ratio:.2f} x), the random split {split.total_vit_runs} ({random_ratio:.2f} x)"
        )
        lines.append(
            "every turn brings a new picture, so no encoder ever holds a whole turn and a full hit cannot happen; "
            "the other pictures are a tie-break only. Per-image parts (the default) are the form to use"
        )
        return not failed, lines
    within = ratio <= MAX_RUNS_PER_PICTURE
    # Over two real encoders and a few turns a random split meets a holder by chance half of the time.
    more = split.total_vit_runs > (1.0 if real else CLEARLY_MORE) * routed.total_vit_runs
    lines.append(
        f"{'' if within else 'FAILED: '}Fullhit: {routed.total_vit_runs} ViT runs for {distinct} distinct images, "
        f"{ratio:.2f} x (promised: at most {MAX_RUNS_PER_PICTURE} x)"
    )
    lines.append(
        f"{'' if more else 'FAILED: '}random split: {split.total_vit_runs} ViT runs, {random_ratio:.2f} x, "
        f"{split.total_vit_runs / max(1, routed.total_vit_runs):.2f} times Fullhit's (promised: clearly more)"
    )
    if real:
        return not failed and within and more, lines
    lines.append(
        f"its time to first token is mostly the queue of the CPU-like encoders, which got {split.vit_runs['cpu']} of "
        f"its ViT runs; Fullhit gave them {routed.vit_runs['cpu']}"
    )
    return not failed and within and more, lines
