"""Fullhit: a cache-aware request router for vision-language serving."""

__version__ = "0.1.0"
