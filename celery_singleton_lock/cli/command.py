"""What every command of `celery locks` has: the app's locks, `--json`, and errors without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from celery.bin.base import CeleryOption

from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.runtime import Runtime

#: Every command takes it.
as_json = click.option(
    "--json", "as_json", cls=CeleryOption, is_flag=True, help_group="Locks", help="One JSON object per line."
)


@contextmanager
def runtime_of(ctx: click.Context) -> Iterator[Runtime]:
    """The locks of the app that `celery -A` names.

    Raises:
        ClickException: a setting is wrong, or the lock server does not answer, also within the `with` block.
    """
    try:
        runtime = Runtime.of(ctx.obj.app)
        if runtime.settings.backend.startswith("memory://"):
            raise click.ClickException("memory:// locks are in each process of its own, and cannot be seen from here")
        yield runtime
    except (InvalidOption, LockUnavailable) as error:
        raise click.ClickException(str(error)) from error
