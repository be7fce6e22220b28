"""Messages as a worker gets them: first its main process, then the process that carries them out.

Celery's own request is the reference: this package accepts what Celery accepts; what Celery refuses, it refuses with
its own errors, which its consumer knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.worker.request import Request
from kombu.message import Message

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime, in_memory
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task.turn import holder_of
from celery_singleton_lock.worker.request import SingletonRequest
from tests.fuzz.choices import Case, Choices, Stuck
from tests.patience import in_this_thread

CALL = {"key": "x", "ttl": 30.0, "on_conflict": "retry", "conflict_retries": 3, "at_least_for": 1.0}
PUT_BACK = {
    "retries": 0,
    "conflict": 2,
    "unavailable": 0,
    "given_up": ["0" * 32],
    "exchange": "",
    "routing_key": "celery",
}
STEP = {"task": "fuzz.job", "args": [], "kwargs": {}, "options": {"task_id": "next"}, "subtask_type": None}
DEATH = [{"queue": "celery_delayed_2", "exchange": "", "reason": "expired", "count": 1}, {"queue": "theirs"}]

#: Headers that a message may have, each with a valid value.
HEADERS: Mapping[str, Any] = {
    "retries": 1,
    "root_id": "root",
    "parent_id": "parent",
    "group": "group",
    "expires": "2999-01-01T00:00:00+00:00",
    "eta": None,
    "timelimit": [None, None],
    "origin": "gen1@host",
    "argsrepr": "()",
    "ignore_result": False,
    "replaced_task_nesting": 1,
    "stamped_headers": ["x"],
    "stamps": {"x": ["y"]},
    "shadow": None,
    "is_eager": False,
    "called_directly": False,
    "headers": {"a": "b"},
    "hostname": "h",
    "delivery_info": {"is_eager": True, "singleton_owner": "0" * 32},
    "x-death": DEATH,
    "x-first-death-queue": "celery_delayed_2",
    "singleton_lock": {
        "id": "id",
        "sent": "0" * 32,
        "replaced": "f" * 32,
        "call": CALL,
        "put_back": PUT_BACK,
        "due": "2026-01-01T00:00:00+00:00",
        "entry": "nightly",
    },
    "singleton_lock_original": ["", "", "", {}, "", "", "", True],
}
EMBEDDED = {"callbacks": [STEP], "errbacks": [STEP], "chain": [STEP, STEP], "chord": STEP}
PROPERTIES = {
    "correlation_id": "id",
    "reply_to": "r",
    "priority": 3,
    "delivery_mode": 2,
    "expiration": "60000",
    "user_id": "guest",
    "singleton_lock_original": ["x"],
    "delivery_info": {"singleton_owner": "0" * 32},
}
DELIVERY = {"exchange": "", "routing_key": "celery", "redelivered": True, "consumer_tag": "7", "is_eager": True}

#: What Celery reads from a request besides: where it refuses that, it does not reach this package.
_CELERYS = ("timelimit", "eta", "expires")


#: The number of pauses that one message may make: if it makes more, it waits forever.
PAUSES = 5


class Ran:
    """What became of one message."""

    def __init__(self) -> None:
        self.bodies = 0
        self.ends: list[str] = []
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        """Replaces `clock.sleep`."""
        self.pauses += 1
        if self.pauses > PAUSES:
            raise Stuck("the message keeps its slot, though lock server and broker are there")


def _message(choices: Choices, number: int) -> Message:
    headers = {"id": f"id{number}", "task": "fuzz.job", "lang": "py"}
    headers |= {name: choices.mutated(HEADERS[name], 2) for name in choices.some(sorted(HEADERS), most=5)}
    if isinstance(ours := headers.get("singleton_lock"), dict):
        if choices.one_in(4):
            headers["singleton_lock"] = choices.mutated(CALL, 2)  # As written by hand.
        elif ours.get("id") == "id":
            headers["singleton_lock"] = {**ours, "id": headers["id"]}
    if choices.one_in(10):
        headers["id"] = choices.value()
    embed = {name: choices.mutated(EMBEDDED[name], 2) for name in choices.some(sorted(EMBEDDED), most=2)}
    args = choices.mutated([number], 1) if choices.one_in(3) else [number]
    body = [args, choices.mutated({"y": 1}, 1) if choices.one_in(3) else {}, embed]
    properties = {name: choices.mutated(PROPERTIES[name], 1) for name in choices.some(sorted(PROPERTIES), most=3)}
    return Message(
        body=json.dumps(choices.mutated(body, 1) if choices.one_in(10) else body),
        headers=headers,
        properties=properties,
        delivery_info=choices.mutated(DELIVERY, 1) if choices.one_in(3) else {"exchange": "", "routing_key": "celery"},
        content_type=choices.mutated("application/json", 1) if choices.one_in(20) else "application/json",
        content_encoding=choices.mutated("utf-8", 1) if choices.one_in(20) else "utf-8",
        accept={"application/json"},
    )


def _made(kind: Any, message: Message, task: Any, **options: Any) -> Any:
    """The request, or Celery's error."""
    return kind(message, app=task.app, task=task, hostname="w@host", **options)


