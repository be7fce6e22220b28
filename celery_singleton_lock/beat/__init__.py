"""Beat that can be started twice: one beat leads and claims and records what it sends, the others are on standby.

Begin with `scheduler.py`; `leader.py` decides between beats, `claiming.py` sends.
"""

from __future__ import annotations

from celery_singleton_lock.beat.scheduler import ExclusiveScheduler

__all__ = ["ExclusiveScheduler"]
