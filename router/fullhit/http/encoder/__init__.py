"""The encoder gateway: SGLang language servers in front, SGLang encoders behind."""

from fullhit.http.common import Origins

from .gateway import EncoderGateway
from .parts import PartLimits
from .replies import sglang_error
from .settings import FleetView, GatewaySettings, GatewayTelemetry

__all__ = [
    "EncoderGateway",
    "FleetView",
    "GatewaySettings",
    "GatewayTelemetry",
    "Origins",
    "PartLimits",
    "sglang_error",
]
