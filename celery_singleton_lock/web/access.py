"""The right to see the pages, and to act: hosts, origins, the token, sessions, and the browser's own rules.

Another site can make its visitor's browser send requests here, also under a name that its owner points to this host
(DNS rebinding). So only requests to expected names are answered, and a form counts only if it comes from a page of this
site and contains the session's proof.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from celery_singleton_lock import clock
from celery_singleton_lock.web.tries import Tries

_NAME = re.compile(r"[a-z0-9_.:-]+")

#: The names of this machine itself.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

#: The shortest length of a token.
SHORTEST = 16

#: Seconds for which a session lasts.
SESSION = 12 * 3600

#: The cookie of a session.
COOKIE = "exclusive_locks_session"

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


class WrongHost(ValueError):
    """A name in `hosts` cannot be the name of a host."""


@dataclass(frozen=True, slots=True)
class Access:
    """What is allowed.

    Attributes:
        hosts: the names under which the page may be opened: a request's `Host`, whatever its port. Each is given as a
            browser shows it, or as the beginning of the address.
        token: proves that somebody may act; empty if nobody may.
        allow_release: whether locks can be released and tasks stopped.
        private: whether only signed-in users see the pages.
        tries: the wrong tokens that were sent.
    """

    hosts: Collection[str]
    token: str = ""
    allow_release: bool = False
    private: bool = False
    tries: Tries = field(default_factory=Tries, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str):
            raise TypeError(f"hosts is {self.hosts!r}; allowed: a list of names, such as [{self.hosts!r}]")
        object.__setattr__(self, "hosts", frozenset(map(_allowed, self.hosts)))
        if (self.allow_release or self.private) and not self.token:
            raise ValueError("allow_release and private need a token: give one of at least 16 random characters")
        if self.token and len(self.token) < SHORTEST:
            raise ValueError(
                f"the token has {len(self.token)} characters; allowed: {SHORTEST} or more random characters"
            )

    def knows_host(self, host: str) -> bool:
        """Whether a request's `Host` names this page."""
        return name_of(host) in self.hosts

    def is_token(self, text: str, address: str) -> bool:
        """Whether somebody at this address knows the token; look at `tries` first."""
        is_right = bool(self.token) and hmac.compare_digest(text.encode(), self.token.encode())
        if not is_right:
            self.tries.failed(address)
        return is_right

    def new_session(self) -> str:
        """The value of a cookie: its expiry, a random part, and a proof that it was made here."""
        content = f"{round(clock.wall()) + SESSION}.{secrets.token_hex(16)}"
        return f"{content}.{self._proof('session', content)}"

    def is_session(self, cookie: str) -> bool:
        content, _, proof = cookie.rpartition(".")
        if not self.token or not hmac.compare_digest(proof.encode(), self._proof("session", content).encode()):
            return False
        until = content.partition(".")[0]
        return until.isdecimal() and int(until) > clock.wall()

    def form_proof(self, session: str) -> str:
        """The value of a field in each form of this session. No other site knows it."""
        return self._proof("form", session)

    def is_form_proof(self, session: str, proof: str) -> bool:
        return self.is_session(session) and hmac.compare_digest(proof.encode(), self.form_proof(session).encode())

    def _proof(self, purpose: str, content: str) -> str:
        return hmac.new(self.token.encode(), f"{purpose}:{content}".encode(), hashlib.sha256).hexdigest()


def _allowed(given: str) -> str:
    """The name in a host that is to be allowed: `name`, `name:port`, `https://name`, an address."""
    text = given.strip().lower()
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        name = name_of(text.removeprefix("http://").removeprefix("https://").removesuffix("/"))
    try:
        name = name.encode("idna").decode()  # As browsers send it.
    except UnicodeError:
        name = ""
    if not _NAME.fullmatch(name):
        raise WrongHost(
            f"{given!r} is not a host name; allowed: the names under which browsers open the page, each in full, such "
            "as 'locks.example.com', '10.0.0.7' or '::1'"
        )
    return name


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
    if not origin or not host:
        return False
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
