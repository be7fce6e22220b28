"""The targets: each module has `cases`, a context in which its cases can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tests.fuzz.choices import Case
from tests.fuzz.targets import answers, commands, keys, messages, options, parsers, stored

#: The targets by name, with the number of cases that takes a second or less.
TARGETS: Mapping[str, tuple[Callable[[], AbstractContextManager[Case]], int]] = {
    "parsers": (parsers.cases, 1000),
    "keys": (keys.cases, 500),
    "options": (options.cases, 200),
    "messages": (messages.cases, 60),
    "answers": (answers.cases, 150),
    "stored": (stored.cases, 60),
    "commands": (commands.cases, 40),
}
