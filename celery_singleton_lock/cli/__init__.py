"""`celery -A shop locks …`, for operators; Celery loads it through its entry point.

Begin with `command`, the base of all commands; each command has its own module. `diagnosis.held` has the lock as the
commands show it.
"""

from __future__ import annotations

import click

from celery_singleton_lock.cli import (
    diagnose,
    explain,
    exporter,
    free,
    listing,
    rehearse,
    show,
    stats,
    timeline,
    web,
)

__all__ = ["locks"]


@click.group()
def locks() -> None:
    """Look at the locks of exclusive tasks and at the leader of beat; free locks that were left behind."""


locks.add_command(listing.list_)
locks.add_command(show.show)
locks.add_command(free.release)
locks.add_command(free.clear)
locks.add_command(stats.stats)
locks.add_command(exporter.exporter)
locks.add_command(timeline.timeline)
locks.add_command(diagnose.audit)
locks.add_command(explain.explain)
locks.add_command(diagnose.doctor)
locks.add_command(rehearse.rehearsal)
locks.add_command(web.web)
