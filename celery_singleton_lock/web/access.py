"""The right to see the pages, and to act: the host, the token, the origin, and the browser's own rules.

Another site can make its visitor's browser send requests here, also under a name that its owner points to this host
(DNS rebinding). So only requests to expected names are answered, and a form counts only if it comes from a page of this
site: a browser sends a password that it knows along with the forms of other sites, too.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_singleton_lock import cleaned

#: The names of this machine itself.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

#: The shortest length of a token.
SHORTEST = 16

#: The methods that change nothing.
READING = ("GET", "HEAD")

#: Headers of each answer: only scripts and styles of the page itself, no frames, no cache.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer": a browser would then hide the origin of this site's own forms, too.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_NAME = re.compile(r"[a-z0-9_.:-]+")


class WrongHost(ValueError):
    """A name in `hosts` cannot be the name of a host."""


class Guard:
    """An ASGI app around the page: refuses requests that may not pass, and adds headers to each answer.

    Args:
        app: the page.
        hosts: the names under which it may be opened: a request's `Host`, whatever its port.
        token: the password, with any user name; empty if none is needed.
    """

    # Not Starlette's TrustedHostMiddleware: that knows no IPv6 address, and does not say how to allow a name.
    def __init__(self, app: ASGIApp, hosts: Collection[str], token: str) -> None:
        if isinstance(hosts, str):
            raise TypeError(f"hosts is {hosts!r}; allowed: a list of names, such as [{hosts!r}]")
        if token and len(token) < SHORTEST:
            raise ValueError(f"the token has {len(token)} characters; allowed: {SHORTEST} or more random characters")
        self._app = app
        self._hosts = frozenset(map(_allowed, hosts))
        self._token = token

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

        await (self._refusal(scope["method"], Headers(scope=scope)) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> ASGIApp | None:
        """The answer to a request that is refused; None if it may pass."""
        host = headers.get("host", "")
        if name_of(host) not in self._hosts:
            return PlainTextResponse(
                f"This page does not answer to the host {cleaned.text(host)!r}. If that is its name, allow it: "
                "`celery locks web --allow-host NAME`, or `app_of(..., hosts=[NAME])`.\n",
                421,
            )
        if self._token and not hmac.compare_digest(credentials(headers)[1].encode(), self._token.encode()):
            asked = {"WWW-Authenticate": 'Basic realm="locks", charset="UTF-8"'}
            return PlainTextResponse("The password is the token, with any user name (HTTP Basic).\n", 401, asked)
        if method not in READING and not is_own_origin(headers.get("origin"), host):
            return PlainTextResponse("This page accepts only its own forms.\n", 403)
        return None


def credentials(headers: Headers) -> tuple[str, str]:
    """The user name and the password of a request; empty texts if there are none."""
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:  # Neither base64 nor text.
        return "", ""
    return (user, password) if scheme.lower() == "basic" else ("", "")


def name_of(host: str) -> str:
    """The name in a `Host` header, without the port; empty if the header makes no sense."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError:
        return ""
    return "" if parts.path or parts.query or parts.fragment or "@" in host else (parts.hostname or "").rstrip(".")


def is_own_origin(origin: str | None, host: str) -> bool:
    """Whether a request that changes something comes from a page of the host to which it is sent."""
    scheme, _, origin_host = (origin or "").partition("://")
    return scheme in ("http", "https") and bool(host) and origin_host.lower() == host.lower()


def _allowed(given: str) -> str:
    """The name in a host that is to be allowed: `name`, `name:port`, `https://name`, an address."""
    text = given.strip().removeprefix("http://").removeprefix("https://").removesuffix("/")
    name = name_of(f"[{text}]" if text.count(":") > 1 and "[" not in text else text)
    if not _NAME.fullmatch(name):
        raise WrongHost(
            f"{given!r} is not a host name; allowed: the names under which browsers open the page, each in full, such "
            "as 'locks.example.com', '10.0.0.7' or '::1'"
        )
    return name
