"""The targets: each module has `cases`, a context in which its cases can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tests.fuzz.choices import Case
from tests.fuzz.targets import answers, commands, keys, messages, options, parsers, stored

#: The targets by name, with the share of all cases that each gets.
TARGETS: Mapping[str, tuple[Callable[[], AbstractContextManager[Case]], int]] = {
    "parsers": (parsers.cases, 540),
    "keys": (keys.cases, 320),
    "options": (options.cases, 90),
    "messages": (messages.cases, 10),
    "answers": (answers.cases, 50),
    "stored": (stored.cases, 6),
    "commands": (commands.cases, 4),
}
