"""The doctor, offline and online, a starting worker and Django's checks look at one app: none contradicts another."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.concurrency import thread
from click.testing import CliRunner

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.cli import locks
from celery_singleton_lock.contrib.django import checks
from celery_singleton_lock.worker.bootstep import LockStep
from tests.redis_server import RedisServer

#: What one of them says: each text, and how severe it is.
Said = dict[str, str]

#: Settings, and the findings about them: the beginning of each text, and its severity.
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing": ({}, {}),
    "forgets at once": ({"singleton_lock_done_ttl": 0}, {"singleton_lock_done_ttl: ": "problem"}),
    "forgets too soon": ({"singleton_lock_done_ttl": 60}, {"singleton_lock_done_ttl: ": "problem"}),
    "misspelt": ({"singelton_lock_ttl": 60}, {"singelton_lock_ttl: ": "warning"}),
    "reject": ({"singleton_lock_on_conflict": "reject"}, {"bill, refund: on_conflict is 'reject'": "warning"}),
    "all": (
        {"singleton_lock_done_ttl": 0, "singelton_lock_ttl": 60, "singleton_lock_on_conflict": "reject"},
        {"singleton_lock_done_ttl: ": "problem", "singelton_lock_ttl: ": "warning", "bill, refund: ": "warning"},
    ),
}


def make_app(server: RedisServer, **conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(
        singleton_lock_backend=server.url,
        worker_pool="threads",
        # A broker that redelivers unacknowledged messages.
        broker_transport_options={"visibility_timeout": 3600},
        **conf,
    )
    for name in ("bill", "refund"):
        app.task(base=SingletonTask, name=name, shared=False)(body)
    return app


def body(tenant_id: int) -> None: ...


def command(app: Celery, *words: str) -> list[dict[str, Any]]:
    context = CLIContext(app=app, no_color=True, workdir=None)
    shown = CliRunner().invoke(locks, [*words, "--json"], obj=context)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def said_by_the_doctor(app: Celery, *options: str) -> Said:
    found = command(app, "doctor", *options)
    about_servers = ("127.0.0.1", "workers")
    return {
        f"{it['subject']}: {it['text']}": it["severity"] for it in found if not it["subject"].startswith(about_servers)
    }


def said_by_a_worker(app: Celery, caplog: pytest.LogCaptureFixture) -> set[str]:
    caplog.clear()
    worker = SimpleNamespace(app=app, pool_cls=thread.TaskPool, concurrency=1, task_events=False, steps=[])
    worker.use_eventloop = False
    with caplog.at_level(logging.WARNING):
        LockStep(worker).create(worker)
    said = (record.getMessage() for record in caplog.records)
    # Threads of other tests in this process may have something to say as well.
    return {text.removeprefix("singleton lock: ") for text in said if text.startswith("singleton lock: ")}


@pytest.mark.parametrize("case", CASES)
def test_all_four_judgements_agree(
    case: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "autodiscover_modules", lambda name: None)  # There is no project.
    conf, expected = CASES[case]
    app = make_app(own_redis, **conf)
    said = said_by_the_doctor(app, "--offline")
    assert sorted(said.values()) == sorted(expected.values())
    for beginning, severity in expected.items():
        assert [bad for text, bad in said.items() if text.startswith(beginning)] == [severity]

    assert said_by_the_doctor(app, "--timeout", "0.1") == said
    at_start = said_by_a_worker(app, caplog)
    assert {text.rpartition("; ")[0] for text in at_start} == {text for text, bad in said.items() if bad != "note"}
    assert {message.msg for message in checks.of_production(app)} == said.keys()
