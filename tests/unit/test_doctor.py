"""What the doctor concludes from servers, keys and workers; real ones are in tests/integration/test_doctor.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleton_lock.cli import locks
from celery_singleton_lock.diagnosis.finding import Finding
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.diagnosis.peers import Peer, of_peer
from celery_singleton_lock.diagnosis.servers import in_words, of_locks, of_sentinels, of_servers
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.redis.probe import Probe, SentinelProbe

WELL = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "used_memory": "1000",
    "evicted_keys": "0",
    "aof_enabled": "1",
    "connected_slaves": "0",
    "run_id": "a",
}


def settings(backend: str = "redis://a", **conf: Any) -> Settings:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"singleton_lock_backend": backend, **conf})
    return Settings.from_app(app)


def server(name: str = "a:6379/0", **info: str) -> Probe:
    return Probe(name, info={**WELL, "run_id": name, **info}, ahead=0.0, uncertain=0.001)


def found(*probes: Probe, of: Settings | None = None) -> list[Finding]:
    return list(of_servers(probes, of or settings()))


def test_healthy_server_gives_no_finding() -> None:
    assert found(server()) == []


def test_healthy_nodes_give_no_finding() -> None:
    nodes = (server(f"{name}:6379/0", aof_enabled="0") for name in "abc")
    assert found(*nodes, of=settings("redis://a;redis://b;redis://c")) == []


@pytest.mark.parametrize(
    ("info", "severity", "words"),
    [
        ({"redis_version": "6.0.16"}, "problem", "is version 6.0.16"),
        ({"role": "slave"}, "problem", "is a replica"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": "5000"}, "problem", "it drops any key"),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": "5000"}, "problem", "as all locks have"),
        (
            {"maxmemory_policy": "volatile-lru", "maxmemory": "5000", "evicted_keys": "7"},
            "problem",
            "has dropped 7 keys",
        ),
        ({"maxmemory": "1100"}, "warning", "91% of its memory"),
    ],
)
def test_finding_about_a_server(info: dict[str, str], severity: str, words: str) -> None:
    (finding,) = found(server(**info))
    assert (finding.severity, finding.subject) == (severity, "a:6379/0")
    assert words in finding.text


def test_server_that_does_not_answer_is_a_problem_unless_others_have_votes() -> None:
    silent = Probe("b:6379/0", error="TimeoutError: timeout while reading")
    (alone,) = found(silent)
    assert (alone.severity, "timeout while reading" in alone.text) == ("problem", True)
    three = (server("a:6379/0"), silent, server("c:6379/0"))
    (one_of_three,) = found(*three, of=settings("redis://a;redis://b;redis://c"))
    assert one_of_three.severity == "warning"
    (master,) = found(*three, of=settings("redis+cluster://a"))
    assert master.severity == "problem"


def test_failed_checks_are_reported() -> None:
    (finding,) = found(Probe("a:6379/0"))
    assert (finding.severity, "could not be checked" in finding.text) == ("note", True)


@pytest.mark.parametrize("told", [("fail", "16384"), ("ok", "10923")])
def test_cluster_that_lacks_slots_is_a_problem(told: tuple[str, str]) -> None:
    state, slots = told
    lacking = replace(server(), cluster={"cluster_state": state, "cluster_slots_ok": slots})
    (finding,) = found(lacking, of=settings("redis+cluster://a"))
    assert (finding.severity, f"{slots} of 16384" in finding.text) == ("problem", True)
    well = replace(server(), cluster={"cluster_state": "ok", "cluster_slots_ok": "16384"})
    assert found(well, of=settings("redis+cluster://a")) == []


def test_sentinels_without_a_replica_get_a_warning() -> None:
    options = {"singleton_lock_transport_options": {"master_name": "mymaster"}}
    (finding,) = found(server(), of=settings("sentinel://a", **options))
    assert (finding.severity, "cannot fail over" in finding.text) == ("warning", True)


class TestClocks:
    """Clocks of servers."""

    @pytest.mark.parametrize(("ahead", "words"), [(7.5, "7.5 s ahead of"), (-7.5, "7.5 s behind")])
    def test_wrong_clock_is_reported(self, ahead: float, words: str) -> None:
        (finding,) = found(replace(server(), ahead=ahead))
        assert (finding.severity, words in finding.text) == ("warning", True)

    def test_slow_answer_proves_nothing(self) -> None:
        assert found(replace(server(), ahead=7.5, uncertain=7.0)) == []


class TestRedlock:
    """Nodes of a Redlock."""

    SETTINGS = "redis://a;redis://b;redis://c"

    def test_forgetful_node_that_may_vote_at_once_is_a_problem(self) -> None:
        at_once = settings(self.SETTINGS, singleton_lock_transport_options={"restart_delay": False})
        forgetful = [server(name, aof_enabled="0") for name in "abc"]
        assert [finding.severity for finding in found(*forgetful, of=at_once)] == ["problem"] * 3
        assert found(*(server(name) for name in "abc"), of=at_once) == []


class TestSentinels:
    """Answers of the Sentinels."""

    def test_agreement_gives_no_finding(self) -> None:
        assert list(of_sentinels([SentinelProbe("a", "m:1"), SentinelProbe("b", "m:1")])) == []

    def test_silent_sentinel_and_one_without_a_master_are_reported(self) -> None:
        silent, ignorant = of_sentinels(
            [SentinelProbe("a", error="refused"), SentinelProbe("b"), SentinelProbe("c", "m:1")]
        )
        assert (silent.severity, silent.subject) == ("warning", "Sentinel a")
        assert (ignorant.severity, ignorant.subject) == ("problem", "Sentinel b")

    def test_two_masters_are_reported(self) -> None:
        (finding,) = of_sentinels([SentinelProbe("a", "m:1"), SentinelProbe("b", "n:1")])
        assert "m:1, n:1" in finding.text


class TestLocks:
    """Locks that are held."""

    KEY = "singleton_lock:1:{shop.bill:x}"

    def _found(self, *held: Held) -> list[Finding]:
        return of_locks(HeldLock.of(self.KEY + str(number), each) for number, each in enumerate(held))

    def test_own_lock_gives_no_finding(self) -> None:
        assert self._found(Held(Holder("id", 0, "one@host", 7), "o" * 32, 20.0)) == []

    def test_only_some_of_many_are_named(self) -> None:
        (finding,) = self._found(*(Held(None, f"{number}", 20.0) for number in range(5)))
        assert finding.subject.endswith("{shop.bill:x}2 and 2 more")


class TestWorkers:
    """Answers of workers."""

    OWN = {"version": "1.0", "enabled": True, "backend": "redis://a", "prefix": "singleton_lock", "app": "shop"}

    def _found(self, *, plain: str = "", **its: Any) -> list[Finding]:
        setup = None if its.get("setup", 1) is None else {**self.OWN, **its}
        peer = Peer("one@host", frozenset({"bill"}), frozenset(plain.split()), setup)
        return of_peer(peer, frozenset({"bill", "refund"}), self.OWN)

    def test_worker_that_locks_the_same_way_gives_no_finding(self) -> None:
        assert self._found(plain="mail") == []

    def test_worker_with_other_tasks_gives_no_finding(self) -> None:
        mails = Peer("mails@host", frozenset(), frozenset({"mail"}), None)
        assert of_peer(mails, frozenset({"bill"}), self.OWN) == []

    @pytest.mark.parametrize(
        ("its", "severity", "words"),
        [
            ({"plain": "refund mail"}, "problem", "it runs refund without a lock"),
            ({"prefix": "other"}, "problem", "prefix 'other'"),
            ({"enabled": False}, "problem", "singleton_lock_enabled is False there"),
            ({"backend": "redis://b"}, "warning", "keeps its locks at redis://b"),
            ({"version": "0.9"}, "warning", "runs celery-singleton-lock 0.9"),
            ({"setup": None}, "warning", "does not report how it locks"),
            ({"app": "crm"}, "note", "it runs the app 'crm', this one is 'shop': bill of both have the same locks"),
        ],
    )
    def test_differences_are_reported(self, its: dict[str, Any], severity: str, words: str) -> None:
        (finding,) = self._found(**its)
        assert (finding.severity, finding.subject) == (severity, "worker one@host")
        assert words in finding.text

    def test_worker_without_the_extension_is_a_problem(self) -> None:
        bare = Peer("old@host", frozenset(), frozenset({"bill", "mail"}), None)
        (finding,) = of_peer(bare, frozenset({"bill"}), self.OWN)
        assert (finding.severity, "runs bill without a lock" in finding.text) == ("problem", True)


def test_server_is_described_in_one_line() -> None:
    line = in_words(replace(server(server_name="valkey", connected_slaves="2"), ahead=0.25))
    assert line == "a:6379/0: valkey 7.2.4, master, 2 replicas, maxmemory-policy noeviction, clock +0.250 s"


def test_locks_in_memory_cannot_be_looked_at() -> None:
    app = Celery("shop", set_as_current=False, broker="memory://")
    shown = CliRunner().invoke(locks, ["doctor"], obj=CLIContext(app=app, no_color=True, workdir=None))
    assert shown.exit_code == 1
    assert "belong to one process" in shown.output
