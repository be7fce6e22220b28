"""A short storm breaks no promise, and it finds a broken build."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from celery_singleton_lock import clock
from tests.storm.beats import storm_of_beats
from tests.storm.mutants import MUTANTS
from tests.storm.places import PLACES
from tests.storm.report import page, summary
from tests.storm.run import storm
from tests.storm.scene import TTL

#: Minutes after which a mutant counts as not found.
AT_MOST = 1.0


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", PLACES)
def test_no_promise_is_broken(tmp_path: Path, place: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    verdict = storm(tmp_path, seed, 1.0, place=place)
    print(page(verdict, place, TTL))
    assert verdict.broken == []
    assert len({fault.kind for fault in verdict.faults}) > 5
    assert verdict.bodies > verdict.messages / 2 > 20


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_build_is_found(tmp_path: Path, mutant: str) -> None:
    """With faults that spare the lock server and the broker: nothing that these forgot can excuse a finding."""
    began = clock.now()
    kinds = ("worker: frozen", "child: SIGKILL")
    verdict = storm(
        *(tmp_path, 1, AT_MOST),
        mutant=mutant,
        kinds=lambda name: name.startswith(kinds),
        enough=lambda found: bool(found.broken),
    )
    print(f"{mutant}: found after {clock.now() - began:.0f} s: {summary(verdict)}")
    assert verdict.broken


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scheduler", "sends_twice"), [("exclusive", False), ("celery", True)])
def test_two_beats_send_each_tick_once_or_under_one_id(tmp_path: Path, scheduler: str, sends_twice: bool) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    ticks = storm_of_beats(tmp_path, seed, 0.5, scheduler)
    print(ticks)
    assert (ticks.twice > ticks.repeated) is sends_twice
    assert ticks.goes_on
    assert ticks.arrived > 5
