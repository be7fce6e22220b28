"""The tick that one beat may send, and those that it has sent.

A tick is claimed before it is sent, and recorded afterwards; where several entries are due, one round trip records more
than one. A beat that dies in between loses no tick: its claim ends, and another beat sends the tick again, under the
same id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.beat import ticks
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.store import Ledger, Refused

#: Seconds after which sent ticks are recorded, even if more are about to be sent.
RECORD_AFTER = 0.01

#: Seconds by which the clock of another host may be ahead: a last run that is later than that is taken for wrong.
MAX_AHEAD = 3600.0


class Claims:
    """The claims of one beat, which last for `ttl` seconds. Used by one thread."""

    def __init__(self, ledger: Ledger, *, ttl: float) -> None:
        self._ledger = ledger
        self._ttl = ttl
        self._owner = _new_owner()
        #: Owners whose claim was not answered, and the entries that they may have claimed.
        self._unanswered: list[tuple[str, list[str]]] = []
        #: The tick that may be sent, and until when.
        self._granted: Tick | None = None
        self._until = 0.0
        self._unrecorded: dict[str, int] = {}
        self._unrecorded_since = 0.0
        #: Whether another beat had claimed or sent the last tick that this beat asked for.
        self.is_beaten = False

    def align(self, entries: Iterable[Any]) -> list[Any]:
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

    def granted(self, entry: Any) -> Tick | None:
        """The tick of the entry that may be sent now."""
        tick = self._granted
        if tick is None or tick.entry != entry.name or clock.now() >= self._until:
            return None
        return tick if tick.last == ticks.micros(entry.last_run_at) else None

    def require(self, entry: Any) -> None:
        """Refuse a scheduler that sends without asking first; to have asked is enough, even if the claim has ended.

        Raises:
            InvalidOption: it sends without asking.
        """
        if self._granted is None or self._granted.entry != entry.name:
            raise InvalidOption(
                "setting singleton_lock_beat_scheduler names a scheduler that sends without calling its is_due(); "
                "allowed: a scheduler that ticks as celery.beat.Scheduler does"
            )

    def take(self, tick: Tick) -> Refused | None:
        """Claim a tick; returns the refusal, if it is refused. What was claimed before may not be sent any more.

        Raises:
            LockUnavailable: it may not be sent.
        """
        self._drop()
        if self._unanswered or tick.entry in self._unrecorded:
            self.settle()
        asked_at = clock.now()
        try:
            answer = self._ledger.claim(tick.entry, tick.last, self._owner, ttl=self._ttl, ceiling=_ceiling())
        except BaseException:
            # The claim may have been carried out, or may be when the server wakes up: nobody else could send then.
            self._unanswered.append((self._owner, sorted({tick.entry, *self._unrecorded})))
            self._owner = _new_owner()
            raise
        self.is_beaten = isinstance(answer, Refused)
        if isinstance(answer, Refused):
            return self._outlived(tick, answer)
        self._granted, self._until = tick, trust.end_of(asked_at, self._ttl)
        return None

    def sent(self, tick: Tick, last: int | None = None) -> None:
        """The tick was sent, or must not be sent any more; `last`: the entry's last run, if it is not the tick's."""
        self._granted = None
        if not self._unrecorded:
            self._unrecorded_since = clock.now()
        self._unrecorded[tick.entry] = tick.sets if last is None else last

    def settle(self, *, more: bool = False) -> None:
        """Record what was sent, and take back claims that were not answered.

        Args:
            more: more is about to be sent, so that what was sent a moment ago is recorded along with it.

        Raises:
            LockUnavailable: this is tried again before anything else is claimed.
        """
        if self._unrecorded and not (more and clock.now() - self._unrecorded_since < RECORD_AFTER):
            self._ledger.record(self._unrecorded, self._owner, ceiling=_ceiling())
            self._unrecorded = {}
        while self._unanswered:
            owner, entries = self._unanswered[0]
            self._ledger.unclaim(entries, owner)
            del self._unanswered[0]

    def give_up(self) -> None:
        """Record what was sent, and leave the rest to other beats. If a signal interrupts this, call it again.

        Raises:
            LockUnavailable: the claims end by themselves.
        """
        self._drop()
        self.settle()

    def _drop(self) -> None:
        """Leave the claimed tick to other beats."""
        if self._granted is not None:
            self.sent(self._granted, 0)

    def _outlived(self, tick: Tick, refused: Refused) -> Refused:
        """The refusal; if the claim is that of a beat that was killed on this host, the claim ends at once."""
        if not process_identity.is_dead(refused.claimer.partition("/")[2]):
            return refused
        self._ledger.unclaim([tick.entry], refused.claimer)
        return Refused(None, 0.0)


def _new_owner() -> str:
    return f"{new_owner()}/{process_identity.own()}"


def _ceiling() -> int:
    return ticks.now() + round(MAX_AHEAD * 1_000_000)
