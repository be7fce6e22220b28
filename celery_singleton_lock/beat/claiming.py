"""Makes a Celery scheduler send only its own ticks: a tick is claimed, sent under its own id, and recorded.

The scheduler keeps its schedule, its heap and its way of ticking. This changes how an entry is found due, advanced and
sent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from celery_singleton_lock import clock
from celery_singleton_lock._celery import PunctualScheduler, forget_heap, next_entry, put_off
from celery_singleton_lock.beat import ticks
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.diagnosis.settings import of_others
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.task import header
from celery_singleton_lock.task.message_identity import fixed

if TYPE_CHECKING:
    from celery_singleton_lock._celery import ScheduleEntry

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Ticks that the broker did not take.
        self._unsent: dict[str, tuple[ScheduleEntry, Tick]] = {}
        self._retries_at = 0.0
        #: The tick that was sent just now, until its entry is back in the heap.
        self._just_sent: Tick | None = None
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what the broker did not take before; then do what the wrapped scheduler does."""
        if self._unsent and clock.now() >= self._retries_at:
            self._send_unsent()
        seconds = super().tick(*args, **kwargs)
        self._claims.settle(more=seconds == 0)
        return min(seconds, RETRY_AFTER) if self._unsent else seconds

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """As in the wrapped scheduler, with the last runs that all beats share."""
        forget_heap(self)
        for finding in of_others(self._settings.name, self._claims.recorded(), self.schedule):
            logger.warning("beat: %s", finding)  # Only once: what this schedule does not have is forgotten next.
        for entry in self._claims.align(self.schedule.values()):
            # The beat that sent it died before it wrote that to the database.
            self._advance(entry, ticks.micros(entry.last_run_at))
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """Whether the entry's tick is due and this beat may send it; and the seconds until this tick or the next."""
        if entry.name in self._unsent:
            return False, AGAIN
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

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """Advance an entry to its tick."""
        tick = self._claims.granted(entry)
        if tick is None:
            self._claims.require(entry)
            raise NotNow
        return self._advance(entry, tick.sets)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send an entry's tick, if it is still this beat's."""
        tick = self._claims.granted(entry)
        if tick is None:
            raise NotNow
        self._send(entry, tick, producer)
        self._just_sent = tick

    def due_in(self, entry: ScheduleEntry, seconds: float) -> float:
        """For the entry that was sent just now, the seconds that are left until its next tick is due."""
        sent, self._just_sent = self._just_sent, None
        following = sent.seconds_to_following if sent is not None and sent.entry == entry.name else None
        return seconds if following is None else following

    def apply_async(self, entry: ScheduleEntry, *args: Any, **kwargs: Any) -> Any:
        """As in the wrapped scheduler; notes when the broker did not take the message."""
        try:
            return super().apply_async(entry, *args, **kwargs)
        except Exception as error:
            self._was_taken = not isinstance(error.__cause__ or error.__context__, (OperationalError, OSError))
            raise

    def _claim(self, entry: ScheduleEntry, tick: Tick) -> tuple[bool, float] | None:
        """Claim a tick that is due; None if this beat has it now, else what `is_due` is to return."""
        try:
            refusal = self._claims.take(tick)
        except LockUnavailable as error:
            raise NotNow from error
        if refusal is not None and refusal.last is not None:
            return self._pass_over(entry, refusal.last)
        if refusal is not None:
            return False, min(refusal.remaining, AGAIN)
        if self._claims.granted(entry) is None:
            raise NotNow  # It took too long.
        return None

    def _send(self, entry: ScheduleEntry, tick: Tick, producer: Any) -> None:
        options, self._was_taken = entry.options, True
        task_id = tick.id_for(self._settings.name, self._claims.secret)
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
                if self._unsent.pop(entry.name, None):
                    self._advance(entry, tick.sets)
                self._claims.sent(tick)
        if not self._was_taken:
            logger.warning("beat: the broker did not take %s; trying again, under the same id", entry.name)
            if entry.name not in self._unsent:
                # A database must not say that it was sent: this beat may end before it is. Celery may have saved that.
                self._advance(entry, tick.last, runs=-1)
            self._unsent[entry.name] = entry, tick
            self._retries_at = clock.now() + RETRY_AFTER

    def _send_unsent(self) -> None:
        for entry, tick in list(self._unsent.values()):
            current = self.schedule.get(entry.name)
            if current is None or current != entry:
                # It was removed or changed meanwhile, and is due when its new schedule says so.
                self._claims.sent(tick, 0)
                del self._unsent[entry.name]
                continue
            refused = self._claims.take(tick)
            if refused is None and self._claims.granted(entry) is not None:
                self._send(entry, tick, self.producer)
            elif refused is not None and refused.last is not None:
                # Another beat has sent it; or, if nodes disagree, an earlier one: then the next may be due now.
                del self._unsent[entry.name]
                self._pass_over(current, refused.last)

    def _pass_over(self, entry: ScheduleEntry, last: int) -> tuple[bool, float]:
        """Another beat has sent the tick: treat it as sent here."""
        following = self._advance(entry, last)
        if next_entry(self) is entry:
            is_due, seconds = super().is_due(following)
            put_off(self, following, 0 if is_due else seconds)
        else:
            forget_heap(self)
        return False, 0.0

    def _skip(self, entry: ScheduleEntry, tick: Tick) -> tuple[bool, float]:
        logger.warning(
            "beat: skipped %s: it was due %.1f s ago, longer than singleton_lock_beat_catch_up",
            entry.name,
            tick.lateness,
        )
        last = ticks.now()
        self._claims.sent(tick, last)
        return self._pass_over(entry, last)

    def _advance(self, entry: ScheduleEntry, last: int, *, runs: int = 1) -> ScheduleEntry:
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
