"""Invalid answers of a server: of other types, too short, nested, cut, errors, or to another question.

The connections are real, and the server at their other end is simulated: it answers each command as a real server
might, and some as none does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import hiredis
from redis.connection import Connection as RedisPyConnection
from redis.connection import ConnectionPool

from celery_singleton_lock import background, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record
from celery_singleton_lock.stores.redis import (
    ledger,
    lock_commands,
)
from celery_singleton_lock.stores.redis.connection import Connection, Parser
from celery_singleton_lock.stores.redis.outbox import Outbox
from celery_singleton_lock.stores.redis.redlock import RedlockStore
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.fuzz.choices import Case, Choices
from tests.patience import sleepless

KEY = "p:1:{t:0}"
HOLDER = Holder("id", node="n", pid=1)
VALUE = "d31c43ab95f919e9c8bef85b6373f466" + HOLDER.dumps(30.0)
RECORD = '["SUCCESS", 3600.0, true, false]\n1:7'

Answer = Callable[[Sequence[bytes]], Any]


def _per_key(value: Any) -> Answer:
    return lambda command: [value] * int(command[2])


def _pairs(value: Any, *, before: int) -> Answer:
    """One value for each entry: the arguments after the first `before` have a name and a number for each."""
    return lambda command: [value] * ((len(command) - 3 - int(command[2]) - before) // 2)


#: What a script answers; after the first answer the caller is done.
_QUESTION: tuple[Any, ...] = ([1, 7, 0], [0, VALUE, 500, 0], [2, RECORD, 500], [4], [5, 3])
_OF_SCRIPTS: dict[Any, tuple[Any, ...]] = {
    lock_commands.ACQUIRE: (*_QUESTION, [3, 500]),
    lock_commands.REFUSE: ([1], *_QUESTION[1:3], _QUESTION[4]),
    lock_commands.FREE: (1, 0, f"p:mail:1|{VALUE[:32]}"),
    lock_commands.NEXT: (None, f"p:mail:1|{VALUE[:32]}"),
    lock_commands.LOOK: (1, 0, -1),
    lock_commands.PUSH: (1,),
    lock_commands.RENEW: (_per_key(1), _per_key(0)),
    lock_commands.REPLACE: (_per_key(1),),
    lock_commands.PUT_BACK: (None,),
    lock_commands.VALUES: (_per_key(VALUE), _per_key("")),
    lock_commands.RAISE_FENCE: (1, 0),
    lock_commands.TAKE_BACK: (1, 0),
    ledger.ALIGN: (_pairs(5, before=2),),
    ledger.CLAIM: ([1], [2, 5], [0, 100, "x"]),
    ledger.FORGET: (1,),
    ledger.RECORD: (1,),
}
_BY_NAME = {
    name: found
    for script, found in _OF_SCRIPTS.items()
    for name in (script.sha.encode(), script.text.encode() if isinstance(script.text, str) else script.text)
}

#: What other commands answer; apart from errors, a server has no other answers to them.
_PLAIN: dict[bytes, tuple[Any, ...]] = {
    b"GET": (None, VALUE, "5", "x", "-9" * 30),
    b"GETRANGE": (RECORD, "", "\x00"),
    b"PTTL": (500, -1, -2),
    b"TIME": (["1795344209", "5"],),
    b"BLPOP": (None, ["p:mail:1", VALUE[:32]]),
    b"SCAN": (["0", [f"{KEY}:run", f"{KEY}:done:x", "other"]], ["0", []]),
    b"ZRANGE": ([VALUE, "1795344209000", VALUE[:-1], "x"], ["x", "1"], []),
    b"HSCAN": (["0", ["entry", "5"]], ["0", []]),
    b"HGETALL": (['["runs","t","SUCCESS"]', "5", "x", "y"], []),
    b"HVALS": (["1795344209000 3", "x"], []),
    b"XRANGE": ([["1-0", ["e", '["run","t","k","id","n",1,2.0,3.0]']], ["2-0", ["x", "y"]]], []),
    b"SCRIPT": ("f" * 40,),
}
_ERRORS = ("ERR no", "WRONGTYPE Operation", "NOSCRIPT No", "NOPERM no", "OOM no", "LOADING x", "READONLY x", "MOVED x")
_ODD = (
    b"$5\r\nab",
    b"*3\r\n:1\r\n",
    b"?\r\n",
    b":99999999999999999999999\r\n",
    b"*-1\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b"\x00",
)


def as_resp(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, Exception):
        return b"-%b\r\n" % str(value).encode()
    if isinstance(value, int):
        return b":%d\r\n" % min(max(int(value), -(2**63)), 2**63 - 1)
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple)):
        return b"*%d\r\n" % len(value) + b"".join(map(as_resp, value))
    content = str(value).encode("utf-8", "surrogatepass")
    return b"$%d\r\n%b\r\n" % (len(content), content)


class Player:
    """The server; the same choices make the same answers."""

    def __init__(self) -> None:
        self.choices = Choices(b"")
        #: Whether it falls silent: a caller then waits for as long as the protocol says.
        self.is_silent_at_times = True

    def answer(self, command: Sequence[bytes]) -> bytes:
        name, choices = command[0].upper(), self.choices
        found = _BY_NAME.get(command[1]) if name in (b"EVALSHA", b"EVAL") else _PLAIN.get(name, ("OK",))
        valid = choices.pick(found or ("OK",))
        valid = valid(command) if callable(valid) else valid
        if choices.one_in(6):
            return as_resp(Exception(choices.pick(_ERRORS[:2] if name == b"EVAL" else _ERRORS)))
        is_plain = name in _PLAIN
        if is_plain or not choices.one_in(3):
            return as_resp(valid)
        content = as_resp(choices.mutated(valid, 2))
        if choices.one_in(4):
            content += as_resp(choices.value(1))
        if self.is_silent_at_times and choices.one_in(6):
            content = choices.pick((*_ODD, choices.spoiled(content)))
        return content


class Wire(socket.socket):
    """The socket of a client. Everything that is sent is answered at once."""

    @classmethod
    def to(cls, player: Player) -> Wire:
        ours, theirs = socket.socketpair()
        wire = cls(fileno=ours.detach())
        wire.player, wire.theirs, wire.reader = player, theirs, hiredis.Reader()
        theirs.setblocking(False)
        return wire

    player: Player
    theirs: socket.socket
    reader: Any

    def sendall(self, data: Any, *_: Any) -> None:
        self.send(data)

    def send(self, data: Any, *_: Any) -> int:
        self.reader.feed(bytes(data))
        while (command := self.reader.gets()) is not False:
            self.theirs.send(self.player.answer(command))
        return len(data)

    def close(self) -> None:
        self.theirs.close()
        super().close()


class Dialed(RedisPyConnection):
    """A redis-py connection that does not log in."""

    def __init__(self, player: Player) -> None:
        super().__init__(parser_class=Parser, protocol=2, redis_connect_func=lambda it: it._parser.on_connect(it))
        self._player = player

    def _connect(self) -> Wire:
        return Wire.to(self._player)


class PlayedServer(Server):
    def __init__(self, player: Player) -> None:
        super().__init__(ConnectionPool(socket_timeout=0.05))
        self._player = player

    def open(self, step: float | None = None) -> Connection:
        connection = Connection(Dialed(self._player))
        connection.wait_at_most(0.002)
        return connection

    def take(self, step: float) -> Connection:
        return super().take(0.002)


def _acquire(store: Any) -> None:
    found = store.acquire(LockRequest(KEY, new_owner(), ttl=30.0, holder=HOLDER, check_finished=True, limit=2))
    if isinstance(found, Lease):
        assert isinstance(found.fence, int)
    elif isinstance(found, Held):
        assert found.remaining >= 0
    else:
        assert isinstance(found, Record)
        assert isinstance(found.content, bytes)


def _renew(store: Any) -> None:
    holds = [Hold(KEY, new_owner(), ttl=30.0, limit=limit) for limit in (1, 3)]
    assert all(isinstance(it, bool) for it in store.renew(holds, timeout=0.05))


def _free(store: Any) -> None:
    assert isinstance(store.free(Hold(KEY, new_owner(), ttl=30.0), record=Record("m", b"x", 9.0)), Freeing)


def _end(store: Any) -> None:
    store.abandon(Hold(KEY, new_owner(), ttl=30.0))
    store.remember(KEY, Record("m", b"x", 9.0))
    store.refuse(KEY, HOLDER, Record("m", b"x", 9.0))
    store.replace_records([(KEY, Record("m", b"x", 9.0))])


def _look(store: Any) -> None:
    store.inspect(KEY)
    store.held(KEY)
    list(store.all_held("p"))


def _ledger(store: Any) -> None:
    book, lasts = store.ledger(KEY), {"a": 1, "b": 2}
    assert all(isinstance(last, int) for last in book.align(lasts, ceiling=10).values())
    for entry, last in lasts.items():
        answer = book.claim(entry, last, new_owner(), ttl=5.0, ceiling=10)
        assert answer is None or answer.last is None or isinstance(answer.last, int)
    book.record(lasts, new_owner(), ceiling=10)
    book.unclaim(["a"], new_owner())


def _journal(store: Any) -> None:
    kept = store.journal("p", size=10)
    kept.write({"a": 1}, [], now=0.0)
    kept.counts(), kept.refused(), list(kept.entries(since=0.0))


_ASKED = (_acquire, _renew, _free, _end, _look, _ledger, _journal)


def _asked(store: Any, choices: Choices) -> None:
    for ask in choices.some(_ASKED, most=3) or _ASKED[:1]:
        try:
            ask(store)
        except LockUnavailable as error:
            assert str(error).isprintable()
            assert len(str(error)) < 2000


@contextmanager
def cases() -> Iterator[Case]:
    def case(choices: Choices) -> None:
        is_redlock = choices.one_in(4)
        player = Player()
        player.is_silent_at_times = not is_redlock
        servers = [PlayedServer(player) for _ in range(3 if is_redlock else 1)]
        store: Any = RedlockStore(servers, "nodes", memory=None) if is_redlock else RedisStore(servers[0], "server")
        player.choices = choices
        try:
            _asked(store, choices)
        finally:
            player.choices = Choices(b"")
            store.close()

    with ExitStack() as patched:
        patched.enter_context(patch.object(clock, "sleep", sleepless()))
        # Pending calls are repeated in a thread, whose timing no case controls.
        patched.enter_context(patch.object(Outbox, "put", lambda *_, **__: None))
        patched.enter_context(patch.object(background.BackgroundJob, "schedule", lambda self: None))
        yield case
