"""Asks an ASGI app within this process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.types import ASGIApp


class Client:
    """Sends requests as a browser would.

    Args:
        app: to ask.
        host: the host that its requests name.
        password: the password that it sends with each request; none if empty.
    """

    def __init__(self, app: ASGIApp, host: str = "localhost:9809", password: str = "") -> None:
        self._app = app
        self.origin = f"http://{host}"
        self._auth = ("somebody", password) if password else None

    def get(self, address: str, **options: Any) -> httpx.Response:
        return self.request("GET", address, **options)

    def post(self, address: str, **options: Any) -> httpx.Response:
        return self.request("POST", address, **options)

    def request(self, method: str, address: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request(method, address, **options))

    async def _request(self, method: str, address: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url=self.origin, auth=self._auth) as client:
            return await client.request(method, address, **options)
