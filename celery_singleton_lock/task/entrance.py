"""A body begins through `SingletonTask.__call__`, which takes its lock, or not at all.

Other people's code stands around a body: a framework's base class whose `__call__` opens a context, a mixin, an
instrumentation. What comes before ours and calls `run` itself would run the body without its lock. As far as its code
shows that, the task is refused when it is bound (`check`); whatever else there may be is stopped where the body would
begin (`guard`).

Functions that return before their work is done are refused, too. Celery calls an `async def`, or a function that
yields, like any other, and gets a coroutine or a generator: nothing has run yet, and the lock would be free before
anything does, even if a third-party pool runs the coroutine afterwards.

`task.map`, `task.starmap` and `task.chunks` make one message, and in it one call for each item: Celery's own tasks of
these names call the exclusive task as a function, within their own message. Each call takes the lock of its arguments,
as `apply` does: for that call only, and renewed while it runs. But a call has no message that could be put back,
skipped or remembered. So if the lock is held, the call waits in place: as long as `lock_wait` says, or, with
`on_conflict="retry"`, until the lock is free. A call that cannot get its lock fails, and the map with it: a made-up
result would be worse. In a group of signatures, each one has a message, a state and a policy.
"""

from __future__ import annotations

import functools
import inspect
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

from celery import Task
from celery.app.task import Context

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import current_task, innermost_request, pop_task, push_task
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.rules import WAITING_POLICIES
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import interrupt
from celery_singleton_lock.task.message import HEADER, RequestLike, TaskLike
from celery_singleton_lock.task.run import run_under_lock
from celery_singleton_lock.task.turn import Execution, this_thread, turn_of

_CALL_ON = "super().__call__(*args, **kwargs)"

_INSTEAD = (
    "make it a plain function that runs the coroutine to its end, such as `def job(x): return asyncio.run(work(x))`, "
    "or returns a list of what a generator yields"
)

#: Celery's own tasks that call another one for each item; chunks are sent as the second.
_MAPS = ("celery.map", "celery.starmap")


def check(task: Any, base: type) -> None:
    """Refuse a task class derived from `base` whose body would be called past it, when it is bound.

    Raises:
        InvalidOption: it would be called by another class, or by a strategy of its own.
    """
    if task.Strategy != Task.Strategy:
        raise InvalidOption(
            f"task {task.name} has the Strategy {cleaned.value_shown(task.Strategy)}, which may call it for several "
            "messages at once, or without one, and so without a lock; use Celery's own, and leave celery-batches to a "
            "plain task, which sends a call of an exclusive task for each key, or takes a celery_singleton_lock.Lock"
        )
    for other in _before(task, base):
        if _calls_run_itself(vars(other)["__call__"]):
            raise InvalidOption(
                f"task {task.name} would run without its lock: {_name(other)} calls `run` itself, before "
                f"{base.__name__}.__call__ takes the lock; {_instead(task, other, base)}"
            )


def guard(task: Any, base: type) -> None:
    """Have `run` of a task class refuse to begin in a delivered message, or in `apply`, outside of its lock; `__call__`
    calls it as it was before.
    """
    run = inspect.getattr_static(task, "run")
    function = run.__func__ if isinstance(run, staticmethod) else run
    if function is task.guarded_run[0] or not isinstance(run, (staticmethod, FunctionType)):
        return

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _is_outside(task):
            others = " or ".join(map(_name, _before(task, base)))
            raise InvalidOption(
                f"task {task.name} does not run without its lock, which {base.__name__}.__call__ takes, once for each "
                f"message; {others or 'what called `run`'} must call that, by {_CALL_ON} or as the task itself"
            )
        return function(*args, **kwargs)

    task.run = staticmethod(guarded) if isinstance(run, staticmethod) else guarded
    task.guarded_run = guarded, run


def check_synchronous(task_name: str, run: Callable[..., Any]) -> None:
    """Refuse a function that is asynchronous, or a generator, when the task is bound.

    Raises:
        InvalidOption: it is; a function that only returns a coroutine or a generator is not known before it runs.
    """
    if (kind := _kind(run)) is not None:
        raise InvalidOption(
            f"task {task_name} is {kind}, which returns before it has run: its lock would protect nothing; {_INSTEAD}"
        )


def value_of(task_name: str, value: Any) -> Any:
    """The value that the function returned.

    Raises:
        InvalidOption: the work has not run yet; it is dropped.
    """
    kind = type(value)
    if value is None or not (hasattr(kind, "__await__") or hasattr(kind, "throw") or hasattr(kind, "athrow")):
        return value
    if inspect.iscoroutine(value):
        value.close()  # Otherwise Python warns that nobody has awaited it.
    raise InvalidOption(
        f"task {task_name} returned {type(value).__name__!r}, which is yet to run, when its lock was about to be "
        f"freed; {_INSTEAD}"
    )


