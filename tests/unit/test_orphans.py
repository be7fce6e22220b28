"""Which locks of messages count as orphaned after the looks: in doubt, none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu.utils.json import dumps

from celery_singleton_lock import clock
from celery_singleton_lock.confirmations import UNCONFIRMED_TTL
from celery_singleton_lock.diagnosis import messages, orphans
from celery_singleton_lock.diagnosis.messages import Look, look_for, name_in_message
from celery_singleton_lock.diagnosis.orphans import MIN_AGE, MessageState, search
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import is_of_queue, key_of_queue, key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store
from tests.patience import sleepless

#: Seconds that a message may wait.
A_DAY = 86_400.0

Looked = Callable[[int, dict[str, Any]], Look]


@pytest.fixture
def app() -> Celery:
    return Celery("orphans", broker="memory://", set_as_current=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of this app alone."""
    store = MemoryStore()
    runtime = SimpleNamespace(store=store, settings=SimpleNamespace(prefix="orphans"))
    monkeypatch.setattr(orphans, "Runtime", SimpleNamespace(of=lambda _: runtime))
    return store


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the looks find, one after the other, and then nothing. Each entry is a `Look`, or makes one."""
    planned: list[Any] = []

    def look(_: Any, names: Any, task_ids: Any, **others: Any) -> Look:
        following = planned.pop(0) if planned else Look()
        return following if isinstance(following, Look) else following(others)

    monkeypatch.setattr(orphans, "look_for", look)
    monkeypatch.setattr(clock, "sleep", sleepless())
    return planned


def sent(
    store: Store, job: str = "report", *, age: float = 2 * MIN_AGE, ttl: float = UNCONFIRMED_TTL, lasts: float = A_DAY
) -> Lease:
    """The confirmed lock of a message."""
    holder = Holder(f"id of {job}", node="web", since=clock.wall() - age)
    key = key_of_queue(key_of_text("orphans", "job", job))
    lease = store.acquire(LockRequest(key, new_owner(), ttl=ttl, holder=holder))
    assert isinstance(lease, Lease)
    assert store.renew([Lease(key, lease.owner, ttl=lasts, fence=0, sent_at=0.0)], timeout=1) == [True]
    return lease


def runs(store: Store, task_id: str = "id of report", job: str = "report") -> Lease:
    """The lock that is held while a body runs."""
    holder = Holder(task_id, node="one@web", pid=7, since=clock.wall())
    lease = store.acquire(LockRequest(key_of_text("orphans", "job", job), new_owner(), ttl=A_DAY, holder=holder))
    assert isinstance(lease, Lease)
    return lease


def judged(app: Celery, store: Store) -> dict[str, MessageState | None]:
    found = [(key, held) for key, held in store.all_held("orphans") if is_of_queue(key)]
    return {hold.task_id: hold.state for hold in search(app, found, timeout=0.1).holds}


class TestMessageState:
    def test_lock_is_orphaned_after_two_looks_that_find_nothing(
        self, app: Celery, store: Store, looks: list[Any]
    ) -> None:
        sent(store)
        assert judged(app, store) == {"id of report": MessageState.ORPHANED}

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("by", ["task id", "owner"])
    def test_lock_is_alive_if_either_look_finds_its_message(
        self, app: Celery, store: Store, looks: list[Any], by: str, first: bool
    ) -> None:
        lease = sent(store)
        found = Look(seen={name_in_message("id of report" if by == "task id" else lease.owner)})
        looks += [found] if first else [Look(), found]
        assert judged(app, store) == {"id of report": MessageState.ALIVE}

    @pytest.mark.parametrize("first", [True, False])
    def test_lock_is_in_doubt_if_either_look_has_a_doubt(
        self, app: Celery, store: Store, looks: list[Any], first: bool
    ) -> None:
        sent(store)
        doubtful = Look(doubts=["the broker has gone"])
        looks += [doubtful] if first else [Look(), doubtful]
        assert judged(app, store) == {"id of report": MessageState.IN_DOUBT}

    def test_young_locks_and_locks_by_time_are_not_looked_for(
        self, app: Celery, store: Store, looks: list[Any]
    ) -> None:
        sent(store, "young", age=MIN_AGE - 10)
        sent(store, "by time", ttl=3600.0, lasts=3600.0)
        looks += [Look(doubts=["nobody is to ask"])]
        assert judged(app, store) == {"id of young": MessageState.YOUNG, "id of by time": MessageState.BY_TIME}
        assert len(looks) == 1

    @pytest.mark.parametrize("look", [0, 1])
    def test_lock_that_was_freed_meanwhile_has_ended(
        self, app: Celery, store: Store, looks: list[Any], look: int
    ) -> None:
        lease = sent(store)
        looks += [Look()] * look + [lambda _: Look() if store.free(lease) else None]
        assert judged(app, store) == {"id of report": MessageState.ENDED}

    def test_lock_that_changed_hands_has_ended(self, app: Celery, store: Store, looks: list[Any]) -> None:
        lease = sent(store)

        def changes_hands(_: Any) -> Look:
            store.free(lease)
            sent(store)
            return Look()

        looks += [Look(), changes_hands]
        assert judged(app, store) == {"id of report": MessageState.ENDED}

    def test_lock_is_alive_if_its_process_renews_it(self, app: Celery, store: Store, looks: list[Any]) -> None:
        lease = sent(store, lasts=20.0)

        def renews(_: Any) -> Look:
            store.renew([Lease(lease.key, lease.owner, ttl=30.0, fence=0, sent_at=0.0)], timeout=1)
            return Look()

        looks += [Look(), renews]
        assert judged(app, store) == {"id of report": MessageState.ALIVE}

    def test_lock_is_alive_if_its_task_runs(self, app: Celery, store: Store, looks: list[Any]) -> None:
        sent(store)
        runs(store)
        assert judged(app, store) == {"id of report": MessageState.ALIVE}

    def test_lock_is_orphaned_even_if_another_task_runs(self, app: Celery, store: Store, looks: list[Any]) -> None:
        sent(store)
        runs(store, "another id")
        assert judged(app, store) == {"id of report": MessageState.ORPHANED}

    def test_lock_is_in_doubt_if_somebody_waits_in_a_slot(
        self, app: Celery, store: Store, looks: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The message was acknowledged, and its worker may be too busy to answer."""
        sent(store)
        runs(store, "another id")
        held = store.held
        monkeypatch.setattr(
            store, "held", lambda key, **_: [replace(it, waiters=int(not is_of_queue(key))) for it in held(key)]
        )
        assert judged(app, store) == {"id of report": MessageState.IN_DOUBT}

    def test_oldest_locks_are_looked_for_if_there_are_too_many(
        self, app: Celery, store: Store, looks: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(orphans, "MOST", 2)
        for age in (100, 300, 200):
            sent(store, f"{age}", age=age)
        assert judged(app, store) == {
            "id of 300": MessageState.ORPHANED,
            "id of 200": MessageState.ORPHANED,
            "id of 100": MessageState.IN_DOUBT,
        }


class TestLivingWorkers:
    """A worker that does not answer leaves a doubt."""

    def test_holders_of_leases_and_earlier_answerers_are_expected_to_answer(
        self, app: Celery, store: Store, looks: list[Any]
    ) -> None:
        sent(store)
        runs(store, "another id", job="other")
        asked: list[set[str]] = []

        def answers(others: dict[str, Any]) -> Look:
            asked.append(set(others["alive"]))
            return Look(nodes={"two@web"})

        looks += [answers, answers]
        judged(app, store)
        assert asked == [{"one@web"}, {"one@web", "two@web"}]

    @pytest.mark.parametrize(
        ("ping", "by_id", "due_later", "doubts"),
        [
            ({"a": 1}, {"a": {}}, {"a": []}, ["worker b does not answer"]),
            ({"a": 1, "b": 1}, {"a": {}, "b": {}}, {"a": []}, ["worker b does not answer"]),
            ({"a": 1, "b": 1}, {"a": {}, "b": {"error": "?"}}, {"a": [], "b": []}, ["worker b does not answer"]),
            (None, None, None, ["worker b does not answer"]),
            ({"a": 1, "b": 1}, {"a": {}, "b": {}}, {"a": [], "b": []}, []),
        ],
    )  # fmt: skip
    def test_each_worker_must_answer_each_question(
        self, ping: Any, by_id: Any, due_later: Any, doubts: list[str]
    ) -> None:
        inspect = SimpleNamespace(
            ping=lambda: ping, query_task=lambda *_: by_id, scheduled=lambda: due_later, limit=None
        )
        found = Look()
        app = SimpleNamespace(control=SimpleNamespace(inspect=lambda **_: inspect))
        messages._ask_workers(found, app, None, ["id"], {"b"}, 0.1)
        assert found.doubts == doubts

    def test_messages_that_workers_hold_are_seen(self) -> None:
        inspect = SimpleNamespace(
            ping=lambda: {"a": 1},
            query_task=lambda *_: {"a": {"runs": ["active", {}]}},
            scheduled=lambda: {"a": [{"request": {"id": "later"}}, {"request": None}, "odd"]},
            limit=None,
        )
        found = Look()
        app = SimpleNamespace(control=SimpleNamespace(inspect=lambda **_: inspect))
        messages._ask_workers(found, app, None, ["runs", "later"], (), 0.1)
        assert {b"runs", b"later"} <= found.seen


class TestBroker:
    def test_broker_that_does_not_show_its_messages_is_a_doubt(self, app: Celery) -> None:
        found = look_for(app, [b"id"], ["id"], alive=(), timeout=0.1)
        assert found.doubts == ["a broker of this kind (memory) does not show its messages"]

    def test_several_brokers_are_a_doubt(self, app: Celery) -> None:
        app.conf.broker_write_url = "memory://elsewhere"
        found = look_for(app, [b"id"], ["id"], alive=(), timeout=0.1)
        assert "messages may be on another broker: there are several" in found.doubts

    @pytest.mark.parametrize(
        "text", ["3c9c0a5e-0d5f-4c6e-9d0a-2d0b1ad7f7c1", "report 7", "d31c43ab95f919e9c8bef85b6373f466"]
    )
    def test_text_is_found_in_a_stored_message(self, app: Celery, text: str) -> None:
        with app.producer_or_acquire() as producer:
            message = producer.channel.prepare_message("{}", headers={"singleton_lock": {"queue": [text, 1]}})
        stored = dumps(message).encode()
        assert name_in_message(text) in set(messages._names_in(stored))
        assert name_in_message(text[:-5]) not in set(messages._names_in(stored))

    def test_attempt_of_a_redlock_is_not_part_of_a_name(self) -> None:
        stem = "d31c43ab95f919e9c8bef85b6373"
        assert name_in_message(f"{stem}0000") == name_in_message(f"{stem}0003")
