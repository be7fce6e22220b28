"""The ledger on one server or on a majority of the nodes of a Redlock: `docs/protocol.md` has the keys.

A last run only ever grows, so the highest of a majority is the true one: what one majority has recorded, any other
majority knows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import TOMBSTONE_TTL, Call, Script, are_whole, batches, is_whole, ms
from celery_singleton_lock.stores.store import MEMORY, Refused

#: Seconds until a claim that was split between several beats is tried again.
SPLIT = 0.2

#: Seconds for which beat's last runs are kept: more than a year, which is the longest crontab.
LEDGER_TTL = 40_000_000.0


class Claim(IntEnum):
    """The first part of the answer to a claim."""

    CLAIMED_BY_ANOTHER = 0
    CLAIMED = 1
    SENT = 2


def _is_claim(answer: Any) -> bool:
    if not isinstance(answer, list) or not answer or not is_whole(answer[0]):
        return False
    parts = {Claim.CLAIMED_BY_ANOTHER: [int, bytes], Claim.CLAIMED: [], Claim.SENT: [int]}
    return [type(part) for part in answer[1:]] == parts.get(answer[0])


ALIGN = Script("ledger/align", answers=are_whole, each=lambda call: (len(call.args) - 2) // 2)
CLAIM = Script("ledger/claim", answers=_is_claim)
FORGET, RECORD = Script("ledger/forget"), Script("ledger/record")


class RedisLedger:
    """A `Ledger`.

    Args:
        key: what its keys begin with.
        ask: runs a script: its answer, or those of a majority at least.
        known: the entries that it knows of, each with its last run as one of the nodes has it.
        quorum: how many nodes have to agree.
    """

    def __init__(
        self,
        key: str,
        ask: Callable[[Call], Sequence[Any]],
        known: Callable[[], Iterable[tuple[bytes, int]]],
        *,
        quorum: int = 1,
    ) -> None:
        self._key = key
        self._runs = key + keyspace.LEDGER
        self._ask = ask
        self._known = known
        self._quorum = quorum

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        self._forget_all_but(lasts)
        if self._quorum > 1:
            # Look first: a node that has lost it would keep what is given here, which is later than what was sent.
            known = self._aligned(dict.fromkeys(lasts, 0), ceiling)
            lasts = {entry: known[entry] or last for entry, last in lasts.items()}
        return self._aligned(lasts, ceiling)

    def lasts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, last in self._known():
            entry = name.decode(errors="replace")
            found[entry] = max(last, found.get(entry, 0))
        return found

    def claim(self, entry: str, last: int, owner: str, *, ttl: float, ceiling: int) -> Refused | None:
        keys = [self._runs, self._key + keyspace.TOMBSTONE + owner, *keyspace.claim_keys(self._key, [entry])]
        keys += keyspace.gone_keys(self._key, [entry])
        votes = self._ask(Call(CLAIM, keys, [owner, ms(ttl), ceiling, entry, last]))
        if sent := [vote[1] for vote in votes if vote[0] == Claim.SENT]:
            return Refused(max(sent), 0.0)
        if sum(vote[0] == Claim.CLAIMED for vote in votes) >= self._quorum:
            return None
        if self._quorum > 1:
            # Some of the nodes may have granted the claim: nobody would get a majority before that ends.
            self.record({entry: 0}, owner, ceiling=ceiling)
        others = [vote for vote in votes if vote[0] == Claim.CLAIMED_BY_ANOTHER]
        _, pttl, claimer = max(others)
        remaining = pttl / 1000 if len(others) >= self._quorum else SPLIT
        return Refused(None, remaining, claimer.decode(errors="replace"))

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        self._end_claims(lasts, owner, ceiling, tombstone_ms=0)

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        self._end_claims(dict.fromkeys(entries, 0), owner, 0, tombstone_ms=ms(TOMBSTONE_TTL))

    def _end_claims(self, lasts: Mapping[str, int], owner: str, ceiling: int, *, tombstone_ms: int) -> None:
        tombstone = self._key + keyspace.TOMBSTONE + owner
        for part in batches([*lasts]):
            keys = [self._runs, tombstone, *keyspace.claim_keys(self._key, part)]
            self._ask(Call(RECORD, keys, [owner, ms(LEDGER_TTL), ceiling, tombstone_ms, *_pairs(lasts, part)]))

    def _aligned(self, lasts: Mapping[str, int], ceiling: int) -> dict[str, int]:
        aligned: dict[str, int] = {}
        for part in batches([*lasts]):
            keys = [self._runs, *keyspace.gone_keys(self._key, part)]
            answers = self._ask(Call(ALIGN, keys, [ms(LEDGER_TTL), ceiling, *_pairs(lasts, part)]))
            aligned.update({entry: max(known) for entry, *known in zip(part, *answers, strict=True)})
        return aligned

    def _forget_all_but(self, lasts: Mapping[str, int]) -> None:
        for gone in batches(sorted({entry for entry, _ in self._known()} - {entry.encode() for entry in lasts})):
            names = (entry.decode(errors="replace") for entry in gone)
            self._ask(Call(FORGET, [self._runs, *keyspace.gone_keys(self._key, names)], [ms(MEMORY), *gone]))


def _pairs(lasts: Mapping[str, int], entries: Sequence[str]) -> Iterator[object]:
    for entry in entries:
        yield entry
        yield lasts[entry]
