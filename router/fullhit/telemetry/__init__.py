"""What the router tells about itself: metrics, log lines, kept decisions, the lag of its event loop."""

from fullhit.telemetry.facade import DecisionLines, Telemetry
from fullhit.telemetry.log import Log, LogFormat, bridge_logging, redact
from fullhit.telemetry.loop import LoopLag
from fullhit.telemetry.metrics import Metrics, UnknownMetric

__all__ = [
    "DecisionLines",
    "Log",
    "LogFormat",
    "LoopLag",
    "Metrics",
    "Telemetry",
    "UnknownMetric",
    "bridge_logging",
    "redact",
]
