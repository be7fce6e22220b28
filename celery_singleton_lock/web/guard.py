"""Stands in front of the ASGI app: refuses hosts that are not expected, and adds headers to each answer."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_singleton_lock import cleaned
from celery_singleton_lock.web.access import HEADERS, Access


class Guard:
    """An ASGI app around another one."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        host = Headers(scope=scope).get("host", "")
        app = self._app if self._access.knows_host(host) else _unknown_host(host)
        await app(scope, receive, send_with_headers)


def _unknown_host(host: str) -> PlainTextResponse:
    text = (
        f"This page does not answer to the host {cleaned.text(host)!r}. If that is its name, pass it on: "
        "`celery locks web --allow-host NAME`, or `app_of(..., hosts=[NAME])`.\n"
    )
    return PlainTextResponse(text, 421)