def _error_of(call: Any, *args: Any) -> BaseException | None:
    try:
        call(*args)
    except Exception as error:
        return error
    return None


def _asked_by_main_process(request: SingletonRequest) -> None:
    """Everything that the consumer's loop asks of a delivery."""
    _ = request.is_stopped_when_lost, request.is_running, request.hold(), request.info(safe=True)
    request._expected_hold("0" * 32)


def _lost(choices: Choices, request: SingletonRequest, plain: Request) -> None:
    """Its child dies, and the main process decides what becomes of the message."""
    error = choices.pick((WorkerLostError("lost"), Terminated(9)))
    for each in (plain, request):
        each.acknowledged = True
    try:
        raise error
    except Exception:
        info = ExceptionInfo()
    if _error_of(plain.on_failure, info) is None:
        request.on_failure(info)
    else:
        request._record_end(error, settled=False)
    if _error_of(getattr, plain, "_context") is None:
        request._free_kept()


def _carried_out(request: SingletonRequest, plain: Request, ran: Ran) -> None:
    failed = _error_of(plain.execute)
    ran.bodies = 0
    if failed is not None:
        return
    request.execute()
    assert ran.bodies <= 1
    assert ran.ends, "neither acknowledged nor rejected"


@contextmanager
def cases() -> Iterator[Case]:
    ran = Ran()

    def job(x: Any = 0, y: Any = 0, **others: Any) -> None:
        ran.bodies += 1

    app = Celery("fuzz", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_prefix="p", task_publish_retry=False)
    task = app.task(name="fuzz.job", base=SingletonTask, lock_key=[], shared=False)(job)
    plain = app.task(name="fuzz.plain", shared=False)(job)
    numbers = iter(range(10**9))

    def case(choices: Choices) -> None:
        kept = choices.below(8)
        message = _message(choices, next(numbers))
        ends = ran.ends = []
        ran.pauses = 0
        says = {"on_ack": lambda *_: ends.append("ack"), "on_reject": lambda *_: ends.append("reject")}
        copy = deepcopy(message)
        if _error_of(_made, Request, copy, plain) is not None:
            return
        reference = _made(Request, copy, plain)
        request = _made(SingletonRequest, message, task, **says)
        _asked_by_main_process(request)
        if kept == 0:
            _lost(choices, request, reference)
            return
        key = task.lock_key_of()
        stranger = LockRequest(key, new_owner(), ttl=600.0, holder=Holder("stranger", node="n", pid=1))
        for held in store.held(key):
            store.free(held.hold(key, ttl=1.0))  # It was kept by the case before.
        lease = store.acquire(stranger) if kept % 2 else None
        try:
            _carried_out(request, reference, ran)
            _asked_by_main_process(request)
            if lease is not None:
                assert [held.owner for held in store.held(key)] == [lease.owner], "freed for a stranger"
                assert not ran.bodies or task.lock_of(request.context, (), {}).key != key, "it ran beside another task"
        finally:
            if isinstance(lease, Lease):
                assert store.free(lease)

    with in_memory() as store, patch.object(clock, "sleep", in_this_thread(ran.pause, clock.sleep)):
        assert isinstance(store, MemoryStore)
        Runtime.of(app)
        holder_of(task, task.request)
        yield case
