"""Random numbers that a task has seeded remain its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.task.requeue import back_off


def test_spread_is_random_within_its_bounds() -> None:
    found = {clock.spread(8.0) for _ in range(100)}
    assert len(found) > 50
    assert all(4.0 <= seconds <= 8.0 for seconds in found)
    assert 7.2 <= clock.spread(8.0, least=0.9) <= 8.0


@pytest.mark.parametrize("use", [lambda: clock.spread(1.0), lambda: back_off(3)])
def test_seeded_numbers_of_a_task_are_left_alone(use: Callable[[], object]) -> None:
    before = random.getstate()
    use()
    assert random.getstate() == before
