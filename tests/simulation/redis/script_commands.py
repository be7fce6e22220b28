"""Commands about scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.registry import command, none
from tests.simulation.redis.replies import OK, CommandError, UnknownCommand
from tests.simulation.redis.scripting import sha_of
from tests.simulation.redis.session import Written


def _keys(args: list[bytes]) -> Sequence[bytes]:
    return args[2 : 2 + int(args[1])] if len(args) > 1 and args[1].isdigit() else ()


@command("EVAL", -3, _keys, in_scripts=False)
def eval_(server: Any, args: list[bytes]) -> Any:
    sha = sha_of(args[0])
    count = _count(args)
    if sha not in server.scripts:
        server.lua.compiled(args[0])
        server.scripts[sha] = args[0]
    return Written(server.run_script(args[0], sha, args[2 : 2 + count], args[2 + count :]))


@command("EVALSHA", -3, _keys, in_scripts=False)
def evalsha(server: Any, args: list[bytes]) -> Any:
    sha = args[0].lower()
    count = _count(args)
    text = server.scripts.get(sha)
    if text is None:
        raise CommandError("NOSCRIPT No matching script. Please use EVAL.")
    return Written(server.run_script(text, sha, args[2 : 2 + count], args[2 + count :]))


def _count(args: list[bytes]) -> int:
    count = numbers.integer(args[1])
    if count > len(args) - 2:
        raise CommandError("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise CommandError("ERR Number of keys can't be negative")
    return count


@command("SCRIPT", -2, none, in_scripts=False)
def script(server: Any, args: list[bytes]) -> Any:
    what = args[0].upper()
    if what == b"LOAD" and len(args) == 2:
        sha = sha_of(args[1])
        server.lua.compiled(args[1])
        server.scripts[sha] = args[1]
        return sha
    if what == b"FLUSH":
        server.scripts.clear()
        return OK
    if what == b"EXISTS":
        return [int(sha.lower() in server.scripts) for sha in args[1:]]
    raise UnknownCommand(f"SCRIPT {args}")
