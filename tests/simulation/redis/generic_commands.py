"""Commands about keys of any type, and about strings."""

from __future__ import annotations

import zlib
from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.dataset import TYPES
from tests.simulation.redis.globs import matcher
from tests.simulation.redis.registry import command, every, none
from tests.simulation.redis.replies import OK, SYNTAX, CommandError, Status, UnknownCommand


@command("GET", 2)
def get(server: Any, args: list[bytes]) -> Any:
    return server.typed(args[0], bytes)


@command("SET", -3)
def set_(server: Any, args: list[bytes]) -> Any:
    key, value, *options = args
    ends_at, must, keeps, returns, at = None, b"", False, False, 0
    while at < len(options):
        option = options[at].upper()
        if option in (b"NX", b"XX") and must in (b"", option):
            must = option
        elif option == b"KEEPTTL" and ends_at is None:
            keeps = True
        elif option == b"GET":
            returns = True
        elif option in (b"PX", b"EX") and ends_at is None and not keeps and at + 1 < len(options):
            at += 1
            ends_at = _end(server, option, options[at])
        else:
            raise CommandError(SYNTAX)
        at += 1
    before = server.typed(key, bytes) if returns else server.lookup(key)
    if (must == b"NX" and before is not None) or (must == b"XX" and before is None):
        return before if returns else None
    if keeps:
        ends_at = server.dataset.ends_at.get(key)
    server.put(key, value, ends_at)
    return before if returns else OK


def _end(server: Any, option: bytes, text: bytes) -> int:
    wrong = "ERR invalid expire time in 'set' command" if server.is_seven else "ERR invalid expire time in set"
    number = numbers.integer(text)
    milliseconds = number if option[:1] == b"P" else number * 1000
    if number <= 0 or milliseconds > numbers.MOST:
        raise CommandError(wrong)
    end = server.ms + milliseconds
    if end > numbers.MOST:
        raise CommandError(wrong)
    return end


@command("GETRANGE", 4)
def getrange(server: Any, args: list[bytes]) -> Any:
    start, end = numbers.integer(args[1]), numbers.integer(args[2])
    text = server.typed(args[0], bytes) or b""
    if start < 0 and end < 0 and start > end:
        return b""
    length = len(text)
    start, end = max(start + length if start < 0 else start, 0), max(end + length if end < 0 else end, 0)
    return text[start : end + 1]


@command("EXISTS", -2, every)
def exists(server: Any, args: list[bytes]) -> Any:
    lookup = server.lookup
    return sum(lookup(key) is not None for key in args)


@command("DEL", -2, every)
def del_(server: Any, args: list[bytes]) -> Any:
    return sum(server.lookup(key) is not None and server.remove(key) for key in args)


@command("TYPE", 2)
def type_(server: Any, args: list[bytes]) -> Any:
    value = server.lookup(args[0])
    return Status(b"none" if value is None else TYPES[value.__class__])


@command("PTTL", 2)
def pttl(server: Any, args: list[bytes]) -> Any:
    if server.lookup(args[0]) is None:
        return -2
    ends_at = server.dataset.ends_at.get(args[0])
    return -1 if ends_at is None else max(ends_at - server.ms, 0)


@command("PEXPIRE", 3)
def pexpire(server: Any, args: list[bytes]) -> Any:
    key, milliseconds = args[0], numbers.integer(args[1])
    if milliseconds + server.ms > numbers.MOST:
        shown = "'pexpire' command" if server.is_seven else "pexpire"
        raise CommandError(f"ERR invalid expire time in {shown}")
    if server.lookup(key) is None:
        return 0
    if milliseconds <= 0:
        server.remove(key)
    else:
        server.expire_at(key, server.ms + milliseconds)
    return 1


@command("PEXPIREAT", 3)
def pexpireat(server: Any, args: list[bytes]) -> Any:
    key, at = args[0], numbers.integer(args[1])
    if server.lookup(key) is None:
        return 0
    if at <= server.ms:
        server.remove(key)
    else:
        server.expire_at(key, at)
    return 1


@command("SCAN", -2, none)
def scan(server: Any, args: list[bytes]) -> Any:
    position, matches, count = scan_options(args)
    position, found = stepped(server.dataset.values, position, count)
    return [position, [key for key in found if matches(key) and server.lookup(key) is not None]]


def scan_options(args: list[bytes]) -> tuple[int, Any, int]:
    """The cursor, a matcher for names, and how many names to look at."""
    if not args[0].isdigit():
        raise CommandError("ERR invalid cursor")
    pattern, count = b"*", 10
    for name, value in zip(args[1::2], args[2::2], strict=len(args) % 2 == 1):
        if name.upper() == b"MATCH":
            pattern = value
        elif name.upper() == b"COUNT":
            count = numbers.integer(value)
            if count < 1:
                raise CommandError(SYNTAX)
        else:
            raise UnknownCommand(f"SCAN with {name!r}")
    return int(args[0]), matcher(pattern), count


def stepped(names: Any, position: int, count: int) -> tuple[bytes, list[bytes]]:
    """Some of the names, and where to go on: as in a real server, names that stay there are found."""
    if not position and len(names) <= count:
        return b"0", list(names)
    ahead = sorted((number, name) for name in names if (number := zlib.crc32(name)) >= position)
    until = ahead[count - 1][0] if len(ahead) > count else None
    found = [name for number, name in ahead if until is None or number <= until]
    return (b"0" if len(found) == len(ahead) or until is None else b"%d" % (until + 1)), found
