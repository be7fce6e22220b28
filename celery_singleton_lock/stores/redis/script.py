"""A script that a server runs, and a call of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import InvalidResponse

from celery_singleton_lock import cleaned

#: Leases, or beat's entries, in one call of a script, which blocks the server as long as it runs.
BATCH = 200

#: The least seconds for which it is remembered what was given up: until the server has read its late requests, or seen
#: that their connection is closed.
TOMBSTONE_TTL = 60.0

T = TypeVar("T")

#: A command's name and arguments: texts, bytes and numbers.
Command = tuple[Any, ...]


def is_whole(answer: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(answer, int)


def are_whole(answer: object) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(answer, list) and all(map(is_whole, answer))


def are_texts(answer: object) -> bool:
    """Whether it is a list of byte strings."""
    return isinstance(answer, list) and all(isinstance(one, bytes) for one in answer)


class Script:
    """One or more `.lua` files in a row, known to a server by their digest.

    Args:
        names: the names of the files.
        answers: whether something can be its answer.
        each: how many parts the answer to a call has, if that depends on the call.
    """

    def __init__(
        self,
        *names: str,
        answers: Callable[[Any], bool] = is_whole,
        each: Callable[[Call], int] | None = None,
    ) -> None:
        self.name = names[-1]
        self.answers = answers
        self.each = each
        folder = files(__package__).joinpath("scripts")
        lines = [line.strip() for name in names for line in folder.joinpath(f"{name}.lua").read_bytes().splitlines()]
        # Without comments: a server reads and hashes the text each time that a waiter is woken.
        self.text = b"\n".join(line for line in lines if line and not line.startswith(b"--"))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


class Call(NamedTuple):
    """A script with its keys and arguments; `keys[0]` says which slot of a cluster it is for.

    Attributes:
        later: makes the call to send in its place if that is later (see `again`); None if that is the same call.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[object]
    later: Callable[[], Call] | None = None

    def again(self) -> Call:
        """The call to send if this one was not answered: it may have been carried out, and others have acted on it."""
        return self.later() if self.later else self

    def understood(self, answer: Any) -> Any:
        """The answer, or the server's error.

        Raises:
            InvalidResponse: the script does not answer like that; the other end is not a Redis, or its answers belong
                to other commands.
        """
        if isinstance(answer, Exception):
            return answer
        script = self.script
        if not script.answers(answer) or (script.each is not None and len(answer) != script.each(self)):
            raise InvalidResponse(f"{cleaned.value_shown(answer)} is not an answer to {script.name}")
        return answer

    @property
    def by_digest(self) -> Command:
        """The command for a server that knows the script."""
        return "EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args

    @property
    def by_text(self) -> Command:
        """The command for a server that does not know the script yet."""
        return "EVAL", self.script.text, len(self.keys), *self.keys, *self.args


def batches(items: Sequence[T], size: int = BATCH) -> Iterator[Sequence[T]]:
    """The items in parts, each for one call."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def ms(seconds: float) -> int:
    """Milliseconds, as Redis counts; one at least."""
    return max(round(seconds * 1000), 1)
