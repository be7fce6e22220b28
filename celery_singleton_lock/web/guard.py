"""Guards the ASGI app: refuses requests from elsewhere, and adds headers to each answer."""

from __future__ import annotations

import math

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_singleton_lock import cleaned
from celery_singleton_lock.web.access import COOKIE, HEADERS, Access, is_own_origin

#: The methods that change nothing.
READING = ("GET", "HEAD")

#: The addresses that a user needs to sign in.
OPEN = ("/login", "/page.css", "/page.js")


class Guard:
    """An ASGI app around another app."""

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

        await (self._refused(scope) or self._app)(scope, receive, send_with_headers)

    def _refused(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is refused; None if it may pass."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._access.knows_host(host):
            return PlainTextResponse(
                f"This page does not answer to the host {cleaned.text(host)!r}. If that is its name, allow it: "
                "`celery locks web --allow-host NAME`, or `app_of(..., hosts=[NAME])`.\n",
                421,
            )
        if scope["method"] not in READING and not is_own_origin(headers.get("origin"), host):
            return PlainTextResponse("This page accepts only its own forms.\n", 403)
        if self._access.private and not self._is_open(scope, headers):
            return self._token_asked_for(scope, headers)
        return None

    def _is_open(self, scope: Scope, headers: Headers) -> bool:
        return path_in(scope) in OPEN or self._access.is_session(session_in(headers))

    def _token_asked_for(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """The answer to a request without a session; None if it has the token."""
        token, address = headers.get("authorization", "").partition("Bearer ")[2], address_of(scope)
        if token and (seconds := self._access.tries.wait(address)):
            return PlainTextResponse(f"{too_many(seconds)}\n", 429, later(seconds))
        if token and self._access.is_token(token, address):
            return None
        if path_in(scope) in ("/metrics", "/stream"):
            return PlainTextResponse("Sign in, or send the token: `Authorization: Bearer TOKEN`.\n", 401)
        return RedirectResponse(f"{base_in(scope)}/login", 303)


def base_in(scope: Scope) -> str:
    """The address below which the pages are."""
    return str(scope.get("root_path", "")).rstrip("/")


def path_in(scope: Scope) -> str:
    """The address of a page below the base."""
    return str(scope["path"]).removeprefix(base_in(scope))


def address_of(scope: Scope) -> str:
    """The address from which a request comes; empty if the server does not say."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def too_many(seconds: float) -> str:
    """The text for a user who has to wait."""
    return f"Too many wrong tokens came from your address. Try again in {math.ceil(seconds)} s."


def later(seconds: float) -> dict[str, str]:
    """The header for a program that has to wait."""
    return {"Retry-After": str(math.ceil(seconds))}


def session_in(headers: Headers) -> str:
    """The session in a request's cookies; empty if there is none."""
    # Not with `http.cookies`: up to Python 3.11.9 and 3.12.5, it takes seconds for some kilobytes of backslashes.
    for cookie in headers.get("cookie", "").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == COOKIE:
            return value
    return ""
