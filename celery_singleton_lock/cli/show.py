"""Shows all that is known about one lock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.held import GONE, HeldLock, holds_of
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.keys.key import is_of_queue, key_of_queue, name_in
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import FOLLOWED

#: The name of a message's record, see `Holder.message`.
_OF_MESSAGE = re.compile(r"(?P<id>.*):[0-9a-f]+:[0-9]+\.(?P<retries>[0-9]+)", re.DOTALL)

#: How many records people get to see.
_FEW = 5


@command.locks_command(short_help="Show all that is known about one lock.")
@click.argument("words", nargs=-1, required=True, metavar="KEY | TASK [ARG]...")
@command.as_json
def show(ctx: click.Context, words: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show all that is known about one lock: that of KEY, or of a call of TASK.

    Each ARG is JSON, or else a text; name=value is a keyword argument.
    """
    with command.runtime_of(ctx) as runtime:
        key = target.key_of(ctx.obj.app, runtime.settings, words)
        state = runtime.store.inspect(key)
        queued = [] if is_of_queue(key) else holds_of(runtime.store, key_of_queue(key))
    locks = [*(HeldLock.of(key, held) for held in state.held), *queued]
    done = [ended for record in state.records if (ended := _ended(record)) is not None]
    if as_json:
        fields = {"held": [lock.fields() for lock in locks], "fence": state.fence, "waiters": state.waiters}
        command.say_json({"key": key, **fields, "done": done})
    else:
        _say_all(key, locks, state, done)


def _say_all(key: str, locks: Sequence[HeldLock], state: KeyState, done: Sequence[Any]) -> None:
    _say("task", name_in(key))
    if label := next((lock.holder.label for lock in locks if lock.holder.label), ""):
        _say("label", label)
    _say("key", key)
    for lock in locks:
        _say("queued" if lock.is_queued else "held by", lock.holder_in_words())
        _say("", _times(lock))
    if all(lock.is_queued for lock in locks):
        _say("held by", "nobody")
    _say("scope", next((lock.scope for lock in locks if lock.scope), "-"))
    _say("fence", "-" if state.fence is None else str(state.fence))
    _say("waiters", str(state.waiters))
    for ended in done[:_FEW]:
        _say("done", _in_words(ended))
    if (more := len(done) - _FEW) > 0:
        _say("", f"and {more} more" if len(state.records) < MOST_RECORDS else "and many more")


def _say(title: str, text: str) -> None:
    command.say(f"{title:<9}{text}".rstrip())


def _times(lock: HeldLock) -> str:
    if lock.held_for is None:
        return lock.end_in_words()
    over = f"; {GONE}" if lock.is_left_behind else ""
    newer = lock.holder.superseded_by
    stops = f"; it must stop for task {newer}" if newer is not None else ""
    return f"for {duration(lock.held_for)}, {lock.end_in_words()}{over}{stops}"


def _ended(record: Record) -> dict[str, Any] | None:
    """What a record says about the end of a message; None if it says something else."""
    ended, age = ends.read(record)
    if ended.state == FOLLOWED:
        return None
    named = _OF_MESSAGE.fullmatch(record.message)
    return {
        "message": record.message,
        "task_id": named["id"] if named else record.message,
        "attempt": int(named["retries"]) + 1 if named else 1,
        "state": ended.state,
        "ended_ago": None if age == ends.OLD else round(age, 3),
        "known_for": round(record.seconds, 3),
    }


def _in_words(done: dict[str, Any]) -> str:
    attempt = f", attempt {done['attempt']}" if done["attempt"] > 1 else ""
    ago = "" if done["ended_ago"] is None else f" {duration(done['ended_ago'])} ago"
    known = f"no copy of it runs for {duration(done['known_for'])} more"
    return f"task {done['task_id']}{attempt}: {done['state']}{ago}; {known}"
