"""Guards the ASGI app: refuses requests from elsewhere, and adds headers to each answer."""

from __future__ import annotations

from http import cookies

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_singleton_lock import cleaned
from celery_singleton_lock.web.access import COOKIE, HEADERS, Access, is_own_origin

#: What changes nothing.
READING = ("GET", "HEAD")

#: What somebody needs to sign in.
OPEN = ("/login", "/page.css", "/page.js")


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

        await (self._refused(scope) or self._app)(scope, receive, send_with_headers)

    def _refused(self, scope: Scope) -> ASGIApp | None:
        """What is answered to a request that does not get through."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._access.knows_host(host):
            return PlainTextResponse(
                f"This page does not answer to the host {cleaned.text(host)!r}. If that is its name, pass it on: "
                "`celery locks web --allow-host NAME`, or `app_of(..., hosts=[NAME])`.\n",
                421,
            )
        if scope["method"] not in READING and not is_own_origin(headers.get("origin"), host):
            return PlainTextResponse("Forms of this page are taken from this page only.\n", 403)
        if self._access.private and not self._is_open(scope, headers):
            return self._sign_in(scope)
        return None

    def _is_open(self, scope: Scope, headers: Headers) -> bool:
        bearer = headers.get("authorization", "").partition("Bearer ")[2]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path in OPEN or self._access.is_session(session_in(headers)) or self._access.is_token(bearer)

    def _sign_in(self, scope: Scope) -> ASGIApp:
        path, base = scope["path"], scope.get("root_path", "").rstrip("/")
        if path.removeprefix(base) in ("/metrics", "/stream"):
            return PlainTextResponse("Sign in, or send the token: `Authorization: Bearer TOKEN`.\n", 401)
        return RedirectResponse(f"{base}/login", 303)


def session_in(headers: Headers) -> str:
    """The session that a request's cookies name; empty where there is none."""
    try:
        found = cookies.SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except cookies.CookieError:
        return ""
    return "" if found is None else found.value
