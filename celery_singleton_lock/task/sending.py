"""A message gets its lock when it is sent, if `lock_scope` says so; if another message has the lock, it is a duplicate.

Take, send, confirm: the lock is taken for some seconds before the message is sent. If sending fails, the lock is freed:
a caller who learns that nothing was sent will send again. Once the broker has the message, the lock is confirmed for as
long as the message may wait (`in_bulk`), also by the worker that receives it.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import clock, signals
from celery_singleton_lock._celery import current_worker_task
from celery_singleton_lock.errors import FOREIGN, DuplicateTask, LockUnavailable, WrongLockServer
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.keys.key import without_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import (
    DUPLICATE_POLICIES,
    MAX_QUEUE_TTL,
    QUEUE_TTL,
    UNTIL_EXPIRED,
    WHILE_EXECUTING,
    DuplicatePolicy,
    is_seconds,
)
from celery_singleton_lock.options.task import Options, chosen_policy, raw_attribute, replaces
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest, order_of
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task import ends, header
from celery_singleton_lock.task.message import HEADER, RequestLike, Target, sending_in
from celery_singleton_lock.task.queue_lock import (
    QueueLock,
    holder_of_message,
    lock_in,
)
from celery_singleton_lock.task.turn import turn_of

logger = get_logger(__name__)

#: Seconds that are added to how long a message may wait.
MARGIN = 60.0

#: Options of a call if something follows from its message, which must not be lost, whatever message has the lock. Also
#: those that Celery gives to each part of a canvas, whose id somebody may wait for; a chord's body has only the last.
_OF_CANVAS = ("chain", "chord", "link", "link_error", "group_id", "root_id", "parent_id", "reply_to")


class DuplicateResult(AsyncResult):  # type: ignore[type-arg]
    """The result of a call that was not sent: that of the message that waits or runs.

    Attributes:
        lock_key: the key of the lock that the other message has.
        since: when that message was sent, seconds since the epoch.
    """

    lock_key: str
    since: float

    @classmethod
    def of(cls, task: Any, duplicate: DuplicateTask) -> DuplicateResult:
        """The result of the task that the error names."""
        result = cls(duplicate.task_id, backend=task.backend, task_name=task.name, app=task.app)
        result.lock_key, result.since = duplicate.key, duplicate.since
        return result


def is_locked_when_sent(task: Any) -> bool:
    """Whether a task's scope begins when it is sent; checked for each call, even if there is no lock server."""
    scope = raw_attribute(task, "lock_scope") or task.app.conf.get("singleton_lock_scope") or WHILE_EXECUTING
    return bool(scope != WHILE_EXECUTING)


def send(
    task: Any,
    call: Mapping[str, Any] | None,
    args: Any,
    kwargs: Any,
    named: dict[str, Any],
    publish: Callable[..., Any],
    sender: Any,
) -> Any:
    """Send a message with its lock by `publish`, or answer as `on_duplicate` says.

    `call` has the lock options of this call, and `named` whatever else `apply_async` was given, by name, with the id
    and our header; `sender` is the task that a worker carries out meanwhile.

    Raises:
        DuplicateTask: with `on_duplicate="raise"`.
        LockUnavailable: with `on_send_unavailable="raise"`, or if it is the wrong server.
    """
    task_id = named["task_id"]
    before = _Before.of(task, named, sender)
    try:
        locked = task.lock_when_sent(call, args, kwargs)
    except Exception as error:  # Also whatever the user's lock_key raises.
        if not _follows(before, named):
            raise
        return _publish_without(publish, task, named, error)
    if locked is None:
        return publish(**named)
    options, key, label = locked
    runtime = Runtime.of(task.app)
    lock = QueueLock(key, new_owner(), _seconds(task, options, named), options.limit, options.scope)
    sending = sending_in(named["headers"][HEADER])
    order = order_of(task.name) if _may_replace(task, options) else ""
    holder = holder_of_message(task_id, sending, label, order=order)
    kept = before.lock if before.lock is not None and before.lock.key == key else None
    if kept is not None:
        follows = None if before.has_run(named) else kept.follows
        lock = replace(
            lock,
            owner=kept.owner,
            limit=kept.limit,
            number=kept.number,
            replaces=kept.replaces,
            follows=follows,
        )
        result = _send_on(task, before, lock, holder, named, publish)
    else:
        request = lock.request(holder)
        try:
            found, refusal = _take(runtime.store, request)
            fence = found.fence if order and isinstance(found, Lease) else None
            lock = replace(lock, owner=request.owner, number=fence)
            result = publish(**_with_lock(task, named, lock)) if refusal is None else None
        except BaseException:  # For the caller, nothing was sent. It may be interrupted, after the lock was granted.
            runtime.store.abandon(replace(lock, owner=request.owner).hold())
            raise
        if isinstance(found, Held) and isinstance(refusal, DuplicateTask):
            if before.is_one:
                return _publish_without(publish, task, named, refusal)
            return _Duplicate(task, options, lock, found, refusal).answer(named, publish)
        if refusal is not None:
            if _is_raised(refusal, options) and not _follows(before, named):
                raise refusal
            return _publish_without(publish, task, named, refusal)
    if lock.scope != UNTIL_EXPIRED:
        runtime.confirmations.add(lock.confirmed())
    return result


