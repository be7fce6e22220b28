"""The URLs of lock servers: which of them can be read, and what of them may be shown.

A URL holds a password, and one that was mistyped may hold it anywhere. So nothing of a text is shown but what was
recognised, and nothing that stands before the last `@`.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

#: Schemes of `singleton_lock_backend`.
SCHEMES = (
    *("redis", "rediss", "redis+socket", "unix"),
    *("sentinel", "redis+cluster", "rediss+cluster", "memory"),
)

_SOCKETS = ("redis+socket", "unix")

#: What stands before a host: in it, `/`, `?` and `#` would begin the path, and `;` another URL.
_LOGIN = r"(?P<login>[^/?#;]*@)?"

_QUERY = r"\?\w+=[^@#&]*(&\w+=[^@#&]*)*"

_OF_HOST = re.compile(
    rf"{_LOGIN}(?P<place>([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{{1,5}})?|)(?P<path>(/[0-9]*)*)(?P<query>{_QUERY})?"
)
_OF_SOCKET = re.compile(rf"{_LOGIN}(?P<place>)(?P<path>[\w./~+-]*)(?P<query>{_QUERY})?")


def scheme(url: str) -> str:
    """What a URL begins with, in lower case; all of it where there is no `://`."""
    return url.partition("://")[0].lower()


def is_readable(url: str) -> bool:
    """Whether user, password, host and port of a URL can be told apart."""
    rest = url.partition("://")[2]
    after_host = re.split("[/?#]", rest, maxsplit=1)[1:]
    if any("@" in text for text in after_host):
        return False  # A password with one of these characters: what follows would be taken for a path.
    try:
        parts = urlsplit(url)
        return parts.port is None or parts.port >= 0
    except ValueError:
        return False


def shown(urls: str) -> str:
    """A URL, or several joined by `;`, as it may be logged."""
    each = urls.split(";")
    if len({"@" in url for url in each}) > 1:
        return _beginning(urls)  # Perhaps one URL, and the `;` is in its password.
    parts = [_shown(url) for url in each]
    return ";".join(part for part in parts if part is not None) if None not in parts else _beginning(urls)


def _shown(url: str) -> str | None:
    """None for what cannot be told apart."""
    begins, _, rest = url.partition("://")
    pattern = _OF_SOCKET if begins.lower() in _SOCKETS else _OF_HOST
    found = pattern.fullmatch(rest)
    if begins.lower() not in SCHEMES or found is None or not is_readable(url):
        return None
    login, query = ("**@" if found["login"] else ""), ("?\u2026" if found["query"] else "")
    return f"{begins}://{login}{found['place']}{found['path']}{query}"


def _beginning(text: str) -> str:
    """The scheme, if it is one."""
    return f"{scheme(text)}://\u2026" if "://" in text and scheme(text) in SCHEMES else "\u2026"
