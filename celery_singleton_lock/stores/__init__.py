"""Where locks are kept."""

from __future__ import annotations

from celery_singleton_lock.options import Settings
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.memory import MemoryStore

__all__ = ["Store", "open_store"]

_IN_THIS_PROCESS = MemoryStore()


def open_store(settings: Settings) -> Store:
    """The store that the settings name; nothing is connected to until it is used.

    Raises:
        InvalidOption: the backend's URL or a transport option is wrong.
    """
    if settings.backend.startswith("memory://"):
        return _IN_THIS_PROCESS
    # Imported here: `memory://` needs no Redis client.
    from celery_singleton_lock.stores.redis import RedisStore

    return RedisStore(settings.backend, settings.transport_options, server=settings.shown_backend)
