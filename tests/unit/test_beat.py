"""The exclusive scheduler in one process, on locks in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler, Service
from celery.signals import beat_embedded_init, before_task_publish
from kombu.exceptions import OperationalError

from celery_singleton_lock import InvalidOption, SingletonTask, clock, process_identity
from celery_singleton_lock._celery import forget_heap
from celery_singleton_lock.beat import ExclusiveScheduler, claiming, ticks
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task.header import fixed
from celery_singleton_lock.task.message import HEADER
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: No lock server.
NOBODY = "redis://127.0.0.1:1/0"


class Recorder(Scheduler):
    """Appends messages to a list instead of sending them."""

    sent: list[tuple[str, dict[str, Any]]] = []
    books: RedisServer

    def send_task(self, name: str, *args: Any, task_id: str = "", headers: Any = None, **options: Any) -> None:
        self.sent.append((task_id, headers))


def app_with(name: str = "unit", **conf: Any) -> Celery:
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_backend=NOBODY, singleton_lock_beat_scheduler=Recorder, result_expires=None)
    app.conf.update(conf)
    return app


@pytest.fixture
def make(books: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExclusiveScheduler]:
    """Schedulers that share their locks."""
    store = MemoryStore()
    monkeypatch.setattr(Recorder, "sent", [])
    monkeypatch.setattr(Recorder, "books", books, raising=False)
    refusals.clear()
    monkeypatch.setattr("celery_singleton_lock.runtime.open_store", lambda settings: store)
    monkeypatch.setattr("celery_singleton_lock.beat.scheduler.check_servers", lambda settings: None)

    def made(**conf: Any) -> ExclusiveScheduler:
        return ExclusiveScheduler(app_with(**conf), Producer=lambda *args, **kwargs: None, max_interval=0.01)

    return made


def every(seconds: float, *names: str) -> dict[str, Any]:
    return {name: {"task": f"task.{name}", "schedule": seconds} for name in names}


def run(scheduler: ExclusiveScheduler, until: Callable[[], object]) -> None:
    deadline = clock.now() + LIMIT
    while not until():
        assert clock.now() < deadline
        if (seconds := scheduler.tick()) > 0:
            clock.sleep(min(seconds, 0.02))


def forget_what_was_sent() -> None:
    with Recorder.books.client() as client:
        client.flushdb()


def claimed() -> list[str]:
    with Recorder.books.client() as client:
        return [*client.scan_iter("*claim*")]


def age(scheduler: ExclusiveScheduler, seconds: float) -> None:
    """Make every entry's last run older, in the record and here."""
    forget_what_was_sent()
    for entry in scheduler.schedule.values():
        entry.last_run_at -= timedelta(seconds=seconds)
    forget_heap(scheduler)


def test_making_a_scheduler_connects_to_nothing() -> None:
    app = Celery("unit", broker="redis://127.0.0.1:1/0", set_as_current=False)
    assert "celery.beat.PersistentScheduler" in ExclusiveScheduler(app, lazy=True).info
    app.conf.singleton_lock_beat_scheduler = Recorder
    ExclusiveScheduler(app)


