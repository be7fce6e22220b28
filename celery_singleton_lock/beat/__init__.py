"""Beat that can be started more than once: every beat ticks, and a tick is sent by the beat that claims it.

Begin with `scheduler.py`; `claiming.py` decides about each entry, and sends.
"""

from __future__ import annotations

from celery_singleton_lock.beat.scheduler import ExclusiveScheduler

__all__ = ["ExclusiveScheduler"]
