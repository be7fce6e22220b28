"""What is written to the lock server for many messages at once, beside the messages: nobody waits for it.

Before a message is sent, its lock is taken only for some seconds, so a program that dies in between leaves it for no
longer. Once the broker has the message, the lock is extended to the time for which the message may wait: it is
*confirmed*. And once the callbacks and next steps of a message were sent, its record is *rewritten*. From then on, a
later copy of the message is dropped without asking the result backend, which may have forgotten the message: a result
that was read and deleted is no reason to send everything again.

Protocol: `docs/protocol.md`, sections 6 and 12.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.batches import Batches
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.store import Store

#: Seconds for which the lock of a message lasts before it is confirmed: longer than sending takes.
UNCONFIRMED_TTL = 30.0

#: Seconds in which more messages may come, to be confirmed together.
CONFIRM_AFTER = 0.02

#: The seconds that a server has for each step of a confirmation.
TIMEOUT = 2.0

#: Seconds until records are written: well below `decide.SETTLING`, after which copies look again.
REWRITE_AFTER = 1.0


class Confirmations(Batches[Hold]):
    """Renews holds of `store`, once each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        super().__init__("confirmations of sent messages", after=CONFIRM_AFTER)

    def add(self, hold: Hold) -> None:
        """Make `hold` last for its ttl from about now, if it still exists then."""
        self.put(hold, hold, UNCONFIRMED_TTL)

    def send(self, items: Sequence[Hold]) -> Sequence[bool]:
        self._store.renew(items, timeout=TIMEOUT)
        return [True] * len(items)

    def place_of(self, item: Hold) -> Hashable:
        return self._store.place_of(item.key)


class Records(Batches[tuple[str, Record, float]]):
    """Replaces records of `store`; each waits with its key, and the time when it was wanted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        super().__init__("records of messages", after=REWRITE_AFTER)

    def replace(self, key: str, record: Record) -> None:
        """Replace the record of the same message under `key` with `record`, soon."""
        self.put((key, record.message), (key, record, clock.now()), record.seconds)

    def replace_now(self, key: str, record: Record) -> None:
        """Like `replace`, but at once if the store answers."""
        try:
            self._store.replace_records([(key, record)])
        except LockUnavailable:
            self.replace(key, record)

    def send(self, items: Sequence[tuple[str, Record, float]]) -> Sequence[bool]:
        # They expire as if they had been written at once. One that is over by now is left out: the record that it
        # would replace may be that of the same message, sent again.
        late = [(key, record.after(clock.now() - since)) for key, record, since in items]
        self._store.replace_records([(key, record) for key, record in late if record is not None])
        return [True] * len(items)

    def place_of(self, item: tuple[str, Record, float]) -> Hashable:
        key, _, _ = item
        return self._store.place_of(key)
