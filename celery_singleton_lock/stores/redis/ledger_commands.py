"""What a beat's ledger is asked, and what the answers mean: on one server, and on each node of a Redlock.

Beside the lock of beat's leader there are `:ledger` (a hash of the last run of each entry), `:claim:<entry>:` for what
is being sent, `:gone:<entry>:` with the last run of an entry that was just removed, and `:secret`, of which the ids of
ticks are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from celery_singleton_lock.stores.ledger import MEMORY
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import OVER_TTL, Call, Script, ms

#: Seconds for which beat's last runs are kept: more than a year, which is the longest crontab.
LEDGER_TTL = 40_000_000.0

ALIGN, FORGET, CLAIM = Script("ledger/align"), Script("ledger/forget"), Script("ledger/claim")
RECORD, UNCLAIM, SECRET = Script("ledger/record"), Script("ledger/unclaim"), Script("ledger/secret")

SCRIPTS = (ALIGN, FORGET, CLAIM, RECORD, UNCLAIM, SECRET)


class Claim(IntEnum):
    """What a claim is answered first."""

    CLAIMED_BY_ANOTHER = 0
    CLAIMED = 1
    SENT = 2


def align(key: str, lasts: Mapping[str, int], *, ceiling: int) -> Call:
    """See `Ledger.align`."""
    return Call(ALIGN, [keyspace.ledger_key(key)], [ms(LEDGER_TTL), ceiling, *_pairs(lasts)])


def forget(key: str, gone: Sequence[bytes]) -> Call:
    """Have a ledger forget some entries, but for who claims within `MEMORY`."""
    keys = [keyspace.ledger_key(key), *keyspace.gone_keys(key, (entry.decode(errors="replace") for entry in gone))]
    return Call(FORGET, keys, [ms(MEMORY), *gone])


def claim(key: str, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> Call:
    """See `Ledger.claim`."""
    fixed = [keyspace.ledger_key(key), keyspace.over_key(key, owner)]
    keys = [*fixed, *keyspace.claim_keys(key, lasts), *keyspace.gone_keys(key, lasts)]
    return Call(CLAIM, keys, [owner, ms(ttl), ceiling, *_pairs(lasts)])


def record(key: str, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> Call:
    """See `Ledger.record`."""
    keys = [keyspace.ledger_key(key), *keyspace.claim_keys(key, lasts)]
    return Call(RECORD, keys, [owner, ms(LEDGER_TTL), ceiling, *_pairs(lasts)])


def unclaim(key: str, entries: Sequence[str], owner: str) -> Call:
    """See `Ledger.unclaim`."""
    return Call(UNCLAIM, [keyspace.over_key(key, owner), *keyspace.claim_keys(key, entries)], [owner, ms(OVER_TTL)])


def secret(key: str, value: str, *, at_least: bool) -> Call:
    """Look at the secret of a schedule; with a value, make that the secret where there is none.

    Args:
        key: what the schedule's keys begin with.
        value: of the secret; empty to look only.
        at_least: also where there is a smaller one.
    """
    return Call(SECRET, [keyspace.secret_key(key)], [value, ms(LEDGER_TTL), int(at_least)])


def _pairs(lasts: Mapping[str, int]) -> list[object]:
    return [part for pair in lasts.items() for part in pair]
