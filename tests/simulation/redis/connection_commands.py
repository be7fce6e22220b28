"""Commands about the client's own connection, and about other connections."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.registry import command, none
from tests.simulation.redis.replies import OK, CommandError, Pairs, Status, UnknownCommand

_DATABASES = 16


@command("PING", -1, none, while_loading=True)
def ping(server: Any, args: list[bytes]) -> Any:
    return args[0] if args else Status(b"PONG")


@command("SELECT", 2, none, while_loading=True)
def select(server: Any, args: list[bytes]) -> Any:
    index = numbers.integer(args[0], "ERR invalid DB index")
    if not 0 <= index < _DATABASES:
        raise CommandError("ERR DB index is out of range")
    if index and server.cluster is not None:
        raise CommandError("ERR SELECT is not allowed in cluster mode")
    server.session.database = index
    return OK


@command("AUTH", -2, none, in_scripts=False, while_loading=True)
def auth(server: Any, args: list[bytes]) -> Any:
    if server.password is None:
        raise CommandError(
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your "
            "configuration is correct?"
        )
    if args[-1] != server.password or args[:-1] not in ([], [b"default"]):
        raise CommandError("WRONGPASS invalid username-password pair or user is disabled.")
    server.session.is_known = True
    return OK


@command("HELLO", -1, none, in_scripts=False, while_loading=True)
def hello(server: Any, args: list[bytes]) -> Any:
    session = server.session
    resp = session.resp
    if args:
        if args[0] not in (b"2", b"3"):
            raise CommandError("NOPROTO unsupported protocol version")
        resp, rest = int(args[0]), args[1:]
        while rest:
            if rest[0].upper() == b"AUTH" and len(rest) > 2:
                auth(server, rest[1:3])
                rest = rest[3:]
            elif rest[0].upper() == b"SETNAME" and len(rest) > 1:
                session.name, rest = rest[1], rest[2:]
            else:
                raise UnknownCommand(f"HELLO {args}")
    if server.password is not None and not session.is_known:
        raise CommandError(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the "
            "same time"
        )
    session.resp = resp
    version = ".".join(map(str, server.version)).encode()
    mode, role = b"cluster" if server.cluster else b"standalone", b"replica" if server.readonly else b"master"
    pairs = [(b"server", b"redis"), (b"version", version), (b"proto", resp), (b"id", session.id)]
    pairs += [(b"mode", mode), (b"role", role), (b"modules", [])]
    return Pairs(part for pair in pairs for part in pair)


@command("ASKING", 1, none)
def asking(server: Any, args: list[bytes]) -> Any:
    if server.cluster is None:
        raise CommandError("ERR This instance has cluster support disabled")
    server.session.asking = True
    return OK


@command("CLIENT", -2, none, in_scripts=False, while_loading=True)
def client(server: Any, args: list[bytes]) -> Any:
    what, rest = args[0].upper(), args[1:]
    if what == b"ID":
        return server.session.id
    if what == b"SETNAME" and len(rest) == 1:
        server.session.name = rest[0]
        return OK
    if what == b"GETNAME":
        return server.session.name or None
    if what == b"SETINFO" and len(rest) == 2:
        if server.version < (7, 2):
            raise _unknown(server, args[0])
        return OK
    if what == b"MAINT_NOTIFICATIONS":
        raise _unknown(server, args[0])
    if what == b"KILL":
        return _kill(server, rest)
    raise UnknownCommand(f"CLIENT {args}")


def _unknown(server: Any, name: bytes) -> CommandError:
    said = "unknown subcommand" if server.is_seven else "Unknown subcommand or wrong number of arguments for"
    return CommandError(f"ERR {said} '{name.decode()}'. Try CLIENT HELP.")


def _kill(server: Any, args: list[bytes]) -> Any:
    by_name = dict(zip((name.upper() for name in args[::2]), args[1::2], strict=True)) if len(args) > 1 else {}
    if len(args) == 1:
        by_name = {b"ADDR": args[0], b"SKIPME": b"no"}
    skips_me = by_name.pop(b"SKIPME", b"yes").lower() == b"yes"
    if not by_name or by_name.keys() - {b"ADDR", b"ID"}:
        raise UnknownCommand(f"CLIENT KILL {args}")
    killed = [
        session
        for session in server.sessions.values()
        if by_name.get(b"ADDR") in (None, session.address.encode())
        and by_name.get(b"ID") in (None, b"%d" % session.id)
        and not (skips_me and session is server.session)
    ]
    for session in killed:
        server.drop(session)
    if len(args) > 1:
        return len(killed)
    if not killed:
        raise CommandError("ERR No such client")
    return OK
