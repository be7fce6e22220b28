"""Words after `celery locks`: anything that a shell can pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from click.testing import CliRunner

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.stores.base import LockRequest
from tests.fuzz.choices import Case, Choices
from tests.fuzz.targets.stored import answered, shop

#: Valid lines, without `exporter`, which does not end, and `doctor` online, which takes time to ask workers.
LINES: tuple[tuple[str, ...], ...] = (
    ("list", "--task", "shop.bill", "--node", "w*", "--older-than", "5", "--json"),
    ("stats", "--json"),
    ("show", "shop.bill", "7", "--json"),
    ("show", "p:1:{shop.bill:00000000000000000000000000000000}"),
    ("timeline", "--minutes", "5", "--output", "-"),
    ("explain", "shop.bill", "month=7", "[1]"),
    ("explain", "--json", "shop.bill", '{"a": 1}'),
    ("doctor", "--offline", "--json"),
    ("clear", "--yes", "--task", "shop.bill", "--node", "*", "--older-than", "5"),
    ("release", "--yes", "shop.bill", "7"),
    ("release", "shop.bill"),
)
WORDS = (
    "--json",
    "--task",
    "--node",
    "--older-than",
    "--minutes",
    "--yes",
    "--",
    "-",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "0",
    "-1",
    "shop.bill",
    "month=",
    "month=7",
    "=",
    "a=b=c",
    "NaN",
    "[" * 3000,
    "9" * 5000,
    '{"a":' * 2000,
    "*",
    "[",
    "[!]",
    "\udcff",
    "\x1b[2J",
    "%s",
    "p:1:{x:0}",
    "p:",
    "{",
    "\u202e",
    "",
)


NUMBERS = ("nan", "-nan", "inf", "1e999", "1e-999", "-1", "0", "43200.1", "0x5", "9" * 400, "\u0665", "")


def _line(choices: Choices) -> list[str]:
    words = [*choices.pick(LINES)]
    if choices.one_in(3):
        words = [choices.pick(NUMBERS) if word in ("5", "7") else word for word in words]
    for _ in range(choices.below(4)):
        at, how = choices.below(len(words) + 1), choices.below(4)
        # A shell passes no NUL, and files are written in this folder only.
        word = choices.pick(WORDS) if choices.one_in(2) else choices.text().replace("\x00", "").replace("/", "_")
        if how == 0:
            words.insert(at, word)
        elif how == 1:
            words[at : at + 1] = []
        else:
            words[at : at + 1] = [word]
    return words


@contextmanager
def cases() -> Iterator[Case]:
    # A line may name a file to write.
    with CliRunner().isolated_filesystem(), shop() as made:

        def case(choices: Choices) -> None:
            made.client.flushdb()
            holder = Holder("id", node="w1@host", pid=1, since=5.0)
            lease = made.store.acquire(LockRequest(made.key, new_owner(), ttl=60.0, holder=holder))
            words = _line(choices)
            answered(made.ask(*words))
            assert [held.owner for held in made.store.held(made.key)] == [lease.owner], "freed, though it may be alive"

        yield case
