"""When a scheduler of Celery's checks whether its schedule was changed: at all of it after a pause, else at the next
entry.

Celery's own compares the whole schedule before each message: for a thousand entries that are due together that makes a
million comparisons, and most of their time. What was removed or replaced is not sent as it was here either; what is
added while many are sent is seen after them, or a second later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_singleton_lock import clock
from celery_singleton_lock._celery import next_entry

if TYPE_CHECKING:
    from celery_singleton_lock._celery import ScheduleEntry, Scheduler
else:
    from celery.beat import Scheduler

#: Seconds after which all is compared though there was no pause.
COMPARE_AFTER = 1.0


class Comparing(Scheduler):
    """Mixed in behind the wrapped scheduler, which looks each time at what is its own, such as a database."""

    #: The schedule and its copy that were found equal, and until when that is believed.
    _equal: tuple[object, object, float] = (None, None, 0.0)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As Celery's; before the one after a pause all is compared."""
        seconds = super().tick(*args, **kwargs)
        if seconds:
            self._equal = None, None, 0.0
        return seconds

    def schedules_equal(
        self, old_schedules: Mapping[str, ScheduleEntry] | None, new_schedules: Mapping[str, ScheduleEntry] | None
    ) -> bool:
        """Whether the schedule is what the heap was made of, as far as that matters for the next entry."""
        if self._may_be_believed(old_schedules, new_schedules):
            return True
        equal = super().schedules_equal(old_schedules, new_schedules)
        if equal:
            self._equal = old_schedules, new_schedules, clock.now() + COMPARE_AFTER
        return equal

    def _may_be_believed(
        self, old: Mapping[str, ScheduleEntry] | None, new: Mapping[str, ScheduleEntry] | None
    ) -> bool:
        known_old, known_new, until = self._equal
        if not old or not new or old is not known_old or new is not known_new or clock.now() >= until:
            return False
        entry = next_entry(self)
        if entry is None or entry.name not in old or entry.name not in new:
            return False
        return len(old) == len(new) and old[entry.name] == new[entry.name]
