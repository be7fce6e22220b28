"""What the commands show, and for which locks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleton_lock import cli, clock
from celery_singleton_lock.cli import target
from celery_singleton_lock.cli.listing import WIDTH, locks_table, refusals_table, selected
from celery_singleton_lock.diagnosis.held import HeldLock, held_locks
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.stores.base import Held, LockRequest, Reservation
from celery_singleton_lock.stores.memory import MemoryStore

PREFIX = "unit"


def key_of(name: str) -> str:
    return key_of_text(PREFIX, name, "1")


def lock(name: str = "job", **changes: Any) -> HeldLock:
    holder = Holder("some-task", 0, "one@host", 42, clock.wall() - 100, ttl=30.0, label="tenant=7")
    held = Held(replace(holder, **changes), "owner", 20.0, waiters=2)
    return HeldLock.of(key_of(name), held)


def shown(lock: HeldLock) -> list[str]:
    """The cells of a lock that are not empty."""
    _, row = locks_table([lock]).splitlines()
    return re.split("  +", row)


def test_holder_is_shown_in_short_and_in_words() -> None:
    assert lock().who == "task some-task"
    assert lock().holder_in_words() == "task some-task on one@host (pid 42)"
    assert lock(pid=0).holder_in_words() == "kept for task some-task on one@host"
    assert lock("beat:shop", task_id=None).holder_in_words() == "beat on one@host (pid 42)"
    assert lock().end_in_words() == "expires in 20 s unless renewed (ttl 30 s)"
    assert lock(ttl=0.0).end_in_words() == "expires in 20 s; nobody renews it"


def test_lock_of_a_message_is_shown_as_queued() -> None:
    running = lock(pid=0, node="web")
    queued = replace(running, key=key_of_queue(running.key))
    assert shown(queued) == ["job", "tenant=7", "some-tas", "(queued)", "100 s", "2"]
    assert queued.holder_in_words() == "message of task some-task (queued), sent from web 100 s ago"
    assert queued.end_in_words() == "expires in 20 s at the latest"
    fields = queued.fields()
    assert (fields["key"], fields["scope"], fields["ttl"]) == (queued.key, "queued", None)
    by_time = lock(pid=0, ttl=3600.0)
    assert replace(by_time, key=queued.key).scope == "until_expired"
    foreign = HeldLock.of(queued.key, Held(None, "hello", 20.0))
    assert shown(foreign)[:2] == [queued.key, "foreign"], "users need the name to delete it"


def test_value_of_a_stranger_is_shown_as_foreign() -> None:
    foreign = HeldLock.of("unit:some:thing", Held(None, "hello", float("inf")))
    assert shown(foreign) == ["unit:some:thing", "foreign", "-", "-", "0"]
    assert (foreign.expires_in, foreign.ttl, foreign.scope) == (None, None, None)


def test_each_lock_is_shown_once_and_in_order() -> None:
    first = lock()
    second = replace(first, held=replace(first.held, owner="the other"))
    found = [(it.key, it.held) for it in (second, first, second)]
    assert held_locks(SimpleNamespace(all_held=lambda prefix: found), PREFIX) == [first, second]


def test_columns_are_as_wide_as_necessary() -> None:
    foreign = HeldLock.of("unit:some:\nthing", Held(None, "hello", float("inf")))
    assert locks_table([foreign]).splitlines() == [
        "TASK               LABEL  HOLDER   WORKER  FOR  WAITING",
        "unit:some:\\nthing         foreign  -       -    0",
    ]


def test_each_lock_has_a_line_with_its_task_first() -> None:
    third = lock("shop.render")
    beat = lock("beat:shop", task_id=None, label="")
    each = [shown(it) for it in (lock(), lock(pid=0), third, beat)]
    assert each[0] == ["job", "tenant=7", "some-tas", "one@host", "100 s", "2"]
    assert each[1][3] == "(kept) one@host"
    assert each[2][0] == "shop.render"
    assert each[3][:3] == ["beat:shop", "beat", "one@host"]


def test_table_of_locks_is_not_wider_than_a_terminal() -> None:
    name, label, node = (
        "warehouse.shipping.tasks.send_the_parcel",
        "customer_id=1234567, kind='express'",
        "worker@host-12",
    )
    lines = locks_table([lock(), lock(name, label=label * 2, node=node * 3)]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[2].split("  ")[:2] == ["…hipping.tasks.send_the_parcel", "customer_id=1234567, ki…"]
    assert re.split("  +", lines[1]) == shown(lock()), "what is short enough is whole"
    evil = lock("\x1b" * 90, label="\x1b" * 90)
    assert max(map(len, locks_table([evil]).splitlines())) <= WIDTH


def test_keys_are_shown_on_request() -> None:
    titles, row = locks_table([lock()], keys=True).splitlines()
    assert titles.split()[-1] == "KEY"
    assert row.split()[-1] == lock().key


def test_refusals_in_a_row_are_those_of_tasks() -> None:
    assert refusals_table([("shop.sync", "tenant_id=7", 14), ("shop.bill", "", 1)]).splitlines() == [
        "TASK       LABEL        TIMES",
        "shop.sync  tenant_id=7  14",
        "shop.bill               1",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_duration_is_in_a_readable_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


class TestSelection:
    @pytest.fixture
    def runtime(self) -> Any:
        store = MemoryStore()
        for name, node, age in (("shop.report", "one@host", 100.0), ("shop.bill", "two@host", 10.0)):
            holder = Holder("id", 0, node, 1, clock.wall() - age)
            store.acquire(LockRequest(key_of(name), new_owner(), ttl=60, holder=holder))
        return SimpleNamespace(store=store, settings=SimpleNamespace(prefix=PREFIX))

    @pytest.mark.parametrize(
        ("task", "node", "older_than", "names"),
        [
            (None, None, None, ["shop.bill", "shop.report"]),
            ("shop.report", None, None, ["shop.report"]),
            ("shop.*", None, None, ["shop.bill", "shop.report"]),
            ("shop", None, None, []),
            (None, "two@host", None, ["shop.bill"]),
            (None, None, 50.0, ["shop.report"]),
            ("shop.*", "one@*", 200.0, []),
        ],
    )
    def test_selection_has_locks_that_match_all_criteria(
        self, runtime: Any, app: Celery, task: str | None, node: str | None, older_than: float | None, names: list[str]
    ) -> None:
        context: Any = SimpleNamespace(obj=SimpleNamespace(app=app))
        found = selected(context, runtime, task=task, node=node, older_than=older_than)
        assert [lock.name for lock in found] == names


def test_kept_lock_is_shown_without_a_ttl() -> None:
    store, key = MemoryStore(), key_of("job")
    lease = store.acquire(LockRequest(key, new_owner(), ttl=60, holder=Holder("id", 0, "one@host", 1)))
    store.free(lease, reservation=Reservation(Holder("id", 1, "one@host"), 60))
    (held,) = store.held(key)
    assert HeldLock.of(key, held).ttl is None


def test_lock_that_never_expires_is_explained_as_valid_json() -> None:
    foreign = HeldLock.of("unit:some:thing", Held(None, "owner", math.inf))
    assert json.loads(json.dumps(foreign.fields(), allow_nan=False))["expires_in"] is None
    assert (foreign.holder_in_words(), foreign.end_in_words()) == (
        "something that this package did not write",
        "never expires",
    )


def test_too_deeply_nested_argument_is_a_text() -> None:
    deep = "[" * 100_000
    assert target.parsed([deep, f"a={deep}"]) == ([deep], {"a": deep})


@pytest.mark.parametrize("words", [["timeline", "--minutes", "nan"], ["list", "--older-than", "nan"]], ids=" ".join)
def test_nan_is_not_a_number(app: Celery, words: list[str]) -> None:
    result = CliRunner().invoke(cli.locks, words, obj=CLIContext(app=app, no_color=True, workdir=None))
    assert result.exit_code == 2
    assert "nan' is not a number" in result.output


def test_missing_app_is_reported_first() -> None:
    """Nobody has configured the default app, so errors in its settings help nobody."""
    result = CliRunner().invoke(cli.locks, ["list"], obj=CLIContext(app=Celery(), no_color=True, workdir=None))
    assert result.exit_code == 1
    assert result.output.startswith("Error: no app was named: name it, as in celery -A shop locks …\nsetting ")


def test_doctor_without_exclusive_tasks_fails() -> None:
    app = Celery(set_as_current=False, broker="memory://", singleton_lock_backend="memory://")
    result = CliRunner().invoke(
        cli.locks, ["doctor", "--offline"], obj=CLIContext(app=app, no_color=True, workdir=None)
    )
    assert result.exit_code == 1
    assert "tasks: none has SingletonTask as its base\n         -> no app was named" in result.output


def test_doctor_names_plain_tasks_with_options_where_none_is_exclusive() -> None:
    app = Celery(set_as_current=False, broker="memory://", singleton_lock_backend="memory://")

    @app.task(name="bill", lock_key=["tenant_id"])
    def bill(tenant_id: int) -> None: ...

    result = CliRunner().invoke(
        cli.locks, ["doctor", "--offline"], obj=CLIContext(app=app, no_color=True, workdir=None)
    )
    assert result.exit_code == 1
    assert "bill: it has lock_key, but it is a plain task, which takes no lock" in result.output
