"""A scheduler for beat that can be started more than once: `celery beat -S exclusive`.

Every beat ticks, and three layers make each tick one message. A tick's claim on the lock server decides which beat
sends it. What was sent is recorded where all beats see it, so no beat repeats or skips a tick. And a tick's task id is
made from the entry and its due time: if two beats send one tick all the same, the workers see one message twice, and
carry it out once.

It makes a subclass of any scheduler that ticks as Celery's do: `singleton_lock_beat_scheduler`, by default Celery's
own.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from celery.beat import Scheduler
from celery.signals import beat_embedded_init
from celery.utils.imports import qualname, symbol_by_name
from celery.utils.log import get_logger

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock._celery import forget_heap, scheduler_of
from celery_singleton_lock.beat.claiming import RETRY_AFTER, Claiming, NotNow
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_beat, key_of_text, name_of_beat
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.app import BeatSettings
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import check_servers
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)


class ExclusiveScheduler(Claiming):
    """Makes a scheduler exclusive: of all beats that run it, only one sends each tick."""

    #: For checks of the settings, and for schedulers that are derived from this one.
    is_exclusive = True

    def __new__(cls, app: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises `InvalidOption` for a scheduler that cannot be wrapped.

        Where locks are disabled, this makes the scheduler that would be wrapped: nothing is shared with other beats.
        """
        wrapped = _class_of(BeatSettings.from_app(app).scheduler)
        if not Runtime.of(app).settings.enabled:
            return wrapped(app, *args, **kwargs)
        return super().__new__(_exclusive(cls, wrapped))

    def __init__(self, app: Any, *, lazy: bool = False, **kwargs: Any) -> None:
        """Raises `InvalidOption` for wrong settings, also for the lock server that is there."""
        self._settings = BeatSettings.from_app(app)
        self._is_ticking, self._is_closed = False, False
        if not lazy:
            self._join(Runtime.of(app))
        super().__init__(app, lazy=lazy, **kwargs)

    @property
    def info(self) -> str:
        """For beat's banner."""
        wrapped = type(self).__bases__[1]
        return "\n".join(filter(None, (super().info, f"    . exclusive -> {qualname(wrapped)}")))

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one due task if no other beat does; the seconds until the next call."""
        self._is_ticking = True
        try:
            seconds = super().tick(*args, **kwargs)
            self._presence.show()
        except (NotNow, LockUnavailable) as stopped:
            forget_heap(self)
            error = stopped.__cause__ if isinstance(stopped, NotNow) else stopped
            if not isinstance(error, LockUnavailable):
                return 0.0
            (self._outage_beside if self._claims.is_beaten else self._outage).failed(error)
            return RETRY_AFTER
        finally:
            self._is_ticking = False
        # If it did not answer before, it has now been asked for all last runs.
        for outage in (self._outage, self._outage_beside):
            outage.answered()
        return min(seconds, self._presence.renews_in)

    def close(self) -> None:
        """Stop sending, and leave the rest to other beats."""
        if self._is_ticking or self._is_closed:
            return  # A signal handler has interrupted a tick; the service closes again when the tick has unwound.
        try:
            self._claims.give_up()
            self._presence.end()
        except LockUnavailable as error:
            logger.warning("beat: could not record what was sent last: %s", error)
        self._is_closed = True  # Only now: if a signal interrupts that, the next call repeats it.
        super().close()

    def _join(self, runtime: Runtime) -> None:
        """Find the lock server, and what all beats of this schedule share."""
        settings, store, name, ttl = runtime.settings, runtime.store, self._settings.name, self._settings.ttl
        if settings.backend.in_memory:
            raise InvalidOption(
                "setting singleton_lock_backend is 'memory://', which beats do not share; allowed here: the URL of a "
                "lock server, such as redis://localhost:6379/0, or singleton_lock_enabled = False"
            )
        check_servers(settings)
        self._key = key_of_beat(settings.prefix, name)
        begins = (
            "beat: this beat sends nothing until the lock server answers (celery locks doctor shows what to do): %s"
        )
        self._outage = Outage(store.server, begins=begins, level=logging.ERROR)
        #: The same where another beat has sent the last tick, and may well go on.
        self._outage_beside = Outage(store.server, begins="beat: the lock server does not answer this beat: %s")
        self._claims = Claims(store.ledger(self._key), ttl=ttl)
        self._presence = Presence(store, settings.prefix, name, ttl=ttl)


class Presence:
    """Shows a beat of the schedule `name` for `ttl` seconds at a time, by a lock that nobody else wants. Used by one
    thread.
    """

    def __init__(self, store: Store, prefix: str, name: str, *, ttl: float) -> None:
        self._store = store
        self._key = key_of_text(prefix, name_of_beat(name), new_owner())
        self._ttl = ttl
        node, process = f"beat@{socket.gethostname()}", process_identity.own()
        self._holder = Holder(node=node, pid=os.getpid(), since=clock.wall(), process=process)
        self._hold: Hold | None = None
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
        if self._hold is None or self._store.renew([self._hold], timeout=trust.step_of(self._ttl)) != [True]:
            request = LockRequest(self._key, new_owner(), ttl=self._ttl, holder=self._holder)
            self._hold = request.hold()  # Before it asks: a signal may interrupt that, and the beat end.
            self._store.acquire(request)

    def end(self) -> None:
        """Show it no more.

        Raises:
            LockUnavailable: it is shown until it ends by itself.
        """
        if self._hold is not None:
            self._store.free(self._hold)
            self._hold = None


def _exclusive(own: type[ExclusiveScheduler], wrapped: type[Scheduler]) -> type[ExclusiveScheduler]:
    """A subclass of `wrapped` that is exclusive."""
    return type(f"Exclusive{wrapped.__name__}", (own, wrapped), {"__module__": wrapped.__module__})


def _class_of(scheduler: str | type) -> Any:
    try:
        found: Any = symbol_by_name(scheduler) if isinstance(scheduler, str) else scheduler
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOption(f"setting singleton_lock_beat_scheduler is {scheduler!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)) or issubclass(found, ExclusiveScheduler):
        raise InvalidOption(
            f"setting singleton_lock_beat_scheduler is {scheduler!r}; allowed: a subclass of celery.beat.Scheduler "
            "other than ExclusiveScheduler itself"
        )
    return found


@beat_embedded_init.connect
def _unwind_when_terminated(sender: Any = None, **_: Any) -> None:
    """`celery worker -B` ends its beat with SIGTERM, which by default leaves no time to close."""
    if isinstance(scheduler_of(sender), ExclusiveScheduler):
        signal.signal(signal.SIGTERM, lambda *_: _end(sender))


def _end(service: Any) -> NoReturn:
    """As Celery ends a beat of its own: a second signal may interrupt the close that follows the first one."""
    service.sync()
    sys.exit(0)
