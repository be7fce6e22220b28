"""Other people's code rewrites the headers of messages: exclusive tasks keep their promises, and users their headers.

Two processes, a worker and a program that sends, are instrumented in the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.result import AsyncResult
from click.testing import CliRunner

from celery_singleton_lock import LockConflict
from celery_singleton_lock.cli import locks
from tests.beside.conftest import conf_of
from tests.beside.environments import python_of
from tests.integration import workers
from tests.patience import LIMIT, until
from tests.programs import ROOT
from tests.recording import Record, overlaps
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

APP = "tests.beside.apps.instrumented"

QUIET = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"}


@dataclass
class Way:
    """How processes are instrumented; `nests`: whether each message then has a dictionary `headers` in its headers."""

    by: str
    nests: bool
    group: str = "beside"

    @property
    def environment(self) -> dict[str, str]:
        found = {"INSTRUMENTATION": self.by}
        if self.by == "datadog":
            found |= {"DD_CELERY_DISTRIBUTED_TRACING": "true", **QUIET}
        if self.by == "newrelic":
            found |= _as_newrelic_admin(Path(python_of(self.group)).parents[1])
        return found


def _as_newrelic_admin(prefix: Path) -> dict[str, str]:
    """The variables that `newrelic-admin run-program` sets for the program that it starts."""
    (bootstrap,) = prefix.glob("lib/*/site-packages/newrelic/bootstrap")
    return {
        "PYTHONPATH": str(bootstrap),
        "NEW_RELIC_PYTHON_PREFIX": str(prefix),
        "NEW_RELIC_PYTHON_VERSION": ".".join(map(str, sys.version_info[:2])),
        "NEW_RELIC_DEVELOPER_MODE": "true",
        "NEW_RELIC_LICENSE_KEY": "0" * 40,
    }


WAYS = {
    "nothing": Way("nothing", nests=False),
    "sentry": Way("sentry", nests=True),
    "sentry-2.53": Way("sentry", nests=True, group="beside-older"),
    "datadog": Way("datadog", nests=True),
    "newrelic": Way("newrelic", nests=False),
    "opentelemetry": Way("opentelemetry", nests=False),
    "receiver": Way("receiver", nests=True),
    "caller": Way("caller", nests=True),
}

#: Moves our header into an inner dictionary, where no worker looks for it.
STRIPS = Way("strips", nests=True)


@dataclass
class Shop:
    """A worker that is ready, and a program that sends to it."""

    way: Way
    app: Celery
    record: Record
    sender: subprocess.Popen[str]

    def send(self, *steps: tuple[str, list[Any]], **options: Any) -> AsyncResult[Any]:
        """Send a message, or a chain of them; fails if it is a duplicate."""
        assert self.sender.stdin is not None
        assert self.sender.stdout is not None
        self.sender.stdin.write(json.dumps([[name, args, options] for name, args in steps]) + "\n")
        self.sender.stdin.flush()
        answer = json.loads(self.sender.stdout.readline())
        assert not answer["is_duplicate"], f"{steps}: another message has the lock"
        assert answer["is_nested"] == [self.way.nests]
        return self.app.AsyncResult(answer["id"])

    def values(self, *results: AsyncResult[Any]) -> list[str]:
        """The jobs that these messages have done; each has the caller's header, if that gave one."""
        found = [result.get(timeout=LIMIT) for result in results]
        user = 7 if self.way.by == "caller" else None
        assert [of for _, of in found] == [user] * len(found), "a header of the caller's is lost"
        return [job for job, _ in found]

    def is_refused(self, task: str, times: int) -> None:
        self.record.wait_for(starts=times, job=f"{task}:refused")

    def waiting(self) -> int:
        """How many wait for the only lock that is held; a copy that was refused is in line a moment later."""
        context = CLIContext(app=self.app, no_color=True, workdir=None)
        return int(json.loads(CliRunner().invoke(locks, ["list", "--json"], obj=context).stdout)["waiters"])


def three_equal_calls_under_join_run_once(shop: Shop, **options: Any) -> None:
    job = f"long-joined-{len(options)}"
    before = len(shop.record.runs("joined:refused"))
    results = [shop.send(("joined", [job]), **options) for _ in range(3)]
    shop.is_refused("joined", before + 2)
    shop.record.let_end(job)
    assert shop.values(*results) == [job] * 3
    assert len(shop.record.runs(job)) == 1


def call_with_headers_of_its_own_by_set(shop: Shop) -> None:
    three_equal_calls_under_join_run_once(shop, headers={"x": "y"})


def options_of_a_call_are_read(shop: Shop) -> None:
    first = shop.send(("joined", ["long-call"]))
    shop.record.wait_for(starts=1, job="long-call")
    with pytest.raises(LockConflict):
        shop.send(("joined", ["long-call"]), singleton_lock={"on_conflict": "raise"}).get(timeout=LIMIT)
    shop.record.let_end("long-call")
    assert shop.values(first) == ["long-call"]


