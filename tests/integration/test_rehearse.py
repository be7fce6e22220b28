"""`celery locks rehearse`: an app's own task under faults, on workers that the command starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from redis import ConnectionPool, Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_singleton_lock.rehearsal.faults import FAULTS
from celery_singleton_lock.rehearsal.witness import silence_by
from celery_singleton_lock.stores.redis.connection import Connection
from celery_singleton_lock.stores.redis.server import Server
from tests.integration.conftest import Shop, is_alive, until
from tests.integration.operators import APP, EXCLUSIVE, ask, environment_of, locks, of_shop, program
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer

ALL = list(FAULTS)


def rehearsal(*options: str, task: str) -> list[str]:
    return ["rehearse", "--yes", "--timeout", str(LIMIT), *options, f"{APP}.{task}", "report"]


def rehearsed(shop: Shop, task: str, *arguments: str, status: int = 0, **conf: Any) -> dict[str, dict[str, Any]]:
    """The outcome of each fault."""
    shown = of_shop(shop, *rehearsal("--json", *arguments, task=task), **{"singleton_lock_ttl": 5.0, **conf})
    assert shown.returncode == status, shown.stdout + shown.stderr
    return {line["fault"]: line for line in map(json.loads, shown.stdout.splitlines())}


def test_simultaneous_calls_on_two_workers(shop: Shop) -> None:
    outcome = rehearsed(shop, "exclusive", "--fault", "together")["together"]
    assert (outcome["kept"], outcome["runs"], outcome["overlaps"]) == (True, 1, 0)
    with Redis.from_url(shop.conf["broker_url"]) as broker, Redis.from_url(shop.conf["result_backend"]) as results:
        assert [key for key in broker.scan_iter() if b"rehearsal-" in key] == []
        assert [*results.scan_iter()] == []


def test_key_that_differs_from_call_to_call_is_found(shop: Shop) -> None:
    outcomes = rehearsed(shop, "unstably_keyed", "--fault", "together", status=1)
    assert outcomes["together"]["kept"] is False
    assert outcomes["together"]["broken"] == ["1 overlaps"]


def test_worker_that_does_not_start_says_why(shop: Shop) -> None:
    shown = of_shop(shop, *rehearsal("--pool", "nonsense", task="exclusive"))
    assert shown.returncode == 1
    assert "    Error: Invalid value for '-P' / '--pool': 'nonsense'" in shown.stderr
    assert "Error: the workers did not start" in shown.stderr


@pytest.mark.slow
class TestFaults:
    def test_of_a_task_that_is_acknowledged_early(self, shop: Shop) -> None:
        outcomes = rehearsed(shop, "exclusive")
        assert {name: outcome["kept"] for name, outcome in outcomes.items()} == dict.fromkeys(ALL, True)
        assert [outcome["overlaps"] for outcome in outcomes.values()] == [0] * len(ALL)
        (killed,) = outcomes["killed"]["notes"]
        assert "is lost" in killed
        assert "reject_on_worker_lost=True" in killed
        (worker_killed,) = outcomes["worker-killed"]["notes"]
        assert "acks_late=True" in worker_killed
        assert outcomes["worker-killed"]["runs"] == 2

    def test_of_a_task_that_comes_again(self, shop: Shop) -> None:
        shop.conf["singleton_lock_on_conflict"] = "retry"  # The next call may come before the redelivered one.
        outcomes = rehearsed(shop, "rejected_when_lost", "--fault", "killed", "--fault", "redelivered")
        assert outcomes["killed"]["runs"] == 3, "the killed run, its repetition, and the next call"
        assert outcomes["killed"]["notes"] == []
        assert outcomes["redelivered"]["runs"] == 1
        assert all(outcome["kept"] for outcome in outcomes.values())

    def test_worker_that_gives_its_lock_up_too_soon_is_found(self, shop: Shop) -> None:
        words = rehearsal("--fault", "silent", task="exclusive")
        env = environment_of(shop, singleton_lock_ttl=5.0)
        shown = locks(*words, app="tests.integration.impatient_app", env=env)
        assert shown.returncode == 1, shown.stderr
        assert "the run was stopped, though the server was back in time" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_leaves_no_worker_behind(shop: Shop, number: int) -> None:
    env = {**os.environ, **environment_of(shop)}
    words = program("locks", *rehearsal("--fault", "redelivered", task="exclusive"))
    with subprocess.Popen(words, env=env, cwd=ROOT) as command:
        shop.record.wait_for(starts=1)
        workers = children(command.pid)
        assert len(workers) == 2
        command.send_signal(number)
        until(lambda: not any(map(is_alive, workers)))


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


class TestBeforeAnythingRuns:
    def test_asks(self, shop: Shop) -> None:
        asked = ask(shop, "rehearse", EXCLUSIVE, "report", answer="n\n")
        assert asked.exit_code == 1
        assert f"Run {EXCLUSIVE} about 10 times" in asked.stderr
        assert "Aborted!" in asked.stderr

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ([f"{EXCLUSIVE}s", "report"], "did you mean"),
            ([f"{APP}.plain", "report"], "is not exclusive"),
            ([EXCLUSIVE], "cannot be called with these arguments"),
            (
                [EXCLUSIVE, "report", "--fault", "frozen"],
                "'frozen' is not one of 'together', 'killed', 'worker-killed', 'silent', 'redelivered'",
            ),
        ],
    )
    def test_refuses_a_wrong_command_line(self, shop: Shop, words: list[str], says: str) -> None:
        refused = ask(shop, "rehearse", "--yes", *words)
        assert refused.exit_code == 2
        assert says in refused.stderr

    @pytest.mark.parametrize(
        ("conf", "says"),
        [
            ({"task_always_eager": True}, "task_always_eager"),
            ({"singleton_lock_enabled": False}, "singleton_lock_enabled"),
            ({"singleton_lock_backend": "memory://"}, "belong to one process"),
            ({"singleton_lock_scope": "until_executed"}, "is 'until_executed': only a lock that begins with the run"),
            ({"singleton_lock_limit": 2}, "is 2: its runs may overlap"),
            ({"singleton_lock_on_conflict": "replace"}, "is 'replace': its calls stop each other"),
        ],
    )
    def test_refuses_settings_under_which_nothing_can_be_observed(
        self, shop: Shop, conf: dict[str, Any], says: str
    ) -> None:
        refused = ask(shop, "rehearse", "--yes", EXCLUSIVE, "report", **conf)
        assert refused.exit_code == 1
        assert says in refused.stderr


def test_server_whose_answers_are_not_heard(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "receive", Connection.receive)  # To be set back.
    silence = tmp_path / "silence"
    silence_by(silence)
    with closing(Server(ConnectionPool.from_url(redis_server.url_of(2), socket_timeout=0.2))) as server:
        assert server.command("PING") == b"PONG"
        silence.touch()
        with pytest.raises(RedisTimeoutError):
            server.command("PING")
        silence.unlink()
        assert server.command("PING") == b"PONG"
