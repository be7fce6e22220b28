"""How tasks end on a result backend: with the stock Task, with ours, and as reported by a copy of the message.

`python -m tests.contrib.endings` compares on the backends of django-celery-results, for which Django must be set up.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID

from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import Ignore
from kombu.utils.uuid import uuid

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.task import decide

SERIALIZERS = ("json", "pickle", "yaml", "msgpack")

#: Longer than any answer takes.
PATIENCE = 60


class Odd(Exception):
    """Its constructor takes another argument than it passes on."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Keyed(Exception):
    """Pickle cannot restore it."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class Mutable:
    """Has another value each time it is serialized."""

    def __init__(self) -> None:
        self.written = 0

    def __json__(self) -> int:
        self.written += 1
        return self.written

    def __reduce__(self) -> Any:
        self.written += 1
        return int, (self.written,)


def _raise(error: Exception) -> Any:
    raise error


#: Ends that are recorded.
PLAIN: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "minus one": lambda: -1,
    "float": lambda: 3.5,
    "ten thousand million": lambda: 10**10,
    "large number": lambda: 2**100,
    "text": lambda: "text",
    "empty": lambda: "",
    "list": lambda: [1, [2], None],
    "dict": lambda: {"a": 1},
    "with result": lambda: {"result": {"b": [1]}, "traceback": "t", "status": "x"},
    "type and value": lambda: {"__type__": "bytes", "__value__": "x"},
    "ValueError": lambda: _raise(ValueError("x", 1)),
    "KeyError": lambda: {}["k"],
    "no arguments": lambda: _raise(RuntimeError()),
    "odd constructor": lambda: _raise(Odd(7)),
    "not picklable": lambda: _raise(Keyed(reason="r")),
    "OSError": lambda: os.stat("/nowhere/at/all"),
}


def _local() -> Any:
    class Local(Exception):
        pass

    raise Local("x")


#: Ends that are not recorded; a copy says so.
OTHER: dict[str, Callable[[], Any]] = {
    "object": object,
    "written down": Mutable,
    "large": lambda: "x" * 100_000,
    "large list": lambda: [1] * 10_000,
    "local class": _local,
    "bytes": lambda: b"bytes",
    "not text": lambda: b"\xff\x00",
    "nested": lambda: {"a": [{"b": (1, {"c": None})}]},
    "number keys": lambda: {1: "a", 2: "b"},
    "tuple": lambda: (1, 2),
    "set": lambda: {1},
    "datetime": lambda: datetime(2026, 11, 22, 3, 4, 5, 678, timezone.utc),
    "date": lambda: date(2026, 11, 22),
    "Decimal": lambda: Decimal("1.10"),
    "UUID": lambda: UUID(int=7),
    "UnicodeDecodeError": b"\xff".decode,
    "with an object": lambda: _raise(ValueError(object)),
}


class Overriding(KeyValueStoreBackend):  # type: ignore[misc]
    """Stores objects, as MongoDB with `bson` does."""

    stored: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return copy.deepcopy(self.stored.get(key))

    def set(self, key: str, value: Any) -> None:
        self.stored[key] = copy.deepcopy(value)

    def encode(self, data: Any) -> Any:
        return data

    def decode(self, payload: Any) -> Any:
        return payload


class Writing(Overriding):
    """Changes the dictionary that it is given, as Elasticsearch's backend does if meta is not a text."""

    def encode(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return KeyValueStoreBackend.encode(self, data)
        for name in ("result", "traceback"):
            if data.get(name):
                data[name] = self._encode(data[name])[2]
        return data

    def decode(self, payload: Any) -> Any:
        if not isinstance(payload, dict):
            return KeyValueStoreBackend.decode(self, payload)
        for name in ("result", "traceback"):
            if payload.get(name):
                payload[name] = KeyValueStoreBackend.decode(self, payload[name])
        return payload


def differences(backend: str | None, serializer: str, **conf: Any) -> list[str]:
    """The differences from the stock Task, in words."""
    return list(_differences(backend, serializer, conf))


def _differences(backend: str | None, serializer: str, conf: dict[str, Any]) -> Iterator[str]:
    app = Celery("endings", set_as_current=False, broker="memory://", backend=backend)
    app.conf.update(result_serializer=serializer, result_accept_content=[serializer], **conf)
    app.conf.singleton_lock_prefix = uuid()
    for name, end in {**PLAIN, **OTHER}.items():
        trial = _Trial(app, end)
        expected = trial.run(Task)
        found = trial.run(SingletonTask)
        if found != expected:
            yield f"{backend} {serializer} {name}: {found} instead of {expected}"
        if backend is None:
            continue  # Nobody learns of it.
        told = trial.run(SingletonTask, dies_first=True)
        if told != expected and not (name in OTHER and "ResultLost" in str(told)):
            yield f"{backend} {serializer} {name}, told by a copy: {told} instead of {expected}"


class _Trial:
    """One task and its ends."""

    def __init__(self, app: Celery, end: Callable[[], Any]) -> None:
        self._app, self._end = app, end
        self._runs = 0

    def run(self, base: type, *, dies_first: bool = False) -> object:
        """What becomes of a message; with `dies_first`, its worker dies once the lock is freed, and a copy comes."""
        self._runs, task_id = 0, uuid()
        # Always the same name, since some results contain it.
        name = "endings.task"
        self._app.tasks.pop(name, None)
        task: Any = self._app.task(name=name, base=base, shared=False)(self._body)
        task.bind(self._app)
        request = {"id": task_id, "is_eager": False, "delivery_info": {}, "retries": 0, "called_directly": False}
        request |= {"reply_to": self._app.thread_oid, "correlation_id": task_id, "hostname": "here"}
        if self._app.conf.result_backend == "rpc://":
            with self._app.amqp.producer_pool.acquire() as producer:
                self._app.backend.on_task_call(producer, task_id)
        if dies_first:
            self._without_what_follows(task, request)
        retval, info, *_ = build_tracer(name, task, app=self._app)(task_id, (), {}, request)
        if self._runs != 1:
            return f"{self._runs} runs"
        return getattr(info, "state", None), _what(getattr(info, "retval", retval)), self._stored(task_id)

    def _body(self) -> Any:
        self._runs += 1
        return self._end()

    def _without_what_follows(self, task: Any, request: dict[str, Any]) -> None:
        task.push_request(**request)
        try:
            task()
        except Ignore:
            raise
        except Exception:  # noqa: BLE001 - one of the ends
            pass
        finally:
            task.pop_request()

    def _stored(self, task_id: str) -> object:
        if not self._app.conf.result_backend or self._app.conf.result_backend.startswith("disabled"):
            return None
        if self._app.conf.result_backend == "rpc://":
            result = self._app.AsyncResult(task_id)
            try:
                value = result.get(timeout=PATIENCE, propagate=False)
            except Exception as error:  # noqa: BLE001 - nobody can read it
                return "unreadable", _what(error)
            return result.state, _what(value)
        try:
            meta = self._app.backend.get_task_meta(task_id, cache=False)
        except Exception as error:  # noqa: BLE001 - as above
            return "unreadable", _what(error)
        return meta["status"], _what(meta["result"])


def _what(value: Any) -> object:
    """A value that can be compared, with its type."""
    if isinstance(value, BaseException):
        attributes = {name: it for name, it in vars(value).items() if name != "text"}
        return type(value).__module__, type(value).__qualname__, _without_addresses(value.args), str(attributes)
    return type(value).__name__, _without_addresses(value)


def _without_addresses(value: Any) -> str:
    return " ".join(word for word in repr(value).split() if "0x" not in word)


def _of_django() -> list[str]:
    import django
    from django.conf import settings
    from django.core.management import call_command

    locmem = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    database = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    apps = ["django.contrib.contenttypes", "django_celery_results"]
    settings.configure(INSTALLED_APPS=apps, DATABASES=database, CACHES=locmem, USE_TZ=True)
    django.setup()
    call_command("migrate", verbosity=0)
    return [
        difference
        for backend, serializer in product(("django-cache", "django-db"), SERIALIZERS)
        for difference in differences(backend, serializer)
    ]


#: As if the first execution had had the time to store its result.
settle_at_once = partial(setattr, decide, "SETTLING", 0.0)


if __name__ == "__main__":
    settle_at_once()
    found = _of_django()
    print("\n".join(found))
    sys.exit(1 if found else 0)
