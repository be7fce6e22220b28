"""Settings and worker options, as an operator sees them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_singleton_lock import clock
from tests.integration import operators
from tests.integration.conftest import Shop
from tests.integration.workers import Worker, environment
from tests.patience import LIMIT
from tests.redis_server import RedisServer

PASSWORD = "s3cret-of-the-test"


@pytest.fixture
def locked_redis() -> Iterator[RedisServer]:
    """A server that requires a password."""
    with RedisServer(["--requirepass", PASSWORD], password=PASSWORD) as server:
        yield server


def celery(*arguments: str, conf: dict[str, object], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    env = environment(conf, events="redis://127.0.0.1:1", record=tmp_path / "record")
    return operators.celery(*arguments, env=env)


def test_worker_help_shows_the_options(tmp_path: Path) -> None:
    shown = celery("worker", "--help", conf={}, tmp_path=tmp_path).stdout
    for option in ("--singleton-lock-backend", "--singleton-lock-ttl", "--singleton-lock-disable"):
        assert option in shown


def test_options_of_the_worker_beat_the_settings(
    redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_on(redis_server)
    arguments = ("--singleton-lock-backend", own_redis.url_of(5), "--singleton-lock-ttl", "7")
    (worker,) = shop.start("one", arguments=arguments)
    assert f"singleton lock: {own_redis.url_of(5)}, ttl 7 s" in worker.log
    shop.send("exclusive", "report", 60.0)
    shop.record.wait_for(starts=1)
    with own_redis.client(5) as client:
        (key,) = client.keys("*:run")
        assert 2000 < client.pttl(key) <= 7000


def test_disabled_worker_takes_no_lock(own_redis: RedisServer, shop_on: Callable[..., Shop]) -> None:
    shop = shop_on(own_redis)
    (worker,) = shop.start("one", arguments=("--singleton-lock-disable",))
    assert "disabled" in worker.log
    assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
    with own_redis.client(2) as client:
        assert client.keys("*") == []


@pytest.mark.parametrize("ttl", ["0", "x", "1e9"])
def test_bad_ttl_on_the_command_line_is_refused(tmp_path: Path, ttl: str) -> None:
    done = celery("worker", "--singleton-lock-ttl", ttl, conf={"broker_url": "memory://"}, tmp_path=tmp_path)
    assert done.returncode != 0
    assert "--singleton-lock-ttl" in done.stderr


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"singleton_lock_ttl": "30"}, ["singleton_lock_ttl", "'30'", "a number of seconds from 1 to 86400"]),
        ({"singleton_lock_tll": 30}, ["singleton_lock_tll", "did you mean 'singleton_lock_ttl'"]),
        ({"singleton_lock_backend": f"redis://:{PASSWORD}@a;redis://b"}, ["singleton_lock_backend", "Redlock"]),
        (
            {"singleton_lock_backend": "redis://a", "singleton_lock_transport_options": {"sokcet_timeout": 1}},
            ["singleton_lock_backend", "sokcet_timeout"],
        ),
        ({"broker_url": "amqp://"}, ["singleton_lock_backend is not set"]),
        ({"broker_url": "memory://"}, ["memory://", "prefork", "-P threads"]),
        (
            {"singleton_lock_on_duplicate": "replace", "singleton_lock_scope": "until_executed"},
            ["on_duplicate of task", "'replace'", "lock_scope 'until_executed'", "allowed: 'until_executing'"],
        ),
        (
            {"singleton_lock_backend": "redis://a;redis://b;redis://c", "singleton_lock_limit": 2},
            ["lock_limit of task", "is 2", "Redlock", "allowed there: lock_limit 1"],
        ),
    ],
)
def test_worker_with_wrong_settings_does_not_start(tmp_path: Path, conf: dict[str, object], words: list[str]) -> None:
    conf = {"broker_url": "redis://127.0.0.1:1", **conf}
    done = celery("worker", "-c", "2", conf=conf, tmp_path=tmp_path)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stderr + done.stdout


def test_no_password_in_report_log_or_errors(
    tmp_path: Path, redis_server: RedisServer, locked_redis: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_on(redis_server, locks=locked_redis)
    report = celery("report", conf=shop.conf, tmp_path=tmp_path)
    assert "singleton_lock_backend" in report.stdout
    assert PASSWORD not in report.stdout
    (worker,) = shop.start("one")
    assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
    locked_redis.restart()
    locked_redis.kill()
    failed = shop.send("exclusive", "report", singleton_lock={"on_unavailable": "raise"})
    with pytest.raises(Exception, match="lock server") as caught:
        failed.get(timeout=LIMIT)
    assert PASSWORD not in str(caught.value)
    assert PASSWORD not in worker.log


def test_wrong_password_is_reported_and_nothing_is_lost(
    redis_server: RedisServer, locked_redis: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_on(redis_server, singleton_lock_backend=f"redis://:wrong@127.0.0.1:{locked_redis.port}/2")
    (worker,) = shop.start("one")
    result = shop.send("exclusive", "report")
    _wait_for_log(worker, "put back, due in")
    _wait_for_log(worker, "correct the user and the password in singleton_lock_backend")
    assert re.search(
        r"ERROR/MainProcess\] singleton lock: exclusive tasks cannot run now: .* it answered: Auth", worker.log
    )
    assert result.state == "PENDING"
    assert shop.record.runs() == []


@pytest.mark.parametrize("scheme", ["unix", "redis+socket"])
def test_unix_socket(redis_server: RedisServer, shop_on: Callable[..., Shop], scheme: str) -> None:
    query = "db=2" if scheme == "unix" else "virtual_host=2"
    shop = shop_on(redis_server, singleton_lock_backend=f"{scheme}://{redis_server.unix_socket}?{query}")
    shop.start("one")
    shop.send("exclusive", "report", 60.0)
    shop.record.wait_for(starts=1)
    with redis_server.client(2) as client:
        assert client.keys("*:run")


def _wait_for_log(worker: Worker, text: str) -> None:
    deadline = clock.now() + 60
    while text not in worker.log:
        assert clock.now() < deadline, f"no {text!r} in the log"
        clock.sleep(0.02)
