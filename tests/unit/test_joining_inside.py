"""As `test_joining`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Retry

from celery_singleton_lock import LockConflict, LockUnavailable, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.task import joining, message_identity, redelivery, requeue
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.outcome import Outcome
from tests.unit.deliveries import deliver, make

pytestmark = pytest.mark.usefixtures("settled_at_once")


class Sent(list[dict[str, Any]]):
    """The headers of the messages that were put back, and the latest delay."""

    delay: float | None = None


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found = Sent()

    def send(task: Any, reason: str, delay: float, header: dict[str, Any]) -> None:
        found.append(header)
        found.delay = delay

    monkeypatch.setattr(requeue, "_send", send)
    return found


class Pair:
    """A task, and copies that meet its first execution."""

    def __init__(self, app: Celery, sent: Sent, end: Callable[[], Any], copies: int = 1, **options: Any) -> None:
        self.app, self.sent = app, sent
        self.headers: list[dict[str, Any]] = []

        def body() -> Any:
            if len(self.runs) > 1:
                return "ran"
            for number in range(copies):
                with pytest.raises(requeue.GoesOn):
                    deliver(self.task, id=f"copy-{number}-{app.main}")
                self.headers.append(sent[-1])
            return end()

        self.task, self.runs = make(app, body, on_conflict="join", **options)
        self.first = f"first-{app.main}"

    def run_first(self) -> None:
        with suppress(Exception):
            deliver(self.task, id=self.first)

    def copy(self, number: int = 0, **request: Any) -> Any:
        carries = {"put_back": request.pop("header", None) or self.headers[number]}
        return deliver(self.task, id=f"copy-{number}-{self.app.main}", carries=carries, **request)

    def begin_retry(self, *, pid: int) -> Lease:
        """Take the lock as the first message's second attempt does; or, without a process, keep it for that attempt."""
        joined = Joined.read(self.headers[0]["joins"])
        assert joined is not None
        holder = Holder(self.first, retries=1, pid=pid, since=clock.wall(), sending=joined.sending)
        lease = self.store.acquire(LockRequest(self.task.lock_key_of(), new_owner(), ttl=60.0, holder=holder))
        assert isinstance(lease, Lease)
        return lease

    @property
    def store(self) -> Any:
        return Runtime.of(self.app).store


def one() -> int:
    return 1


def fail(error: BaseException) -> Callable[[], Any]:
    def end() -> None:
        raise error

    return end


def fail_to_free(*_: Any, **__: Any) -> None:
    raise LockUnavailable("here", "as if the process had died")


