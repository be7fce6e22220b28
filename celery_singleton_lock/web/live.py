"""Live pages: server-sent events with the rows that have changed.

One poller looks at the locks for all listeners, and only while there is a listener. Each listener gets the changes of
its own page. A slow listener misses states in between; there are no queues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from celery.utils.log import get_logger
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from celery_singleton_lock import clock
from celery_singleton_lock.web.pages import View
from celery_singleton_lock.web.snapshot import Snapshot
from celery_singleton_lock.web.watch import Watch

logger = get_logger(__name__)

#: The shortest time in seconds between two looks; and how many times longer than a look the pause after it is, if looks
#: take long: with thousands of locks, the lock server has other work to do.
INTERVAL, SPARING = 1.0, 5.0

#: Seconds without news after which a listener is sent something, so that neither it nor any proxy ends the connection.
KEEP_ALIVE = 15.0

#: Seconds after which a listener that does not read is dropped, because the number of listeners is limited.
PATIENCE = 60.0

#: A comment, which browsers ignore.
NOTHING = ":\n\n"

#: The most listeners at the same time.
MOST_LISTENERS = 100


class Live:
    """Looks at the locks while there are listeners.

    Args:
        watch: the watch that looks.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._listeners: set[asyncio.Event] = set()
        self._poller: asyncio.Task[None] | None = None
        self.is_closed = False
        self.latest = Snapshot(watch.runtime.settings.prefix)

    @property
    def is_full(self) -> bool:
        return len(self._listeners) >= MOST_LISTENERS

    @property
    def is_looking(self) -> bool:
        return self._poller is not None

    def close(self) -> None:
        """End all streams."""
        self.is_closed = True
        for news in self._listeners:
            news.set()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Keep `latest` up to date within the `with` block; the event is set whenever `latest` is new."""
        news = asyncio.Event()
        self._listeners.add(news)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        try:
            yield news
        finally:
            self._listeners.discard(news)
            if not self._listeners and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def _poll(self) -> None:
        while True:
            began = clock.now()
            try:
                self.latest = await run_in_threadpool(self._watch.look, fresh=0.0)
            except Exception:
                logger.exception("could not look at the locks; going on")
            for news in self._listeners:
                news.set()
            await asyncio.sleep(max(INTERVAL, (clock.now() - began) * SPARING))


class Stream(Response):
    """The answer to one listener.

    Args:
        live: the source of the news.
        show: makes the listener's page.
    """

    media_type = "text/event-stream"

    def __init__(self, live: Live, show: Callable[[Snapshot], View]) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._live = live
        self._changes = Changes()
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_until_gone(receive))
        try:
            with self._live.listening() as news:
                while not gone.done():
                    comes = await _comes(news, gone)
                    if self._live.is_closed:
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                        return
                    text = await run_in_threadpool(self._event) if comes else NOTHING
                    part = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                    await asyncio.wait_for(send(part), PATIENCE)
        except (OSError, asyncio.TimeoutError):
            pass  # The listener went away during a write, or no longer reads.
        finally:
            gone.cancel()

    def _event(self) -> str:
        snapshot = self._live.latest
        event = self._changes.of(self._show(snapshot))
        event |= {"now": snapshot.tried_at, "trouble": snapshot.trouble}
        return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


class Changes:
    """The changes of a page since it was last sent: the rows that differ, and their order if that differs."""

    def __init__(self) -> None:
        self._sent: Mapping[str, Mapping[str, str]] = {}

    def of(self, view: View) -> dict[str, Any]:
        regions = {}
        for name, rows in view.regions.items():
            before = self._sent.get(name)
            changed = {row: str(html) for row, html in rows.items() if before is None or before.get(row) != html}
            order = None if before is not None and [*before] == [*rows] else [*rows]
            if changed or order is not None:
                regions[name] = {"rows": changed, "order": order}
        self._sent = view.regions
        axis = view.context.get("axis")
        return {"regions": regions, "origin": None if axis is None else axis.origin}


async def _comes(news: asyncio.Event, gone: asyncio.Task[None]) -> bool:
    """Wait for news, but only for a while; whether there are any."""
    coming = asyncio.ensure_future(news.wait())
    await asyncio.wait({coming, gone}, timeout=KEEP_ALIVE, return_when=asyncio.FIRST_COMPLETED)
    coming.cancel()
    with suppress(asyncio.CancelledError):
        await coming
    found = news.is_set()
    news.clear()
    return found


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
