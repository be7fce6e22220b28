"""A scheduler for beat that can be started twice: `celery beat -S exclusive`.

Three layers, each enough for its case. One beat leads by a lease, the others stand by. What was sent is recorded where
all see it, so that the next leader neither repeats nor skips. And a tick's task id is made from the entry and its due
time, so that should two beats send one tick all the same, the workers see one message twice, and carry it out once.

It wraps any scheduler: `singleton_lock_beat_scheduler`, by default Celery's own.
"""

from __future__ import annotations

import heapq
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from celery.beat import Scheduler, event_t
from celery.signals import beat_embedded_init
from celery.utils.imports import qualname, symbol_by_name
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from celery_singleton_lock import clock, keys, process, ticks
from celery_singleton_lock.claims import Claims
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.leader import Leadership
from celery_singleton_lock.lease import Holder
from celery_singleton_lock.options import BeatSettings
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import Store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.ticks import Tick

logger = get_logger(__name__)

#: The message header that says when the tick was due, in ISO 8601, UTC.
DUE_HEADER = "singleton_lock_due"

#: Entries that are claimed in one round trip.
BATCH = 100

#: Seconds that a claim lasts at most: who follows on a leader that was killed while it sent waits so long to send that
#: tick again, also where its lease was much longer.
MAX_CLAIM = 5.0

#: Seconds until the next try: of a tick that another beat has claimed, and while a server does not answer.
AGAIN, RETRY_AFTER = 0.25, 1.0

#: Seconds that one tick of the service may wait for another beat to resign: the service looks between ticks whether it
#: is to stop.
PATIENCE = 4.0


class ExclusiveScheduler(Scheduler):
    """Makes a scheduler exclusive: of all beats that run it, one sends each tick.

    The wrapped scheduler exists only while this beat leads: it is made anew each time, from its own file or database
    and the shared record of what was sent.
    """

    def __init__(self, app: Any, *, lazy: bool = False, **kwargs: Any) -> None:
        """Raises `InvalidOption` for wrong settings; connects to nothing."""
        self._settings = BeatSettings.from_app(app)
        self._wrapped = _class_of(self._settings.scheduler)
        self._arguments = kwargs
        self._inner: Any = None
        self._ticking = False
        self._silent_since: float | None = None
        super().__init__(app, lazy=True, **kwargs)
        self._leadership: Leadership | None = None
        if lazy:
            return
        settings, store = Runtime.of(app).settings, Runtime.of(app).store
        if not settings.enabled:
            store = MemoryStore()
        key = keys.key_of_beat(settings.prefix, self._settings.name)
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
            self._heard()
        except LockUnavailable as error:
            seconds = self._unheard(error)
        finally:
            self._ticking = False
        return seconds

    def sync(self) -> None:
        """Have the wrapped scheduler keep its state."""
        if self._inner is not None:
            self._inner.sync()

    def close(self) -> None:
        """Stop sending, and let another beat lead at once."""
        if self._ticking:
            return  # A signal's handler has interrupted a tick; the service closes again when that has unwound.
        if self._inner is not None:
            self._retire()
        if self._leadership is not None:
            self._leadership.resign()

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        if not self._leads():
            return 0.0
        if self._inner is None:
            self._take_over()
        try:
            seconds: float = self._inner.tick(*args, **kwargs)
        except _NotNow as stopped:
            self._inner._heap = None
            if stopped.__cause__ is not None:
                raise stopped.__cause__ from None
            return 0.0
        return seconds if self._leadership is None else min(seconds, self._leadership.renews_in)

    def _leads(self) -> bool:
        """Whether this beat leads; what it had as the leader of an earlier term is given up."""
        if self._leadership is None:
            return True
        term, leads = self._leadership.term, False
        try:
            leads = self._leadership.lead(min(PATIENCE, float(self.max_interval or PATIENCE)))
        finally:
            if self._inner is not None and not (self._leadership.holds and self._leadership.term == term):
                self._retire()
        return leads

    def _take_over(self) -> None:
        try:
            self._inner = exclusive(self._wrapped)(self.app, **self._arguments)
        except BaseException:
            # A wrong schedule, or its database is not there: perhaps another host fares better.
            if self._leadership is not None:
                self._leadership.resign()
            raise
        self._inner.take_part(self._claims, self._settings)

    def _retire(self) -> None:
        """Give up the wrapped scheduler, and with it the broker's connection."""
        inner, self._inner = self._inner, None
        try:
            self._claims.give_up()
        except LockUnavailable as error:
            logger.warning("beat: what was sent last could not be recorded: %s", error)
        try:
            inner.close()
        except Exception:
            logger.exception("beat: the schedule could not be closed")
        if (connection := vars(inner).pop("connection", None)) is not None:
            with suppress(Exception):
                connection.release()

    def _may_send(self) -> bool:
        return self._leadership is None or self._leadership.holds

    def _candidacy(self, store: Store, key: str) -> Leadership:
        holder = Holder(
            node=f"beat@{socket.gethostname()}", pid=os.getpid(), since=clock.wall(), process=process.identity()
        )
        return Leadership(store, key, self._settings.name, ttl=self._settings.ttl, holder=holder)

    def _heard(self) -> None:
        if self._silent_since is not None:
            logger.warning("beat: the lock server answers again, after %.1f s", clock.now() - self._silent_since)
            self._silent_since = None

    def _unheard(self, error: LockUnavailable) -> float:
        if self._silent_since is None:
            logger.error("beat: nothing is sent until the lock server answers: %s", error)
            self._silent_since = clock.now()
        return RETRY_AFTER


