"""`celery -A shop locks …`, for operators; Celery loads it through its entry point.

Begin with `command`, the base of all commands; each command has its own module. `diagnosis.held` has the lock as the
commands show it.
"""

from __future__ import annotations

import click

from celery_singleton_lock.cli import doctor, explain, free, journal, listing, rehearse, show, web

__all__ = ["locks"]


@click.group()
def locks() -> None:
    """Look at the locks of exclusive tasks and at the beats; free locks that were left behind."""


for each in (
    listing.list_,
    show.show,
    free.release,
    free.clear,
    journal.stats,
    journal.exporter,
    journal.timeline,
    explain.explain,
    doctor.doctor,
    rehearse.rehearsal,
    web.web,
):
    locks.add_command(each)
