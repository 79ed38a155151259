"""The OpenAI front: one port for OpenAI clients, with NVIDIA Dynamo frontends behind it."""

from .calls import Seats
from .front import OpenAIFront
from .replies import openai_error
from .settings import FrontSettings, FrontTelemetry, LoadUntil, Reporter

__all__ = ["FrontSettings", "FrontTelemetry", "LoadUntil", "OpenAIFront", "Reporter", "Seats", "openai_error"]
