"""The harness behind benchmarks/results/packages.md sees what each kind of task lock does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks import task_race
from benchmarks.task_race import Course, Job
from benchmarks.task_race_app import LONG
from benchmarks.tasks import SENT


@pytest.fixture
def course() -> Iterator[Callable[[str], Course]]:
    with ExitStack() as exits:
        yield lambda contestant: Course(contestant, exits)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call this to give every event, from then on, more time than a busy machine takes."""
    return lambda: monkeypatch.setattr(task_race, "MOMENT", 60.0)


@pytest.mark.slow
def test_harness_sees_what_singleton_task_does(course: Callable[[str], Course], patient: Callable[[], None]) -> None:
    ours = course("`SingletonTask`")
    assert task_race.sent_by_name(ours) == "1 at once"
    patient()
    assert task_race.queued(ours) == "10"
    assert task_race.in_a_chain(ours) == "REVOKED, not run"
    assert "3 of 3 attempts" in task_race.retried(ours).values()


@pytest.mark.slow
def test_harness_sees_what_celery_singleton_does(course: Callable[[str], Course], patient: Callable[[], None]) -> None:
    other = course("celery-singleton")
    assert task_race.in_a_chain(other) == "PENDING forever, not run"
    patient()
    assert task_race.queued(other) == "1"
    assert task_race.sent_by_name(other) == "2 at once"
    assert task_race.killed_sender(other) == "stuck"


@pytest.mark.slow
def test_harness_sees_what_a_lock_at_send_time_does(course: Callable[[str], Course]) -> None:
    ours = course(SENT)
    job = Job(ours, "killed", "work", LONG)
    ours.send_and_die(job)
    with ours.locks.client() as locks:
        assert [*locks.scan_iter("*:queue*")], "the sender has left its lock behind"
    assert job.runs == []
    assert task_race.queued(ours) == "1"