def bound_of_retries_counts(shop: Shop) -> None:
    first = shop.send(("bounded", ["long-bounded"]))
    shop.record.wait_for(starts=1, job="long-bounded")
    with pytest.raises(LockConflict):
        shop.send(("bounded", ["long-bounded"])).get(timeout=LIMIT)
    shop.record.let_end("long-bounded")
    assert shop.values(first) == ["long-bounded"]


def copies_begin_in_the_order_in_which_they_came(shop: Shop) -> None:
    results = [shop.send(("in_line", ["long-line"]))]
    shop.record.wait_for(starts=1, job="long-line")
    for number in range(5):
        results.append(shop.send(("in_line", [f"line-{number}"])))
        shop.is_refused("in_line", number + 1)
    until(lambda: shop.waiting() == 5, "all are in line")
    shop.record.let_end("long-line")
    jobs = ["long-line", *(f"line-{number}" for number in range(5))]
    assert shop.values(*results) == jobs
    runs = [run for run in shop.record.runs() if run.job in jobs]
    assert [run.job for run in runs] == jobs
    assert not overlaps([replace(run, job="in line") for run in runs])  # They share a lock.


def lock_of_a_message_is_free_when_that_has_ended(shop: Shop) -> None:
    for runs in (1, 2):
        assert shop.values(shop.send(("once", ["ends"]))) == ["ends"]
        assert len(shop.record.runs("ends")) == runs


def lock_is_free_after_retries(shop: Shop) -> None:
    for runs in (3, 6):
        assert shop.values(shop.send(("once", ["retried", 2]))) == ["retried"]
        assert len(shop.record.runs("retried")) == runs


def lock_is_free_after_each_step_of_a_chain(shop: Shop) -> None:
    for runs in (1, 2):
        steps = [("once", [f"step-{number}"]) for number in range(3)]
        assert shop.values(shop.send(*steps)) == ["step-2"]
        assert [len(shop.record.runs(f"step-{number}")) for number in range(3)] == [runs] * 3
    assert shop.values(*(shop.send(("once", [f"step-{number}"])) for number in range(3)))


def lock_is_free_after_a_replacement(shop: Shop) -> None:
    for runs in (1, 2):
        result = shop.send(("replaced", ["pair"]))
        assert result.get(timeout=LIMIT)[0] == "pair"
        assert [len(shop.record.runs(job)) for job in ("pair replaced", "pair")] == [runs] * 2


def lock_is_free_after_a_child_was_killed_and_its_message_sent_again(shop: Shop) -> None:
    if shop.way.group == "beside-older":  # Celery does that since 5.7.
        return
    for runs in (2, 4):
        assert shop.values(shop.send(("killed", ["killed"]))) == ["killed"]
        assert len(shop.record.runs("killed")) == runs


SITUATIONS: tuple[Callable[[Shop], None], ...] = (
    three_equal_calls_under_join_run_once,
    call_with_headers_of_its_own_by_set,
    options_of_a_call_are_read,
    bound_of_retries_counts,
    copies_begin_in_the_order_in_which_they_came,
    lock_of_a_message_is_free_when_that_has_ended,
    lock_is_free_after_retries,
    lock_is_free_after_each_step_of_a_chain,
    lock_is_free_after_a_replacement,
    lock_is_free_after_a_child_was_killed_and_its_message_sent_again,
)


@contextmanager
def sending(way: Way, variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    command, environment = [python_of(way.group), "-m", APP], {**os.environ, **variables}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as program,
    ):
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def serving(
    way: Way, worker_with: Callable[..., workers.Worker], server: RedisServer, record: Record
) -> Iterator[tuple[Shop, workers.Worker]]:
    conf = conf_of(server)
    worker = worker_with(APP, group=way.group, environment=way.environment, concurrency=4)
    variables = workers.environment(conf, events=server.url_of(3), record=record.path) | way.environment
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    with sending(way, variables, record.path.with_name("sender.log")) as sender:
        yield Shop(way, app, record, sender), worker


@pytest.mark.parametrize("name", WAYS)
def test_exclusive_tasks_beside_code_that_rewrites_headers(
    worker_with: Callable[..., workers.Worker], redis_server: RedisServer, record: Record, name: str
) -> None:
    failed = {}
    with serving(WAYS[name], worker_with, redis_server, record) as (shop, worker):
        for situation in SITUATIONS:
            try:
                situation(shop)
            except Exception as error:  # noqa: BLE001 - the others are to be tried as well
                failed[situation.__name__] = repr(error)
    assert not failed
    assert "came without the header" not in worker.log


def test_worker_says_once_that_a_header_is_lost_on_the_way(
    worker_with: Callable[..., workers.Worker], redis_server: RedisServer, record: Record
) -> None:
    with serving(STRIPS, worker_with, redis_server, record) as (shop, worker):
        results = [shop.send(("joined", [f"job-{number}"])) for number in range(3)]
        assert shop.values(*results) == [f"job-{number}" for number in range(3)]
    assert worker.log.count("came without the header 'singleton_lock' at the top level of its message") == 1
