"""The journal on a Redis server, or on the nodes of a Redlock, of which each has a part. Keys: `docs/protocol.md`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from celery_singleton_lock import cleaned
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.stores import store
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import Command, ms
from celery_singleton_lock.stores.redis.server import Server

#: Seconds for which the journal is kept after it was written to: 30 days.
JOURNAL_TTL = 2_592_000.0

#: Entries that are read at once.
PAGE = 1000

#: In the errors of commands that meet a value of another type, no number, or the last id that a stream can have.
_IN_THE_WAY = ("not an integer", "overflow", "last possible ID", "WRONGTYPE")

#: Applies a function to one of the servers; or to each that has a part. What it returned.
First = Callable[[Callable[[Server], list[Any]]], list[Any]]
Read = Callable[[Callable[[Server], Any]], Sequence[Any]]


class RedisJournal:
    """A `Journal`.

    Args:
        prefix: what its keys begin with.
        size: entries that are kept.
        first, read: see `First` and `Read`.
    """

    def __init__(self, prefix: str, size: int, first: First, read: Read) -> None:
        self._counts, self._entries, self._refused = (
            keyspace.journal_key(prefix, part) for part in ("counts", "entries", "refused")
        )
        self._refusal = "HINCRBY", self._refused
        self._size = size
        self._first = first
        self._read = read

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        commands: list[Command] = [
            *(("HINCRBY", self._counts, name, by) for name, by in counts.items()),
            *(("XADD", self._entries, "MAXLEN", "~", self._size, "*", "e", it.dumps(now)) for it in entries),
            *self._rows(entries),
            *(("PEXPIRE", key, ms(JOURNAL_TTL)) for key in (self._counts, self._entries, self._refused)),
            ("HLEN", self._refused),
        ]
        answers = self._first(lambda server: self._written(server, commands))
        in_a_row = iter([it for sent, it in zip(commands, answers, strict=True) if sent[:2] == self._refusal])
        return [cleaned.count(next(in_a_row)) if it.kind in REFUSALS else 0 for it in entries]

    def counts(self) -> dict[str, int]:
        return self._sum(self._counts)

    def refused(self) -> dict[str, int]:
        return self._sum(self._refused)

    def entries(self, *, since: float) -> Iterator[Entry]:
        parts = self._read(lambda server: list(_elements(server, self._entries, round(since * 1000))))
        for (milliseconds, _), text in heapq.merge(*parts):
            if (entry := Entry.loads(text, milliseconds / 1000)) is not None:
                yield entry

    def _rows(self, entries: Sequence[Entry]) -> Iterator[Command]:
        for it in entries:
            if it.kind in REFUSALS:
                yield *self._refusal, it.key, 1
            elif it.kind == "run":
                yield "HDEL", self._refused, it.key

    def _written(self, server: Server, commands: Sequence[Command]) -> list[Any]:
        """The answers to the commands, in one pipeline; in another one, to those that met somebody else's value.

        Raises:
            ResponseError: the server refuses.
        """
        answers = server.command_each(commands)
        failed = [index for index, answer in enumerate(answers) if isinstance(answer, Exception)]
        if failed:
            cures = [_cure(commands[index], answers[index]) for index in failed]
            again = server.command_each([*cures, *(commands[index] for index in failed)])[len(cures) :]
            for index, answer in zip(failed, again, strict=True):
                if isinstance(answer, Exception):
                    raise answer
                answers[index] = answer
        if cleaned.count(answers[-1]) > store.KEYS_REMEMBERED:
            server.command("DEL", self._refused)
        return answers

    def _sum(self, key: str) -> dict[str, int]:
        total = Counter[str]()
        for flat in self._read(lambda server: _answer(server, "HGETALL", key)):
            for name, value in zip(flat[::2], flat[1::2], strict=True):
                if (count := cleaned.whole(value)) is not None:  # Or somebody else wrote it.
                    total[name.decode(errors="replace")] += count
        return dict(total)


def _cure(command: Command, error: Exception) -> Command:
    """What takes somebody else's value out of the way of a command; raises an error that has another cause."""
    if not any(text in str(error) for text in _IN_THE_WAY):
        raise error
    is_field = command[0] == "HINCRBY" and not str(error).startswith("WRONGTYPE")
    return ("HDEL", *command[1:3]) if is_field else ("DEL", command[1])


def _elements(server: Server, key: str, since: int) -> Iterator[tuple[tuple[int, int], bytes]]:
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


def _answer(server: Server, *command: object) -> Sequence[Any]:
    """The answer; nothing if somebody else has put a value of another type there, which the next write replaces."""
    try:
        answer: Sequence[Any] = server.command(*command)
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            return ()
        raise
    return answer
