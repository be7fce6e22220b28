"""A scheduler for beat that can be started twice: `celery beat -S exclusive`.

There are three layers, each enough for its case. One beat leads by a lease, and the others are on standby. What was
sent is recorded where all beats see it, so the next leader neither repeats nor skips a tick. And a tick's task id is
made from the entry and its due time: if two beats send one tick all the same, the workers see one message twice, and
carry it out once.

It wraps any scheduler that ticks as Celery's do: `singleton_lock_beat_scheduler`, by default Celery's own. What the
wrapped scheduler sends is claimed and recorded (`claiming.py`).
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

from celery_singleton_lock import clock, process_identity
from celery_singleton_lock._celery import close_connection, forget_heap, scheduler_of
from celery_singleton_lock.beat.claiming import Claiming, NotNow, claiming
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.beat.leader import ASK_AFTER, RETRY_AFTER, Leadership
from celery_singleton_lock.diagnosis.settings import entries_in_settings, of_others
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.keys.key import key_of_beat
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import check_servers
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

#: The longest time in seconds that a claim lasts. If a leader is killed while it sends a tick, its successor waits this
#: long before it sends that tick again, even if the leader's lease was much longer.
MAX_CLAIM = 5.0


class ExclusiveScheduler(Scheduler):
    """Makes a scheduler exclusive: of all beats that run it, only one sends each tick.

    The wrapped scheduler exists only while this beat leads. It is made anew each time, from its own file or database
    and the shared record of what was sent.
    """

    #: For checks of the settings, and for schedulers that are derived from this one.
    is_exclusive = True

    def __init__(self, app: Any, *, lazy: bool = False, **kwargs: Any) -> None:
        """Raises `InvalidOption` for wrong settings, also for the lock server that is there."""
        self._settings = BeatSettings.from_app(app)
        self._wrapped = _class_of(self._settings.scheduler)
        self._arguments = kwargs
        self._inner: Claiming | None = None
        self._ticking = False
        begins = (
            "beat: this beat sends nothing until the lock server answers (celery locks doctor shows what to do): %s%s"
        )
        self._outage = Outage(begins=begins, level=logging.ERROR)
        #: The same on standby, when the beat that leads may well go on sending.
        self._outage_on_standby = Outage(begins="beat: on standby, and the lock server does not answer: %s%s")
        #: Whether it has compared the entries that the leader sends with its own.
        self._has_compared = False
        super().__init__(app, lazy=True, **kwargs)
        self._leadership: Leadership | None = None
        if lazy:
            return
        settings, store = Runtime.of(app).settings, Runtime.of(app).store
        if settings.enabled:
            check_servers(settings)
        else:
            store = MemoryStore()
        self._server = store.server
        key = key_of_beat(settings.prefix, self._settings.name)
        if self._settings.mode == "leader":
            self._leadership = self._candidacy(store, key)
        ttl = min(self._settings.ttl, MAX_CLAIM)
        self._claims = Claims(store.ledger(key), ttl=ttl, may_send=self._may_send)

    @property
    def schedule(self) -> Any:
        """The wrapped scheduler's; empty while another beat leads."""
        return {} if self._inner is None else self._inner.schedule

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        if self._inner is not None:
            self._inner.schedule = schedule

    @property
    def info(self) -> str:
        """For beat's banner."""
        return (
            f"    . exclusive -> {qualname(self._wrapped)}\n"
            f"    . mode -> {self._settings.mode} (ttl {self._settings.ttl:g}s)"
        )

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one due task if this beat leads; the seconds until the next call."""
        self._ticking = True
        try:
            seconds = self._tick(*args, **kwargs)
            self._outage.answered(self._server)
            self._outage_on_standby.answered(self._server)
        except LockUnavailable as error:
            on_standby = self._leadership is not None and self._leadership.on_standby
            (self._outage_on_standby if on_standby else self._outage).failed(error)
            seconds = RETRY_AFTER
        finally:
            self._ticking = False
        return seconds

    def sync(self) -> None:
        """Let the wrapped scheduler save its state."""
        if self._inner is not None:
            self._inner.sync()

    def close(self) -> None:
        """Stop sending, and let another beat lead at once."""
        if self._ticking:
            return  # A signal handler has interrupted a tick; the service closes again when the tick has unwound.
        if self._inner is not None:
            self._retire(self._inner)
        if self._leadership is not None:
            self._leadership.resign()

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        # Also if another beat leads now: what this beat left unsettled could delay it.
        self._claims.settle_in_time()
        if not self._leads():
            self._compare()
            return 0.0
        inner = self._take_over() if self._inner is None else self._inner
        try:
            seconds = inner.tick(*args, **kwargs)
        except NotNow as stopped:
            forget_heap(inner)
            if stopped.__cause__ is not None:
                raise stopped.__cause__ from None
            return 0.0
        return seconds if self._leadership is None else min(seconds, self._leadership.renews_in)

    def _leads(self) -> bool:
        """Whether this beat leads; gives up what it had as the leader of an earlier term."""
        if self._leadership is None:
            return True
        term, leads = self._leadership.term, False
        try:
            leads = self._leadership.lead(float(self.max_interval or ASK_AFTER))
        finally:
            if self._inner is not None and not (self._leadership.holds and self._leadership.term == term):
                self._retire(self._inner)
        return leads

    def _compare(self) -> None:
        """On standby: warn if the beat that leads sends another project's schedule, for then nobody sends this one."""
        own = None if self._has_compared else entries_in_settings(self.app)
        if own is not None and (recorded := self._claims.recorded()):
            self._has_compared = True
            for finding in of_others(self._settings.name, recorded, own):
                logger.warning("beat: on standby; %s", finding)

    def _take_over(self) -> Claiming:
        try:
            self._inner = inner = claiming(self._wrapped)(self.app, **self._arguments)
        except BaseException:
            # The schedule is wrong, or its database is missing: another host may fare better.
            if self._leadership is not None:
                self._leadership.resign()
            raise
        inner.take_part(self._claims, self._settings)
        return inner

    def _retire(self, inner: Claiming) -> None:
        """Give up the wrapped scheduler, and with it the broker's connection."""
        try:
            self._claims.give_up()
        except LockUnavailable as error:
            logger.warning("beat: could not record what was sent last: %s", error)
        self._inner = None  # Only now: if a signal interrupts that, the next call repeats it.
        try:
            inner.close()
        except Exception:
            logger.exception("beat: could not close the schedule")
        close_connection(inner)

    def _may_send(self) -> bool:
        return self._leadership is None or self._leadership.holds

    def _candidacy(self, store: Store, key: str) -> Leadership:
        node, process = f"beat@{socket.gethostname()}", process_identity.own()
        holder = Holder(node=node, pid=os.getpid(), since=clock.wall(), process=process)
        return Leadership(store, key, self._settings.name, ttl=self._settings.ttl, holder=holder)


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
    """`celery worker -B` ends its beat with SIGTERM, which by default leaves no time to resign."""
    if isinstance(scheduler_of(sender), ExclusiveScheduler):
        signal.signal(signal.SIGTERM, lambda *_: _end(sender))


def _end(service: Any) -> NoReturn:
    """As Celery ends a beat of its own: a second signal may interrupt the close that follows the first one."""
    service.sync()
    sys.exit(0)
