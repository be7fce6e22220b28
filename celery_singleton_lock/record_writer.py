"""Rewrites records, in bulk, once the callbacks and next steps of their messages were sent.

From then on, a later copy of the message is dropped without asking the result backend, which may have forgotten the
message: a result that was read and deleted is no reason to send everything again. Nobody waits for this, and a round
trip for each message would be too much: a separate thread writes everything that came within a second.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.background import Later
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

#: Seconds until all collected records are written: well below `redelivery.SETTLING`, after which copies look again.
WRITE_AFTER = 1.0

#: The most records that are kept while the store does not answer, the latest; copies of the other messages ask the
#: result backend.
MOST = 10_000

#: The most records in one round trip.
BATCH = 200


class RecordWriter:
    """Replaces records of `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._later = Later("singleton-lock-records", self.write, after=WRITE_AFTER)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self._mutex = threading.RLock()  # A cold shutdown's handler may have interrupted `replace`.
        #: Each with the time when it was wanted.
        self._records: dict[tuple[str, str], tuple[Record, float]] = {}

    def replace(self, key: str, record: Record) -> None:
        """Replace the record of the same message under `key` with `record`, soon."""
        with self._mutex:
            self._records[key, record.message] = record, clock.now()
            if len(self._records) > MOST:
                del self._records[next(iter(self._records))]
        self._later.want()

    def replace_now(self, key: str, record: Record) -> None:
        """Like `replace`, but at once if the store answers."""
        try:
            self._store.replace_records([(key, record)])
        except LockUnavailable:
            self.replace(key, record)

    def write(self) -> float | None:
        """Write all records; None, or the seconds until the next try for those that could not be written."""
        while True:
            with self._mutex:
                batch = list(self._records.items())[:BATCH]
            if not batch:
                return None
            # They expire as if they had been written at once. One that is over by now is left out: the record that it
            # would replace may be that of the same message, sent again.
            late = [(key, record.after(clock.now() - since)) for (key, _), (record, since) in batch]
            try:
                self._store.replace_records([(key, record) for key, record in late if record is not None])
            except LockUnavailable as error:
                logger.debug("records: not written, trying again: %s", error)
                self._put_last(batch)
                return WRITE_AFTER
            with self._mutex:
                for place, wanted in batch:
                    if self._records.get(place) is wanted:
                        del self._records[place]

    def _put_last(self, batch: Sequence[tuple[tuple[str, str], tuple[Record, float]]]) -> None:
        """Write the others first: these may have to wait long for one of several servers."""
        with self._mutex:
            for place, _ in batch:
                if (wanted := self._records.pop(place, None)) is not None:
                    self._records[place] = wanted