def test_scheduler_is_found_by_its_short_name() -> None:
    service = Service(app_with(), scheduler_cls="exclusive")
    assert isinstance(service.get_scheduler(lazy=True), ExclusiveScheduler)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("singleton_lock_beat_ttl", 0.5, "seconds from 1"),
        ("singleton_lock_beat_catch_up", -1, "0 or more"),
        ("singleton_lock_beat_name", "", "non-empty"),
        ("singleton_lock_beat_scheduler", "no.such:Thing", "no.such"),
        ("singleton_lock_beat_scheduler", "celery.beat:Service", "a subclass of celery.beat.Scheduler"),
        ("singleton_lock_beat_scheduler", "exclusive", "exclusive"),
        ("singleton_lock_beat_scheduler", "celery_singleton_lock.beat:ExclusiveScheduler", "other than"),
        ("singleton_lock_beat_tll", 5, "did you mean 'singleton_lock_beat_ttl'"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(setting: str, value: Any, allowed: str) -> None:
    app = app_with()
    app.conf[setting] = value
    with pytest.raises(InvalidOption, match=allowed) as refused:
        ExclusiveScheduler(app)
    assert setting in str(refused.value)


def test_close_within_a_tick_waits_for_the_next_call(make: Callable[..., ExclusiveScheduler]) -> None:
    """A signal handler closes the scheduler, whatever it has interrupted."""
    closed = []

    class Closing(Recorder):
        def close(self) -> None:
            closed.append(True)

    scheduler = make(beat_schedule=every(60, "a"), singleton_lock_beat_scheduler=Closing)
    scheduler.tick()
    scheduler._is_ticking = True
    scheduler.close()
    assert closed == []
    scheduler._is_ticking = False
    scheduler.close()
    scheduler.close()
    assert closed == [True]


def test_many_sent_entries_are_recorded_in_few_round_trips(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.beat.claims.RECORD_AFTER", float("inf"))
    names = [f"entry {number}" for number in range(250)]
    scheduler = make(beat_schedule=every(3600, *names))
    scheduler.tick()
    age(scheduler, 3600)
    ledger, recorded = scheduler._claims._ledger, []
    record = ledger.record
    monkeypatch.setattr(
        ledger, "record", lambda lasts, *args, **kw: (recorded.append(len(lasts)), record(lasts, *args, **kw))
    )
    run(scheduler, lambda: len(Recorder.sent) == len(names))
    assert recorded == []
    scheduler.tick()
    assert recorded == [250]


def entries_sent() -> list[str]:
    return [headers[HEADER]["entry"] for _, headers in Recorder.sent]


#: The tasks of the messages that the broker has refused.
refusals: list[str] = []


def refuse(_: Recorder, name: str, *args: Any, **kwargs: Any) -> None:
    refusals.append(name)
    raise OperationalError("no broker")


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_entry_that_is_changed_while_the_broker_is_away_is_not_sent_unchanged(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    scheduler = make(beat_schedule=every(3600, "a", "b"))
    scheduler.tick()
    age(scheduler, 3601)
    monkeypatch.setattr("celery_singleton_lock.beat.claiming.RETRY_AFTER", 0.01)
    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "send_task", refuse)
        run(scheduler, lambda: {*refusals} == {"task.a", "task.b"})
    del scheduler.schedule["a"]
    if change == "replaced":
        scheduler.schedule["a"] = scheduler._maybe_entry("a", {"task": "task.another", "schedule": 7200})
    run(scheduler, entries_sent)
    for _ in range(10):
        scheduler.tick()
    assert entries_sent() == ["b"]


def test_entries_take_turns_while_the_broker_is_away(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may refuse one of them only."""
    scheduler = make(beat_schedule=every(3600, "a", "b"))
    scheduler.tick()
    age(scheduler, 3601)
    monkeypatch.setattr("celery_singleton_lock.beat.claiming.RETRY_AFTER", 0.02)
    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "send_task", refuse)
        run(scheduler, lambda: len(refusals) >= 6)
    assert abs(refusals.count("task.a") - refusals.count("task.b")) <= 1
    run(scheduler, lambda: len(Recorder.sent) == 2)
    for _ in range(10):
        scheduler.tick()
    assert sorted(entries_sent()) == ["a", "b"]


def test_refused_tick_is_not_tried_again_at_once(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 5.7, Celery asks about the first entry whenever it looks."""
    scheduler = make(beat_schedule=every(3600, "a"))
    scheduler.tick()
    age(scheduler, 3601)
    monkeypatch.setattr(Recorder, "send_task", refuse)
    run(scheduler, lambda: refusals)
    is_due, seconds = scheduler.is_due(scheduler._heap[0].entry)
    assert not is_due
    assert 0 < seconds <= claiming.RETRY_AFTER


def test_tick_that_another_beat_has_claimed_delays_no_other(make: Callable[..., ExclusiveScheduler]) -> None:
    """Before 5.7, Celery keeps an entry that is due first."""
    scheduler = make(beat_schedule=every(3600, "a", "b"))
    scheduler.tick()
    age(scheduler, 3601)
    scheduler.populate_heap()
    first = scheduler._heap[0].entry
    scheduler._claims._ledger.claim(first.name, ticks.micros(first.last_run_at), "another", ttl=60, ceiling=2**62)
    assert not scheduler.is_due(first)[0]
    other = scheduler._heap[0].entry
    assert other is not first
    run(scheduler, entries_sent)
    assert entries_sent() == [other.name]


class KeptInRows(Recorder):
    """Keeps last runs where all beats see them, as django-celery-beat does: in rows, once they are saved."""

    rows: dict[str, SimpleNamespace] = {}

    def setup_schedule(self) -> None:
        super().setup_schedule()
        self.dirty: set[str] = set()
        for name, entry in self.schedule.items():
            entry.model = SimpleNamespace(**vars(self.rows[name]))
            entry.last_run_at = entry.model.last_run_at

    def reserve(self, entry: Any) -> Any:
        model = vars(entry).pop("model")
        following = super().reserve(entry)
        entry.model = following.model = model
        model.last_run_at = following.last_run_at
        model.total_run_count += 1
        self.dirty.add(entry.name)
        return following

    def sync(self) -> None:
        while self.dirty:
            name = self.dirty.pop()
            vars(self.rows[name]).update(vars(self.schedule[name].model))


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The row of an hourly entry that is due."""
    row = SimpleNamespace(last_run_at=datetime.now(timezone.utc) - timedelta(seconds=3601), total_run_count=1)
    monkeypatch.setattr(KeptInRows, "rows", {"a": row})
    return row


def test_first_tick_that_the_broker_refuses_is_sent_by_the_next_beat(
    make: Callable[..., ExclusiveScheduler], row: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an entry in a database, only what was sent is recorded."""
    last = row.last_run_at
    first, second = (make(beat_schedule=every(3600, "a"), singleton_lock_beat_scheduler=KeptInRows) for _ in range(2))
    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "send_task", refuse)
        run(first, lambda: refusals)
    first.close()
    assert (row.last_run_at, row.total_run_count) == (last, 1)
    run(second, entries_sent)
    second.sync()
    assert ticks.micros(row.last_run_at) == ticks.micros(last + timedelta(seconds=3600))
    for _ in range(10):
        second.tick()
    assert entries_sent() == ["a"]


@pytest.mark.parametrize("moment", ["connecting", "advancing"])
def test_row_of_a_tick_that_was_held_up_does_not_say_that_it_was_sent(
    make: Callable[..., ExclusiveScheduler], row: SimpleNamespace, moment: str
) -> None:
    class HeldUp(KeptInRows):
        held_up = False

        def hold_up(self, at: str) -> None:
            if at == moment and not self.held_up:
                self.held_up = True
                self._claims._until = 0.0

        @property
        def producer(self) -> None:
            self.hold_up("connecting")

        def reserve(self, entry: Any) -> Any:
            following = super().reserve(entry)
            self.hold_up("advancing")
            return following

    last = row.last_run_at
    scheduler = make(beat_schedule=every(3600, "a"), singleton_lock_beat_scheduler=HeldUp)
    run(scheduler, lambda: scheduler.held_up)
    scheduler.sync()
    assert (row.last_run_at, row.total_run_count) == (last, 1)
    run(scheduler, entries_sent)
    scheduler.sync()
    assert row.total_run_count == 2


def test_ticks_that_another_beat_has_sent_are_skipped(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler = make(beat_schedule=every(3600, "a", "b", "c"))
    scheduler.tick()
    age(scheduler, 3601)
    ledger = scheduler._claims._ledger
    scheduler.populate_heap()
    sent_at = round(clock.wall() * 1_000_000)
    ledger.record({"a": sent_at, "b": sent_at}, "another", ceiling=2 * sent_at)
    run(scheduler, lambda: len(Recorder.sent) == 1)
    for _ in range(10):
        scheduler.tick()
    assert len(Recorder.sent) == 1
    assert all(entry.total_run_count == 1 for entry in scheduler.schedule.values())


class SendsSlowly(Recorder):
    def send_task(self, *args: Any, **kwargs: Any) -> None:
        clock.sleep(0.3)
        super().send_task(*args, **kwargs)


def test_tick_that_takes_long_to_send_does_not_delay_the_next_one(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler = make(beat_schedule=every(3600, "a"), singleton_lock_beat_scheduler=SendsSlowly)
    scheduler.tick()
    age(scheduler, 3601)
    run(scheduler, lambda: Recorder.sent)
    ((looks_at, *_),) = scheduler._heap
    assert looks_at == pytest.approx(scheduler.schedule["a"].last_run_at.timestamp() + 3600, abs=0.1)


class SendsByItself(Recorder):
    """Like RedBeat's: asks the entry, not is_due()."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        for entry in list(self.schedule.values()):
            if entry.is_due()[0]:
                self.apply_async(entry, advance=True)
        return 0.01


def test_scheduler_that_sends_in_its_own_way_is_refused(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler = make(beat_schedule=every(0.01, "a"), singleton_lock_beat_scheduler=SendsByItself)
    with pytest.raises(InvalidOption, match="singleton_lock_beat_scheduler"):
        run(scheduler, lambda: False)


def test_own_task_id_and_headers_of_an_entry_are_kept(make: Callable[..., ExclusiveScheduler]) -> None:
    entry = {"task": "t", "schedule": 0.05, "options": {"task_id": "mine", "headers": {"x": 1}}}
    scheduler = make(beat_schedule={"a": entry})
    run(scheduler, lambda: len(Recorder.sent) >= 2)
    assert {task_id for task_id, _ in Recorder.sent} == {"mine"}
    assert all(headers["x"] == 1 for _, headers in Recorder.sent)
    assert HEADER not in entry["options"]["headers"]


@pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="older versions stop Celery's own scheduler as well")
def test_entry_whose_schedule_fails_does_not_stop_the_others(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler = make(beat_schedule=every(0.05, "good", "bad"))
    scheduler.tick()

    def fail() -> Any:
        raise ValueError("no such day")

    scheduler.schedule["bad"].schedule.is_due = lambda last: fail()
    run(scheduler, lambda: len(Recorder.sent) >= 3)


def test_lock_server_that_does_not_answer_is_reported_once(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make(beat_schedule=every(0.01, "a"))
    scheduler.tick()
    ledger = scheduler._claims._ledger

    def silent(*_: Any, **__: Any) -> Any:
        raise LockUnavailable("redis://x")

    clock.sleep(0.02)
    before = len(Recorder.sent)
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "claim", silent)
        assert [scheduler.tick() for _ in range(3)] == [1.0, 1.0, 1.0]
    assert caplog.text.count("sends nothing until the lock server answers") == 1
    assert len(Recorder.sent) == before
    # What another test has left may say that its own server answers again.
    run(scheduler, lambda: "answers again" in caplog.text and len(Recorder.sent) > before)


def test_claim_whose_answer_comes_after_its_end_neither_sends_nor_skips(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another beat may have sent the tick by then, in time: to skip it would record a later last run over that."""
    scheduler = make(beat_schedule=every(3600, "a"), singleton_lock_beat_ttl=1.0, singleton_lock_beat_catch_up=60.0)
    scheduler.tick()
    age(scheduler, 3600 + 300)
    scheduler.populate_heap()
    ledger = scheduler._claims._ledger
    claim, before = ledger.claim, ledger.lasts()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        answer = claim(*args, **kwargs)
        clock.sleep(1.1)  # Longer than the claim lasts.
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "claim", slowly)
        scheduler.tick()
        scheduler._claims.settle()
    assert (entries_sent(), ledger.lasts()) == ([], before)


def test_exclusive_task_keeps_that_name_when_it_is_sent_by_beat(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler, sent = make(beat_schedule=every(0.05, "a")), []

    @scheduler.app.task(base=SingletonTask, name="task.a")
    def task() -> None: ...

    before_task_publish.connect(lambda headers=None, **_: sent.append(headers), weak=False, sender="task.a")
    run(scheduler, lambda: sent)
    assert sent[0][HEADER]["sent"] == fixed(sent[0]["id"])
    task.apply_async(headers=dict(sent[0]))
    assert sent[1][HEADER]["sent"] != sent[0][HEADER]["sent"], "copied headers are another sending"


def test_locks_in_memory_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(InvalidOption, match=r"'memory://', which beats do not share; allowed here: .* redis://"):
        ExclusiveScheduler(app_with(singleton_lock_backend="memory://"))


def test_disabled_locks_leave_only_the_wrapped_scheduler(make: Callable[..., ExclusiveScheduler]) -> None:
    scheduler = make(singleton_lock_backend="memory://", singleton_lock_enabled=False)
    assert isinstance(scheduler, Scheduler)
    assert not isinstance(scheduler, ExclusiveScheduler)


def test_beat_that_is_stopped_twice_as_it_closes_records_what_it_has_sent(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second signal comes while the first one's close waits for the lock server. If that was not recorded, the next
    beat would send it again, and a task without a lock would run twice.
    """
    monkeypatch.setattr("celery_singleton_lock.beat.claims.RECORD_AFTER", float("inf"))
    first, second = (make(beat_schedule=every(3600, "a", "b")) for _ in range(2))
    first.tick()
    age(first, 3600)
    run(first, lambda: Recorder.sent)
    ledger = first._claims._ledger
    with monkeypatch.context() as patch:

        def stopped_again(*_: object, **__: object) -> None:
            patch.undo()
            first.close()
            raise SystemExit

        patch.setattr(ledger, "record", stopped_again)
        with pytest.raises(SystemExit):
            first.close()
    assert first._is_closed
    assert claimed() == []
    run(second, lambda: len(Recorder.sent) == 2)
    assert sorted(entries_sent()) == ["a", "b"]


def test_each_app_has_its_own_schedule(make: Callable[..., ExclusiveScheduler]) -> None:
    first, second = make(name="one", beat_schedule=every(0.05, "a")), make(name="two", beat_schedule=every(0.05, "a"))
    run(first, lambda: len(Recorder.sent) >= 2)
    run(second, lambda: len(Recorder.sent) >= 4)


def seen(scheduler: ExclusiveScheduler) -> list[int]:
    """The pids of the beats of its schedule, as other programs see them."""
    locks = [HeldLock.of(*item) for item in scheduler._presence._store.all_held("singleton_lock")]
    return [lock.holder.pid for lock in locks if (lock.name, lock.who) == ("beat:unit", "beat")]


def test_each_beat_is_seen_until_it_is_closed(make: Callable[..., ExclusiveScheduler]) -> None:
    first, second = make(beat_schedule=every(60, "a")), make(beat_schedule=every(60, "a"))
    assert first.tick() <= 5 / 3, "it has to show itself again"
    second.tick()
    assert seen(first) == [os.getpid()] * 2
    first.close()
    assert seen(second) == [os.getpid()]
    second.close()
    assert seen(second) == []


@pytest.mark.parametrize("is_there", [True, False], ids=["in time", "too late"])
def test_beat_goes_on_to_be_seen(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    scheduler = make(beat_schedule=every(60, "a"))
    now = clock.now()
    scheduler.tick()
    monkeypatch.setattr(clock, "now", lambda: now + (4.0 if is_there else 40.0))
    assert len(seen(scheduler)) == is_there
    scheduler.tick()
    monkeypatch.setattr(clock, "now", lambda: now + (8.0 if is_there else 44.0))
    assert len(seen(scheduler)) == 1


def test_tick_of_a_beat_that_was_killed_as_it_sent_is_sent_at_once(
    make: Callable[..., ExclusiveScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another beat on this host need not wait for the end of its claim."""
    scheduler = make(beat_schedule=every(3600, "a"), singleton_lock_beat_ttl=600.0)
    scheduler.tick()
    age(scheduler, 3601)
    (entry,) = scheduler.schedule.values()
    ended = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, check=True, text=True).stdout.strip()
    ledger = scheduler._claims._ledger
    for claimer in (f"alive/{process_identity.own()}", f"dead/{ended}"):
        assert Recorder.sent == []
        forget_what_was_sent()
        assert ledger.claim("a", ticks.micros(entry.last_run_at), claimer, ttl=600.0, ceiling=2**60) is None
        forget_heap(scheduler)
        scheduler.tick()
        scheduler.tick()
    assert entries_sent() == ["a"]


PROCESS = "from celery_singleton_lock import process_identity; print(process_identity.own())"


def test_beat_in_a_worker_that_is_stopped_twice_closes(make: Callable[..., ExclusiveScheduler]) -> None:
    """A service manager may signal all processes, and then the worker signals its beat."""
    scheduler = make(beat_schedule=every(3600, "a"))
    scheduler.tick()
    store = scheduler._presence._store
    service = Service(scheduler.app)
    service.scheduler = scheduler
    before = signal.getsignal(signal.SIGTERM)
    beat_embedded_init.send(sender=service)
    handler = signal.signal(signal.SIGTERM, before)
    free = store.free
    store.free = lambda lease: (setattr(store, "free", free), handler(signal.SIGTERM, None))
    with pytest.raises(SystemExit):
        service.sync()
    assert seen(scheduler) == []


IN_A_WORKER = """
import sys
from celery import Celery
from celery.worker import WorkController
from celery_singleton_lock import SingletonTask
import celery_singleton_lock.stores.redis.connection

app = Celery("unit", broker="memory://")


@app.task(base=SingletonTask)
def exclusive() -> None: ...


worker = WorkController(app=app, beat=True, pool_cls="prefork", concurrency=1)
print([step.name.rpartition(".")[2] for step in worker.steps], "encodings.idna" in sys.modules)
"""


def test_no_thread_runs_during_a_fork_at_the_start_of_a_worker() -> None:
    """A forked child would wait forever for a module that a thread was just importing."""
    done = subprocess.run([sys.executable, "-c", IN_A_WORKER], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == "['Pool', 'Beat', 'singleton-lock', 'Consumer'] True"


def test_entry_is_a_plain_schedule_entry_afterwards(make: Callable[..., ExclusiveScheduler]) -> None:
    """Celery's own scheduler can read the shelve file."""
    scheduler = make(beat_schedule=every(0.05, "a"))
    run(scheduler, lambda: Recorder.sent)
    assert type(scheduler.schedule["a"]) is ScheduleEntry
    assert scheduler.schedule["a"].options == {}
