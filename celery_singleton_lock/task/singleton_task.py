"""SingletonTask: the path of one message.

`__call__` → options → key → `run_under_lock`: `acquisition` → `run`.

The lock is taken in `__call__`, in the process that runs the body, right before the body, and freed right after it: so
it covers messages sent by name or by another program as well, and a caller that sees the result finds the lock free.
What belongs to one execution lives in its request and its lease; the task object is shared between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

from celery import Task
from celery.utils import uuid
from celery.utils.log import get_logger

from celery_singleton_lock._celery import current_worker_task, forget_task, with_dumped_models
from celery_singleton_lock.errors import InvalidOption, LockConflict, LockLost
from celery_singleton_lock.keys.key import (
    CallKey,
    check_lock_key,
    key_of_call,
    key_of_choice,
    key_of_queue,
    key_of_text,
)
from celery_singleton_lock.lease import Lease, unheld
from celery_singleton_lock.options.app import Settings, accepted
from celery_singleton_lock.options.rules import CallOptions, ConflictPolicy, DuplicatePolicy
from celery_singleton_lock.options.task import (
    Options,
    check_accepted,
    check_call,
    check_task,
    options_for,
    raw_attribute,
)
from celery_singleton_lock.options.words import wrong_in_call
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import entrance, header, interrupt, queue_lock, sending
from celery_singleton_lock.task.message import Message, RequestLike, TaskLock
from celery_singleton_lock.task.queue_lock import OF_EACH_MESSAGE, Queued
from celery_singleton_lock.task.run import run_under_lock
from celery_singleton_lock.task.turn import Execution, Turn, message_of, record_started, share, turn_of

logger = get_logger(__name__)

#: Positional arguments of `apply_async`, after those of the task.
_BY_PLACE = ("task_id", "producer", "link", "link_error", "shadow")


class SingletonTask(Task):  # type: ignore[type-arg]
    """A task of which only one execution at a time runs for the same key, on all workers together.

    Each option is a class attribute: set it in `@app.task(...)` or in a subclass. None means the app's setting
    (`singleton_lock_ttl` for `lock_ttl`), or else the default below. Called directly, `task(...)`, it is a plain
    function and takes no lock.
    """

    abstract = True

    #: What makes two calls the same. None: all arguments, with defaults applied; a list of arguments or parts of them,
    #: such as "order.id" ([]: the task's name alone); a template such as "tenant:{tenant_id}"; or a callable of the
    #: dictionary of arguments. All of them see the arguments in the form in which a message carries them.
    lock_key: Any = None  # No ClassVar, here and for two others: pyright would refuse a static method in a subclass.

    #: The name that goes into the key; by default the task's. Tasks with the same name exclude each other.
    lock_name: ClassVar[str | None] = None

    #: When the lock is held. "while_executing" (default): while the task runs. Otherwise the message takes it when it
    #: is sent, so that no second one waits: "until_executing" until the task starts, "until_executed" until it has
    #: ended, "until_and_while_executing" until it starts, and then while it runs, "until_expired" for `lock_queue_ttl`
    #: seconds.
    lock_scope: ClassVar[str | None] = None

    #: What happens to a call if another message has its lock. "existing" (default): the caller gets that message's
    #: result, a `DuplicateResult`; "raise": `DuplicateTask`; "skip": a result that is REVOKED; "replace" (with
    #: "until_executing" and "until_and_while_executing"): it is sent, and the message that waits ends as REVOKED, with
    #: `LockSuperseded`, and never runs; or a callable of (task, duplicate) that returns one of these. A part of a
    #: canvas, or a call with callbacks, is sent and ends as the other message does; with "replace" it runs by itself.
    on_duplicate: DuplicatePolicy | Callable[..., Any] | None = None

    #: Seconds (1 to 2592000) for which a message that waits can keep others from being sent, and the lock of a retry be
    #: kept, beyond its countdown; None (default): until it expires, or for an hour. With "until_expired": seconds for
    #: which no second message is sent.
    lock_queue_ttl: ClassVar[float | None] = None

    #: What to do if the lock server does not answer when a message is sent. "send" (default): send it without a lock;
    #: "raise": raise `LockUnavailable`.
    on_send_unavailable: ClassVar[Literal["send", "raise"] | None] = None

    #: Seconds (1 to 86400; default 30) that a lease lasts without renewal, and so how long a lock outlives its host.
    #: The heartbeat renews it, so it does not limit how long a task may run.
    lock_ttl: ClassVar[float | None] = None

    #: Seconds (default 0) to wait for a held lock, in the worker's slot, before it counts as a conflict.
    lock_wait: ClassVar[float | None] = None

    #: What to do if another execution holds the lock. "skip" (default): end as REVOKED; "raise": fail with
    #: `LockConflict`; "retry": try again later, without spending `max_retries`; "reject": reject the message, which a
    #: dead-letter queue may take if it is acknowledged late; "join": wait, and end as that execution ends, without
    #: a run; "rerun": wait as "retry" does, but of all that wait only the newest runs; "replace": the same, and stop
    #: the older one that runs; or a callable of (task, conflict) that returns one of the first five. A message that has
    #: begun, such as a retry, waits, whatever this says.
    on_conflict: ConflictPolicy | Callable[..., Any] | None = None

    #: How often "retry" puts an execution back before it fails with `LockConflict`; None: without a limit.
    lock_conflict_retries: ClassVar[int | None] = None

    #: "abort" (default): stop the task before its lease can end for others; "warn": log a warning, and let it go on.
    on_lock_lost: ClassVar[Literal["abort", "warn"] | None] = None

    #: What to do if the lock server does not answer. "retry" (default): put the message back with a delay; "raise":
    #: fail with `LockUnavailable`; "run": run without a lock.
    on_unavailable: ClassVar[Literal["retry", "raise", "run"] | None] = None

    #: True: keep the lock between `self.retry()` and the next attempt, so that no other execution runs in between.
    #: False (default): each attempt takes it anew.
    lock_retain_on_retry: ClassVar[bool | None] = None

    #: Seconds (default 0) that the lock is held at least, even if the task ends sooner: if two beats send a job twice,
    #: and their clocks differ by less than this, it runs once. Neither a retry nor the run after a crash waits for it.
    lock_at_least_for: ClassVar[float | None] = None

    #: How many executions may hold the lock at once (1 to 1000; default 1).
    lock_limit: ClassVar[int | None] = None

    #: Failures that Celery logs without a traceback, which would only show this package. The loss of a lock is an error
    #: in the log anyway.
    throws: tuple[type[Exception], ...] = (LockConflict, LockLost)

    #: Represents a message in the worker's main process, which looks after the locks of its children.
    Request = "celery_singleton_lock.worker.request:SingletonRequest"

    #: Whether STARTED is to be recorded: `track_started`, kept here. We record it, after acquiring; Celery would do so
    #: before the lock is asked for, and a refused copy would overwrite the state of the execution that runs.
    tracks_started: ClassVar[bool] = False

    #: Whether it is one of Celery's own tasks, which `Celery(task_cls=SingletonTask)` makes singletons too.
    is_builtin: ClassVar[bool] = False

    #: `run` with its guard, and as it was, see `entrance`; None for both if it has none.
    guarded_run: ClassVar[tuple[Any, Any]] = None, None

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind the task to its app, and check its options.

        Not in `on_bound`, which does nothing in Celery's own task, so that many who override it do not call on.

        Raises:
            InvalidOption: an option is unknown or not allowed, or the body would run without its lock.
        """
        super().bind(app)
        cls.is_builtin = cls.name is not None and cls.name.startswith("celery.")
        if cls.name is None or cls.is_builtin:
            return app
        try:
            check_task(cls, SingletonTask)
            entrance.check(cls, SingletonTask)
            run = object.__new__(cls).run
            entrance.check_synchronous(cls.name, run)
            check_lock_key(cls.name, raw_attribute(cls, "lock_key"), run)
        except Exception:
            forget_task(app, cls.name)
            raise
        entrance.guard(cls, SingletonTask)
        if cls.track_started:
            cls.tracks_started, cls.track_started = True, False
        return app

    @property
    def lock(self) -> Lease:
        """The lease of the current execution; one that is not `held`, with fence 0, if there is no lock."""
        return turn_of(self.request).lease or unheld()

    def lock_key_of(self, *args: Any, **kwargs: Any) -> str:
        """The key of the lock that a call with these arguments takes, as logs and errors show it.

        Raises:
            InvalidKey: an argument has no stable form.
        """
        return self.call_key(Runtime.of(self.app).settings, None, args, kwargs).key

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *rest: Any,
        singleton_lock: CallOptions | Literal[False] | None = None,
        **options: Any,
    ) -> Any:
        """Like Celery's, with lock options for this call.

        Args:
            args, kwargs, rest, options: as Celery's.
            singleton_lock: False to run without a lock, or a dictionary of any of `key` (a text that replaces the
                arguments), `ttl`, `wait`, `at_least_for` (seconds), `on_conflict`, `conflict_retries`, `on_lock_lost`,
                `on_unavailable`. It travels in the message's headers; the setting `singleton_lock_accept` decides what
                workers accept.

        Raises:
            InvalidOption: `singleton_lock` is not allowed; nothing was sent.
            DuplicateTask: another message has the lock that this one takes when it is sent, with
                `on_duplicate="raise"`.
            LockUnavailable: the lock server does not answer, with `on_send_unavailable="raise"`.
        """
        # As in Celery's own, the task's id and its producer may be positional.
        named = {**dict(zip(_BY_PLACE, rest, strict=False)), **options} if rest else options
        if named or singleton_lock is not None:  # Most calls have none.
            self._add_call(singleton_lock, named)
        task_id = named["task_id"] = named.get("task_id") or uuid()
        sender = current_worker_task()
        carried = header.header_for(task_id, named, sender)
        named["headers"] = header.added(named.get("headers"), carried)
        if not sending.is_locked_when_sent(self) or (call := check_call(carried.get("call"), self.name)) is False:
            return super().apply_async(args, kwargs, *rest[len(_BY_PLACE) :], **named)
        publish = partial(super().apply_async, args, kwargs)
        return sending.send(self, call, args or (), kwargs or {}, named, publish, sender)

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *rest: Any,
        singleton_lock: CallOptions | Literal[False] | None = None,
        **options: Any,
    ) -> Any:
        """Like Celery's, under the lock; `singleton_lock` as for `apply_async`."""
        self._add_call(singleton_lock, options, applied=True)
        try:
            return super().apply(args, kwargs, *rest, **options)
        finally:
            interrupt.pass_on()

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any
    ) -> Any:
        """Like Celery's, which makes the next attempt of a message: that carries what the message does."""
        request = self.request if request is None else request
        signature = super().signature_from_request(request, args, kwargs, queue, **options)
        made = header.Made(header.of_next_attempt(request))
        return signature.set(headers=header.added(signature.options.get("headers"), made))

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Like Celery's. Once the next attempt is sent, this one has ended, even if its lock is lost meanwhile."""
        body = turn_of(self.request).body
        with nullcontext() if body is None else body.sending():
            return super().retry(*args, **kwargs)

    def on_replace(self, sig: Any) -> Any:
        """Like Celery's. Once the replacement is sent, this task has ended, as for `retry`, and copies that have joined
        it wait for the replacement.
        """
        turn = turn_of(self.request)
        turn.is_replaced = True
        body = None if self.request.is_eager else turn.body  # It runs within this task, and is not sent.
        with nullcontext() if body is None else body.sending():
            return super().on_replace(sig)

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Like Celery's. A direct call within the body, which pushes a copy of its request, is a part of the body."""
        present = self.request
        super().push_request(*args, **{**vars(present), **kwargs})  # Celery 5.4 pushes an empty one.
        if not ("id" in kwargs or present.called_directly):
            share(turn_of(present), self.request)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run under the lock if a worker or `apply` calls; plainly if a program calls the task as a function."""
        request: RequestLike = self.request
        if self.is_builtin:
            return (super().__call__ if request.called_directly else self._body())(*args, **kwargs)
        turn = turn_of(request)
        if (sender := entrance.map_item_of()) is not None:
            return entrance.call_item(self, sender, self._body(), args, kwargs)
        if request.called_directly or turn.in_body or turn.lease is not None:
            return super().__call__(*args, **kwargs)
        turn.in_body = False
        message = turn.delivered(request)
        if message.is_plain or (brought := queue_lock.brought_by(self, message)) is None:
            return self._run(request, turn, message, None, args, kwargs)
        with brought:
            return self._run(request, turn, message, brought, args, kwargs)

    def _run(
        self, request: RequestLike, turn: Turn, message: Message, brought: Queued | None, args: Any, kwargs: Any
    ) -> Any:
        """Run a message under the lock of its arguments, if it takes one."""
        following, runtime = self._body(), Runtime.of(self.app)

        def body() -> Any:
            if brought is not None:
                brought.start()
            turn.in_body = True
            try:
                return entrance.value_of(self.name, following(*args, **kwargs))
            finally:
                turn.in_body = False

        lock = self._lock_of(message, runtime.settings, args, kwargs)
        if lock is None:
            record_started(self)
            return body()
        return run_under_lock(Execution.of(self, request, turn, message, runtime, lock, brought), body)

    def _add_call(self, given: object, options: dict[str, Any], *, applied: bool = False) -> None:
        """Add the lock options of a call to what else it was given."""
        self._refuse_misplaced(options)
        if (call := check_call(given, self.name)) is None:
            return
        if not (applied or self.app.conf.task_always_eager):
            check_accepted(call, accepted(self.app.conf), self)
        headers = options.get("headers")
        made = header.given(headers, options.get("task_id"))
        headers = options["headers"] = header.added(headers, call if made is None else header.Made(made, call=call))
        if not isinstance(headers, dict):
            raise InvalidOption(
                f"headers of a call of {self.name} is {headers!r}, but must be a dictionary, in which "
                "singleton_lock travels"
            )

    def _refuse_misplaced(self, options: Mapping[str, Any]) -> None:
        """Refuse options that would do nothing; what Celery sends for a message, which may be an old one, goes on."""
        if (error := wrong_in_call(options, self.name)) is None:
            return
        if not sending.is_sent_by_celery(options):
            raise error
        logger.warning("%s, which does nothing", error)

    def _body(self) -> Callable[..., Any]:
        """`run`, or the `__call__` of a class after this one in the MRO."""
        following = super().__call__
        if getattr(following, "__func__", None) is not Task.__call__:
            return following
        # Celery's own __call__ would push a second, empty request.
        run, (guarded, unguarded) = self.run, self.guarded_run
        # Celery's autoretry, say, may have put its own there.
        return unguarded.__get__(self) if getattr(run, "__func__", run) is guarded else run

    def lock_options(self, request: RequestLike) -> Options | None:
        """The options of the lock that an execution takes; None when it takes none.

        Raises:
            InvalidOption: what the caller asked for is not allowed.
        """
        return self._options_of(message_of(request), Runtime.of(self.app).settings)

    def lock_of(self, request: RequestLike, args: Any, kwargs: Any) -> TaskLock | None:
        """The lock that an execution takes; None when it takes none.

        Raises:
            InvalidOption: what the caller asked for is not allowed.
            InvalidKey: an argument has no stable form.
        """
        return self._lock_of(message_of(request), Runtime.of(self.app).settings, args, kwargs)

    def _options_of(self, message: Message, settings: Settings) -> Options | None:
        call = message.carried.get("call")
        if call is not None and (call := check_call(call, self.name)) is not None and not message.is_applied:
            check_accepted(call, settings.accept, self)
        if call is False or not settings.enabled or self.is_builtin:
            return None
        return options_for(self, settings, call)

    def _lock_of(self, message: Message, settings: Settings, args: Any, kwargs: Any) -> TaskLock | None:
        options = self._options_of(message, settings)
        if options is None:
            return None
        if options.scope in OF_EACH_MESSAGE:
            return TaskLock(options, key_of_text(settings.prefix, self.lock_name or self.name, message.sending))
        made = self.call_key(settings, options.key, args, kwargs)
        return TaskLock(options, made.key, made.label if settings.labels else "")

    def lock_when_sent(self, call: Mapping[str, Any] | None, args: Any, kwargs: Any) -> TaskLock | None:
        """The lock that a call takes as it is sent; None when it takes none.

        Raises:
            InvalidOption: a setting is not allowed.
            InvalidKey: an argument has no stable form.
        """
        settings = Runtime.of(self.app).settings
        if not settings.enabled or self.is_builtin or self.app.conf.get("task_always_eager"):
            return None
        options = options_for(self, settings, call)
        made = self.call_key(settings, options.key, args, kwargs)
        return TaskLock(options, key_of_queue(made.key), made.label if settings.labels else "")

    def call_key(self, settings: Settings, explicit: str | None, args: Any, kwargs: Any) -> CallKey:
        """The key of a call with these arguments, or with a text in their place."""
        lock_name = self.lock_name or self.name
        if explicit is not None:
            return key_of_choice(settings.prefix, lock_name, explicit)
        args, kwargs = with_dumped_models(self, args, kwargs)
        return key_of_call(settings.prefix, lock_name, self.name, self.lock_key, self.run, args, kwargs)
