"""`celery locks doctor` on real servers, keys and workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.cli import locks
from celery_singleton_lock.diagnosis.doctor import Diagnosis, diagnose
from celery_singleton_lock.diagnosis.finding import Finding
from celery_singleton_lock.runtime import Runtime
from tests.integration.beats import APP, studio
from tests.integration.conftest import Shop, is_alive, until
from tests.integration.test_cli import locks as locks_of
from tests.integration.test_cli import of_shop
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup


def make_app(**conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"broker_url": "memory://", "singleton_lock_ttl": 2.0, **conf})
    app.task(shared=False, base=SingletonTask, name="bill")(bill)
    return app


def looked_at(backend: str, **conf: Any) -> Diagnosis:
    """The doctor's diagnosis, without asking workers: this app's broker is in memory."""
    app = make_app(singleton_lock_backend=backend, **conf)
    try:
        return diagnose(app, timeout=0.1)
    finally:
        Runtime.of(app).store.close()


def run_here(*arguments: str, **conf: Any) -> Result:
    """Run the command in this process."""
    context = CLIContext(app=make_app(**conf), no_color=True, workdir=None)
    return CliRunner().invoke(locks, ["doctor", "--timeout", "0.1", *arguments], obj=context)


def bill(tenant_id: int) -> None: ...


def serious(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.severity != "note"]


@contextmanager
def user(server: RedisServer, *rules: str) -> Iterator[str]:
    """The URL for a user with these rights."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "locks", "on", ">s3cret", *rules)
        yield f"redis://locks:s3cret@127.0.0.1:{server.port}/0"


class TestOnTheCommandLine:
    """As an operator runs it."""

    def test_all_is_well(self, shop: Shop) -> None:
        (worker,) = shop.start("one")
        # It is ready a moment before it listens.
        until(lambda: shop.app.control.ping([worker.name], timeout=1.0, limit=1))
        shown = of_shop(shop, "doctor")
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "problems: 0" in shown.stdout
        assert f"worker {worker.name}: " in shown.stdout
        assert ", master, 0 replicas, maxmemory-policy noeviction, clock " in shown.stdout
        assert f"worker {worker.name}: it" not in shown.stdout, "a finding"
        assert "ERROR" not in worker.log

    def test_problem_makes_the_status_1_and_comes_first(self, own_redis: RedisServer) -> None:
        with own_redis.client() as client:
            client.set("singleton_lock:1:{job:x}:run", "x")
        shown = run_here("--json", singleton_lock_backend=own_redis.url, singleton_lock_done_ttl=0)
        assert shown.exit_code == 1
        first, *_ = map(json.loads, shown.stdout.splitlines())
        assert (first["severity"], first["subject"]) == ("problem", "singleton_lock:1:{job:x}")

    def test_no_server_no_broker_no_traceback(self) -> None:
        nowhere = "redis://:s3cret@127.0.0.1:1"
        shown = run_here(broker_url=nowhere, singleton_lock_backend=nowhere)
        assert shown.exit_code == 1
        assert "it does not answer: ConnectionError" in shown.output
        assert "workers cannot be asked" in shown.output
        assert "s3cret" not in shown.output


class TestWorkers:
    """Those that differ from this app."""

    def test_old_and_differently_configured_workers_are_reported(self, shop: Shop) -> None:
        (old,) = shop.start("old", app="tests.integration.bare_app", concurrency=1)
        other = {"singleton_lock_prefix": "other", "singleton_lock_backend": shop.conf["broker_url"]}
        ours, shop.conf = shop.conf, {**shop.conf, **other}
        shop.start("strange", concurrency=1, arguments=("--singleton-lock-disable",))
        shop.conf = ours
        for name in ("old@test", "strange@test"):  # They are ready a moment before they listen.
            until(lambda name=name: shop.app.control.ping([name], timeout=1.0, limit=1))
        lines = map(json.loads, of_shop(shop, "doctor", "--json").stdout.splitlines())
        told = [(line["subject"], line["severity"], line["text"]) for line in lines]
        of_workers = [each for each in told if each[0].startswith("worker ")]
        assert sorted((subject, severity) for subject, severity, _ in of_workers) == [
            ("worker old@test", "problem"),
            ("worker strange@test", "problem"),
            ("worker strange@test", "problem"),
            ("worker strange@test", "warning"),
        ]
        for words in (
            "it runs tests.integration.app.exclusive without a lock",
            "singleton_lock_enabled is False there",
            "its locks have the prefix 'other'",
            f"it keeps its locks at {shop.conf['broker_url']}",
        ):
            assert any(words in text for *_, text in of_workers), words
        assert "pidbox" not in old.log, "it is not asked about what it does not know"


class TestOneServer:
    """A Redis."""

    def test_least_rights_are_enough(self, own_redis: RedisServer) -> None:
        with user(own_redis, "~singleton_lock:*", "+@read", "+@write", "+@scripting", "+time") as url:
            diagnosis = looked_at(url)
        assert serious(diagnosis) == []
        assert any("could not be checked" in finding.text for finding in diagnosis.findings)

    @pytest.mark.parametrize(
        "rules",
        [
            ["~singleton_lock:*", "+@read", "+@write"],
            ["~singleton_lock:*", "+@read", "+@write", "+@scripting"],
            ["~singleton_lock:*", "+@all", "-pexpire"],
            ["~other:*", "+@all"],
        ],
    )
    def test_missing_rights_are_told_with_the_command_that_gives_them(
        self, own_redis: RedisServer, rules: list[str]
    ) -> None:
        with user(own_redis, *rules) as url:
            found = serious(looked_at(url))
        (refused,) = [finding for finding in found if finding.text.startswith("no lock can be taken")]
        assert "s3cret" not in str(refused)
        assert refused.remedy == "ACL SETUSER <its user> ~singleton_lock:* +@read +@write +@scripting +time"


