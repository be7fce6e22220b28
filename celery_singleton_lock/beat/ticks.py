"""Which tick of a schedule is due, and its id: the same on every beat that knows the same last run.

A tick is an entry's due time. It follows from the entry's schedule and its last run alone, never from the time of the
check, so every beat gives it the same id. Its due time becomes the last run: ticks do not drift, and a host whose clock
differs finds the same ticks. Only after a gap of more than one tick does the last run become the present, which is
Celery's own rule: one run makes up for all that were missed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.utils.time import maybe_make_aware

from celery_singleton_lock import clock

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: The namespace of the ids of ticks; made once with uuid4.
_NAMESPACE = uuid.UUID("5f0c5d1e-8a0b-4c39-9d43-7a1f6f6a2f0e")


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of an entry. Times are microseconds since the epoch.

    Attributes:
        last: the entry's last run, from which this tick follows.
        sets: the entry's last run once this tick is sent.
        following: when the next tick is due; None if that is not known.
    """

    entry: str
    last: int
    due: int
    sets: int
    following: int | None

    def id_for(self, key: str) -> str:
        """The id of the task that is sent for this tick by any beat of the schedule with this key."""
        return str(uuid.uuid5(_NAMESPACE, f"{key}\n{self.entry}\n{self.due}"))

    @property
    def due_at(self) -> str:
        """When it is due, in ISO 8601, UTC."""
        return moment(self.due, _EPOCH).isoformat()

    @property
    def lateness(self) -> float:
        """Seconds since it was due."""
        return max(now() - self.due, 0) / 1_000_000

    @property
    def seconds_to_following(self) -> float | None:
        """Seconds until the next tick is due."""
        return None if self.following is None else max(self.following - now(), 0) / 1_000_000


def now() -> int:
    return round(clock.wall() * 1_000_000)


def tick_of(entry: Any) -> Tick | None:
    """The tick of an entry that its scheduler found due; None if that tick was sent already."""
    last, present = micros(entry.last_run_at), now()
    due = next_run(entry, entry.last_run_at)
    if due is not None and due <= last and hasattr(entry.schedule, "clocked_time"):
        return None  # A clocked entry of django-celery-beat: due once, but reported as due forever after.
    if due is None or not last < due <= present:
        due = present  # The schedule does not go by its last run.
    if start := getattr(getattr(entry, "model", None), "start_time", None):
        due = max(due, micros(start))  # django-celery-beat sets the last run of such an entry to long ago.
    following = next_run(entry, moment(due, entry.last_run_at))
    if following is None or due < following <= present:
        following = next_run(entry, moment(present, entry.last_run_at))
        return Tick(entry.name, last, due, present, following)
    return Tick(entry.name, last, due, due, following)


def last_of(entry: Any) -> int:
    """An entry's last run, as far as its scheduler knows."""
    last = micros(entry.last_run_at)
    clocked, model = getattr(entry.schedule, "clocked_time", None), getattr(entry, "model", None)
    if clocked is not None and not getattr(model, "total_run_count", 0):
        # A clocked entry of django-celery-beat that never ran: "last" is when it was saved, maybe after it was due.
        return min(last, micros(clocked) - 1)
    return last


def stored(entry: Any) -> int | None:
    """The last run in an entry's model, to be written to its database; None if the entry is not kept in one."""
    last = getattr(getattr(entry, "model", None), "last_run_at", None)
    return None if last is None else micros(last)


def set_last(entry: Any, last: int, *, runs: int = 0) -> None:
    """Set an entry's last run, also in its row if it is kept in a database; there, add `runs` to its count of runs."""
    entry.last_run_at = moment(last, entry.last_run_at)
    if stored(entry) is not None:
        entry.model.last_run_at = entry.last_run_at
        if hasattr(entry.model, "total_run_count"):
            entry.model.total_run_count += runs


def micros(time: datetime) -> int:
    """A point in time; without a time zone it is UTC, as in Celery."""
    return (maybe_make_aware(time) - _EPOCH) // _MICROSECOND


def moment(time: int, like: datetime) -> datetime:
    """A point in time in the time zone of `like`, or without a time zone if `like` has none."""
    aware = _EPOCH + time * _MICROSECOND
    return aware.astimezone(like.tzinfo) if like.tzinfo else aware.replace(tzinfo=None)


def next_run(entry: Any, last: datetime) -> int | None:
    """When an entry that last ran at `last` is due; None if its schedule does not say."""
    schedule = entry.schedule
    try:
        aware = maybe_make_aware(last).astimezone(schedule.tz)
        with _at(schedule, aware):
            remaining: timedelta = schedule.remaining_estimate(aware)
    except Exception:  # noqa: BLE001 - schedules are users' code as well
        return None
    return micros(aware) + remaining // _MICROSECOND


@contextmanager
def _at(schedule: Any, present: datetime) -> Iterator[None]:
    """Make a schedule take `present` for the present, so that its answer does not depend on when it is asked."""
    nowfun = schedule.nowfun
    schedule.nowfun = lambda: present
    try:
        yield
    finally:
        schedule.nowfun = nowfun
