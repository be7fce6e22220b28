"""What beat sends next, as far as the app's settings and the lock server say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery.beat import ScheduleEntry

from celery_singleton_lock import cleaned
from celery_singleton_lock.beat.ticks import next_run
from celery_singleton_lock.journal_entry import REFUSALS
from celery_singleton_lock.web.watch import Snapshot


@dataclass(frozen=True, slots=True)
class Planned:
    """An entry of beat's schedule.

    Attributes:
        name: the name of the entry.
        task: the task that it sends; '' if the entry is not in the app's settings, but in a database, or was removed.
        schedule: its schedule, in Celery's words.
        last: its last run, in seconds since the epoch; for a new entry, when beat first saw it; None if there is no
            record of it.
        next: when it is due next; None if unknown.
        refused: how many of its ticks were refused, as far as the journal goes back.
    """

    name: str
    task: str
    schedule: str
    last: float | None
    next: float | None
    refused: int


def planned(app: Any, snapshot: Snapshot) -> list[Planned]:
    """The entries of the schedule, the next due first."""
    conf = app.conf.beat_schedule
    known = {cleaned.text(name): entry for name, entry in conf.items()} if isinstance(conf, Mapping) else {}
    refused = Counter(it.scheduled for it in snapshot.entries if it.kind in REFUSALS)
    entries = [
        _planned(app, name, known.get(name), snapshot, refused[name]) for name in sorted({*known, *snapshot.lasts})
    ]
    return sorted(entries, key=lambda entry: (entry.next is None, entry.next or 0.0, entry.name))


def _planned(app: Any, name: str, entry: Any, snapshot: Snapshot, refused: int) -> Planned:
    micros = snapshot.lasts.get(name, 0)
    last = micros / 1_000_000 if 0 < micros < cleaned.MAX_SECONDS * 1_000_000 else None
    task, shown, following = "", "", None
    with suppress(Exception):  # The settings may contain anything, and schedules may be users' code.
        task, shown = entry.get("task", ""), entry.get("schedule", "")
        at = datetime.fromtimestamp(last or snapshot.now, tz=timezone.utc)
        made = ScheduleEntry(name=name, app=app, last_run_at=at, **entry)
        shown, following = str(made.schedule).strip("<>"), next_run(made, at)
    next_at = None if following is None else following / 1_000_000
    return Planned(name, cleaned.text(task), cleaned.text(shown), last, next_at, refused)
