"""Commands about the server itself, and about its cluster."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis.registry import command, none
from tests.simulation.redis.replies import CommandError, UnknownCommand


@command("TIME", 1, none)
def time(server: Any, args: list[bytes]) -> Any:
    return [b"%d" % (server.us // 1_000_000), b"%d" % (server.us % 1_000_000)]


@command("CLUSTER", -2, none, in_scripts=False)
def cluster(server: Any, args: list[bytes]) -> Any:
    known, what = server.cluster, args[0].upper()
    if known is None:
        raise CommandError("ERR This instance has cluster support disabled")
    if what == b"SLOTS":
        return [[first, last, *(_node(node) for node in nodes)] for first, last, nodes in known.ranges]
    raise UnknownCommand(f"CLUSTER {args}")


def _node(node: tuple[str, int]) -> list[Any]:
    return [node[0].encode(), node[1], _identity(node)]


def _identity(node: tuple[str, int]) -> bytes:
    return f"{node[0]}:{node[1]}".encode().hex().ljust(40, "0")[:40].encode()