def map_item_of() -> TaskLike | None:
    """The task that calls another one for each item in this thread; None if there is none.

    If an item's function calls a task, the item is the caller: Celery keeps a stack of what runs.
    """
    task = current_task()
    return task if task is not None and task.name in _MAPS else None


def call_item(task: TaskLike, sender: TaskLike, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the task's function for one item, under the lock of these arguments.

    Raises:
        LockConflict: the lock is held, and was for as long as this may wait.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the function was stopped.
    """
    request = _request_of_item(sender.request, args, kwargs)
    lock = task.lock_of(request, args, kwargs)

    def body() -> Any:
        return value_of(task.name, function(*args, **kwargs))

    push_task(task, request)
    try:
        if lock is None:
            return body()
        own, turn = lock._replace(options=_options_of_item(lock.options)), turn_of(request)
        item = Execution.of(task, request, turn, turn.delivered(request), Runtime.of(task.app), own)
        return run_under_lock(item, body)
    finally:
        pop_task(task)
        interrupt.pass_on()


def _is_outside(task: Any) -> bool:
    """Whether this thread carries out a message, an `apply` or an item of a map of the task, and not its body."""
    request = innermost_request(task)
    if request is None or request.called_directly:  # A plain function call, but not in a map.
        return map_item_of() is not None
    return not turn_of(request).in_body


def _before(task: Any, base: type) -> list[type]:
    """The classes whose `__call__` comes before that of `base`, and does not only wrap it."""
    mro = task.__mro__
    having = (cls for cls in mro[: mro.index(base)] if "__call__" in vars(cls))
    return [cls for cls in having if inspect.unwrap(vars(cls)["__call__"]) is not vars(base)["__call__"]]


def _calls_run_itself(method: Any) -> bool:
    """Whether the code of a `__call__`, as far as it has any, names `run` and no other `__call__`.

    What it calls in the end may be hidden in other functions, and is then seen by the guard alone.
    """
    names = {*_names(getattr(inspect.unwrap(method), "__code__", None))}
    return "run" in names and "__call__" not in names


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)


def _name(cls: type) -> str:
    method: Callable[..., Any] = inspect.unwrap(vars(cls)["__call__"])
    return f"{method.__module__}.{getattr(method, '__qualname__', '__call__')}"


def _instead(task: Any, other: Any, base: type) -> str:
    """What to do about the `__call__` of `other`."""
    if other is task and task.app.conf.task_annotations:
        return (
            "if task_annotations sets it, use the key '@__call__' with a function that gets the present __call__ and "
            f"returns one that calls it, or a base class whose __call__ calls {_CALL_ON}"
        )
    if issubclass(other, base):
        return f"have it call {_CALL_ON} instead"
    # The class that has both among its bases.
    joined = next(cls for cls in reversed(task.__mro__) if issubclass(cls, base) and issubclass(cls, other))
    bases = sorted(joined.__bases__, key=lambda cls: not issubclass(cls, base))
    order = f"class {joined.__name__}({', '.join(cls.__name__ for cls in bases)})"
    derived = "" if issubclass(other, Task) else f"derive {other.__name__} from celery.Task and "
    return f"{derived}write {order}, so that it runs under the lock, or have it call {_CALL_ON} instead"


def _kind(function: Any) -> str | None:
    """What kind of function returns before it has run; None for any other."""
    # Do not follow `functools.wraps`: a plain function around an asynchronous one is what we ask for.
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(type(function), "__call__", function)  # An object that can be called.  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "an `async def`"
    return "a generator" if inspect.isgeneratorfunction(function) else None


def _options_of_item(options: Options) -> Options:
    """A task's options, as they apply to an item."""
    waits = options.on_conflict in WAITING_POLICIES and options.conflict_retries is None
    # Within a task that holds a lock, the wait must end: the other task might wait for that lock.
    wait = math.inf if waits and not this_thread.owners else options.wait
    silence = "wait" if options.on_unavailable == "retry" else options.on_unavailable
    return replace(options, on_conflict="raise", wait=wait, on_unavailable=silence)


def _request_of_item(of_sender: RequestLike, args: Any, kwargs: Any) -> Context:
    """The request of one call: as `apply` makes it, with the id of the map and nothing else copied."""
    return Context(
        id=of_sender.id,
        hostname=of_sender.hostname,
        args=args,
        kwargs=kwargs,
        is_eager=True,
        **{HEADER: {"id": of_sender.id, "sent": secrets.token_hex(16)}},
    )
