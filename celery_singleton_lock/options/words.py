"""Finds the right name for a name that people know from another package, and for a typing error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned

#: How similar two names must be for one to count as a typing error of the other: "lock_timeout" is not one of
#: "lock_limit".
_ALIKE = 0.8

#: The same for a name that may be the user's own, such as "log_key" and "on_conflict_mail".
_VERY_ALIKE = 0.87

#: The same for names of up to four characters, in which one wrong character is much: "tll".
_SHORT, _SHORT_ALIKE = 4, 0.6

#: The last part of an option's name here, by what other packages call it. Without names that other packages also use
#: for something else: users will try what is proposed.
_HERE: Mapping[str, str] = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "expiration", "ex", "px", "lease", "lease_time"), "ttl"),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "wait_timeout", "blocking", "block"), "wait"),
    **dict.fromkeys(("max_concurrency", "concurrency", "max_leases", "slots"), "limit"),
    **dict.fromkeys(("keys", "unique_on", "unique_key", "args"), "key"),
    **dict.fromkeys(("url", "redis_url", "backend_url", "broker", "broker_url", "redis", "server"), "backend"),
}

#: How an option here differs from what other packages call by that name.
_DIFFERS: Mapping[str, str] = {
    "ttl": " (seconds; it is renewed while the task runs, so it need not be longer than that)",
    "wait": " (seconds)",
}

#: Names of this package, and some names of others, begin with the first of a pair; the second replaces it.
_BEGINNINGS = (
    ("singleton_lock_beat_lock_", "singleton_lock_beat_"),
    ("singleton_lock_beat_", "singleton_lock_beat_"),
    ("singleton_lock_", "singleton_lock_"),
    ("lock_", "lock_"),
    ("lock_", ""),
    ("", ""),
)


class Foreign(NamedTuple):
    """An option of another package, given to a task or to a call of one.

    Attributes:
        looks_so: whether the option may have this value in that package; other attributes may have the same name.
    """

    package: str
    looks_so: Callable[[Any], bool]


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping)


#: Options of other packages that would do nothing here.
FOREIGN: Mapping[str, Foreign] = {
    "once": Foreign("celery-once", _is_options),
    "unique_on": Foreign("celery-singleton", lambda value: isinstance(value, (list, tuple, str))),
    "raise_on_duplicate": Foreign("celery-singleton", lambda value: isinstance(value, bool)),
    "lock_expiry": Foreign("celery-singleton", lambda value: True),
    "heimdall": Foreign("celery-heimdall", _is_options),
}

#: The page with what to write instead of them.
MIGRATING = "https://celery-singleton-lock.readthedocs.io/en/latest/migrating.html"


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """The end of an error message about an unknown name."""
    allowed = tuple(allowed)
    meant, differs = _meant(cleaned.text(name), allowed)
    return f"; did you mean {meant!r}{differs}?" if meant else f"; allowed: {', '.join(allowed)}"


# An app has few names of attributes and options, on many tasks and in many calls.
@lru_cache(maxsize=1024)
def is_slip(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether the name is one of these, mistyped, though it does not begin as only their names may."""
    return bool(_nearest(name, allowed, _VERY_ALIKE))


@lru_cache(maxsize=1024)
def is_anagram(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether the name is not one of these, but has the same letters as one of them in another order."""
    letters = sorted(name)
    return name not in allowed and any(sorted(it) == letters for it in allowed)


def misspelled_setting(name: str, settings: Iterable[str]) -> str | None:
    """The setting of this package that was meant, where the name does not begin as they do; None if there is none."""
    return None if name.startswith("singleton_lock_") else _nearest(name, settings, _VERY_ALIKE) or None


def _meant(name: str, allowed: tuple[str, ...]) -> tuple[str, str]:
    """The name that was meant, and what differs about it; empty texts if no name is similar."""
    by_name = {it.lower(): it for it in allowed}
    folded = name.lower()
    for beginning, corrected in _BEGINNINGS:
        start, found, end = folded.rpartition(beginning) if beginning else ("", "", folded)
        if found or not beginning:
            word = end if end in _HERE else _nearest(end, _HERE, _VERY_ALIKE)
            here = _HERE.get(word, end)
            if (wanted := f"{start}{corrected}{here}") in by_name:
                return by_name[wanted], _DIFFERS.get(here, "") if word else ""
    # What all names begin with would make any two of them similar.
    shared = next((it for it, _ in _BEGINNINGS if all(each.startswith(it) for each in (folded, *allowed))), "")
    ends = {it.removeprefix(shared): it for it in allowed}
    end = folded.removeprefix(shared)
    alike = _SHORT_ALIKE if shared and len(end) <= _SHORT else _ALIKE
    close = _nearest(end, ends, alike) or next((it for it in ends if sorted(it) == sorted(end)), "")
    return ends.get(close, ""), ""


def _nearest(name: str, names: Iterable[str], cutoff: float) -> str:
    """The most similar of these names; an empty text if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, tuple(names), n=1, cutoff=cutoff)), "")
