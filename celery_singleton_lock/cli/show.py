"""Shows all that is known about one lock; and why a call has its key, and where its options come from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.explain import DEFAULT, Explanation, differences
from celery_singleton_lock.diagnosis.explain import explain as explained
from celery_singleton_lock.diagnosis.held import GONE, HeldLock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal.words import duration
from celery_singleton_lock.keys.key import is_of_queue, key_of_queue, name_in
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import FOLLOWED

#: The separator between two calls.
_AND = "vs"

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
        queued = [] if is_of_queue(key) else runtime.store.held(key_of_queue(key))
    locks = [HeldLock.of(key, held) for held in state.held]
    locks += [HeldLock.of(key_of_queue(key), held) for held in queued]
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


@command.locks_command(short_help="Show a call's key, and who holds its lock.")
@click.argument("call", nargs=-1, required=True, metavar=f"TASK [ARG]... [{_AND} TASK [ARG]...]")
@command.as_json
def explain(ctx: click.Context, call: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show who holds the lock of a call, its key, what that was made from, and which options were set, and where.

    Each ARG is JSON, or else a text; name=value is a keyword argument. With two calls: why their keys differ, or what
    differs and does not count. The second one may leave out the task, if it is the same.
    """
    with command.runtime_of(ctx, memory=True) as runtime:
        calls = [target.call_of(ctx.obj.app, words) for words in _of_one_task(ctx.obj.app, _calls(call))]
        explanations = [explained(task, runtime.settings, args, kwargs) for task, args, kwargs in calls]
    for index, explanation in enumerate(explanations):
        locks, unknown = _held(runtime, explanation)
        if as_json:
            held_by = None if unknown else [_holder(lock) for lock in locks]
            click.echo(json.dumps({**asdict(explanation), "held_by": held_by}, default=str))
        else:
            holders = "; ".join(f"{lock.holder_in_words()}, {lock.end_in_words()}" for lock in locks)
            if index:
                click.echo()
            _say_explanation(explanation, unknown or holders or "nobody")
    if len(explanations) == 2:
        _compare(*explanations, as_json=as_json)


def _calls(words: Sequence[str]) -> list[Sequence[str]]:
    middle = words.index(_AND) if _AND in words else len(words)
    calls = [words[:middle], *([words[middle + 1 :]] if _AND in words else ())]
    if _AND in calls[-1] or not all(calls):
        raise click.UsageError(f"give one call, or two with {_AND} between them")
    return calls


def _of_one_task(app: Any, calls: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The calls, with the task of the first one where the second begins with an argument."""
    first, *others = calls
    app.loader.import_default_modules()
    return [first, *(call if target.is_like_a_task(app, call[0]) else [first[0], *call] for call in others)]


def _held(runtime: Runtime, explanation: Explanation) -> tuple[list[HeldLock], str]:
    """The holds of the lock, or why they are unknown."""
    if runtime.settings.backend.in_memory:
        return [], command.IN_MEMORY
    try:
        return [HeldLock.of(explanation.key, held) for held in runtime.store.held(explanation.key)], ""
    except LockUnavailable as error:
        return [], f"unknown: {error}"


def _holder(lock: HeldLock) -> dict[str, Any]:
    known = asdict(lock.held.holder) if lock.held.holder else {}
    return {**known, "expires_in": lock.expires_in}


def _say_explanation(explanation: Explanation, holders: str) -> None:
    was_set = [option for option in explanation.options if option.source != DEFAULT]
    for title, lines in (
        ("task", [explanation.task]),
        ("held by", [holders]),
        ("key", [explanation.key]),
        ("lock_name", [explanation.lock_name] if explanation.lock_name != explanation.task else []),
        ("lock_key", [explanation.lock_key]),
        ("arguments", [_argument(explanation, name) for name in explanation.arguments]),
        (
            "of these",
            [f"{name} = {it.value}  as  {it.serialized}" for name, it in explanation.counts.items()] or ["none"],
        ),
        ("options", [f"{each.option} = {each.value!r}  from {each.source}" for each in was_set]),
    ):
        for index, line in enumerate(lines):
            command.say(f"{'' if index else title:<11}{line}")


def _argument(explanation: Explanation, name: str) -> str:
    return f"{name} = {explanation.arguments[name]}{'  by default' if name in explanation.defaults else ''}"


def _compare(one: Explanation, other: Explanation, *, as_json: bool) -> None:
    same, reasons = one.key == other.key, differences(one, other)
    if as_json:
        command.say_json({"same": same, "differences": reasons})
        return
    said = "the same key: they exclude each other" if same else "different keys: they do not exclude each other"
    click.echo(f"\n{said}")
    for reason in reasons:
        command.say(f"  {reason}")
