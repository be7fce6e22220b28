"""A look at the locks that one server holds, and at the ledgers; none blocks the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redis.exceptions import ResponseError

from celery_singleton_lock.lease import Held
from celery_singleton_lock.stores import calls
from celery_singleton_lock.stores.server import Server

#: Keys, or entries, that the server looks at in one step.
_STEP = 500


def look(server: Server, key: str, limit: int) -> list[Held]:
    """Who holds the key.

    Raises:
        RedisError, OSError: no answer, or an error.
    """
    found = ((slot, _hold(server, calls.run_key(key, slot))) for slot in range(limit))
    return [replace(held, slot=slot) for slot, held in found if held is not None]


def holds(server: Server, prefix: str) -> Iterator[tuple[str, Held]]:
    """The locks whose key begins with `prefix` and a colon.

    Raises:
        RedisError, OSError: no answer, or an error.
    """
    cursor, pattern = b"0", f"{prefix}:*:run*"
    while True:
        cursor, names = server.command("SCAN", cursor, "MATCH", pattern, "COUNT", _STEP)
        for name in names:
            key, found, slot = name.decode(errors="replace").rpartition(":run")
            if not found or (slot and not slot[1:].isdigit()):
                continue
            try:
                held = _hold(server, name)
            except ResponseError:
                continue  # A foreign key of another type.
            if held is not None:
                yield key, replace(held, slot=int(slot[1:] or 0))
        if cursor == b"0":
            return


def entries(server: Server, key: str) -> Iterator[bytes]:
    """What a ledger knows of; some perhaps more than once.

    Raises:
        RedisError, OSError: no answer, or an error.
    """
    cursor = b"0"
    while True:
        cursor, pairs = server.command("HSCAN", calls.ledger_key(key), cursor, "COUNT", _STEP)
        yield from pairs[::2]
        if cursor == b"0":
            return


def _hold(server: Server, name: str | bytes) -> Held | None:
    with server.stream() as stream:
        stream.send(("GET", name))
        stream.send(("PTTL", name))
        try:
            value = stream.read()
        finally:
            pttl = stream.read()
    return None if value is None else calls.held(value, pttl)
