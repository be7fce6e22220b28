"""Everything that exists once per app and process: the checked settings, the lock store, the heartbeat, the journal."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from celery_singleton_lock import clock
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.in_bulk import Confirmations, Records
from celery_singleton_lock.journal.writer import JournalWriter
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.outage import MUTE
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store

#: Seconds for which a process that ends asks servers that may not answer, one after the other.
ENDING = 3.0

#: Reentrant: a signal handler may send a task while the first task is being sent.
_opening = Mutex(threading.RLock)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The locks of one app in this process."""

    settings: Settings
    store: Store
    heartbeat: Heartbeat
    journal: JournalWriter
    records: Records
    confirmations: Confirmations

    @classmethod
    def of(cls, app: Any) -> Runtime:
        """The runtime of `app`, made when it is first needed; this does not connect to anything yet.

        Raises:
            InvalidOption: a setting is unknown or not allowed.
        """
        runtime = _all_opened[-1].runtimes.get(app)
        return runtime if runtime is not None else _open(app)

    def write(self) -> bool:
        """Write what is left of all records, then of the journal; False if something was not answered."""
        until = clock.now() + ENDING
        is_silent = self.confirmations.send_all(until) or self.records.send_all(until)
        return not is_silent and self.journal.write()


#: When a process that ends may ask these stores again: a worker ends, and then the interpreter.
_mute_until: WeakKeyDictionary[Store, float] = WeakKeyDictionary()


def write_all() -> None:
    """Write what is left because the process ends, which waits for each silent server once."""
    with _opening.lock:
        runtimes = [runtime for opened in _all_opened for runtime in opened.runtimes.values()]
    for runtime in runtimes:
        if clock.now() >= _mute_until.get(runtime.store, 0.0) and not runtime.write():
            _mute_until[runtime.store] = clock.now() + MUTE


# A program may end right after it has sent.
atexit.register(write_all)


@contextmanager
def in_memory() -> Iterator[MemoryStore]:
    """Keep the locks of every app in this process in a new memory store meanwhile, and read their settings again."""
    store = MemoryStore()
    opened = _Opened(store)
    with _opening.lock:
        _all_opened.append(opened)
    try:
        yield store
    finally:
        with _opening.lock:
            _all_opened.remove(opened)


@dataclass(eq=False)
class _Opened:
    """The opened runtimes, by app, and the store that they share, if they share one."""

    store: MemoryStore | None = None
    runtimes: WeakKeyDictionary[Any, Runtime] = field(default_factory=WeakKeyDictionary)

    def open(self, app: Any) -> Runtime:
        settings = Settings.from_app(app, backend=None if self.store is None else "memory://")
        store = self.store or open_store(settings)
        keeps_journal = settings.journal and not settings.backend.in_memory
        journal = store.journal(settings.prefix, size=settings.journal) if keeps_journal else None
        writer = JournalWriter(journal, ref(app), settings.blocked_after)
        return Runtime(settings, store, Heartbeat(store), writer, Records(store), Confirmations(store))


#: First the runtimes with the stores from the settings, then those with memory stores instead; the last entry counts.
_all_opened = [_Opened()]


def _open(app: Any) -> Runtime:
    with _opening.lock:
        opened = _all_opened[-1]
        runtime = opened.runtimes.get(app)
        if runtime is None:
            runtime = opened.runtimes.setdefault(app, opened.open(app))
        return runtime
