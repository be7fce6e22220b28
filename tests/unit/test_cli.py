"""What the commands show, and for which locks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleton_lock import cli, clock
from celery_singleton_lock.cli import arguments, stats
from celery_singleton_lock.cli.explain import _holder
from celery_singleton_lock.cli.selection import Selection
from celery_singleton_lock.cli.table import cells, table
from celery_singleton_lock.diagnosis.held import HeldLock, duration, in_order
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.stores.base import Held, LockRequest, Reservation
from celery_singleton_lock.stores.memory import MemoryStore

PREFIX = "unit"


def key_of(name: str) -> str:
    return key_of_text(PREFIX, name, "1")


def lock(name: str = "job", **changes: Any) -> HeldLock:
    holder = Holder("some-task", 0, "one@host", 42, clock.wall() - 100, ttl=30.0, label="tenant=7")
    held = Held(replace(holder, **changes), "owner", 20.0, slot=0, waiters=2)
    return HeldLock.of(key_of(name), held)


def test_holder_is_shown_in_short_and_in_words() -> None:
    assert lock().holder_in_short() == "some-task"
    assert lock().holder_in_words() == "task some-task on one@host (pid 42)"
    assert lock(pid=0).holder_in_short() == "some-task (kept)"
    assert lock(pid=0).holder_in_words() == "kept for task some-task on one@host"
    assert lock("beat:shop", task_id=None).holder_in_words() == "leader on one@host (pid 42)"
    assert lock().end_in_words() == "expires in 20 s unless renewed (ttl 30 s)"
    assert lock(ttl=0.0).end_in_words() == "expires in 20 s; nobody renews it"


def test_lock_of_a_message_is_shown_as_queued() -> None:
    running = lock(pid=0, node="web")
    queued = replace(running, key=key_of_queue(running.key))
    assert cells(queued)[:2] == (running.key, "some-task (queued)")
    assert queued.holder_in_words() == "message of task some-task (queued), sent from web 100 s ago"
    assert queued.end_in_words() == "expires in 20 s at the latest"
    fields = queued.fields()
    assert (fields["key"], fields["scope"], fields["ttl"]) == (queued.key, "queued", None)
    by_time = lock(pid=0, ttl=3600.0)
    assert replace(by_time, key=queued.key).scope == "until_expired"
    foreign = HeldLock.of(queued.key, Held(None, "hello", 20.0))
    assert cells(foreign)[:2] == (queued.key, "foreign value"), "users need the name to delete it"


def test_value_of_a_stranger_is_shown_as_foreign() -> None:
    foreign = HeldLock.of("unit:some:thing", Held(None, "hello", float("inf"), slot=0))
    assert cells(foreign) == ("unit:some:thing", "foreign value", "-", "-", "-", "never", "0", "")
    assert (foreign.expires_in, foreign.ttl, foreign.scope) == (None, None, None)


def test_each_lock_is_shown_once_and_in_order() -> None:
    first = lock()
    second = replace(first, held=replace(first.held, slot=1))
    assert in_order([second, first, second]) == [first, second]


def test_columns_are_as_wide_as_necessary() -> None:
    foreign = HeldLock.of("unit:some:\nthing", Held(None, "hello", float("inf"), slot=0))
    assert table([foreign]).splitlines() == [
        "KEY                HOLDER         NODE  PID  HELD FOR  EXPIRES IN  WAITERS  LABEL",
        "unit:some:\\nthing  foreign value  -     -    -         never       0",
    ]


def test_too_wide_table_becomes_a_paragraph_for_each_lock() -> None:
    assert table([lock()], width=80).splitlines() == [
        f"{lock().key} (tenant=7)",
        "  task some-task on one@host (pid 42) for 100 s, expires in 20 s unless renewed",
        "  (ttl 30 s), 2 waiting",
    ]
    assert table([lock()], width=1000) == table([lock()])


def test_key_is_whole_on_the_narrowest_terminal() -> None:
    lines = table([lock()], width=20).splitlines()
    assert lines[:2] == [lock().key, "  (tenant=7)"]
    assert max(map(len, lines[1:])) <= 20


def test_too_wide_refusals_become_a_paragraph_for_each_key() -> None:
    rows = [("p:1:{shop.sync:6f}", "14", "tenant_id=7"), ("p:1:{shop.bill:1a}", "1", "")]
    assert stats.refusals(rows, width=30).splitlines() == [
        "p:1:{shop.sync:6f}",
        "  (tenant_id=7)",
        "  14 copies refused in a row",
        "p:1:{shop.bill:1a}",
        "  1 copy refused in a row",
    ]
    assert stats.refusals(rows, width=1000).splitlines()[0].split() == ["KEY", "TIMES", "LABEL"]


def test_too_wide_counts_become_a_paragraph_for_each_task() -> None:
    rows = [("shop.export", "3 (SUCCESS 2, FAILURE 1)", "2 s", "0.5 s", "conflicts 4 (skip 4)"), ("shop.sync", *"1234")]
    assert stats.table(rows, width=40).splitlines() == [
        "shop.export",
        "  runs 3 (SUCCESS 2, FAILURE 1); held",
        "  each 2 s; waited each 0.5 s; otherwise",
        "  conflicts 4 (skip 4)",
        "shop.sync",
        "  runs 1; held each 2; waited each 3;",
        "  otherwise 4",
    ]
    assert stats.table(rows, width=1000).splitlines()[0].split("  ")[0] == "TASK"


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
        ("selection", "names"),
        [
            (Selection(None, None, None), ["shop.bill", "shop.report"]),
            (Selection(("shop.report",), None, None), ["shop.report"]),
            (Selection(("shop.*",), None, None), ["shop.bill", "shop.report"]),
            (Selection(("shop",), None, None), []),
            (Selection(None, "two@host", None), ["shop.bill"]),
            (Selection(None, None, 50.0), ["shop.report"]),
            (Selection(("shop.*",), "one@*", 200.0), []),
        ],
    )
    def test_selection_has_locks_that_match_all_criteria(
        self, runtime: Any, selection: Selection, names: list[str]
    ) -> None:
        assert sorted(lock.name for lock in selection.of(runtime)) == names

    def test_empty_selection_is_false(self) -> None:
        assert not Selection(None, None, None)
        assert Selection(None, None, 0.0)


def test_kept_lock_is_shown_without_a_ttl() -> None:
    store, key = MemoryStore(), key_of("job")
    lease = store.acquire(LockRequest(key, new_owner(), ttl=60, holder=Holder("id", 0, "one@host", 1)))
    store.free(lease, reservation=Reservation(Holder("id", 1, "one@host"), 60))
    (held,) = store.held(key)
    assert HeldLock.of(key, held).ttl is None


def test_lock_that_never_expires_is_explained_as_valid_json() -> None:
    foreign = HeldLock.of("unit:some:thing", Held(None, "owner", math.inf))
    assert json.loads(json.dumps(_holder(foreign), allow_nan=False)) == {"expires_in": None}
    assert (foreign.holder_in_words(), foreign.end_in_words()) == (
        "something that this package did not write",
        "never expires",
    )


def test_too_deeply_nested_argument_is_a_text() -> None:
    deep = "[" * 100_000
    assert arguments.parse([deep, f"a={deep}"]) == ([deep], {"a": deep})


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


def test_audit_without_exclusive_tasks_fails() -> None:
    app = Celery(set_as_current=False, broker="memory://", singleton_lock_backend="memory://")
    result = CliRunner().invoke(cli.locks, ["audit"], obj=CLIContext(app=app, no_color=True, workdir=None))
    assert result.exit_code == 1
    assert "no task is exclusive: none has SingletonTask as its base; no app was named" in result.output
