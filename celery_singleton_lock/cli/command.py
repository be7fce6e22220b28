"""Common to all commands of `celery locks`: the app's locks, `--json`, and errors without a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
from celery.bin.base import CeleryCommand, CeleryOption

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import with_preload_options
from celery_singleton_lock.diagnosis.servers import unusable
from celery_singleton_lock.errors import LockUnavailable, SingletonLockError
from celery_singleton_lock.runtime import Runtime

#: An option of this package.
option = partial(click.option, cls=CeleryOption, help_group="Locks")

#: Why most commands cannot show anything.
IN_MEMORY = "memory:// locks belong to one process, and cannot be seen from here"

#: The option that every command has.
as_json = option("--json", "as_json", is_flag=True, help="One JSON object per line.")


class Number(click.FloatRange):
    """A number within bounds; click would accept NaN within any bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def locks_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command, by default with the function's name; it gets the context as its first argument."""

    def made(function: Callable[..., Any]) -> click.Command:
        with_context = click.pass_context(with_preload_options(function))
        return click.command(name, cls=CeleryCommand, **settings)(with_context)

    return made


@contextmanager
def runtime_of(ctx: click.Context, *, memory: bool = False) -> Iterator[Runtime]:
    """The locks of the app that `celery -A` names.

    Args:
        ctx: the context of the command.
        memory: whether the locks may be in memory, because the command asks no server.

    Raises:
        ClickException: an option is wrong, or the lock server does not answer, also within the `with` block.
    """
    try:
        runtime = Runtime.of(ctx.obj.app)
        if runtime.settings.backend.in_memory and not memory:
            raise click.ClickException(IN_MEMORY)
        yield runtime
    except SingletonLockError as error:
        remedy = f"-> {unusable(error.server, error.reason).remedy}" if isinstance(error, LockUnavailable) else ""
        lines = [without_app(ctx), cleaned.line(str(error)), remedy]
        raise click.ClickException("\n".join(filter(None, lines))) from error


def without_app(ctx: click.Context) -> str:
    """A hint if no app was named, which may be why something is missing; otherwise an empty text."""
    named = ctx.find_root().params.get("app")
    return "" if named else "no app was named: name it, as in celery -A shop locks …"


def say(text: str, *, err: bool = False) -> None:
    """Print one line for people, whatever the text contains."""
    click.echo(cleaned.line(text), err=err)


def say_json(fields: dict[str, Any]) -> None:
    """Print one object on one line."""
    click.echo(json.dumps(fields))
