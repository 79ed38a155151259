"""Members whose life is told by somebody else: ready at once, never probed, gone when their lease is."""

from __future__ import annotations

import pytest

from fullhit.core import SelectRequest
from fullhit_publisher.identity import dynamo_name

NAME = dynamo_name(2**64 - 1)


def test_a_leased_worker_is_ready_at_once_and_never_probed_or_forgotten(world) -> None:
    world.fleet.add_leased(NAME, pool="default", device="cpu", labels={"component": "encoder"})
    worker = world.pool.get(NAME)
    assert worker.ready and worker.device_class == "cpu" and worker.url == ""
    world.run(5_000)
    assert world.probed == [] and world.pool.get(NAME) is worker and worker.ready
    assert world.fleet.find(NAME).describe(world.clock.now)["worker_id"] == str(2**64 - 1)
    assert world.fleet.find(str(2**64 - 1)).id == NAME


def test_it_leaves_with_its_lease_and_comes_back_as_new(world) -> None:
    world.fleet.add_leased(NAME, pool="default")
    first = world.pool.get(NAME)
    assert world.fleet.remove_leased(NAME, cause="lease ended")
    assert not world.fleet.remove_leased(NAME, cause="lease ended")
    world.fleet.add_leased(NAME, pool="default")
    assert world.pool.get(NAME) is not first and world.pool.get(NAME).ready


def test_its_device_is_brought_up_to_date_and_a_second_pool_is_refused(world) -> None:
    world.fleet.add_leased(NAME, pool="default")
    world.fleet.add_leased(NAME, pool="default", device="cpu")
    assert world.pool.get(NAME).device == "cpu"
    with pytest.raises(ValueError, match="unknown pool"):
        world.fleet.add_leased(NAME, pool="other")


def test_reported_failures_hold_it_back_and_time_brings_it_back_without_a_probe(world) -> None:
    world.fleet.add_leased(NAME, pool="default")
    for _ in range(20):
        world.fleet.report_failure(NAME, "connect")
    assert not world.pool.get(NAME).ready
    world.run(600)
    assert world.pool.get(NAME).ready and world.probed == []


def test_requests_that_take_very_long_do_not_make_it_stuck_for_nobody_could_clear_it(world) -> None:
    world.fleet.add_leased(NAME, pool="default")
    world.pool.select(SelectRequest())
    world.run(3_000)
    assert world.pool.get(NAME).ready


def test_only_a_leased_worker_ends_with_a_lease(world) -> None:
    world.add_ready("http://encoder.invalid:1")
    assert not world.fleet.remove_leased("http://encoder.invalid:1", cause="x")
