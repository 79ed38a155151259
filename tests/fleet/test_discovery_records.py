"""Dynamo's discovery: records of every release, directories that are torn, stale or gone."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullhit.fleet.discovery import Channel, Directory, Instance, RecordError, parse
from fullhit.fleet.discovery_file import FileBackend

RECORDS = json.loads((Path(__file__).parent / "data" / "dynamo_records.json").read_text())
TOPIC = "multimodal_embedding_cache"
BIG = 2**64 - 1


def instance(number: int = BIG, device: object = "cuda", endpoint: str = "generate", **more: object) -> bytes:
    record = {"type": "Endpoint", "component": "encoder", "endpoint": endpoint, "namespace": "ns",
              "instance_id": number, "transport": {"tcp": "127.0.0.1:1/x"}, "device_type": device}  # fmt: skip
    return json.dumps({**record, **more}).encode()


def key(number: int = BIG, endpoint: str = "generate") -> str:
    return f"v1/instances/ns%2Fencoder%2F{endpoint}%2F{number:x}"


def channel(number: int, address: str = "tcp://127.0.0.1:1") -> bytes:
    scope = {"kind": "endpoint", "endpoint": {"namespace": "ns", "component": "encoder", "name": "generate"}}
    transport = {"kind": "Zmq", "config": {"endpoint": address}}
    return json.dumps({"type": "EventChannel", "scope": scope, "topic": TOPIC, "instance_id": number,
                       "transport": transport}).encode()  # fmt: skip


# Records.


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: f"{row['release']}-{row['transport']}")
def test_captured_records_are_understood(row: dict) -> None:
    record = parse(row["file"], row["text"].encode())
    values = json.loads(row["text"])
    if isinstance(record, Instance):
        assert record == Instance("capns", "encoder", "generate", values["instance_id"], "cuda")
        return
    assert isinstance(record, Channel)
    assert record.topic == TOPIC and record.publisher_id == values["instance_id"]
    if row["release"] == "1.3.1":
        assert (record.namespace, record.component, record.endpoint) == (values["namespace"], "", "")
    else:
        assert list(record[:3]) == list(values["scope"]["endpoint"].values())
    assert record.address == values["transport"]["config"].get("endpoint", "")
    assert record.kind == values["transport"]["kind"]


@pytest.mark.parametrize(
    ("value", "device"), [("cpu", "cpu"), ("cuda", "cuda"), (None, "cuda"), ("", "cuda"), ("xpu", "xpu")]
)
def test_the_device_is_what_the_record_says_and_cuda_where_it_says_nothing(value: object, device: str) -> None:
    record = parse(key(), instance(device=value))
    assert isinstance(record, Instance) and record.device == device


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", instance(-1), instance(2**64), instance(1.5), instance("7"),  # type: ignore[arg-type]
     instance(7, device=7), instance(7, namespace="n" * 300), instance(7, pad="x" * 70_000), b'{"instance_id": 7}'],
)  # fmt: skip
def test_records_that_are_none_are_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        parse(key(), value)


def test_other_kinds_of_records_are_passed_over() -> None:
    assert parse("v1/mdc/x", b"whatever") is None


@given(st.binary(max_size=80) | st.integers(0, 400).map(lambda n: instance()[:n]))
@settings(deadline=None)
def test_no_value_makes_the_directory_raise(value: bytes) -> None:
    directory = Directory(lambda record: True)
    directory.update({key(): instance(), "v1/event_channels/a": channel(1)})
    directory.update({key(): value, "v1/event_channels/a": value})
    assert set(directory.instances) <= {BIG}


# Changes.


def test_an_instance_lives_as_long_as_any_of_its_records() -> None:
    directory = Directory(lambda record: True)
    both = {key(5): instance(5), key(5, "clear"): instance(5, endpoint="clear")}
    assert [i.instance_id for i in directory.update(both).joined] == [5, 5]
    assert not directory.update(both)
    assert not directory.update({key(5): both[key(5)]}).left
    assert [i.instance_id for i in directory.update({}).left] == [5]
    assert directory.instances == {}


def test_a_torn_record_keeps_what_it_said_and_a_new_torn_one_says_nothing() -> None:
    directory = Directory(lambda record: True)
    directory.update({key(5): instance(5)})
    changes = directory.update({key(5): instance(5)[:40], key(6): instance(6)[:40]})
    assert not changes and directory.malformed == 2 and set(directory.instances) == {5}
    assert [i.instance_id for i in directory.update({key(5): instance(5), key(6): instance(6)}).joined] == [6]


def test_a_changed_device_joins_again_and_a_moved_publisher_is_closed_and_opened() -> None:
    directory = Directory(lambda record: True)
    directory.update({key(5): instance(5), "v1/event_channels/c": channel(9)})
    changes = directory.update(
        {key(5): instance(5, device="cpu"), "v1/event_channels/c": channel(9, "tcp://127.0.0.1:2")}
    )
    assert [i.device for i in changes.joined] == ["cpu"] and not changes.left
    assert [c.address for c in changes.closed + changes.opened] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


def test_only_what_is_wanted_counts() -> None:
    directory = Directory(lambda record: isinstance(record, Instance) and record.component == "encoder")
    directory.update({key(5): instance(5), key(6): instance(6, component="backend"), "v1/event_channels/c": channel(9)})
    assert set(directory.instances) == {5} and directory.channels == []
    assert [i.instance_id for i in directory.update({key(5): instance(5, component="backend")}).left] == [5]


# The file backend.


class Tree:
    def __init__(self, root: Path) -> None:
        self.now = 1000.0
        self.root = root
        self.backend = FileBackend(root, lease=10.0, clock=lambda: self.now, wall_clock=lambda: self.now)

    def put(self, name: str, value: bytes, at: float | None = None) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
        self.touch(path, at)
        return path

    def touch(self, path: Path, at: float | None = None) -> None:
        when = self.now if at is None else at
        os.utime(path, (when, when))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_files_appear_and_vanish(tree: Tree) -> None:
    assert tree.backend.look() == {}
    path = tree.put(key(5), instance(5))
    tree.put("v1/event_channels/a/b/c", channel(1))
    tree.put("v1/mdc/x", b"not ours")
    assert tree.backend.look() == {key(5): instance(5), "v1/event_channels/a/b/c": channel(1)}
    path.unlink()
    assert list(tree.backend.look()) == ["v1/event_channels/a/b/c"]


def test_a_file_that_nobody_touches_any_more_is_gone_after_its_lease(tree: Tree) -> None:
    path = tree.put(key(5), instance(5))
    for _ in range(5):
        tree.backend.look()
        tree.now += 9
        assert key(5) in tree.backend.look()
        tree.touch(path)
    tree.backend.look()
    tree.now += 10.1
    assert tree.backend.look() == {}
    tree.touch(path)
    assert key(5) in tree.backend.look()


def test_files_of_last_week_are_not_believed_at_first_sight_and_a_clock_ahead_is_no_matter(tree: Tree) -> None:
    old = tree.put(key(5), instance(5), at=tree.now - 86_400)
    tree.put(key(6), instance(6), at=tree.now + 86_400)
    assert list(tree.backend.look()) == [key(6)]
    tree.touch(old, at=tree.now - 80_000)  # the file system's clock is behind, but it moves
    assert key(5) in tree.backend.look()


def test_a_file_emptied_to_be_written_anew_keeps_its_value(tree: Tree) -> None:
    path = tree.put(key(5), instance(5))
    tree.backend.look()
    path.write_bytes(b"")
    assert tree.backend.look() == {key(5): instance(5)}
    tree.put(key(6), b"")
    assert key(6) not in tree.backend.look()


def test_a_tree_that_cannot_be_read_is_an_error_and_changes_nothing(tree: Tree) -> None:
    missing = FileBackend(tree.root / "nowhere")
    with pytest.raises(OSError):
        missing.look()


def test_what_is_no_regular_file_is_passed_over(tree: Tree) -> None:
    tree.put(key(5), instance(5))
    os.mkfifo(tree.root / key(6))
    (tree.root / key(7)).symlink_to(tree.root / key(6))
    (tree.root / key(8)).symlink_to("/dev/zero")
    (tree.root / key(9)).symlink_to(tree.root / "nowhere")
    assert list(tree.backend.look()) == [key(5)]


def test_a_folder_of_records_that_vanishes_takes_them_along_only_with_their_lease(tree: Tree) -> None:
    tree.put(key(5), instance(5))
    tree.put("v1/event_channels/c", channel(1))
    tree.backend.look()
    shutil.rmtree(tree.root / "v1")
    tree.now += 9
    assert set(tree.backend.look()) == {key(5), "v1/event_channels/c"}
    tree.now += 2
    assert tree.backend.look() == {}
    tree.put(key(6), instance(6))
    assert list(tree.backend.look()) == [key(6)]


async def test_a_tree_that_hangs_is_an_error_and_holds_nobody_up(tmp_path: Path, eventually) -> None:
    seen: list[dict] = []
    backend = FileBackend(tmp_path, interval=0.01, slow=0.05)
    let_go = threading.Event()
    look = backend.look
    backend.look = lambda: let_go.wait() and look()  # type: ignore[method-assign, return-value]
    await backend.start(seen.append)
    await eventually(lambda: "does not answer" in backend.error)
    assert seen == []
    let_go.set()
    await eventually(lambda: seen and backend.error == "")
    let_go.clear()
    await eventually(lambda: "does not answer" in backend.error)
    await backend.close()
    (hanging,) = [thread for thread in threading.enumerate() if thread.name == "fullhit-discovery"]
    assert hanging.daemon, "the end of the process does not wait for it"
    let_go.set()


async def test_the_backend_says_when_a_folder_has_vanished(tmp_path: Path, eventually) -> None:
    seen: list[dict] = []
    (tmp_path / "v1/instances").mkdir(parents=True)
    (tmp_path / key(5)).write_bytes(instance(5))
    backend = FileBackend(tmp_path, interval=0.01)
    await backend.start(seen.append)
    await eventually(lambda: seen and key(5) in seen[-1])
    shutil.rmtree(tmp_path / "v1")
    await eventually(lambda: "has vanished" in backend.error)
    assert key(5) in seen[-1]
    await backend.close()


async def test_the_backend_hands_on_what_it_sees_and_says_what_is_wrong(tmp_path: Path, eventually) -> None:
    root = tmp_path / "store"
    seen: list[dict] = []
    backend = FileBackend(root, interval=0.01)
    await backend.start(seen.append)
    await eventually(lambda: "cannot read" in backend.error)
    (root / "v1/instances").mkdir(parents=True)
    (root / key(5)).write_bytes(instance(5))
    await eventually(lambda: seen and key(5) in seen[-1])
    assert backend.error == ""
    (root / key(5)).unlink()
    await eventually(lambda: seen[-1] == {})
    await backend.close()
