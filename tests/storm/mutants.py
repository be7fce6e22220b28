"""Broken builds of the package: the storm has to find each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.stores.redis.script import Script


def apply(name: str) -> None:
    """Break this process's copy of the package; an empty name leaves it intact."""
    if name:
        MUTANTS[name]()


def _change(old: bytes, new: bytes) -> None:
    """Replace a text by another in each script that contains it."""
    scripts = [script for script in vars(lock_commands).values() if isinstance(script, Script) and old in script.text]
    assert scripts, f"no script contains {old!r} any more"
    for script in scripts:
        script.text = script.text.replace(old, new)
        script.sha = hashlib.sha1(script.text, usedforsecurity=False).hexdigest()


def _no_heartbeat() -> None:
    def start(self: Heartbeat, *_: object, **__: object) -> None:
        """Renew nothing."""

    Heartbeat.start = start  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "no heartbeat": _no_heartbeat,
    "nothing remembered": partial(_change, b"if record_ms ~= '0' then", b"if false then"),
    "take what is held": partial(_change, b"if not takes then", b"if false then"),
}
