"""The doctor finds options that do not do what they seem to, and is silent where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.concurrency import prefork, solo, thread
from celery.worker.request import Request
from click.testing import CliRunner, Result
from kombu import Queue
from kombu.common import Broadcast

from celery_singleton_lock import InvalidOption, LockConflict, LockUnavailable, SingletonTask
from celery_singleton_lock.cli import locks
from celery_singleton_lock.diagnosis import audit
from celery_singleton_lock.diagnosis.audit import of_app, pool_name
from celery_singleton_lock.diagnosis.finding import Finding, worst_first
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.trust import GIVE_UP_BEFORE, RENEW_AFTER, STEP_SHARE

REDIS = {"broker_url": "redis://localhost:6379/0"}
RABBITMQ = {"broker_url": "amqp://localhost", "singleton_lock_backend": "redis://localhost"}

#: The shortest lease, in seconds.
MIN_TTL = 1.0


def bill(tenant_id: int, month: int) -> None: ...


def refund(tenant_id: int, amount: int) -> None: ...


def make_app(**conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update({**REDIS, **conf})
    return app


def with_task(options: dict[str, Any], conf: dict[str, Any] | None = None) -> Celery:
    app = make_app(**(conf or {}))
    app.task(shared=False, base=SingletonTask, name="bill", **options)(bill)
    return app


def of_task(options: dict[str, Any], conf: dict[str, Any] | None = None) -> list[Finding]:
    return [finding for finding in found_in(with_task(options, conf)) if finding.subject == "bill"]


def found_in(app: Celery) -> list[Finding]:
    return of_app(app, Settings.from_app(app))


@pytest.mark.parametrize("broker", ["redis://localhost", "amqp://localhost", "sentinel://a;sentinel://b", "sqs://"])
def test_defaults_give_no_finding(broker: str) -> None:
    app = with_task({}, {"broker_url": broker, "singleton_lock_backend": "redis://localhost"})
    assert found_in(app) == []


def test_plain_task_gives_no_finding() -> None:
    app = make_app()
    app.task(shared=False, name="plain", reject_on_worker_lost=True)(bill)
    assert found_in(app) == []


def test_plain_task_with_options_of_an_exclusive_one_gets_a_finding() -> None:
    app = with_task({})
    app.task(shared=False, name="plain", lock_key=["tenant_id"], lock_ttl=5)(refund)
    (finding,) = found_in(app)
    assert str(finding) == (
        "plain: it has lock_key, lock_ttl, but it is a plain task, which takes no lock; set base=SingletonTask"
    )
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("options", "conf", "severity", "words"),
    [
        ({"on_conflict": "reject"}, {}, "warning", "no dead-letter queue"),
        ({"autoretry_for": (LockConflict,), "on_conflict": "raise"}, {}, "warning", "autoretry_for has LockConflict"),
        ({"autoretry_for": (LockUnavailable,)}, {}, "warning", "autoretry_for has LockUnavailable"),
        ({"acks_late": True, "lock_wait": 3600}, {}, "warning", "delivered again meanwhile"),
        ({"acks_late": True, "lock_wait": 1800}, RABBITMQ, "warning", "consumer_timeout"),
        (
            {"acks_late": True, "lock_wait": 40},
            {"broker_transport_options": {"visibility_timeout": 30}},
            "warning",
            "delivered again meanwhile",
        ),
        ({"Request": Request}, {}, "problem", "is not a SingletonRequest"),
        ({"Request": "celery.worker.request:Request"}, {}, "problem", "is not a SingletonRequest"),
        ({"on_duplicate": "raise"}, {}, "warning", "on_duplicate does nothing"),
        ({"on_duplicate": "replace"}, {}, "warning", "on_duplicate does nothing"),
        ({"lock_queue_ttl": 60}, {}, "warning", "lock_queue_ttl does nothing"),
        ({"on_send_unavailable": "raise"}, {}, "warning", "on_send_unavailable does nothing"),
        ({"lock_scope": "until_and_while_executing", "on_conflict": "skip"}, {}, "warning", "drops it"),
    ],
)
def test_finding_about_a_task(options: dict[str, Any], conf: dict[str, Any], severity: str, words: str) -> None:
    (finding,) = [finding for finding in of_task(options, conf) if words in finding.text]
    assert finding.severity == severity
    assert finding.remedy


@pytest.mark.parametrize(
    ("options", "conf"),
    [
        ({"on_conflict": "reject", "acks_late": True}, {}),
        ({"reject_on_worker_lost": True, "acks_late": True}, {}),
        ({}, {"task_reject_on_worker_lost": True}),
        ({"autoretry_for": (Exception,)}, {}),
        ({"lock_ttl": 3600}, {}),
        ({"lock_ttl": 60}, {"broker_transport_options": {"visibility_timeout": 30}}),
        ({"lock_wait": 3600}, {}),
        ({"lock_scope": "until_executed", "on_duplicate": "raise", "lock_queue_ttl": 60}, {}),
        ({"lock_scope": "until_and_while_executing"}, {"singleton_lock_on_duplicate": "raise"}),
        ({}, {"singleton_lock_on_duplicate": "raise"}),
    ],
)
def test_sound_options_give_no_warning(options: dict[str, Any], conf: dict[str, Any]) -> None:
    app = with_task(options, conf)
    assert found_in(app) == []


def test_finding_about_many_tasks_is_reported_once() -> None:
    app = make_app(singleton_lock_on_conflict="reject")
    for number in range(7):
        app.task(shared=False, base=SingletonTask, name=f"bill{number}")(bill)
    (only,) = found_in(app)
    assert only.subject == "bill0, bill1, bill2 and 4 more"


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (prefork.TaskPool, "prefork"),
        (thread.TaskPool, "threads"),
        (solo.TaskPool, "solo"),
        ("threads", "threads"),
        ("processes", "prefork"),
        ("celery.concurrency.thread:TaskPool", "threads"),
    ],
)
def test_pools_are_known_by_the_name_of_the_option(pool: Any, name: str) -> None:
    assert pool_name(pool) == name


@pytest.mark.parametrize(
    ("conf", "seconds"),
    [
        ({"broker_url": "redis://localhost"}, 3600),
        ({"broker_url": "rediss://localhost"}, 3600),
        ({"broker_url": "redis+socket:///run/redis.sock"}, 3600),
        ({"broker_url": ["sentinel://a", "sentinel://b"]}, 3600),
        ({"broker_url": "sqs://"}, 1800),
        ({"broker_url": "redis://localhost", "broker_transport_options": {"visibility_timeout": 7}}, 7),
        ({"broker_url": "amqp://"}, None),
    ],
)
def test_visibility_timeout_is_the_brokers(conf: dict[str, Any], seconds: float | None) -> None:
    app = make_app(**{"singleton_lock_backend": "redis://locks", "singleton_lock_done_ttl": 1, **conf})
    said = [finding.text for finding in found_in(app) if finding.subject == "singleton_lock_done_ttl"]
    assert len(said) == (seconds is not None)
    assert all(f"within {seconds:g} s (its visibility timeout)" in text for text in said)


@pytest.mark.parametrize("done_ttl", [0, 60])
def test_forgetting_a_message_while_its_copy_may_still_come_is_a_problem(done_ttl: float) -> None:
    (finding,) = found_in(with_task({}, {"singleton_lock_done_ttl": done_ttl}))
    assert (finding.severity, finding.subject) == ("problem", "singleton_lock_done_ttl")
    assert "3600 s" in finding.text


def test_forgetting_is_harmless_if_no_copy_can_come() -> None:
    conf = {"broker_url": "amqp://", "singleton_lock_backend": "redis://localhost", "singleton_lock_done_ttl": 60}
    assert found_in(with_task({}, conf)) == []


@pytest.mark.parametrize(
    ("conf", "severity", "remedy"),
    [
        ({"singelton_lock_ttl": 60}, "warning", "write singleton_lock_ttl"),
    ],
)
def test_settings_that_nobody_reads_are_reported(conf: dict[str, Any], severity: str, remedy: str) -> None:
    (finding,) = found_in(with_task({}, conf))
    assert (finding.severity, finding.subject) == (severity, next(iter(conf)).lower())
    assert remedy in finding.remedy


def test_python_on_which_locks_are_lost_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "UNSAFE_PYTHON", (3, 10))
    (finding,) = found_in(with_task({}, {}))
    assert (finding.severity, finding.remedy) == ("warning", "use an older one: 3.10 to 3.13")


def test_locks_that_are_switched_off_are_reported() -> None:
    (finding,) = found_in(with_task({}, {"singleton_lock_enabled": False}))
    assert (finding.severity, finding.subject) == ("warning", "singleton_lock_enabled")


class TestSharedName:
    """Tasks with the same lock_name."""

    def _of(self, first: dict[str, Any], second: dict[str, Any], **conf: Any) -> list[Finding]:
        app = make_app(**conf)
        app.task(shared=False, base=SingletonTask, lock_name="ledger", name="bill", **first)(bill)
        app.task(shared=False, base=SingletonTask, lock_name="ledger", name="refund", **second)(refund)
        return found_in(app)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (None, None),
            (["tenant_id"], ["amount"]),
            (["tenant_id"], "tenant:{tenant_id}"),
            (["tenant_id"], None),
        ],
    )
    def test_keys_that_never_meet_are_a_problem(self, first: Any, second: Any) -> None:
        (finding,) = self._of({"lock_key": first}, {"lock_key": second})
        assert (finding.severity, finding.subject) == ("problem", "lock_name ledger")
        assert "never exclude each other" in finding.text

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (["tenant_id"], ["tenant_id"]),
            ([], []),
            ("tenant:{tenant_id}", "tenant:{tenant_id}"),
            (len, ["tenant_id"]),
        ],
    )
    def test_keys_that_may_meet_are_fine(self, first: Any, second: Any) -> None:
        assert self._of({"lock_key": first}, {"lock_key": second}) == []

    def test_reported_problem_does_have_different_keys(self) -> None:
        app = make_app()
        one = app.task(shared=False, base=SingletonTask, lock_name="ledger", lock_key=["tenant_id"])(bill)
        other = app.task(shared=False, base=SingletonTask, lock_name="ledger", lock_key="{tenant_id}")(refund)
        assert one.lock_key_of("a", 1) != other.lock_key_of("a", 1)

    def test_different_limits_are_reported(self) -> None:
        (finding,) = self._of({"lock_key": [], "lock_limit": 2}, {"lock_key": []})
        assert finding.severity == "warning"
        assert "2 for bill; 1 for refund" in finding.text

    @pytest.mark.parametrize("other", ["rerun", "skip"])
    def test_only_the_newest_runs_may_share_a_name_with_other_policies(self, other: str) -> None:
        """Each task has its own newest message."""
        assert self._of({"lock_key": [], "on_conflict": "rerun"}, {"lock_key": [], "on_conflict": other}) == []

    def test_different_ttls_are_a_problem_on_a_redlock_only(self) -> None:
        options = {"lock_key": [], "lock_ttl": 60}, {"lock_key": []}
        (finding,) = self._of(*options, singleton_lock_backend="redis://a;redis://b;redis://c")
        assert (finding.severity, "60 s for bill; 30 s for refund" in finding.text) == ("problem", True)
        assert self._of(*options) == []
        assert self._of(*options, singleton_lock_backend="redis+cluster://a;redis+cluster://b") == []
        sentinels = "sentinel://a;sentinel://b"
        options_of_sentinels = {"master_name": "mymaster"}
        conf = {"singleton_lock_backend": sentinels, "singleton_lock_transport_options": options_of_sentinels}
        assert self._of(*options, **conf) == []


class TestHeartbeatFitsTheTtl:
    """A ttl in which a lease could not be renewed three times is refused; the heartbeat's pace follows the ttl."""

    def test_three_renewals_fit_into_any_ttl(self) -> None:
        assert round(1 / RENEW_AFTER) >= 3

    def test_slowest_allowed_renewal_ends_before_the_lease_is_given_up(self) -> None:
        connect_and_read = 2 * STEP_SHARE
        assert RENEW_AFTER + connect_and_read < 1 - GIVE_UP_BEFORE

    def test_shorter_ttl_is_refused(self) -> None:
        with_task({"lock_ttl": MIN_TTL}).finalize()
        with pytest.raises(InvalidOption, match="lock_ttl"):
            with_task({"lock_ttl": MIN_TTL * 0.99}).finalize()
        with pytest.raises(InvalidOption, match="singleton_lock_ttl"):
            Settings.from_app(make_app(singleton_lock_ttl=MIN_TTL * 0.99))

    def test_shortest_ttl_leaves_the_network_time_to_answer(self) -> None:
        assert MIN_TTL * STEP_SHARE >= 0.05


