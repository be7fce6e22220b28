"""Due times and ids depend on the entry and its last run alone."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_singleton_lock import clock
from celery_singleton_lock.beat.ticks import (
    Tick,
    micros,
    moment,
    set_last,
    tick_of,
)

UTC = timezone.utc
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class World:
    """An app whose clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, zone: str = "UTC") -> None:
        self.present = NOON
        self.app = Celery("world", set_as_current=False, broker="memory://")
        self.app.conf.timezone = zone
        monkeypatch.setattr(clock, "wall", lambda: micros(self.present) / 1_000_000)

    def entry(self, scheduled: Any, last: datetime, **fields: Any) -> ScheduleEntry:
        if isinstance(scheduled, BaseSchedule):
            scheduled.app = self.app
        entry = ScheduleEntry(name="job", task="t", schedule=scheduled, last_run_at=last, app=self.app)
        entry.schedule.nowfun = lambda: self.present.astimezone(self.app.timezone)
        vars(entry).update(fields)
        return entry

    def tick(self, scheduled: Any, last: datetime, **fields: Any) -> Tick | None:
        return tick_of(self.entry(scheduled, last.astimezone(self.app.timezone), **fields))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def at(time: int) -> datetime:
    return moment(time, NOON)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_interval_is_due_one_interval_after_the_last_run(world: World) -> None:
    world.present = NOON + seconds(10.7)
    tick = world.tick(10.0, NOON)
    assert tick is not None
    assert at(tick.due) == at(tick.sets) == NOON + seconds(10)
    assert tick.following is not None
    assert at(tick.following) == NOON + seconds(20)
    assert tick.lateness == pytest.approx(0.7)
    assert tick.seconds_to_following == pytest.approx(9.3)
    assert tick.due_at == "2026-06-01T12:00:10+00:00"


def test_missed_ticks_are_made_up_for_by_one_run(world: World) -> None:
    world.present = NOON + seconds(35)
    tick = world.tick(10.0, NOON)
    assert tick is not None
    assert at(tick.due) == NOON + seconds(10)
    assert at(tick.sets) == world.present
    assert tick.seconds_to_following == 10


def test_crontab_is_due_on_the_minute_however_late_it_is_found(world: World) -> None:
    world.present = NOON + seconds(61.5)
    tick = world.tick(crontab(), NOON + seconds(3))
    assert tick is not None
    assert at(tick.due) == at(tick.sets) == NOON + seconds(60)


def test_solar_event_is_due_at_its_time(world: World) -> None:
    pytest.importorskip("ephem")
    world.present = NOON + timedelta(hours=9)
    ids = set()
    for late in (0.0, 0.5, 12.0):
        world.present += seconds(late)
        tick = world.tick(solar("sunset", 48.2, 16.4), NOON)
        assert tick is not None
        ids.add(tick.id_for("shop"))
        assert NOON + timedelta(hours=6) < at(tick.due) < NOON + timedelta(hours=8)
    assert len(ids) == 1


def test_relative_interval_is_due_on_the_full_minute(world: World) -> None:
    world.present = NOON + seconds(65)
    tick = world.tick(schedule(60.0, relative=True), NOON + seconds(3))
    assert tick is not None
    assert at(tick.due) == NOON + seconds(60)


def test_id_depends_only_on_the_schedule_the_entry_and_the_due_time(world: World) -> None:
    world.present = NOON + seconds(10.1)
    tick = world.tick(10.0, NOON)
    world.present = NOON + seconds(18)
    later = world.tick(10.0, NOON)
    assert tick is not None
    assert later is not None
    assert tick.id_for("shop") == later.id_for("shop")
    assert tick.id_for("shop") != tick.id_for("other shop")
    world.present = NOON + seconds(20.1)
    following = world.tick(10.0, at(tick.sets))
    assert following is not None
    assert following.id_for("shop") != tick.id_for("shop")


def test_id_is_the_same_in_every_release(world: World) -> None:
    """During a deploy, two versions send at the same time."""
    world.present = NOON + seconds(10.1)
    tick = world.tick(10.0, NOON)
    assert tick is not None
    assert tick.id_for("shop") == "a59e5cc3-716c-50a5-806e-9849cfc71e41"


class Odd(schedule):
    """A user's own schedule, due at any time."""

    def is_due(self, last_run_at: datetime) -> Any:
        return schedstate(True, 5.0)

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        raise NotImplementedError


def test_schedule_that_does_not_say_when_is_due_now(world: World) -> None:
    tick = world.tick(Odd(5.0), NOON - seconds(100))
    assert tick is not None
    assert at(tick.due) == at(tick.sets) == NOON
    assert tick.following is None
    assert tick.seconds_to_following is None


