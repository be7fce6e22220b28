"""The record by which a beat is seen: a lock of its own, which nobody else wants."""

from __future__ import annotations

import os
import socket

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_text, name_of_beat
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.store import Store


class Presence:
    """Shows a beat of the schedule `name` for `ttl` seconds at a time. Used by one thread."""

    def __init__(self, store: Store, prefix: str, name: str, *, ttl: float) -> None:
        self._store = store
        self._key = key_of_text(prefix, name_of_beat(name), new_owner())
        self._ttl = ttl
        node, process = f"beat@{socket.gethostname()}", process_identity.own()
        self._holder = Holder(node=node, pid=os.getpid(), since=clock.wall(), process=process)
        self._lease: Lease | None = None
        self._renews_at = float("-inf")

    @property
    def renews_in(self) -> float:
        """Seconds until it must be shown again."""
        return max(self._renews_at - clock.now(), 0.0)

    def show(self) -> None:
        """Show the beat, if it is time.

        Raises:
            LockUnavailable: it may not be shown until the next call.
        """
        if self.renews_in > 0:
            return
        self._renews_at = clock.now() + self._ttl * trust.RENEW_AFTER
        lease, self._lease = self._lease, None
        if lease is None or self._store.renew([lease], timeout=trust.step_of(self._ttl)) != [True]:
            found = self._store.acquire(LockRequest(self._key, new_owner(), ttl=self._ttl, holder=self._holder))
            lease = found if isinstance(found, Lease) else None
        self._lease = lease

    def end(self) -> None:
        """Show it no more.

        Raises:
            LockUnavailable: it is shown until it ends by itself.
        """
        if self._lease is not None:
            self._store.free(self._lease)
            self._lease = None
