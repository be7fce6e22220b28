"""Serves the page as a separate program."""

from __future__ import annotations

import socket
from contextlib import suppress

import uvicorn

from celery_singleton_lock.web.app import Site
from celery_singleton_lock.web.guard import Guard

#: The seconds that answers have to end when the program ends.
GRACE = 1


class _Server(uvicorn.Server):
    """Ends the streams when it shuts down, because they never end by themselves."""

    def __init__(self, site: Site) -> None:
        app = Guard(site.app, site.access)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
        super().__init__(config)
        self._site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._site.live.close()
        await super().shutdown(sockets)


def serve(site: Site, listening: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):  # The server has shut down cleanly by then.
        _Server(site).run(sockets=[listening])