class _Before(NamedTuple):
    """The earlier attempt, if the message is its retry, requeued copy or replacement.

    Attributes:
        is_one: whether there is such a message.
        request: its request, if this process carries it out.
        lock: the lock that it brought with it, and still has.
    """

    is_one: bool
    request: RequestLike | None = None
    lock: QueueLock | None = None

    @classmethod
    def of(cls, task: Any, named: Mapping[str, Any], sender: Any) -> _Before:
        if sender is None or sender.request.id != named["task_id"]:
            # If a worker's main process retries, no task sends it.
            lock = lock_in(named["headers"][HEADER], task.app, task.name)
            return cls(lock is not None, None, lock)
        if header.is_new(named, sender):
            return cls(False)
        request = sender.request
        turn = turn_of(request)
        carried = {} if turn.queue_lock_ended else turn.delivered(request).carried
        return cls(True, request, lock_in(carried, sender.app, sender.name))

    def has_run(self, named: Mapping[str, Any]) -> bool:
        """Whether its body sends this message as its next attempt. The child may have died before it had begun if a
        worker's main process sends that.
        """
        return self.request is not None and (named.get("retries") or 0) != (self.request.retries or 0)

    def pass_on(self, lock: QueueLock, named: Mapping[str, Any]) -> None:
        """This message was sent with its lock."""
        if self.request is not None:
            turn = turn_of(self.request)
            turn.passes_on = lock.confirmed()
            turn.is_retried |= (named.get("retries") or 0) > (self.request.retries or 0)


def _take(store: Store, request: LockRequest) -> tuple[Lease | Held | None, DuplicateTask | LockUnavailable | None]:
    """Take the lock of a message that is about to be sent.

    Returns:
        The lease; or who has it, and why it was not taken.
    """
    try:
        found = store.acquire(request)
    except LockUnavailable as error:
        return None, error
    if isinstance(found, Lease):
        return found, None
    if not isinstance(found, Held):  # A queue lock has no record.
        return None, None
    if found.holder is None or found.holder.task_id is None:
        return found, LockUnavailable(store.server, f"the lock {request.key} is held by {FOREIGN}")
    return found, DuplicateTask(request.key, found.holder.task_id, found.holder.since, label=found.holder.label)


def _send_on(
    task: Any,
    before: _Before,
    lock: QueueLock,
    holder: Holder,
    named: Mapping[str, Any],
    publish: Callable[..., Any],
) -> Any:
    """Send a message with the lock of the one that it continues."""
    # It may have ended as the body began, whose process has died.
    if before.request is None and lock.ends_at_start and lock.follows is None:
        with suppress(LockUnavailable):
            Runtime.of(task.app).store.acquire(replace(lock.request(holder), another=None))
    result = publish(**_with_lock(task, named, lock))
    before.pass_on(lock, named)
    return result


