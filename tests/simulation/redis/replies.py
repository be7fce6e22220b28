"""Answers of commands, and their form on the wire (RESP2)."""

from __future__ import annotations

import math
from typing import Any


class UnknownCommand(Exception):
    """The model does not know this command or option: the simulation would prove nothing, and ends."""


class CommandError(Exception):
    """An error as an answer; its text begins with the code."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self.text = text.encode() if isinstance(text, str) else text


class CallError(CommandError):
    """The answer to a script that may not make this call here: since version 7, and before."""

    def __init__(self, text: str, before_seven: str) -> None:
        super().__init__(text)
        self.before_seven = before_seven.encode()


class Status(bytes):
    """A simple string, such as OK."""


class NilList:
    """No list: the answer of a BLPOP that timed out."""


def shown(number: float) -> bytes:
    """A score, or a Lua number that is an argument, as text."""
    if math.isinf(number):
        return b"inf" if number > 0 else b"-inf"
    return b"%.17g" % number


OK = Status(b"OK")
NIL_LIST = NilList()
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
SYNTAX = "ERR syntax error"


def encoded(reply: Any) -> bytes:
    if reply.__class__ is int:
        return b":%d\r\n" % reply
    if reply.__class__ is bytes:
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    if isinstance(reply, CommandError):
        return error_line(reply.text)
    if reply is NIL_LIST:
        return b"*-1\r\n"
    raise UnknownCommand(f"an answer that is {reply!r}")


def error_line(text: bytes) -> bytes:
    return b"-%b\r\n" % text.rstrip(b"\r\n").replace(b"\r", b" ").replace(b"\n", b" ")
