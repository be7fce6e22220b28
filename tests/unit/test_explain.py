"""An explanation shows what the key is made of, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.cli import locks


def ship(order: Any, fast: bool = False, *boxes: Any, **notes: Any) -> None: ...


class Patient(SingletonTask):
    abstract = True
    lock_ttl = 60
    on_conflict = "retry"


def make_task(base: type = SingletonTask, *, conf: dict[str, Any] | None = None, **options: Any) -> Any:
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.update(conf or {})
    return app.task(shared=False, base=base, name="ship", **options)(ship)


def explained(task: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What the command says of a call."""
    words = [*map(json.dumps, args), *(f"{name}={json.dumps(value)}" for name, value in kwargs.items())]
    context = CLIContext(app=task.app, no_color=True, workdir=None)
    shown = CliRunner().invoke(locks, ["explain", "--json", "ship", "--", *words], obj=context)
    found: dict[str, Any] = json.loads(shown.output)
    return found


def lock_key_of_order(arguments: dict[str, Any]) -> Any:
    return arguments["order"]


FORMS = (None, [], ["order"], ["order", "gift"], "order:{order}", "{order}-{fast}", lock_key_of_order)

CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}),
    (("1",), {}),
    ((1, False), {}),
    ((), {"order": 1}),
    ((1, True), {}),
    ((1, False, "box"), {}),
    ((1,), {"gift": "yes"}),
    (({"id": [1, 2.0, None]},), {}),
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: getattr(form, "__name__", str(form)))
def test_shown_parts_are_equal_exactly_where_the_keys_are(form: Any) -> None:
    task = make_task(lock_key=form)
    each = [explained(task, *args, **kwargs) for args, kwargs in CALLS]
    for (call, one), (_, other) in itertools.product(zip(CALLS, each, strict=True), repeat=2):
        assert one["key"] == task.lock_key_of(*call[0], **call[1])
        assert (one["counts"] == other["counts"]) == (one["key"] == other["key"])


def test_each_form_of_lock_key_shows_its_result() -> None:
    assert explained(make_task(lock_key="order:{order}"), 7)["counts"]["the filled template"]["value"] == "order:7"
    explanation = explained(make_task(lock_key=lock_key_of_order), 7)
    assert explanation["lock_key"] == "the callable lock_key_of_order"
    assert explanation["counts"]["what lock_key returned"]["value"] == "7"
    assert explained(make_task(lock_key=[]), 7)["counts"] == {}
    assert explained(make_task(lock_key=["order"]), 7)["counts"] == {"order": {"value": "7", "serialized": "i1:7"}}


def test_each_option_that_was_set_says_where() -> None:
    task = make_task(Patient, lock_wait=5, conf={"singleton_lock_limit": 3, "singleton_lock_ttl": 90})
    assert explained(task, 7)["options"] == {
        "lock_wait": {"value": 5, "source": "the task"},
        "lock_ttl": {"value": 60, "source": "its class Patient"},
        "on_conflict": {"value": "retry", "source": "its class Patient"},
        "lock_limit": {"value": 3, "source": "the setting singleton_lock_limit"},
    }


class TestOnTheCommandLine:
    """`celery locks explain`."""

    def _run(self, *words: str, broker: str = "memory://") -> Result:
        app = make_task(lock_key=["order"], lock_wait=5).app
        app.conf.broker_url = broker
        app.task(shared=False, name="plain")(ship)
        context = CLIContext(app=app, no_color=True, workdir=None)
        return CliRunner().invoke(locks, ["explain", *words], obj=context)

    @pytest.mark.parametrize(
        ("words", "status", "reason"),
        [
            (["shop", "7"], 2, "'shop' is neither a task of this app nor a key; did you mean 'ship'?"),
            (["plain", "7"], 2, "is not exclusive"),
            (["ship", "fast=true"], 2, "missing a required argument: 'order'"),
            (["ship", "order=8", "order=9"], 2, "given twice"),
            ([], 2, "Missing argument"),
        ],
    )
    def test_wrong_words_are_reported(self, words: list[str], status: int, reason: str) -> None:
        shown = self._run(*words)
        assert shown.exit_code == status
        assert reason in shown.output

    def test_options_may_be_anywhere(self) -> None:
        for words in (["--json", "ship", "7"], ["ship", "7", "--json"], ["ship", "--json", "7"]):
            assert json.loads(self._run(*words).output)["counts"]["order"]["value"] == "7"

    def test_only_what_was_set_is_shown(self) -> None:
        lines = self._run("ship", "7").output.splitlines()
        assert [line.split()[0] for line in lines if line[:1].strip()][:3] == ["task", "held", "key"]
        assert [line for line in lines if "  from " in line] == ["options    lock_wait = 5  from the task"]

    def test_tasks_are_listed_where_no_name_is_similar(self) -> None:
        assert "; allowed: ship" in self._run("garbage").output

    @pytest.mark.parametrize(
        ("broker", "reason"),
        [("memory://", "cannot be seen from here"), ("redis://127.0.0.1:1", "unknown: lock server")],
    )
    def test_key_is_shown_even_if_the_holder_cannot_be(self, broker: str, reason: str) -> None:
        shown = self._run("ship", "7", broker=broker)
        assert shown.exit_code == 0
        assert "key        singleton_lock:1:{ship:" in shown.output
        assert reason in shown.output
