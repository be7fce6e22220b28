"""Celery signals about locks.

Every receiver gets `sender` (the task), `task_id`, `key`, and the arguments listed here. Receivers run in the process
that executes the task; what they raise is logged and changes nothing. Seconds everywhere.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: The execution holds its lock and is about to run. `lease`, `waited` (seconds until it was free).
lock_acquired = Signal(name="lock_acquired", providing_args=["task_id", "key", "lease", "waited"])

#: The execution met a held lock. `conflict` (a `LockConflict`), `policy` (what was done about it).
lock_conflict = Signal(name="lock_conflict", providing_args=["task_id", "key", "conflict", "policy"])

#: The lock was freed after the run. `lease`, `held` (seconds).
lock_released = Signal(name="lock_released", providing_args=["task_id", "key", "lease", "held"])

#: The lease ended, or was about to, while the task was running. `lease`, `reason`. Sent from a thread of its own.
lock_lost = Signal(name="lock_lost", providing_args=["task_id", "key", "lease", "reason"])
