"""Celery signals about locks.

Every receiver gets `sender` (the task), `task_id`, `key`, and the arguments listed here. Receivers run in the process
that executes the task; if a receiver raises, that is logged and changes nothing. All times are in seconds.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: The execution holds its lock and is about to run. `lease`, `waited` (seconds that its message waited for it).
lock_acquired = Signal(name="lock_acquired", providing_args=["task_id", "key", "lease", "waited"])

#: The execution met a held lock. `conflict` (a `LockConflict`), `policy` (what was done about it).
lock_conflict = Signal(name="lock_conflict", providing_args=["task_id", "key", "conflict", "policy"])

#: The execution will not run, or was stopped, because a newer call has come. `by` (the id of the newer task). Sent in
#: addition to Celery's signals for a revoked task.
lock_superseded = Signal(name="lock_superseded", providing_args=["task_id", "key", "by"])

#: A call is a duplicate, as another message has the lock that the task takes when it is sent. `task_id` (of the other
#: message), `duplicate` (a `DuplicateTask`), `policy` (what the caller got; "follow" for a part of a canvas, which is
#: sent, and ends as the other message ends). Sent in the process that made the call.
lock_duplicate = Signal(name="lock_duplicate", providing_args=["task_id", "key", "duplicate", "policy"])

#: The lock was freed after the run. `lease`, `held` (seconds).
lock_released = Signal(name="lock_released", providing_args=["task_id", "key", "lease", "held"])

#: Copies are refused again and again. `in_a_row` (how many since a run under this key ended), `holder` (the id of the
#: task that has the lock), `node` (where it runs), `held` (for how long); each is None if this package did not write
#: the key's value. Sent from a separate thread.
lock_blocked = Signal(name="lock_blocked", providing_args=["task_id", "key", "in_a_row", "holder", "node", "held"])

#: The lease ended, or was about to, while the task was running. `lease`, `reason`. Sent from a separate thread.
lock_lost = Signal(name="lock_lost", providing_args=["task_id", "key", "lease", "reason"])
