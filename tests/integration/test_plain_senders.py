"""What the body of a plain task sends is new, and errors reach it; what Celery sends on for it must not be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from redis import Redis

from tests.integration.conftest import POOLS
from tests.integration.workers import Worker, environment
from tests.patience import LIMIT, until
from tests.recording import Record
from tests.redis_server import RedisServer

#: Exclusive tasks wait here: no worker takes them.
PARKED = "parked"


@contextmanager
def serving(server: RedisServer, directory: Path, pool: str, **conf: Any) -> Iterator[tuple[Celery, Record]]:
    """A worker, and an app that sends to it by name."""
    conf = {
        "broker_url": server.url_of(0),
        "result_backend": server.url_of(1),
        "singleton_lock_backend": server.url_of(2),
        **conf,
    }
    record = Record(directory / "record")
    env = environment(conf, events=server.url_of(3), record=record.path)
    with Worker("one", directory=directory, environment=env, pool=pool, app="tests.integration.plain_app") as worker:
        worker.wait_until_ready()
        app = Celery("sender", set_as_current=False)
        app.conf.update(conf)
        yield app, record


#: How Celery sends exclusive tasks on: what the client sends, and how many follow.
WAYS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "link": (lambda plain, locked: plain("plain").set(link=locked("a")), 1),
    "links": (lambda plain, locked: plain("plain").set(link=[locked("a"), locked("b")]), 2),
    "link to a chain": (lambda plain, locked: plain("plain").set(link=chain(locked("a"), plain("plain"))), 1),
    "link to a group": (lambda plain, locked: plain("plain").set(link=group(locked("a"), locked("b"))), 2),
    "link_error": (lambda plain, locked: plain("fails").set(link_error=locked("a")), 1),
    "next step": (lambda plain, locked: chain(plain("plain"), locked("a")), 1),
    "group as the next step": (lambda plain, locked: chain(plain("plain"), group(locked("a"), locked("b"))), 2),
    "chord as the next step": (
        lambda plain, locked: chain(plain("plain"), chord([locked("a"), locked("b")], plain("plain"))),
        2,
    ),
    "body of a chord": (lambda plain, locked: chord([plain("plain"), plain("plain")], locked("a")), 1),
    "chain as the body of a chord": (
        lambda plain, locked: chord([plain("plain")] * 2, chain(locked("a"), plain("plain"))),
        1,
    ),
    "group as the body of a chord": (
        lambda plain, locked: chord([plain("plain")] * 2, group(locked("a"), locked("b"))),
        2,
    ),
    "replacement": (lambda plain, locked: plain("replaced"), 1),
}


@pytest.mark.parametrize("pool", POOLS[:3])
def test_what_celery_sends_on_is_sent_though_the_lock_server_is_away(
    redis_server: RedisServer, tmp_path: Path, pool: str
) -> None:
    """An error would end the task for which it is sent on; but a body that sends gets the error."""
    conf = {"singleton_lock_backend": "redis://127.0.0.1:1", "task_routes": {"locked": {"queue": PARKED}}}
    with serving(redis_server, tmp_path, pool, **conf) as (app, _), Redis.from_url(redis_server.url_of(0)) as broker:

        def plain(name: str) -> Any:
            return app.signature(name, immutable=True)

        def locked(job: str) -> Any:
            return app.signature("locked", (job,), immutable=True)

        for name, (make, count) in WAYS.items():
            make(plain, locked).apply_async()
            until(lambda count=count: broker.llen(PARKED) == count, f"{name}: {count} are sent")
            broker.delete(PARKED)
        assert app.send_task("sends_linked", ("job",)).get(timeout=LIMIT) == "LockUnavailable"
        assert broker.llen(PARKED) == 0
