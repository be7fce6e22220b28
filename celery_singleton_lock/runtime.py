"""What an app has once per process: its checked settings, its lock store, its heartbeat, its part of the journal."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.options import Settings
from celery_singleton_lock.stores import Store, open_store
from celery_singleton_lock.tally import Tally
from celery_singleton_lock.warner import Warner

_runtimes: WeakKeyDictionary[Any, Runtime] = WeakKeyDictionary()
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Runtime:
    """The locks of one app in this process."""

    settings: Settings
    store: Store
    heartbeat: Heartbeat
    tally: Tally

    @classmethod
    def of(cls, app: Any) -> Runtime:
        """The runtime of `app`, made when it is first needed; nothing is connected to yet.

        Raises:
            InvalidOption: a setting is unknown or not allowed.
        """
        runtime = _runtimes.get(app)
        return runtime if runtime is not None else _open(app)


def _open(app: Any) -> Runtime:
    with _opening:
        runtime = _runtimes.get(app)
        if runtime is None:
            settings = Settings.from_app(app)
            store = open_store(settings)
            journal = store.journal(settings.prefix, size=settings.journal) if settings.journal else None
            tally = Tally(journal, Warner(ref(app), settings.blocked_after))
            runtime = _runtimes[app] = Runtime(settings, store, Heartbeat(store), tally)
        return runtime