def test_worst_comes_first() -> None:
    found = [Finding("note", "a", "", ""), Finding("problem", "b", "", ""), Finding("warning", "c", "", "")]
    assert [finding.subject for finding in worst_first(found)] == ["b", "c", "a"]


@pytest.mark.parametrize(("broker", "found"), [("redis://localhost", 1), ("amqp://localhost", 0)])
def test_broadcast_queue_is_reported_where_a_copy_cannot_go_back_to_one_worker(broker: str, found: int) -> None:
    app = with_task({}, {**RABBITMQ, "broker_url": broker, "task_queues": [Broadcast("all"), Queue("usual")]})
    findings = [finding for finding in found_in(app) if "goes to the queue usual" in finding.text]
    assert len(findings) == found


class TestWhatKeepsWorkersFromStarting:
    """The doctor finds it, too."""

    def _run(self, app: Celery) -> Result:
        return CliRunner().invoke(locks, ["doctor", "--offline"], obj=CLIContext(app=app, no_color=True, workdir=None))

    @pytest.mark.parametrize(
        "conf",
        [
            {"singleton_lock_transport_options": {"sokket_timeout": 1}},
            {"singleton_lock_backend": "sentinel://a"},
            {"singleton_lock_beat_ttl": 0},
        ],
    )
    def test_settings_that_only_fail_in_use_are_an_error(self, conf: dict[str, Any]) -> None:
        shown = self._run(with_task({}, conf))
        assert (shown.exit_code, shown.output.splitlines()[1].partition(" singleton_lock_")[0]) == (1, "setting")

    def test_wrong_option_of_a_task_is_an_error_without_a_traceback(self) -> None:
        shown = self._run(with_task({"lock_ttl": -1}))
        assert (shown.exit_code, type(shown.exception)) == (1, SystemExit)
        assert "\noption lock_ttl of task bill is -1" in shown.output

    def test_locks_in_memory_are_reported(self) -> None:
        shown = self._run(with_task({}, {"singleton_lock_backend": "memory://"}))
        assert shown.exit_code == 0
        assert "warning  singleton_lock_backend: the locks are in memory" in shown.output
