"""Apps with locks in memory, and locks and journal entries that are made without workers."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest

#: A text that breaks out of text, attributes, scripts and addresses unless it is escaped.
HOSTILE = "\"'></td><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}${7*7}javascript:alert(3)&lt;"

#: The name of the task that each app has.
TASK = "shop.export"


def app_in_memory(**conf: Any) -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(conf)
    return with_task(app)


def with_task(app: Celery) -> Celery:
    app.task(name=TASK, shared=False, base=SingletonTask, lock_key=["tenant"])(_export)
    return app


def _export(tenant: str) -> None: ...


@cache
def over() -> str:
    """The identity of a process of this host that has ended."""
    code = "from celery_singleton_lock import process_identity; print(process_identity.own())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def key_of(app: Celery, text: str, name: str = TASK) -> str:
    return key_of_text(Runtime.of(app).settings.prefix, name, text)


def hold(app: Celery, text: str, *, queued: bool = False, name: str = TASK, ttl: float = 600.0, **holder: Any) -> Lease:
    """Take the lock of a call; `holder` says more about its holder."""
    said = {"task_id": f"id-of-{text}", "node": "one@web", "pid": 7, "since": clock.wall() - 100, "ttl": ttl}
    key = key_of(app, text, name)
    request = LockRequest(
        key_of_queue(key) if queued else key,
        new_owner(),
        ttl=ttl,
        holder=Holder(**{**said, "label": f"tenant={text}", **holder}),
    )
    lease = Runtime.of(app).store.acquire(request)
    assert isinstance(lease, Lease)
    return lease


def entry(app: Celery, text: str, kind: Any = "run", *, ago: float = 10.0, lasted: float = 5.0, **more: Any) -> Entry:
    """A journal entry: what became of a copy."""
    began = clock.wall() - ago
    said = {"label": f"tenant={text}", "outcome": "SUCCESS" if kind == "run" else ""}
    made = Entry(kind, TASK, key_of(app, text), f"id-of-{text}", "one@web", 7, began, began + lasted)
    return made._replace(**{**said, **more})


def write(app: Celery, *entries: Entry) -> None:
    """Write entries into the journal, with their counts."""
    runtime = Runtime.of(app)
    counted = [pair for it in entries for pair in metrics.of(it)]
    counts = {metrics.dumps(count): by for count, by in counted}
    runtime.store.journal(runtime.settings.prefix, size=runtime.settings.journal).write(
        counts, entries, now=clock.wall()
    )
