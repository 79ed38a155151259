"""The OpenAI front: one port for OpenAI clients, with NVIDIA Dynamo frontends behind it."""

from .front import OpenAIFront
from .replies import openai_error
from .settings import FrontSettings, FrontTelemetry, LoadUntil, Reporter

__all__ = ["FrontSettings", "FrontTelemetry", "LoadUntil", "OpenAIFront", "Reporter", "openai_error"]
