"""Rules for beat: does any send at all, and each only its own schedule?"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from celery.beat import PersistentScheduler, Scheduler
from celery.utils.imports import symbol_by_name

from celery_singleton_lock._celery import named_schedulers
from celery_singleton_lock.diagnosis.finding import Finding, Subject, some
from celery_singleton_lock.diagnosis.settings import AppContext
from celery_singleton_lock.options.beat import BeatSettings


def led_by_nobody(it: AppContext) -> Iterator[Finding]:
    """A schedule that no beat sends."""
    if it.leaders != 0 or not getattr(_scheduler(it.app), "is_exclusive", False):
        return
    beat = BeatSettings.from_app(it.app)
    if beat.mode == "leader":
        yield Subject("beat").warning(
            f"beat_scheduler is exclusive, but no beat leads the schedule {beat.name}: none of it is sent",
            "start one: celery beat -S exclusive",
        )


def shared_with_others(it: AppContext) -> Iterator[Finding]:
    """A record of what was sent that another project writes, too."""
    if it.recorded and (own := entries_in_settings(it.app)) is not None:
        yield from of_others(BeatSettings.from_app(it.app).name, it.recorded, own)


def of_others(name: str, recorded: Collection[str], own: Collection[str]) -> Iterator[Finding]:
    """The entries that are recorded for a schedule of this name, if most of them are not its own."""
    chosen, mine = _chosen(recorded), _chosen(own)
    strangers = sorted(chosen - mine)
    if mine and len(strangers) > len(chosen & mine):
        yield Subject(f"schedule {name}").warning(
            f"the lock server records what was sent of {some(strangers)}, which are not in it: another project may "
            "have the same prefix and name, and only the schedule of one of the two is sent",
            "give each project its own singleton_lock_prefix; if these entries were removed or renamed, all is well",
        )


def entries_in_settings(app: Any) -> Collection[str] | None:
    """The names of the schedule's entries, if it is that of the settings; None if a scheduler has it elsewhere."""
    scheduler = _class_of(BeatSettings.from_app(app).scheduler)
    return [*(app.conf.beat_schedule or ())] if scheduler in (Scheduler, PersistentScheduler) else None


def _chosen(entries: Collection[str]) -> set[str]:
    """The entries without those that Celery adds to each project's schedule."""
    return {entry for entry in entries if not entry.startswith("celery.")}


def _scheduler(app: Any) -> Any:
    """Beat's scheduler according to the settings; its name if there is no such class."""
    return _class_of(app.conf.beat_scheduler)


def _class_of(scheduler: Any) -> Any:
    try:
        return symbol_by_name(scheduler, aliases=named_schedulers())
    except Exception:  # noqa: BLE001 - the imported module may do anything, such as use a Django model
        return scheduler


RULES = (led_by_nobody, shared_with_others)
