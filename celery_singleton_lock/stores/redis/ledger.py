"""The ledger on one server or on a majority of the nodes of a Redlock: `docs/stored.md` has the keys.

A last run only ever grows, so the highest of a majority is the true one: what one majority has recorded, any other
majority knows as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from celery_singleton_lock.stores.ledger import MEMORY, Refused
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import OVER_TTL, Call, Script, are_whole, batches, ms

#: Seconds until a claim that was split between several beats is tried again.
SPLIT = 0.2

#: Seconds for which beat's last runs are kept: more than a year, which is the longest crontab.
LEDGER_TTL = 40_000_000.0

ALIGN = Script("ledger/align", answers=are_whole, each=lambda call: (len(call.args) - 2) // 2)
CLAIM = Script(
    "ledger/claim",
    answers=lambda answer: isinstance(answer, list) and all(are_whole(it) and len(it) == 2 for it in answer),
    each=lambda call: (len(call.keys) - 2) // 2,
)
SECRET = Script("ledger/secret", answers=lambda answer: isinstance(answer, bytes))
FORGET, RECORD, UNCLAIM = Script("ledger/forget"), Script("ledger/record"), Script("ledger/unclaim")

SCRIPTS = (ALIGN, FORGET, CLAIM, RECORD, UNCLAIM, SECRET)


class Claim(IntEnum):
    """The first part of the answer to a claim."""

    CLAIMED_BY_ANOTHER = 0
    CLAIMED = 1
    SENT = 2


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
        self._runs = keyspace.ledger_key(key)
        self._ask = ask
        self._known = known
        self._quorum = quorum
        #: The secret, as far as it is known.
        self._secret = ""

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

    def claim(self, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> dict[str, Refused]:
        refused: dict[str, Refused] = {}
        for part in batches([*lasts]):
            keys = [self._runs, keyspace.over_key(self._key, owner)]
            keys += [*keyspace.claim_keys(self._key, part), *keyspace.gone_keys(self._key, part)]
            answers = self._ask(Call(CLAIM, keys, [owner, ms(ttl), ceiling, *_pairs(lasts, part)]))
            for entry, *votes in zip(part, *answers, strict=True):
                if (refusal := self._counted(votes)) is not None:
                    refused[entry] = refusal
        split = [entry for entry, refusal in refused.items() if refusal.last is None]
        if self._quorum > 1 and split:
            # Some of the nodes may have granted the claim: nobody would get a majority before that ends.
            self.record(dict.fromkeys(split, 0), owner, ceiling=ceiling)
        return refused

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        for part in batches([*lasts]):
            keys = [self._runs, *keyspace.claim_keys(self._key, part)]
            self._ask(Call(RECORD, keys, [owner, ms(LEDGER_TTL), ceiling, *_pairs(lasts, part)]))

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        for part in batches(entries):
            keys = [keyspace.over_key(self._key, owner), *keyspace.claim_keys(self._key, part)]
            self._ask(Call(UNCLAIM, keys, [owner, ms(OVER_TTL)]))

    def secret(self) -> str:
        if self._quorum == 1:
            (self._secret,) = self._secrets(self._secret or secrets.token_hex(16), at_least=False)
            return self._secret
        # As with a last run, the highest of a majority counts, once a majority has it: any later majority knows it.
        # What is known here is sent to all nodes: those that have lost it get it back.
        value, known = self._secret, {""}
        while known != {value} or not value:
            known = self._secrets(value, at_least=True)
            value = max(known) or secrets.token_hex(16)
        self._secret = value
        return value

    def _aligned(self, lasts: Mapping[str, int], ceiling: int) -> dict[str, int]:
        aligned: dict[str, int] = {}
        for part in batches([*lasts]):
            keys = [self._runs, *keyspace.gone_keys(self._key, part)]
            answers = self._ask(Call(ALIGN, keys, [ms(LEDGER_TTL), ceiling, *_pairs(lasts, part)]))
            aligned.update({entry: max(known) for entry, *known in zip(part, *answers, strict=True)})
        return aligned

    def _secrets(self, value: str, *, at_least: bool) -> set[str]:
        """The nodes' secrets; a value becomes a node's secret if it has none (with `at_least`, or a smaller one)."""
        call = Call(SECRET, [keyspace.secret_key(self._key)], [value, ms(LEDGER_TTL), int(at_least)])
        return {found.decode(errors="replace") for found in self._ask(call)}

    def _forget_all_but(self, lasts: Mapping[str, int]) -> None:
        for gone in batches(sorted({entry for entry, _ in self._known()} - {entry.encode() for entry in lasts})):
            names = (entry.decode(errors="replace") for entry in gone)
            self._ask(Call(FORGET, [self._runs, *keyspace.gone_keys(self._key, names)], [ms(MEMORY), *gone]))

    def _counted(self, votes: Sequence[Sequence[int]]) -> Refused | None:
        """Why the claim is refused; None if a majority has granted it."""
        if sent := [last for kind, last in votes if kind == Claim.SENT]:
            return Refused(max(sent), 0.0)
        if sum(kind == Claim.CLAIMED for kind, _ in votes) >= self._quorum:
            return None
        claimed = [pttl for kind, pttl in votes if kind == Claim.CLAIMED_BY_ANOTHER]
        return Refused(None, max(claimed) / 1000 if len(claimed) >= self._quorum else SPLIT)


def _pairs(lasts: Mapping[str, int], entries: Sequence[str]) -> Iterator[object]:
    for entry in entries:
        yield entry
        yield lasts[entry]
