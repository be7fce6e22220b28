"""A look at all locks that one server holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redis.exceptions import ResponseError

from celery_singleton_lock.lease import Held
from celery_singleton_lock.stores import calls
from celery_singleton_lock.stores.server import Server

#: Keys that the server looks at in one step.
_STEP = 500


def holds(server: Server, prefix: str) -> Iterator[tuple[str, Held]]:
    """The locks whose key begins with `prefix` and a colon; does not block the server.

    Raises:
        RedisError, OSError: no answer, or an error.
    """
    cursor, pattern = b"0", f"{prefix}:*:run*"
    while True:
        cursor, names = server.command("SCAN", cursor, "MATCH", pattern, "COUNT", _STEP)
        for name in names:
            yield from _hold(server, name.decode(errors="replace"))
        if cursor == b"0":
            return


def _hold(server: Server, name: str) -> Iterator[tuple[str, Held]]:
    key, found, slot = name.rpartition(":run")
    if not found or (slot and not slot[1:].isdigit()):
        return
    try:
        value, pttl = server.command("GET", name), server.command("PTTL", name)
    except ResponseError:
        return  # A foreign key of another type.
    if value is not None:
        yield key, replace(calls.held(value, pttl), slot=int(slot[1:] or 0))
