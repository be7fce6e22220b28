"""The ways to run beat on two hosts, as each package's documentation describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scheduler:
    """A scheduler.

    Attributes:
        title: its name in tables.
        name: for `celery beat -S`.
        settings: for a lock server at this URL, and a lock that lasts for this many seconds.
    """

    title: str
    name: str
    settings: Callable[[str, float], Mapping[str, Any]]


def _exclusive(url: str, seconds: float) -> Mapping[str, Any]:
    return {"singleton_lock_backend": url, "singleton_lock_beat_ttl": seconds}


def _redbeat(url: str, seconds: float) -> Mapping[str, Any]:
    return {"redbeat_redis_url": url, "redbeat_lock_timeout": round(seconds), "beat_max_loop_interval": 1}


def _none(url: str, seconds: float) -> Mapping[str, Any]:
    return {}


#: By their names for `--beat`.
SCHEDULERS: Mapping[str, Scheduler] = {
    "exclusive": Scheduler("this package", "exclusive", _exclusive),
    "redbeat": Scheduler("RedBeat", "redbeat.RedBeatScheduler", _redbeat),
    "celery": Scheduler("Celery's own", "celery.beat:PersistentScheduler", _none),
}
