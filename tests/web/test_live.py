"""The stream: what is sent to whom, and when the locks are looked at."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.web import app_of, live
from celery_singleton_lock.web.access import Access
from celery_singleton_lock.web.app import Site
from celery_singleton_lock.web.guard import Guard
from celery_singleton_lock.web.watch import LockUnavailable, Watch
from tests.patience import LIMIT
from tests.web.client import Client
from tests.web.scenes import TASK, entry, hold, write


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.01)


@dataclass
class Listener:
    """Somebody with a page open.

    Attributes:
        status: of the answer.
        events: that were sent, but not read yet.
    """

    status: int = 0
    comments: int = 0
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("data: "):
                self.events.put_nowait(json.loads(line.removeprefix("data: ")))
            elif line.startswith(":"):
                self.comments += 1

    async def event(self, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The next event that fits."""
        while True:
            event = await asyncio.wait_for(self.events.get(), LIMIT)
            if fits(event):
                return event


@asynccontextmanager
async def listening(
    site: Site, query: str = "at=locks", *, listener: Listener | None = None
) -> AsyncIterator[Listener]:
    listener = listener or Listener()
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/stream",
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost")],
    }
    answering = asyncio.create_task(Guard(site.app, site.access)(scope, listener.receive, listener.send))
    try:
        yield listener
    finally:
        listener.gone.set()
        await asyncio.wait_for(answering, LIMIT)


def site_of(app: Celery) -> Site:
    return Site(app, Access(["localhost"]))


def has_rows(event: dict[str, Any]) -> bool:
    return any(region["rows"] for region in event["regions"].values())


def test_first_event_has_all_rows_and_later_ones_only_changed_rows(app: Celery) -> None:
    async def listen() -> None:
        hold(app, "acme")
        async with listening(site_of(app)) as listener:
            first = (await listener.event())["regions"]["locks"]
            assert list(first["rows"]) == first["order"]
            lease = hold(app, "other")
            second = (await listener.event(has_rows))["regions"]["locks"]
            (html,) = second["rows"].values()
            assert "tenant=other" in html
            assert len(second["order"]) == 2
            Runtime.of(app).store.free(lease)
            third = (await listener.event(lambda event: event["regions"] != {}))["regions"]["locks"]
            assert third == {"rows": {}, "order": first["order"]}

    asyncio.run(listen())


def test_no_rows_are_sent_while_only_time_passes(app: Celery) -> None:
    async def listen() -> None:
        hold(app, "acme")
        write(app, entry(app, "acme"))
        for page in ("", "locks", "timeline", "refused", "tasks", f"task&name={TASK}", "beat"):
            async with listening(site_of(app), f"at={page}") as listener:
                await listener.event()
                for _ in range(5):
                    assert not has_rows(await listener.event())

    asyncio.run(listen())


