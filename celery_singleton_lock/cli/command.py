"""Common to all commands of `celery locks`: the app's locks, `--json`, and errors without a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
from celery.bin.base import CeleryCommand, CeleryOption, handle_preload_options

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.runtime import Runtime

#: An option of this package.
option = partial(click.option, cls=CeleryOption, help_group="Locks")

#: Why most commands have nothing to say.
IN_MEMORY = "memory:// locks belong to one process, and cannot be seen from here"

#: Every command takes it.
as_json = option("--json", "as_json", is_flag=True, help="One JSON object per line.")


class Number(click.FloatRange):
    """A number within bounds; click takes NaN for one within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def locks_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function, which gets the context first; by default it has the function's name."""

    def made(function: Callable[..., Any]) -> click.Command:
        with_context = click.pass_context(handle_preload_options(function))
        return click.command(name, cls=CeleryCommand, **settings)(with_context)

    return made


@contextmanager
def runtime_of(ctx: click.Context, *, memory: bool = False) -> Iterator[Runtime]:
    """The locks of the app that `celery -A` names.

    Args:
        ctx: of the command.
        memory: they may be in memory, since the command asks no server.

    Raises:
        ClickException: an option is wrong, or the lock server does not answer, also within the `with` block.
    """
    try:
        runtime = Runtime.of(ctx.obj.app)
        if runtime.settings.backend.in_memory and not memory:
            raise click.ClickException(IN_MEMORY)
        yield runtime
    except SingletonLockError as error:
        said, hint = cleaned.line(str(error)), without_app(ctx)
        raise click.ClickException(f"{hint}\n{said}" if hint else said) from error


def without_app(ctx: click.Context) -> str:
    """A hint where no app was named, which may be why something is missing; else nothing."""
    named = ctx.find_root().params.get("app")
    return "" if named else "no app was named: say which one, as in celery -A shop locks …"


def say(text: str, *, err: bool = False) -> None:
    """One line for people, whatever is in it."""
    click.echo(cleaned.line(text), err=err)


def say_json(fields: dict[str, Any]) -> None:
    """One object, on a line of its own."""
    click.echo(json.dumps(fields))
