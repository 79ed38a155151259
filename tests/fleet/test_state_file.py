"""Workers that are remembered over a restart, and every way in which the file can be bad."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.fleet import Source, StateFile
from fullhit.fleet.remembered import MAX_BYTES, StateUnreadable, decode, encode

A, B, C = (f"http://10.0.0.{number}:30000" for number in (1, 2, 3))


def file_of(world: Any, path: Path) -> StateFile:
    return StateFile(path, world.fleet, world.witness)


async def written(world: Any, path: Path) -> None:
    file = file_of(world, path)
    await file.start()
    await file.close()


async def test_the_next_router_knows_who_registered_was_discovered_or_added(make_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    world = make_world()
    world.fleet.add("http://static.invalid:1", source=Source.STATIC)
    world.fleet.add(A, source=Source.REGISTERED)
    world.fleet.add(B, source=Source.ADMIN, device="cpu", weight=2.5, max_inflight=7, labels={"zone": "a"})
    world.fleet.add(C, source=Source.DISCOVERED)
    world.fleet.drain(B)
    await written(world, path)
    assert path.stat().st_mode & 0o777 == 0o600
    after = make_world()
    assert file_of(after, path).load() == 3
    rows = {member.id: member for member in after.fleet}
    assert set(rows) == {A, B, C}
    assert [rows[one].source for one in (A, B, C)] == [Source.REGISTERED, Source.ADMIN, Source.DISCOVERED]
    spec = rows[B].spec
    assert (spec.device, spec.weight, spec.max_inflight, spec.labels) == ("cpu", 2.5, 7, {"zone": "a"})
    assert rows[B].draining and rows[B].device_given and not rows[A].device_given
    assert not any(member.answered for member in after.fleet), "nobody is trusted before a probe"
    assert encode(after.fleet, {}) == encode(world.fleet, {})


async def test_what_the_configuration_says_counts_more(make_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    world = make_world(max_inflight={"default": 4})
    world.fleet.add(A, source=Source.ADMIN, device="cpu")
    await written(world, path)
    after = make_world(max_inflight={"default": 9})
    after.fleet.add(A, source=Source.STATIC, device="xpu")
    assert file_of(after, path).load() == 0
    assert after.fleet.find(A).spec.device == "xpu"
    third = make_world(max_inflight={"default": 9})
    file_of(third, path).load()
    assert third.fleet.find(A).spec.max_inflight == 9, "a cap that was not its own is the configuration's"


async def test_who_leaves_is_forgotten_and_changes_are_written(
    make_world: Any, tmp_path: Path, eventually: Any
) -> None:
    path = tmp_path / "workers.json"
    world = make_world()
    file = file_of(world, path)
    await file.start()

    def listed() -> list[str]:
        return [row["url"] for row in json.loads(path.read_bytes())["workers"]] if path.exists() else ["?"]

    await eventually(lambda: listed() == [])
    world.fleet.add(A, source=Source.REGISTERED)
    await eventually(lambda: listed() == [A])
    world.fleet.remove(A, cause="test")
    world.fleet.add(B, source=Source.REGISTERED)
    await eventually(lambda: listed() == [B])
    world.fleet.add(C, source=Source.REGISTERED)
    await file.close()
    assert listed() == [B, C] and os.listdir(tmp_path) == ["workers.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'{"version": 1}', b'{"version": 2, "workers": []}', b"\xff\xfe", b"[" * 100_000,
        b'{"version": 1, "workers": [{"url": 1, "pool": "default", "source": "admin"}]}',
        b'{"version": 1, "workers": [{"url": "x", "pool": "default", "source": "heaven"}]}',
    ],
)  # fmt: skip
async def test_a_damaged_file_is_put_aside_and_costs_nothing_else(
    make_world: Any, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(content)
    world = make_world()
    assert file_of(world, path).load() == 0
    assert world.witness.kinds() == ["state_file_ignored"] and len(world.fleet) == 0
    assert (tmp_path / "workers.json.damaged").read_bytes() == content
    await written(world, path)
    assert file_of(make_world(), path).load() == 0 and path.exists()


async def test_a_file_without_end_is_not_read_to_its_end(make_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES * 20)
    world = make_world()
    assert file_of(world, path).load() == 0 and world.witness.kinds() == ["state_file_ignored"]


async def test_one_bad_row_costs_that_row(make_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    base = {"pool": "default", "source": "admin"}
    rows = [
        {**base, "url": A, "pool": "gone"},
        {**base, "url": "ftp://x"},
        {**base, "url": B, "weight": -1},
        {**base, "url": C, "source": "static"},
        {**base, "url": C, "unknown": 1},
    ]
    path.write_text(json.dumps({"version": 1, "workers": rows}))
    world = make_world()
    assert file_of(world, path).load() == 1
    assert [member.id for member in world.fleet] == [C]
    assert world.witness.kinds().count("worker_not_restored") == 3


async def test_no_file_is_no_news(make_world: Any, tmp_path: Path) -> None:
    world = make_world()
    assert file_of(world, tmp_path / "none").load() == 0 and world.witness.events == []
    assert file_of(world, tmp_path).load() == 0 and world.witness.kinds() == ["state_file_ignored"]


async def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    make_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr("fullhit.fleet.state_file.LOOK_SECONDS", 0.01)
    path = tmp_path / "workers.json"
    world = make_world()
    world.fleet.add(A, source=Source.REGISTERED)
    full = [True]
    real = os.fsync

    def sync(handle: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr("fullhit.fleet.state_file.sync", sync)
    file = file_of(world, path)
    await file.start()
    await eventually(lambda: "No space" in file.error)
    await asyncio.sleep(0.25)
    assert world.witness.kinds().count("state_file_not_written") == 1 and os.listdir(tmp_path) == []
    full[0] = False
    await eventually(lambda: not file.error)
    assert "state_file_written_again" in world.witness.kinds() and os.listdir(tmp_path) == ["workers.json"]
    await file.close()


@given(st.binary(max_size=300))
def test_no_content_breaks_the_reader(data: bytes) -> None:
    try:
        assert isinstance(decode(data), list)
    except StateUnreadable as error:
        assert str(error)