class _NotNow(BaseException):
    """Leaves the wrapped scheduler's tick. Not an `Exception`: Celery takes those for faults of an entry."""


class _Claiming:
    """What is mixed into the wrapped scheduler: it sends what is claimed, under the tick's id, and records it."""

    def take_part(self, claims: Claims, settings: BeatSettings) -> None:
        """Claim from now on; nothing is sent before."""
        self._claims = claims
        self._settings = settings
        #: Ticks that the broker did not take.
        self._unsent: dict[str, tuple[Any, Tick]] = {}
        self._retries_at = 0.0
        self._heap: Any = None

    def tick(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped one's; before that, what the broker did not take."""
        if self._unsent and clock.now() >= self._retries_at:
            with _leaving():
                self._send_unsent()
        seconds = super().tick(*args, **kwargs)  # type: ignore[misc]
        if seconds:
            with _leaving():
                self._claims.record()
        return min(seconds, RETRY_AFTER) if self._unsent else seconds

    def populate_heap(self: Any, *args: Any, **kwargs: Any) -> None:
        """As the wrapped one's, with the last runs that all beats share."""
        self._heap = None
        with _leaving():
            behind = self._claims.align(self.schedule.values())
        for entry in behind:
            # Sent by a beat that died before it had written that to the database.
            self._advance(entry, ticks.micros(entry.last_run_at))
        super().populate_heap(*args, **kwargs)  # type: ignore[misc]

    def is_due(self: Any, entry: Any) -> Any:
        """Whether the entry's tick is due and ours to send."""
        tick = self._claims.granted(entry)
        if tick is None:
            is_due, seconds = found = super().is_due(entry)  # type: ignore[misc]
            if not is_due:
                return found
            tick = ticks.tick_of(entry)
            if tick is None:
                return self._pass_over(entry, ticks.micros(entry.last_run_at))
            if entry.name in self._unsent:
                return False, AGAIN
            with _leaving():
                refused = self._claims.take({**self._others_due(entry), entry.name: tick})
            if entry.name in refused:
                last, remaining = refused[entry.name].last, refused[entry.name].remaining
                return self._pass_over(entry, last) if last is not None else (False, min(remaining, AGAIN))
            if self._claims.granted(entry) is None:
                raise _NotNow  # It took too long.
        if self._is_too_late(tick):
            return self._skip(entry, tick)
        seconds = tick.seconds_to_following
        return True, self.max_interval if seconds is None else seconds

    def reserve(self: Any, entry: Any) -> Any:
        """Advance an entry to its tick."""
        tick = self._claims.granted(entry)
        if tick is None:
            self._claims.require(entry)
            raise _NotNow
        return self._advance(entry, tick.sets)

    def apply_entry(self: Any, entry: Any, producer: Any = None) -> None:
        """Send an entry's tick, if it still is ours."""
        tick = self._claims.granted(entry)
        if tick is None:
            raise _NotNow
        self._send(entry, tick, producer)

    def apply_async(self: Any, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped one's; notes when the broker has not taken it."""
        try:
            return super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            self._was_taken = not isinstance(error.__cause__ or error.__context__, (OperationalError, OSError))
            raise

    def _send(self: Any, entry: Any, tick: Tick, producer: Any) -> None:
        options, self._was_taken = entry.options, True
        entry.options = {
            "task_id": tick.id_for(self._settings.name),
            **options,
            "headers": {**(options.get("headers") or {}), DUE_HEADER: tick.due_at},
        }
        with _undisturbed():
            try:
                super().apply_entry(entry, producer=producer)  # type: ignore[misc]
            finally:
                entry.options = options
            if self._was_taken:
                self._unsent.pop(entry.name, None)
                with _leaving():
                    self._claims.sent(tick)
        if not self._was_taken:
            logger.warning("beat: %s is tried again, under the same id", entry.name)
            self._unsent[entry.name] = entry, tick
            self._retries_at = clock.now() + RETRY_AFTER

    def _send_unsent(self: Any) -> None:
        for entry, tick in list(self._unsent.values()):
            refused = self._claims.take({entry.name: tick}).get(entry.name)
            if refused is None and self._claims.granted(entry) is not None:
                self._send(entry, tick, self.producer)
            elif refused is not None and refused.last is not None:
                del self._unsent[entry.name]

    def _others_due(self: Any, entry: Any) -> dict[str, Tick]:
        """Ticks of the entries behind this one that are due as well, to be claimed along with it."""
        present, found = self._when(entry, 0), {}
        for event in sorted(event for event in self._heap or () if event.time <= present):
            other = event.entry
            if other is entry or other.name in self._unsent or self._claims.granted(other):
                continue
            with suppress(Exception):  # It will say so itself, when it is its turn.
                if super().is_due(other)[0] and (tick := ticks.tick_of(other)):  # type: ignore[misc]
                    found[other.name] = tick
            if len(found) == BATCH - 1:
                break
        return found

    def _pass_over(self: Any, entry: Any, last: int) -> tuple[bool, float]:
        """Another beat has sent the tick: take it as if it was sent here."""
        following = self._advance(entry, last)
        if self._heap and self._heap[0].entry is entry:
            is_due, seconds = super().is_due(following)  # type: ignore[misc]
            heapq.heapreplace(self._heap, event_t(self._when(following, 0 if is_due else seconds), 5, following))
        else:
            self._heap = None
        return False, 0.0

    def _is_too_late(self: Any, tick: Tick) -> bool:
        return self._settings.catch_up is not None and tick.lateness > self._settings.catch_up

    def _skip(self: Any, entry: Any, tick: Tick) -> tuple[bool, float]:
        logger.warning(
            "beat: %s was due %.1f s ago, longer than singleton_lock_beat_catch_up, and is skipped",
            *(entry.name, tick.lateness),
        )
        last = ticks.now()
        with _leaving():
            self._claims.sent(tick, last)
        passed_over: tuple[bool, float] = self._pass_over(entry, last)
        return passed_over

    def _advance(self: Any, entry: Any, last: int) -> Any:
        following = super().reserve(entry)  # type: ignore[misc]
        following.last_run_at = ticks.moment(last, following.last_run_at)
        if ticks.stored(following) is not None:
            following.model.last_run_at = following.last_run_at
        return following


@lru_cache
def exclusive(scheduler: type) -> type:
    """A class of schedulers as `scheduler`, which claims what it sends; for `ExclusiveScheduler`."""
    return type(f"Exclusive{scheduler.__name__}", (_Claiming, scheduler), {"__module__": scheduler.__module__})


@contextmanager
def _leaving() -> Iterator[None]:
    """Leave the wrapped scheduler's tick when the lock server does not answer."""
    try:
        yield
    except LockUnavailable as error:
        raise _NotNow from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off the signals that end beat: between sending and recording they would have a tick sent again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Not by a mask: another thread may get the signal, and its handler runs in this one all the same.
    came: set[int] = set()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: came.add(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _class_of(scheduler: str | type) -> type:
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
    """`celery worker -B` ends its beat by SIGTERM, which by default leaves no time to resign."""
    if isinstance(vars(sender).get("scheduler"), ExclusiveScheduler):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
