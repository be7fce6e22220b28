"""Which of the held locks a command is about: `--task`, `--node`, `--older-than`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import click

from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.held import HeldLock, in_order
from celery_singleton_lock.keys.key import shown_name
from celery_singleton_lock.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Selection:
    """The requested locks; None for an attribute that does not matter.

    Attributes:
        names: the names of the locks, as shell patterns.
        node: the node name of the worker, as a pattern.
        older_than: the shortest time in seconds for which a lock has been held.
    """

    names: tuple[str, ...] | None
    node: str | None
    older_than: float | None

    def __bool__(self) -> bool:
        return (self.names, self.node, self.older_than) != (None, None, None)

    def of(self, runtime: Runtime) -> list[HeldLock]:
        """The held locks that are requested, in order."""
        locks = (HeldLock.of(key, held) for key, held in runtime.store.all_held(runtime.settings.prefix))
        return in_order(filter(self._has, locks))

    def none_in_words(self) -> str:
        """The message if none of these locks is held; it asks about a name that seems to be mistyped."""
        app, name = click.get_current_context().obj.app, self.names[0] if self.names else ""
        is_meant = name in app.tasks or re.search(r"[*?[]", name)
        similar = [] if is_meant else get_close_matches(name, app.tasks, n=1, cutoff=0.8)
        return "".join(["No such lock is held.", *(f" Did you mean {task}?" for task in similar)])

    def _has(self, lock: HeldLock) -> bool:
        if self.names is not None and not any(fnmatchcase(lock.name, name) for name in self.names):
            return False
        if self.node is not None and not fnmatchcase(lock.holder.node or "", self.node):
            return False
        return self.older_than is None or (lock.held_for is not None and lock.held_for >= self.older_than)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it gets a `Selection`."""

    @command.option("--task", metavar="NAME", help="Only locks of this task or lock_name; `*` stands for any text.")
    @command.option(
        "--node", metavar="NAME", help="Only locks that this worker or beat holds; `*` stands for any text."
    )
    @command.option(
        "--older-than",
        metavar="SECONDS",
        type=command.Number(min=0),
        help="Only locks that have been held for at least this long.",
    )
    @wraps(function)
    def with_selection(
        *arguments: Any, task: str | None, node: str | None, older_than: float | None, **others: Any
    ) -> Any:
        names = None if task is None else _names(click.get_current_context().obj.app, task)
        return function(*arguments, selection=Selection(names, node, older_than), **others)

    return with_selection


def _names(app: Any, task: str) -> tuple[str, ...]:
    """The names of a task's locks: the task's name, and its `lock_name` if it has one."""
    app.loader.import_default_modules()
    lock_name = getattr(app.tasks.get(task), "lock_name", None)
    return (task,) if lock_name is None else (task, shown_name(lock_name))
