"""The known commands, and what the server has to know of each before it runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Arguments = list[bytes]
Carried = TypeVar("Carried", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Known:
    """A command.

    Attributes:
        name: as errors show it.
        run: carries it out, given the server and the arguments after the name.
        arity: number of words, including the name; negative: at least this many.
        keys: which of the arguments are keys.
        in_scripts: whether scripts may use it.
    """

    name: str
    run: Callable[[Any, Arguments], Any]
    arity: int
    keys: Callable[[Arguments], Sequence[bytes]]
    in_scripts: bool

    def takes(self, words: int) -> bool:
        return words == self.arity if self.arity > 0 else words >= -self.arity


#: By name, in upper and in lower case.
COMMANDS: dict[bytes, Known] = {}


def none(arguments: Arguments) -> Sequence[bytes]:
    return ()


def first(arguments: Arguments) -> Sequence[bytes]:
    return arguments[:1]


def every(arguments: Arguments) -> Sequence[bytes]:
    return arguments


def all_but_last(arguments: Arguments) -> Sequence[bytes]:
    return arguments[:-1]


def command(
    name: str,
    arity: int,
    keys: Callable[[Arguments], Sequence[bytes]] = first,
    *,
    in_scripts: bool = True,
) -> Callable[[Carried], Carried]:
    """Register a function as a command."""

    def known(run: Carried) -> Carried:
        entry = Known(name.lower(), run, arity, keys, in_scripts)
        COMMANDS[name.encode()] = COMMANDS[name.lower().encode()] = entry
        return run

    return known
