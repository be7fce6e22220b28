"""Serves the page by a program of its own."""

from __future__ import annotations

import socket
from contextlib import suppress

import uvicorn

from celery_singleton_lock.web.app import Site
from celery_singleton_lock.web.guard import Guard

#: Seconds that answers get to end when the program is to.
GRACE = 1


class _Server(uvicorn.Server):
    """Ends the streams when it is to end, which have no end of their own."""

    def __init__(self, site: Site) -> None:
        app = Guard(site.app, site.access)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
        super().__init__(config)
        self._site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._site.live.close()
        await super().shutdown(sockets)


def serve(site: Site, listening: socket.socket) -> None:
    """Serve until Ctrl-C, or a SIGTERM."""
    with suppress(KeyboardInterrupt):  # It has ended in good order by then.
        _Server(site).run(sockets=[listening])
