"""Commands about lists, hashes and sorted sets."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.dataset import Scores
from tests.simulation.redis.generic_commands import scan_options, stepped
from tests.simulation.redis.registry import command
from tests.simulation.redis.replies import OK, SYNTAX, CommandError, UnknownCommand, shown

#: HSCAN returns up to this many fields at once, whatever the count is.
_SMALL = 128


# Lists


@command("RPUSH", -3)
def rpush(server: Any, args: list[bytes]) -> Any:
    found = server.made(args[0], list)
    found.extend(args[1:])
    server.changed(args[0])
    return len(found)


@command("LTRIM", 4)
def ltrim(server: Any, args: list[bytes]) -> Any:
    start, end = numbers.integer(args[1]), numbers.integer(args[2])
    found = server.typed(args[0], list)
    if found is not None:
        found[:] = found[slice(*_within(start, end, len(found)))]
        server.changed(args[0])
    return OK


def _within(start: int, end: int, length: int) -> tuple[int, int]:
    """A Redis range as a Python slice; its ends may count from the end."""
    start, end = max(start + length if start < 0 else start, 0), end + length if end < 0 else end
    return start, max(end + 1, start)


# Hashes


@command("HSET", -4)
def hset(server: Any, args: list[bytes]) -> Any:
    if len(args) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'hset' command")
    found = server.made(args[0], dict)
    before = len(found)
    found.update(zip(args[1::2], args[2::2], strict=True))
    server.changed(args[0])
    return len(found) - before


@command("HGET", 3)
def hget(server: Any, args: list[bytes]) -> Any:
    return (server.typed(args[0], dict) or {}).get(args[1])


@command("HGETALL", 2)
def hgetall(server: Any, args: list[bytes]) -> Any:
    return [part for pair in (server.typed(args[0], dict) or {}).items() for part in pair]


@command("HVALS", 2)
def hvals(server: Any, args: list[bytes]) -> Any:
    return [*(server.typed(args[0], dict) or {}).values()]


@command("HDEL", -3)
def hdel(server: Any, args: list[bytes]) -> Any:
    found = server.typed(args[0], dict)
    if found is None:
        return 0
    gone = sum(found.pop(field, None) is not None for field in args[1:])
    if gone:
        server.changed(args[0])
    return gone


@command("HLEN", 2)
def hlen(server: Any, args: list[bytes]) -> Any:
    return len(server.typed(args[0], dict) or ())


@command("HSCAN", -3)
def hscan(server: Any, args: list[bytes]) -> Any:
    position, matches, count = scan_options(args[1:])
    found = server.typed(args[0], dict) or {}
    cursor, names = (b"0", list(found)) if len(found) <= _SMALL else stepped(found, position, count)
    return [cursor, [part for name in names if matches(name) for part in (name, found[name])]]


# Sorted sets


@command("ZADD", -4)
def zadd(server: Any, args: list[bytes]) -> Any:
    key, only, at = args[0], b"", 1
    while (option := args[at].upper() if at < len(args) else b"") in (b"XX", b"NX", b"GT", b"LT", b"CH", b"INCR"):
        if option not in (b"XX", b"NX") or only not in (b"", option):
            raise UnknownCommand(f"ZADD with {args[1:]}")
        only, at = option, at + 1
    pairs = args[at:]
    if not pairs or len(pairs) % 2:
        raise CommandError(SYNTAX)
    scores = [numbers.floating(score) for score in pairs[::2]]
    found = server.typed(key, Scores)
    if found is None:
        if only == b"XX":
            return 0
        found = server.made(key, Scores)
    added, changed = 0, False
    for member, score in zip(pairs[1::2], scores, strict=True):
        is_there = member in found
        if (only == b"XX" and not is_there) or (only == b"NX" and is_there):
            continue
        added += not is_there
        changed = changed or not is_there or found[member] != score
        found[member] = score
    if changed:
        server.changed(key)
    return added


@command("ZSCORE", 3)
def zscore(server: Any, args: list[bytes]) -> Any:
    score = (server.typed(args[0], Scores) or {}).get(args[1])
    return None if score is None else shown(score)


@command("ZREMRANGEBYSCORE", 4)
def zremrangebyscore(server: Any, args: list[bytes]) -> Any:
    return _removed(server, args[0], _between(server, args))


def _between(server: Any, args: list[bytes]) -> list[bytes]:
    low, high = numbers.Bound(args[1]), numbers.Bound(args[2])
    found = server.typed(args[0], Scores) or {}
    return [member for member, score in found.items() if low.is_below(score) and high.is_above(score)]


@command("ZRANGE", -4)
def zrange(server: Any, args: list[bytes]) -> Any:
    if len(args) > 3:
        if [option.upper() for option in args[3:]] != [b"WITHSCORES"]:
            raise UnknownCommand(f"ZRANGE with {args[3:]}")
        found = server.typed(args[0], Scores) or {}
        return [part for member in _ranked(server, args) for part in (member, shown(found[member]))]
    return _ranked(server, args)


@command("ZRANGEBYSCORE", -4)
def zrangebyscore(server: Any, args: list[bytes]) -> Any:
    offset, count = 0, -1
    if len(args) > 3:
        if len(args) != 6 or args[3].upper() != b"LIMIT":
            raise UnknownCommand(f"ZRANGEBYSCORE with {args[3:]}")
        offset, count = numbers.integer(args[4]), numbers.integer(args[5])
    between = set(_between(server, args))
    found = server.typed(args[0], Scores)
    ordered = [member for member in found.in_order() if member in between] if found is not None else []
    return [] if offset < 0 else ordered[offset : None if count < 0 else offset + count]


@command("ZREMRANGEBYRANK", 4)
def zremrangebyrank(server: Any, args: list[bytes]) -> Any:
    return _removed(server, args[0], _ranked(server, args))


def _ranked(server: Any, args: list[bytes]) -> list[bytes]:
    start, end = numbers.integer(args[1]), numbers.integer(args[2])
    found = server.typed(args[0], Scores)
    return found.in_order()[slice(*_within(start, end, len(found)))] if found is not None else []


@command("ZREM", -3)
def zrem(server: Any, args: list[bytes]) -> Any:
    found = server.typed(args[0], Scores) or {}
    return _removed(server, args[0], [member for member in dict.fromkeys(args[1:]) if member in found])


def _removed(server: Any, key: bytes, members: list[bytes]) -> int:
    if members:
        found = server.typed(key, Scores)
        for member in members:
            del found[member]
        server.changed(key)
    return len(members)
