"""As `test_replacing`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import DuplicateResult, InvalidOption, LockSuperseded, LockUnavailable, SingletonTask
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import replacing
from celery_singleton_lock.task.queue_lock import QueueLock

KEY = key_of_queue(key_of_text("singleton_lock", "job", "1"))


@pytest.fixture
def store() -> Any:
    return MemoryStore()


def lock(owner: str = "") -> QueueLock:
    return QueueLock(KEY, owner or new_owner(), 100.0, 1, "until_executing")


def queue(store: Any, task_id: str = "old") -> tuple[QueueLock, Held]:
    """A message that has the lock."""
    queued = lock()
    store.acquire(LockRequest(KEY, queued.owner, ttl=50.0, holder=Holder(task_id)))
    (held,) = store.held(KEY)
    return queued, held


def holders(store: Any) -> list[str | None]:
    return [held.holder.task_id for held in store.held(KEY)]


def test_newest_message_has_the_lock_and_the_old_one_never_runs(store: Any) -> None:
    old, found = queue(store)
    taken = replacing.take_over(store, lock(), "new", found)
    assert (holders(store), taken.old) == (["new"], found)
    replacing.supersede(store, taken.lock, "new", [old.owner])
    assert not store.free(old.hold())
    why = replacing.started(store, old)
    assert isinstance(why, LockSuperseded)
    assert why.task_id == "new"
    assert holders(store) == ["new"]
    assert store.free(taken.lock.hold())


def test_message_that_has_already_started_is_not_superseded(store: Any) -> None:
    old, found = queue(store)
    taken = replacing.take_over(store, lock(), "new", found)
    assert replacing.started(store, old) is None
    replacing.supersede(store, taken.lock, "new", [old.owner])
    assert replacing.started(store, old) is None, "its message comes again"


def test_ended_lock_supersedes_nobody(store: Any) -> None:
    old, _ = queue(store)
    store.free(old.hold())
    assert replacing.started(store, old) is None


def test_lock_may_change_hands_meanwhile(store: Any) -> None:
    """The hold that was found has ended: another message has the lock, or nobody."""
    old, found = queue(store)
    store.free(old.hold())
    other, _ = queue(store, "other")
    taken = replacing.take_over(store, lock(), "new", found).old
    assert taken is not None
    assert taken.owner == other.owner
    (new,) = store.held(KEY)
    store.free(new.hold(KEY, ttl=1.0, limit=1))
    assert replacing.take_over(store, lock(), "newest", found).old is None
    assert holders(store) == ["newest"]


@pytest.mark.parametrize(
    ("left", "newest", "least"),
    [(3000.0, 5.0, 2990.0), (20.0, 5.0, 86_000.0), (20.0, 100_000.0, 100_000.0), (None, 5.0, 86_000.0)],
)
def test_message_is_superseded_for_as_long_as_it_may_come(
    store: Any, monkeypatch: pytest.MonkeyPatch, left: float | None, newest: float, least: float
) -> None:
    """The remaining time of an unconfirmed lock says nothing about that."""
    said: list[float] = []
    monkeypatch.setattr(store, "refuse", lambda key, holder, record, **_: said.append(record.seconds))
    old, found = queue(store)
    known = None if left is None else replace(found, remaining=left)
    replacing.supersede(store, replace(lock(), seconds=newest), "new", [old.owner], known)
    assert least <= said[0] <= max(least, 86_460.0)


class TestNothingIsSent:
    def test_old_message_gets_its_lock_back(self, store: Any) -> None:
        old, found = queue(store)
        replacing.give_back(store, replacing.take_over(store, lock(), "new", found))
        (held,) = store.held(KEY)
        assert (held.owner, held.holder.task_id) == (old.owner, "old")
        assert held.remaining <= found.remaining
        assert store.free(old.hold())

    def test_lock_is_not_given_back_to_a_message_that_has_started(self, store: Any) -> None:
        """Nobody would free that lock."""
        old, found = queue(store)
        taken = replacing.take_over(store, lock(), "new", found)
        store.free(old.hold())
        replacing.started(store, old)
        replacing.give_back(store, taken)
        assert holders(store) == []

    def test_old_message_that_starts_meanwhile_frees_the_lock(self, store: Any) -> None:
        old, found = queue(store)
        taken = replacing.take_over(store, lock(), "new", found)
        store.free(old.hold())
        replacing.give_back(store, taken)
        replacing.started(store, old)
        assert holders(store) == []

    def test_lock_of_another_message_is_left_alone(self, store: Any) -> None:
        _, found = queue(store)
        taken = replacing.take_over(store, lock(), "new", found)
        (held,) = store.held(KEY)
        newest = replacing.take_over(store, lock(), "newest", held)
        replacing.give_back(store, taken)
        assert holders(store) == ["newest"]
        assert store.free(newest.lock.hold())


class TestSilentStore:
    @pytest.fixture
    def silent(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise LockUnavailable("memory://")

        monkeypatch.setattr(store, "refuse", fail)
        return store

    def test_old_message_runs(self, silent: Any) -> None:
        old, found = queue(silent)
        replacing.take_over(silent, lock(), "new", found)
        assert replacing.started(silent, old) is None

    def test_newest_message_keeps_the_lock(self, silent: Any) -> None:
        old, found = queue(silent)
        taken = replacing.take_over(silent, lock(), "new", found)
        replacing.supersede(silent, taken.lock, "new", [old.owner])
        assert holders(silent) == ["new"]


class TestOption:
    @pytest.mark.parametrize(
        "options", [{"lock_scope": "until_executed"}, {"lock_scope": "until_expired"}, {"lock_limit": 2}]
    )
    def test_replace_is_refused_if_nobody_knows_which_message_waits(self, app: Celery, options: dict[str, Any]) -> None:
        @app.task(
            base=SingletonTask,
            name="replacing.job",
            shared=False,
            **{"lock_scope": "until_executing", "on_duplicate": "replace", "lock_queue_ttl": 100.0, **options},
        )
        def job() -> None: ...

        with pytest.raises(InvalidOption, match=r"on_duplicate of task replacing\.job is 'replace'"):
            job.delay()

    def test_newest_message_is_sent_and_has_the_lock(self, app: Celery) -> None:
        @app.task(
            base=SingletonTask,
            name="replacing.job",
            shared=False,
            lock_scope="until_executing",
            on_duplicate=lambda task, duplicate: "replace",
        )
        def job() -> None: ...

        old, newest = job.delay(), job.delay()
        assert not isinstance(newest, DuplicateResult)
        assert old.id != newest.id
        (held,) = Runtime.of(app).store.held(key_of_queue(job.lock_key_of()))
        assert held.holder is not None
        assert held.holder.task_id == newest.id
