"""The right to see the pages, and to act: hosts, origins, the token, sessions, and the browser's own rules.

Another site that somebody looks at can make their browser send requests here, also with a name that its owner lets
point to this host (DNS rebinding). So only the names that are expected are answered, and a form counts only from a page
of this one, with the session's own proof in it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from celery_singleton_lock import clock
from celery_singleton_lock.web.tries import Tries

#: The names of this machine itself.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

#: Characters that a token has at least.
SHORTEST = 16

#: Seconds for which somebody is signed in.
SESSION = 12 * 3600

#: The cookie of a session.
COOKIE = "exclusive_locks_session"

#: Headers of each answer: only scripts and styles of the page itself, no frames, no cache.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer": a browser would hide the origin of our own forms as well.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Access:
    """What is allowed.

    Attributes:
        hosts: names by which the page may be called; what a request's `Host` says without its port.
        token: proves that somebody may act; empty where nobody may.
        allow_release: whether locks can be released and tasks stopped.
        private: whether pages are shown to those only that are signed in.
        tries: the wrong tokens that came.
    """

    hosts: Collection[str]
    token: str = ""
    allow_release: bool = False
    private: bool = False
    tries: Tries = field(default_factory=Tries, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str):
            raise TypeError(f"hosts is {self.hosts!r}; allowed: a list of names, such as [{self.hosts!r}]")
        if (self.allow_release or self.private) and not self.token:
            raise ValueError("allow_release and private need a token: give one of at least 16 random characters")
        if self.token and len(self.token) < SHORTEST:
            raise ValueError(f"the token has {len(self.token)} characters; allowed: {SHORTEST} or more, at random")

    def knows_host(self, host: str) -> bool:
        """Whether a request's `Host` names this page."""
        return name_of(host) in {name.lower() for name in self.hosts}

    def is_token(self, text: str, address: str) -> bool:
        """Whether somebody at this address knows the token; look at `tries` first."""
        is_right = bool(self.token) and hmac.compare_digest(text.encode(), self.token.encode())
        if not is_right:
            self.tries.failed(address)
        return is_right

    def new_session(self) -> str:
        """For a cookie: until when it is valid, something random, and a proof that it was made here."""
        content = f"{round(clock.wall()) + SESSION}.{secrets.token_hex(16)}"
        return f"{content}.{self._proof('session', content)}"

    def is_session(self, cookie: str) -> bool:
        content, _, proof = cookie.rpartition(".")
        if not self.token or not hmac.compare_digest(proof.encode(), self._proof("session", content).encode()):
            return False
        until = content.partition(".")[0]
        return until.isdecimal() and int(until) > clock.wall()

    def form_proof(self, session: str) -> str:
        """A field of each form of this session. No other site knows it."""
        return self._proof("form", session)

    def is_form_proof(self, session: str, proof: str) -> bool:
        return self.is_session(session) and hmac.compare_digest(proof.encode(), self.form_proof(session).encode())

    def _proof(self, purpose: str, content: str) -> str:
        return hmac.new(self.token.encode(), f"{purpose}:{content}".encode(), hashlib.sha256).hexdigest()


def name_of(host: str) -> str:
    """The name in a `Host` header, without the port; empty if the header makes no sense."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError:
        return ""
    return "" if parts.path or parts.query or parts.fragment or "@" in host else (parts.hostname or "").rstrip(".")


def is_own_origin(origin: str | None, host: str) -> bool:
    """Whether a request that changes something comes from a page of the host that it is sent to."""
    if not origin or not host:
        return False
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