def test_one_look_serves_all_listeners_and_without_listeners_nobody_looks(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = Watch.look

    def counted(self: Watch, *, fresh: float) -> Any:
        looks.append(threading.get_ident())
        return look(self, fresh=fresh)

    monkeypatch.setattr(Watch, "look", counted)

    async def listen() -> None:
        site = site_of(app)
        assert not site.live.is_looking
        async with listening(site) as one:
            await one.event()
            async with listening(site, "at=timeline") as two, listening(site, "at=") as three:
                before = len(looks)
                for listener in (two, three, one) * 3:
                    await listener.event()
                # The queue of the first listener may have had earlier events.
                assert len(looks) - before <= 3 * 3
            assert site.live.is_looking
        assert not site.live.is_looking
        before = len(looks)
        async with listening(site) as again:
            await again.event()
        assert len(looks) > before

    asyncio.run(listen())


def test_missing_lock_server_is_reported_and_the_stream_goes_on(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise LockUnavailable("nobody answers")

    async def listen() -> None:
        hold(app, "acme")
        async with listening(site_of(app)) as listener:
            assert (await listener.event())["trouble"] == ""
            with monkeypatch.context() as patch:
                patch.setattr(type(Runtime.of(app).store), "all_held", gone)
                event = await listener.event(lambda event: event["trouble"] != "")
                assert "nobody answers" in event["trouble"]
                assert event["regions"] == {}, "known rows are kept"
            await listener.event(lambda event: event["trouble"] == "")

    asyncio.run(listen())


def test_internal_error_ends_neither_the_looks_nor_the_stream(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    async def listen() -> None:
        async with listening(site_of(app)) as listener:
            await listener.event()
            with monkeypatch.context() as patch:
                patch.setattr(Watch, "look", lambda self, fresh: 1 / 0)
                await listener.event()
                await listener.event()
            hold(app, "acme")
            await listener.event(has_rows)

    asyncio.run(listen())


@dataclass
class Slow(Listener):
    """Reads on only when it may."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.reached.set()
            await self.may_go.wait()
        await super().send(message)


def test_slow_listener_gets_the_latest_and_has_no_queue(app: Celery) -> None:
    async def listen() -> None:
        site = site_of(app)
        async with listening(site, listener=Slow()) as slow:
            assert isinstance(slow, Slow)
            await slow.reached.wait()
            async with listening(site) as quick:
                for number in range(5):
                    hold(app, f"number-{number}")
                    await quick.event(lambda event, found=number: f"number-{found}" in json.dumps(event))
            slow.may_go.set()
            assert (await slow.event())["regions"]["locks"]["order"] == ["locks-none"]
            assert len((await slow.event())["regions"]["locks"]["order"]) == 5

    asyncio.run(listen())


def test_listener_that_never_reads_is_dropped(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for a limited number of listeners."""
    monkeypatch.setattr(live, "PATIENCE", 0.01)

    class Deaf(Listener):
        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    async def listen() -> None:
        site, deaf = site_of(app), Deaf()
        scope = {"type": "http", "method": "GET", "path": "/stream", "query_string": b"at=locks", "headers": []}
        scope["headers"] = [(b"host", b"localhost")]
        await asyncio.wait_for(Guard(site.app, site.access)(scope, deaf.receive, deaf.send), LIMIT)
        assert not site.live.is_looking

    asyncio.run(listen())


def test_head_request_for_a_stream_is_answered_at_once(app: Celery) -> None:
    answer = Client(app_of(app)).request("HEAD", "/stream?at=locks")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


def test_idle_stream_gets_a_comment_now_and_then(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 3600.0)
    monkeypatch.setattr(live, "KEEP_ALIVE", 0.01)

    async def listen() -> None:
        async with listening(site_of(app)) as listener:
            await listener.event()
            while listener.comments < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(listen(), LIMIT))


def test_number_of_listeners_is_limited(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_LISTENERS", 1)

    async def listen() -> None:
        site = site_of(app)
        async with listening(site) as first:
            await first.event()
            async with listening(site) as second:
                pass
            assert (first.status, second.status) == (200, 503)
        async with listening(site, "at=nowhere") as lost:
            pass
        assert lost.status == 404

    asyncio.run(listen())


def test_events_stay_small_with_thousands_of_locks(app: Celery) -> None:
    async def listen() -> None:
        for number in range(1000):
            hold(app, f"number-{number}")
        async with listening(site_of(app), "at=locks&sort=longest+held") as listener:
            first = await listener.event()
            assert len(json.dumps(first)) < 100_000
            hold(app, "an-old-one", since=1.0)
            later = await listener.event(lambda event: event["regions"] != {})
            (row,) = later["regions"]["locks"]["rows"].values()
            assert "an-old-one" in row
            assert len(json.dumps(later)) < 5_000

    asyncio.run(listen())


def test_streams_end_when_the_program_ends(app: Celery) -> None:
    async def listen() -> None:
        site = site_of(app)
        async with listening(site) as listener:
            await listener.event()
            site.live.close()
            while site.live.is_looking:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(listen(), LIMIT))
