"""The frame of `fullhit bench`: parts, table, JSON, exit code."""

import argparse
import json
import sys
import types

import pytest

from fullhit.lab import bench
from fullhit.lab.bench.table import Row, number, render


def arguments(*text):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(text)


@pytest.fixture
def parts(monkeypatch):
    """Puts modules in the place of the real parts."""

    def put(**rows):
        for part, function in rows.items():
            module = types.ModuleType(part)
            module.rows = function
            monkeypatch.setitem(sys.modules, f"fullhit.lab.bench.{bench.PARTS[part]}", module)

    return put


def skip(args):
    raise bench.Skip("no wrk here")


def test_all_parts_make_one_table_and_one_file(parts, capsys, tmp_path):
    parts(
        core=lambda args: [Row.at_most("quick enough", 4.0, "us", 5.0, "fullhit bench --only core")],
        events=lambda args: [Row.info("just so", args.rounds, "n", "cmd")],
        proxy=skip,
    )
    assert (
        bench.run(arguments("--only", "core,events,proxy", "--json", str(tmp_path / "out.json"), "--rounds", "2")) == 0
    )
    out = capsys.readouterr().out
    assert "quick enough" in out and "just so" in out
    assert "proxy: skipped: no wrk here" in out
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "rows": [
            {
                "name": "quick enough",
                "figure": 4.0,
                "unit": "us",
                "budget": 5.0,
                "ratio": 0.8,
                "ok": True,
                "command": "fullhit bench --only core",
                "limit": "<= 5",
            },
            {
                "name": "just so",
                "figure": 2,
                "unit": "n",
                "budget": None,
                "ratio": None,
                "ok": None,
                "command": "cmd",
                "limit": "",
            },
        ],
        "skipped": [{"part": "proxy", "reason": "no wrk here"}],
    }


def test_only_the_parts_that_were_asked_for_are_measured(parts, capsys):
    parts(core=skip, events=lambda args: [Row.info("event", 1, "n", "c")], proxy=skip)
    bench.run(arguments("--only", "events"))
    out = capsys.readouterr().out
    assert "event" in out and "skipped" not in out


def test_a_part_that_is_not_there_is_said_and_does_not_stop_the_others(parts, capsys, monkeypatch):
    monkeypatch.setattr(bench, "PARTS", {**bench.PARTS, "core": "no_such_rows"})
    parts(events=lambda args: [Row.info("event", 1, "n", "c")])
    assert bench.run(arguments("--only", "core,events")) == 0
    out = capsys.readouterr().out
    assert "core: skipped: this part is not there" in out and "event" in out


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 1)])
def test_a_missed_budget_fails_only_where_that_was_asked_for(parts, strict, code, capsys):
    parts(core=lambda args: [Row.at_least("too slow", 0.4, "x", 0.5, "c")])
    assert bench.run(arguments("--only", "core", *strict)) == code
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--only", "corn"], ["--only", ""], ["--rounds", "0"], ["--rounds", "x"]])
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        arguments(*wrong)
    assert "argument --" in capsys.readouterr().err


def test_budgets_work_in_both_directions():
    assert Row.at_most("a", 5.0, "us", 5.0, "c").ok
    assert not Row.at_most("a", 5.1, "us", 5.0, "c").ok
    assert Row.at_least("a", 0.5, "x", 0.5, "c").ok
    assert not Row.at_least("a", 0.49, "x", 0.5, "c").ok


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (1234567, "1,234,567")]
)
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_the_table_keeps_its_columns():
    lines = render([Row.at_most("a", 1, "us", 5, "c"), Row.info("much longer", 12345, "B", "c")]).splitlines()
    assert len({line.rindex("c") for line in lines[2:]}) == 1
