"""Locks in a SQLite file, for the processes of one host: one transaction for each call, on the clock of that host.

A file cannot wake anybody, so waiters poll. Each call opens its own connection, so none is inherited by a fork.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.stores import (
    Held,
    Hold,
    Holder,
    Lease,
    LockRequest,
    PollingWaiter,
    Record,
    Reservation,
)
from celery_singleton_lock.stores.slots import Occupant, copy_of, free_slot, in_the_way, slot_of

#: Seconds that a call waits for other calls.
PATIENCE = 5.0

#: Seconds for which, at least, the store remembers that an owner was given up.
OVER = 60.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS holds
    (key, slot INTEGER, owner, holder, fence INTEGER, ends_at REAL, PRIMARY KEY (key, slot));
CREATE TABLE IF NOT EXISTS records (key, message, content BLOB, ends_at REAL, PRIMARY KEY (key, message));
CREATE TABLE IF NOT EXISTS given_up (key, owner, ends_at REAL, PRIMARY KEY (key, owner));
CREATE TABLE IF NOT EXISTS fences (last INTEGER);
"""

#: SQLite's locks belong to the process: a child that is forked while a thread has one would take it for its own.
_one_at_a_time = threading.Lock()
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


class SqliteStore:
    """A `LockStore` in a file.

    Args:
        path: the file, on a disk of this host.
    """

    def __init__(self, path: Path) -> None:
        self.server = f"sqlite://{path}"
        self._path = path
        with self._connection(PATIENCE) as db:
            # A crash of the host may lose the last writes, but then nobody holds those locks any more.
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(SCHEMA)

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        sent_at = clock.now()
        try:
            with self._transaction() as file:
                return file.acquire(request, sent_at)
        except BaseException:
            self.abandon(request.hold())
            raise

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        sent_at = clock.now()
        with self._transaction(timeout) as file:
            renewed = [file.renew(hold) for hold in holds]
        for hold, ours in zip(holds, renewed, strict=True):
            if ours and isinstance(hold, Lease):
                hold.extend(sent_at)
        return renewed

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> bool:
        with self._transaction() as file:
            if record is not None:
                file.remember(hold.key, record)
            occupants = file.occupants(hold.key)
            slot = slot_of(hold.owner, occupants)
            if slot is None:
                return False
            file.vacate(hold.key, slot)
            if reservation is not None and not file.is_over(hold.key, reservation.holder, record):
                holder = reservation.holder
                ends_at = file.now + reservation.seconds
                file.occupy(hold.key, slot, Occupant(holder.reserved_as, holder, occupants[slot].fence, ends_at), 0.0)
            return True

    def abandon(self, hold: Hold) -> bool | None:
        try:
            with self._transaction() as file:
                return file.give_up(hold.key, hold.owner, hold.ttl)
        except LockUnavailable:
            return None  # The hold ends with its lease.

    def remember(self, key: str, record: Record) -> None:
        try:
            with self._transaction(2.0) as file:
                file.remember(key, record)
        except LockUnavailable:
            pass  # If there is a copy of the message, it is carried out.

    def refuse(self, key: str, holder: Holder, record: Record, *, limit: int = 1) -> Held | Record | None:
        with self._transaction() as file:
            if (known := file.record(key, record.message)) is not None:
                return None if known.content == record.content else known
            if (copy := copy_of(holder, file.occupants(key))) is not None:
                return copy.held(file.now)
            file.remember(key, record)
            return None

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        with self._transaction() as file:
            for key, record in records:
                if file.record(key, record.message) is not None:
                    file.remember(key, record)

    def waiter(self, request: LockRequest) -> PollingWaiter:
        return PollingWaiter(self, request)

    def close(self) -> None: ...

    @contextmanager
    def _connection(self, patience: float) -> Iterator[sqlite3.Connection]:
        try:
            with _one_at_a_time, closing(sqlite3.connect(self._path, timeout=patience, isolation_level=None)) as db:
                yield db
        except sqlite3.Error as error:
            raise LockUnavailable(self.server, str(error)) from error

    @contextmanager
    def _transaction(self, patience: float = PATIENCE) -> Iterator[_File]:
        with self._connection(patience) as db:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("BEGIN IMMEDIATE")
            yield _File(db)
            db.execute("COMMIT")  # An exception closes the connection before this, and nothing has happened.


