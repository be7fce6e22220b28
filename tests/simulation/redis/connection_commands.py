"""Commands about the client's own connection."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis.registry import command, none
from tests.simulation.redis.replies import OK, CommandError, UnknownCommand


@command("HELLO", 1, none, in_scripts=False)
def hello(server: Any, args: list[bytes]) -> Any:
    version, mode = ".".join(map(str, server.version)).encode(), b"cluster" if server.cluster else b"standalone"
    named = {b"server": b"redis", b"version": version, b"proto": 2, b"id": server.session.id}
    named |= {b"mode": mode, b"role": b"master", b"modules": []}
    return [part for pair in named.items() for part in pair]


@command("ASKING", 1, none)
def asking(server: Any, args: list[bytes]) -> Any:
    if server.cluster is None:
        raise CommandError("ERR This instance has cluster support disabled")
    server.session.asking = True
    return OK


@command("CLIENT", -2, none, in_scripts=False)
def client(server: Any, args: list[bytes]) -> Any:
    if args[0].upper() != b"SETINFO":
        raise UnknownCommand(f"CLIENT {args}")
    return OK
