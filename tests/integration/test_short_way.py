"""How few calls a plain message costs: a measure without noise, unlike time."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from celery import Celery, Task
from celery.app.trace import build_tracer

import celery_singleton_lock
from celery_singleton_lock import SingletonTask
from tests.redis_server import RedisServer

_FOLDER = str(Path(celery_singleton_lock.__file__).parent)

#: Messages that are counted, and those before that, which open connections and fill caches.
COUNTED, BEFORE = 20, 20


class Counts:
    """The calls of `COUNTED` messages of a task through Celery's tracer, each of a key of its own."""

    def __init__(self, task: Any) -> None:
        trace = build_tracer(task.name, task, app=task.app)
        self.calls, self.ours = 0, Counter[tuple[str, str]]()
        for number in range(BEFORE + COUNTED):
            task_id = f"id-{number}"
            request = {"id": task_id, "root_id": task_id, "retries": 0, "is_eager": False, "delivery_info": {}}
            before = sys.getprofile()
            sys.setprofile(self._note if number >= BEFORE else before)
            try:
                trace(task_id, (number,), {}, request)
            finally:
                sys.setprofile(before)

    @property
    def functions(self) -> set[tuple[str, str]]:
        """Those of this package that most of the messages pass: their modules and names."""
        return {it for it, times in self.ours.items() if times > COUNTED / 2}

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(_FOLDER) and "<" not in name:
            self.ours[file.removeprefix(_FOLDER), name] += 1


def test_plain_message_costs_fewer_calls_than_a_lock_of_redis_py_in_the_task(redis_server: RedisServer) -> None:
    app = Celery("shop", broker="memory://", backend=None, set_as_current=False)
    app.conf.update(singleton_lock_backend=redis_server.url, task_ignore_result=True)

    def job(number: int) -> None:
        pass

    plain, ours = (Counts(app.task(name=str(base), base=base, shared=False)(job)) for base in (Task, SingletonTask))
    # redis-py's takes 392. Each Python counts in another way.
    assert sys.version_info[:2] != (3, 11) or (ours.calls - plain.calls) / COUNTED <= 345
    assert len(ours.functions) <= 130
    assert len({module for module, _ in ours.functions}) <= 33
