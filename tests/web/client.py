"""Asks an ASGI app within this process."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import httpx
from starlette.types import ASGIApp


class Client:
    """Keeps cookies, and follows redirects when asked to.

    Args:
        app: to ask.
        host: the host that its requests name.
    """

    def __init__(self, app: ASGIApp, host: str = "localhost:9809") -> None:
        self._app = app
        self.origin = f"http://{host}"
        self.cookies: dict[str, str] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def get(self, address: str, **options: Any) -> httpx.Response:
        return self.request("GET", address, **options)

    def post(self, address: str, **options: Any) -> httpx.Response:
        return self.request("POST", address, **options)

    def request(self, method: str, address: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request(method, address, **options))

    async def _request(self, method: str, address: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url=self.origin, cookies=self.cookies) as client:
            answer = await client.request(method, address, **options)
            self.cookies = dict(client.cookies)
            return answer
