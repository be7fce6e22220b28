"""How a Celery scheduler checks whether its schedule was changed: after a pause it compares all of it, else only the
next entry.

Celery's own check compares the whole schedule before each message. For a thousand entries that are due together, this
makes a million comparisons, which take most of the time. Here, too, a removed or replaced entry is never sent as it
was. An entry that is added while many are sent is seen after them, or a second later.
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

#: Seconds after which all entries are compared, even without a pause.
COMPARE_AFTER = 1.0


class Comparing(Scheduler):
    """Mixed in behind the wrapped scheduler, which still does its own checks each time, for example of a database."""

    #: A schedule and its copy that were found equal, and until when they are taken for equal.
    _equal: tuple[object, object, float] = (None, None, 0.0)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As in Celery; the first tick after a pause compares all entries."""
        seconds = super().tick(*args, **kwargs)
        if seconds:
            self._equal = None, None, 0.0
        return seconds

    def schedules_equal(
        self, old_schedules: Mapping[str, ScheduleEntry] | None, new_schedules: Mapping[str, ScheduleEntry] | None
    ) -> bool:
        """Whether the heap was made from this schedule, as far as that matters for the next entry."""
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
