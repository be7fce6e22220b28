"""What is held, by whom, and for how long."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command
from celery_singleton_lock.keys import name_in
from celery_singleton_lock.lease import Held


@dataclass(frozen=True, slots=True)
class Line:
    """A lock that is held. Seconds everywhere.

    Attributes:
        key: the whole key.
        name: what the lock is of: a task's name, or "beat:" and a schedule's.
        task_id: of the task that holds it; None for beat's leader, and where a stranger wrote the value.
        node: the worker or beat that holds it.
        pid: its process; 0 where nobody runs, as between two attempts.
        held_for: since it was asked for.
        expires_in: unless it is renewed.
        slot: of a semaphore.
    """

    key: str
    name: str
    task_id: str | None
    node: str | None
    pid: int
    held_for: float | None
    expires_in: float
    slot: int

    @classmethod
    def of(cls, key: str, held: Held) -> Line:
        """Of a look at a lock."""
        holder = held.holder
        since = clock.wall() - holder.since if holder else None
        return cls(
            key,
            name_in(key),
            *((holder.task_id, holder.node, holder.pid) if holder else (None, None, 0)),
            held_for=None if since is None else round(max(since, 0.0), 3),
            expires_in=round(held.remaining, 3),
            slot=held.slot or 0,
        )

    def __str__(self) -> str:
        who = f"task {self.task_id}" if self.task_id else "leader" if self.name.startswith("beat:") else "unknown"
        where = f" on {self.node} (pid {self.pid})" if self.node else ""
        since = "" if self.held_for is None else f" for {self.held_for:.0f} s"
        return f"{self.name}  {who}{where}{since}, expires in {self.expires_in:.0f} s unless renewed  [{self.key}]"


@click.command(cls=CeleryCommand, name="list")
@command.as_json
@click.pass_context
@handle_preload_options
def list_(ctx: click.Context, as_json: bool = False, **_: Any) -> None:
    """List the locks that are held, sorted by what they are of."""
    with command.runtime_of(ctx) as runtime:
        held = [Line.of(key, held) for key, held in runtime.store.holds(runtime.settings.prefix)]
    for line in sorted(held, key=lambda line: (line.name, line.key, line.slot)):
        click.echo(json.dumps(asdict(line)) if as_json else str(line))