class TestLocks:
    """Locks that were left behind, or written by others."""

    def test_foreign_values_are_named(self, own_redis: RedisServer) -> None:
        with own_redis.client() as client:
            client.set("singleton_lock:1:{job:a}:run", "somebody", ex=600)
            client.set("singleton_lock:1:{job:b}:run", "somebody")
            client.set("another:1:{job:d}:run", 1)
        found = serious(looked_at(own_redis.url))
        problem, warning = found
        assert (problem.severity, problem.subject) == ("problem", "singleton_lock:1:{job:b}")
        assert "no time to live" in problem.text
        assert (warning.severity, warning.subject) == ("warning", "singleton_lock:1:{job:a}, singleton_lock:1:{job:b}")
        assert "did not write" in warning.text

    def test_lock_of_a_killed_worker_is_named_and_that_of_a_running_one_is_not(
        self, redis_server: RedisServer, shop_on: Callable[..., Shop]
    ) -> None:
        shop = shop_on(redis_server, singleton_lock_ttl=60)
        # A queue for each: otherwise one worker may take both, and run the second after the first.
        (dead,) = shop.start("dead", arguments=("-Q", "first"))
        shop.start("alive", arguments=("-Q", "second"))
        for job in ("first", "second"):
            shop.send("exclusive", job, 300.0, queue=job)
        runs = shop.record.wait_for(starts=2)
        dead.kill()
        until(lambda: not all(is_alive(run.pid) for run in runs))
        diagnosis = looked_at(shop.conf["singleton_lock_backend"])
        (finding,) = serious(diagnosis)
        assert finding.severity == "warning"
        assert "its holder is gone" in finding.text
        assert ", " not in finding.subject, "the other one is held"


class TestBeat:
    """Which beats run."""

    def test_beats_are_named(self, own_redis: RedisServer, tmp_path: Path) -> None:
        with studio(own_redis, own_redis, tmp_path) as beats:
            both = beats.start("first", "second")
            until(lambda: len(beats.seen()) == 2)
            shown = locks_of("doctor", "--timeout", "0.1", app=APP, env=beats.environment())
        for beat in both:
            assert f"(pid {beat.process.pid}) sends the schedule {APP}" in shown.stdout, shown.stderr


class TestRedlock:
    """Nodes that do not know each other."""

    def test_new_nodes_have_no_vote_and_are_fine_after_one_ttl(self) -> None:
        with Nodes(3) as nodes:
            (finding,) = serious(looked_at(nodes.url))
            assert "it came back without its data, and has no vote for" in finding.text
            until(lambda: serious(looked_at(nodes.url)) == [])

    def test_dead_node_is_a_warning_and_a_dead_majority_a_problem(self) -> None:
        with Nodes(3) as nodes:
            options = {"singleton_lock_transport_options": {"restart_delay": False}}
            for server in nodes.servers:
                server.client().config_set("appendonly", "yes")
            nodes.servers[0].kill()
            (finding,) = serious(looked_at(nodes.url, **options))
            assert (finding.severity, finding.subject) == ("warning", f"127.0.0.1:{nodes.ports[0]}/0")
            nodes.servers[1].kill()
            found = serious(looked_at(nodes.url, **options))
            assert any("no majority: 2 of 3 nodes are needed" in each.text for each in found)

    def test_two_urls_of_one_server_are_a_problem(self, own_redis: RedisServer) -> None:
        urls = ";".join(own_redis.url_of(database) for database in range(3))
        first, *_ = serious(looked_at(urls))
        assert first.severity == "problem"
        assert f"the same server as 127.0.0.1:{own_redis.port}/1, 127.0.0.1:{own_redis.port}/2" in first.text


@pytest.mark.slow
class TestSentinel:
    """A master that Sentinels know."""

    def test_is_examined(self) -> None:
        with SentinelGroup() as group:
            conf = {"singleton_lock_transport_options": group.options}
            diagnosis = looked_at(group.url, **conf)
            assert serious(diagnosis) == []
            assert f"the master {group.name}: redis" in diagnosis.seen[0]
            wrong = serious(looked_at(group.url, singleton_lock_transport_options={"master_name": "nobody"}))
            assert sum("does not know a master" in finding.text for finding in wrong) == len(group.sentinels)
            group.sentinels[0].kill()
            (finding,) = serious(looked_at(group.url, **conf))
            assert (finding.severity, finding.subject.partition(" ")[0]) == ("warning", "Sentinel")


@pytest.mark.slow
class TestCluster:
    """A Redis Cluster."""

    def test_is_examined(self) -> None:
        with Cluster() as cluster:
            diagnosis = looked_at(cluster.url)
            assert serious(diagnosis) == []
            masters = [line for line in diagnosis.seen if ", master, 1 replicas" in line]
            assert len(masters) == 3
            for key in ("singleton_lock:1:{job:a}:run", "singleton_lock:1:{job:b}:run"):
                cluster.client().set(key, 1, ex=600)
            (both,) = serious(looked_at(cluster.url))
            assert both.subject == "singleton_lock:1:{job:a}, singleton_lock:1:{job:b}"
            cluster.flush()
            one, *others = cluster.servers
            one.client().execute_command("CLUSTER", "DELSLOTS", 1)
            assert any("16383 of 16384 slots" in finding.text for finding in serious(looked_at(cluster.url)))
            for server in (one, *others):
                server.kill()
            (finding,) = serious(looked_at(cluster.url))
            assert (finding.severity, "does not answer" in finding.text) == ("problem", True)
