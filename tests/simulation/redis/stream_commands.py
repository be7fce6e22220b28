"""Commands about streams."""

from __future__ import annotations

import re
from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.dataset import Stream
from tests.simulation.redis.registry import command
from tests.simulation.redis.replies import NIL_LIST, CommandError, UnknownCommand

#: Entries in a node of a stream; trimming with `~` removes whole nodes.
_NODE = 100

_ID = re.compile(rb"([0-9]+)(?:-([0-9]+))?")
_LAST = 2**64 - 1
_INVALID = "ERR Invalid stream ID specified as stream command argument"


@command("XADD", -5, grows=True)
def xadd(server: Any, args: list[bytes]) -> Any:
    key, *rest = args
    most = None
    if rest[0].upper() == b"MAXLEN":
        if rest[1] != b"~":
            raise UnknownCommand(f"XADD with {rest[:2]}")
        most = numbers.integer(rest[2])
        if most < 0:
            raise CommandError("ERR The MAXLEN argument must be >= 0.")
        rest = rest[3:]
    if not rest or rest[0] != b"*":
        raise UnknownCommand(f"XADD with {rest[:1]}")
    fields = rest[1:]
    if not fields or len(fields) % 2:
        raise CommandError("ERR wrong number of arguments for 'xadd' command")
    stream = server.made(key, Stream)
    last, number = stream.last_id
    stream.last_id = (server.ms, 0) if server.ms > last else (last, number + 1)
    stream.entries.append((stream.last_id, fields))
    if stream.first_of_nodes and stream.first_of_nodes[-1] < _NODE:
        stream.first_of_nodes[-1] += 1
    else:
        stream.first_of_nodes.append(1)
    if most is not None:
        _trim(stream, most)
    server.changed(key)
    return _shown(stream.last_id)


def _trim(stream: Stream, most: int) -> None:
    while stream.first_of_nodes and len(stream.entries) - stream.first_of_nodes[0] >= most:
        del stream.entries[: stream.first_of_nodes.pop(0)]


@command("XLEN", 2)
def xlen(server: Any, args: list[bytes]) -> Any:
    stream = server.typed(args[0], Stream)
    return len(stream.entries) if stream is not None else 0


@command("XRANGE", -4)
def xrange(server: Any, args: list[bytes]) -> Any:
    low, high, count = _bound(args[1], 0), _bound(args[2], _LAST), _LAST
    if len(args) > 3:
        if len(args) != 5 or args[3].upper() != b"COUNT":
            raise UnknownCommand(f"XRANGE with {args[3:]}")
        count = max(numbers.integer(args[4]), 0)
    stream = server.typed(args[0], Stream)
    if stream is None:
        return []
    if not count:
        return NIL_LIST
    found = [entry for entry in stream.entries if low <= entry[0] <= high]
    return [[_shown(name), list(fields)] for name, fields in found[:count]]


def _bound(text: bytes, missing: int) -> tuple[int, int]:
    """An end of a range, as the first or last id in it."""
    if text == b"-":
        return 0, 0
    if text == b"+":
        return _LAST, _LAST
    is_exclusive = text[:1] == b"("
    found = _ID.fullmatch(text[is_exclusive:])
    if not found:
        raise CommandError(_INVALID)
    milliseconds, number = int(found[1]), int(found[2]) if found[2] else missing
    if not is_exclusive:
        return milliseconds, number
    if missing:
        raise UnknownCommand("XRANGE up to, and without, an id")
    return (milliseconds, number + 1) if number < _LAST else (milliseconds + 1, 0)


def _shown(name: tuple[int, int]) -> bytes:
    return b"%d-%d" % name
