"""The readable label beside the digest in a key."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_singleton_lock import LockConflict, SingletonTask
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.stores.base import Held
from tests.unit.keyed import lock_of, task_of

#: The largest number of characters in a label.
MAX_LABEL = 60


class Kind(enum.Enum):
    FULL = "full"


def sync(tenant: Any, kind: Any = "full", **others: Any) -> None: ...


def label_of(lock_key: Any, *args: Any, **kwargs: Any) -> str:
    return str(lock_of(task_of(sync, lock_key), args, kwargs).label)


@pytest.mark.parametrize(
    ("lock_key", "args", "shown"),
    [
        (None, (7,), "tenant=7, kind='full', others=<dict>"),
        (["tenant"], (7,), "tenant=7"),
        (["kind", "tenant"], ("a", Kind.FULL), "kind='full', tenant='a'"),
        (["tenant"], (None,), "tenant=None"),
        (["tenant"], (1.5,), "tenant=1.5"),
        (["tenant"], ([1, 2],), "tenant=<list>"),
        ("tenant:{tenant}", ("a%b:c",), "tenant:a%b:c"),
        ("{tenant:>5}", (7,), "    7"),
        (lambda arguments: arguments["tenant"], (7,), "7"),
        (lambda arguments: f"of {arguments['tenant']}", (7,), "of 7"),
        (lambda arguments: [arguments["tenant"]], (7,), "<list>"),
    ],
)
def test_label_shows_the_parts_that_count(lock_key: Any, args: Any, shown: str) -> None:
    assert label_of(lock_key, *args) == shown


def test_arguments_that_do_not_fit_have_a_label() -> None:
    assert label_of(None) == "args=<tuple>, kwargs=<dict>"


def test_key_of_the_caller_is_its_own_label() -> None:
    assert lock_of(task_of(sync), (7,), {}, chosen="of my own").label == "of my own"


@pytest.mark.parametrize("text", ["x" * 61, "x" * 1_000_000, "\n" * 60, "\ud800" * 100, "\x1b[31m" * 20])
def test_label_is_short_and_printable(text: str) -> None:
    for shown in (label_of(["tenant"], text), label_of("{tenant}", text), label_of(lambda _: text, 1)):
        assert len(shown) <= MAX_LABEL
        assert shown.isprintable()
        assert shown.endswith("\u2026")


def test_number_of_any_size_has_a_label() -> None:
    assert len(label_of(["tenant"], 10**5000)) <= MAX_LABEL


def test_many_arguments_have_a_short_label() -> None:
    shown = label_of(None, 1, **{f"argument{number}": number for number in range(100_000)})
    assert len(shown) <= MAX_LABEL


def test_repr_of_user_objects_is_not_called() -> None:
    class Loud(set[int]):  # Only pickle can send it.
        def __repr__(self) -> str:
            raise AssertionError

    assert label_of(["tenant"], Loud()) == "tenant=<Loud>"


def test_conflict_shows_the_label() -> None:
    held = Held(None, "owner", 5.0)
    assert str(held.conflict("k")).startswith("k is held by")
    assert str(LockConflict("k", "t", 5.0, label="tenant=7")).startswith("k (tenant=7) is held by task t")
    assert LockConflict("k", "t", 5.0, label="tenant=7").args == ("k", "t", 5.0, "tenant=7"), (
        "a result backend keeps these as JSON"
    )


def test_setting_keeps_labels_out_of_the_store() -> None:
    app = Celery(set_as_current=False)
    app.conf.update(singleton_lock_backend="memory://", singleton_lock_labels=False)
    task = app.task(base=SingletonTask, name="sync", shared=False)(sync)
    assert task.lock_of(Context(headers={}, delivery_info={}), (7,), {}).label == ""
    assert task.lock_when_sent(None, (7,), {}).label == ""


def test_entry_keeps_its_label() -> None:
    entry = Entry("run", "t", "k", "id", "node", 1, 2.0, 3.0, label="tenant=7")
    assert Entry.loads(entry.dumps(9.0), 9.0) == entry
