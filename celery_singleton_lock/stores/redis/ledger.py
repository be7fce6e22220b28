"""What beat has sent, on one server or on a majority of the nodes of a Redlock.

A last run only ever grows, so that the highest of a majority is the true one: what a majority was told, any other
majority knows of as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from celery_singleton_lock.stores.ledger import Refused
from celery_singleton_lock.stores.redis import ledger_commands
from celery_singleton_lock.stores.redis.ledger_commands import Claim
from celery_singleton_lock.stores.redis.script import Call

#: Seconds until a claim is tried again of which everybody got a part.
SPLIT = 0.2

#: Runs a script: its answer, or those of a majority at least.
Ask = Callable[[Call], Sequence[Any]]


class RedisLedger:
    """A `Ledger`.

    Args:
        key: what its keys begin with.
        ask: runs a script.
        known: the entries that it knows of.
        batch: entries in one call.
        quorum: of how many nodes the answers decide.
    """

    def __init__(
        self, key: str, ask: Ask, known: Callable[[], Iterable[bytes]], *, batch: int, quorum: int = 1
    ) -> None:
        self._key = key
        self._ask = ask
        self._known = known
        self._batch = batch
        self._quorum = quorum
        #: As far as it is known.
        self._secret = ""

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        self._forget_all_but(lasts)
        aligned: dict[str, int] = {}
        for part in self._parts(lasts):
            answers = self._ask(ledger_commands.align(self._key, part, ceiling=ceiling))
            aligned.update({entry: max(known) for entry, *known in zip(part, *answers, strict=True)})
        return aligned

    def claim(self, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> dict[str, Refused]:
        refused: dict[str, Refused] = {}
        for part in self._parts(lasts):
            answers = self._ask(ledger_commands.claim(self._key, part, owner, ttl=ttl, ceiling=ceiling))
            for entry, *votes in zip(part, *answers, strict=True):
                if (refusal := self._counted(votes)) is not None:
                    refused[entry] = refusal
        split = [entry for entry, refusal in refused.items() if refusal.last is None]
        if self._quorum > 1 and split:
            # A part of the nodes may have said yes: nobody would get a majority before that ends.
            self.record(dict.fromkeys(split, 0), owner, ceiling=ceiling)
        return refused

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        for part in self._parts(lasts):
            self._ask(ledger_commands.record(self._key, part, owner, ceiling=ceiling))

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        for start in range(0, len(entries), self._batch):
            self._ask(ledger_commands.unclaim(self._key, entries[start : start + self._batch], owner))

    def secret(self) -> str:
        if self._quorum == 1:
            (found,) = self._ask(
                ledger_commands.secret(self._key, self._secret or secrets.token_hex(16), at_least=False)
            )
            self._secret = _text(found)
            return self._secret
        # As with a last run, the highest of a majority counts, once a majority has it: any later one knows of it.
        # What is known here is sent to all nodes: those that have lost it have it again.
        value, known = self._secret, {""}
        while known != {value} or not value:
            known = {_text(found) for found in self._ask(ledger_commands.secret(self._key, value, at_least=True))}
            value = max(known) or secrets.token_hex(16)
        self._secret = value
        return value

    def _forget_all_but(self, lasts: Mapping[str, int]) -> None:
        gone = sorted({*self._known()} - {entry.encode() for entry in lasts})
        for start in range(0, len(gone), self._batch):
            self._ask(ledger_commands.forget(self._key, gone[start : start + self._batch]))

    def _parts(self, lasts: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """What goes into one call each."""
        pairs = list(lasts.items())
        for start in range(0, len(pairs), self._batch):
            yield dict(pairs[start : start + self._batch])

    def _counted(self, votes: Sequence[Sequence[int]]) -> Refused | None:
        """None if a majority has granted it."""
        if sent := [last for kind, last in votes if kind == Claim.SENT]:
            return Refused(max(sent), 0.0)
        if sum(kind == Claim.CLAIMED for kind, _ in votes) >= self._quorum:
            return None
        claimed = [pttl for kind, pttl in votes if kind == Claim.CLAIMED_BY_ANOTHER]
        return Refused(None, max(claimed) / 1000 if len(claimed) >= self._quorum else SPLIT)


def _text(secret: bytes) -> str:
    return secret.decode(errors="replace")
