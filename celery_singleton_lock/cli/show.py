"""Shows all that is known about one lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.held import GONE, HeldLock, duration
from celery_singleton_lock.keys.key import is_of_queue, key_of_queue
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.inspector import MOST_RECORDS, KeyState
from celery_singleton_lock.task import outcome

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
        queued = [] if is_of_queue(key) else runtime.store.held(key_of_queue(key))
    locks = [HeldLock.of(key, held) for held in state.held]
    locks += [HeldLock.of(key_of_queue(key), held) for held in queued]
    command.say_json(_fields(key, locks, state)) if as_json else _say_all(key, locks, state)


def _fields(key: str, locks: Sequence[HeldLock], state: KeyState) -> dict[str, Any]:
    return {
        "key": key,
        "held": [lock.fields() for lock in locks],
        "fence": state.fence,
        "waiters": state.waiters,
        "done": [
            {"message": record.message, "state": _state(record), "seconds": round(record.seconds, 3)}
            for record in state.records
        ],
    }


def _say_all(key: str, locks: Sequence[HeldLock], state: KeyState) -> None:
    _say("key", key)
    if label := next((lock.holder.label for lock in locks if lock.holder.label), ""):
        _say("label", label)
    for lock in locks:
        slot = f", slot {lock.slot}" if lock.slot else ""
        _say("queued" if lock.is_queued else "held by", lock.holder_in_words() + slot)
        _say("", _times(lock))
    if all(lock.is_queued for lock in locks):
        _say("held by", "nobody")
    _say("scope", next((lock.scope for lock in locks if lock.scope), "-"))
    _say("fence", "-" if state.fence is None else str(state.fence))
    _say("waiters", str(state.waiters))
    for record in state.records[:_FEW]:
        _say(
            "done",
            f"message {record.message}: {_state(record)}, shown for {duration(record.seconds)} more{_known(record)}",
        )
    if (more := len(state.records) - _FEW) > 0:
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


def _known(record: Record) -> str:
    """For how long no copy of the message is carried out; the details that are shown may expire much sooner."""
    _, age = outcome.read(record)
    return "" if age == outcome.OLD else f"; a copy does not run for {duration(age + record.seconds)} from its end"


def _state(record: Record) -> str:
    ended, _ = outcome.read(record)
    return ended.state
