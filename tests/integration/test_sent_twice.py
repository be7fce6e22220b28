"""The sent-twice matrix of canvas: one object, sent several times, runs as often as with the stock Task.

Ids do not identify messages: users freeze signatures, and Celery 5.7 gives the last step of one chain object the same
id at each send. Each shape is sent three times, by a program that has the tasks, with the stock Task and with
SingletonTask in the same run; what ran, with which arguments, what callers get, and the states of all results are
compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult, GroupResult
from redis import Redis

from celery_singleton_lock import clock
from tests.integration import canvas_app
from tests.integration.workers import Worker, environment
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: How often each shape is sent.
TIMES = 3

#: Seconds, after everything has run, in which surplus runs would be seen.
AFTERWARDS = 1.0

#: Final states of Celery.
READY = {"SUCCESS", "FAILURE", "REVOKED"}


@dataclass(frozen=True)
class Shape:
    """A kind of canvas.

    Attributes:
        make: makes it, from tasks and a function that makes the signature of a step.
        runs: number of tasks that run each time.
        overlapping: whether the stock Task copes with a second send while it runs.
        remade: whether it is made anew each time, from a part that stays the same.
    """

    make: Callable[[SimpleNamespace, Callable[..., Any]], Any]
    runs: int
    overlapping: bool = True
    remade: bool = False


def frozen(signature: Any) -> Any:
    signature.freeze()
    return signature


def with_link(signature: Any, *links: Any, **errbacks: Any) -> Any:
    for link in links:
        signature.link(link)
    for errback in errbacks.values():
        signature.link_error(errback)
    return signature


SHAPES: dict[str, Shape] = {
    "task": Shape(lambda t, s: s("a"), 1),
    "task, frozen": Shape(lambda t, s: frozen(s("a")), 1),
    "a | b": Shape(lambda t, s: s("a") | s("b"), 2),
    "a | b, immutable": Shape(lambda t, s: chain(s("a", immutable=True), s("b", immutable=True)), 2),
    "a | b | c": Shape(lambda t, s: s("a") | s("b") | s("c"), 3),
    "a | b | c, frozen": Shape(lambda t, s: frozen(s("a") | s("b") | s("c")), 3),
    "frozen step in a new chain": Shape(lambda t, s: frozen(s("a", immutable=True)), 2, remade=True),
    "group": Shape(lambda t, s: group(s("a"), s("b"), s("c")), 3),
    "group, frozen": Shape(lambda t, s: frozen(group(s("a"), s("b"))), 2),
    "group of chains": Shape(lambda t, s: group(s("a") | s("b"), s("c") | s("d")), 4),
    "group in a group": Shape(lambda t, s: group(s("a"), group(s("b"), s("c"))), 3),
    "group of partials": Shape(lambda t, s: group(s(str(n), n) for n in range(5)), 5),
    "chord": Shape(lambda t, s: chord([s("a"), s("b")], s("c")), 3),
    "chord, frozen": Shape(lambda t, s: frozen(chord([s("a"), s("b")], s("c"))), 3, overlapping=False),
    "chord of chains": Shape(lambda t, s: chord([s("a") | s("b"), s("c")], s("d")), 4),
    "nested chords": Shape(lambda t, s: chord([chord([s("a"), s("b")], s("c")), s("d")], s("e")), 5),
    "a | group": Shape(lambda t, s: s("a") | group(s("b"), s("c")), 3),
    "a | group | d": Shape(lambda t, s: s("a") | group(s("b"), s("c")) | s("d"), 4),
    "a | group | d | e, frozen": Shape(
        lambda t, s: frozen(s("a") | group(s("b"), s("c")) | s("d") | s("e")), 5, overlapping=False
    ),
    "group | c | d": Shape(lambda t, s: group(s("a"), s("b")) | s("c") | s("d"), 4),
    "chord in a chain": Shape(lambda t, s: chain(s("a"), chord([s("b"), s("c")], s("d")), s("e")), 5),
    "links": Shape(lambda t, s: with_link(s("a"), s("b"), s("c")), 3),
    "link of a chain": Shape(lambda t, s: with_link(s("a") | s("b"), s("c") | s("d")), 4),
    "errback": Shape(lambda t, s: with_link(s("a", of=t.fail), errback=s("b", of=t.caught)), 2),
    "errback by message": Shape(lambda t, s: with_link(s("a", of=t.fail), errback=s("b", of=t.caught_by_message)), 2),
    "errback of a chain": Shape(
        lambda t, s: with_link(chain(s("a"), s("b", of=t.fail), s("c")), errback=s("d", of=t.caught)), 3
    ),
    "errback of a chord": Shape(
        lambda t, s: chord([s("a"), s("b", of=t.fail)], with_link(s("c"), errback=s("d", of=t.caught))), 3
    ),
    "replace": Shape(lambda t, s: chain(s("a"), s("b", of=t.replaced), s("c")), 4),
    "replace by a chain": Shape(lambda t, s: chain(s("a"), s("b", of=t.replaced, by="chain"), s("c")), 5),
    "replace by itself": Shape(lambda t, s: chain(s("a"), s("b", of=t.replaced_by_itself), s("c")), 4),
    "replace in a chord": Shape(lambda t, s: chord([s("a"), s("b", of=t.replaced)], s("c")), 4),
    "retry in a chain": Shape(lambda t, s: chain(s("a"), s("b", of=t.retried), s("c")), 4),
    "partial": Shape(lambda t, s: s("a", 1).clone((2,)), 1),
    "chunks": Shape(lambda t, s: t.item.chunks([(s.tag, str(n)) for n in range(4)], 2).group(), 4),  # type: ignore[attr-defined]
}

#: Some shapes of each kind, for `make test`.
QUICK = (
    "a | b, immutable",
    "a | b | c, frozen",
    "chord, frozen",
    "a | group | d",
    "replace by itself",
    "retry in a chain",
)


class Sender:
    """Sends the shapes, and knows what ran."""

    def __init__(self, app: Celery, record: Redis, stored: Redis) -> None:
        self.app, self._record, self._stored = app, record, stored
        self._made: dict[tuple[str, str], Any] = {}
        self._results: dict[tuple[str, str], list[AsyncResult]] = {}
        self._waited_in_vain = False

    def send(self, family: str, names: tuple[str, ...]) -> None:
        for name in names:
            made = self._object(family, name)
            self._results.setdefault((family, name), []).append(made.apply_async())

    def _object(self, family: str, name: str) -> Any:
        shape = SHAPES[name]
        tasks = getattr(self.app, family)

        def step(called: str, *args: Any, of: Any = None, immutable: bool = False, **more: Any) -> Any:
            named = {"tag": name, "name": called, **more}
            return (tasks.step if of is None else of).signature(args, named, immutable=immutable)

        step.tag = name  # type: ignore[attr-defined]
        if (family, name) not in self._made:
            self._made[family, name] = shape.make(tasks, step)
        made = self._made[family, name]
        return chain(made, step("b")) if shape.remade else made

    def ran(self, family: str, name: str) -> Counter[str]:
        """What ran, with its arguments."""
        return Counter(item.decode() for item in self._record.lrange(f"ran:{family}:{name}", 0, -1))

    def wait(self, family: str, names: tuple[str, ...], times: int) -> None:
        """Wait until all have run that many times. Those that do not will not: one long wait is enough."""
        deadline = clock.now() + (AFTERWARDS if self._waited_in_vain else LIMIT)
        while any(self.ran(family, name).total() < times * SHAPES[name].runs for name in names):
            if clock.now() > deadline:
                self._waited_in_vain = True
                return
            clock.sleep(0.02)

    def forget_chords(self) -> None:
        """Keep a chord from being mistaken for the previous one with the same id.

        Celery 5.7 notes under a chord's id that its body was sent. When the chord is sent again, it removes the note
        after the header was sent: a part that ends before that does not count, and the body is never sent. This happens
        with the stock Task, now and then.
        """
        deadline = clock.now() + AFTERWARDS
        while any(self._stored.scan_iter("*.j", count=1000)) and clock.now() < deadline:
            clock.sleep(0.02)  # The counts are deleted when the body has been sent; those of failed chords stay.
        for note in self._stored.scan_iter("*.c", count=1000):
            self._stored.delete(note)

    def became(self, family: str, name: str) -> list[object]:
        """What callers get of each send, and the states of all results."""
        found: list[object] = []
        for result in self._results[family, name]:
            states = {it.id: _state(it) for it in _all_of(result)}
            until_ready = clock.now() + (LIMIT if family == "stock" else 30)
            while not set(states.values()) <= READY and clock.now() < until_ready:
                clock.sleep(0.05)
                states = {it.id: _state(it) for it in _all_of(result)}
            value = result.get(propagate=False) if set(states.values()) <= READY else "not known"
            found.append((_shown(value), sorted(states.values())))
        return found


def _all_of(result: Any) -> Iterator[AsyncResult]:
    """A result, its parents and its members."""
    while result is not None:
        if isinstance(result, GroupResult):
            for member in result.results:
                yield from _all_of(member)
        else:
            yield result
        result = result.parent


def _state(result: AsyncResult) -> str:
    state: str = result.backend.get_task_meta(result.id, cache=False)["status"]
    return state


def _shown(value: Any) -> str:
    """A value without its ids."""
    if isinstance(value, BaseException):
        return type(value).__name__
    return json.dumps(value)


@contextmanager
def sending(redis: RedisServer, directory: Path, pool: str) -> Iterator[Sender]:
    """One worker with this pool, and its sender.

    The server must outlive the test: leftover results contact it when they are garbage-collected.
    """
    conf = {
        "broker_url": redis.url_of(0),
        "result_backend": redis.url_of(1),
        "singleton_lock_backend": redis.url_of(2),
        "broker_connection_retry_on_startup": True,
    }
    env = environment(conf, events=redis.url_of(3), record=directory / "record")
    worker = Worker(
        "one", directory=directory, environment=env, pool=pool, concurrency=4, app="tests.integration.canvas_app"
    )
    try:
        with Redis.from_url(redis.url_of(3)) as record, Redis.from_url(redis.url_of(1)) as stored, worker:
            worker.wait_until_ready()
            yield Sender(canvas_app.make(conf, record), record, stored)
    finally:
        redis.flush()


def differences(sender: Sender, family: str, names: tuple[str, ...]) -> dict[str, object]:
    """The differences from the stock Task, for each shape."""
    found: dict[str, object] = {}
    for name in names:
        ran = sender.ran("stock", name), sender.ran(family, name)
        assert ran[0].total() == TIMES * SHAPES[name].runs, f"{name}: that is not how often the stock Task runs"
        if ran[0] != ran[1]:
            found[name] = {"too rarely": dict(ran[0] - ran[1]), "too often": dict(ran[1] - ran[0])}
        became = sender.became("stock", name), sender.became(family, name)
        if became[0] != became[1]:
            found[f"{name}: results"] = {"stock": became[0], "ours": became[1]}
    return found


def compare(sender: Sender, family: str, names: tuple[str, ...], *, at_once: bool) -> dict[str, object]:
    """Send each shape several times, with the stock Task and with SingletonTask; returns what differs."""
    for number in range(1, TIMES + 1):
        for one in ("stock", family):
            sender.send(one, names)
        if not at_once:
            sender.wait("stock", names, number)
            sender.wait(family, names, number)
            sender.forget_chords()
    sender.wait("stock", names, TIMES)
    sender.wait(family, names, TIMES)
    clock.sleep(AFTERWARDS)
    return differences(sender, family, names)


def overlapping(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if SHAPES[name].overlapping)


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.slow)])
def test_canvas_that_is_sent_again_runs_again(redis_server: RedisServer, tmp_path: Path, pool: str) -> None:
    with sending(redis_server, tmp_path, pool) as sender:
        assert compare(sender, "own", QUICK, at_once=False) == {}


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_each_shape_that_is_sent_again_runs_again(redis_server: RedisServer, tmp_path: Path, pool: str) -> None:
    with sending(redis_server, tmp_path, pool) as sender:
        assert compare(sender, "own", tuple(SHAPES), at_once=False) == {}


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_each_shape_that_is_sent_while_it_runs_runs_again(redis_server: RedisServer, tmp_path: Path, pool: str) -> None:
    with sending(redis_server, tmp_path, pool) as sender:
        assert compare(sender, "wide", overlapping(tuple(SHAPES)), at_once=True) == {}