def _follows(before: _Before, named: Mapping[str, Any]) -> bool:
    """Whether Celery sends it, for a task that a worker carries out: an error would end that task."""
    return before.is_one or is_sent_by_celery(named)


def is_sent_by_celery(named: Mapping[str, Any]) -> bool:
    """Whether it follows from a task that a worker has carried out, and no body sends it."""
    if (sender := current_worker_task()) is None:  # A main process sends what follows from a task whose child is lost.
        return named.get("parent_id") is not None
    return _is_part(named) and not header.is_sent_by_body(named, sender)


def _journal(runtime: Runtime, task_name: str, error: DuplicateTask, policy: str, task_id: str | None) -> None:
    """A call met the lock of another message as it was to be sent; `task_id` is its own if it is sent all the same."""
    now = clock.now()
    entry = Entry(
        "duplicate",
        task_name,
        without_queue(error.key),
        task_id,
        socket.gethostname(),
        os.getpid(),
        now,
        now,
        outcome=policy,
        holder=error.task_id,
        holder_since=error.since,
        label=error.label,
    )
    runtime.journal.add(entry)


class _Duplicate(NamedTuple):
    """A call whose lock another message has: the `lock` that this call would have, and the hold that was `found`."""

    task: Any
    options: Options
    lock: QueueLock
    found: Held
    error: DuplicateTask

    def answer(self, named: Mapping[str, Any], publish: Callable[..., Any]) -> Any:
        """What the caller gets; its message is sent, or is not."""
        if _is_part(named):
            return self._send_following(named, publish)
        policy = self._policy()
        logger.info("%s, on_duplicate=%s: %s", self.task.name, policy, self.error)
        self._say(policy, named["task_id"] if policy == "replace" else None)
        if policy == "replace":
            return self._send_instead(named, publish)
        if policy == "raise":
            raise self.error
        if policy == "skip":
            error = TaskRevokedError(f"skipped: {self.error}")
            return EagerResult(uuid(), error, states.REVOKED, name=self.task.name)
        return DuplicateResult.of(self.task, self.error)

    def _policy(self) -> DuplicatePolicy:
        can_replace = _may_replace(self.task, self.options)
        allowed = [policy for policy in DUPLICATE_POLICIES if policy != "replace" or can_replace]
        policy: DuplicatePolicy = chosen_policy(
            "on_duplicate", self.options.on_duplicate, self.task, self.error, allowed
        )
        return policy

    def _say(self, policy: str, sent_as: str | None) -> None:
        error = self.error
        _journal(Runtime.of(self.task.app), self.task.name, error, policy, sent_as)
        signals.lock_duplicate.send(
            sender=self.task, task_id=error.task_id, key=error.key, duplicate=error, policy=policy
        )

    def _send_following(self, named: Mapping[str, Any], publish: Callable[..., Any]) -> Any:
        """Send a part of a canvas, which is to end as the message that has the lock ends.

        An answer to its sender would not reach those who wait for it, nor start what follows from it.
        """
        task, holder = self.task, self.found.holder
        leader = None if holder is None else Target.waiting(holder)
        is_able = ends.may_be_followed(task, Runtime.of(task.app).settings, self.lock.scope)
        if leader is None or leader.task_id == named["task_id"] or not is_able or self._wants_a_run_of_its_own(named):
            return _publish_without(publish, task, named, self.error)
        logger.info("%s[%s] follows: %s", task.name, named["task_id"], self.error)
        self._say("follow", named["task_id"])
        # The owner that asked may have a tombstone, and the follower may take the lock one day.
        return publish(**_with_lock(task, named, replace(self.lock, owner=new_owner(), follows=leader)))

    def _wants_a_run_of_its_own(self, named: Mapping[str, Any]) -> bool:
        """Whether the newest arguments are to count. A part replaces nothing: equal parts would end each other."""
        try:
            return self._policy() == "replace"
        except Exception as error:  # It is the user's.
            if not is_sent_by_celery(named):
                raise
            logger.warning(
                "%s[%s] follows, because its on_duplicate failed: %r", self.task.name, named["task_id"], error
            )
            return False

    def _send_instead(self, named: Mapping[str, Any], publish: Callable[..., Any]) -> Any:
        """Send the message, and then have it take the place of the one that has the lock, unless that starts before.

        So one of the two runs, wherever the sender stops: the older one, until the newest says that it has come.
        """
        task, runtime, sending = self.task, Runtime.of(self.task.app), sending_in(named["headers"][HEADER])
        # Newer than the message that it found: that counts if the store does not hear of this one from here. Otherwise
        # it is the newest at that time by the store's clock: those of senders differ.
        number = (self.found.fence or 0) + 1
        # The owner that asked may have a tombstone.
        lock = replace(self.lock, owner=new_owner(), number=number, replaces=True)
        result = publish(**_with_lock(task, named, lock))
        label = self.found.holder.label if self.found.holder else ""  # The same for both calls.
        holder = holder_of_message(named["task_id"], sending, label, order=order_of(task.name))
        older_for = min(self.found.remaining, MAX_QUEUE_TTL)
        try:
            newest = replace(lock, number=None)  # The store gives it one.
            runtime.store.acquire(newest.request_in_order(holder, task.name, stops=True, older_for=older_for))
        except LockUnavailable as error:  # Its worker has said so already, or does when the message starts.
            logger.info("%s: a message that was replaced may still run: %s", lock.key, error)
        runtime.confirmations.add(lock.confirmed())
        return result


