"""A short storm breaks no promise, and it finds a broken build."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from celery_singleton_lock.options.rules import SCOPES
from tests.storm.judge import summary
from tests.storm.mutants import MUTANTS
from tests.storm.run import storm
from tests.storm.scene import PLACES

pytestmark = [pytest.mark.slow, pytest.mark.storm, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("place", "load"), [*((place, "mixed") for place in PLACES), ("server", "flood")])
def test_no_promise_is_broken(tmp_path: Path, place: str, load: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    lines, found = storm(tmp_path, seed, 1.0, place=place, load=load)
    print(f"seed {seed}: {summary(lines, found)}")
    assert found == []
    assert len({line["kind"] for line in lines if line["event"] == "fault"}) > 5
    assert {line["task"] for line in lines if line["event"] == "sending"} >= {*SCOPES}
    assert sum(line["event"] == "start" for line in lines) > 20


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_build_is_found(tmp_path: Path, mutant: str) -> None:
    lines, found = storm(tmp_path, 1, 2.0, mutant=mutant, kinds="child", enough=bool)
    print(f"{mutant}: {summary(lines, found)}")
    assert found
