"""Selection policies by name. Adding one: write its class in a module of its own and list it here.

Room is left for `least-cost` (expected completion time) and for joining pending encodes: a policy sees the whole
`Look`, so neither needs another interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .base import Policy, Surroundings
from .consistent import ConsistentHash
from .device_aware import DeviceAwareWeighted
from .simple import LeastLoaded, PowerOfTwo, Random, RoundRobin

__all__ = ["POLICIES", "Policy", "Surroundings", "make_policy", "policy_class"]

POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "device-aware-weighted": DeviceAwareWeighted,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
        "random": Random,
        "power-of-two": PowerOfTwo,
        "consistent-hash": ConsistentHash,
    }
)


def policy_class(name: str) -> type[Policy]:
    """The policy of that name; ValueError names the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"policy: {name!r} is unknown; choose one of {', '.join(POLICIES)}") from None


def make_policy(name: str, around: Surroundings) -> Policy:
    return policy_class(name)(around)
