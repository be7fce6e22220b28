"""Collects what happened to the locks of this process, and writes it to the journal.

A separate thread writes every few seconds, so no task, no renewal and no caller ever waits for it; a program that ends
writes the rest. If the process is killed, the entries of its last seconds are lost.

Entries are timed on this host's steady clock, and written with the server's time. Each write is also a sample of the
difference between the two, with an error of at most half of the time that the write took (Cristian 1989). The best of
the last samples is used.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakMethod

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal.alerts import Alerts
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.later import Later, do_at_exit
from celery_singleton_lock.stores.journal import Journal, Written

logger = get_logger(__name__)

#: Seconds from the first entry until it is written, together with all that came meanwhile.
WRITE_AFTER = 5.0

#: Seconds until a failed write is tried again.
RETRY_AFTER = 15.0

#: The most entries that are kept until the next write; if there are more, only their counts are kept.
MOST = 500

#: The number of counts up to which each label has a separate count.
MOST_COUNTS = 5000

#: The most counts of one entry.
MOST_OF_ENTRY = 10

#: The most entries in one write, which blocks the server.
BATCH = 100

#: The number of samples of the server's clock from which the best is chosen.
SAMPLES = 20


class _Sample(NamedTuple):
    """The server's time minus this host's, and the largest possible error."""

    slack: float
    offset: float


class JournalWriter:
    """Collects entries, and writes them to `journal`; does nothing if that is None."""

    def __init__(self, journal: Journal | None, alerts: Alerts) -> None:
        self._journal = journal
        self._alerts = alerts
        self._later = Later("singleton-lock-journal", self._write_later, after=WRITE_AFTER)
        self.start_anew()
        forks.start_anew_in_child(self)
        write: Callable[[], object] = self.write
        do_at_exit(WeakMethod(write))

    def start_anew(self) -> None:
        self._mutex = threading.RLock()  # A cold shutdown's handler may have interrupted `add`.
        self._writing = threading.Lock()
        self._counts: Counter[metrics.Key] = Counter()
        self._entries: deque[Entry] = deque(maxlen=MOST)
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)

    def add(self, entry: Entry, *, at_once: bool = False) -> None:
        """Count an entry and keep it for the journal; its times are of this host's clock.

        A thread writes it later; or, with `at_once`, this call does, for a caller that may look for leftover threads.
        """
        if self._journal is None:
            return
        with self._mutex:
            counts = self._counts
            has_room = len(counts) < MOST_COUNTS - MOST_OF_ENTRY
            for count, by in metrics.of(entry):
                counts[count if has_room else self._bounded(count)] += by
            self._entries.append(entry)
        if at_once:
            self.write()
        else:
            self._later.want()

    def write(self) -> bool:
        """Write what was collected; False if that failed."""
        if self._journal is None:
            return True
        with self._writing:
            with self._mutex:
                counts, entries = self._counts, list(self._entries)
                self._counts = Counter()
                self._entries.clear()
            if not counts and not entries:  # No server is asked: a process that ends must not wait for a silent one.
                return True
            try:
                self._write(self._journal, counts, entries)
            except LockUnavailable as error:
                logger.debug("journal: not written, trying again: %s", error)
                with self._mutex:
                    # Some may have been written: better to count them twice than not at all.
                    self._counts.update(counts)
                    self._entries.extendleft(reversed(entries[: MOST - len(self._entries)]))
                return False
            return True

    def _write_later(self) -> float | None:
        if not self.write():
            return RETRY_AFTER
        return WRITE_AFTER if self._counts else None

    def _write(self, journal: Journal, counts: Counter[metrics.Key], entries: Sequence[Entry]) -> None:
        if not self._samples and any(entry.kind != "duplicate" for entry in entries):
            self._timed(partial(journal.write, {}, [], slack=0.0))
        # A program that only sends writes once: how exactly its entries are timed does not matter.
        sample = min(self._samples, default=_Sample(0.0, clock.wall() - clock.now()))
        texts = {metrics.dumps(count): by for count, by in counts.items()}
        coarse = {metrics.dumps(it): metrics.dumps(other) for it in counts if (other := metrics.coarse(it)) is not None}
        for start in range(0, max(len(entries), 1), BATCH):
            part = [_at(entry, sample.offset) for entry in entries[start : start + BATCH]]
            self._judge(part, self._timed(partial(journal.write, texts, part, slack=sample.slack, coarse=coarse)))
            texts = {}

    def _timed(self, write: Callable[[], Written]) -> Written:
        """Write, and take a sample of the server's clock."""
        sent_at = clock.now()
        written = write()
        half = (clock.now() - sent_at) / 2
        self._compare(_Sample(half + 0.001, written.now - (sent_at + half)))
        return written

    def _compare(self, newest: _Sample) -> None:
        """Keep only the samples that agree with the newest; the others are from before one of the clocks was set."""
        agree = [it for it in self._samples if abs(it.offset - newest.offset) <= it.slack + newest.slack]
        self._samples = deque([*agree, newest], maxlen=SAMPLES)

    def _judge(self, entries: Sequence[Entry], written: Written) -> None:
        for entry, in_a_row, other in zip(entries, written.in_a_row, written.overlaps, strict=True):
            if in_a_row and self._alerts.blocked(entry, in_a_row):
                self._count("blocked", entry)
            if other is not None:
                self._count("overlaps", entry)
                self._alerts.overlapped(entry, other)

    def _bounded(self, count: metrics.Key) -> metrics.Key:
        """The same count, or the coarse one if there are too many counts while the journal does not answer."""
        if len(self._counts) < MOST_COUNTS or count in self._counts:
            return count
        return metrics.coarse(count) or count

    def _count(self, name: str, entry: Entry) -> None:
        with self._mutex:
            self._counts[name, entry.task, ""] += 1


def _at(entry: Entry, offset: float) -> Entry:
    # Cleaned here, so that no task waits for it: what came from a sender was bounded when the entry was made.
    return entry.moved(offset).cleaned()
