"""Commands about the server itself, and about its cluster."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis.cluster import slot_of
from tests.simulation.redis.globs import matcher
from tests.simulation.redis.registry import command, none
from tests.simulation.redis.replies import CommandError, Pairs, UnknownCommand


@command("TIME", 1, none, while_loading=True)
def time(server: Any, args: list[bytes]) -> Any:
    return [b"%d" % (server.us // 1_000_000), b"%d" % (server.us % 1_000_000)]


@command("INFO", -1, none, while_loading=True)
def info(server: Any, args: list[bytes]) -> Any:
    fields = {
        "redis_version": ".".join(map(str, server.version)),
        "redis_mode": "cluster" if server.cluster else "standalone",
        "process_id": "1",
        "run_id": server.run_id,
        "connected_clients": str(len(server.sessions)),
        "used_memory": "1000000",
        "maxmemory": "1" if server.out_of_memory else "0",
        "maxmemory_policy": "noeviction",
        "loading": str(int(server.loading)),
        "aof_enabled": "0",
        "evicted_keys": "0",
        "role": "slave" if server.readonly else "master",
        "connected_slaves": str(len(server.acknowledged)),
        "master_repl_offset": str(server.offset),
        "cluster_enabled": str(int(server.cluster is not None)),
    }
    fields.update(server.info)
    return "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()


@command("CONFIG", -2, none, in_scripts=False, while_loading=True)
def config(server: Any, args: list[bytes]) -> Any:
    if args[0].upper() != b"GET" or len(args) != 2:
        raise UnknownCommand(f"CONFIG {args}")
    matches, known = matcher(args[1].lower()), {b"maxmemory-policy": b"noeviction", b"appendonly": b"no", b"save": b""}
    return Pairs(part for pair in known.items() if matches(pair[0]) for part in pair)


@command("CLUSTER", -2, none, in_scripts=False)
def cluster(server: Any, args: list[bytes]) -> Any:
    known, what = server.cluster, args[0].upper()
    if known is None:
        raise CommandError("ERR This instance has cluster support disabled")
    if what == b"SLOTS":
        return [[first, last, *(_node(node) for node in nodes)] for first, last, nodes in known.ranges]
    if what == b"SHARDS":
        return [_shard(first, last, nodes) for first, last, nodes in known.ranges]
    if what == b"INFO":
        served = sum(last - first + 1 for first, last, _ in known.ranges)
        return f"cluster_state:ok\r\ncluster_slots_assigned:{served}\r\ncluster_slots_ok:{served}\r\n".encode()
    if what == b"KEYSLOT" and len(args) == 2:
        return slot_of(args[1])
    if what == b"MYID":
        return _identity(known.myself)
    raise UnknownCommand(f"CLUSTER {args}")


def _shard(first: int, last: int, nodes: Any) -> Pairs:
    return Pairs([b"slots", [first, last], b"nodes", [_of_shard(node, not at) for at, node in enumerate(nodes)]])


def _of_shard(node: tuple[str, int], is_master: bool) -> Pairs:
    host, port = node[0].encode(), node[1]
    role = b"master" if is_master else b"replica"
    pairs = [(b"id", _identity(node)), (b"port", port), (b"ip", host), (b"endpoint", host), (b"role", role)]
    pairs += [(b"replication-offset", 0), (b"health", b"online")]
    return Pairs(part for pair in pairs for part in pair)


def _node(node: tuple[str, int]) -> list[Any]:
    return [node[0].encode(), node[1], _identity(node)]


def _identity(node: tuple[str, int]) -> bytes:
    return f"{node[0]}:{node[1]}".encode().hex().ljust(40, "0")[:40].encode()
