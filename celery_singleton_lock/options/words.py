"""Names that people know from other packages, and typing errors, with the right names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned

#: How alike two names are of which one is taken for a slip of the pen: "lock_timeout" is no slip for "lock_limit".
_ALIKE = 0.8

#: The last part of an option's name here, by what others call the same.
_HERE: Mapping[str, str] = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "expiration", "ex", "px", "lease", "lease_time"), "ttl"),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "wait_timeout", "blocking", "block"), "wait"),
    **dict.fromkeys(("max_concurrency", "concurrency", "max_leases", "slots", "count"), "limit"),
    **dict.fromkeys(("keys", "unique_on", "unique_key", "args"), "key"),
}

#: Names of this package begin with one of these.
_BEGINNINGS = ("singleton_lock_", "lock_", "")


class Foreign(NamedTuple):
    """An option of another package, as it stands on a task."""

    package: str
    looks_so: Callable[[Any], bool]
    here: str


#: Task options of other packages, which would do nothing here.
FOREIGN: Mapping[str, Foreign] = {
    "once": Foreign(
        "celery-once",
        lambda value: isinstance(value, Mapping),
        "lock_key for its keys, lock_scope='until_executed', and on_duplicate for graceful",
    ),
    "unique_on": Foreign("celery-singleton", lambda value: isinstance(value, (list, tuple, str)), "lock_key"),
    "raise_on_duplicate": Foreign(
        "celery-singleton",
        lambda value: isinstance(value, bool),
        "lock_scope='until_executed' with on_duplicate='raise'",
    ),
    "heimdall": Foreign(
        "celery-heimdall",
        lambda value: isinstance(value, Mapping),
        "lock_key for its key, and lock_scope='until_executed'",
    ),
}


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """The end of an error about a name that is not known."""
    allowed = tuple(allowed)
    meant = _meant(cleaned.text(name), allowed)
    hint = f"; did you mean {meant!r}?" if meant else ""
    return f"{hint}; allowed: {', '.join(allowed)}"


def is_slip(name: str, allowed: Iterable[str]) -> bool:
    """Whether it is one of these names, mistyped."""
    return bool(difflib.get_close_matches(name, tuple(allowed), n=1, cutoff=_ALIKE))


def _meant(name: str, allowed: tuple[str, ...]) -> str | None:
    folded = name.lower()
    for beginning in _BEGINNINGS:
        start, found, end = folded.rpartition(beginning) if beginning else ("", "", folded)
        if (found or not beginning) and end in _HERE:
            wanted = f"{start}{beginning}{_HERE[end]}"
            return next((it for it in allowed if it.lower() == wanted), None)
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=_ALIKE)
    return close[0] if close else None
