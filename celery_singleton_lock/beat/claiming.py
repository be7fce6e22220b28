"""Makes a Celery scheduler send only its own ticks: a tick is claimed, sent under its own id, and recorded.

The scheduler keeps its schedule, its heap and its way of ticking. This changes how an entry is found due, advanced and
sent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from celery_singleton_lock._celery import PunctualScheduler, forget_heap, put_off, turn_in
from celery_singleton_lock.beat import ticks
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.diagnosis.audit import of_others
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.options.app import BeatSettings
from celery_singleton_lock.task import header
from celery_singleton_lock.task.header import fixed

logger = get_logger(__name__)

#: Seconds until a tick is tried again: after another beat has claimed it, and after the broker did not take it.
AGAIN, RETRY_AFTER = 0.25, 1.0


class NotNow(BaseException):
    """Leaves the wrapped scheduler's tick. Not an `Exception`, which Celery would take for a fault of the entry."""


class Claiming(PunctualScheduler):
    """A scheduler that sends what it has claimed, under the tick's id, and records it."""

    #: Of the exclusive scheduler, which is there before anything ticks.
    _claims: Claims
    _settings: BeatSettings
    _key: str

    #: In how many seconds to look again at the entry that was sent just now; None: when Celery says so.
    _again_in: float | None = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what the wrapped scheduler does; then record what was sent."""
        seconds: float = super().tick(*args, **kwargs)
        self._claims.settle(more=seconds == 0)
        return seconds

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """As in the wrapped scheduler, with the last runs that all beats share."""
        forget_heap(self)
        for finding in of_others(self._settings.name, self._claims.recorded(), self.schedule):
            logger.warning("beat: %s", finding)  # Only once: what this schedule does not have is forgotten next.
        for entry in self._claims.align(self.schedule.values()):
            # The beat that sent it died before it wrote that to the database.
            self._advance(entry, ticks.micros(entry.last_run_at))
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """Whether the entry's tick is due and this beat may send it; and the seconds until this tick or the next."""
        if (seconds := turn_in(self, entry)) > 0:
            return False, seconds
        tick = self._claims.granted(entry)
        if tick is None:
            is_due, seconds = super().is_due(entry)
            if not is_due:
                return False, seconds
            tick = ticks.tick_of(entry)
            if tick is None:
                return self._pass_over(entry, ticks.micros(entry.last_run_at))
            if (refused := self._claim(entry, tick)) is not None:
                return refused
        if self._settings.catch_up is not None and tick.lateness > self._settings.catch_up:
            return self._skip(entry, tick)
        following = tick.seconds_to_following
        return True, self.max_interval if following is None else following

    def reserve(self, entry: Any) -> Any:
        """Advance an entry to its tick."""
        _ = self.producer  # It waits for a broker that is away. Celery asks for it later; then a database says "sent".
        tick = self._claims.granted(entry)
        if tick is None:
            self._claims.require(entry)
            raise NotNow
        self._following = self._advance(entry, tick.sets)
        return self._following

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry's tick, if it is still this beat's."""
        tick = self._claims.granted(entry)
        if tick is not None and self._send(entry, tick, producer):
            self._again_in = tick.seconds_to_following
            return
        # A database must not say that it was sent: this beat may end before it is. Celery may have saved that.
        self._advance(entry, ticks.micros(entry.last_run_at), runs=-1)
        self._following.last_run_at = entry.last_run_at
        if tick is None:
            raise NotNow
        logger.warning("beat: the broker did not take %s; trying again, under the same id", entry.name)
        self._again_in = RETRY_AFTER

    def due_in(self, entry: Any, seconds: float) -> float:
        """For the entry that was sent just now, the seconds that are left until its next tick is due."""
        again_in, self._again_in = self._again_in, None
        return seconds if again_in is None else again_in

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the wrapped scheduler; notes when the broker did not take the message."""
        try:
            return super().apply_async(entry, *args, **kwargs)
        except Exception as error:
            self._was_taken = not isinstance(error.__cause__ or error.__context__, (OperationalError, OSError))
            raise

    def _claim(self, entry: Any, tick: Tick) -> tuple[bool, float] | None:
        """Claim a tick that is due; None if this beat has it now, else what `is_due` is to return."""
        try:
            refusal = self._claims.take(tick)
        except LockUnavailable as error:
            raise NotNow from error
        if refusal is not None and refusal.last is not None:
            return self._pass_over(entry, refusal.last)
        if refusal is not None:
            put_off(self, entry, min(refusal.remaining, AGAIN))
            return False, 0.0
        if self._claims.granted(entry) is None:
            raise NotNow  # It took too long: by now, another beat may have sent the tick.
        return None

    def _send(self, entry: Any, tick: Tick, producer: Any) -> bool:
        """Send a tick; whether the broker took it."""
        options, self._was_taken = entry.options, True
        task_id = tick.id_for(self._key)
        headers = options.get("headers")
        carried = header.Made(id=task_id, sent=fixed(task_id), due=tick.due_at, entry=entry.name)
        if (call := header.written(headers)) is not None:
            carried["call"] = call
        entry.options = {"task_id": task_id, **options, "headers": header.added(headers, carried)}
        with _undisturbed():
            try:
                super().apply_entry(entry, producer=producer)
            finally:
                entry.options = options
            if self._was_taken:
                self._claims.sent(tick)
        return self._was_taken

    def _pass_over(self, entry: Any, last: int) -> tuple[bool, float]:
        """Another beat has sent the tick: treat it as sent here."""
        following = self._advance(entry, last)
        is_due, seconds = super().is_due(following)
        put_off(self, following, 0 if is_due else seconds)
        return False, 0.0

    def _skip(self, entry: Any, tick: Tick) -> tuple[bool, float]:
        logger.warning(
            "beat: skipped %s: it was due %.1f s ago, longer than singleton_lock_beat_catch_up",
            entry.name,
            tick.lateness,
        )
        last = ticks.now()
        self._claims.sent(tick, last)
        return self._pass_over(entry, last)

    def _advance(self, entry: Any, last: int, *, runs: int = 1) -> Any:
        """Have the schedule say that an entry last ran then, and has run that many more times."""
        following = super().reserve(entry)  # This counts one run, and has a database save it.
        ticks.set_last(following, last, runs=runs - 1)
        return following


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off the signals that end beat: between sending and recording, they would cause a tick to be sent again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal mask is not enough: another thread may get the signal, and its handler runs in this one all the same.
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
