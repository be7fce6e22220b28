"""Beat that can be started twice: one leads, what it sends is claimed and recorded, the others stand by.

Begin with `scheduler.py`; `leader.py` decides between beats, `claiming.py` sends.
"""

from __future__ import annotations

from celery_singleton_lock.beat.scheduler import ExclusiveScheduler

__all__ = ["ExclusiveScheduler"]
