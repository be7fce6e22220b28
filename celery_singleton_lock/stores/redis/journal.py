"""The journal on a Redis server, or on the nodes of a Redlock, of which each has a part. Keys: `docs/stored.md`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from celery_singleton_lock import cleaned
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.stores.journal import MAX_LABELS, Written
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import Call, Script, are_whole, is_whole, ms
from celery_singleton_lock.stores.redis.server import Endpoint

#: Seconds for which the journal is kept after it was written to: 30 days.
JOURNAL_TTL = 2_592_000.0

#: The most keys for which the journal knows the last run, and how often in a row a copy was refused.
KEYS_REMEMBERED = 10_000


def _answers_write(answer: Any) -> bool:
    if not (isinstance(answer, list) and len(answer) == 3):
        return False
    now, rows, overlaps = answer
    return is_whole(now) and are_whole(rows) and isinstance(overlaps, list) and len(rows) == len(overlaps)


WRITE = Script("now", "journal/write", answers=_answers_write)

_PARTS = "counts", "entries", "last", "refused", "labels", "scratch"

#: Entries that are read at once.
PAGE = 1000

#: Applies a function to each server that has a part; what it returned.
Read = Callable[[Callable[[Endpoint], Any]], Sequence[Any]]


class RedisJournal:
    """A `Journal`.

    Args:
        prefix: what its keys begin with.
        size: entries that are kept.
        run: runs a script on one of the servers.
        read: see `Read`.
    """

    def __init__(self, prefix: str, size: int, run: Callable[[Call], Any], read: Read) -> None:
        self._prefix = prefix
        self._size = size
        self._run = run
        self._read = read

    def write(
        self,
        counts: Mapping[str, int],
        entries: Sequence[Entry],
        *,
        slack: float,
        coarse: Mapping[str, str] | None = None,
    ) -> Written:
        args: list[object] = [ms(JOURNAL_TTL), self._size, KEYS_REMEMBERED, MAX_LABELS, len(counts)]
        for name, count in counts.items():
            args += [name, (coarse or {}).get(name, ""), count]
        for it in entries:
            times = (round(it.began * 1000), round(it.ended * 1000), round(slack * 1000, 3))
            args += [_treated_as(it), it.key, *times, it.fence, it.dumps()]
        keys = [keyspace.journal_key(self._prefix, part) for part in _PARTS]
        now, rows, overlaps = self._run(Call(WRITE, keys, args))
        return Written(now / 1_000_000, rows, [Entry.loads(overlap) if overlap else None for overlap in overlaps])

    def counts(self) -> dict[str, int]:
        return self._sum("counts")

    def refused(self) -> dict[str, int]:
        return self._sum("refused")

    def entries(self, *, since: float) -> Iterator[Entry]:
        key, start = keyspace.journal_key(self._prefix, "entries"), round(since * 1000)
        parts = self._read(lambda server: list(_texts(server, key, start)))
        for _, text in heapq.merge(*parts):
            if (entry := Entry.loads(text)) is not None:
                yield entry

    def _sum(self, part: str) -> dict[str, int]:
        key, total = keyspace.journal_key(self._prefix, part), Counter[str]()
        for flat in self._read(lambda server: _answer(server, "HGETALL", key)):
            for name, value in zip(flat[::2], flat[1::2], strict=True):
                if (count := cleaned.whole(value)) is not None:  # Or somebody else wrote it.
                    total[name.decode(errors="replace")] += count
        return dict(total)


def _treated_as(entry: Entry) -> str:
    if entry.kind == "run":
        return "run" if entry.limit == 1 else "turn"
    return "refusal" if entry.kind in REFUSALS else "note"


def _texts(server: Endpoint, key: str, since: int) -> Iterator[tuple[tuple[int, int], bytes]]:
    """The elements of the stream since that many milliseconds after the epoch, with their ids."""
    start = str(since)
    while True:
        page = _answer(server, "XRANGE", key, start, "+", "COUNT", PAGE)
        for name, fields in page:
            milliseconds, _, number = name.partition(b"-")
            yield (int(milliseconds), int(number)), fields[1]
        if len(page) < PAGE:
            return
        start = f"({page[-1][0].decode()}"


def _answer(server: Endpoint, *command: object) -> Sequence[Any]:
    """The answer; nothing if somebody else has put a value of another type there, which the next write replaces."""
    try:
        answer: Sequence[Any] = server.command(*command)
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            return ()
        raise
    return answer