def _may_replace(task: Any, options: Options) -> bool:
    """Whether a message may take the place of another one that waits."""
    policy = options.on_duplicate
    return policy == "replace" or (callable(policy) and replaces(task, options, Runtime.of(task.app).settings))


def _is_raised(error: Exception, options: Options) -> bool:
    """Whether a new message is not sent because of this."""
    return options.on_send_unavailable == "raise" or isinstance(error, WrongLockServer)


def _is_part(named: Mapping[str, Any]) -> bool:
    """Whether something follows from the message, or it is a part of something that must not be left waiting."""
    return any(named.get(name) for name in _OF_CANVAS)


def _with_lock(task: Any, named: Mapping[str, Any], lock: QueueLock | None) -> dict[str, Any]:
    """What `apply_async` was given, with this lock in the header; None for none."""
    carried = {name: part for name, part in named["headers"][HEADER].items() if name != "queue"}
    if lock is not None:
        carried["queue"] = lock.part(task.name)
    return {**named, "headers": {**named["headers"], HEADER: carried}}


def _publish_without(publish: Callable[..., Any], task: Any, named: Mapping[str, Any], why: Exception) -> Any:
    log = logger.info if isinstance(why, DuplicateTask) else logger.warning
    log("%s[%s] is sent without a lock: %s", task.name, named["task_id"], why)
    return publish(**_with_lock(task, named, None))


def _seconds(task: Any, options: Options, named: Mapping[str, Any]) -> float:
    """How long the message may keep others from being sent, counted from now."""
    if options.scope == UNTIL_EXPIRED:
        return float(options.queue_ttl or 0)
    delay, life = 0.0, None
    if "countdown" in named or "eta" in named:
        delay = _seconds_until(named.get("countdown")) or _seconds_until(named.get("eta")) or 0.0
    if options.queue_ttl is not None:
        return min(delay + options.queue_ttl, MAX_QUEUE_TTL)
    if (expires := named.get("expires", task.expires)) is not None:
        life = _seconds_until(expires)
    return min((delay + QUEUE_TTL if life is None else life) + MARGIN, MAX_QUEUE_TTL)


def _seconds_until(when: Any) -> float | None:
    """Seconds until `when`, 0 if it is past; None if it is not given, or Celery will refuse it."""
    if when is None:
        return None  # As for most messages.
    with suppress(ValueError, OverflowError):
        if isinstance(when, str):  # From a retry.
            when = maybe_iso8601(when)
        if isinstance(when, datetime):
            when = maybe_make_aware(when).timestamp() - clock.wall()
    return max(float(when), 0.0) if is_seconds(when) else None
