"""Log lines: well-formed whatever is thrown in, never in the way."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.telemetry import Log, bridge_logging, redact
from fullhit.telemetry.log import MAX_FIELD_CHARS, MAX_LINE_CHARS
from fullhit.telemetry.sink import LineSink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO, log: Log) -> list[str]:
    assert log.flush(10)
    return stream.getvalue().splitlines()


def records(stream: io.StringIO, log: Log) -> list[dict]:
    return [json.loads(line) for line in lines(stream, log)]


def test_an_event_is_one_json_line_with_a_utc_time():
    stream = io.StringIO()
    log = Log(stream, wall=lambda: 1_700_000_000.25)
    log.event("worker_ready", worker="http://127.0.0.1:1", seconds=0.4, cause=None)
    assert lines(stream, log) == [
        '{"time":"2023-11-14T22:13:20.250Z","level":"info","event":"worker_ready",'
        '"worker":"http://127.0.0.1:1","seconds":0.4}'
    ]


def test_on_a_terminal_it_is_plain_text():
    stream = Terminal()
    log = Log(stream, wall=lambda: 1_700_000_000.25)
    log.event("worker_unhealthy", "warning", worker="http://127.0.0.1:1", cause="3 probes failed", misses=3)
    assert lines(stream, log) == [
        '22:13:20.250 WARNING worker_unhealthy worker=http://127.0.0.1:1 cause="3 probes failed" misses=3'
    ]


def test_events_below_the_level_are_not_written():
    stream = io.StringIO()
    log = Log(stream, "warning")
    assert not log.enabled("info") and log.enabled("error")
    for level in ("debug", "info", "warning", "error", "nonsense"):
        log.event("e", level)
    assert [r["level"] for r in records(stream, log)] == ["warning", "error", "nonsense"]


@pytest.mark.parametrize(("level", "format"), [("loud", None), ("info", "xml")])
def test_settings_that_do_not_exist_are_refused(level, format):
    with pytest.raises(ValueError, match="unknown log"):
        Log(io.StringIO(), level, format)


def test_a_field_cannot_forge_a_line_or_move_the_cursor():
    for stream in (io.StringIO(), Terminal()):
        log = Log(stream)
        log.event("e", text="a\nb\r\x1b[2J\x9b2J\x7f\u2028 end")
        (line,) = lines(stream, log)
        assert line.isprintable()


def test_a_field_named_like_ours_does_not_hide_ours():
    stream = io.StringIO()
    log = Log(stream)
    log.event("e", event_=1, time="noon", kind=1, self=2, key=3)
    log.limited("k", "e", kind=1, key=2)
    record, other = records(stream, log)
    assert (record["kind"], record["self"], record["key"], other["kind"]) == (1, 2, 3, 1)
    assert record["event"] == "e" and record["time_"] == "noon" and record["time"] != "noon"


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize("format", ["json", "text"])
@pytest.mark.parametrize(
    "value",
    [Hostile(), {Hostile(): 1}, 1 << 80, float("nan"), b"\xff\x00", "\ud800", {"k": "\ud800"}, {1, 2}, object(),
     [[[[Hostile()]]]], Exception("x"), "x" * 100_000, ["y" * 10_000] * 50],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_no_value_raises_or_makes_a_line_too_long(format, value):
    stream = io.StringIO()
    log = Log(stream, format=format)
    log.event("e", value=value, other=1)
    (line,) = lines(stream, log)
    assert len(line) <= MAX_LINE_CHARS
    if format == "json":
        json.loads(line)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters(), max_size=8), VALUES, max_size=5), st.text(st.characters(), max_size=8))
def test_whatever_the_fields_a_json_line_is_json(fields, kind):
    stream = io.StringIO()
    log = Log(stream, format="json")
    line = log._line(kind, "info", fields)
    json.loads(line)
    assert "\n" not in line
    assert Log(stream, format="text")._line("k", "info", fields).isprintable()


def test_long_text_is_cut_with_a_remark():
    stream = io.StringIO()
    log = Log(stream)
    log.event("e", text="x" * (MAX_FIELD_CHARS + 10))
    (record,) = records(stream, log)
    assert record["text"].endswith("x...(10 more)")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("nats://user:secret@broker:4222", "nats://***@broker:4222"),
        ("nats://a:s3cr@t@one:1,nats://b:pw@two:2", "nats://***@one:1,nats://***@two:2"),
        ("http://host/path?mail=a@b", "http://host/path?mail=a@b"),
        ("a@b", "a@b"),
        ("see https://token@host/x and http://h/", "see https://***@host/x and http://h/"),
    ],
)
def test_passwords_in_urls_are_masked(text, hidden):
    assert redact(text) == hidden
    stream = io.StringIO()
    log = Log(stream)
    log.event("e", url=text)
    assert records(stream, log)[0]["url"] == hidden


def test_a_repeated_mistake_costs_one_line_a_minute_with_the_number_left_out():
    now = [0.0]
    stream = io.StringIO()
    log = Log(stream, clock=lambda: now[0])
    for _ in range(1000):
        log.limited("bad:a", "event_rejected", worker="a")
        log.limited("bad:b", "event_rejected", worker="b")
    now[0] = 61.0
    log.limited("bad:a", "event_rejected", worker="a")
    log.limited("bad:a", "event_rejected", worker="a")
    told = [(r["worker"], r.get("suppressed")) for r in records(stream, log)]
    assert told == [("a", None), ("b", None), ("a", 999)]


def test_the_memory_of_limited_keys_is_bounded():
    log = Log(io.StringIO(), "error", clock=lambda: 0.0)
    for number in range(5000):
        log.limited(f"key-{number}", "e")
    assert len(log._limited) <= 1024


def test_a_stuck_stream_neither_blocks_nor_grows_and_the_gap_is_told_afterwards():
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "w") as stream:
        log = Log(stream, max_lines=100)
        started = time.monotonic()
        for number in range(5000):
            log.event("e", number=number, fill="x" * 1000)  # a full queue is more than a pipe holds
        assert time.monotonic() - started < 5
        assert log.dropped > 1000
        assert log.flush(0.01) is False
        received = bytearray()

        def drain() -> None:
            while chunk := os.read(reader.fileno(), 65536):
                received.extend(chunk)

        drainer = threading.Thread(target=drain)
        drainer.start()
        assert log.flush(10)
        log.event("last")
        assert log.close(10)
        stream.close()
        drainer.join(10)
    told = [json.loads(line) for line in received.decode().splitlines()]
    missing = sum(r["lines"] for r in told if r["event"] == "log_lines_dropped")
    assert missing == log.dropped and told[-1]["event"] in ("last", "log_lines_dropped")
    assert len([r for r in told if r["event"] == "e"]) + missing == 5000


def test_a_closed_stream_costs_its_lines_and_nothing_else():
    stream = io.StringIO()
    log = Log(stream)
    stream.close()
    for _ in range(10):
        log.event("e")
    assert log.flush(10)
    assert log.dropped == 10


def test_after_close_lines_are_counted_as_dropped():
    stream = io.StringIO()
    log = Log(stream)
    log.event("one")
    assert log.close(10) and log.close(10)
    log.event("two")
    assert log.dropped == 1 and len(stream.getvalue().splitlines()) == 1


def test_lines_of_several_threads_do_not_mix():
    stream = io.StringIO()
    log = Log(stream)
    threads = [
        threading.Thread(target=lambda name=name: [log.event("e", who=name, n=n) for n in range(200)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    told = records(stream, log)
    assert [[r["n"] for r in told if r["who"] == name] for name in "abcd"] == [list(range(200))] * 4


def test_a_sink_without_lines_has_no_thread():
    before = threading.active_count()
    LineSink(io.StringIO()).close()
    assert threading.active_count() == before


def test_library_lines_come_out_in_the_same_form():
    stream = io.StringIO()
    log = Log(stream)
    logger = logging.getLogger("some.library")
    with bridge_logging(log):
        logger.info("too quiet")
        logger.warning("server %s went away", "nats://u:p@host")
        logger.error("bad arguments %d", "x")
        try:
            raise KeyError("k")
        except KeyError:
            logger.exception("failed")
    logger.debug("after")
    told = records(stream, log)
    assert [(r["level"], r["event"], r["logger"]) for r in told] == [
        ("warning", "library", "some.library"),
        ("error", "library", "some.library"),
        ("error", "library", "some.library"),
    ]
    assert told[0]["message"] == "server nats://***@host went away"
    assert told[1]["message"] == "bad arguments %d"
    assert "KeyError: 'k'" in told[2]["traceback"]
