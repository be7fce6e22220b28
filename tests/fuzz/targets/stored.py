"""Foreign values in Redis, under every name that this package reads, on a real server.

Whatever the value is: a store says what it found, or that it cannot say (`LockUnavailable`), a stranger's hold stays,
and a reader shows something.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

from celery_singleton_lock import SingletonTask, cli, clock
from celery_singleton_lock.cli.listing import locks_table
from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.diagnosis import verdict
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_beat, key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis.outbox import Outbox
from tests.fuzz.choices import Case, Choices
from tests.fuzz.targets.parsers import ENTRY, HOLDER, RECORD
from tests.patience import in_this_thread
from tests.redis_server import RedisServer

OWNER = "d31c43ab95f919e9c8bef85b6373f466"
MESSAGE = "id:0.0"

#: The keys beside a lock and beside a schedule, and those of the journal, each with a valid value.
OF_LOCK: Mapping[str, Any] = {
    "run": HOLDER,
    "fence": 1795344209000000,
    "waiting": {OWNER: 1},
    "wake": ["1"],
    f"done:{MESSAGE}": RECORD,
    f"tombstone:{OWNER}": 1,
}
OF_BEAT: Mapping[str, Any] = {
    "ledger": {"a": "5", "b": "7"},
    "claim:a:": OWNER,
    "gone:a:": 5,
    "run": HOLDER,
}
OF_JOURNAL: Mapping[str, Any] = {
    "counts": {json.dumps(["runs", "t", "SUCCESS"]): "5"},
    "entries": ENTRY,
    "refused": {"k": "5"},
}


def _content(choices: Choices, name: str, valid: Any) -> bytes:
    if name.startswith("run"):
        return choices.spoiled(OWNER.encode()) + choices.written(valid) if choices.one_in(2) else choices.written(valid)
    content = choices.mutated(valid, 2)
    return choices.spoiled(
        content.encode(errors="replace") if isinstance(content, str) else json.dumps(content).encode()
    )


def _plant(client: Any, choices: Choices, place: str, name: str, valid: Any) -> None:
    """Write something under this name, mostly of the right type."""
    key, content = f"{place}:{name}".encode("utf-8", "surrogatepass"), _content(choices, name, valid)
    kind = choices.pick(("right", "right", "right", "string", "list", "hash", "zset", "set", "stream"))
    if kind == "right":
        kind = _kind_of(name)
    client.delete(key)
    if kind == "string":
        client.set(key, content)
    elif kind == "list":
        client.rpush(key, content, b"1")
    elif kind == "hash":
        fields = valid if isinstance(valid, dict) else {"a": 1}
        client.hset(
            key, mapping={**{it: choices.spoiled(str(value).encode()) for it, value in fields.items()}, content: b"7"}
        )
    elif kind == "zset":
        client.zadd(key, {content: choices.pick((0.0, 1e300, -5.0, float("inf")))})
    elif kind == "set":
        client.sadd(key, content)
    else:
        client.xadd(key, {choices.pick((b"e", content)): content})
    if choices.one_in(2):
        client.pexpire(key, 60_000)


def _kind_of(name: str) -> str:
    kinds = {"waiting": "zset", "wake": "list", "ledger": "hash", "entries": "stream", "labels": "zset"}
    return kinds.get(name, "hash" if name in ("counts", "last", "refused") else "string")


class Shop:
    """An app with its own lock server."""

    def __init__(self, server: RedisServer) -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(singleton_lock_backend=server.url, singleton_lock_prefix="p")
        self.task = self.app.task(name="shop.bill", base=SingletonTask, lock_key=[], lock_limit=2, shared=False)(_bill)
        self.runtime = Runtime.of(self.app)
        self.store: Any = self.runtime.store
        self.client = server.client()
        self.key = self.task.lock_key_of()
        self.beat = key_of_beat("p", "shop")

    def ask(self, *words: str) -> Any:
        context = CLIContext(app=self.app, no_color=True, workdir=None)
        return CliRunner().invoke(cli.locks, words, obj=context)


def _bill(month: int = 0) -> None: ...


def _lock(shop: Shop, choices: Choices) -> None:
    """The whole life of a hold, beside the foreign values."""
    store, limit = shop.store, choices.below(2) + 1
    stranger = _held(shop)
    holder = Holder(choices.pick(("other", "id")), retries=choices.below(2), node="n", pid=1, sending="s")
    request = LockRequest(shop.key, new_owner(), ttl=30.0, holder=holder, check_finished=True, limit=limit)
    found: Any = None
    with suppress(LockUnavailable):
        found = store.acquire(request)
    if isinstance(found, Lease):
        with suppress(LockUnavailable):
            assert store.renew([found], timeout=1.0) == [True]
        with suppress(LockUnavailable):
            assert store.free(found, record=Record(MESSAGE, b"x", 60.0))
    for said in (
        lambda: store.refuse(shop.key, holder, Record(MESSAGE, b"x", 60.0)),
        lambda: store.replace_records([(shop.key, Record(MESSAGE, b"y", 60.0))]),
        lambda: store.abandon(request.hold()),
        lambda: store.remember(shop.key, Record(MESSAGE, b"z", 60.0)),
    ):
        with suppress(LockUnavailable):
            said()
    assert stranger <= _held(shop), "a stranger's hold was touched"


def _held(shop: Shop) -> set[bytes]:
    """What is at the lock, for as long as this lasts."""
    lock = f"{shop.key}:run"
    if shop.client.type(lock) == b"string":
        return {shop.client.get(lock)}
    later = (time.time() + 30.0) * 1000
    return {*shop.client.zrangebyscore(lock, later, "+inf")} if shop.client.type(lock) == b"zset" else set()


def _looks(shop: Shop) -> None:
    for look in (lambda: shop.store.inspect(shop.key), lambda: shop.store.held(shop.key)):
        try:
            look()
        except LockUnavailable as error:
            assert "run" in str(error) or "WRONGTYPE" in str(error)
    other = key_of_text("p", "other", "x")
    lease = shop.store.acquire(LockRequest(other, new_owner(), ttl=30.0, holder=Holder("id", node="n", pid=1)))
    listed = [*shop.store.all_held("p")]
    assert other in [key for key, _ in listed], "a foreign value hides the locks of others"
    for key, held in listed:
        lock = HeldLock.of(key, held)
        assert locks_table([lock], keys=True).replace("\n", "").isprintable()
        json.dumps(lock.fields(), allow_nan=False)
    assert shop.store.free(lease)


def _ledger(shop: Shop) -> None:
    ledger, owner = shop.store.ledger(shop.beat), new_owner()
    for ask in (
        lambda: ledger.align({"a": 6, "b": 0}, ceiling=10**16),
        lambda: ledger.claim("a", 6, owner, ttl=5.0, ceiling=10**16),
        lambda: ledger.record({"a": 8}, owner, ceiling=10**16),
        lambda: ledger.unclaim(["a"], owner),
    ):
        with suppress(LockUnavailable):
            ask()


def _journal(shop: Shop) -> None:
    journal = shop.store.journal("p", size=100)
    journal.refused(), list(journal.entries(since=0.0))
    before = journal.counts().get("a", 0)
    journal.write({"a": 1}, [], now=0.0)
    assert journal.counts()["a"] == before + 1


_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("list",),
    ("list", "--json"),
    ("list", "--task", "*"),
    ("stats",),
    ("stats", "--json"),
    ("show", "shop.bill"),
    ("show", "shop.bill", "--json"),
    ("timeline", "--output", "-"),
    ("explain", "shop.bill"),
    ("explain", "--json", "shop.bill"),
    ("doctor", "--offline"),
    ("clear", "--yes", "--node", "*"),
    ("release", "--yes", "shop.bill"),
)


def answered(result: Any) -> None:
    """Check that the command said something, and exited properly."""
    error = result.exception
    assert error is None or isinstance(error, SystemExit), repr(error)
    assert result.exit_code in (0, 1, 2)
    if result.exit_code:
        assert result.output.strip()
    assert "Traceback" not in result.output
    result.output.encode()


def _command(shop: Shop, choices: Choices) -> None:
    result = shop.ask(*choices.pick(_COMMANDS))
    answered(result)
    assert not [char for char in result.output if not char.isprintable() and char not in "\n\t\r"], "not printable"


def _exporter(shop: Shop) -> None:
    registry = CollectorRegistry()
    registry.register(LockCollector(shop.app))
    generate_latest(registry).decode()


@contextmanager
def shop() -> Iterator[Shop]:
    """A shop in which nothing waits: nothing is repeated later, and no holder is watched."""
    now, slept = clock.now, [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    with (
        RedisServer() as server,
        patch.object(clock, "sleep", in_this_thread(sleep, clock.sleep)),
        patch.object(clock, "now", in_this_thread(lambda: now() + slept[0], now)),
        patch.object(Outbox, "put", lambda *_, **__: None),
        patch.object(verdict, "POLL", 1000.0),
        patch.object(verdict, "MIN_POLL", 1000.0),
    ):
        made = Shop(server)
        yield made
        made.client.close()
        made.store.close()


@contextmanager
def cases() -> Iterator[Case]:
    with shop() as made:
        asks: tuple[Callable[[Choices], None], ...] = (
            lambda choices: _lock(made, choices),
            lambda choices: _looks(made),
            lambda choices: _ledger(made),
            lambda choices: _journal(made),
            lambda choices: _exporter(made),
            lambda choices: _command(made, choices),
        )

        def case(choices: Choices) -> None:
            made.client.flushdb()
            for place, names in ((made.key, OF_LOCK), (made.beat, OF_BEAT), ("p:{journal}", OF_JOURNAL)):
                for name in choices.some(sorted(names), most=2):
                    _plant(made.client, choices, place, name, names[name])
            for ask in choices.some(asks, most=2) or asks[:1]:
                ask(choices)

        yield case