def test_clocked_entry_is_due_once(world: World) -> None:
    pytest.importorskip("django_celery_beat")
    from django_celery_beat.clockedschedule import clocked

    world.present = NOON + seconds(5)
    tick = world.tick(clocked(NOON), NOON - seconds(100))
    assert tick is not None
    assert at(tick.due) == at(tick.sets) == NOON
    assert world.tick(clocked(NOON), NOON) is None


def test_entry_with_a_start_time_is_due_then(world: World) -> None:
    """Its last run is set to decades ago."""
    world.present = NOON + seconds(2)
    model = type("Model", (), {"start_time": NOON})
    tick = world.tick(10.0, NOON - timedelta(days=365 * 30), model=model)
    assert tick is not None
    assert at(tick.due) == NOON
    assert tick.lateness == 2


def test_times_are_exact() -> None:
    for time in (datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(2099, 12, 31, 23, 59, 59, 999999, UTC)):
        assert moment(micros(time), time) == time
    vienna = datetime(2026, 10, 25, 2, 30, 0, 1, ZoneInfo("Europe/Vienna"), fold=1)
    assert moment(micros(vienna), vienna).utcoffset() == vienna.utcoffset()
    naive = datetime(2026, 1, 2, 3, 4, 5, 678901)
    assert moment(micros(naive), naive) == naive


#: Spring forward and fall back; the second zone shifts by half an hour.
SHIFTS = {
    "Europe/Vienna": (datetime(2026, 3, 29, 1, tzinfo=UTC), datetime(2026, 10, 25, 1, tzinfo=UTC)),
    "Australia/Lord_Howe": (datetime(2026, 4, 4, 15, tzinfo=UTC), datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    "America/New_York": (datetime(2026, 3, 8, 7, tzinfo=UTC), datetime(2026, 11, 1, 6, tzinfo=UTC)),
}
SCHEDULES = {
    "every 90 s": lambda: schedule(90.0),
    "each hour": lambda: schedule(3600.0),
    "minutes": lambda: crontab(minute="*/10"),
    "hours": lambda: crontab(minute=15),
    "in the gap": lambda: crontab(minute=30, hour=2),
    "nightly": lambda: crontab(minute=0, hour="1,3"),
}


@pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="older versions shift intervals and crontabs with the clock")
@pytest.mark.parametrize("zone", SHIFTS)
@pytest.mark.parametrize("shift", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ticks_across_a_shift_of_the_clock(monkeypatch: pytest.MonkeyPatch, zone: str, shift: int, name: str) -> None:
    """Each tick is later than the one before, is due when Celery says so, and has a new id."""
    world = World(monkeypatch, zone)
    begin = SHIFTS[zone][shift] - timedelta(hours=26)
    last, ids, dues = begin, set(), []
    world.present = begin
    while world.present < begin + timedelta(hours=52):
        entry = world.entry(SCHEDULES[name](), last.astimezone(world.app.timezone))
        is_due, wait = entry.is_due()
        if not is_due:
            world.present += seconds(wait)
            continue
        tick = tick_of(entry)
        assert tick is not None
        assert at(tick.due) <= world.present
        assert not dues or tick.due > dues[-1]
        assert tick.lateness <= 1, f"{at(tick.due)} was found at {world.present}"
        ids.add(tick.id_for("shop"))
        dues.append(tick.due)
        last = at(tick.sets)
    assert len(ids) == len(dues) > 1


def test_row_need_not_count_the_runs() -> None:
    """Other schedulers than django-celery-beat's have rows, too."""
    entry = SimpleNamespace(last_run_at=datetime(2020, 1, 1, tzinfo=UTC))
    entry.model = SimpleNamespace(last_run_at=entry.last_run_at)
    set_last(entry, 7)
    assert micros(entry.model.last_run_at) == 7


@settings(max_examples=200, deadline=None)
@given(
    every=st.floats(0.1, 1e6),
    late=st.floats(0, 3e6),
    skew=st.floats(0, 3e6),
    last=st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),
)
def test_hosts_with_different_clocks_find_the_same_tick(every: float, late: float, skew: float, last: datetime) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        ticks = []
        for offset in (late, late + skew):
            world.present = last + seconds(every) + seconds(offset) + seconds(0.000_002)
            ticks.append(world.tick(every, last))
        assert ticks[0] is not None
        assert ticks[1] is not None
        assert ticks[0].id_for("shop") == ticks[1].id_for("shop")
        assert all(tick.sets >= tick.due > tick.last for tick in ticks if tick)
