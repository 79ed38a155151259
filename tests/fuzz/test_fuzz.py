"""Damaged input for every parser; what once did harm is kept in ``corpus/`` and played again.

``make fuzz`` gives each target far more examples, found anew each time; a failure prints the bytes to keep.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from .mutations import damaged
from .targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
BY_NAME = {target.name: target for target in TARGETS}


def kept() -> list[Path]:
    return sorted(CORPUS.glob("*/*.bin"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_good_input_is_taken(target: Target) -> None:
    for seed in target.seeds:
        target.run(seed)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_input_does_no_harm(target: Target, data: st.DataObject) -> None:
    raw = data.draw(damaged(target.seeds))
    event("damaged" if raw not in target.seeds else "whole")
    try:
        target.run(raw)
    except Exception as error:
        error.add_note(f"keep it: echo {base64.b64encode(raw).decode()} | base64 -d > corpus/{target.name}/NAME.bin")
        raise


@pytest.mark.parametrize("path", kept(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_did_harm_before_does_none_now(path: Path) -> None:
    BY_NAME[path.parent.name].run(path.read_bytes())


def test_the_corpus_is_for_targets_that_exist() -> None:
    assert {path.parent.name for path in kept()} <= BY_NAME.keys()
