"""The live page, served by a program of its own."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import click

from celery_singleton_lock.cli import command


@command.locks_command()
@command.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9809,
    show_default=True,
    help="To listen on; 0 for a free one.",
)
@command.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@command.option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="A name by which browsers may call the page, beside those of this machine. May be repeated.",
)
def web(ctx: click.Context, port: int, host: str, allow_host: tuple[str, ...], **_: Any) -> None:
    """Show the locks on a page that moves, until Ctrl-C; /metrics is for Prometheus. Needs the extra "web"."""
    try:
        import uvicorn

        from celery_singleton_lock.web import app_of
        from celery_singleton_lock.web.access import LOOPBACK
    except ImportError as error:
        needed = "celery-singleton-lock[web]"
        raise click.ClickException(
            str(error) if needed in str(error) else f"{error.name} is not installed: pip install '{needed}'"
        ) from error
    with command.runtime_of(ctx):
        app = app_of(ctx.obj.app, hosts=(*LOOPBACK, *allow_host))
        listening = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"locks at http://{shown}:{listening.getsockname()[1]}/")
        # Streams to browsers have no end of their own.
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        with suppress(KeyboardInterrupt):  # It has ended in good order by then.
            uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
