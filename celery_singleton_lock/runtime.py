"""What an app has once per process: its checked settings, its lock store, its heartbeat."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.options import Settings
from celery_singleton_lock.stores import Store, open_store

_runtimes: WeakKeyDictionary[Any, Runtime] = WeakKeyDictionary()
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Runtime:
    """The locks of one app in this process."""

    settings: Settings
    store: Store
    heartbeat: Heartbeat

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
            runtime = _runtimes[app] = Runtime(settings, store, Heartbeat(store))
        return runtime
