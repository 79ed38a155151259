"""The OpenAI front for workers: one port in front of SGLang and vLLM servers, alone or as prefill and decode pairs."""

from .catalog import Service
from .front import WorkerFront
from .settings import WorkerFrontSettings

__all__ = ["Service", "WorkerFront", "WorkerFrontSettings"]
