"""The short cut of `make chaos`: some of its cases, each a fault that strikes in the middle of traffic."""

from __future__ import annotations

import pytest
from tests.chaos.play import play, selected

SHORT = ("encoder killed, restarted empty", "router killed, restarted", "encoder-broker cut", "1 delta in 10 lost")


@pytest.mark.parametrize("name", SHORT)
async def test_a_fault_under_traffic_costs_no_avoidable_request_and_the_index_is_right_again(name: str) -> None:
    [case] = selected([name])
    row = await play(case, "nats")
    assert row.problem == ""
    assert row.requests > 0
    assert row.avoidable == 0
    assert row.converged is not None
