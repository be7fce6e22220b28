"""The ticks that one beat may send, and those that it has sent.

A tick is claimed before it is sent, and recorded afterwards. Where many entries are due at once, one round trip claims
or records many of them. A beat that dies in between loses no tick: its claim ends, and the next leader sends the tick
again, under the same id. The cost is small, since a tick is recorded within milliseconds after it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from celery_singleton_lock import clock, trust
from celery_singleton_lock.beat import ticks
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.ledger import Ledger, Refused

if TYPE_CHECKING:
    from celery_singleton_lock._celery import ScheduleEntry

#: Seconds after which sent ticks are recorded, even if more are about to be sent.
RECORD_AFTER = 0.01

#: Seconds by which the clock of another host may be ahead: a last run that is later than that is taken for wrong.
MAX_AHEAD = 3600.0


class Claims:
    """The claims of one beat, which last for `ttl` seconds. Used by one thread.

    `may_send` says whether this beat may send anything at all, without asking the lock server.
    """

    def __init__(self, ledger: Ledger, *, ttl: float, may_send: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._ttl = ttl
        self._may_send = may_send
        self._owner = new_owner()
        #: Owner tokens of claims that were not answered, and the entries that they may have claimed.
        self._unanswered: list[tuple[str, list[str]]] = []
        self._granted: dict[str, tuple[Tick, float]] = {}
        self._unrecorded: dict[str, int] = {}
        self._unrecorded_since = 0.0
        #: The secret from which the ids of ticks are made; known before anything may be sent.
        self.secret = ""

    def align(self, entries: Iterable[ScheduleEntry]) -> list[ScheduleEntry]:
        """Give each entry its last run, whichever beat sent it.

        For an entry that is kept in a database, only what was sent is recorded. All beats see the rest in the
        database, and if the entry never ran, what counts as its last run changes with each edit.

        Returns:
            The entries whose last run is not in their database yet.

        Raises:
            LockUnavailable: nothing was changed.
        """
        self.settle()
        named = {entry.name: entry for entry in entries}
        stored = {name: ticks.stored(entry) for name, entry in named.items()}
        lasts = {name: ticks.last_of(entry) if stored[name] is None else 0 for name, entry in named.items()}
        behind = []
        for name, known in self._ledger.align(lasts, ceiling=_ceiling()).items():
            entry, kept = named[name], stored[name]
            last = known or ticks.last_of(entry)
            if last != ticks.micros(entry.last_run_at):
                entry.last_run_at = ticks.moment(last, entry.last_run_at)
            if kept is not None and known > kept:
                behind.append(entry)
        return behind

    def recorded(self) -> Collection[str]:
        """The entries of which somebody has recorded what was sent.

        Raises:
            LockUnavailable: it is not known.
        """
        return self._ledger.lasts()

    def granted(self, entry: ScheduleEntry) -> Tick | None:
        """The tick of the entry that may be sent now."""
        tick, until = self._granted.get(entry.name, (None, 0.0))
        if tick is None or not self._may_send() or clock.now() >= until:
            return None
        return tick if tick.last == ticks.micros(entry.last_run_at) else None

    def require(self, entry: ScheduleEntry) -> None:
        """Refuse a scheduler that sends without asking first; to have asked is enough, even if the claim has ended.

        Raises:
            InvalidOption: it sends without asking.
        """
        if entry.name not in self._granted:
            raise InvalidOption(
                "setting singleton_lock_beat_scheduler names a scheduler that sends without calling its is_due(); "
                "allowed: a scheduler that ticks as celery.beat.Scheduler does"
            )

    def take(self, wanted: Mapping[str, Tick]) -> dict[str, Refused]:
        """Claim some ticks; returns the refusals.

        Raises:
            LockUnavailable: none may be sent.
        """
        self.settle()
        asked_at = clock.now()
        lasts = {entry: tick.last for entry, tick in wanted.items()}
        try:
            refused = self._ledger.claim(lasts, self._owner, ttl=self._ttl, ceiling=_ceiling())
            # Asked for after each claim: if the server has lost it, the next beat that claims gets the same one.
            self.secret = self._ledger.secret()
        except BaseException:
            # The claim may have been carried out, or may be when the server wakes up: nobody else could send then.
            self._unanswered.append((self._owner, sorted({*wanted, *self._granted})))
            self._owner, self._granted = new_owner(), {}
            raise
        until = trust.end_of(asked_at, self._ttl)
        self._granted = {entry: grant for entry, grant in self._granted.items() if grant[1] > asked_at}
        self._granted.update({entry: (tick, until) for entry, tick in wanted.items() if entry not in refused})
        return refused

    def sent(self, tick: Tick, last: int | None = None) -> None:
        """The tick was sent, or must not be sent any more; `last`: the entry's last run, if it is not the tick's."""
        self._granted.pop(tick.entry, None)
        if not self._unrecorded:
            self._unrecorded_since = clock.now()
        self._unrecorded[tick.entry] = tick.sets if last is None else last
        if not self._granted or clock.now() - self._unrecorded_since > RECORD_AFTER:
            self.record()

    def settle_in_time(self) -> None:
        """Settle, unless more is about to be sent, so that what was sent a moment ago is recorded along with it.

        Raises:
            LockUnavailable: as `settle`.
        """
        if self._unanswered or not self._granted or clock.now() - self._unrecorded_since > RECORD_AFTER:
            self.settle()

    def settle(self) -> None:
        """Record what was sent, and take back claims that were not answered.

        Raises:
            LockUnavailable: this is tried again before anything else is claimed.
        """
        self.record()
        while self._unanswered:
            owner, entries = self._unanswered[0]
            self._ledger.unclaim(entries, owner)
            del self._unanswered[0]

    def record(self) -> None:
        """Record what was sent.

        Raises:
            LockUnavailable: this is tried again before anything else is claimed.
        """
        if self._unrecorded:
            self._ledger.record(self._unrecorded, self._owner, ceiling=_ceiling())
            self._unrecorded = {}

    def give_up(self) -> None:
        """Record what was sent, and leave the rest to other beats. If a signal interrupts this, call it again.

        Raises:
            LockUnavailable: the claims end by themselves.
        """
        self._unrecorded = {**dict.fromkeys(self._granted, 0), **self._unrecorded}
        self._granted = {}
        self.settle()


def _ceiling() -> int:
    return ticks.now() + round(MAX_AHEAD * 1_000_000)
