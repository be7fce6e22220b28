"""What people do in the admin, as a program: `python -m ... ACTION`, with the entry's fields as JSON on stdin.

A schedule is given by one of the fields `every` (seconds), `clocked` (a time) and `crontab` (its fields); times are
seconds since the epoch. Prints all entries.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from typing import Any

import django
from django.core.management import call_command

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integration.django_project.settings")
django.setup()

from django_celery_beat.models import ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask  # noqa: E402

#: Of a `PeriodicTask`.
TIMES = ("last_run_at", "start_time", "expires")


def add(name: str, **fields: Any) -> None:
    PeriodicTask.objects.create(name=name, task="shop.job", args=json.dumps([name]), **_fields(fields))


def change(name: str, **fields: Any) -> None:
    entry = PeriodicTask.objects.get(name=name)
    for field, value in _fields(fields).items():
        setattr(entry, field, value)
    entry.save()


def show() -> None:
    pass


def migrate() -> None:
    call_command("migrate", verbosity=0)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    fields = {name: _moment(value) if name in TIMES else value for name, value in given.items()}
    if "every" in fields:
        every = fields.pop("every")
        fields["interval"], _ = IntervalSchedule.objects.get_or_create(every=every, period=IntervalSchedule.SECONDS)
    if "clocked" in fields:
        fields["clocked"] = ClockedSchedule.objects.create(clocked_time=_moment(fields["clocked"]))
    if "crontab" in fields:
        fields["crontab"] = CrontabSchedule.objects.create(**fields["crontab"])
    return fields


def _moment(time: float) -> datetime:
    return datetime.fromtimestamp(time, timezone.utc)


def _row(entry: PeriodicTask) -> dict[str, Any]:
    return {
        "enabled": entry.enabled,
        "last_run_at": entry.last_run_at and entry.last_run_at.timestamp(),
        "total_run_count": entry.total_run_count,
    }


if __name__ == "__main__":
    {"add": add, "change": change, "show": show, "migrate": migrate}[sys.argv[1]](**json.load(sys.stdin))
    print(json.dumps({entry.name: _row(entry) for entry in PeriodicTask.objects.all()}))
