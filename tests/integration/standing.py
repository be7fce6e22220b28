"""A shop whose workers stay from one test to the next, for tests that leave them as they were.

A test that wants other workers, or has killed one, has them started anew; so does the next one after a test that left
them busy.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import clock
from celery_singleton_lock.runtime import write_all
from tests.integration.shops import Shop
from tests.integration.workers import Worker
from tests.recording import Record
from tests.redis_server import RedisServer

#: Seconds after which workers that have something left to do are taken for busy.
PATIENCE = 2.0


class StandingShop(Shop):
    """A shop of one test, with workers of a `Staff`."""

    staff: Staff

    def start(self, *names: str, **options: Any) -> list[Worker]:
        """As a shop's. The first ones may have worked before: they are there before anything is sent."""
        if self.workers:
            return super().start(*names, **options)
        self.workers += self.staff.come(self, names, options)
        return [*self.workers]


class Staff:
    """Workers on a server of their own, idle between two tests."""

    def __init__(self, session: pytest.Session, server: RedisServer, directory: Path) -> None:
        self._session = session
        self._server = server
        self._directory = directory
        self._workers: list[Worker] = []
        self._wanted: tuple[object, ...] = ()
        self._exits = ExitStack()

    @contextmanager
    def shop(self, **conf: Any) -> Iterator[StandingShop]:
        """The shop of the next test: its record and its logs begin anew."""
        full = {
            "broker_url": self._server.url_of(0),
            "result_backend": self._server.url_of(1),
            "singleton_lock_backend": self._server.url_of(2),
            **conf,
        }
        record = self._directory / "record"
        for file in [record, *map(Path, glob.glob(f"{record}.*.may-end"))]:
            file.unlink(missing_ok=True)
        with ExitStack() as exits:
            shop = StandingShop(Record(record), self._directory, full, self._server.url_of(3), exits)
            shop.staff = self
            yield shop
            if self._session.testsfailed:
                for worker in shop.workers:
                    print(f"---- {worker.name}\n{worker.log[-3000:]}")
            if self._session.testsfailed or not self._are_idle(shop.app):
                self.go()
        with self._server.client(2) as locks:
            eternal = [key for key in locks.scan_iter() if locks.pttl(key) == -1]
        assert eternal == [], "keys without a time to live"
        write_all()  # Else the journal's thread of this process does, seconds later, in the next test.
        self._server.flush()

    def come(self, shop: StandingShop, names: tuple[str, ...], options: dict[str, Any]) -> list[Worker]:
        """Workers of these names, ready; those of the test before if they are the same."""
        wanted = (names, sorted(options.items()), sorted(shop.conf.items()))
        if wanted != self._wanted or not all(worker.is_untouched for worker in self._workers):
            self.go()
        for worker in self._workers:
            worker.forget_log()
        if not self._workers:
            standing = Shop(shop.record, self._directory, shop.conf, shop.events, self._exits)
            self._workers, self._wanted = standing.start(*names, **options), wanted
        return self._workers

    def go(self) -> None:
        self._exits.close()
        self._workers = []
        for log in self._directory.glob("*.log"):  # Others of these names are not to find it.
            log.unlink()

    def _are_idle(self, app: Celery) -> bool:
        """Whether they are whole, and have nothing of this test any more."""
        if not self._workers or not all(worker.is_untouched for worker in self._workers):
            return not self._workers
        ask = app.control.inspect([worker.name for worker in self._workers], timeout=PATIENCE, limit=len(self._workers))
        deadline = clock.now() + PATIENCE
        while clock.now() < deadline:  # One that has said its result may take a moment to forget its task.
            answers = [ask.active(), ask.reserved(), ask.scheduled()]
            if all(answer and not any(answer.values()) for answer in answers):
                return True
        return False
