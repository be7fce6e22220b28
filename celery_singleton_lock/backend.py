"""Where the locks are: `Backend`, parsed once from `singleton_lock_backend`.

A URL may contain a password, and a mistyped URL may contain it anywhere. So only recognised parts of a text are shown,
and nothing before the last `@`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit


class Kind(enum.Enum):
    """The ways to keep locks."""

    MEMORY = enum.auto()  # of this process
    SERVER = enum.auto()
    SENTINEL = enum.auto()
    CLUSTER = enum.auto()
    REDLOCK = enum.auto()  # several servers that do not know each other


_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("redis", "rediss", "redis+socket", "unix"), Kind.SERVER),
    "sentinel": Kind.SENTINEL,
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), Kind.CLUSTER),
    "memory": Kind.MEMORY,
}

#: The schemes of `singleton_lock_backend`.
SCHEMES = tuple(_KINDS)

#: The number of nodes of a Redlock: with fewer, no majority survives the failure of a node; more cost much and add
#: little.
MIN_NODES, MAX_NODES = 3, 9

_SOCKETS = ("redis+socket", "unix")

#: That of another kind of URL; with a login, it may be a user who stands in its place.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")

#: The part before a host. In it, `/`, `?` and `#` would begin the path, and `;` another URL.
_LOGIN = r"(?P<login>[^/?#;]*@)?"

_QUERY = r"\?\w+=[^@#&]*(&\w+=[^@#&]*)*"

_OF_HOST = re.compile(
    rf"{_LOGIN}(?P<place>([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{{1,5}})?|)(?P<path>(/[0-9]*)*)(?P<query>{_QUERY})?"
)
_OF_SOCKET = re.compile(rf"{_LOGIN}(?P<place>)(?P<path>[\w./~+-]*)(?P<query>{_QUERY})?")


@dataclass(frozen=True, slots=True)
class Backend:
    """Where the locks are.

    Attributes:
        kind: the kind of server that keeps them.
        urls: the URLs of the servers, Sentinels or nodes, with schemes in lower case. They have passwords: never show
            them.
        masked: the URLs as they may be shown.
    """

    kind: Kind
    urls: tuple[str, ...] = field(repr=False)
    masked: str

    @classmethod
    def parse(cls, text: str) -> Backend:
        """The backend of one URL, or of several joined by `;`.

        Raises:
            ValueError: the text is not a backend; the message shows the text, and says what is allowed.
        """
        urls = tuple(map(_normal, text.split(";")))
        for url in urls:
            if scheme(url) not in SCHEMES or "://" not in url:
                allowed = ", ".join(f"{name}://" for name in SCHEMES)
                raise ValueError(f"{masked(text)!r}; allowed: a URL that begins with one of {allowed}")
            if not is_readable(url):
                raise ValueError(
                    f"{masked(text)!r}, which cannot be parsed; allowed: a URL such as "
                    "'redis://user:password@localhost:6379/0', with the characters / ? # @ : ; % of user and "
                    "password written as %2F %3F %23 %40 %3A %3B %25"
                )
        together = masked(";".join(urls))
        return cls(_kind_of(urls, together), urls, together)

    @property
    def in_memory(self) -> bool:
        """Whether each process has its own locks."""
        return self.kind is Kind.MEMORY


def can_keep_locks(url: str) -> bool:
    """Whether a broker or result backend can also keep the locks. Several servers are not taken for a Redlock."""
    return scheme(url) in SCHEMES and (";" not in url or scheme(url) == "sentinel")


def scheme(url: str) -> str:
    """The scheme of a URL, in lower case; the whole text if it has no `://`."""
    return url.partition("://")[0].lower()


def is_readable(url: str) -> bool:
    """Whether user, password, host and port of a URL can be distinguished."""
    rest = url.partition("://")[2]
    after_host = re.split("[/?#]", rest, maxsplit=1)[1:]
    if any("@" in text for text in after_host):
        return False  # A password has one of these characters: the rest would be taken for a path.
    try:
        parts = urlsplit(url)
        return parts.port is None or parts.port >= 0
    except ValueError:
        return False


def masked(urls: str) -> str:
    """A URL, or several joined by `;`, as it may be logged."""
    each = urls.split(";")
    if len({"@" in url for url in each}) > 1:
        return _beginning(urls)  # Perhaps this is one URL with a `;` in its password.
    parts = [_masked(url) for url in each]
    return ";".join(part for part in parts if part is not None) if None not in parts else _beginning(urls)


def _normal(url: str) -> str:
    begins, found, rest = url.partition("://")
    return begins.lower() + found + rest


def _kind_of(urls: Sequence[str], together: str) -> Kind:
    schemes = {scheme(url) for url in urls}
    kinds = {_KINDS[name] for name in schemes}
    if len(urls) == 1 or (len(schemes) == 1 and not kinds & {Kind.SERVER, Kind.MEMORY}):
        return kinds.pop()
    if kinds != {Kind.SERVER}:
        nodes = ", ".join(f"{name}://" for name, kind in _KINDS.items() if kind is Kind.SERVER)
        raise ValueError(
            f"{together!r}; several URLs joined by ';' must all be independent servers (Redlock: {nodes}), "
            "all be sentinel://, or all belong to one cluster"
        )
    if len(set(urls)) != len(urls) or len(urls) % 2 == 0 or not MIN_NODES <= len(urls) <= MAX_NODES:
        raise ValueError(
            f"{together!r}: {len(urls)} nodes for Redlock; allowed: {MIN_NODES}, 5, 7 or {MAX_NODES} "
            "independent servers, each named once (an even number survives no more failures than one fewer)"
        )
    return Kind.REDLOCK


def _masked(url: str) -> str | None:
    """One URL as it may be logged; None if its parts cannot be distinguished."""
    begins, _, rest = url.partition("://")
    pattern = _OF_SOCKET if begins.lower() in _SOCKETS else _OF_HOST
    found = pattern.fullmatch(rest)
    if found is None or not is_readable(url):
        return None
    if begins.lower() not in SCHEMES and (found["login"] or not _SCHEME.fullmatch(begins)):
        return None
    login, query = ("**@" if found["login"] else ""), ("?\u2026" if found["query"] else "")
    return f"{begins}://{login}{found['place']}{found['path']}{query}"


def _beginning(text: str) -> str:
    """The scheme, if it is valid, without the rest."""
    return f"{scheme(text)}://\u2026" if "://" in text and scheme(text) in SCHEMES else "\u2026"
