"""How a scheduler of Celery's sends only what is its to send: a tick is claimed, sent under its own id, and recorded.

Mixed into the scheduler's class. That keeps its schedule, its heap and its way of ticking; what is changed is how an
entry is found due, advanced and sent.
"""

from __future__ import annotations

import heapq
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from celery.beat import event_t
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from celery_singleton_lock import clock
from celery_singleton_lock.beat import ticks
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal_entry import SCHEDULED_HEADER
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.task.message_identity import SENT_HEADER, fixed

logger = get_logger(__name__)

#: The message header that says when the tick was due, in ISO 8601, UTC.
DUE_HEADER = "singleton_lock_due"

#: Entries that are claimed in one round trip.
BATCH = 100

#: Seconds until the next try: of a tick that another beat has claimed, and of one that the broker has not taken.
AGAIN, RETRY_AFTER = 0.25, 1.0


class NotNow(BaseException):
    """Leaves the wrapped scheduler's tick. Not an `Exception`: Celery takes those for faults of an entry."""


class Claiming:
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
                raise NotNow  # It took too long.
        if self._is_too_late(tick):
            return self._skip(entry, tick)
        seconds = tick.seconds_to_following
        return True, self.max_interval if seconds is None else seconds

    def reserve(self: Any, entry: Any) -> Any:
        """Advance an entry to its tick."""
        tick = self._claims.granted(entry)
        if tick is None:
            self._claims.require(entry)
            raise NotNow
        return self._advance(entry, tick.sets)

    def apply_entry(self: Any, entry: Any, producer: Any = None) -> None:
        """Send an entry's tick, if it still is ours."""
        tick = self._claims.granted(entry)
        if tick is None:
            raise NotNow
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
        task_id = tick.id_for(self._settings.name, self._claims.secret)
        headers = {DUE_HEADER: tick.due_at, SCHEDULED_HEADER: entry.name, SENT_HEADER: fixed(task_id)}
        entry.options = {"task_id": task_id, **options, "headers": {**(options.get("headers") or {}), **headers}}
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
def claiming(scheduler: type) -> type:
    """A class of schedulers as `scheduler`, which claims what it sends."""
    return type(f"Claiming{scheduler.__name__}", (Claiming, scheduler), {"__module__": scheduler.__module__})


@contextmanager
def _leaving() -> Iterator[None]:
    """Leave the wrapped scheduler's tick when the lock server does not answer."""
    try:
        yield
    except LockUnavailable as error:
        raise NotNow from error


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
