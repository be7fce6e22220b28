"""Serves the live page."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import Any

import click

from celery_singleton_lock.cli import command

#: The environment variable with the token. An option would show it to everybody who can list the processes.
TOKEN = "CELERY_SINGLETON_LOCK_WEB_TOKEN"  # noqa: S105 - only the variable's name

#: Addresses that mean all addresses; no browser uses them for the page.
ANY = ("0.0.0.0", "::")  # noqa: S104 - not bound to here


@command.locks_command(short_help="Show the locks on a live page.")
@command.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9809,
    show_default=True,
    help="The port to listen on; 0 picks a free one.",
)
@command.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; beyond this machine, all pages need the token.",
)
@command.option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="A host name under which browsers may open the page, besides those of this machine. Can be repeated.",
)
@command.option("--allow-release", is_flag=True, help="Let anybody with the token release locks and stop tasks.")
def web(ctx: click.Context, port: int, host: str, allow_host: tuple[str, ...], allow_release: bool, **_: Any) -> None:
    """Show the locks on a live page, until Ctrl-C. Needs the extra "web".

    The token, the password for the page, is the value of the environment variable CELERY_SINGLETON_LOCK_WEB_TOKEN, or a
    new one, which is printed.
    """
    try:
        from celery_singleton_lock.web import app_of, serve
        from celery_singleton_lock.web.access import LOOPBACK, WrongHost
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24) if allow_release or host not in LOOPBACK else ""
    hosts = (*LOOPBACK, *allow_host, *(() if host in ANY else (host,)))
    with command.runtime_of(ctx):
        try:
            app = app_of(ctx.obj.app, hosts=hosts, token=token, allow_release=allow_release)
        except WrongHost as error:
            raise click.UsageError(f"--allow-host: {error}") from error
        except ValueError as error:
            raise click.ClickException(f"{TOKEN}: {error}") from error
        listening = _listen(host, port)
        if token and not os.environ.get(TOKEN):
            click.echo(f"password (with any user name): {token}")
        if host in ANY and not allow_host:
            click.echo("Only this machine can open the page so far. Use --allow-host NAME for the name in a browser's")
            click.echo("address bar elsewhere, such as that of this machine, or its IP address.")
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"locks at http://{shown}:{listening.getsockname()[1]}/")
        logging.basicConfig(format="[%(asctime)s: %(levelname)s] %(message)s")  # What is done by the page, above all.
        serve(app, listening)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
