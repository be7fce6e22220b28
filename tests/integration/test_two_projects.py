"""Two projects on one lock server, both named as Django's habit has it: real beats, real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.integration.beats import Studio, studio
from tests.integration.workers import Worker, environment
from tests.patience import until
from tests.recording import Record
from tests.redis_server import RedisServer

TASK = "tests.integration.app.exclusive"

#: Part of the warning about entries of another project.
STRANGERS = "which are not in it: another project may have the same prefix and name"


@pytest.fixture
def beats(own_redis: RedisServer, tmp_path: Path) -> Iterator[Studio]:
    with studio(own_redis, own_redis, tmp_path) as made:
        yield made


def of_project(beats: Studio, number: int, **conf: Any) -> None:
    """The next beats are those of this project, with an entry of its own."""
    beats.schedule = {f"of-{number}": 0.5}
    beats.conf = conf


def test_key_prefix_keeps_the_schedules_apart(beats: Studio, own_redis: RedisServer) -> None:
    for number, prefix in enumerate(("shop:", "{crm}:")):
        of_project(
            beats,
            number,
            broker_transport_options={"global_keyprefix": prefix},
            singleton_lock_backend=own_redis.url_of(0),
        )
        beats.start(f"beat-{number}")
    with own_redis.client(0) as client:
        until(lambda: all(client.llen(f"{prefix}celery") > 2 for prefix in ("shop:", "{crm}:")))
        ledgers = client.keys("*:ledger")
    assert {key.partition(":1:")[0] for key in ledgers} == {"shop:singleton_lock", "crm:singleton_lock"}


def test_key_prefix_keeps_equal_tasks_apart(own_redis: RedisServer, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    workers = []
    try:
        for prefix in ("shop:", "crm:"):
            conf = {
                "broker_url": own_redis.url_of(0),
                "task_ignore_result": True,
                "broker_transport_options": {"global_keyprefix": prefix},
            }
            variables = environment(conf, events=own_redis.url_of(3), record=record.path)
            name = prefix.strip(":")
            workers.append(Worker(name, directory=tmp_path, environment=variables, concurrency=1))
            workers[-1].wait_until_ready()
            with Celery("another-name", set_as_current=False) as sender:
                sender.conf.update(conf)
                for _ in range(2):
                    sender.send_task(TASK, ("nightly", 300.0))
        runs = record.wait_for(starts=2)
        assert len({run.pid for run in runs}) == 2
        record.let_end("nightly")
        record.wait_for(ends=2)
    finally:
        for worker in workers:
            worker.kill()


def test_schedule_of_another_project_is_reported(beats: Studio, own_redis: RedisServer) -> None:
    """Their brokers differ, and nothing else: only one of the two schedules is sent."""
    of_project(beats, 0)
    beats.start("ours")
    until(lambda: beats.ledger())
    of_project(beats, 1, broker_url=own_redis.url_of(5))
    (beat,) = beats.start("theirs")
    beat.wait_for(STRANGERS)
    assert "the lock server records what was sent of of-0, " in beat.log
    assert "give each project its own singleton_lock_prefix" in beat.log
