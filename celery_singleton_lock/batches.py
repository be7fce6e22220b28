"""What is sent to lock servers later, much of it together, and again until it is answered: nobody waits for it.

Each server has its own turn, so one that does not answer holds up nothing that is for the others. In the child of a
fork nothing waits: the parent sends it.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import LockUnavailable

logger = get_logger(__name__)

#: Seconds between two tries, so that all is sent within a second after a server answers again.
RETRY_AFTER = 0.5

#: The tries of an item, together with others and then alone, in which an unexpected error is logged.
FIRST_TRIES = 2

#: The most items in one round trip.
BATCH = 200

#: The most items that wait; if there are more, the oldest are given up.
MOST = 10_000

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Waiting(Generic[Item]):
    """An item that was not answered.

    Attributes:
        name: what a newer one that replaces it is called, too.
        item: what is to be sent.
        until: when it is too late.
        tries: how often it was sent.
    """

    name: Any
    item: Item
    until: float
    tries: int = 0


class Batches(ABC, Generic[Item]):
    """Items that are sent in batches.

    Args:
        what: the items, for messages.
        after: seconds in which more may come, to be sent together.
        level: that of the log's line about those that are given up.
    """

    def __init__(self, what: str, *, after: float, level: int = logging.WARNING) -> None:
        self._what, self._level = what, level
        self._job = BackgroundJob("singleton-lock-batches", self.send_all, after=after)
        self._mutex: AbstractContextManager[bool]
        self._waiting: dict[Hashable, Waiting[Item]]
        self._silent: set[Hashable]
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Start without any: at first, and in the child of a fork."""
        self._mutex = threading.RLock()  # A signal's handler may interrupt `put`, and put something itself.
        self._waiting = {}
        #: The places that did not answer in the end.
        self._silent = set()
        #: How many were given up since that was last logged.
        self._given_up = 0

    @abstractmethod
    def send(self, items: Sequence[Item]) -> Sequence[bool]:
        """Send them together; whether each was answered.

        Raises:
            LockUnavailable: none was answered, as far as is known.
        """

    @abstractmethod
    def place_of(self, item: Item) -> Hashable:
        """The server that it is for, as far as is known. Asks nobody."""

    def __bool__(self) -> bool:
        """Whether something was not answered yet."""
        return bool(self._waiting)

    def put(self, name: Hashable, item: Item, seconds: float) -> None:
        """Send it soon, and again until it is answered, for that many seconds; it replaces what has this name."""
        with self._mutex:
            self._waiting.pop(name, None)
            if len(self._waiting) >= MOST:
                self._waiting.pop(next(iter(self._waiting)))
                self._given_up += 1
            self._waiting[name] = Waiting(name, item, clock.now() + seconds)
        self._job.schedule()

    def send_all(self, until: float = math.inf) -> float | None:
        """Send all, once to each place that does not answer; None, or the seconds until the next try.

        A thread may be about to do that: then some are sent twice.

        Args:
            until: when it is too late to ask others, if one has not answered.
        """
        failed = set[Hashable]()
        while (not failed or clock.now() < until) and (places := self._by_place(failed)):
            place = min(places, key=self._silent.__contains__)
            self._silent.add(place)  # Until it has answered: the others come first next time.
            if self._send_those(places[place]):
                self._silent.discard(place)
            else:
                failed.add(place)  # What came for the others meanwhile comes next.
        return RETRY_AFTER if self._waiting else None

    def in_time(self) -> list[Waiting[Item]]:
        """Those that wait; what is too late is given up."""
        with self._mutex:
            now = clock.now()
            # Of a copy: a signal's handler may put one meanwhile, or find that it is too late for this one.
            for name, it in list(self._waiting.items()):
                if now > it.until and self._waiting.pop(name, None) is not None:
                    self._given_up += 1
            if self._given_up:
                logger.log(self._level, "%d %s were never answered, and are given up", self._given_up, self._what)
                self._given_up = 0
            return list(self._waiting.values())

    def forget(self, batch: Sequence[Waiting[Item]], answered: Sequence[bool]) -> None:
        """Forget those that were answered."""
        with self._mutex:
            for it, is_answered in zip(batch, answered, strict=True):
                if is_answered and self._waiting.get(it.name) is it:
                    del self._waiting[it.name]

    def _by_place(self, but: Collection[Hashable]) -> dict[Hashable, list[Waiting[Item]]]:
        places: dict[Hashable, list[Waiting[Item]]] = {}
        for it in self.in_time():
            if (place := self.place_of(it.item)) not in but:
                places.setdefault(place, []).append(it)
        return places

    def _send_those(self, waiting: list[Waiting[Item]]) -> bool:
        """Send all of one place, unless it does not answer; whether it has answered all."""
        waiting.sort(key=lambda it: it.tries)  # A batch that failed goes to the end.
        were_all = True
        for start in range(0, len(waiting), BATCH):
            batch = waiting[start : start + BATCH]
            answered = self._try(batch)
            self.forget(batch, answered)
            were_all = were_all and all(answered)
            if not any(answered):
                break
        return were_all

    def _try(self, batch: Sequence[Waiting[Item]]) -> Sequence[bool]:
        for it in batch:
            it.tries += 1
        try:
            return self.send([it.item for it in batch])
        except LockUnavailable as error:
            logger.debug("%s: not answered, trying again: %s", self._what, error)
            return [False] * len(batch)
        except Exception:
            if len(batch) > 1:  # One of them may be at fault, and is not to hold up the others.
                return [is_answered for it in batch for is_answered in self._try([it])]
            # Tried again: it may be for want of memory, say. But said only at first.
            level = logging.ERROR if batch[0].tries <= FIRST_TRIES else logging.DEBUG
            logger.log(level, "%s: unexpected error; trying again", self._what, exc_info=True)
            return [False]
