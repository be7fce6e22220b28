"""What a process knows about a request: no message can forge it, and it is gone with the request."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.app.task import Context
from celery.app.trace import build_tracer

from celery_singleton_lock._celery import current_worker_task
from celery_singleton_lock.lease import unheld
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task import message_identity
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.running import progress_of
from tests.unit.deliveries import bound

#: Names under which requests once kept such data, or still keep other data; and the attributes of `Progress`.
NAMES = (
    *("singleton_lease", "singleton_in_body", "singleton_settle", "singleton_owner", "singleton_lock_original"),
    *("lease", "in_body", "gives_up", "settle"),
)

VALUES = (True, "x", ["x"], {"key": "k", "owner": "o" * 32, "held": True})

_numbers = itertools.count()


def deliver(task: Any, headers: dict[str, Any]) -> Any:
    """Carry out a message with these headers as a worker does."""
    request = {"id": task.app.main, "is_eager": False, "delivery_info": {}, **headers}
    return build_tracer(task.name, task, app=task.app)(task.app.main, (), {}, request).retval


@pytest.mark.parametrize("value", VALUES)
def test_headers_of_these_names_change_nothing(app: Celery, value: object) -> None:
    headers = dict.fromkeys(NAMES, value)
    runs = []

    def body(self: Any) -> str:
        header = message_identity.header_for("other", {"task_id": "other"}, current_worker_task())
        runs.append((self.lock.held, self.lock.fence > 0, header))
        return "done"

    task = bound(app, body)
    assert deliver(task, headers) == "done"
    (held, has_fence, sent) = runs[0]
    assert (held, has_fence) == (True, True)
    assert sent["sent"]  # A new sending, as for all messages that a body sends.
    assert dict(Runtime.of(app).store.all_held(app.main)) == {}
    deliver(task, headers)
    assert len(runs) == 1  # It is remembered like any other.


@pytest.mark.parametrize("value", VALUES)
def test_no_header_makes_the_next_step_a_new_sending(app: Celery, value: object) -> None:
    """Two copies of a message send the same next step, whatever its headers are."""
    task = bound(app, lambda self: None)
    forged = {**dict.fromkeys(NAMES, value), HEADER: {"id": "x", "sent": "a" * 32}}

    def following() -> dict[str, Any]:
        _task_stack.push(task)
        task.push_request(id="x", called_directly=False, delivery_info={}, **forged)
        try:
            options = {"task_id": "next", "parent_id": "x", "root_id": "x"}
            return message_identity.header_for("next", options, current_worker_task())
        finally:
            task.pop_request()
            _task_stack.pop()

    assert following() == following() == {"id": "next", "sent": "a" * 32}


def test_progress_belongs_to_one_request_and_ends_with_it(app: Celery) -> None:
    request, other = Context({"id": "x"}), Context({"id": "x"})
    progress = progress_of(request)
    progress.lease, progress.in_body = unheld(), True
    progress.settle = partial(Runtime.of(app).record_writer.replace, "k", Record("m", b"", 1.0))
    assert progress_of(request) is progress
    assert (progress_of(other).lease, progress_of(other).in_body) == (None, None)
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None


def test_finished_request_is_not_kept(app: Celery) -> None:
    """Not even for its pending confirmation: a request that never gets that far would stay forever."""
    seen: list[weakref.ref[Context]] = []
    task = bound(app, lambda self: seen.append(weakref.ref(self.request)))
    task.push_request(id="x", called_directly=False, is_eager=False, delivery_info={}, chain=[task.si()])
    try:
        task()
        assert progress_of(task.request).settle is not None
    finally:
        task.pop_request()
    gc.collect()
    assert [ref() for ref in seen] == [None]