class TestEnded:
    def test_copy_names_the_task_that_it_has_joined(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, lambda: 1)
        pair.run_first()
        (header,) = pair.headers
        joined = Joined.read(header["joins"])
        assert joined is not None
        assert (joined.task_id, joined.retries, joined.goes_on) == (pair.first, 0, False)
        assert header["waits"] == [pair.task.lock_key_of(), 1]

    def test_task_that_has_lost_its_lock_wakes_its_copies_behind_the_next_message(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        woken: list[str] = []

        def lose() -> int:
            key = pair.task.lock_key_of()
            (held,) = pair.store.held(key)
            pair.store.free(held.hold(key, ttl=1.0))
            pair.store.acquire(LockRequest(key, new_owner(), ttl=60.0, holder=Holder("next")))
            return 1

        pair = Pair(app, sent, lose, on_lock_lost="warn")
        with monkeypatch.context() as patch:
            patch.setattr(pair.store, "wake", woken.append)
            pair.run_first()
        assert woken == [pair.task.lock_key_of()]
        assert pair.copy() == 1
        assert pair.runs == [pair.first]

    def test_second_copy_of_the_same_message_ends_silently(self, app: Celery, sent: Sent) -> None:
        """The first copy sends the callbacks and next steps."""
        pair = Pair(app, sent, lambda: 1)
        pair.run_first()
        assert pair.copy() == 1
        pair.app.backend.store_result(f"copy-0-{app.main}", 1, "SUCCESS")
        with pytest.raises(Ignore):
            pair.copy()
        assert pair.runs == [pair.first]

    def test_copy_of_a_joined_message_that_could_not_store_its_end_stores_it(self, app: Celery, sent: Sent) -> None:
        """Its worker died first: the joined task still has the value."""
        pair = Pair(app, sent, lambda: "x" * 10_000)
        pair.run_first()
        app.backend.store_result(pair.first, "x" * 10_000, "SUCCESS")
        assert pair.copy() == "x" * 10_000
        assert pair.copy(header=pair.headers[0]) == "x" * 10_000
        assert pair.runs == [pair.first]

    def test_record_without_content_is_enough_with_a_stored_result(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, lambda: 1)
        pair.run_first()
        app.backend.store_result(pair.first, 1, "SUCCESS")
        joined = Joined.read(pair.headers[0]["joins"])
        assert joined is not None
        key, message = pair.task.lock_key_of(), joined.message(pair.task.name)
        pair.store.remember(key, Record(message, b"over", 3000.0))
        assert pair.copy() == 1
        assert pair.runs == [pair.first]


class TestWaits:
    def test_limit_of_retries_does_not_limit_the_looks(self, app: Celery, sent: Sent) -> None:
        """`lock_conflict_retries` may be set for the whole app."""
        task, runs = make(app, one, on_conflict="join", lock_conflict_retries=1)
        hold = LockRequest(task.lock_key_of(), new_owner(), ttl=60.0, holder=Holder("other"))
        assert isinstance(Runtime.of(app).store.acquire(hold), Lease)
        for _ in range(3):
            carries = {"put_back": sent[-1]} if sent else {}
            with pytest.raises(requeue.GoesOn):
                deliver(task, carries=carries)
        assert runs == []


class TestDied:
    def test_circular_heirs_do_not_wait_forever(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, fail(SystemExit()))
        with pytest.raises(SystemExit):
            deliver(pair.task, id=pair.first)
        joined = Joined.read(pair.headers[0]["joins"])
        assert joined is not None
        other = joined._replace(task_id="other", sending="other")
        for one, heir in ((joined, other), (other, joined)):
            name = f"heir:{one.message(pair.task.name)}:{one.since:.6f}"
            head = Outcome("JOINED").record_of(Holder("x"), 60.0).content
            content = head + str(list(heir)).replace("'", '"').replace("False", "false").encode()
            pair.store.remember(pair.task.lock_key_of(), Record(name, content, 60.0))
        assert pair.copy() == "ran"

    def test_another_task_with_the_same_lock_has_another_result(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, lambda: 1, lock_name="shared")
        pair.run_first()
        other, runs = make(app, lambda: "other", on_conflict="join", lock_name="shared")
        header = {"retries": 0, "joins": pair.headers[0]["joins"]}
        assert deliver(other, id="new", carries={"put_back": header}) == "other"
        assert runs == ["new"]


class TestGoesOn:
    def test_only_a_retry_leaves_more_than_the_record_of_its_end(self, app: Celery) -> None:
        task, _ = make(app, lambda: 1, on_conflict="join")
        store: Any = Runtime.of(app).store

        def records() -> int:
            return sum(key == task.lock_key_of() for key, _ in store._records)

        deliver(task, id="it")
        assert records() == 1
        deliver(task, id="it", retries=1)
        assert records() == 3, "that it has begun, and how it has ended"

    def test_wake_up_of_a_copy_that_waits_for_a_retry_is_passed_on(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The retry waits in its slot until the previous attempt has freed the lock."""
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        woken: list[str] = []
        monkeypatch.setattr(pair.store, "wake", woken.append)
        with pytest.raises(requeue.GoesOn):
            pair.copy()
        assert woken == [pair.task.lock_key_of()]
        with pytest.raises(requeue.GoesOn):
            pair.copy(header=sent[-1])  # Nothing has woken it.
        assert len(woken) == 1

    def test_wake_up_of_a_copy_that_has_just_ended_is_passed_on(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The end is on record, and not stored, since the worker has died. So the copy looks for it later."""
        pair = Pair(app, sent, one)
        pair.run_first()
        pair.copy()
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        woken: list[str] = []
        monkeypatch.setattr(pair.store, "wake", woken.append)
        with pytest.raises(requeue.GoesOn):
            pair.copy()
        assert woken == [pair.task.lock_key_of()]

    def test_copy_waits_in_line_for_a_running_retry(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        hold = LockRequest(pair.task.lock_key_of(), new_owner(), ttl=60.0, holder=Holder(pair.first, retries=1))
        assert isinstance(pair.store.acquire(hold), Lease)
        with pytest.raises(requeue.GoesOn):
            pair.copy()
        assert "waits" in sent[-1]

    def test_copy_runs_in_the_place_of_a_retry_that_it_saw_running_and_that_died(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        lease = pair.begin_retry(pid=1)
        with pytest.raises(requeue.GoesOn):
            pair.copy()
        pair.store.free(lease)
        assert pair.copy(header=sent[-1]) == "ran"

    def test_copy_runs_in_the_place_of_a_retry_that_died_before_anybody_looked(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        with monkeypatch.context() as patch:
            patch.setattr(pair.store, "free", fail_to_free)
            deliver(pair.task, id=pair.first, retries=1)
        key = pair.task.lock_key_of()
        (held,) = pair.store.held(key)
        pair.store.free(held.hold(key, ttl=60.0))  # It expires.
        assert pair.copy() == "ran"
        assert len(pair.runs) == 3

    def test_copy_runs_in_the_place_of_a_retry_that_died_and_could_not_record_the_attempt_before(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server was silent for a while as it began, and answered again."""
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        with monkeypatch.context() as patch:
            for name in ("free", "refuse"):
                patch.setattr(pair.store, name, fail_to_free)
            deliver(pair.task, id=pair.first, retries=1)
        key = pair.task.lock_key_of()
        (held,) = pair.store.held(key)
        pair.store.free(held.hold(key, ttl=60.0))  # It expires.
        assert pair.copy() == "ran"

    def test_copy_waits_for_a_retry_for_which_the_lock_was_only_kept(self, app: Celery, sent: Sent) -> None:
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        lease = pair.begin_retry(pid=0)
        with pytest.raises(requeue.GoesOn):
            pair.copy()
        pair.store.free(lease)
        with pytest.raises(requeue.GoesOn):
            pair.copy(header=sent[-1])
        assert len(pair.runs) == 1

    def test_copy_runs_if_the_retry_may_have_joined_it(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise they would wait for each other."""
        pair = Pair(app, sent, fail(Retry()))
        pair.run_first()
        monkeypatch.setattr(joining.Joining, "before_lock", lambda _: None)
        assert pair.copy() == "ran"


class TestNotJoined:
    @pytest.mark.parametrize("ancestor", ["root_id", "parent_id"])
    def test_ancestor_is_not_joined(self, app: Celery, sent: Sent, ancestor: str) -> None:
        task, runs = make(app, lambda: 1, on_conflict="join")
        hold = LockRequest(task.lock_key_of(), new_owner(), ttl=60.0, holder=Holder("ancestor"))
        assert isinstance(Runtime.of(app).store.acquire(hold), Lease)
        with pytest.raises(LockConflict):
            deliver(task, **{ancestor: "ancestor"})
        assert (runs, sent) == ([], [])

    def test_holder_that_is_not_a_task_is_not_joined(self, app: Celery, sent: Sent) -> None:
        task, _ = make(app, lambda: 1, on_conflict="join")
        hold = LockRequest(task.lock_key_of(), new_owner(), ttl=60.0, holder=Holder())
        assert isinstance(Runtime.of(app).store.acquire(hold), Lease)
        with pytest.raises(LockConflict):
            deliver(task)

    @pytest.mark.parametrize("replaced", [0, 1, 7])
    def test_task_from_which_an_operator_has_taken_the_lock_is_joined(
        self, app: Celery, sent: Sent, replaced: int
    ) -> None:
        task, _ = make(app, lambda: 1, on_conflict="join")
        holder = Holder("stopped", retries=2, pid=5, since=1e9, replaced=replaced, process="p", order="o")
        kept = Holder.loads(holder.taken_away("here").dumps())
        assert kept is not None
        assert (kept.is_nobody, holder.is_nobody, kept.pid, kept.process, kept.order) == (True, False, 0, "", "")
        assert kept.reserved_as != holder.reserved_as
        hold = LockRequest(task.lock_key_of(), new_owner(), ttl=60.0, holder=kept)
        assert isinstance(Runtime.of(app).store.acquire(hold), Lease)
        with pytest.raises(requeue.GoesOn):
            deliver(task)
        assert sent[0]["joins"] == list(Joined.of(holder) or ())

    @pytest.mark.parametrize(
        "forged", [None, 1, "text", [], ["x"] * 6, [1, 2, 3, 4, 5, 6], ["", "", 0, 0, 0, 0], {"a": 1}]
    )
    def test_forged_header_is_ignored(self, app: Celery, sent: Sent, forged: object) -> None:
        task, runs = make(app, lambda: 1, on_conflict="join")
        assert deliver(task, carries={"put_back": {"retries": 0, "joins": forged}}) == 1
        assert len(runs) == 1

    def test_copy_waits_while_the_lock_server_does_not_answer(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = Pair(app, sent, lambda: 1)
        pair.run_first()

        def silent(*_: object, **__: object) -> Any:
            raise LockUnavailable("the server", "silent")

        with monkeypatch.context() as away:
            away.setattr(pair.store, "recorded", silent)
            away.setattr(pair.store, "acquire", silent)
            with pytest.raises(requeue.GoesOn):
                pair.copy()
        assert sent[-1]["unavailable"] == 1
        assert sent[-1]["joins"] == pair.headers[0]["joins"]
        with monkeypatch.context() as away:  # It answers again before the acquire.
            away.setattr(pair.store, "recorded", silent)
            with pytest.raises(requeue.GoesOn):
                pair.copy(header=sent[-1])
        assert pair.store.held(pair.task.lock_key_of()) != [] or sent[-1]["given_up"]
        assert pair.copy(header=sent[-1]) == 1
        assert pair.runs == [pair.first]

    def test_copy_whose_lease_ended_during_its_look_is_put_back(
        self, app: Celery, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else may have the lock by now, so the copy does not run, and comes again."""
        pair = Pair(app, sent, fail(SystemExit()), on_lock_lost="warn")
        with pytest.raises(SystemExit):
            deliver(pair.task, id=pair.first)
        later = [0.0]
        recorded, now = pair.store.recorded, clock.now

        def slow(*args: Any) -> Any:
            later[0] += 100.0
            return recorded(*args)

        with monkeypatch.context() as busy:
            busy.setattr(clock, "now", lambda: now() + later[0])
            busy.setattr(joining.Joining, "before_lock", lambda _: None)
            busy.setattr(pair.store, "recorded", slow)
            with pytest.raises(requeue.GoesOn):
                pair.copy()
        assert pair.runs == [pair.first]
        assert sent[-1]["joins"] == pair.headers[0]["joins"]


def test_names_of_joined_messages_are_those_of_their_records() -> None:
    sending = "5" * 32
    record = message_identity.record_name("shop.job", "id", sending)
    holder = Holder("id", 3, replaced=2, sending=sending, record=record)
    joined = Joined.of(holder)
    assert joined is not None
    assert joined.message("shop.job") == holder.message
