"""A lock object's knowledge of its hold, in each thread and on both sides of a fork."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import OWNER_LENGTH, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.mutex import Mutex

#: Characters of an owner that all holds with the same token share; the rest is new for each hold.
OF_TOKEN = 20

#: Held while an object's hold is noted.
_noting = Mutex(threading.RLock)


class Holding:
    """One hold of a lock; the heartbeat forgets it with the thread or the lock that it belongs to.

    Args:
        lease: its lease.
        heartbeat: renews the lease.
        on_lost: called once when the lease is lost.
    """

    __slots__ = ("__weakref__", "_heartbeat", "_is_lost", "_on_lost", "lease")

    def __init__(self, lease: Lease, heartbeat: Heartbeat, on_lost: Callable[[Lease], None]) -> None:
        self.lease = lease
        self._heartbeat = heartbeat
        self._on_lost = on_lost
        self._is_lost = False

    def when_lost(self) -> None:
        """Called in the heartbeat's thread, now and then once the lease is lost."""
        if not self._is_lost:
            # The callback may take long; other leases need the heartbeat's thread meanwhile.
            threading.Thread(target=self._on_lost, args=(self.lease,), name="singleton-lock-lost", daemon=True).start()
            self._is_lost = True

    def end(self) -> None:
        """Stop trusting and renewing it."""
        self._heartbeat.stop(self.lease)


class Releasing:
    """A release that was begun, and whether the lock was held then."""

    __slots__ = ("token", "was_held")

    def __init__(self, token: bytes, was_held: bool) -> None:
        self.token, self.was_held = token, was_held


class Local:
    """What a lock object knows of its hold; redis-py's lock has only the token."""

    _token: bytes | None = None
    _held: Holding | None = None
    #: A release that was begun, and not answered yet.
    releasing: Releasing | None = None

    @property
    def token(self) -> bytes | None:
        """Identifies the hold; None if there is none. Give it to another object to share the hold; None forgets it."""
        return self.known[0]

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        given, held = encoded(token), self._held
        if held is not None and (given != self._token or self.parent is not None):
            self._held = None
            held.end()
        self._token = given

    @property
    def held(self) -> Holding | None:
        """This process's own hold."""
        return self.known[1]

    @property
    def known(self) -> tuple[bytes | None, Holding | None]:
        """The token, and this process's own hold; neither if the parent process has it."""
        held = self._held
        return (self._token, held) if held is None or held.lease.pid == os.getpid() else (None, None)

    @property
    def parent(self) -> int | None:
        """The process that has the hold, if this is a child that was forked meanwhile."""
        held = self._held
        return None if held is None or held.lease.pid == os.getpid() else held.lease.pid

    def hold(self, held: Holding, token: bytes) -> None:
        """Note that the lock was acquired."""
        self._token, self._held, self.releasing = token, held, None

    def forget(self, held: Holding | None, token: bytes) -> None:
        """Note that this hold was released, unless another one was noted since."""
        if self._held is held and self._token == token:
            self._token = self._held = self.releasing = None


class LocalOfThread(Local, threading.local):
    """A separate one in each thread."""


class LocalOfAll(Local):
    """The same for all threads that share the object: one may get the lock while another notes that it was released."""

    def hold(self, held: Holding, token: bytes) -> None:
        with _noting.lock:
            super().hold(held, token)

    def forget(self, held: Holding | None, token: bytes) -> None:
        with _noting.lock:
            super().forget(held, token)


def encoded(token: str | bytes | None) -> bytes | None:
    """A token as bytes, as in `local.token`."""
    if token is None or isinstance(token, bytes):
        return token
    if isinstance(token, str):
        return token.encode()
    raise TypeError(f"a lock's token is {token!r}; allowed: text or bytes")


def owner_of(token: bytes) -> str:
    """The beginning of the owner of a hold with this token; of fixed length, so that none is the prefix of another."""
    return hashlib.sha256(token).hexdigest()[:OF_TOKEN]


def new_hold(token: bytes | None) -> tuple[bytes, str]:
    """The given token, or a new one, and an owner that belongs to it and that no hold had before."""
    if token:
        return token, owner_of(token) + new_owner()[OF_TOKEN:]
    made = new_owner().encode()
    return made, hashlib.sha256(made).hexdigest()[:OWNER_LENGTH]
