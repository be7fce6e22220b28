"""Remote control: `celery inspect locks` and `celery control release_lock KEY`, and the same from a program,
`app.control.inspect().locks()` and `app.control.release_lock(key)`.

The main process knows what its pool carries out and under which owners, whatever the pool. A lock is not simply freed
here: first it is reserved for nobody, so that the task finds it gone when it renews it, which it does at once, and is
stopped while nobody else can start. The lock is freed when the task has ended. If the task does not end, or the worker
dies meanwhile, the lock ends when the task's lease would have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import click
from celery.app.control import Control, Inspect
from celery.utils.log import get_logger
from celery.worker.control import control_command, inspect_command

from celery_singleton_lock import cleaned, clock, trust
from celery_singleton_lock._celery import active_requests, add_method, ask_each_worker
from celery_singleton_lock.errors import InvalidOption, LockUnavailable, with_label
from celery_singleton_lock.holder import mark_of_owner
from celery_singleton_lock.keys.key import has_form_of_key, is_key
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Reservation
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.worker.children import RunHold
from celery_singleton_lock.worker.request import SingletonRequest

logger = get_logger(__name__)

#: Seconds between two checks whether a task that is being stopped has ended.
POLL = 0.05


@inspect_command(name="locks")
def locks(state: Any, **_: Any) -> Any:
    """Locks of exclusive tasks that the worker holds."""
    running = list(_running())
    if not running:
        return []
    holds = [hold for _, hold in running]
    try:
        # Which of them hold their lock by now: a renewal shows that, in one round trip, and does no harm.
        ours = Runtime.of(state.app).store.renew(holds, timeout=trust.step_of(min(hold.ttl for hold in holds)))
    except LockUnavailable as error:
        return _error(str(error))
    return [_in_words(request, hold) for (request, hold), is_ours in zip(running, ours, strict=True) if is_ours]


def _key_in_command(text: str) -> str:
    """The key that `celery control` was given. If it cannot be one of the app, the command ends, and asks no worker.

    Otherwise the exit status would be 0: Celery's own is 0 as soon as a worker answers, even with an error.
    """
    key, prefix = text.removesuffix(":run"), _prefix()
    if has_form_of_key(key) if prefix is None else is_key(prefix, key):
        return text
    raise click.UsageError(
        f"{cleaned.value_shown(text)} is not the key of a lock{'' if prefix is None else ' of this app'}; "
        "celery inspect locks shows those that are held (quote them for the shell)"
    )


def _prefix() -> str | None:
    """What keys of the command line's app begin with; None if that is unknown here: it may be given a broker alone."""
    context = click.get_current_context(silent=True)
    try:
        return None if context is None else Settings.from_app(context.obj.app).prefix
    except (AttributeError, InvalidOption):
        return None


@control_command(name="release_lock", args=[("key", _key_in_command)], signature="<key>")
def release_lock(state: Any, key: str = "", mark: str = "", **_: Any) -> Any:
    """Stop the task that holds a lock, then free the lock. With a mark, only that hold counts (see `mark_of_owner`)."""
    if not isinstance(key, str) or not key:
        return _error("which lock? Use: celery control release_lock KEY, with a key from `celery inspect locks`")
    runtime = Runtime.of(state.app)
    store, promises = runtime.store, []
    if not is_key(runtime.settings.prefix, key.removesuffix(":run")):
        return _error(
            f"{cleaned.value_shown(key)} is not a key of this app; celery inspect locks shows those that are held"
        )
    try:
        for request, hold in _running():
            is_meant = hold.key == key.removesuffix(":run") and mark in ("", mark_of_owner(hold.owner))
            if is_meant and (kept := _take_away(store, hold, state.hostname)):
                arguments = (request, kept, store)
                threading.Thread(target=_free_after, args=arguments, name="singleton-lock-release", daemon=True).start()
                promises.append(_promise(request, hold))
    except LockUnavailable as error:
        return _error(str(error))
    finally:
        if promises:
            runtime.heartbeat.renew_now()
    return {"ok": "; ".join(promises) or "no task of this worker holds it"}


def _ask_for_locks(self: Inspect) -> Any:
    """Locks of exclusive tasks that the workers hold.

    Returns:
        A list for each node name, None if nobody answers.
    """
    return ask_each_worker(self, "locks")


def _ask_to_release(self: Control, key: str, destination: Any = None, **options: Any) -> Any:
    """Tell the workers, or those named, to stop the task that holds a lock and then to free it.

    Args:
        self: the app's.
        key: as `app.control.inspect().locks()` shows it.
        destination: node names; None for all.
        options: as for `broadcast`, such as `reply=True`.
    """
    return self.broadcast("release_lock", destination=destination, arguments={"key": key}, **options)


# Commands belong to the process, whatever app sends them; and so do their methods.
add_method(Inspect, "locks", _ask_for_locks)
add_method(Control, "release_lock", _ask_to_release)


def _running() -> Iterator[tuple[SingletonRequest, RunHold]]:
    """The requests that the pool carries out and that may have a lock, each with its hold."""
    for request in active_requests():
        if isinstance(request, SingletonRequest) and (hold := request.hold()) is not None:
            yield request, hold


def _take_away(store: Store, hold: RunHold, node: str) -> Hold | None:
    """Reserve a lock for nobody; the hold that keeps it then, None if the task did not have the lock."""
    found = [held.holder for held in store.held(hold.key) if held.owner == hold.owner]
    if not found or found[0] is None:
        return None
    nobody = found[0].taken_away(node)
    if not store.free(hold, reservation=Reservation(nobody, hold.ttl)):
        return None
    key = with_label(hold.key, hold.holder.label)
    logger.warning("%s: the lock is taken by remote control from %s", key, hold)
    return Hold(hold.key, nobody.reserved_as, ttl=hold.ttl, limit=hold.limit)


def _in_words(request: SingletonRequest, hold: RunHold) -> dict[str, Any]:
    return {
        "key": hold.key,
        "label": hold.holder.label,
        "task": hold.task,
        "task_id": hold.holder.task_id,
        "pid": hold.holder.pid,
        "held_for": round(max(clock.wall() - request.time_start, 0.0), 3),
        "ttl": hold.ttl,
    }


def _promise(request: SingletonRequest, hold: Hold) -> str:
    task = f"task {cleaned.text(request.id)}"
    if request.is_stopped_when_lost:
        return f"{task} is stopped within a second; the lock is free when it has ended"
    return f"{task} goes on, because its on_lock_lost is 'warn'; the lock is free after {hold.ttl:g} s at most"


def _free_after(request: SingletonRequest, kept: Hold, store: Store) -> None:
    until = clock.now() + kept.ttl
    while request.is_running and clock.now() < until:
        clock.sleep(POLL)
    try:
        store.free(kept)
    except LockUnavailable as error:
        logger.warning("%s could not be freed, and expires by itself: %s", kept.key, error)


def _error(text: str) -> dict[str, str]:
    return {"error": text}
