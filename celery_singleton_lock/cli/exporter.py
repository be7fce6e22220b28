"""Serves the metrics of a cluster to Prometheus, from one process."""

from __future__ import annotations

from typing import Any

import click

from celery_singleton_lock.cli import command


@command.locks_command(short_help="Serve metrics to Prometheus.")
@command.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9808,
    show_default=True,
    help="The port to listen on; 0 picks a free one.",
)
@command.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
def exporter(ctx: click.Context, port: int, host: str, **_: Any) -> None:
    """Serve the counts of `stats`, and what is held now, to Prometheus, until Ctrl-C. Needs the extra "prometheus"."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from celery_singleton_lock.contrib.prometheus import LockCollector
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    with command.runtime_of(ctx) as runtime:
        registry = CollectorRegistry()
        registry.register(LockCollector(runtime))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
        click.echo(f"metrics at http://{host}:{server.server_port}/metrics")
        try:
            thread.join()
        except KeyboardInterrupt:
            server.shutdown()