class _File:
    """The tables, within a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        ((self.now,),) = db.execute("SELECT (julianday('now') - 2440587.5) * 86400")
        for table in ("holds", "records", "given_up"):
            db.execute(f"DELETE FROM {table} WHERE ends_at <= ?", (self.now,))

    def acquire(self, request: LockRequest, sent_at: float) -> Lease | Held | Record:
        key, holder = request.key, request.holder
        if [*self._db.execute("SELECT 1 FROM given_up WHERE (key, owner) = (?, ?)", (key, request.owner))]:
            raise LockUnavailable("sqlite", "this owner was given up")
        for owner in request.given_up:
            self.give_up(key, owner, request.ttl)
        occupants = self.occupants(key)
        slot = slot_of(request.owner, occupants)
        if request.once and (record := self.record(key, holder.message)) is not None:
            if slot is not None:  # Taken by a request whose answer was lost.
                self.vacate(key, slot)
            return record
        if slot is not None:
            fence = occupants[slot].fence
        elif (slot := free_slot(request, occupants)) is None:
            return in_the_way(request, occupants).held(self.now)
        else:
            fence = self._next_fence()
            if (reserved := slot_of(holder.reserved_as, occupants)) is not None:
                self.vacate(key, reserved)
        self.occupy(key, slot, Occupant(request.owner, holder, fence, self.now + request.ttl), request.ttl)
        return request.lease(fence=fence, sent_at=sent_at, slot=slot)

    def occupants(self, key: str) -> dict[int, Occupant]:
        rows = self._db.execute("SELECT slot, owner, holder, fence, ends_at FROM holds WHERE key = ?", (key,))
        return {slot: Occupant(owner, Holder.loads(text) or Holder(), *rest) for slot, owner, text, *rest in rows}

    def occupy(self, key: str, slot: int, by: Occupant, ttl: float) -> None:
        row = key, slot, by.owner, by.holder.dumps(ttl), by.fence, by.ends_at
        self._db.execute("REPLACE INTO holds VALUES (?, ?, ?, ?, ?, ?)", row)

    def vacate(self, key: str, slot: int) -> None:
        self._db.execute("DELETE FROM holds WHERE (key, slot) = (?, ?)", (key, slot))

    def renew(self, hold: Hold) -> bool:
        row = self.now + hold.ttl, hold.key, hold.owner
        return self._db.execute("UPDATE holds SET ends_at = ? WHERE (key, owner) = (?, ?)", row).rowcount > 0

    def give_up(self, key: str, owner: str, ttl: float) -> bool:
        self._db.execute("REPLACE INTO given_up VALUES (?, ?, ?)", (key, owner, self.now + max(ttl, OVER)))
        return self._db.execute("DELETE FROM holds WHERE (key, owner) = (?, ?)", (key, owner)).rowcount > 0

    def remember(self, key: str, record: Record) -> None:
        row = key, record.message, record.content, self.now + record.seconds
        self._db.execute("REPLACE INTO records VALUES (?, ?, ?, ?)", row)

    def record(self, key: str, message: str) -> Record | None:
        rows = self._db.execute("SELECT content, ends_at FROM records WHERE (key, message) = (?, ?)", (key, message))
        return next((Record(message, content, ends_at - self.now) for content, ends_at in rows), None)

    def is_over(self, key: str, holder: Holder, record: Record | None) -> bool:
        """Whether the message for which the lock is to be reserved has ended already, not counting this record."""
        own = record is not None and record.message == holder.message
        return not own and self.record(key, holder.message) is not None

    def _next_fence(self) -> int:
        # At least the time, so that fences go on growing if the file is deleted.
        ((last,),) = self._db.execute("SELECT ifnull(max(last), 0) FROM fences")
        fence = max(int(last) + 1, int(self.now * 1_000_000))
        self._db.execute("DELETE FROM fences")
        self._db.execute("INSERT INTO fences VALUES (?)", (fence,))
        return fence
